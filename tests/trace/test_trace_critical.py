"""The chain of work that the window could not have been shorter without."""

import pytest
from hypothesis import given
from traces_made import LOADER, PUBLIC, Record, anything, call, launched, made, slice_, step, work

from gpubench.trace.device import critical_path
from gpubench.trace.load import read
from gpubench.trace.slices import ProgramSlices


def path(*parts: Record | list[Record]) -> dict[str, float]:
    """Microseconds of each class that there is."""
    trace = made(*parts)
    program = ProgramSlices.of(trace)
    found = critical_path(program)
    assert sum(found.values()) == program.window.wall
    return {name: time / 1000 for name, time in found.items() if time}


def test_a_device_with_a_full_queue_is_the_path() -> None:
    found = path(step(1, 0, 50), launched("a", 0, 3, 20, 1), launched("b", 1, 22, 40, 2), launched("c", 2, 40, 55, 3))
    assert found == {"operators": 1, "launch_delay": 2, "compute": 17 + 18 + 10, "queue": 2}


@pytest.mark.parametrize("end", [30, 31, 32])
def test_a_window_that_ends_in_a_gap_of_a_full_queue_ends_on_the_device(end: float) -> None:
    found = path(step(1, 0, end), launched("a", 0, 3, 30, 1), launched("b", 1, 32, 40, 2))
    assert found == {"operators": 1, "launch_delay": 2, "compute": 27} | ({"queue": end - 30} if end > 30 else {})


def test_a_window_that_ends_in_a_gap_before_late_work_ends_on_the_host() -> None:
    found = path(step(1, 0, 50), launched("a", 0, 3, 30, 1), launched("b", 39, 55, 60, 2))
    assert found == {"operators": 2, "launch_delay": 10, "python": 38}


def test_a_host_that_launches_late_is_the_path() -> None:
    found = path(step(1, 0, 50), launched("a", 0, 2, 10, 1), slice_("aten::mm", 15, 30), launched("b", 29, 32, 50, 2))
    assert found == {"python": 14, "operators": 16, "launch_delay": 2, "compute": 18}


def test_a_host_that_waited_hands_the_path_to_the_work_it_waited_for() -> None:
    found = path(
        step(1, 0, 100), launched("a", 0, 2, 60, 1), call("cudaStreamSynchronize", 5, 63), launched("b", 80, 82, 90, 2)
    )
    assert found == {
        "operators": 1,
        "launch_delay": 1,
        "compute": 58,
        "synchronisation": 3,
        "python": 36,
    } | {"operators": 2}


def test_a_wait_in_which_nothing_ended_is_no_wait() -> None:
    found = path(step(1, 0, 100), launched("a", 0, 2, 60, 1), call("cudaStreamSynchronize", 70, 73))
    assert found == {"python": 96, "operators": 1, "synchronisation": 3}


def test_work_that_waits_for_another_stream_is_reached_through_it() -> None:
    found = path(
        launched("compute", 0, 2, 30, 1),
        launched("ncclDevKernel_AllReduce", 1, 30, 70, 2, stream=8),
        launched("next", 3, 71, 80, 3),
    )
    assert found == {"compute": 28 + 9, "communication": 40, "queue": 1}


def test_fetching_a_batch_is_named_on_the_hosts_part() -> None:
    found = path(step(1, 0, 100), slice_(LOADER, 5, 65), launched("a", 70, 72, 100, 1))
    assert found == {"python": 10, "data_loader": 60, "operators": 1, "launch_delay": 1, "compute": 28}


def test_work_without_a_launch_goes_back_through_the_device() -> None:
    found = path(step(1, 0, 50), work("a", 10, 20), work("b", 25, 50))
    assert found == {"python": 10, "compute": 35, "queue": 5}


def test_the_path_of_a_trace_of_the_host_is_the_host() -> None:
    assert path(step(1, 0, 10), slice_("aten::mm", 2, 6)) == {"python": 6, "operators": 4}


@given(anything())
def test_the_path_sums_to_the_window_whatever_the_trace_holds(found: list[Record]) -> None:
    assert all(time > 0 for time in path(found).values())


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_the_path_of_a_real_run_leads_through_its_slow_loader() -> None:
    found = {}
    for workers in (0, 4):
        trace = read(PUBLIC / f"kineto_v100_resnet50_workers{workers}.pt.trace.json.gz")
        program = ProgramSlices.of(trace)
        found[workers] = critical_path(program)["data_loader"] / program.window.wall
    assert found[0] > 0.35
    assert found[4] < 0.02
