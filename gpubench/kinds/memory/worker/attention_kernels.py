"""Chooses and computes attention with the kernel that CUDA would choose on a GPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from gpubench import releases
from gpubench.probe.facts import cudnn_version
from gpubench.releases import Release

Capability = tuple[int, int]
"""A compute capability as (major, minor)."""

Backend = Literal["cudnn", "flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = (9, 10)
"""The major compute capabilities on which torch may try cuDNN first. On others cuDNN comes last and is never used."""
_ASSUMED_CUDNN = 91501
"""The version of cuDNN assumed for a PyTorch without it, such as a CPU build: 9.15.1."""


@dataclass(frozen=True)
class Call:
    """The arguments of scaled_dot_product_attention, of shape (batch, heads, tokens, width) except for the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool


def backend(call: Call, capability: Capability) -> Backend:
    """The attention kernel that torch chooses on a GPU of this compute capability.

    Source: select_sdp_backend and what it calls, in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
    sdp_utils_cpp.h, without nested tensors and float8. Head widths over 128, some of which newer builds give to cuDNN
    9.22, go to flash attention here, which keeps the same tensors. Raises RuntimeError, as torch does, if
    torch.nn.attention.sdpa_kernel leaves no kernel that fits.
    """
    choices: dict[Backend, Callable[[Call, Capability], bool]] = {
        "cudnn": _cudnn_can,
        "flash": _flash_can,
        "efficient": _efficient_can,
        "math": lambda *_: torch.backends.cuda.math_sdp_enabled(),
    }
    found = next((name for name, can in choices.items() if can(call, capability)), None)
    if found is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return found


def assumptions(capability: Capability | None) -> list[str]:
    """Sentences on the conditions that the choice of the attention kernel assumes."""
    if capability is None or capability[0] not in _CUDNN_FIRST or _own_cudnn() is not None:
        return []
    return [
        f"this build of PyTorch {releases.installed()} has no cuDNN: attention is predicted as with cuDNN 9.15.1 or "
        "newer, which PyTorch's wheels for CUDA 13 bring since 2.11; with an older one PyTorch takes other kernels"
    ]


def _own_cudnn() -> int | None:
    """This PyTorch's version of cuDNN, such as 91501 for 9.15.1; None for a build without CUDA."""
    return None if torch.version.hip else cudnn_version()


def cudnn_first(capability: Capability, cudnn: int, release: Release) -> bool:
    """Whether a release of PyTorch with this cuDNN tries cuDNN before flash attention.

    Source: check_prefer_cudnn_attention in sdp_utils.cpp. Up to 2.8 it does so only on request (pull request 138522);
    2.9 by default from cuDNN 9.9 on (162073); 2.10 and later from 9.15.1 on (169849), which their first wheels lack.
    """
    major, minor = capability
    if major not in _CUDNN_FIRST:
        return False
    if release < Release(2, 9):
        return minor == 0 and cudnn > 90000 and os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") == "1"
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    if release < Release(2, 10):
        return minor == 0 and cudnn >= 90900
    every_minor = torch.version.cuda is None or int(torch.version.cuda.partition(".")[0]) >= 13
    return cudnn > 91500 and (minor in (0, 3) or every_minor)


def _cudnn_can(call: Call, capability: Capability) -> bool:
    keys, cudnn = call.key.shape[-2], _own_cudnn() or _ASSUMED_CUDNN
    widths = call.query.shape[-1], call.value.shape[-1]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and cudnn_first(capability, cudnn, releases.installed())
        and _dense(call, _HALF)
        and _mask_is_plain(call)
        and _heads_match(call, grouped=True, same_pairs=False)
        and (max(widths) <= 128 or (widths == (192, 128) and cudnn >= 91100))
        and all(width % 8 == 0 for width in widths)
        and keys > 1
        and not (call.dropout > 0 and 91100 < cudnn < 91400)  # where cuDNN's dropout is broken
        and (call.dropout == 0 or (call.query.shape[-2] > 1 and (call.dropout * 16).is_integer()))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _flash_can(call: Call, capability: Capability) -> bool:
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


def _efficient_can(call: Call, capability: Capability) -> bool:
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
        and _heads_match(call, grouped=releases.installed().efficient_attention_shares_keys)
    )


def _small_cores(capability: Capability) -> bool:
    """Whether the GPU lacks the shared memory that flash attention's backward pass needs for wide heads."""
    return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)


def _trains(call: Call) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (call.query, call.key, call.value))


def _dense(call: Call, types: tuple[torch.dtype, ...]) -> bool:
    """Whether the call meets the conditions that all fused kernels have in common."""
    inputs = (call.query, call.key, call.value)
    return (
        all(each.dim() == 4 and each.dtype is call.query.dtype and each.stride(-1) == 1 for each in inputs)
        and call.query.dtype in types
        and min(call.query.shape[-2], call.key.shape[-2]) > 0
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _heads_match(call: Call, *, grouped: bool, same_pairs: bool = True) -> bool:
    """Whether the kernel supports the numbers of heads.

    `grouped`: several query heads may share a key head. `same_pairs`: keys and values need the same number of heads.
    """
    queries, keys, values = (tensor.shape[1] for tensor in (call.query, call.key, call.value))
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    if not (grouped and call.grouped):
        return queries == keys == values
    return queries % keys == 0 and queries % values == 0 and (keys == values or not same_pairs)


def _mask_is_plain(call: Call) -> bool:
    if call.mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[2])
    fits = all(size in (1, whole) for size, whole in zip(call.mask.shape[::-1], full[::-1], strict=False))
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
    """Runs flash attention, which pads head widths to multiples of 8 and keeps the padded copies."""
    width = call.query.shape[-1]
    query, key, value = (
        functional.pad(tensor, (0, -width % 8)) if width % 8 else tensor
        for tensor in (call.query, call.key, call.value)
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


def plain(call: Call) -> Tensor:
    """Computes attention without a fused kernel."""
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
    """The mask in its additive form: a boolean mask becomes a new tensor of the query's type."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    return torch.where(call.mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=call.query.dtype))


_COMPUTE: dict[Backend, Callable[[Call], Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": plain,
}


def chosen(call: Call, capability: Capability) -> Tensor:
    """Computes attention with the operator of the kernel that `backend` returns."""
    return _COMPUTE[backend(call, capability)](call)
