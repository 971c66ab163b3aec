"""Arithmetic, traffic, and ceilings."""

from typing import Any

import pytest
from traces_made import call, made, slice_, work

from gpubench.hardware import find_accelerator
from gpubench.trace.columns import Signature
from gpubench.trace.operators import Ceiling, OperatorCost, ceiling, cost, operators, peak_of
from gpubench.trace.slices import ProgramSlices

A100, V100 = find_accelerator("NVIDIA A100-SXM4-80GB"), find_accelerator("Tesla V100-SXM2-16GB")
CONV = ["", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"]


def signature(*dims: list[int], dtype: str = "float", concrete: list[str] | None = None, **more: Any) -> Signature:
    return Signature(list(dims), [dtype] * len(dims), concrete=concrete or [], **more)


@pytest.mark.parametrize(
    ("name", "dims", "flops", "elements"),
    [
        ("mm", [[2, 3], [3, 5]], 2 * 2 * 3 * 5, 6 + 15 + 10),
        ("addmm", [[5], [2, 3], [3, 5]], 2 * 2 * 3 * 5, 6 + 15 + 10),
        ("bmm", [[7, 2, 3], [7, 3, 5]], 7 * 2 * 2 * 3 * 5, 7 * (6 + 15 + 10)),
        ("baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5]], 7 * 2 * 2 * 3 * 5, 7 * (6 + 15 + 10)),
        ("matmul", [[7, 2, 3], [3, 5]], 7 * 2 * 2 * 3 * 5, 7 * 6 + 15 + 7 * 10),
        ("linear", [[7, 2, 3], [5, 3], [5]], 7 * 2 * 2 * 3 * 5, 7 * 6 + 15 + 7 * 10),
        ("add", [[4, 5], [5]], None, 20 + 5 + 20),
        ("add_", [[4, 5], [4, 5]], None, 60),
        ("add", [[1000, 1], [1, 1000]], None, 2_000 + 1_000_000),
        ("add", [[4, 5], [2]], None, 20 + 2 + 20),
        ("native_batch_norm", [[4, 5, 3, 3], [5]], None, 180 + 5 + 180),
        ("native_layer_norm", [[4, 5]], None, 40),
        ("sum", [[4, 5]], None, 20),
        ("zero_", [[4, 5]], None, 20),
        ("copy_", [[4, 5], [4, 5]], None, 40),
    ],
)
def test_cost_of_one_call(name: str, dims: list[list[int]], flops: float | None, elements: int) -> None:
    assert cost(f"aten::{name}", signature(*dims)) == OperatorCost(flops, 4 * elements)


@pytest.mark.parametrize(("name", "moved"), [("mul", 4_000_000), ("mul_", 4_000_000)])
def test_a_number_beside_a_tensor_moves_nothing_and_decides_no_type(name: str, moved: int) -> None:
    found = cost(f"aten::{name}", Signature([[1000, 1000], []], ["c10::BFloat16", "double"]))
    assert found == OperatorCost(None, moved)


def test_an_expanded_tensor_is_read_once() -> None:
    expanded = Signature([[3, 1000, 1000], []], ["c10::BFloat16", "double"], [[0, 1000, 1], []])
    assert cost("aten::add", expanded) == OperatorCost(None, 8_000_000)


def test_a_convolution_needs_its_settings() -> None:
    dims = [[8, 3, 224, 224], [64, 3, 7, 7], []]
    output = 8 * 64 * 112 * 112
    found = cost("aten::convolution", signature(*dims, concrete=CONV))
    assert found == OperatorCost(2 * output * 3 * 7 * 7, 4 * (8 * 3 * 224 * 224 + 64 * 3 * 7 * 7 + output))
    assert cost("aten::convolution", signature(*dims)) is None


def test_convolutions_of_all_libraries_agree() -> None:
    dims = [[8, 3, 224, 224], [64, 3, 7, 7], []]
    whole = cost("aten::convolution", signature(*dims, concrete=CONV))
    cudnn = ["", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]
    mkldnn = ["", "", "", "[3, 3]", "[2, 2]", "[1, 1]", "1"]
    assert cost("aten::cudnn_convolution", signature(*dims, concrete=cudnn)) == whole
    assert cost("aten::mkldnn_convolution", signature(*dims, concrete=mkldnn)) == whole


def test_a_grouped_convolution_multiplies_within_its_group() -> None:
    found = cost(
        "aten::convolution",
        signature([1, 8, 4, 4], [8, 1, 1, 1], [], concrete=[*CONV[:3], "[1, 1]", "[0, 0]", *CONV[5:]]),
    )
    assert found is not None
    assert found.flops == 2 * 8 * 16


def test_a_transposed_convolution_is_not_told() -> None:
    concrete = [*CONV[:6], "True", *CONV[7:]]
    assert cost("aten::convolution", signature([1, 8, 4, 4], [8, 1, 1, 1], [], concrete=concrete)) is None


def test_a_backward_convolution_counts_the_gradients_asked_for() -> None:
    dims = [[8, 64, 112, 112], [8, 3, 224, 224], [64, 3, 7, 7]]
    once = 2 * 8 * 64 * 112 * 112 * 3 * 7 * 7
    settings = ["", "", "", "[64]", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"]
    for mask, times in (("[True, True, False]", 2), ("[False, True, True]", 1)):
        found = cost("aten::convolution_backward", signature(*dims, concrete=[*settings, mask]))
        assert found is not None
        assert found.flops == times * once


def test_causal_attention_is_half() -> None:
    dims, whole = [[2, 8, 128, 64], [2, 8, 256, 64], [2, 8, 256, 64]], 4 * 2 * 8 * 128 * 256 * 64
    for causal, flops in (("False", whole), ("True", whole / 2)):
        concrete = ["", "", "", "0.", causal]
        found = cost("aten::_scaled_dot_product_flash_attention", signature(*dims, concrete=concrete))
        assert found is not None
        assert found.flops == flops
    assert cost("aten::_scaled_dot_product_flash_attention", signature(*dims)) is None


def test_the_flash_kernels_operator_has_its_heads_behind_the_sequence() -> None:
    concrete = ["", "", "", "", "", "128", "256", "0.", "False"]
    found = cost(
        "aten::_flash_attention_forward",
        signature([2, 128, 8, 64], [2, 256, 8, 64], [2, 256, 8, 64], concrete=concrete),
    )
    assert found is not None
    assert found.flops == 4 * 2 * 8 * 128 * 256 * 64


def test_attention_backward_is_two_and_a_half_times_the_forward() -> None:
    tensors = [[2, 8, 128, 64]] * 5
    concrete = [""] * 7 + ["False"]
    found = cost("aten::_scaled_dot_product_flash_attention_for_cpu_backward", signature(*tensors, concrete=concrete))
    assert found is not None
    assert found.flops == 2.5 * 4 * 2 * 8 * 128 * 128 * 64


def test_a_broadcast_input_is_read_once() -> None:
    found = cost("aten::copy_", signature([4, 5], [4, 5], strides=[[5, 1], [0, 1]]))
    assert found == OperatorCost(None, 4 * (20 + 5))


@pytest.mark.parametrize("name", ["aten::view", "mylib::fused", "aten::mm"])
def test_what_is_not_known_has_no_cost(name: str) -> None:
    assert cost(name, signature([3])) is None


def test_the_longer_of_moving_and_computing_is_the_bound() -> None:
    assert ceiling(OperatorCost(1e12, 1e9), 4.0, peak=1e12, bandwidth=1e12).bound == "compute"
    found = ceiling(OperatorCost(1e9, 1e12), 4.0, peak=1e12, bandwidth=1e12)
    assert (found.bound, found.fraction) == ("memory", 0.25)


def test_little_arithmetic_for_each_byte_is_bound_by_memory_however_slow_the_work_is() -> None:
    assert ceiling(OperatorCost(None, 1e9), 4.0, peak=None, bandwidth=1e12) == Ceiling("memory", 0.00025)


def test_faster_than_the_bandwidth_means_that_a_cache_had_the_bytes() -> None:
    assert ceiling(OperatorCost(None, 1e12), 0.5, peak=None, bandwidth=1e12) == Ceiling("memory", None)


def test_arithmetic_faster_than_the_peak_was_of_another_kind() -> None:
    assert ceiling(OperatorCost(1e12, 1.0), 0.5, peak=1e12, bandwidth=1e12).bound == "insufficient data"


def test_single_precision_may_be_tf32_and_only_the_kernel_tells() -> None:
    assert A100 is not None
    assert peak_of(A100, "float32", ["ampere_sgemm_128x64_nn"]) == A100.peaks["fp32"]
    assert peak_of(A100, "float32", ["cutlass_80_tensorop_s1688gemm_128x128"]) == A100.peaks["tf32"]
    assert peak_of(A100, "float32", ["sm80_xmma_gemm_f32f32_tf32f32_f32_tn"]) == A100.peaks["tf32"]
    assert peak_of(A100, "float32", ["some_kernel"]) is None


def test_a_device_without_tf32_computes_single_precision_as_it_is() -> None:
    assert V100 is not None
    assert peak_of(V100, "float32", ["anything"]) == V100.peaks["fp32"]
    assert peak_of(V100, "bfloat16", ["anything"]) is None
    assert peak_of(None, "float32", ["ampere_sgemm"]) is None


def test_a_copy_over_a_link_is_not_compared_with_the_devices_bandwidth() -> None:
    """The same copy within the device is."""
    inputs: dict[str, Any] = {"Input Dims": [[1 << 20], [1 << 20]], "Input type": ["float", "float"]}
    for name, bound in (
        ("Memcpy HtoD (Pinned -> Device)", "insufficient data"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
    ):
        trace = made(
            slice_("aten::copy_", 0, 10, **inputs),
            call("cudaMemcpyAsync", 1, 2, 1),
            work(name, 5, 105, 1, cat="gpu_memcpy"),
            deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        )
        (copy,) = operators(ProgramSlices.of(trace))
        assert (copy.bytes, copy.bound) == (2 * 4 * (1 << 20), bound)
