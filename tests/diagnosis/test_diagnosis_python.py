"""A few long times in Python, told from many short ones."""

from typing import Any

import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, launches, only, phase, python, saving, stretch, training
from traces_made import call, made

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Unanswered
from gpubench.trace.analyse import analyse
from gpubench.trace.profile import PythonStretch


def sleeping(part: int, **known: Any) -> ProfileCase:
    slept = stretch(part, after="aten::to", module="net.blocks", where=known.pop("where", "train.py:21"))
    missing = {} if slept.where else {"stacks": "with_stack"}
    host = {"python": part + PERCENT}
    rank = cpu(host=host, python=python(slept, stretch(PERCENT // 2), median=2_000), missing=missing)
    return case(rank, settings=training(), **known)


def test_a_long_time_between_operators_is_named_and_the_compiler_does_not_mend_it() -> None:
    finding = only(sleeping(76 * PERCENT))
    assert (finding.id, finding.fix) == ("python-bound", {})
    assert saving(finding) == pytest.approx(0.76)
    assert finding.evidence == [
        "the longest time outside any operator is 76 ms",
        "in forward of net.blocks, after aten::to at train.py:21: 1 time a step, 76 ms a step (76.0 %)",
    ]
    assert finding.cause.startswith("your code between operators")
    assert "compile" not in finding.advice


def test_without_stacks_the_option_that_tells_the_line_is_named() -> None:
    found = diagnose(sleeping(76 * PERCENT, where=None))
    needs = "profiling.with_stack"
    assert found.unanswered == [Unanswered("python-bound", "file and line of the code between operators", needs)]
    assert diagnose(sleeping(76 * PERCENT)).unanswered == []


def test_a_quarter_of_a_recorded_step_may_be_the_profilers_and_a_tenth_of_a_clean_one_is_not() -> None:
    assert ids(sleeping(25 * PERCENT)) == ["python-bound"]
    assert ids(sleeping(25 * PERCENT - 1)) == []
    assert saving(only(sleeping(25 * PERCENT, overhead=0.1))) == pytest.approx(0.25 * 1.1 - 0.1)
    assert ids(sleeping(19 * PERCENT, overhead=0.1)) == ["python-bound"]
    assert ids(sleeping(18 * PERCENT, overhead=0.1)) == []


def in_phase(name: str, *phases: str) -> str:
    found = python(stretch(40 * PERCENT, phase=name))
    rank = cpu(host={"python": 40 * PERCENT}, python=found, phases=[phase(one, host=1) for one in phases])
    return only(case(rank)).cause


def test_the_loop_is_blamed_for_time_between_its_phases() -> None:
    assert "between the phases" in in_phase("other", "forward", "other")
    assert "between the phases" not in in_phase("forward", "forward", "other")


def test_in_the_backward_pass_it_is_hooks_and_not_the_code_of_the_loop() -> None:
    assert "hooks" in in_phase("backward", "backward", "other")


def test_a_trace_without_phases_has_no_time_between_them() -> None:
    assert "between the phases" not in in_phase("other", "other")


def fed(waiting: int, *found: PythonStretch, **known: Any) -> ProfileCase:
    rank = gpu(idle={"python_and_launch": waiting}, launches=launches(short=900), python=python(*found))
    return case(rank, settings=training(), **known)


def test_a_gpu_that_waits_for_one_long_stretch_is_not_bound_by_its_launches() -> None:
    finding = only(fed(40 * PERCENT, stretch(30 * PERCENT, where="train.py:21")))
    assert (finding.id, finding.fix) == ("python-bound", {})
    assert saving(finding) == pytest.approx(0.3)
    assert saving(only(fed(40 * PERCENT, stretch(70 * PERCENT)))) == pytest.approx(0.4)  # the rest, the GPU computes


def test_stretches_that_explain_less_than_half_of_the_waiting_leave_it_to_launches() -> None:
    assert ids(fed(40 * PERCENT, stretch(20 * PERCENT))) == ["python-bound"]
    assert ids(fed(40 * PERCENT, stretch(20 * PERCENT - 1))) == ["launch-bound"]


def test_stretches_too_short_to_be_told_from_recording_leave_it_to_launches() -> None:
    assert ids(fed(12 * PERCENT, stretch(10 * PERCENT))) == ["python-bound"]
    assert ids(fed(12 * PERCENT, stretch(10 * PERCENT - 10))) == ["launch-bound"]


def test_a_gpu_that_is_busy_meanwhile_does_not_wait_for_python() -> None:
    assert ids(fed(10 * PERCENT - 1, stretch(60 * PERCENT))) == []


def test_a_recording_without_operators_says_that_it_captured_nothing_and_nothing_of_python() -> None:
    """As one of a profiler that was stopped before the program began, which only waits for the device."""
    empty = made(call("cudaDeviceSynchronize", 0, 185_000, 1), call("cudaGetDeviceCount", 190_000, 211_000, 2))
    found = ProfileCase(analyse([empty]))
    assert diagnose(found).headline.startswith("the recording captured nothing of what the program did in the trace")
    assert not diagnose(found).findings
    launched_late = gpu(idle={"python_and_launch": 60 * PERCENT}, python=python(stretch(50 * PERCENT), operators=0))
    assert "between operators" not in " ".join(one.title for one in diagnose(case(launched_late)).findings)
