from typing import Any

import msgspec
import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, ids, kernel, only, operator, phase, saving, training
from traces_made import call, made, slice_, step, work

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding
from gpubench.trace.families import MOVES_MEMORY, family
from gpubench.trace.kernels import KernelKind, moves_memory
from gpubench.trace.profile import Attention, Compiled, Reservations
from gpubench.trace.reservations import reservations
from gpubench.trace.slices import ProgramSlices


def repeating(part: int, held: float = 20e9, **settings: Any) -> ProfileCase:
    rank = gpu(phases=[phase("backward", device=60 * PERCENT, recompute=part)])
    environment = {"gpus": [{"memory_bytes": 80e9}]}
    metrics = {"peak_memory_reserved": held}
    return case(rank, settings=training(**settings), metrics=metrics, environment=environment)


def test_checkpointing_is_given_up_where_memory_allows() -> None:
    finding = only(repeating(20 * PERCENT, model__activation_checkpointing=True))
    assert (finding.id, finding.fix) == ("recompute", {"model.activation_checkpointing": False})
    assert saving(finding) == pytest.approx(0.2)
    assert "the run without the profiler held 25.0 % of the GPU's memory at its peak" in finding.evidence


def test_on_a_cpu_what_is_computed_twice_is_the_hosts_time() -> None:
    rank = cpu(phases=[phase("backward", host=50 * PERCENT, recompute=20 * PERCENT)])
    finding = only(case(rank, settings=training(model__activation_checkpointing=True)))
    assert (finding.id, finding.fix) == ("recompute", {"model.activation_checkpointing": False})
    assert saving(finding) == pytest.approx(0.2)


@pytest.mark.parametrize("some", [2, "layers.*.mlp"])
def test_checkpointing_of_some_blocks_is_given_up_as_that_of_all_is(some: int | str) -> None:
    finding = only(repeating(20 * PERCENT, model__activation_checkpointing=some))
    assert finding.fix == {"model.activation_checkpointing": False}


def test_checkpointing_stays_where_memory_is_short() -> None:
    assert only(repeating(20 * PERCENT, held=60e9, model__activation_checkpointing=True)).fix == {}


def test_a_little_recomputing_is_a_fair_price() -> None:
    assert ids(repeating(5 * PERCENT)) == ["recompute"]
    assert ids(repeating(5 * PERCENT - 1)) == []


def test_memory_from_the_driver_in_every_step_is_a_finding() -> None:
    assert "empty_cache" in only(case(gpu(idle={"allocator": PERCENT}))).advice
    assert ids(case(gpu(idle={"allocator": PERCENT - 1}))) == []


def reserving(by_step: list[int], *, tensors: int = 1000, names: tuple[str, ...] = ("cudaMalloc",)) -> Finding:
    """The finding for so many calls in each step, or without steps if there is one number."""
    calls = sum(by_step)
    steps = by_step if len(by_step) > 1 else []
    pinned = calls * 1000 * ("Host" in names[0])
    found = Reservations(
        dict.fromkeys(names, calls), calls * 1000, pinned, calls, calls * (len(names) > 1), tensors,
        "Map" in names[0], steps,
    )  # fmt: skip
    return only(case(gpu(idle={"allocator": 10 * PERCENT}, reservations=found, step_numbers=list(range(len(steps))))))


BOTH = ("cudaMalloc", "cudaFree")


@pytest.mark.parametrize(
    ("found", "cause", "advice"),
    [
        (
            reserving([40, 40, 40], tensors=120, names=BOTH),
            "for nearly every tensor (120 calls",
            "unset PYTORCH_NO_CUDA",
        ),
        (reserving([400], tensors=400, names=BOTH), "for nearly every tensor (400 calls", "unset PYTORCH"),
        (reserving([24], tensors=30, names=BOTH), "the trace alone does not show which", "had just begun"),
        (reserving([400], tensors=400), "the trace alone does not show which", "had just begun"),
        (reserving([9, 9, 9], names=BOTH), "every step calls the driver as often as the others", "expandable_segments"),
        (reserving([9, 4, 0]), "sizes change from step to step", "expandable_segments"),
        (reserving([9, 4, 0], names=("cuMemMap",)), "sizes change from step to step", "pad batches to few sizes"),
        (reserving([9, 0, 0]), "only the first recorded step", "record after a few steps"),
        (reserving([9, 4, 1], names=("cudaHostAlloc",)), "page-locked CPU memory", "reuse page-locked tensors"),
    ],
)
def test_memory_from_the_driver_has_the_cause_that_the_calls_show(found: Finding, cause: str, advice: str) -> None:
    said = f"{found.cause} {found.advice} {found.evidence}"
    assert cause in found.cause
    assert advice in found.advice
    assert ("from step to step" in said) == ("change" in cause)
    assert ("expandable" in said) == ("expandable" in advice)
    assert "already be cached" not in said
    assert (found.expected is None) == ("first recorded" in cause)


