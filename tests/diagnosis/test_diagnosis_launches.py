from typing import Any

import pytest
from cases_made import PERCENT, case, gpu, ids, launches, only, saving, training

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Unanswered
from gpubench.trace.profile import Compiled, FirstCall, Held


def waiting(
    part: int, short: int = 900, late: int = 400, compiled: Compiled | None = None, **settings: Any
) -> ProfileCase:
    rank = gpu(idle={"python_and_launch": part}, launches=launches(short=short, late=late), compiled=compiled)
    return case(rank, settings=training(**settings))


def test_short_kernels_that_wait_for_their_launch_are_compiled_into_graphs() -> None:
    finding = only(waiting(40 * PERCENT))
    assert finding.id == "launch-bound"
    assert finding.fix == {"performance.compile": True, "performance.compile_mode": "reduce-overhead"}
    assert "900 of 1000 kernels and copies last under 10 us; the GPU was already idle before 400 of them" in (
        finding.evidence
    )
    assert saving(finding) == pytest.approx(0.4)


def test_graphs_are_not_asked_for_where_gradients_are_accumulated() -> None:
    assert only(waiting(40 * PERCENT, training__grad_accumulation=4)).fix == {"performance.compile": True}


def test_a_compiled_model_is_next_given_graphs_and_then_only_advice() -> None:
    whole = Compiled(regions=1, graph_breaks=0, compilations=0, compiling=0)
    finding = only(waiting(40 * PERCENT, compiled=whole, performance__compile=True))
    assert finding.fix == {"performance.compile_mode": "reduce-overhead"}
    settings = {"performance.compile": True, "performance.compile_mode": "reduce-overhead"}
    graphs = gpu(idle={"python_and_launch": 40 * PERCENT}, compiled=whole)
    assert only(case(graphs, settings=training() | settings)).fix == {}


def test_what_was_recorded_without_the_compiler_does_not_tell_of_a_compiled_run() -> None:
    findings = diagnose(waiting(40 * PERCENT, performance__compile=True))
    assert findings.findings == []
    assert findings.unanswered == [
        Unanswered("launch-bound", "launches of the compiled model", "profiling.keep_compile"),
    ]


def test_a_tenth_of_the_step_may_be_the_profilers_own() -> None:
    assert ids(waiting(10 * PERCENT)) == ["launch-bound"]
    assert ids(waiting(10 * PERCENT - 1)) == []


def test_long_kernels_that_wait_blame_the_code_between_them() -> None:
    assert only(waiting(40 * PERCENT, short=499)).id == "python-bound"
    assert only(waiting(40 * PERCENT, short=499, late=500)).id == "launch-bound"


def test_a_broken_graph_is_the_cause_where_launches_are_the_symptom() -> None:
    broken = Compiled(regions=4, graph_breaks=3, compilations=0, compiling=0)
    assert ids(waiting(40 * PERCENT, compiled=broken)) == ["graph-breaks"]
    elsewhere = case(gpu(idle={"python_and_launch": 40 * PERCENT}, launches=launches(short=900), compiled=broken))
    assert ids(elsewhere) == ["launch-bound", "graph-breaks"]  # which may be functions that were compiled apart


def test_a_graph_of_many_kernels_is_launched_by_one_call() -> None:
    graphs = gpu(idle={"python_and_launch": 40 * PERCENT}, launches=launches(calls=20, works=2000, short=2000, late=20))
    finding = only(case(graphs))
    assert finding.id == "python-bound"  # graphs are there already
    assert finding.evidence[1].startswith("2000 of 2000 kernels and copies last under 10 us, launched by 20 calls")


def test_what_recording_cost_is_taken_off_before_the_host_is_blamed() -> None:
    rank = gpu(idle={"python_and_launch": 40 * PERCENT}, launches=launches(short=900))
    finding = only(case(rank, overhead=0.2))
    assert saving(finding) == pytest.approx(0.4 * 1.2 - 0.2)
    assert finding.evidence[-1] == (
        "recording made the step 20.0 % longer; without that overhead, 28.0 % of it is left"
    )
    assert ids(case(rank, overhead=0.5)) == ["launch-bound"]
    assert ids(case(rank, overhead=0.6)) == []


def test_few_long_waits_are_no_matter_of_many_launches() -> None:
    def held(*found: Held) -> ProfileCase:
        rank = gpu(idle={"python_and_launch": 40 * PERCENT}, launches=launches(short=900, late=900), held=list(found))
        return case(rank)

    in_call = only(held(Held("aten::mul", 3, 21 * PERCENT), Held("", 1, 9 * PERCENT)))
    assert in_call.id == "slow-calls"
    assert in_call.evidence[1].startswith("in aten::mul: 3 times in 10 steps")
    assert saving(in_call) == pytest.approx(0.21)  # what is outside of it stays
    outside = only(held(Held("", 4, 21 * PERCENT)))
    assert (outside.id, "graph" in outside.advice) == ("python-bound", False)
    assert only(held(Held("aten::mul", 3, 19 * PERCENT))).id == "launch-bound"


def test_delays_of_a_program_that_warms_up_are_not_those_of_its_later_steps() -> None:
    def warming(first: int) -> list[str]:
        idle = {"first_calls": first, "python_and_launch": 15 * PERCENT, "allocator": 15 * PERCENT}
        found = FirstCall("load", "cudaLaunchKernel of a", 1, first)
        return ids(case(gpu(idle=idle, launches=launches(short=900, late=400), first_calls=[found])))

    assert warming(30 * PERCENT) == ["not-warmed-up"]
    assert sorted(warming(29 * PERCENT)) == ["allocator", "launch-bound", "not-warmed-up"]
