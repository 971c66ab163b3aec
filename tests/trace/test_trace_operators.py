"""Operators by name and shapes."""

from typing import Any

import pytest
from traces_made import PUBLIC, Record, call, launched, made, slice_, step, work

from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.operators import operators
from gpubench.trace.profile import Operator, RankProfile
from gpubench.trace.slices import ProgramSlices

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}


def shaped(name: str, start: float, end: float, *dims: list[int], dtype: str = "float", **more: Any) -> Record:
    about: dict[str, Any] = {"Input Dims": list(dims), "Input type": [dtype] * len(dims)}
    return slice_(name, start, end, **about, **more)


def found(*parts: Record | list[Record], **metadata: Any) -> dict[str, Operator]:
    return {one.name: one for one in operators(ProgramSlices.of(made(*parts, **metadata)))}


def test_host_time_is_without_the_operators_within() -> None:
    by_name = found(step(1, 0, 100), slice_("aten::linear", 0, 20), slice_("aten::addmm", 5, 15))
    assert {name: one.host for name, one in by_name.items()} == {"aten::linear": 10_000, "aten::addmm": 10_000}


def test_calls_of_the_runtime_are_the_operators_own_time() -> None:
    assert found(step(1, 0, 100), slice_("aten::relu", 0, 20), launched("k", 5, 30, 40, 1))["aten::relu"].host == 20_000


def test_device_time_is_the_launching_operators() -> None:
    work = [launched("a", 6, 30, 40, 1), launched("b", 16, 40, 45, 2)]
    by_name = found(step(1, 0, 100), slice_("aten::linear", 0, 20), slice_("aten::addmm", 5, 15), *work)
    assert (by_name["aten::addmm"].device, by_name["aten::addmm"].kernels) == (10_000, 1)
    assert (by_name["aten::linear"].device, by_name["aten::linear"].kernels) == (5_000, 1)


def test_shapes_make_different_entries() -> None:
    calls = [shaped("aten::relu", start, start + 1, [size]) for start, size in ((0, 4), (2, 4), (4, 8))]
    assert [(one.shapes, one.calls) for one in operators(ProgramSlices.of(made(step(1, 0, 9), calls)))] == [
        ("[4]", 2),
        ("[8]", 1),
    ]


def test_operators_outside_the_window_do_not_count() -> None:
    assert set(found(step(1, 10, 20), slice_("before", 1, 5), slice_("within", 12, 14), slice_("after", 20, 22))) == {
        "within"
    }


def lagging() -> list[Record]:
    """Two products a step of 40 us, launched at once, of which the device does one a step."""
    parts: list[Record] = [step(1, 0, 40), step(2, 40, 80)]
    for number, at in enumerate((0, 5, 40, 45)):
        parts.append(shaped("aten::linear", at, at + 4, [8, 8], [8, 8]))
        parts.append(shaped("aten::mm", at + 1, at + 3, [8, 8], [8, 8]))
        parts += launched("gemm", at + 1.5, 10 + 40 * number, 50 + 40 * number, number + 1)
    return parts


def test_of_a_device_that_is_behind_calls_and_time_are_of_the_same_work() -> None:
    by_name = found(lagging())
    one = by_name["aten::mm"]
    assert (one.calls, one.kernels, one.device, one.flops) == (2, 2, 80_000, 2 * 2 * 8**3)
    assert one.host == 4 * 2_000
    assert by_name["aten::linear"].calls == 2


def test_work_that_was_launched_before_the_window_counts_with_its_call() -> None:
    one = found(step(1, 10, 20), shaped("aten::mm", 0, 5, [8, 8], [8, 8]), launched("gemm", 2, 12, 25, 1))["aten::mm"]
    assert (one.calls, one.kernels, one.device, one.host) == (1, 1, 13_000, 0)


def test_an_operator_whose_work_is_all_done_later_has_no_calls_yet() -> None:
    one = found(step(1, 0, 10), shaped("aten::mm", 0, 5, [8, 8], [8, 8]), launched("gemm", 2, 12, 25, 1))["aten::mm"]
    assert (one.calls, one.device, one.flops, one.host, one.of_ceiling) == (0, 0, 0, 5_000, None)


def test_arithmetic_is_of_all_calls_and_of_the_innermost_that_has_it() -> None:
    within = shaped("aten::addmm", 2, 8, [4], [2, 3], [3, 4])
    again = shaped("aten::addmm", 12, 18, [4], [2, 3], [3, 4])
    by_name = found(step(1, 0, 20), shaped("aten::linear", 0, 10, [2, 3], [4, 3], [4]), within, again)
    assert by_name["aten::addmm"].flops == 2 * (2 * 2 * 3 * 4)
    assert by_name["aten::addmm"].bytes == 2 * 4 * (2 * 3 + 3 * 4 + 2 * 4)
    assert by_name["aten::linear"].flops is None


