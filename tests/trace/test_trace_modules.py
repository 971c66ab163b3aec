"""Time by nn.Module."""

import pytest
from traces_made import PUBLIC, Record, launched, made, numbered, slice_, step, work

from gpubench.trace.cpu import modules
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Module, folded
from gpubench.trace.slices import ProgramSlices

NODE = "autograd::engine::evaluate_function: "


def module(path: str, kind: str, start: float, end: float, thread: int = 1) -> Record:
    return slice_(f"module: {path} ({kind})", start, end, "user_annotation", thread)


def frame(name: str, start: float, end: float, thread: int = 1) -> Record:
    return slice_(f"nn.Module: {name}", start, end, "python_function", thread)


def backward(name: str, start: float, end: float, sequence: int, thread: int = 2) -> Record:
    return numbered(NODE + name, start, end, sequence, forward_thread=1, thread=thread)


def found(*parts: Record | list[Record]) -> dict[str, Module]:
    program = ProgramSlices.of(made(*parts))
    return {one.path: one for one in modules(program, phase_of(program))}


def test_a_program_without_modules_has_none() -> None:
    assert found(step(1, 0, 10), slice_("aten::mm", 1, 2)) == {}


def test_calls_of_a_module_are_those_whose_work_the_device_came_to() -> None:
    parts = [
        record
        for number, at in enumerate((0, 20))
        for record in (
            module("fc", "Linear", at, at + 9),
            *launched("gemm", at + 1, 5 + 50 * number, 45 + 50 * number, number + 1),
        )
    ]
    one = found(step(1, 0, 20), step(2, 20, 40), parts)["fc"]
    assert (one.calls, one.host, one.forward) == (1, 9_000, 40_000)


def test_a_layer_counts_even_if_no_work_is_linked_to_it() -> None:
    """The launch of the last one is not in the trace."""
    layers = [module(f"layers.{number}", "Block", 10 * number, 10 * number + 9) for number in range(3)]
    calls = [launched("gemm", 10 * number + 1, 10 * number + 2, 10 * number + 8, number + 1) for number in range(2)]
    by_path = found(step(1, 0, 40), layers, *calls, work("gemm", 22, 28, 9))
    assert [equal for _, equal in folded(list(by_path.values()))] == [3]
    assert by_path["layers.2"].forward == 0


def test_time_is_a_modules_own_and_its_childrens() -> None:
    by_path = found(
        step(1, 0, 100),
        module("", "Net", 0, 50), module("block", "Block", 5, 40), module("block.fc", "Linear", 10, 20),
        launched("a", 1, 2, 12, 1), launched("b", 6, 12, 32, 2), launched("c", 11, 32, 62, 3),
    )  # fmt: skip
    assert {path: (one.forward, one.own) for path, one in by_path.items()} == {
        "": (60_000, 10_000),
        "block": (50_000, 20_000),
        "block.fc": (30_000, 30_000),
    }
    assert by_path["block.fc"].kind == "Linear"
    assert by_path["block"].host == 35_000


def test_a_container_that_is_never_called_is_left_out() -> None:
    by_path = found(
        step(1, 0, 9), module("", "Net", 0, 9), module("layers.0", "Linear", 1, 5), launched("a", 2, 3, 9, 1)
    )
    assert sorted(by_path) == ["", "layers.0"]
    assert by_path[""].forward == by_path["layers.0"].forward == 6_000


def test_backward_work_goes_to_the_module_of_its_forward_operator() -> None:
    by_path = found(
        step(1, 0, 100),
        module("a", "Linear", 0, 10), numbered("aten::addmm", 1, 9, 0),
        module("b", "Linear", 10, 20), numbered("aten::addmm", 11, 19, 1),
        backward("AddmmBackward0", 30, 40, 1), launched("of b", 31, 40, 47, 1, thread=2),
        backward("AddmmBackward0", 40, 50, 0), launched("of a", 41, 50, 53, 2, thread=2),
    )  # fmt: skip
    assert (by_path["a"].backward, by_path["b"].backward) == (3_000, 7_000)


def test_the_operator_that_makes_a_node_is_the_last_with_its_number() -> None:
    by_path = found(
        step(1, 0, 100),
        module("before", "Dropout", 0, 10), numbered("aten::detach", 1, 2, 0),
        module("maker", "Linear", 10, 20), numbered("aten::linear", 11, 19, 0),
        backward("MmBackward0", 30, 40, 0), launched("k", 31, 40, 47, 1, thread=2),
        module("before", "Dropout", 50, 60), numbered("aten::detach", 51, 52, 0),
    )  # fmt: skip
    assert by_path["maker"].backward == 7_000
    assert by_path["before"].backward == 0


def test_numbers_of_another_thread_are_another_node() -> None:
    by_path = found(
        step(1, 0, 100),
        module("a", "Linear", 0, 10), numbered("aten::addmm", 1, 9, 0), numbered("aten::mul", 9, 9.5, 1),
        numbered("aten::select", 12, 13, 0, thread=9),
        backward("MulBackward0", 20, 25, 1), backward("AddmmBackward0", 30, 40, 0),
        launched("of a", 31, 40, 43, 1, thread=2),
    )  # fmt: skip
    assert by_path["a"].backward == 3_000


