"""Attention that is made of separate operators, and why its fused kernels were not used."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from traces_made import PUBLIC, Record, launched, made, slice_, step

from gpubench.trace.attention import attention, obstacles
from gpubench.trace.columns import DeviceProperties, Signature
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Attention
from gpubench.trace.slices import ProgramSlices

GROUPS, QUERIES, KEYS, HEAD = 12, 100, 90, 64
SCORES, Q, V = [GROUPS, QUERIES, KEYS], [GROUPS, QUERIES, HEAD], [GROUPS, KEYS, HEAD]
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>"
GEMM = "ampere_sgemm_128x64_tn"
KERNELS = {"aten::bmm": GEMM, "aten::mm": GEMM, "aten::addmm": GEMM, "aten::_softmax": SOFTMAX}

Calls = list[tuple[str, list[list[int]]]]
FORWARD: Calls = [
    ("aten::bmm", [Q, [GROUPS, HEAD, KEYS]]),
    ("aten::div", [[1, *SCORES], []]),
    ("aten::add", [[1, *SCORES], [1, 1, QUERIES, KEYS]]),
    ("aten::_softmax", [[1, *SCORES], []]),
    ("aten::native_dropout", [[1, *SCORES], []]),
    ("aten::bmm", [SCORES, V]),
]
BACKWARD: Calls = [
    ("aten::bmm", [[GROUPS, KEYS, QUERIES], Q]),
    ("aten::bmm", [Q, [GROUPS, HEAD, KEYS]]),
    ("aten::native_dropout_backward", [[1, *SCORES], [1, *SCORES]]),
    ("aten::_softmax_backward_data", [[1, *SCORES], [1, *SCORES]]),
    ("aten::div", [[1, *SCORES], []]),
    ("aten::bmm", [SCORES, V]),
    ("aten::bmm", [[GROUPS, HEAD, QUERIES], SCORES]),
]
LINEAR: Calls = [("aten::addmm", [[768], [100, 768], [768, 768]])]


def ran(calls: Calls, shapes: bool = True, device: bool = True, operators: bool = True) -> list[Record]:
    """Operators of 10 us one after the other, each of which launches a kernel of 10 us."""
    records: list[Record] = [step(1, 0, 10 * len(calls) + 100)]
    for number, (name, dims) in enumerate(calls):
        at = 10.0 * number
        types = ["float" if one else "Scalar" for one in dims]
        about: dict[str, Any] = {"Input Dims": dims, "Input type": types} if shapes else {}
        if operators:
            records.append(slice_(name, at, at + 10, **about))
        if device:
            records += launched(KERNELS.get(name, ELEMENTWISE), at + 1, at + 50, at + 60, number + 1)
    return records


def found(*parts: Record | list[Record]) -> list[Attention]:
    program = ProgramSlices.of(made(*parts))
    return attention(program, phase_of(program))


@pytest.mark.parametrize("device", [True, False])
def test_a_softmax_between_two_batched_products_is_attention(device: bool) -> None:
    (one,) = found(ran(LINEAR + FORWARD + LINEAR, device=device))
    assert (one.groups, one.queries, one.keys, one.head_size, one.dtype) == (GROUPS, QUERIES, KEYS, HEAD, "float32")
    assert (one.calls, one.backward_calls, one.backward, one.fallback) == (1, 0, 0, False)
    assert (one.products, one.softmax, one.elementwise) == (20_000, 10_000, 30_000)


def test_its_gradient_has_four_products() -> None:
    (one,) = found(ran(FORWARD + LINEAR * 2 + BACKWARD))
    assert (one.calls, one.backward_calls) == (1, 1)
    assert (one.products, one.softmax, one.elementwise, one.backward) == (60_000, 20_000, 50_000, 70_000)


def test_layers_of_the_same_sizes_are_one_entry() -> None:
    (one,) = found(ran((FORWARD + LINEAR) * 24))
    assert (one.calls, one.total) == (24, 24 * 60_000)


def test_layers_of_other_sizes_are_another() -> None:
    short: Calls = [
        (name, [[7 if size == KEYS else size for size in shape] for shape in dims]) for name, dims in FORWARD
    ]
    assert [one.keys for one in found(ran(FORWARD + short + FORWARD))] == [KEYS, 7]


def test_without_shapes_the_order_on_a_stream_tells() -> None:
    (one,) = found(ran(LINEAR + FORWARD + LINEAR + BACKWARD, shapes=False))
    assert (one.calls, one.backward_calls, one.products, one.softmax) == (1, 1, 60_000, 20_000)
    assert (one.groups, one.queries, one.keys, one.head_size, one.dtype) == (None, None, None, None, "")


def test_kernels_without_operators_tell_as_well() -> None:
    (one,) = found(ran(FORWARD, operators=False))
    assert (one.products, one.softmax, one.elementwise) == (20_000, 10_000, 30_000)


@pytest.mark.parametrize(
    "calls",
    [
        [*LINEAR, ("aten::_softmax", [[100, 768], []]), ("aten::topk", [[100, 768]]), *LINEAR],  # a router of experts
        [*LINEAR, ("aten::_log_softmax", [[100, 768], []]), ("aten::nll_loss_forward", [[100, 768]]), *LINEAR],
        FORWARD[:4],  # no product with values
        FORWARD[3:],
        [("aten::bmm", [Q, [GROUPS, HEAD, KEYS]]), *LINEAR, ("aten::bmm", [SCORES, V])],  # no softmax
    ],
)
@pytest.mark.parametrize("shapes", [True, False])
def test_other_softmaxes_and_other_products_are_no_attention(calls: Calls, shapes: bool) -> None:
    assert found(ran(calls, shapes=shapes)) == []


def test_with_shapes_products_of_other_sizes_are_not_its_own() -> None:
    unlike: Calls = [("aten::bmm", [[3, 8, 8], [3, 8, 8]]), FORWARD[3], ("aten::bmm", [[3, 8, 8], [3, 8, 8]])]
    assert found(ran(unlike)) == []


def test_of_kernels_that_one_product_launches_in_a_row_all_count() -> None:
    records = ran(FORWARD)
    records += launched("splitKreduce_kernel", 2, 60, 61, 99)  # of the first product, right behind its own kernel
    (one,) = found([record for record in records if record["name"] != ELEMENTWISE])
    assert one.products == 21_000


def test_attention_of_sdpas_math_backend_is_told_apart_with_what_keeps_fused_kernels_away() -> None:
    dims = [[1, GROUPS, QUERIES, 81], [1, GROUPS, KEYS, 81], [1, GROUPS, KEYS, 81], [QUERIES, KEYS], [], []]
    types = [*["float"] * 4, "Scalar", "Scalar"]
    inputs: dict[str, Any] = {"Input Dims": dims, "Input type": types, "Concrete Inputs": [*[""] * 4, "0.", "False"]}
    around = slice_("aten::_scaled_dot_product_attention_math", 0, 60, **inputs)
    (one,) = found(ran(FORWARD), around)
    assert one.fallback
    assert one.obstacles == [
        "flash attention takes no attn_mask, and one of [100, 90] (float32) was given",
        "flash attention takes float16 and bfloat16, not float32",
        "memory-efficient attention takes head sizes that are multiples of 4 in float32, not 81",
    ]


def call(*shapes: list[int], dtype: str = "c10::Half", concrete: tuple[str, ...] = (), **more: Any) -> Signature:
    return Signature(list(shapes), [dtype if shape else "" for shape in shapes], concrete=list(concrete), **more)


SQUARE = [2, 8, 128, 64]


def device(name: str, major: int, minor: int) -> DeviceProperties:
    described = {"id": 0, "name": name, "computeMajor": major, "computeMinor": minor}
    return made(step(1, 0, 1), deviceProperties=[described]).devices[0]


A100, V100 = device("NVIDIA A100-SXM4-80GB", 8, 0), device("Tesla V100-SXM2-16GB", 7, 0)
MI300X = device("AMD Instinct MI300X", 9, 4)


@pytest.mark.parametrize(
    ("signature", "used", "told"),
    [
        (call(SQUARE, SQUARE, SQUARE), A100, []),
        (call(SQUARE, SQUARE, SQUARE, [128, 128]), A100, ["flash attention takes no attn_mask"]),
        (call(SQUARE, SQUARE, SQUARE), V100, ["flash attention needs compute capability 8.0"]),
        (call(SQUARE, SQUARE, SQUARE), MI300X, []),  # (9, 4) is no compute capability of CUDA's
        (call(SQUARE, SQUARE, SQUARE, dtype="float"), A100, ["flash attention takes float16 and bfloat16, not fl"]),
        (
            call(SQUARE, SQUARE, SQUARE, dtype="double"), A100,
            ["flash attention takes float16", "memory-efficient attention takes float16, bfloat16 and float32, not"],
        ),
        (call(*[[2, 8, 128, 320]] * 3), A100, ["flash attention takes head sizes up to 256, not 320"]),
        (call(*[[2, 8, 128, 81]] * 3), A100, ["memory-efficient attention takes head sizes that are multiples of 8"]),
        (call(SQUARE, SQUARE, [2, 8, 128, 32]), A100, ["flash attention takes one head size, not 32 and 64"]),
        (call(*[[16, 128, 64]] * 3), A100, ["every fused kernel takes inputs of 4 dimensions"]),
        (call(SQUARE, [1, 8, 128, 64], SQUARE), A100, ["every fused kernel takes one batch size"]),
        (
            call(SQUARE, [2, 8, 96, 64], [2, 8, 96, 64], [], [], [], concrete=("", "", "", "", "0.", "True")), A100,
            ["flash attention takes is_causal for as many queries as keys, not for 128 and 96"],
        ),
        (
            call(SQUARE, SQUARE, SQUARE, strides=[[65536, 8192, 1, 128], *[[65536, 8192, 64, 1]] * 2]), A100,
            ["every fused kernel takes inputs whose last dimension is contiguous"],
        ),
        (Signature([], []), A100, []),
    ],
)  # fmt: skip
def test_what_keeps_fused_kernels_from_a_call(signature: Signature, used: DeviceProperties, told: list[str]) -> None:
    found = obstacles(signature, used, on_cpu=False)
    assert len(found) == len(told)
    assert all(said.startswith(start) for said, start in zip(found, told, strict=True))


SIZES = st.lists(st.sampled_from([0, 1, 2, 7]), max_size=3)
ANY_CALL = st.tuples(
    st.sampled_from([
        "aten::bmm", "aten::baddbmm", "aten::mm", "aten::_softmax", "aten::_softmax_backward_data", "aten::add",
        "aten::_scaled_dot_product_attention_math", "aten::view",
    ]),
    st.lists(SIZES, max_size=4),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY_CALL, max_size=15), st.booleans(), st.booleans())
def test_whatever_runs_attention_takes_no_more_than_all_of_it(calls: Calls, shapes: bool, device: bool) -> None:
    assert 0 <= sum(one.total for one in found(ran(calls, shapes=shapes, device=device))) <= 10_000 * len(calls)


class Attend(torch.nn.Module):
    def __init__(self, dropout: float | None) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.dropout = dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = (part.view(2, 20, 4, 8).transpose(1, 2) for part in self.project(tokens).chunk(3, -1))
        query, key, value = parts
        if self.dropout is not None:
            return functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        scores = query @ key.transpose(-1, -2) / math.sqrt(8)
        answer: torch.Tensor = scores.softmax(-1) @ value
        return answer


def recorded(folder: Path, dropout: float | None, shapes: bool = True) -> list[Attention]:
    model = Attend(dropout)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        for _ in range(2):
            model(torch.randn(2, 20, 32)).sum().backward()
    profiler.export_chrome_trace(str(folder / "recorded.json"))
    program = ProgramSlices.of(read(folder / "recorded.json"))
    return attention(program, phase_of(program))


def test_a_recorded_program_that_multiplies_and_takes_the_softmax_itself(tmp_path: Path) -> None:
    (one,) = recorded(tmp_path, None)
    assert (one.groups, one.queries, one.keys, one.head_size) == (8, 20, 20, 8)
    assert (one.calls, one.backward_calls, one.fallback) == (2, 2, False)


def test_the_same_without_shapes(tmp_path: Path) -> None:
    (one,) = recorded(tmp_path, None, shapes=False)
    assert (one.calls, one.backward_calls, one.queries) == (2, 2, None)


def test_a_recorded_fallback_tells_its_reason_and_its_gradient_is_its_own(tmp_path: Path) -> None:
    (one,) = recorded(tmp_path, 0.25)
    assert (one.calls, one.backward_calls, one.fallback) == (2, 2, True)
    assert one.obstacles == ["the fused kernel for CPUs takes no dropout, and dropout_p is 0.25"]


def test_a_fused_kernel_is_nothing_to_tell(tmp_path: Path) -> None:
    assert recorded(tmp_path, 0.0) == []


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_attention_is_most_of_what_a_real_program_computes() -> None:
    program = ProgramSlices.of(read(PUBLIC / "tracelens_h100_owlv2.json.gz"))
    most = attention(program, phase_of(program))[0]
    assert (most.groups, most.queries, most.keys, most.head_size, most.dtype) == (16, 5185, 5185, 64, "bfloat16")
    assert (most.calls, most.products, most.softmax) == (120, 229_327_110, 262_422_467)
