"""The road from the host to the device, in traces with known answers."""

import pytest
from hypothesis import given
from traces_made import PUBLIC, Record, anything, call, launched, made, slice_, step, work

from gpubench.trace.analyse import analyse
from gpubench.trace.columns import Trace
from gpubench.trace.load import read
from gpubench.trace.names import Lexicon, window
from gpubench.trace.profile import Launches
from gpubench.trace.slices import launches


def found(*parts: Record | list[Record]) -> Launches | None:
    trace = made(*parts)
    return launches(trace, trace.launchers, window(trace, Lexicon.of(trace)))


def known(*parts: Record | list[Record]) -> Launches:
    answer = found(*parts)
    assert answer is not None
    return answer


def test_the_delay_is_from_the_end_of_the_call_to_the_start_of_the_work() -> None:
    one = known(launched("a", 0, 3, 10, 1), launched("b", 2, 10, 12, 2), launched("c", 4, 12, 13, 3))
    assert (one.calls, one.host, one.delay_median, one.delay_p95) == (3, 3_000, 7_000, 7_000)


def test_work_that_begins_before_its_call_returns_has_no_delay() -> None:
    one = known(call("cudaLaunchKernel", 0, 9, 1), work("a", 4, 20, 1))
    assert (one.delay_median, one.delay_p95, one.late, one.queue_longest) == (0, 0, 1, 0)


def test_a_launch_is_late_where_its_stream_had_nothing_left() -> None:
    one = known(
        launched("a", 0, 2, 10, 1),
        launched("b", 5, 10, 20, 2),
        launched("c", 25, 27, 30, 3),
        launched("d", 26, 28, 29, 4, stream=9),
    )
    assert one.late == 3


def test_the_queue_is_what_was_launched_and_has_not_begun() -> None:
    one = known(
        step(1, 0, 100), launched("a", 9, 20, 60, 1), launched("b", 19, 60, 80, 2), launched("c", 29, 80, 90, 3)
    )
    assert one.queue_longest == 2
    assert one.queue_mean == pytest.approx((10 + 40 + 50) / 100)


def test_work_that_begins_as_another_is_launched_has_left_the_queue() -> None:
    assert known(launched("a", 0, 5, 9, 1), launched("b", 4, 9, 12, 2)).queue_longest == 1


def test_short_kernels_are_counted_and_short_copies_are_not() -> None:
    one = known(
        work("a", 0, 9.999), work("b", 10, 20), work("Memcpy HtoD (Pinned -> Device)", 30, 31, cat="gpu_memcpy")
    )
    assert (one.short, one.short_total) == (1, 9_999)


def test_work_without_a_launch_is_counted_apart() -> None:
    one = known(work("a", 0, 5, 900), launched("b", 4, 6, 9, 1))
    assert (one.calls, one.unlinked, one.unlinked_total) == (1, 1, 5_000)


def test_without_any_launch_there_is_no_delay_to_tell() -> None:
    one = known(work("a", 0, 5))
    assert (one.calls, one.delay_median, one.queue_mean, one.unlinked) == (0, 0, 0.0, 1)


def test_a_graph_is_launched_by_one_call() -> None:
    one = known(call("cudaGraphLaunch", 0, 2, 1), work("a", 3, 4, 1), work("b", 4, 5, 1))
    assert (one.calls, one.works, one.host, one.short) == (1, 2, 2_000, 2)


def test_work_outside_the_window_does_not_count() -> None:
    assert found(step(1, 100, 200), launched("a", 0, 2, 50, 1)) is None


def by_external_id(name: str, start: float, end: float, number: int, cat: str) -> Record:
    return {**slice_(name, start, end, cat), "args": {"External id": number}}


def test_calls_and_works_without_correlation_numbers_are_paired_by_their_external_ids() -> None:
    """As in traces of old releases for ROCm."""
    one = known(
        by_external_id("aten::mm", 0, 20, 1, "cpu_op"),
        by_external_id("hipGetDeviceProperties", 1, 2, 80, "cuda_runtime"),
        by_external_id("hipLaunchKernel", 2, 4, 81, "cuda_runtime"),
        by_external_id("Cijk_A", 10, 50, 81, "kernel"),
    )
    assert (one.calls, one.works, one.unlinked, one.delay_median) == (1, 1, 0, 6_000)


def test_an_external_id_of_several_calls_is_an_operators_and_pairs_nothing() -> None:
    one = known(
        by_external_id("hipLaunchKernel", 2, 4, 7, "cuda_runtime"),
        by_external_id("hipLaunchKernel", 5, 6, 7, "cuda_runtime"),
        by_external_id("Cijk_A", 10, 50, 7, "kernel"),
    )
    assert (one.calls, one.unlinked) == (0, 1)


def test_external_ids_pair_nothing_where_there_are_correlation_numbers() -> None:
    lone = by_external_id("hipLaunchKernel", 2, 4, 7, "cuda_runtime")
    one = known(lone, by_external_id("Cijk_A", 10, 50, 7, "kernel"), launched("b", 60, 62, 70, 1))
    assert (one.calls, one.unlinked) == (1, 1)


@given(anything())
def test_what_is_counted_is_within_bounds_whatever_the_trace_holds(records: list[Record]) -> None:
    trace = made(records)
    around = window(trace, Lexicon.of(trace))
    one = launches(trace, trace.launchers, around)
    if one is None:
        assert not ((trace.device.start >= around.start) & (trace.device.start < around.end)).any()
        return
    assert 0 <= one.delay_median <= one.delay_p95
    assert 0 <= one.queue_mean <= one.queue_longest <= len(trace.device)
    assert one.calls <= one.works
    assert one.works + one.unlinked <= len(trace.device)


# HolisticTraceAnalysis (traceinsight 0.6.1), get_queue_length_summary() of the analysis in test_trace_breakdown, counts
# work from the beginning of its call, and so does not count a little less.
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(("workers", "longest"), [(0, 569), (4, 522)])
def test_the_longest_queue_of_a_real_trace_is_what_another_program_finds(workers: int, longest: int) -> None:
    trace = read(PUBLIC / f"kineto_v100_resnet50_workers{workers}.pt.trace.json.gz")
    around = window(trace, Lexicon.of(trace))
    one = launches(trace, trace.launchers, around)
    assert one is not None
    assert longest - 40 <= one.queue_longest <= longest


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_gpu_whose_clock_is_another_one_is_put_on_that_of_the_cpu(hours: int) -> None:
    def trace(away: float) -> Trace:
        began = 2e10
        calls = [call("cudaLaunchKernel", began + at, began + at + 5, at + 1) for at in range(0, 200, 10)]
        works = [work("gemm", began + away + at + 2, began + away + at + 9, at + 1) for at in range(0, 200, 10)]
        return made(step(1, began, began + 300), calls, works)

    usual, other = (analyse([trace(away)]).ranks[0] for away in (0, hours * 3.6e9))
    assert not any("clock of the GPU" in note for note in usual.notes)
    assert any("clock of the GPU is 180 min 0 s away from that of the CPU" in note for note in other.notes)
    assert usual.device
    assert other.device
    assert usual.device.compute == other.device.compute
