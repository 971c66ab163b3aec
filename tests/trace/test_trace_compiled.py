"""What torch.compile leaves in a trace. The names are those of torch 2.13."""

import pytest
from traces_made import PUBLIC, Record, made, slice_, step

from gpubench.trace.cpu import compiled
from gpubench.trace.load import read
from gpubench.trace.profile import Compiled
from gpubench.trace.slices import ProgramSlices


def found(*parts: Record | list[Record]) -> Compiled | None:
    return compiled(ProgramSlices.of(made(*parts)))


def region(number: int, start: float, end: float) -> Record:
    return slice_(f"Torch-Compiled Region: {number}/0", start, end)


def test_an_eager_program_is_not_compiled() -> None:
    assert found(step(1, 0, 10), slice_("aten::mm", 1, 2)) is None


def test_one_graph_a_step_has_no_breaks() -> None:
    steps = [step(1, 0, 10), step(2, 10, 20)]
    assert found(*steps, region(0, 1, 9), region(0, 11, 19)) == Compiled(1, 0, 0, 0)


def test_graphs_beyond_the_first_of_a_step_are_breaks() -> None:
    steps = [step(1, 0, 10), step(2, 10, 20)]
    assert found(*steps, region(1, 1, 2), region(2, 3, 4), region(3, 5, 6), region(1, 11, 12)) == Compiled(3, 2, 0, 0)


def test_a_graph_that_runs_twice_is_one() -> None:
    assert found(step(1, 0, 10), region(0, 1, 2), region(0, 3, 4)) == Compiled(1, 0, 0, 0)


def test_compilations_within_the_window_are_counted_once_with_all_their_time() -> None:
    frame = slice_("entire_frame_compile", 10, 60)
    inner = [slice_("_compile.compile_inner (dynamo_timed)", 11, 59), slice_("bytecode_tracing (dynamo_timed)", 12, 20)]
    backward = slice_("backward._backward_impl (dynamo_timed)", 70, 80)
    assert found(step(1, 0, 100), frame, inner, backward) == Compiled(0, 0, 1, 60_000)


def test_compiling_before_the_window_is_no_recompilation() -> None:
    inner = slice_("_compile.compile_inner (dynamo_timed)", 1, 59)
    assert found(inner, step(1, 60, 100), region(0, 70, 80)) == Compiled(1, 0, 0, 0)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_real_compiled_program_is_recognised() -> None:
    assert compiled(ProgramSlices.of(read(PUBLIC / "hta_triton_example.json.gz"))) == Compiled(1, 0, 0, 0)
    assert compiled(ProgramSlices.of(read(PUBLIC / "kineto_v100_resnet50_workers0.pt.trace.json.gz"))) is None