def test_a_large_matrix_product_is_bound_by_arithmetic() -> None:
    call = shaped("aten::mm", 0, 10, [8192, 8192], [8192, 8192], dtype="c10::BFloat16")
    one = found(step(1, 0, 10_000), call, launched("gemm", 2, 20, 2020, 1), **H200)["aten::mm"]
    assert one.dtype == "bfloat16"
    assert one.bound == "compute"
    assert one.of_ceiling == pytest.approx(2 * 8192**3 / 989.4e12 / 2e-3)


def test_an_addition_is_bound_by_memory() -> None:
    call = shaped("aten::add", 0, 10, [2**28], [2**28])
    one = found(step(1, 0, 10_000), call, launched("add", 2, 20, 1020, 1), **H200)["aten::add"]
    assert one.bound == "memory"
    assert one.of_ceiling == pytest.approx(3 * 4 * 2**28 / 4.8e12 / 1e-3)


def test_a_device_that_is_not_listed_has_no_ceiling() -> None:
    call = shaped("aten::add", 0, 10, [2**28], [2**28])
    unknown = {"deviceProperties": [{"id": 0, "name": "Some device"}]}
    one = found(step(1, 0, 10_000), call, launched("add", 2, 20, 1020, 1), **unknown)["aten::add"]
    assert (one.bound, one.of_ceiling) == ("insufficient data", None)
    assert one.bytes == 3 * 4 * 2**28


def test_without_shapes_nothing_is_said_of_arithmetic() -> None:
    one = found(step(1, 0, 100), slice_("aten::mm", 0, 10), launched("gemm", 2, 20, 30, 1), **H200)["aten::mm"]
    assert (one.shapes, one.flops, one.bytes, one.bound) == ("", None, None, "insufficient data")


@pytest.mark.parametrize("dims", [[["x"], [3]], "nonsense", [[-1, 4], [4, 4]], [[2**62, 2**62], [4]], [None], [[[]]]])
def test_shapes_that_make_no_sense_are_no_error(dims: Any) -> None:
    event = slice_("aten::mm", 0, 10, **{"Input Dims": dims, "Input type": ["float", "float"]})
    assert found(step(1, 0, 100), event)["aten::mm"].flops is None


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_operators_of_a_real_program() -> None:
    program = ProgramSlices.of(read(PUBLIC / "tracelens_h100_bert_small.json.gz"))
    by_shape = {(one.name, one.shapes): one for one in operators(program)}
    head = by_shape["aten::addmm", "[30522] [141, 512] [512, 30522]"]
    assert head.flops == 2 * 141 * 512 * 30522
    assert head.bound == "memory"
    assert head.of_ceiling is not None
    assert 0.2 < head.of_ceiling < 0.4
    assert sum(one.device for one in by_shape.values()) == 309_437


MI300 = {"id": 0, "name": "AMD Instinct MI300X", "totalGlobalMem": 1}


def product_on(device: int, *described: dict[str, Any]) -> RankProfile:
    """Of a bf16 product whose kernel ran on this device."""
    types: dict[str, Any] = {
        "Input Dims": [[4096, 4096], [4096, 4096]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
    }
    launch = call("hipLaunchKernel", 1, 2, 5)
    events = [slice_("aten::mm", 0, 3, **types), launch, work("Cijk", 4, 1004, 5, device=device)]
    return analyse([made(events, deviceProperties=list(described))]).ranks[0]


def test_a_device_is_described_by_its_number_and_not_by_its_place() -> None:
    other = {"id": 7, "name": "Some device"}
    for described in ([other, {**MI300, "id": 1}], [{**MI300, "id": 1}, other]):
        rank = product_on(1, *described)
        assert (rank.device_name, rank.operators[0].bound) == ("AMD Instinct MI300X", "compute")
        assert not any("describes no device" in note for note in rank.notes)


def test_a_device_that_is_not_described_is_taken_for_the_only_kind_that_is() -> None:
    for described in ([MI300], [MI300, {**MI300, "id": 1}]):
        rank = product_on(2, *described)
        assert (rank.device_name, rank.operators[0].bound) == ("AMD Instinct MI300X", "compute")
        assert (
            "the trace describes no device 2: it is assumed to be the AMD Instinct MI300X that is described"
            in rank.notes
        )


def test_a_device_that_is_not_described_among_several_kinds_stays_unknown() -> None:
    rank = product_on(2, MI300, {"id": 1, "name": "AMD Instinct MI210"})
    assert (rank.device_name, rank.operators[0].bound) == (None, "insufficient data")
    assert any("the trace describes no device 2, and the described devices differ" in note for note in rank.notes)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_real_trace_of_a_device_that_rocm_numbers_otherwise_has_its_roofline() -> None:
    rank = analyse([read(PUBLIC / "tracelens_mi300_qwen.json.gz")]).ranks[0]
    known = sum(one.device for one in rank.operators if one.bound != "insufficient data")
    assert known > 0.5 * sum(one.device for one in rank.operators)
