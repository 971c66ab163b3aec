"""scaled_dot_product_attention as CUDA computes it: which kernel it takes, and what that keeps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from gpubench.tracker.kernels import COMPOSITE, Kernel, Met

Backend = Literal["cudnn", "flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = (9, 10)
"""Major versions on which torch asks cuDNN before the others; elsewhere it comes after math, so never."""
EFFICIENT_GROUPS = TorchVersion(torch.__version__) >= "2.14"
"""Whether the memory-efficient kernel lets heads share keys (PyTorch pull request 191085)."""


@dataclass(frozen=True)
class Call:
    """The arguments of scaled_dot_product_attention, of shape (batch, heads, tokens, width) but for the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool


def kernels(met: Met, capability: tuple[int, int]) -> Iterator[Kernel]:
    """`met` is called for every tensor without memory; others have no such kernel on a CPU and take the plain path."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not isinstance(query, FakeTensor):
            return _math(call)
        met()
        return _COMPUTE[backend(call, capability)](call)

    yield Kernel("scaled_dot_product_attention", COMPOSITE, attention)


def backend(call: Call, capability: tuple[int, int]) -> Backend:
    """The kernel that torch takes on a GPU of this compute capability.

    Source: select_sdp_backend and what it asks, in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
    sdp_utils_cpp.h. Left out is what concerns nested tensors, float8 and cuDNN before 9.15. Head widths over 128,
    which cuDNN takes since 9.22, go to flash attention here, which keeps the same. RuntimeError, as in torch, where
    torch.nn.attention.sdpa_kernel leaves none that can.
    """
    choices: dict[Backend, Callable[[Call, tuple[int, int]], bool]] = {
        "cudnn": _cudnn_can,
        "flash": _flash_can,
        "efficient": _efficient_can,
        "math": lambda *_: torch.backends.cuda.math_sdp_enabled(),
    }
    found = next((name for name, can in choices.items() if can(call, capability)), None)
    if found is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return found


def _cudnn_can(call: Call, capability: tuple[int, int]) -> bool:
    keys = call.key.shape[-2]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and capability[0] in _CUDNN_FIRST
        and _dense(call, _HALF)
        and _mask_is_plain(call)
        and _heads_match(call, grouped=True, same_pairs=False)
        and max(call.query.shape[-1], call.value.shape[-1]) <= 128
        and call.query.shape[-1] % 8 == 0
        and call.value.shape[-1] % 8 == 0
        and keys > 1
        and (call.dropout == 0 or (call.query.shape[-2] > 1 and (call.dropout * 16).is_integer()))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_can(call: Call, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.mask is None
        and _dense(call, _HALF)
        and call.key.shape[-1] == call.value.shape[-1] == width <= 256
        and not (
            _small_cores(capability) and _trains(call) and (192 < width <= 224 or (width > 224 and call.dropout > 0))
        )
        and (not call.causal or call.query.shape[-2] == call.key.shape[-2])
        and _heads_match(call, grouped=True)
    )


def _efficient_can(call: Call, capability: tuple[int, int]) -> bool:
    types = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    half, width = call.query.dtype in _HALF, call.query.shape[-1]
    alignment = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and _dense(call, types)
        and call.key.shape[-1] == width > 0
        and call.value.shape[-1] > 0
        and width % alignment == 0
        and call.value.shape[-1] % alignment == 0
        and _heads_match(call, grouped=EFFICIENT_GROUPS)
    )


def _small_cores(capability: tuple[int, int]) -> bool:
    """Whether flash attention's backward pass lacks the shared memory for wide heads."""
    return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)


def _trains(call: Call) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in (call.query, call.key, call.value))


def _dense(call: Call, types: tuple[torch.dtype, ...]) -> bool:
    """What all fused kernels ask for."""
    inputs = (call.query, call.key, call.value)
    return (
        all(one.dim() == 4 and one.dtype is call.query.dtype and one.stride(-1) == 1 for one in inputs)
        and call.query.dtype in types
        and min(call.query.shape[-2], call.key.shape[-2]) > 0
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _heads_match(call: Call, *, grouped: bool, same_pairs: bool = True) -> bool:
    """`grouped`: the kernel can share keys between heads; `same_pairs`: as many heads of keys as of values."""
    queries, keys, values = (one.shape[1] for one in (call.query, call.key, call.value))
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    if not (grouped and call.grouped):
        return queries == keys == values
    return queries % keys == 0 and queries % values == 0 and (keys == values or not same_pairs)


def _mask_is_plain(call: Call) -> bool:
    if call.mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[2])
    fits = all(one in (1, whole) for one, whole in zip(call.mask.shape[::-1], full[::-1], strict=False))
    return fits and call.mask.dim() in (2, 4) and not call.mask.requires_grad


def _cudnn(call: Call) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query,
        call.key,
        call.value,
        _additive(call),
        _trains(call),
        call.dropout,
        call.causal,
        False,  # return_debug_mask
        scale=call.scale,
    )[0]
    return out


def _flash(call: Call) -> Tensor:
    """Widths that are no multiple of 8 are padded before, and the padded copies are what is kept."""
    width = call.query.shape[-1]
    query, key, value = (
        functional.pad(one, (0, -width % 8)) if width % 8 else one for one in (call.query, call.key, call.value)
    )
    scale = call.scale or width**-0.5
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.causal, scale=scale
    )[0]
    return out[..., :width]


def _efficient(call: Call) -> Tensor:
    mask = _additive(call)
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = functional.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, mask, _trains(call), call.dropout, call.causal, scale=call.scale
    )[0]
    return out


def _math(call: Call) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        _additive(call),
        call.dropout,
        call.causal,
        scale=call.scale,
        enable_gqa=call.grouped,
    )[0]
    return out


def _additive(call: Call) -> Tensor | None:
    """The mask as what is added to the scores: of a boolean one that is a new tensor of the query's type."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    return torch.where(call.mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=call.query.dtype))


_COMPUTE: dict[Backend, Callable[[Call], Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
