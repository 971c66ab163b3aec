import pytest
from cases_made import PERCENT, case, cpu, gpu, ids, only, operator, saving, training
from traces_made import launched, made, slice_, step

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.trace.analyse import analyse

EIGHT_CORES = {"cpu.usable_cores": 8}


def waiting(percent: int, **settings: object) -> ProfileCase:
    return case(gpu(idle={"data_loader": percent * PERCENT}), settings=training(**settings), environment=EIGHT_CORES)


def test_a_loader_without_workers_gets_as_many_as_the_rest_of_the_step_needs_and_one_more() -> None:
    finding = only(waiting(60, data__workers=0))
    assert finding.id == "too-few-workers"
    assert finding.fix == {"data.workers": 3}  # 0.6 of a step for a batch, in the remaining 0.4: two, and one
    assert finding.severity == "high"


def test_workers_never_exceed_the_cores_of_a_rank() -> None:
    settings = {"data__workers": 1, "distributed__world_size": 4}
    assert only(waiting(90, **settings)).fix == {"data.workers": 2}


def test_a_step_cannot_become_shorter_than_a_batch_takes_the_workers() -> None:
    finding = only(waiting(90, data__workers=6))
    assert finding.fix == {"data.workers": 8}
    assert saving(finding) == pytest.approx(0.25)  # 6 steps of work for 8 workers


def test_where_every_core_has_a_worker_the_samples_are_what_is_too_dear() -> None:
    finding = only(waiting(30, data__workers=8))
    assert (finding.id, finding.fix) == ("data-loading", {})
    assert saving(finding) == pytest.approx(0.3)


def test_a_trace_from_elsewhere_gets_advice_and_no_override() -> None:
    finding = only(case(gpu(idle={"data_loader": 40 * PERCENT, "queued": 10 * PERCENT})))
    assert finding.fix == {}
    assert "num_workers" in finding.advice
    assert "80.0 % of that under enumerate(DataLoader)" in finding.evidence[0]


def test_a_loader_that_takes_less_than_its_threshold_is_left_alone() -> None:
    assert ids(waiting(5, data__workers=0)) == ["too-few-workers"]
    assert ids(waiting(4, data__workers=0)) == []


def test_workers_that_start_again_for_each_epoch_are_to_be_kept() -> None:
    metrics = {"step_time": 0.1, "phase_worker_start": 0.012}
    for kept, expected in ((False, ["restarted-workers"]), (True, []), (None, [])):
        settings = {"data.workers": 2} | ({} if kept is None else {"data.persistent_workers": kept})
        assert ids(case(cpu(), settings=settings, metrics=metrics)) == expected
    finding = only(case(cpu(), settings={"data.workers": 2, "data.persistent_workers": False}, metrics=metrics))
    assert finding.fix == {"data.persistent_workers": True}
    assert saving(finding) == pytest.approx(0.12)
    rare = metrics | {"phase_worker_start": 0.004}
    assert ids(case(cpu(), settings={"data.persistent_workers": False}, metrics=rare)) == []


def test_the_clean_run_decides_where_there_is_one() -> None:
    slowed_by_recording = case(
        gpu(idle={"data_loader": 20 * PERCENT}),
        settings=training(data__workers=0),
        environment=EIGHT_CORES,
        metrics={"step_time": 0.08, "phase_data_wait": 0.002},
    )
    assert ids(slowed_by_recording) == []
    truly_slow = case(
        gpu(),
        settings=training(data__workers=0),
        environment=EIGHT_CORES,
        metrics={"step_time": 0.08, "phase_data_wait": 0.04, "starved_steps": 0.9},
    )
    assert only(truly_slow).evidence[0] == (
        "a step without the profiler takes 80 ms and waits 50.0 % of it for its batches"
    )


def on_cpu(cores: int, loading: int = 40, computing: int = 0, workers: int = 0, threads: int = 2) -> ProfileCase:
    """Threads that compute for the rest of the step, and a loader that does for `computing` percent of it."""
    within = [
        operator("aten::conv2d", 0, host=(100 - loading) * PERCENT), operator("aten::sum", 0, host=computing * PERCENT),
    ]  # fmt: skip
    settings = training(data__workers=workers, performance__cpu_threads=threads)
    rank = cpu(host={"data_loader": loading * PERCENT}, operators=within)
    return case(rank, settings=settings, environment={"cpu.usable_cores": cores})


def test_threads_that_compute_leave_no_core_to_a_loader_that_computes() -> None:
    assert only(on_cpu(2, computing=40)).id == "data-loading"
    assert only(on_cpu(3, computing=40, threads=3)).id == "data-loading"
    free = next(one for one in diagnose(on_cpu(3, computing=40)).findings if one.id == "too-few-workers")
    assert free.fix == {"data.workers": 1}


def test_a_loader_that_waits_needs_no_core() -> None:
    finding = only(on_cpu(2))
    assert (finding.id, finding.fix) == ("too-few-workers", {"data.workers": 2})
    assert "cores are free" not in finding.title
    assert "no core is free" in finding.advice
    assert saving(finding) == pytest.approx(0.4)
    assert saving(only(on_cpu(2, computing=30))) == pytest.approx(0.1)


def test_a_single_core_is_not_said_to_be_free() -> None:
    finding = only(on_cpu(1, threads=1))
    assert finding.fix == {"data.workers": 1}
    assert "data.workers is 0, 1 thread computing, and each rank has 1 core" in finding.evidence


def test_on_a_cpu_the_main_threads_time_in_the_loader_counts() -> None:
    finding = only(case(cpu(host={"data_loader": 31 * PERCENT})))
    assert finding.id == "data-loading"
    assert saving(finding) == pytest.approx(0.31)


@pytest.mark.parametrize(
    ("iterator", "cause", "advice"),
    [
        ("#_MultiProcessingDataLoaderIter.__next__", "the worker processes of the DataLoader", "make samples cheaper"),
        ("#_SingleProcessDataLoaderIter.__next__", "the program's own process", "num_workers=..."),
        ("", "the program's own process, or by too few workers", "num_workers=..."),
    ],
)
def test_the_iterator_in_a_trace_says_whether_workers_exist(iterator: str, cause: str, advice: str) -> None:
    loading = slice_(f"enumerate(DataLoader){iterator}", 0, 60, cat="user_annotation")
    trace = made(step(1, 0, 100), loading, slice_("aten::mm", 61, 65), launched("gemm", 62, 66, 99, 1))
    (finding,) = [one for one in diagnose(ProfileCase(analyse([trace]))).findings if one.id == "data-loading"]
    assert cause in finding.cause
    assert finding.cause.endswith("process") == ("Single" in iterator)
    assert advice in finding.advice