def test_calls_of_the_driver_for_memory_are_counted_by_step() -> None:
    events = [step(1, 0, 100), step(2, 100, 200)]
    for at in (10, 110, 120):
        events += [
            slice_("aten::empty", at, at + 6),
            call("cudaMalloc", at + 1, at + 5),
            call("cudaFree", at + 7, at + 8),
        ]
    events += [call("cudaHostAlloc", 150, 152), call("cudaLaunchKernel", 160, 161, 1), work("k", 170, 180, 1)]
    found = reservations(ProgramSlices.of(made(events)))
    calls = {"cudaMalloc": 3, "cudaFree": 3, "cudaHostAlloc": 1}
    assert found == Reservations(calls, 17_000, 2_000, 4, 3, 3, False, [2, 5])
    assert reservations(ProgramSlices.of(made(events[:2], slice_("aten::empty", 0, 1)))) is None


def test_a_cache_that_is_switched_off_is_named_as_the_cause() -> None:
    environment = {"variables.PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    finding = only(case(gpu(idle={"allocator": 30 * PERCENT}), environment=environment))
    assert finding.cause == "PyTorch's caching allocator is switched off"


GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"


def moving(*parts: int, reached: float | None = 0.3, calls: int = STEPS, **known: Any) -> ProfileCase:
    """A step with elementwise operators and copies of so many nanoseconds, in kernels of their names."""
    names = list(zip((GELU, COPY), ("aten::gelu", "aten::copy_"), parts, strict=False))
    kernels = [kernel(name, part, operator=by, calls=calls) for name, by, part in names]
    bound = "insufficient data" if reached is None else "memory"
    operators = [operator(by, part, bound=bound, of_ceiling=reached) for _, by, part in names]
    about = {"fusible": sum(parts)} | known.pop("parts", {})
    return case(gpu(kernels=kernels, operators=operators, **about), **known)


@pytest.mark.parametrize(("part", "clause"), [(30 * PERCENT, "; 30 % of the step is memory-bound"), (19 * PERCENT, "")])
def test_the_headline_of_a_busy_gpu_names_what_memory_bounds(part: int, clause: str) -> None:
    said = diagnose(moving(part)).headline
    assert said.startswith("GPU computes ")
    assert said.endswith(clause)
    assert ("memory" in said) == bool(clause)


def test_operators_bound_by_memory_are_fused_by_the_compiler() -> None:
    finding = only(moving(20 * PERCENT, 10 * PERCENT, reached=0.8, settings=training()))
    assert (finding.id, finding.fix) == ("memory-bound", {"performance.compile": True})
    assert saving(finding) == pytest.approx(0.3)
    assert "elementwise 20.0 %, copies 10.0 %" in finding.evidence[0]
    assert "reach 80.0 % of the memory bandwidth" in finding.evidence[1]
    assert "aten::gelu" in finding.evidence[2]
    assert ids(moving(20 * PERCENT - 1)) == []
    assert ids(moving(30 * PERCENT, settings=training(performance__compile=True))) == []


def test_what_fusing_saves_is_no_more_than_neighbours_leave() -> None:
    assert saving(only(moving(20 * PERCENT, 10 * PERCENT, parts={"fusible": 12 * PERCENT}))) == pytest.approx(0.12)
    alone = only(moving(30 * PERCENT, parts={"fusible": 0}))
    assert (alone.id, alone.expected) == ("memory-bound", None)


@pytest.mark.parametrize("reached", [0.9, 0.5, 0.1, 0.001, None])
def test_whatever_part_of_the_bandwidth_they_reach_operators_that_move_memory_count(reached: float | None) -> None:
    """Those that reach the least of it have the most to gain from being fused."""
    assert ids(moving(24 * PERCENT, 19 * PERCENT, reached=reached)) == ["memory-bound"]


def test_products_of_few_rows_count_where_their_intensity_is_known_and_ask_for_a_larger_batch() -> None:
    """As a language model has them that makes one token after the other."""
    thin = operator("aten::mm", 60 * PERCENT, shapes="[1, 4096] [4096, 4096]", bound="memory", of_ceiling=0.8)
    finding = only(case(gpu(operators=[thin])))
    assert "matrix products and convolutions 60.0 %" in finding.evidence[0]
    assert finding.advice.startswith("a larger batch reads the weights once")
    assert finding.expected is None


def test_in_a_compiled_program_what_is_left_outside_of_its_regions_counts() -> None:
    fused = kernel("triton_poi_fused_add_gelu_0", 60 * PERCENT)
    compiled = {"compiled": Compiled(regions=2, graph_breaks=0, compilations=0, compiling=0)}
    assert "memory-bound" not in ids(case(gpu(kernels=[fused], **compiled)))
    assert "into the compiled regions" in only(moving(30 * PERCENT, parts=compiled)).advice


def test_without_shapes_kernels_are_judged_by_their_names_and_that_is_said() -> None:
    finding = only(moving(43 * PERCENT, reached=None, parts={"missing": {"shapes": "record_shapes"}}))
    assert saving(finding) == pytest.approx(0.43)
    assert finding.evidence[1].startswith("judged by the names of the kernels: without shapes")


def test_without_operators_kernels_are_named() -> None:
    kernels = [kernel(ADD, 30 * PERCENT), kernel("ampere_bf16_s16816gemm", 40 * PERCENT)]
    finding = only(case(gpu(kernels=kernels)))
    assert finding.evidence[0].startswith("30 ms a step (30.0 %)")
    assert finding.evidence[2].startswith("void at::native::vectorized_elementwise_kernel")


def test_kernels_of_unknown_names_count_by_the_operator_that_launches_them() -> None:
    assert ids(case(gpu(kernels=[kernel("my_add", 30 * PERCENT, operator="aten::add")]))) == ["memory-bound"]
    assert ids(case(gpu(kernels=[kernel("my_add", 30 * PERCENT, operator="mylib::solve")]))) == []


def test_short_kernels_are_said_to_be_limited_by_their_fixed_cost() -> None:
    finding = only(moving(30 * PERCENT, calls=100_000))
    assert "in kernels under 10.0 us, which their fixed cost limits" in finding.evidence[1]


def test_attention_is_left_to_its_own_rule() -> None:
    attention = Attention(
        groups=16, queries=512, keys=512, head_size=64, dtype="float16", calls=STEPS, backward_calls=0,
        products=10 * PERCENT, softmax=18 * PERCENT, elementwise=12 * PERCENT, backward=0, fallback=False, obstacles=[],
    )  # fmt: skip
    assert "memory-bound" not in ids(moving(49 * PERCENT, parts={"attention": [attention]}))
    finding = next(
        one for one in diagnose(moving(50 * PERCENT, parts={"attention": [attention]})).findings if one.id[0] == "m"
    )
    assert saving(finding) == pytest.approx(0.2)
    assert "leaves out 30.0 % in attention" in finding.evidence[0]


@pytest.mark.parametrize(
    "name",
    [
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_relu_f2f_stages_32x5_tn",
        "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT128x224x64",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized>",
        "void pytorch_flash::flash_fwd_kernel<...softmax...>",
        "attn_fwd",
        "bmm_Bfloat16_Bfloat16Bfloat16_Fp32_t128x8x128u2_s6_et128x8_swiGlu_dynBatch_sm100f",
        "fused_moe_kernel_gelu",
        "triton_poi_fused_add_0",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<AdamFunctor>",
        "ncclDevKernel_ReduceScatter_Sum_bf16",
        "void cudnn::ops::nchwToNhwcKernel<float>",
    ],
)
def test_products_attention_and_what_is_fused_already_are_no_operators_to_fuse(name: str) -> None:
    assert family(name) not in MOVES_MEMORY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GELU, "elementwise"),
        (COPY, "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>", "normalisation"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "normalisation"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "normalisation"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>", "softmax"),
    ],
)
def test_kernels_that_move_memory_are_told_by_their_names(name: str, expected: str) -> None:
    assert family(name) == expected


