"""Copies, told apart by what they are for."""

from typing import Any

import pytest
from traces_made import PUBLIC, Record, call, launched, made, slice_, step, work

from gpubench.trace.copies import copies
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Copy
from gpubench.trace.slices import ProgramSlices


def copy_(start: float, end: float, types: list[str], strides: list[list[int]] | None = None, size: int = 8) -> Record:
    """aten::copy_ to a [size, size] tensor."""
    about: dict[str, Any] = {"Input Dims": [[size, size], [size, size], []], "Input type": [*types, "Scalar"]}
    if strides:
        about["Input Strides"] = [*strides, []]
    return slice_("aten::copy_", start, end, **about)


def moved(name: str, at: float, start: float, end: float, correlation: int, size: int | None = None) -> list[Record]:
    about = {} if size is None else {"bytes": size}
    return [
        call("cudaMemcpyAsync", at, at + 1, correlation),
        work(name, start, end, correlation, cat="gpu_memcpy", **about),
    ]


def found(*parts: Record | list[Record]) -> list[Copy]:
    program = ProgramSlices.of(made(*parts))
    return copies(program, phase_of(program))


def only(*parts: Record | list[Record]) -> Copy:
    (one,) = found(*parts)
    return one


@pytest.mark.parametrize(
    ("name", "kind", "pinned"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "host_to_device", False),
        ("Memcpy HtoD (Pinned -> Device)", "host_to_device", True),
        ("Memcpy DtoH (Device -> Pageable)", "device_to_host", False),
        ("Memcpy DtoH (Device -> Pinned)", "device_to_host", True),
        ("Memcpy DtoD (Device -> Device)", "device_to_device", None),
        ("Memcpy PtoP (Device -> Device)", "peer_to_peer", None),
        ("CopyHostToDevice", "host_to_device", None),
    ],
)
def test_the_runtimes_copies_are_told_by_their_names(name: str, kind: str, pinned: bool | None) -> None:
    one = only(step(1, 0, 50), copy_(0, 10, ["float", "float"]), moved(name, 2, 20, 25, 1, size=256))
    assert (one.kind, one.pinned, one.calls, one.host, one.device, one.bytes) == (kind, pinned, 1, 10_000, 5_000, 256)


def test_a_kernel_between_types_is_a_cast() -> None:
    one = only(step(1, 0, 50), copy_(0, 10, ["c10::Half", "float"]), launched("copy", 2, 20, 25, 1))
    assert (one.kind, one.device, one.bytes) == ("dtype_cast", 5_000, 8 * 8 * 2)


def test_a_kernel_between_strides_changes_the_layout() -> None:
    one = only(step(1, 0, 50), copy_(0, 10, ["float", "float"], [[8, 1], [1, 8]]), launched("copy", 2, 20, 25, 1))
    assert one.kind == "layout_change"


def test_an_element_that_is_read_many_times_has_no_layout_to_change() -> None:
    one = only(step(1, 0, 50), copy_(0, 10, ["float", "float"], [[8, 1], [0, 1]]), launched("copy", 2, 20, 25, 1))
    assert one.kind == "same"


def test_a_copy_counts_where_it_is_done() -> None:
    early = [copy_(1, 5, ["c10::Half", "float"]), *launched("cast", 2, 11, 16, 1)]
    late = [copy_(12, 18, ["c10::Half", "float"]), *launched("cast", 14, 70, 80, 2)]
    assert [(one.calls, one.device) for one in found(step(1, 10, 60), early, late)] == [(1, 5_000)]


def test_strides_along_single_elements_say_nothing() -> None:
    one = only(step(1, 0, 50), copy_(0, 10, ["float", "float"], [[1, 1], [9, 9]], size=1))
    assert one.kind == "same"


def test_a_copy_without_inputs_in_the_trace_is_left_out() -> None:
    assert found(step(1, 0, 50), slice_("aten::copy_", 0, 10), launched("copy", 2, 20, 25, 1)) == []


