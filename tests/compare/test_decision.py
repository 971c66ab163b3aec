"""What follows from the gains of rounds and from what both versions were seen to do."""

import math
from pathlib import Path

import msgspec
import pytest
from decisions_made import KEPT
from recorded_runs import edit, side, write_run

from gpubench.compare.compare import compare
from gpubench.compare.decision import (
    EXIT_CODES,
    OTHER_LENGTH,
    Observed,
    Ruling,
    from_json,
    in_words,
    observed_of,
    rule,
    sentence,
)
from gpubench.compare.sequential import Look, look
from gpubench.runs.directory import RUN

FASTER = look([math.log(1.1)] * 3)
SLOWER = look([-math.log(1.1)] * 3)
EQUAL = look([0.0] * 3)
OPEN = look([0.0, 0.1, -0.05])
SAME = Observed(work="same", loss="unharmed", loss_reason="its losses are those of the baseline")


@pytest.mark.parametrize(
    ("shown", "found", "answer"),
    [
        (FASTER, SAME, "keep"),
        (SLOWER, SAME, "discard"),
        (EQUAL, SAME, "discard"),
        (OPEN, SAME, "undecided"),
        (FASTER, Observed(work="less", refusals=["does less work: 64 times fewer samples"]), "refused"),
        (SLOWER, Observed(refusals=["does less work: 64 times fewer samples"]), "refused"),
        (FASTER, Observed(work="same", loss="unclear", loss_reason="too few steps"), "undecided"),
        (FASTER, Observed(work="same", peak_memory=3e9), "refused"),
        (FASTER, Observed(work="same", peak_memory=1e9), "keep"),
    ],
)
def test_an_edit_is_kept_only_if_all_of_it_is_proved(shown: object, found: Observed, answer: str) -> None:
    assert isinstance(shown, type(FASTER))
    assert rule(shown, 0.005, found, 2e9 if found.peak_memory else None, "3 rounds do not tell").answer == answer


def test_an_edit_whose_sequences_have_another_length_is_refused(tmp_path: Path) -> None:
    sides = []
    for tokens in (32, 16):
        path = write_run(tmp_path)
        edit(path / RUN, workload={"sample_shape": f"{tokens} tokens", "tokens_per_sample": tokens})
        sides.append(side(path))
    (comparison,) = compare(sides).comparisons
    found = observed_of(comparison, sides[1])
    assert found.refusals == [OTHER_LENGTH]


def test_a_limit_of_memory_that_cannot_be_checked_keeps_nothing() -> None:
    found = rule(FASTER, 0.005, SAME, 2e9, "")
    assert found.answer == "undecided"
    assert "--max-memory" in found.reasons[0]


@pytest.mark.parametrize(
    ("shown", "found", "said"),
    [
        (FASTER, SAME, "keep: 10.0 % faster [+10.0 %, +10.0 %], the same work, loss unharmed"),
        (FASTER, Observed(), "keep: 10.0 % faster [+10.0 %, +10.0 %], the work was not counted"),
        (SLOWER, SAME, "discard: 9.1 % slower [-9.1 %, -9.1 %]"),
        (EQUAL, SAME, "discard: 0 % faster [+0 %, +0 %], which is not 0.5 % or more"),
        (FASTER, Observed(refusals=["does less work: 2 instead of 3"]), "refused: does less work: 2 instead of 3"),
    ],
)
def test_the_first_line_is_the_answer_and_its_reason(shown: object, found: Observed, said: str) -> None:
    assert isinstance(shown, type(FASTER))
    assert sentence(rule(shown, 0.005, found, None, ""), shown, 0.005, "throughput", found) == said


def test_less_memory_is_the_share_that_is_saved() -> None:
    assert in_words(look([math.log(2)] * 3), "peak_memory_rss") == "50.0 % less peak memory [+50.0 %, +50.0 %]"
    assert in_words(look([math.log(2)] * 3), "throughput") == "2 times as fast [2, 2]"
    assert in_words(look([-math.log(1.1)] * 3), "peak_memory_rss").startswith("10.0 % more peak memory")
    assert in_words(look([]), "throughput") == ""


def test_a_very_wide_interval_is_a_range_in_words() -> None:
    wide = Look(rounds=3, gain=1.693, interval=(0.085, 33.6), spread=2.0)
    assert in_words(wide, "throughput") == "0.085 to 34 times as fast"
    assert in_words(wide, "peak_memory_rss") == "0.03 to 12 times the peak memory"


def test_a_gain_of_two_rounds_that_contradict_each_other_is_not_said() -> None:
    undecided = Ruling("undecided", ["the budget of 60 s sufficed for 2 rounds"])
    said = sentence(undecided, look([0.47, -1.7]), 0.005, "throughput", Observed())
    assert said == "undecided: the budget of 60 s sufficed for 2 rounds"
    alike = sentence(undecided, look([0.10, 0.11]), 0.005, "throughput", Observed())
    assert alike.startswith("undecided: 11.1 % faster; ")


def test_each_answer_has_an_exit_code_of_its_own() -> None:
    assert EXIT_CODES == {"keep": 0, "discard": 3, "undecided": 4, "refused": 5}


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 4},
        {"values": [(10.0, 0.0)] * 3},
        {"values": [(10.0, -1.0)] * 3},
        {"runs": []},
        {"metric": "peak_memory_rss"},
        {"schema_version": 99},
    ],
)
def test_a_decision_that_cannot_be_right_is_not_read(changes: dict[str, object]) -> None:
    assert from_json(msgspec.json.encode(KEPT)) == KEPT
    with pytest.raises(ValueError):  # noqa: PT011 - each with its own message
        from_json(msgspec.json.encode(msgspec.structs.replace(KEPT, **changes)))
