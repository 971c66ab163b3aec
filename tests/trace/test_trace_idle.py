"""Why the device had nothing to do, in traces with known answers."""

import pytest
from hypothesis import given
from traces_made import LOADER, PUBLIC, Record, anything, call, launched, made, slice_, step, work

from gpubench.trace.columns import Spans, Trace, join
from gpubench.trace.device import held, idle_by_call, idle_causes, idle_within
from gpubench.trace.load import read
from gpubench.trace.names import Window
from gpubench.trace.profile import Cause, Held
from gpubench.trace.slices import ProgramSlices

UPLOAD, DOWNLOAD = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


def causes_of(trace: Trace) -> tuple[Window, dict[Cause, Spans]]:
    program = ProgramSlices.of(trace)
    return program.window, idle_causes(program)


def idle(*parts: Record | list[Record]) -> dict[str, float]:
    """Microseconds of each cause that there is."""
    _, causes = causes_of(made(*parts))
    return {cause: spans.length / 1000 for cause, spans in causes.items() if spans.length}


def test_a_gap_under_the_data_loader_is_its_own() -> None:
    assert idle(launched("a", 0, 2, 10, 1), slice_(LOADER, 5, 60), launched("b", 70, 72, 80, 2)) == {
        "data_loader": 50,
        "python_and_launch": 11,
        "queued": 1,
    }


def test_a_gap_before_queued_work_is_not_the_hosts() -> None:
    assert idle(launched("a", 0, 2, 10, 1), launched("b", 3, 15, 20, 2)) == {"queued": 5}


def test_a_gap_before_a_late_launch_is_the_hosts() -> None:
    found = idle(launched("a", 0, 2, 10, 1), launched("b", 14, 20, 25, 2))
    assert found == {"python_and_launch": 5, "queued": 5}  # until the launch call returned, and from there on


def test_work_launched_before_the_trace_began_is_backlog() -> None:
    assert idle(work("a", 0, 5, 901), work("b", 8, 10, 902), launched("c", 10, 12, 20, 1)) == {
        "backlog": 3,
        "python_and_launch": 1,
        "queued": 1,
    }


def test_work_without_a_launch_amid_work_that_has_one_leaves_the_cause_unknown() -> None:
    assert idle(launched("a", 0, 2, 10, 1), work("b", 15, 20, 77)) == {"unknown": 5}


def test_where_no_launch_was_recorded_the_cause_is_unknown() -> None:
    assert idle(slice_("aten::mm", 0, 1), work("a", 2, 10), work("b", 15, 20, 77), step(1, 0, 20)) == {"unknown": 7}


def test_work_without_a_launch_was_launched_before_what_follows_it_on_its_stream() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        call("cudaStreamSynchronize", 5, 60),
        work("b", 40, 45, 77),
        launched("c", 3, 46, 50, 2),
    )
    assert found == {"queued": 30 + 1}


def test_a_wait_is_no_cause_once_the_next_work_is_launched() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        launched("b", 4, 463_000, 463_010, 2),
        slice_("aten::item", 6, 463_012),
        call("cudaStreamSynchronize", 7, 463_011),
    )
    assert found == {"queued": 463_000 - 10}


def test_loading_and_allocating_are_no_cause_once_the_next_work_is_launched() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        slice_(LOADER, 5, 300, thread=1),
        launched("b", 100, 200, 210, 2, thread=2),
        call("cudaMalloc", 301, 390),
        launched("c", 305, 400, 410, 3, thread=2),
    )
    assert found == {
        "data_loader": (101 - 10) + (300 - 210),
        "queued": 99 + (400 - 306),
        "allocator": 5,
        "python_and_launch": 1,
    }


def test_a_copy_to_the_host_was_asked_for_when_its_call_began() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        call("cudaMemcpyAsync", 4, 5_020, 2),
        work(DOWNLOAD, 5_010, 5_015, 2, cat="gpu_memcpy"),
        launched("b", 5_030, 5_031, 5_040, 3),
    )
    # The call may need 20 us to begin the copy once the device is free; for the rest of the gap it only waits.
    assert found == {"synchronisation": 20 + 16, "queued": 5_000 - 20}


def test_allocating_holds_up_the_device() -> None:
    assert idle(launched("a", 0, 2, 10, 1), call("cudaMalloc", 8, 18), launched("b", 19, 21, 25, 2)) == {
        "allocator": 8,
        "python_and_launch": 2,
        "queued": 1,
    }


def test_a_wait_under_way_as_the_gap_began_opened_it_for_as_long_as_it_took() -> None:
    found = idle(launched("a", 0, 2, 30, 1), call("cudaStreamSynchronize", 26, 32), launched("b", 60, 61, 70, 2))
    # 2 us of the wait lie in the gap; without its 6 us the launch would have come 6 us earlier.
    assert found == {"synchronisation": 6, "python_and_launch": 25}


