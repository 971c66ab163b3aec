"""Arithmetic and least memory traffic of operators, from the shapes of their inputs.

A multiply-add counts as two operations. Traffic is every input read once and the output written once: caches can do
no better, real kernels do worse.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpubench.trace.columns import Signature
from gpubench.trace.tensors import Tensor, flag, numbers, tensor, tensors


@dataclass(frozen=True)
class Cost:
    flops: float | None
    """None where only the traffic is counted: too little arithmetic to matter."""
    bytes: float


def cost(name: str, signature: Signature) -> Cost | None:
    """Of one call of the operator `name`; None if it is not known, or needs values that were not recorded."""
    formula = _FORMULAS.get(name.removeprefix("aten::"))
    return formula(signature) if formula else None


def only_moves_memory(name: str) -> bool:
    """Whether the operator `name` is known to do too little arithmetic to matter beside its traffic."""
    return name.removeprefix("aten::") in _ONLY_TRAFFIC


def _matmul(first: int) -> Callable[[Signature], Cost | None]:
    """[..., M, K] x [..., K, N], from the argument `first`: 2 * batch * M * K * N operations (BLAS gemm)."""

    def formula(signature: Signature) -> Cost | None:
        a, b = tensor(signature, first), tensor(signature, first + 1)
        if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            return None
        rows = a.elements // a.shape[-1] if a.elements else 0
        if len(b.shape) > 2 and a.shape[:-2] != b.shape[:-2]:
            return None
        output = rows * b.shape[-1]
        return Cost(2.0 * output * a.shape[-1], a.bytes + b.bytes + output * a.itemsize)

    return formula


def _linear(signature: Signature) -> Cost | None:
    """[..., K] x [N, K] transposed: as a matrix product of all rows."""
    a, weight = tensor(signature, 0), tensor(signature, 1)
    if a is None or weight is None or not a.shape or len(weight.shape) != 2 or a.shape[-1] != weight.shape[-1]:
        return None
    output = a.elements // max(a.shape[-1], 1) * weight.shape[0]
    return Cost(2.0 * output * a.shape[-1], a.bytes + weight.bytes + output * a.itemsize)


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Callable[..., Cost | None]:
    """2 * output elements * weight elements per output channel, with the output size of torch.nn.Conv2d's docs.

    The arguments are the places of the settings among the operator's.
    """

    def formula(signature: Signature) -> Cost | None:
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
        return Cost(2.0 * elements * math.prod(weight.shape[1:]), a.bytes + weight.bytes + elements * a.itemsize)

    return formula


def _broadcast(values: list[int], length: int) -> list[int]:
    return values if len(values) == length else (values[:1] or [1]) * length


def _convolution_backward(signature: Signature) -> Cost | None:
    """As much as the forward for each of the gradients of input and weight that is asked for."""
    gradient, a, weight = (tensor(signature, place) for place in range(3))
    wanted = str(signature.concrete[10]) if len(signature.concrete) > 10 else ""
    if gradient is None or a is None or weight is None or flag(signature, 7) is not False or not wanted.startswith("["):
        return None
    asked = [one.strip() == "True" for one in wanted.strip("[]").split(",")][:2]
    flops = 2.0 * gradient.elements * math.prod(weight.shape[1:]) * sum(asked)
    written = sum(one.bytes for one, is_asked in zip((a, weight), asked, strict=False) if is_asked)
    return Cost(flops, gradient.bytes + a.bytes + weight.bytes + written)


def _attention(query: int, causal: int, sequence: int = -2) -> Callable[[Signature], Cost | None]:
    """Matrix products of [L, E] with [S, E] per head: 2 forward, 5 backward, half of that if causal.

    Source: Dao, "FlashAttention-2" (2023), section 4.1. `query` and `causal` are places among the inputs, where a
    backward operator has the gradient first; `sequence` is the dimension of L and S.
    """
    products = 5 if query else 2

    def formula(signature: Signature) -> Cost | None:
        q, k, v = (tensor(signature, query + place) for place in range(3))
        is_causal = flag(signature, causal)
        if q is None or k is None or v is None or is_causal is None or len(q.shape) != 4 or len(k.shape) != 4:
            return None
        flops = products * 2.0 * q.elements * k.shape[sequence] / (2 if is_causal else 1)
        inputs = q.bytes + k.bytes + v.bytes
        return Cost(flops, inputs + q.bytes if query == 0 else 2 * inputs + 2 * q.bytes)

    return formula


def _traffic(*places: int) -> Callable[[Signature], Cost | None]:
    """Bytes of the tensors at these places, a place once for each time it is read or written."""

    def formula(signature: Signature) -> Cost | None:
        found = [tensor(signature, place) for place in places]
        return Cost(None, sum(one.bytes for one in found if one)) if all(found) else None

    return formula


def _elementwise(signature: Signature) -> Cost | None:
    """All inputs, and an output of their common shape, with the type of the widest."""
    found = _arrays(signature)
    if not found:
        return None
    output = math.prod(_common_shape(found)) * max(one.itemsize for one in found)
    return Cost(None, sum(one.bytes for one in found) + output)


def _norm(signature: Signature) -> Cost | None:
    """All inputs, and an output as large as the largest of them, with the type of the widest."""
    found = _arrays(signature)
    if not found:
        return None
    output = max(one.elements for one in found) * max(one.itemsize for one in found)
    return Cost(None, sum(one.bytes for one in found) + output)


def _arrays(signature: Signature) -> list[Tensor]:
    """The inputs, without Python's numbers beside them: these come as tensors of no dimensions, and decide no type."""
    found = tensors(signature)
    return [one for one in found if one.shape] or found


def _common_shape(found: list[Tensor]) -> tuple[int, ...]:
    """As PyTorch broadcasts; that of the largest where the shapes do not fit."""
    try:
        return np.broadcast_shapes(*(one.shape for one in found))
    except ValueError:
        return max(found, key=lambda one: one.elements).shape


def _in_place(signature: Signature) -> Cost | None:
    """All inputs, of which the first is written as well."""
    found = _arrays(signature)
    return Cost(None, sum(one.bytes for one in found) + found[0].bytes) if found else None


def _reduction(signature: Signature) -> Cost | None:
    """The input; what is left of it is small."""
    found: Tensor | None = tensor(signature, 0)
    return Cost(None, found.bytes) if found else None


_ELEMENTWISE = (
    "add sub mul div pow neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu gelu silu mish hardtanh leaky_relu elu"
    " clamp clamp_min clamp_max where threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward"
    " hardtanh_backward leaky_relu_backward native_dropout_backward addcmul addcdiv lerp masked_fill maximum minimum"
    " _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"
)
# What they write besides, statistics and gradients of parameters, is too small to count.
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

_FORMULAS: dict[str, Callable[[Signature], Cost | None]] = {
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
