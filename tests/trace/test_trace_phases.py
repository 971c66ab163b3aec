"""The phases of a step, in annotated programs and in others."""

import pytest
from traces_made import PUBLIC, Record, launched, made, numbered, slice_, step

from gpubench.trace.load import read
from gpubench.trace.phases import phase_of, phases
from gpubench.trace.profile import StepPhase
from gpubench.trace.slices import ProgramSlices

NODE = "autograd::engine::evaluate_function: "


def marked(name: str, start: float, end: float, thread: int = 1) -> Record:
    return slice_(name, start, end, "user_annotation", thread)


def found(*parts: Record | list[Record]) -> dict[str, StepPhase]:
    program = ProgramSlices.of(made(*parts))
    by_name = {phase.name: phase for phase in phases(program, phase_of(program))}
    assert sum(phase.host for phase in by_name.values()) == program.window.wall
    return by_name


def host(*parts: Record | list[Record]) -> dict[str, float]:
    """Microseconds of the main thread."""
    return {name: phase.host / 1000 for name, phase in found(*parts).items()}


def test_annotated_phases_and_the_rest_are_the_window() -> None:
    assert host(
        step(1, 0, 100), marked("data_wait", 0, 10), marked("host_to_device", 10, 15), marked("forward", 20, 50),
        marked("backward", 50, 80), marked("exposed_communication", 80, 85), marked("optimizer", 85, 95),
    ) == {
        "other": 10, "data_wait": 10, "host_to_device": 5, "forward": 30, "backward": 30,
        "exposed_communication": 5, "optimizer": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("## forward ##", "forward"),
        ("Forward", "forward"),
        ("## forward:embeddings ##", "forward"),
        ("DistributedDataParallel.forward", "forward"),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", "forward"),
        ("[pl][profile][Strategy]DDPStrategy.backward", "backward"),
        ("[pl][profile][_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device", "host_to_device"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data_wait"),
        ("## load_batch ##", "data_wait"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("Optimizer.zero_grad#AdamW.zero_grad", "optimizer"),
        ("forward_hook_statistics", "other"),
        ("my loop", "other"),
    ],
)
def test_names_of_other_programs_are_understood(name: str, phase: str) -> None:
    assert host(step(1, 0, 10), marked(name, 2, 9))[phase] >= 7


def test_the_innermost_annotation_counts() -> None:
    assert host(step(1, 0, 100), marked("optimizer_step", 0, 100), marked("training_step", 10, 40)) == {
        "forward": 30,
        "optimizer": 70,
    }


def test_a_phase_goes_to_the_end_of_the_window_and_no_further() -> None:
    assert host(step(1, 10, 20), marked("forward", 0, 15), marked("backward", 15, 50)) == {"forward": 5, "backward": 5}


def test_autograd_is_backward_on_its_own_thread_and_the_main_thread_waits_for_it() -> None:
    node = slice_(NODE + "MmBackward0", 40, 60, thread=2)
    last = slice_(NODE + "AddBackward0", 64, 70, thread=2)
    by_name = found(step(1, 0, 100), node, last, launched("kernel", 50, 80, 90, 1, thread=2))
    assert by_name["backward"].host == 30_000
    assert by_name["backward"].device == 10_000
    assert by_name["backward"].launches == 1
    assert by_name["other"].host == 70_000


def test_what_autograds_thread_does_between_nodes_is_backward() -> None:
    node, add = slice_(NODE + "MmBackward0", 40, 60, thread=2), slice_("aten::add", 62, 66, thread=2)
    by_name = found(step(1, 0, 100), node, add, launched("sum", 63, 70, 80, 1, thread=2))
    assert (by_name["backward"].launches, by_name["backward"].device) == (1, 10_000)
    assert by_name["other"].launches == 0


@pytest.mark.parametrize(
    "name", ["<built-in method run_backward of torch._C._EngineBase object at 0x7f68d3cc7b70>",
             "torch/autograd/graph.py(966): _engine_run_backward"],
)  # fmt: skip
def test_a_call_of_autograds_engine_is_backward_but_for_waits_for_other_ranks(name: str) -> None:
    engine, gloo = slice_(name, 20, 70, "python_function"), slice_("gloo:all_reduce", 40, 55, "user_annotation", 2)
    assert host(step(1, 0, 100), engine, gloo) == {"other": 50, "backward": 35, "exposed_communication": 15}


def test_on_a_cpu_what_is_computed_again_is_the_operators_own_time() -> None:
    node = numbered(NODE + "ReluBackward0", 20, 40, 3, 1)
    again = [marked("module: fc (Linear)", 21, 30), slice_("aten::linear", 22, 28), slice_("aten::mm", 23, 27)]
    assert found(step(1, 0, 60), node, again)["backward"].recompute == 6_000


def test_waiting_for_other_ranks_is_exposed_communication() -> None:
    events = [slice_("forward", 0, 30, "user_annotation"), slice_("gloo:all_reduce", 20, 60, "user_annotation", 2)]
    assert host(step(1, 0, 100), *events) == {"other": 40, "forward": 30, "exposed_communication": 30}


def test_operators_with_gradients_are_forward_until_the_backward_pass_begins() -> None:
    events = [
        numbered("aten::conv2d", 10, 20, 0),
        numbered(NODE + "ConvolutionBackward0", 40, 60, 0, 1),
        numbered("aten::item", 70, 75, 1),
    ]
    assert host(step(1, 0, 100), events) == {"other": 70, "forward": 10, "backward": 20}


def test_values_that_are_read_between_two_steps_or_after_the_loss_are_not_forward() -> None:
    events = [
        numbered("aten::item", 5, 10, 0),
        numbered("aten::mm", 20, 30, 0),
        numbered("aten::gt", 30, 35, 1),
        numbered("aten::mean", 35, 40, 1),
        numbered("aten::item", 45, 50, 2),
        numbered(NODE + "MeanBackward0", 60, 70, 1, 1),
        numbered(NODE + "MmBackward0", 70, 90, 0, 1),
    ]
    assert host(step(1, 0, 100), events) == {"other": 50, "forward": 20, "backward": 30}


def test_a_second_forward_pass_of_a_step_is_told_by_its_backward() -> None:
    events = [
        numbered("aten::mm", 10, 20, 0),
        numbered(NODE + "MmBackward0", 20, 30, 0, 1),
        numbered("aten::mm", 40, 50, 1),
        numbered(NODE + "MmBackward0", 50, 60, 1, 1),
    ]
    assert host(step(1, 0, 60), events) == {"other": 20, "forward": 20, "backward": 20}


def test_an_upload_outside_any_phase_is_host_to_device() -> None:
    upload = launched("Memcpy HtoD (Pageable -> Device)", 5, 8, 12, 1)
    upload[1]["cat"] = "gpu_memcpy"
    by_name = found(step(1, 0, 20), numbered("aten::to", 4, 10, 0), upload)
    assert by_name["host_to_device"].host == 6_000
    assert by_name["host_to_device"].device == 4_000


def test_work_of_two_streams_counts_once() -> None:
    work = [launched("a", 1, 10, 20, 1), launched("b", 3, 15, 30, 2, stream=8)]
    assert found(step(1, 0, 40), marked("forward", 0, 5), *work)["forward"].device == 20_000


def test_work_beyond_the_window_does_not_count() -> None:
    assert found(step(1, 0, 40), marked("forward", 0, 5), launched("a", 1, 30, 90, 1))["forward"].device == 10_000


def test_a_module_called_in_the_backward_pass_is_computed_again() -> None:
    node = numbered(NODE + "ReluBackward0", 20, 40, 3, 1)
    again = marked("module: fc (Linear)", 21, 30)
    by_name = found(step(1, 0, 60), node, again, launched("a", 22, 23, 33, 1), launched("b", 35, 36, 40, 2))
    assert by_name["backward"].device == 14_000
    assert by_name["backward"].recompute == 10_000


def test_operators_that_record_gradients_in_a_node_that_does_not_are_computed_again() -> None:
    node = numbered("ReluBackward0", 20, 40, 3, 1)
    again = numbered("aten::linear", 21, 30, 9)
    own = slice_("aten::threshold_backward", 32, 38)
    works = [launched("a", 22, 23, 33, 1), launched("b", 35, 36, 40, 2)]
    assert found(step(1, 0, 60), node, again, own, *works)["backward"].recompute == 10_000


def test_a_backward_pass_with_create_graph_is_no_recompute() -> None:
    node = numbered("ReluBackward0", 20, 40, 3, 1)
    first = numbered("aten::mul", 21, 30, 9)
    assert found(step(1, 0, 60), node, first, launched("a", 22, 23, 33, 1))["backward"].recompute == 0


def test_a_reentrant_checkpoint_computes_again_but_for_its_own_backward_pass() -> None:
    node = numbered("CheckpointFunctionBackward", 20, 60, 3, 1)
    forward = numbered("aten::mm", 21, 30, 4)
    inner = numbered(NODE + "MmBackward0", 32, 50, 4, 1)
    works = [launched("a", 22, 23, 33, 1), launched("b", 35, 36, 40, 2)]
    assert found(step(1, 0, 60), node, forward, inner, *works)["backward"].recompute == 10_000


def test_a_trace_of_device_work_alone_has_no_phases_but_other() -> None:
    assert host([launched("a", 1, 10, 20, 1)[1]]) == {"other": 10}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_phases_of_a_real_program_that_is_not_annotated() -> None:
    program = ProgramSlices.of(read(PUBLIC / "kineto_v100_resnet50_workers0.pt.trace.json.gz"))
    by_name = {phase.name: phase for phase in phases(program, phase_of(program))}
    assert sum(phase.host for phase in by_name.values()) == program.window.wall
    assert by_name["data_wait"].host == 415_791_000  # the six enumerate(DataLoader) slices
    assert by_name["optimizer"].launches == 3381  # of which the trace says 0 us of 636
    assert by_name["host_to_device"].launches == 12
    assert by_name["backward"].device > by_name["forward"].device > 0