def test_recompute_is_told_apart() -> None:
    by_path = found(
        step(1, 0, 100),
        module("fc", "Linear", 0, 10), numbered("aten::addmm", 1, 9, 0), launched("first", 2, 3, 8, 1),
        backward("AddmmBackward0", 30, 60, 0), module("fc", "Linear", 31, 40, thread=2),
        launched("again", 32, 33, 39, 2, thread=2), launched("gradient", 50, 51, 60, 3, thread=2),
    )  # fmt: skip
    one = by_path["fc"]
    assert (one.calls, one.forward, one.recompute, one.backward) == (1, 5_000, 6_000, 9_000)
    assert one.own == 20_000


def test_modules_of_recorded_stacks_have_nested_paths() -> None:
    by_path = found(
        step(1, 0, 100), frame("Net_0", 0, 50), frame("Linear_3", 5, 40), launched("a", 6, 10, 20, 1),
    )  # fmt: skip
    assert {path: (one.kind, one.forward) for path, one in by_path.items()} == {
        "Net_0": ("Net", 10_000),
        "Net_0/Linear_3": ("Linear", 10_000),
    }


def test_a_recomputed_frame_keeps_the_path_of_its_first_call() -> None:
    again = [backward("ReluBackward0", 60, 90, 0), frame("Linear_3", 61, 80, thread=2)]
    work = launched("again", 62, 70, 80, 1, thread=2)
    by_path = found(step(1, 0, 100), frame("Net_0", 0, 50), frame("Linear_3", 5, 40), again, work)
    assert by_path["Net_0/Linear_3"].recompute == by_path["Net_0"].recompute == 10_000
    assert sorted(by_path) == ["Net_0", "Net_0/Linear_3"]


def test_annotations_go_before_frames() -> None:
    assert list(found(step(1, 0, 9), frame("Net_0", 0, 9), module("", "Net", 1, 8))) == [""]


def test_without_a_device_the_operators_own_time_counts() -> None:
    by_path = found(
        step(1, 0, 100), module("fc", "Linear", 0, 20),
        numbered("aten::linear", 1, 19, 0), numbered("aten::mm", 5, 15, 0),
        backward("MmBackward0", 30, 40, 0, thread=1),
    )  # fmt: skip
    assert (by_path["fc"].forward, by_path["fc"].backward) == (18_000, 10_000)


def test_a_module_within_itself_counts_once() -> None:
    by_path = found(step(1, 0, 50), frame("Tree_0", 0, 40), frame("Tree_0", 10, 30), launched("a", 12, 20, 30, 1))
    assert (by_path["Tree_0"].calls, by_path["Tree_0"].forward) == (2, 10_000)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_modules_of_a_real_program_sum_to_their_parents() -> None:
    program = ProgramSlices.of(read(PUBLIC / "tracelens_h100_bert_small.json.gz"))
    found = modules(program, phase_of(program))
    assert found[0].path == "BertLMHeadModel_0"
    assert found[0].forward == sum(one.own for one in found) == 309_437
    assert sum(one.kind == "BertLayer" for one in found) == 4


def layer(path: str, kind: str, own: int, calls: int = 1) -> Module:
    return Module(path, kind, calls, own, own, 0, 0, own)


def test_equal_layers_are_one_with_their_sum() -> None:
    """Fifteen layers of 1.8 % each are 27 % of the step."""
    found = [layer(f"layers.{number}.attn", "Attention", 18) for number in range(15)]
    assert folded([*found, layer("head", "Linear", 5)]) == [
        (Module("layers.*.attn", "Attention", 15, 270, 270, 0, 0, 270), 15),
        (layer("head", "Linear", 5), 1),
    ]


def test_only_numbers_that_differ_become_stars() -> None:
    found = [layer(f"encoder.0.blocks.{a}.heads.{b}", "Head", 1) for a in range(2) for b in range(3)]
    assert [(one.path, equal) for one, equal in folded(found)] == [("encoder.0.blocks.*.heads.*", 6)]


@pytest.mark.parametrize(
    "layers",
    [
        [("features.0", "Conv2d"), ("features.1", "BatchNorm2d")],  # of two classes
        [("layer1.conv", "Conv2d"), ("layer2.conv", "Conv2d")],  # stages, whose sizes differ
        [("fc1", "Linear"), ("fc2", "Linear")],
        [("up_2", "Block"), ("up_3", "Block")],  # named so by the program
        [("blocks.0", "Block"), ("blocks.0.0", "Block")],  # one within the other
    ],
)
def test_layers_that_are_not_equal_stay_apart(layers: list[tuple[str, str]]) -> None:
    assert [(one.path, equal) for one, equal in folded([layer(path, kind, 1) for path, kind in layers])] == [
        (path, 1) for path, _ in layers
    ]


def test_modules_that_the_profiler_counts_are_folded_too() -> None:
    found = [layer(f"Model_0/Layer_{n}/Attention_{n}", "Attention", 2) for n in range(24)]
    found += [layer(f"Model_0/Layer_{n}", "Layer", 1) for n in range(24)]
    assert [(one.path, equal) for one, equal in folded(found)] == [
        ("Model_0/Layer_*/Attention_*", 24),
        ("Model_0/Layer_*", 24),
    ]


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_attention_is_most_of_the_modules_of_a_real_program() -> None:
    program = ProgramSlices.of(read(PUBLIC / "tracelens_h100_owlv2.json.gz"))
    layers = folded(modules(program, phase_of(program)))
    most, equal = max(layers, key=lambda one: one[0].own)
    assert most.path.endswith("/Owlv2EncoderLayer_*/Owlv2Attention_*")
    assert equal == 24
    assert 0.40 < most.own / program.window.wall < 0.42
