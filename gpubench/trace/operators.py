"""Computes the time by operator, with arithmetic, memory traffic, and the fraction of the device's limits.

Arithmetic and traffic follow from the shapes of the inputs. A multiply-add counts as two operations. Traffic is every
input read once and the output written once: caches cannot do better, and real kernels do worse.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpubench.hardware import Accelerator, find_accelerator
from gpubench.trace.columns import (
    MISSING,
    Ids,
    Mask,
    Ns,
    Signature,
    Tensor,
    Trace,
    WorkKind,
    at,
    dtype_text,
    flag,
    numbers,
    shapes_text,
    sum_at,
    tensor,
    tensors,
)
from gpubench.trace.profile import Bound, Operator
from gpubench.trace.slices import ProgramSlices, nearest, nearest_around


@dataclass(frozen=True)
class OperatorCost:
    flops: float | None
    """The number of operations; None if only traffic is counted, because there is too little arithmetic to matter."""
    bytes: float


def cost(name: str, signature: Signature) -> OperatorCost | None:
    """The work of one call of `name`; None if it is unknown, or needs values that were not recorded."""
    formula = _FORMULAS.get(name.removeprefix("aten::"))
    return formula(signature) if formula else None


def has_formula(name: str) -> bool:
    """Whether the work of the operator `name` follows from its inputs, if all of them were recorded."""
    return name.removeprefix("aten::") in _FORMULAS


def only_moves_memory(name: str) -> bool:
    """Whether the operator `name` is known to do too little arithmetic to matter beside its traffic."""
    return name.removeprefix("aten::") in _ONLY_TRAFFIC


def _matmul(first: int) -> Callable[[Signature], OperatorCost | None]:
    """The formula of [..., M, K] x [..., K, N], from argument `first` on: 2 * batch * M * K * N (BLAS gemm)."""

    def formula(signature: Signature) -> OperatorCost | None:
        a, b = tensor(signature, first), tensor(signature, first + 1)
        if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            return None
        rows = a.elements // a.shape[-1] if a.elements else 0
        if len(b.shape) > 2 and a.shape[:-2] != b.shape[:-2]:
            return None
        output = rows * b.shape[-1]
        return OperatorCost(2.0 * output * a.shape[-1], a.bytes + b.bytes + output * a.itemsize)

    return formula


def _linear(signature: Signature) -> OperatorCost | None:
    """The cost of [..., K] x transposed [N, K], as a matrix product of all rows."""
    a, weight = tensor(signature, 0), tensor(signature, 1)
    if a is None or weight is None or not a.shape or len(weight.shape) != 2 or a.shape[-1] != weight.shape[-1]:
        return None
    output = a.elements // max(a.shape[-1], 1) * weight.shape[0]
    return OperatorCost(2.0 * output * a.shape[-1], a.bytes + weight.bytes + output * a.itemsize)


def _convolution(
    stride: int, padding: int, dilation: int, transposed: int | None = None
) -> Callable[..., OperatorCost | None]:
    """The formula of a convolution: 2 * output elements * weight elements per output channel.

    The output size is that of torch.nn.Conv2d's docs. The arguments are the positions of the settings among the
    operator's arguments.
    """

    def formula(signature: Signature) -> OperatorCost | None:
        a, weight = tensor(signature, 0), tensor(signature, 1)
        settings = [numbers(signature, place) for place in (stride, padding, dilation)]
        if a is None or weight is None or (transposed is not None and flag(signature, transposed) is not False):
            return None
        spatial = len(a.shape) - 2
        if spatial < 1 or len(weight.shape) != len(a.shape) or any(one is None for one in settings):
            return None
        sizes = [_broadcast(one or [], spatial) for one in settings]
        if any(step < 1 for step in sizes[0]):
            return None
        output = [
            max(0, (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1)
            for size, kernel, step, pad, spread in zip(a.shape[2:], weight.shape[2:], *sizes, strict=True)
        ]
        elements = a.shape[0] * weight.shape[0] * math.prod(output)
        return OperatorCost(
            2.0 * elements * math.prod(weight.shape[1:]), a.bytes + weight.bytes + elements * a.itemsize
        )

    return formula


def _broadcast(values: list[int], length: int) -> list[int]:
    return values if len(values) == length else (values[:1] or [1]) * length


def _convolution_backward(signature: Signature) -> OperatorCost | None:
    """The cost of the requested gradients, of input and weight; each costs as much as the forward pass."""
    gradient, a, weight = (tensor(signature, place) for place in range(3))
    wanted = str(signature.concrete[10]) if len(signature.concrete) > 10 else ""
    if gradient is None or a is None or weight is None or flag(signature, 7) is not False or not wanted.startswith("["):
        return None
    asked = [one.strip() == "True" for one in wanted.strip("[]").split(",")][:2]
    flops = 2.0 * gradient.elements * math.prod(weight.shape[1:]) * sum(asked)
    written = sum(one.bytes for one, is_asked in zip((a, weight), asked, strict=False) if is_asked)
    return OperatorCost(flops, gradient.bytes + a.bytes + weight.bytes + written)


def _attention(query: int, causal: int, sequence: int = -2) -> Callable[[Signature], OperatorCost | None]:
    """The formula of attention, with products of [L, E] and [S, E]: 2 forward, 5 backward, half if causal.

    Source: Dao, "FlashAttention-2" (2023), section 4.1. `query` and `causal` are positions among the inputs, which in a
    backward operator begin with the gradient; `sequence` is the dimension of L and S.
    """
    products = 5 if query else 2

    def formula(signature: Signature) -> OperatorCost | None:
        q, k, v = (tensor(signature, query + place) for place in range(3))
        is_causal = flag(signature, causal)
        if q is None or k is None or v is None or is_causal is None or len(q.shape) != 4 or len(k.shape) != 4:
            return None
        flops = products * 2.0 * q.elements * k.shape[sequence] / (2 if is_causal else 1)
        inputs = q.bytes + k.bytes + v.bytes
        return OperatorCost(flops, inputs + q.bytes if query == 0 else 2 * inputs + 2 * q.bytes)

    return formula


def _traffic(*places: int) -> Callable[[Signature], OperatorCost | None]:
    """The bytes of the tensors at these positions; a position is repeated for each read or write."""

    def formula(signature: Signature) -> OperatorCost | None:
        found = [tensor(signature, place) for place in places]
        return OperatorCost(None, sum(one.bytes for one in found if one)) if all(found) else None

    return formula


def _elementwise(signature: Signature) -> OperatorCost | None:
    """The traffic of all inputs, and of an output of their common shape with the widest type."""
    found = _arrays(signature)
    if not found:
        return None
    output = math.prod(_common_shape(found)) * max(one.itemsize for one in found)
    return OperatorCost(None, sum(one.bytes for one in found) + output)


def _norm(signature: Signature) -> OperatorCost | None:
    """The traffic of all inputs, and of an output as large as the largest input with the widest type."""
    found = _arrays(signature)
    if not found:
        return None
    output = max(one.elements for one in found) * max(one.itemsize for one in found)
    return OperatorCost(None, sum(one.bytes for one in found) + output)


def _arrays(signature: Signature) -> list[Tensor]:
    """The inputs without Python numbers, which come as scalar tensors and do not decide the type."""
    found = tensors(signature)
    return [one for one in found if one.shape] or found


def _common_shape(found: list[Tensor]) -> tuple[int, ...]:
    """The broadcast shape, or the largest one if the shapes do not fit."""
    try:
        return np.broadcast_shapes(*(one.shape for one in found))
    except ValueError:
        return max(found, key=lambda one: one.elements).shape


def _in_place(signature: Signature) -> OperatorCost | None:
    """The traffic of all inputs, of which the first one is also written."""
    found = _arrays(signature)
    return OperatorCost(None, sum(one.bytes for one in found) + found[0].bytes) if found else None


def _reduction(signature: Signature) -> OperatorCost | None:
    """The traffic of the input, because the output is small."""
    found: Tensor | None = tensor(signature, 0)
    return OperatorCost(None, found.bytes) if found else None


_ELEMENTWISE = (
    "add sub mul div pow neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu gelu silu mish hardtanh leaky_relu elu"
    " clamp clamp_min clamp_max where threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward"
    " hardtanh_backward leaky_relu_backward native_dropout_backward addcmul addcdiv lerp masked_fill maximum minimum"
    " _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"
)
# Their other outputs, statistics and gradients of parameters, are too small to count.
_NORMS = (
    "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm"
    " native_layer_norm_backward native_group_norm_backward native_batch_norm_backward cudnn_batch_norm_backward"
    " _fused_rms_norm"
)
_IN_PLACE = (
    "add_ sub_ mul_ div_ relu_ clamp_ clamp_min_ sigmoid_ tanh_ silu_ addcmul_ addcdiv_ lerp_ masked_fill_ sqrt_"
)
_REDUCTIONS = "sum mean max min amax amin argmax argmin any all norm linalg_vector_norm prod std var var_mean"

_ONLY_TRAFFIC = frozenset(f"{_ELEMENTWISE} {_NORMS} {_IN_PLACE} {_REDUCTIONS} fill_ zero_ copy_ cat clone".split())

_FORMULAS: dict[str, Callable[[Signature], OperatorCost | None]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_NORMS.split(), _norm),
    **dict.fromkeys(_IN_PLACE.split(), _in_place),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("fill_", "zero_"), _traffic(0)),
    "copy_": _traffic(0, 1),
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul(0)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"), _matmul(1)),
    **dict.fromkeys(("linear", "mkldnn_linear"), _linear),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution(3, 4, 5)),
    "convolution": _convolution(3, 4, 5, 6),
    "_convolution": _convolution(3, 4, 5, 6),
    "cudnn_convolution": _convolution(3, 2, 4),
    **dict.fromkeys(("mkldnn_convolution", "miopen_convolution"), _convolution(4, 3, 5)),
    "convolution_backward": _convolution_backward,
    "scaled_dot_product_attention": _attention(0, 5),
    "_scaled_dot_product_flash_attention": _attention(0, 4),
    "_flash_attention_forward": _attention(0, 8, -3),
    "_flash_attention_backward": _attention(1, 11, -3),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4),
    "_scaled_dot_product_efficient_attention": _attention(0, 6),
    "_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "_scaled_dot_product_flash_attention_backward": _attention(1, 11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, 11),
}


_PEAKS = {"float16": "fp16", "bfloat16": "bf16"}
# Names of matrix kernels of fp32 tensors in cuBLAS, cuDNN and CUTLASS: with tensor cores, and without.
_TF32 = re.compile(r"(?i)tf32|s1688")
_FP32 = re.compile(r"(?i)_sgemm|simt|ffma|scudnn")


@dataclass(frozen=True)
class Ceiling:
    bound: Bound
    fraction: float | None
    """The time that the device's ceiling allows, divided by the time taken."""