def test_a_wait_longer_than_the_gap_owns_all_of_it_until_the_next_launch() -> None:
    found = idle(launched("a", 0, 2, 30, 1), call("cudaStreamSynchronize", 3, 31), launched("b", 35, 37, 40, 2))
    assert found == {"synchronisation": 6, "queued": 1}


def test_a_wait_that_was_over_before_the_gap_did_not_open_it() -> None:
    found = idle(launched("a", 0, 2, 30, 1), call("cudaEventSynchronize", 3, 20), launched("b", 35, 37, 40, 2))
    assert found == {"python_and_launch": 6, "queued": 1}


def test_reading_a_value_back_is_a_wait_even_where_the_copy_call_itself_waits() -> None:
    found = idle(
        launched("a", 0, 2, 30, 1),
        call("cudaMemcpyAsync", 4, 36, 2),
        work(DOWNLOAD, 32, 33, 2, cat="gpu_memcpy"),
        launched("b", 40, 41, 45, 3),
    )
    assert found == {"synchronisation": 10}


def test_the_wait_that_is_part_of_a_pageable_copy_is_the_copys() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        slice_("aten::copy_", 7, 24.5),
        call("cudaMemcpyAsync", 8, 20, 2),
        work(UPLOAD, 16, 19, 2, cat="gpu_memcpy"),
        call("cudaStreamSynchronize", 20, 24),
        call("cudaStreamSynchronize", 25, 26),
        launched("b", 26, 27, 30, 3),
    )
    assert found == {"pageable_copy": 6 + 7, "synchronisation": 1}


def test_a_wait_after_a_pageable_copy_that_is_the_programs_own_is_a_wait() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        slice_("aten::copy_", 3, 6),
        call("cudaMemcpyAsync", 4, 5, 2),
        work(UPLOAD, 10, 11, 2, cat="gpu_memcpy"),
        call("cudaDeviceSynchronize", 7, 12),
        launched("b", 20, 21, 30, 3),
    )
    assert found == {"synchronisation": 5, "python_and_launch": 5}


@pytest.mark.parametrize(
    "aside",
    [
        slice_(LOADER, 3, 59, thread=2),
        slice_("gloo:all_reduce", 3, 59, thread=2),
        call("cudaEventSynchronize", 12, 59, thread=2),
    ],
)
def test_a_thread_that_only_copies_ahead_drives_nothing(aside: Record) -> None:
    prefetch = [
        call("cudaMemcpyAsync", 3, 5, 9, thread=2),
        work("Memcpy HtoD (Pinned -> Device)", 6, 9, 9, 8, "gpu_memcpy"),
    ]
    assert idle(step(1, 0, 60), launched("a", 0, 2, 10, 1), prefetch, aside) == {
        "python_and_launch": 1 + 50,
        "queued": 1,
    }


def test_a_thread_that_prepares_batches_holds_nothing_up() -> None:
    found = idle(
        launched("a", 0, 2, 10, 1),
        call("cudaHostAlloc", 9, 15, thread=2),
        call("cudaEventSynchronize", 8, 19, thread=2),
        launched("b", 20, 21, 25, 2),
    )
    assert found == {"python_and_launch": 11}


def test_waiting_for_other_ranks_on_the_host_is_communication() -> None:
    found = idle(launched("a", 0, 2, 10, 1), slice_("gloo:all_reduce", 9, 19), launched("b", 20, 21, 25, 2))
    assert found == {"communication_wait": 9, "python_and_launch": 2}


def test_an_enqueued_collective_is_no_wait() -> None:
    found = idle(launched("a", 0, 2, 10, 1), slice_("c10d::allreduce_", 9, 19), launched("b", 16, 21, 25, 2))
    assert found == {"python_and_launch": 7, "queued": 4}


def test_idle_time_at_both_ends_of_the_window_counts() -> None:
    found = idle(step(1, 0, 100), launched("a", 20, 22, 30, 1))
    assert found == {"python_and_launch": 21 + 70, "queued": 1}


def test_a_gap_is_judged_by_all_of_it_where_the_window_cuts_it() -> None:
    found = idle(launched("a", 0, 2, 10, 1), step(1, 20, 40), launched("b", 5, 30, 40, 2))
    assert found == {"queued": 10}


def test_a_window_without_work_shows_what_the_host_did() -> None:
    assert idle(step(1, 100, 200), work("a", 0, 1)) == {"python_and_launch": 100}


