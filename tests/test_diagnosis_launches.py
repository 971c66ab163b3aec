from typing import Any

import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, launches, only, phase, piping, saving, training

from gpubench.diagnosis.case import Case
from gpubench.diagnosis.diagnose import diagnose
from gpubench.findings import Unanswered
from gpubench.trace.profile import Compiled


def waiting(part: int, short: int = 900, late: int = 400, compiled: Compiled | None = None, **settings: Any) -> Case:
    rank = gpu(idle={"python_and_launch": part}, launches=launches(short=short, late=late), compiled=compiled)
    return case(rank, settings=training(**settings))


def test_short_kernels_that_wait_for_their_launch_are_compiled_into_graphs() -> None:
    finding = only(waiting(40 * PERCENT))
    assert finding.id == "launch-bound"
    assert finding.fix == {"performance.compile": True, "performance.compile_mode": "reduce-overhead"}
    assert "900 of 1000 launches bring a kernel under 10 us; after 400 of them the GPU had already run dry" in (
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


def test_on_a_cpu_time_outside_operators_is_pythons() -> None:
    def outside(part: int, other: int = 0) -> Case:
        return case(cpu(host={"python": part}, phases=[phase("other", host=other)]), settings=training())

    assert only(outside(25 * PERCENT)).fix == {"performance.compile": True}
    assert ids(outside(25 * PERCENT - 1)) == []
    elsewhere = only(outside(40 * PERCENT, other=30 * PERCENT))
    assert elsewhere.fix == {}
    assert "between its phases" in elsewhere.cause


def short_work(total: int, held: float = 20e9, **known: Any) -> Case:
    rank = gpu(launches=launches(short=990, short_total=total))
    environment = {"gpus": [{"memory_bytes": 80e9}]}
    return case(rank, metrics={"peak_memory_reserved": held}, environment=environment, **known)


def test_a_busy_gpu_with_short_kernels_gets_a_larger_batch() -> None:
    finding = only(short_work(80 * PERCENT, settings=training(training__batch_size=8)))
    assert (finding.id, finding.fix) == ("small-batch", {"training.batch_size": 16})
    assert saving(finding) == pytest.approx(0.4)  # per sample: twice as many in the same time
    assert ids(short_work(50 * PERCENT - 1)) == []


def test_a_batch_is_not_doubled_where_memory_is_half_full() -> None:
    assert only(short_work(80 * PERCENT, held=50e9, settings=training(training__batch_size=8))).fix == {}


def test_micro_batches_grow_no_larger_than_the_samples_there_are() -> None:
    settings = piping(work__micro_batch=3, work__samples=8)
    assert only(short_work(80 * PERCENT, settings=settings)).fix == {"work.micro_batch": 6}
    settings = piping(work__micro_batch=6, work__samples=8)
    assert only(short_work(80 * PERCENT, settings=settings)).fix == {}
