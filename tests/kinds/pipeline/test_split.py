import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piped import Line

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.repeats import completed
from gpubench.kinds.pipeline.split import Split, assign


def counts(total: int, world_size: int, split: str) -> list[int]:
    return Split(tuple(assign(total, world_size, split))).counts


@pytest.mark.parametrize(
    ("total", "world_size", "split", "expected"),
    [
        (50, 4, "even", [12, 12, 12, 14]),
        (50, 4, "balanced", [13, 13, 12, 12]),
        (50, 4, "14, 12,12,12", [14, 12, 12, 12]),
        (20, 8, "even", [2] * 7 + [6]),
        (20, 8, "balanced", [3] * 4 + [2] * 4),
        (7, 1, "even", [7]),
        (3, 3, "balanced", [1, 1, 1]),
    ],
)
def test_every_way_to_split(total: int, world_size: int, split: str, expected: list[int]) -> None:
    assert counts(total, world_size, split) == expected


@given(st.integers(1, 200), st.integers(1, 32), st.sampled_from(["even", "balanced"]))
def test_no_evaluation_is_dropped_or_done_twice(total: int, world_size: int, split: str) -> None:
    if world_size > total:
        return
    ranges = assign(total, world_size, split)
    assert [step for start, end in ranges for step in range(start, end)] == list(range(total))
    assert len(ranges) == world_size
    assert all(start < end for start, end in ranges)


def test_even_starts_every_rank_at_its_multiple_of_the_quotient() -> None:
    assert [start for start, _ in assign(51, 4, "even")] == [rank * (51 // 4) for rank in range(4)]


@pytest.mark.parametrize(
    ("total", "world_size", "split", "message"),
    [
        (3, 4, "even", "4 ranks for 3 evaluations: some would have nothing to do"),
        (1, 2, "1,0", "2 ranks for 1 evaluation: some would have nothing to do"),
        (50, 4, "13,13,12", "pipeline.split = '13,13,12' has 3 counts for 4 ranks"),
        (50, 3, "25,25,0", "pipeline.split = '25,25,0' gives rank 2 nothing to do"),
        (50, 3, "20,20,20", "pipeline.split: 20 + 20 + 20 = 60, but the scheduler makes 50 evaluations"),
        (50, 3, "odd", "pipeline.split = 'odd' is not even, balanced or counts like 13,13,12"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(total: int, world_size: int, split: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        assign(total, world_size, split)
    assert refused.value.message == message


def test_a_wrong_split_is_answered_with_a_right_one() -> None:
    with pytest.raises(SettingsError) as refused:
        assign(50, 4, "13,13,13,13")
    assert refused.value.hint == "for example --split 13,13,12,12, or even, or balanced"


def test_the_shares_and_the_cost_of_the_remainder_are_known() -> None:
    even = Split(tuple(assign(50, 4, "even")))
    assert even.remainder_cost == pytest.approx(0.12)
    assert even.sentence() == "50 evaluations over 4 ranks, 12 + 12 + 12 + 14"


def test_a_split_without_a_remainder_costs_nothing() -> None:
    fair = Split(tuple(assign(48, 4, "even")))
    assert fair.remainder_cost == 0
    assert fair.sentence() == "48 evaluations over 4 ranks, 12 each"
    assert Split(((0, 48),)).sentence() == "48 evaluations over 1 rank"


def makespan_of_the_theory(counts: list[int], micro_batches: int) -> int:
    """Of equal evaluations, as docs/pipeline.md has it."""
    return sum(counts) + (micro_batches - 1) * max(counts)


@given(st.integers(1, 16), st.integers(1, 128), st.integers(1, 8), st.sampled_from(["even", "balanced"]))
def test_replicas_on_devices_of_their_own_are_never_slower(
    ranks: int, micro_batches: int, each: int, split: str
) -> None:
    found = counts(ranks * each + each // 2, ranks, split)
    turns = math.ceil(micro_batches / ranks)
    assert turns * sum(found) <= makespan_of_the_theory(found, micro_batches)


@pytest.mark.parametrize("given_counts", [(13, 13, 12, 12), (12, 12, 12, 14), (3, 5, 2), (2, 2, 2), (1, 1), (6,)])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_theory_agrees_with_a_simulated_pipeline(given_counts: tuple[int, ...], micro_batches: int) -> None:
    line = Line(given_counts, micro_batches)
    (found,) = completed([line.repeat()])
    theory = makespan_of_the_theory(list(given_counts), micro_batches)
    assert found.makespan / line.evaluation == pytest.approx(theory, rel=1e-5)
    idle = 1 - sum(times.share("compute") for times in found.times) / len(given_counts)
    assert idle == pytest.approx(1 - micro_batches * sum(given_counts) / len(given_counts) / theory, abs=1e-5)
    if len(set(given_counts)) == 1:  # the bubble of GPipe (Huang et al. 2019, section 2.3)
        ranks = len(given_counts)
        assert idle == pytest.approx((ranks - 1) / (micro_batches + ranks - 1), abs=1e-5)