UNKNOWN = Ceiling("insufficient data", None)


def ceiling(cost: OperatorCost | None, seconds: float, peak: float | None, bandwidth: float | None) -> Ceiling:
    """The ceiling that the arithmetic intensity selects, and how close `seconds` come to it.

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Memory-bound work that is faster than the bandwidth allows had its
    bytes in a cache: the fraction is then unknown. Arithmetic faster than the peak is of another kind than the peak:
    then both are unknown.
    """
    if cost is None or bandwidth is None or seconds <= 0 or (cost.flops is not None and peak is None):
        return UNKNOWN
    moving = cost.bytes / bandwidth
    computing = cost.flops / peak if cost.flops is not None and peak else 0.0
    allowed = max(moving, computing)
    bound: Bound = "compute" if computing > moving else "memory"
    if not allowed or (allowed > seconds and bound == "compute"):
        return UNKNOWN
    return Ceiling(bound, allowed / seconds if allowed <= seconds else None)


def peak_of(accelerator: Accelerator | None, dtype: str, kernels: Iterable[str]) -> float | None:
    """The FLOP/s of matrix arithmetic in `dtype`; None if the device or the arithmetic is unknown.

    Matrix products of float32 run in fp32 or TF32. On a device with TF32, the names of the kernels decide.
    """
    if accelerator is None:
        return None
    if dtype == "float32":
        return _single(accelerator, list(kernels))
    return accelerator.peaks.get(_PEAKS.get(dtype, ""))


