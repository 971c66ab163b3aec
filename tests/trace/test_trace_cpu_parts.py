"""What the main thread of a program without a device did."""

import pytest
from traces_made import PUBLIC, Record, made, slice_, step

from gpubench.trace.columns import join
from gpubench.trace.copies import copies
from gpubench.trace.cpu import cpu_parts
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.slices import ProgramSlices

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def parts(*events: Record | list[Record]) -> dict[str, float]:
    """Microseconds of each part that there is."""
    program = ProgramSlices.of(made(*events))
    found = cpu_parts(program, phase_of(program))
    assert sum(spans.length for spans in found.values()) == program.window.wall
    assert join(*found.values()).length == program.window.wall
    return {part: spans.length / 1000 for part, spans in found.items() if spans.length}


def test_the_parts_fill_the_window() -> None:
    assert parts(
        step(1, 0, 100), slice_(LOADER, 0, 10, "user_annotation"), slice_("gloo:all_reduce", 10, 15),
        slice_("aten::copy_", 20, 30), slice_("Optimizer.step#SGD.step", 40, 60, "user_annotation"),
        slice_("aten::mm", 70, 90),
    ) == {
        "data_loader": 10, "communication": 5, "copies": 10, "optimizer": 20, "operators": 20, "python": 35,
    }  # fmt: skip


def test_the_data_loader_goes_before_what_is_in_it() -> None:
    loading = [slice_(LOADER, 0, 50, "user_annotation"), slice_("aten::stack", 10, 20), slice_("aten::copy_", 12, 15)]
    assert parts(step(1, 0, 100), loading) == {"data_loader": 50, "python": 50}


def test_copies_go_before_the_operators_around_them() -> None:
    assert parts(step(1, 0, 100), slice_("aten::linear", 0, 50), slice_("aten::to", 10, 20)) == {
        "copies": 10,
        "operators": 40,
        "python": 50,
    }


def test_the_time_in_copies_is_that_of_the_copies_that_are_told() -> None:
    def cast(start: float, size: list[int]) -> list[Record]:
        inputs: Record = {"Input Dims": [size, size, []], "Input type": ["float", "double", "Scalar"]}
        return [
            slice_("aten::to", start, start + 10),
            slice_("aten::_to_copy", start + 1, start + 9),
            slice_("aten::copy_", start + 3, start + 7, **inputs),
        ]

    events = step(1, 0, 100), slice_("aten::add", 0, 30), cast(5, []), cast(40, [8, 8]), slice_("aten::to", 60, 65)
    assert parts(*events) == {"copies": 10, "operators": 35, "python": 55}
    program = ProgramSlices.of(made(*events))
    assert [(one.calls, one.host) for one in copies(program, phase_of(program))] == [(1, 10_000)]


def test_an_annotated_optimizer_is_one() -> None:
    events = [slice_("optimizer", 0, 50, "user_annotation"), slice_("aten::add_", 10, 20)]
    assert parts(step(1, 0, 100), *events) == {"optimizer": 50, "python": 50}


def test_waiting_for_autograd_on_another_thread_is_time_in_operators() -> None:
    node = slice_("autograd::engine::evaluate_function: MmBackward0", 20, 60, thread=2)
    assert parts(step(1, 0, 100), node) == {"operators": 40, "python": 60}


def test_a_collective_on_a_thread_of_its_own_is_communication_where_nothing_else_is_done() -> None:
    events = [slice_("aten::mm", 10, 30), slice_("gloo:all_reduce", 20, 60, "user_annotation", thread=2)]
    assert parts(step(1, 0, 100), *events) == {"operators": 20, "communication": 30, "python": 50}


def test_operators_of_workers_are_not_the_main_threads() -> None:
    assert parts(step(1, 0, 100), slice_("aten::stack", 20, 60, thread=2)) == {"python": 100}


def test_without_steps_the_busiest_thread_is_the_main_one() -> None:
    assert parts(slice_("aten::add", 0, 10, thread=1), slice_("aten::mm", 0, 60, thread=2)) == {"operators": 60}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_real_trace_without_a_device() -> None:
    program = ProgramSlices.of(read(PUBLIC / "hta_cpu_only_rank0.json.gz"))
    found = cpu_parts(program, phase_of(program))
    assert program.trace.cpu_only
    assert {part: spans.length for part, spans in found.items() if part in ("data_loader", "optimizer")} == {
        "data_loader": 71_000,
        "optimizer": 3_093_000,
    }
    assert sum(spans.length for spans in found.values()) == program.window.wall