def test_each_wait_is_given_the_idle_time_it_opened_or_covered() -> None:
    trace = made(
        launched("a", 0, 2, 30, 1),
        call("cudaStreamSynchronize", 26, 32),
        launched("b", 60, 61, 70, 2),
        call("cudaDeviceSynchronize", 62, 71),
        call("cudaStreamSynchronize", 72, 73),
        launched("c", 74, 76, 80, 3),
    )
    _, causes = causes_of(trace)
    found = idle_by_call(ProgramSlices.of(trace), causes)
    named = {(trace.names[trace.cpu.name[place]], int(found[place])) for place in found.nonzero()[0].tolist()}
    assert named == {
        ("cudaStreamSynchronize", 6_000),
        ("cudaDeviceSynchronize", 2_000),
        ("cudaStreamSynchronize", 3_000),
    }
    assert found.sum() == causes["synchronisation"].length


def test_the_idle_time_of_steps_sums_to_that_of_the_window() -> None:
    trace = made(step(1, 0, 50), step(2, 50, 100), launched("a", 20, 22, 30, 1), launched("b", 70, 72, 80, 2))
    around, causes = causes_of(trace)
    steps = idle_within(causes, [(one.start, one.end) for one in around.steps])
    assert [one["python_and_launch"] for one in steps] == [41_000, 41_000]


@given(anything())
def test_every_instant_has_one_cause_whatever_the_trace_holds(found: list[Record]) -> None:
    trace = made(found)
    around, causes = causes_of(trace)
    busy = Spans(trace.device.start, trace.device.end)
    inside = {
        instant
        for start, end in zip(busy.start.tolist(), busy.end.tolist(), strict=True)
        for instant in range(max(start, around.start) // 1000, min(end, around.end) // 1000)
    }
    assert sum(spans.length for spans in causes.values()) == join(*causes.values()).length
    assert sum(spans.length for spans in causes.values()) == around.wall - 1000 * len(inside)
    assert idle_by_call(ProgramSlices.of(trace), causes).sum() <= causes["synchronisation"].length


@given(anything())
def test_no_wait_and_no_loader_has_a_moment_after_the_next_work_was_launched(found: list[Record]) -> None:
    trace = made(found)
    _, causes = causes_of(trace)
    links, works = trace.launchers, trace.device
    for cause in ("data_loader", "allocator", "communication_wait", "python_and_launch", "recording"):
        for instant in causes[cause].start.tolist():
            following = ((works.start > instant) & (works.end > works.start)).nonzero()[0]
            if len(following) and links[following[0]] >= 0:
                assert trace.cpu.end[links[following[0]]] > instant


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_waits_are_not_blamed_for_what_sixteen_ranks_had_launched_already() -> None:
    around, causes = causes_of(read(PUBLIC / "hta_a100_rank0of16_alltoall.json.gz"))
    assert causes["queued"].length >= 0.5454 * around.wall
    assert causes["synchronisation"].length < 0.01 * around.wall


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(("workers", "whole", "share"), [(0, 461_335_000, 0.764), (4, 231_518_000, 0.031)])
def test_a_slow_loader_and_its_cure_are_told_apart(workers: int, whole: int, share: float) -> None:
    _, causes = causes_of(read(PUBLIC / f"kineto_v100_resnet50_workers{workers}.pt.trace.json.gz"))
    assert sum(spans.length for spans in causes.values()) == whole
    assert causes["data_loader"].length / whole == pytest.approx(share, abs=0.0005)


def holding(*parts: Record | list[Record]) -> list[Held]:
    program = ProgramSlices.of(made(*parts))
    return held(program, idle_causes(program)["python_and_launch"])


def test_long_waits_are_told_by_the_innermost_calls_that_take_most_of_them() -> None:
    found = holding(
        launched("a", 0, 2, 10, 1),
        [slice_("aten::zeros", 100, 2100), slice_("aten::fill_", 150, 2050), slice_("aten::mul", 2200, 4200)],
        [slice_("aten::relu", 4300, 4700), slice_("aten::add", 5000, 5020)],
        launched("b", 5010, 5012, 5020, 2),
    )
    assert found == [
        Held("aten::mul", 1, 2_000_000),
        Held("aten::fill_", 1, 1_900_000),
        Held("", 1, 5_001_000 - 3_900_000),
    ]


def test_a_wait_of_less_than_a_millisecond_is_not_long() -> None:
    assert holding(launched("a", 0, 2, 10, 1), slice_("aten::mul", 12, 1000), launched("b", 1007, 1009, 1020, 2)) == []


@given(anything())
def test_what_holds_the_device_up_is_no_more_than_its_waits(records: list[Record]) -> None:
    program = ProgramSlices.of(made(records))
    waits = idle_causes(program)["python_and_launch"]
    assert sum(one.idle for one in held(program, waits)) <= waits.length