def _single(accelerator: Accelerator, kernels: list[str]) -> float | None:
    if "tf32" not in accelerator.peaks:
        return accelerator.peaks.get("fp32")
    fast, slow = any(map(_TF32.search, kernels)), any(map(_FP32.search, kernels))
    if fast == slow:
        return None
    return accelerator.peaks.get("tf32" if fast else "fp32")


Kind = tuple[str, Signature | None]
"""The name and the inputs that all calls counted together share."""


def operators(program: ProgramSlices) -> list[Operator]:
    """Every operator of the window, one entry for each set of inputs, most device time first.

    Times are nanoseconds of all calls together. Calls, arithmetic and device time are of operators whose work starts in
    the window, whenever it was launched; calls without device work, and CPU time, are of those that began in it.
    Arithmetic counts only for the innermost operator that does it.
    """
    kinds, of = _kinds(program)
    calls = _calls(of, program.counted, len(kinds))
    launcher = at(of, program.owner)
    working = _calls(of, program.counted & program.launching, len(kinds))
    arithmetic = np.where(working > 0, working, calls)
    cpu = sum_at(at(of, program.operator), program.own_time, len(kinds))
    device = sum_at(launcher, program.work_time, len(kinds))
    works = sum_at(launcher, program.started.astype(np.int64), len(kinds))
    costs = _without_wrappers(program, of, [cost(name, signature) if signature else None for name, signature in kinds])
    ceilings = _ceilings(program, kinds, arithmetic, device, costs, launcher)
    found = []
    for number, (name, signature) in enumerate(kinds):
        price, times = costs[number], int(arithmetic[number])
        operator = Operator(
            name=name,
            shapes=shapes_text(signature) if signature else "",
            dtype=dtype_text(signature) if signature else "",
            calls=int(calls[number]),
            host=int(cpu[number]),
            device=int(device[number]),
            kernels=int(works[number]),
            flops=price.flops * times if price and price.flops is not None else None,
            bytes=price.bytes * times if price else None,
            bound=ceilings[number].bound,
            of_ceiling=ceilings[number].fraction,
        )
        found.append(operator)
    return sorted(found, key=lambda one: (-one.device, -one.host, one.name, one.shapes))