def test_without_strides_a_copy_of_one_type_is_left_out() -> None:
    assert found(step(1, 0, 50), copy_(0, 10, ["float", "float"])) == []


def test_an_upload_that_also_casts_is_one_upload() -> None:
    parts = [moved("Memcpy HtoD (Pageable -> Device)", 2, 20, 25, 1, 64), launched("cast", 4, 25, 27, 2)]
    one = only(step(1, 0, 50), copy_(0, 10, ["c10::Half", "float"]), *parts)
    assert (one.kind, one.calls, one.device) == ("host_to_device", 1, 7_000)


def test_copies_of_other_operators_are_theirs() -> None:
    item = slice_("aten::item", 0, 12), slice_("aten::_local_scalar_dense", 1, 10)
    one = only(step(1, 0, 50), list(item), moved("Memcpy DtoH (Device -> Pageable)", 2, 20, 25, 1, 4))
    assert (one.kind, one.host) == ("device_to_host", 12_000)
    assert one.example.startswith("aten::item")


def test_a_copy_whose_launch_is_not_in_the_trace_is_counted() -> None:
    one = only(step(1, 0, 50), work("Memcpy HtoD (Pageable -> Device)", 2, 6, 77, cat="gpu_memcpy"))
    assert (one.kind, one.calls, one.host, one.device, one.bytes, one.phase) == (
        "host_to_device", 1, 0, 4_000, None, "other",
    )  # fmt: skip


def test_phases_and_places_are_apart_and_the_longest_first() -> None:
    frames = [
        slice_("train.py(9): batch", 0, 20, "python_function"),
        slice_("train.py(30): loss", 20, 50, "python_function"),
    ]
    calls = [copy_(1, 3, ["float", "double"]), copy_(5, 8, ["float", "double"]), copy_(21, 41, ["float", "double"])]
    forward = slice_("forward", 20.5, 49, "user_annotation")
    assert [(one.where, one.phase, one.calls, one.host) for one in found(step(1, 0, 50), frames, forward, calls)] == [
        ("train.py:30 in loss", "forward", 1, 20_000),
        ("train.py:9 in batch", "other", 2, 5_000),
    ]


def test_the_example_is_the_largest_and_names_who_asked() -> None:
    to = [slice_("aten::to", 0, 10), slice_("aten::_to_copy", 1, 9), copy_(2, 8, ["float", "double"], size=64)]
    one = only(step(1, 0, 50), to, copy_(20, 21, ["float", "double"]))
    assert (one.calls, one.host) == (2, 11_000)
    assert one.example == "aten::to [64, 64] [64, 64] float32 <- float64"


def test_a_number_is_no_copy_worth_the_name_unless_the_device_copies_it() -> None:
    inputs: dict[str, Any] = {"Input Dims": [[], [], []], "Input type": ["float", "double", "Scalar"]}
    number = slice_("aten::copy_", 0, 10, **inputs)
    assert found(step(1, 0, 50), number) == []
    assert [one.kind for one in found(step(1, 0, 50), number, launched("cast", 2, 20, 25, 1))] == ["dtype_cast"]


def test_a_call_that_makes_two_copies_is_timed_once() -> None:
    to = slice_("aten::to", 0, 20), copy_(1, 5, ["float", "double"]), copy_(6, 9, ["float", "double"])
    assert [(one.calls, one.host) for one in found(step(1, 0, 50), list(to))] == [(2, 20_000)]


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_the_uploads_of_a_real_program_are_pageable() -> None:
    program = ProgramSlices.of(read(PUBLIC / "kineto_v100_resnet50_workers4.pt.trace.json.gz"))
    (one,) = copies(program, phase_of(program))
    assert (one.kind, one.pinned, one.calls) == ("host_to_device", False, 12)
    assert one.device == 18_959_000
    assert one.bytes == 6 * (32 * 3 * 224 * 224 * 4 + 32 * 8)  # images and labels
    assert one.where == "resnet50_profiler_api.py:44 in <module>"
