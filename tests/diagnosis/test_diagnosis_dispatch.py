"""Operators on a CPU that are too short for what calling them costs."""

from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, ids, only, python, saving, training

from gpubench.diagnosis.case import ProfileCase


def outside(part: int, **known: Any) -> ProfileCase:
    return case(cpu(host={"python": part}), settings=training(), **known)


def test_many_short_times_outside_operators_are_the_cost_of_calling_them() -> None:
    finding = only(outside(25 * PERCENT))
    assert (finding.id, finding.fix) == ("dispatch-bound", {"performance.compile": True})
    assert ids(outside(25 * PERCENT - 1)) == []


def test_what_recording_cost_is_taken_off_time_outside_operators() -> None:
    assert saving(only(outside(40 * PERCENT, overhead=0.3))) == pytest.approx(0.4 * 1.3 - 0.3)
    assert ids(outside(30 * PERCENT, overhead=0.3)) == []


def looping(number: int = 10_000, median: int = 1_200, **known: Any) -> ProfileCase:
    """Steps of 100 ms in which so many operators are called, half of them within `median` nanoseconds."""
    called = python(operators=number * STEPS, operator_median=median, median=1_700)
    return case(cpu(python=called, **known.pop("parts", {})), settings=training(), **known)


def test_thousands_of_short_operators_are_a_finding_though_little_lies_outside_them() -> None:
    finding = only(looping())
    assert (finding.id, finding.fix) == ("dispatch-bound", {"performance.compile": True})
    assert finding.evidence == [
        "10,000 operators a step; half of them take at most 1.20 us",
        "10.0 us of the step per operator, without waiting",
    ]
    assert saving(finding) == pytest.approx(10_000 * 2_900 / 100e6)


def test_an_operator_that_has_its_time_is_not_short() -> None:
    assert ids(looping(median=5_000)) == ["dispatch-bound", "small-batch"]
    assert ids(looping(median=5_001)) == []
    assert ids(looping(number=6_667)) == ["dispatch-bound"]
    assert ids(looping(number=6_666)) == []  # 15 us for each: some of them are long


def test_what_recording_adds_to_each_operator_is_not_the_operators() -> None:
    assert ids(looping(number=4_000)) == []
    finding = only(looping(number=4_000, overhead=0.7))  # 25 us recorded, 14.7 us clean
    assert finding.expected is None
    assert finding.evidence[-1] == "recording made the step 70.0 % longer, which is more than that part of it"


def test_a_step_that_waits_has_no_time_for_its_operators() -> None:
    waits = {"host": {"communication": 90 * PERCENT}}
    assert "dispatch-bound" not in ids(looping(number=1_000, parts=waits))


def test_short_operators_that_a_gpu_runs_are_another_rules() -> None:
    called = python(operators=10_000 * STEPS, operator_median=1_200)
    assert ids(case(gpu(python=called))) == []