def _kinds(program: ProgramSlices) -> tuple[list[Kind], Ids]:
    """All kinds of operators in the window, and each slice's kind, -1 for other slices."""
    trace = program.trace
    counted = np.flatnonzero(program.operators & (program.inside | program.counted))
    signatures: list[Signature | None] = [None, *trace.signatures]
    keys = trace.cpu.name[counted].astype(np.int64) * len(signatures) + trace.cpu.signature[counted] + 1
    distinct, inverse = np.unique(keys, return_inverse=True)
    of = np.full(len(trace.cpu), MISSING, np.int32)
    of[counted] = inverse
    places = (divmod(key, len(signatures)) for key in distinct.tolist())
    return [(trace.names[name], signatures[signature]) for name, signature in places], of


def _calls(of: Ids, chosen: Mask, count: int) -> Ns:
    return np.bincount(of[(of >= 0) & chosen], minlength=count)


def _without_wrappers(program: ProgramSlices, of: Ids, costs: list[OperatorCost | None]) -> list[OperatorCost | None]:
    """Drops the work of kinds that contain an operator with arithmetic, as aten::linear contains addmm."""
    arithmetic = np.array([one is not None and one.flops is not None for one in costs] + [False])
    counted = (of >= 0) & arithmetic[of]
    around = nearest_around(program.nest, nearest(program.nest, counted))[counted]
    wrappers = set(of[around[around >= 0]].tolist())
    return [None if number in wrappers else one for number, one in enumerate(costs)]


def _ceilings(
    program: ProgramSlices, kinds: list[Kind], calls: Ns, device: Ns, costs: list[OperatorCost | None], launcher: Ids
) -> list[Ceiling]:
    accelerator = _accelerator(program.trace)
    if accelerator is None:
        return [UNKNOWN] * len(kinds)
    kernels = _kernels(program.trace, launcher)
    over_link = set(launcher[transfers(program)].tolist())
    found = []
    for number, (_, signature) in enumerate(kinds):
        if number in over_link:
            found.append(UNKNOWN)
            continue
        seconds = int(device[number]) / max(int(calls[number]), 1) * 1e-9
        peak = peak_of(accelerator, dtype_text(signature) if signature else "", kernels.get(number, ()))
        found.append(ceiling(costs[number], seconds, peak, accelerator.memory_bandwidth))
    return found


def transfers(program: ProgramSlices) -> Mask:
    """A mask over `Trace.device` of the copies over a link, which the device's bandwidth does not limit."""
    device = program.trace.device
    found: Mask = (device.kind == WorkKind.COPY) & program.lexicon.transfer[device.name]
    return found


def _kernels(trace: Trace, launcher: Ids) -> dict[int, Sequence[str]]:
    """The names of what each kind launched."""
    pairs = np.unique(np.stack((launcher, trace.device.name), axis=1), axis=0).tolist()
    found: dict[int, list[str]] = {}
    for kind, name in pairs:
        found.setdefault(kind, []).append(trace.names[name])
    return dict(found)


def _accelerator(trace: Trace) -> Accelerator | None:
    """The device on which the work ran, if it is known and all of it is of one kind."""
    used = [trace.described(one) for one in np.unique(trace.device.device).tolist()]
    names = {one.name if one else "" for one in used}
    return find_accelerator(names.pop()) if len(names) == 1 else None
