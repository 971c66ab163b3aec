"""What a pipeline's run says about which of its ranks or hand-offs limits it, by measured times."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piped import Line, sequential

from gpubench.kinds.pipeline.repeats import PipeRepeat, completed
from gpubench.kinds.pipeline.results import summarise


def said(line: Line, repeats: int = 2) -> str:
    found = summarise([line.repeat(number) for number in range(repeats)], line.samples)
    assert found.pipeline
    return found.pipeline.bottleneck or ""


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_slowed_rank_is_the_bottleneck_wherever_it_is(rank: int, repeats: int) -> None:
    found = said(Line((7, 7, 7), slow={rank: 1.8}, jitter=0.05), repeats)
    assert found.startswith(f"rank {rank} is the bottleneck: it takes 1.2")
    assert re.search(
        r"\(7 evaluations of 1[78]\d ms\) for each sample, "
        r"and rank \d takes [67]\d\d ms \(7 evaluations of 1?\d\d(\.\d)? ms\)$",
        found,
    )


def test_a_slowed_rank_with_fewer_evaluations_is_the_bottleneck_and_not_the_one_with_more() -> None:
    found = said(Line((10, 11), slow={0: 217 / 123}, evaluation=0.123, jitter=0.02))
    assert found.startswith("rank 0 is the bottleneck: it takes 2.1")
    assert "(10 evaluations of 21" in found
    assert ", and rank 1 takes 1.3" in found


def test_equal_ranks_have_no_bottleneck() -> None:
    for jitter in (0.0, 0.1, 0.3):
        assert said(Line((7, 7, 7), jitter=jitter)).startswith("no rank is the bottleneck: rank "), jitter


def test_a_rank_with_notably_more_evaluations_is_the_bottleneck() -> None:
    assert said(Line((12, 12, 12, 14), jitter=0.02)).startswith("rank 3 is the bottleneck: it takes 1.4")
    assert said(Line((50, 51), jitter=0.02)).startswith("no rank is the bottleneck")  # 2 % more


def test_what_evaluations_cost_counts_and_not_how_many_there_are() -> None:
    dear = dict.fromkeys(range(3), 4.0)  # the first three are four times as dear
    assert said(Line((4, 8), dear=dear, jitter=0.02)).startswith("rank 0 is the bottleneck")
    assert said(Line((3, 12), dear=dear)).startswith("no rank is the bottleneck")


def test_decoding_is_work_of_the_last_rank() -> None:
    found = said(Line((5, 5), decode=0.4, jitter=0.01))
    assert found.startswith("rank 1 is the bottleneck")
    assert "of other work)" in found


def test_two_ranks_that_take_equally_long_are_named_together() -> None:
    assert said(Line((4, 8, 8), jitter=0.01)).partition(" are")[0] in ("rank 1 and rank 2", "rank 2 and rank 1")


@pytest.mark.parametrize("sender", [0, 1])
def test_a_slow_link_is_the_bottleneck(sender: int) -> None:
    found = said(Line((4, 4, 4), slow_transfer={sender: 0.9}, jitter=0.03))
    edge = f"rank {sender} to rank {sender + 1}"
    assert found.startswith(f"the hand-off from {edge} is the bottleneck: it takes 900 ms for each sample, and rank ")


def test_a_hand_off_that_is_slow_and_hidden_is_not_the_bottleneck() -> None:
    assert said(Line((4, 8), slow_transfer={0: 0.5}, jitter=0.03)).startswith("rank 1 is the bottleneck")


def test_a_single_late_hand_off_is_named_and_is_no_bottleneck() -> None:
    found = said(Line((4, 4), transfer=0.01, late={(0, 2): 2.0}), 1)
    assert found.startswith("no rank is the bottleneck")
    assert found.endswith("; the hand-off from rank 0 to rank 1 took 2.01 s with sample 2, and usually takes 10.00 ms")


def test_a_single_delay_of_a_rank_is_named_and_is_no_bottleneck() -> None:
    found = said(Line((4, 4, 4), delays={(1, 5): 3.0}, jitter=0.02), 2)
    assert found.startswith("no rank is the bottleneck")
    assert "; rank 1 took 3.4" in found
    assert " for sample 5, and usually takes 40" in found or " for sample 5, and usually takes 39" in found
    assert found.endswith("(1 more delay of this kind)")  # that of the other repeat


def test_one_sample_does_not_tell_which_rank_is_slower() -> None:
    assert said(Line((4, 8), micro_batches=1), 1).startswith("which rank is the bottleneck is unknown")
    assert said(Line((4,))) == ""


def test_the_better_split_follows_the_speed_of_the_ranks() -> None:
    line = Line((10, 10), slow={0: 2.0}, jitter=0.01)
    (warning,) = [one for one in summarise([line.repeat(0), line.repeat(1)], line.samples).warnings if "--split" in one]
    assert warning.startswith("rank 0 works 2")
    assert "--split 7,13 comes to 1.4" in warning or "--split 7,13 comes to 1.3" in warning


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(1, 6),
    st.floats(0, 0.5),
    st.floats(0, 0.3),
    st.dictionaries(st.integers(0, 3), st.floats(0.2, 4), max_size=4),
    st.integers(1, 3),
    st.floats(0, 0.3),
    st.integers(1, 3),
)
def test_no_ideal_is_worse_than_what_was_measured(
    counts: list[int],
    micro_batches: int,
    jitter: float,
    transfer: float,
    slow: dict[int, float],
    in_flight: int,
    decode: float,
    repeats: int,
) -> None:
    line = Line(tuple(counts), micro_batches, 1, 0.1, slow, jitter, None, None, None, transfer, None, in_flight, decode)
    made = [line.repeat(number) for number in range(repeats)]
    for repeat in made:
        repeat.baselines.append(sequential(line, repeat.number))
    found = summarise(made, line.samples)
    for ideal, measured in zip(found["ideal_bubble"].repeats, found["bubble"].repeats, strict=True):
        assert ideal <= measured + 1e-4
    assert max(found["pipeline_efficiency"].repeats) <= 1
    assert "replicas" not in "".join(metric.name for metric in found.metrics)  # they were not measured


def test_the_ideal_of_ranks_of_different_speed_is_not_that_of_equal_ones() -> None:
    """Two ranks that are equally busy, though one makes twice the evaluations, wait for nothing but fill and drain."""
    line = Line((4, 8), micro_batches=6, slow={0: 2.0})
    found = summarise([line.repeat()], line.samples)
    assert found["bubble"].estimate == pytest.approx(1 / 7, abs=1e-4)
    assert found["ideal_bubble"].estimate == pytest.approx(1 / 7, abs=1e-4)


def test_the_ideal_needs_no_correction_by_the_makespan() -> None:
    line = Line((2, 3, 2), micro_batches=12, jitter=0.5, transfer=0.02, in_flight=1)
    repeats: list[PipeRepeat] = [line.repeat(number) for number in range(5)]
    for one in completed(repeats):
        assert summarise([one.repeat], line.samples)["pipeline_efficiency"].estimate < 1