@pytest.mark.parametrize(
    ("kind", "name", "operator", "moves"),
    [
        ("copy", "Memcpy DtoD (Device -> Device)", "aten::copy_", True),
        ("copy", "CopyDeviceToDevice", "", True),
        ("copy", "Memcpy HtoD (Pinned -> Device)", "aten::copy_", False),
        ("copy", "Memcpy DtoH (Device -> Pageable)", "aten::copy_", False),
        ("copy", "Memcpy PtoP (Device -> Device)", "aten::copy_", False),
        ("copy", "CopyHostToDevice", "aten::copy_", False),
        ("copy", "Memcpy M2D (Host -> Device)", "aten::copy_", False),
        ("set", "Memset (Device)", "aten::zero_", False),
        ("communication", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "aten::copy_", False),
        ("compute", "my_kernel", "aten::add", True),
    ],
)
def test_only_work_within_the_devices_memory_is_limited_by_it(
    kind: KernelKind, name: str, operator: str, moves: bool
) -> None:
    assert moves_memory(kind, name, operator) == moves


def test_copies_over_a_link_are_not_memory_bound() -> None:
    """They overlap in both directions, so that together they take longer than the step."""
    both = [
        kernel("Memcpy HtoD (Pinned -> Device)", 99 * PERCENT),
        kernel("Memcpy DtoH (Device -> Pinned)", 58 * PERCENT),
    ]
    copies = [msgspec.structs.replace(one, kind="copy", operator="aten::copy_") for one in both]
    step = case(gpu(kernels=copies, fusible=58 * PERCENT, exposed_copies=99 * PERCENT))
    assert "memory-bound" not in ids(step)
    assert "memory-bound" not in diagnose(step).headline


def test_work_that_is_not_on_the_critical_path_saves_nothing() -> None:
    hidden = {"compute": 5 * PERCENT, "copies": 4 * PERCENT, "communication": 91 * PERCENT}
    assert saving(only(moving(20 * PERCENT, 20 * PERCENT, parts={"critical_path": hidden}))) == pytest.approx(0.09)


def test_work_of_several_streams_is_not_given_as_more_than_the_whole_step() -> None:
    finding = only(moving(90 * PERCENT, 70 * PERCENT))
    assert finding.evidence[0].startswith("160 ms a step (1.6 x the step, as streams overlap) in memory-bound work")
