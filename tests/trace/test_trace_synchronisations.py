"""Where the host waited for the device, and who asked for it."""

from typing import Any

import numpy as np
import pytest
from traces_made import PUBLIC, Record, call, frame, launched, made, slice_, step

from gpubench.trace.copies import synchronisations
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Synchronisation
from gpubench.trace.slices import ProgramSlices, user_frame


def found(*parts: Record | list[Record]) -> list[Synchronisation]:
    program = ProgramSlices.of(made(*parts))
    return synchronisations(program, phase_of(program), np.full(len(program.trace.cpu), 500))


KERNEL = launched("kernel", 1, 2, 60, 99)


def test_the_outermost_operator_asked_for_it() -> None:
    events = [slice_("aten::item", 10, 40), slice_("aten::_local_scalar_dense", 11, 39)]
    (one,) = found(step(1, 0, 100), KERNEL, events, call("cudaStreamSynchronize", 12, 38))
    assert (one.operator, one.call, one.calls) == ("aten::item", "cudaStreamSynchronize", 1)
    assert (one.blocked, one.idle, one.phase, one.where) == (26_000, 500, "other", None)


def test_a_call_outside_operators_is_its_own() -> None:
    (one,) = found(step(1, 0, 100), KERNEL, call("cudaDeviceSynchronize", 12, 38))
    assert one.operator == one.call == "cudaDeviceSynchronize"


def test_a_call_in_any_other_operator_is_that_ones() -> None:
    (one,) = found(step(1, 0, 100), KERNEL, slice_("mylib::wait", 10, 40), call("cudaEventSynchronize", 12, 38))
    assert one.operator == "mylib::wait"


def test_waits_of_streams_for_each_other_do_not_block_the_host() -> None:
    assert found(step(1, 0, 100), KERNEL, call("cudaStreamWaitEvent", 12, 38)) == []


def test_calls_outside_the_window_do_not_count() -> None:
    assert found(step(1, 0, 100), KERNEL, call("cudaDeviceSynchronize", 120, 138)) == []


def test_the_place_is_the_innermost_of_the_users_functions() -> None:
    stack = [
        frame("train.py(90): <module>", 0, 99), frame("train.py(25): step", 1, 98),
        frame("torch/_tensor.py(800): __float__", 9, 45), frame("<built-in method item of Tensor>", 9.5, 44),
    ]  # fmt: skip
    (one,) = found(step(1, 0, 100), KERNEL, stack, slice_("aten::item", 10, 40), call("cudaStreamSynchronize", 12, 38))
    assert one.where == "train.py:25 in step"


def test_places_are_apart_and_the_longest_wait_is_first() -> None:
    events = [
        frame("a.py(1): f", 0, 20), call("cudaStreamSynchronize", 1, 3), call("cudaStreamSynchronize", 5, 8),
        frame("b.py(2): g", 20, 90), call("cudaStreamSynchronize", 30, 80),
    ]  # fmt: skip
    assert [(one.where, one.calls, one.blocked) for one in found(step(1, 0, 100), KERNEL, events)] == [
        ("b.py:2 in g", 1, 50_000),
        ("a.py:1 in f", 2, 5_000),
    ]


def test_stacks_of_old_traces_are_read_from_the_operator() -> None:
    stack = "/lib/python3.7/site-packages/torch/tensor.py(5): item;train.py(25): step;train.py(90): <module>"
    about: dict[str, Any] = {"Call stack": stack}
    item = slice_("aten::item", 10, 40, **about)
    (one,) = found(step(1, 0, 100), KERNEL, item, call("cudaStreamSynchronize", 12, 38))
    assert one.where == "train.py:25 in step"


def test_without_a_device_operators_are_listed_that_would_wait() -> None:
    events = [slice_("aten::item", 10, 40), slice_("aten::_local_scalar_dense", 11, 39), slice_("aten::add", 50, 60)]
    (one,) = found(step(1, 0, 100), events)
    assert (one.operator, one.call, one.calls, one.blocked) == ("aten::item", "", 1, 30_000)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("train.py(25): step", "train.py:25 in step"),
        ("/home/me/torchprojects/train.py(25): step", "/home/me/torchprojects/train.py:25 in step"),
        ("src/model(2).py(7): forward", "src/model(2).py:7 in forward"),
        ("torch/nn/modules/module.py(1782): _call_impl", None),
        ("/opt/conda/lib/python3.11/threading.py(982): run", None),
        ("/venv/lib/python3.11/site-packages/transformers/trainer.py(9): train", None),
        ("contextlib.py(79): inner", None),
        ("gpubench/training.py(30): run", None),
        ("<built-in method item of Tensor object at 0x7f>", None),
        ("<frozen importlib._bootstrap>(3): _load", None),
        ("nn.Module: Linear_0", None),
        ("aten::item", None),
    ],
)
def test_frames_of_libraries_are_not_the_users(name: str, place: str | None) -> None:
    assert user_frame(name) == place


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_real_program_waits_where_its_code_says() -> None:
    program = ProgramSlices.of(read(PUBLIC / "tracelens_h100_bert_small.json.gz"))
    first = synchronisations(program, phase_of(program), np.zeros(len(program.trace.cpu), np.int64))[0]
    assert (first.operator, first.call, first.blocked) == ("aten::is_nonzero", "cudaStreamSynchronize", 7_640)
    assert first.where == "transformers/modeling_attn_mask_utils.py:429 in _prepare_4d_attention_mask_for_sdpa"
