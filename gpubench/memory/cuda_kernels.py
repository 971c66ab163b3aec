"""Make a training step on CPU tensors without memory allocate as it would on CUDA.

The CPU runs other kernels than CUDA, which keep other tensors for the backward pass. Within a context, each rule here
registers CUDA's choice at torch's dispatcher, where it applies to every caller, including C++ and autograd.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from gpubench import releases
from gpubench.memory import autocast
from gpubench.memory.autocast import COMPOSITE, Kernel, Met, Substitute
from gpubench.releases import Release
from gpubench.worker.environment import cudnn_version

Backend = Literal["cudnn", "flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = (9, 10)
"""Major versions on which torch may try cuDNN first; on others it comes after math, so that it is never used."""
_ASSUMED_CUDNN = 91501
"""The version assumed for a PyTorch without cuDNN, as a build for the CPU: 9.15.1."""


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


def kernels(met: Met, capability: tuple[int, int]) -> Iterator[Kernel]:
    """Yield the kernels; `met` is called for each tensor without memory. Other tensors take the plain path."""

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
    """Return the attention kernel that torch chooses on a GPU of this compute capability.

    Source: select_sdp_backend and what it calls, in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
    sdp_utils_cpp.h, without nested tensors and float8. Head widths over 128, some of which newer builds give to cuDNN
    9.22, go to flash attention here, which keeps the same tensors. Raises RuntimeError, as torch does, if
    torch.nn.attention.sdpa_kernel leaves no kernel that fits.
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


def assumptions(capability: tuple[int, int] | None) -> list[str]:
    """Return sentences on unknown conditions that decide the choice of a kernel."""
    if capability is None or capability[0] not in _CUDNN_FIRST or _own_cudnn() is not None:
        return []
    return [
        f"this build of PyTorch {releases.installed()} has no cuDNN: attention is predicted as with cuDNN 9.15.1 or "
        "newer, which PyTorch's wheels for CUDA 13 bring since 2.11; with an older one PyTorch takes other kernels"
    ]


def _own_cudnn() -> int | None:
    """Return this PyTorch's version of cuDNN, as 91501; None for builds without CUDA."""
    return None if torch.version.hip else cudnn_version()


def cudnn_first(capability: tuple[int, int], cudnn: int, release: Release) -> bool:
    """Say whether a release of PyTorch with this cuDNN tries cuDNN before flash attention.

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


def _cudnn_can(call: Call, capability: tuple[int, int]) -> bool:
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
        and _heads_match(call, grouped=releases.installed().efficient_attention_shares_keys)
    )


def _small_cores(capability: tuple[int, int]) -> bool:
    """Say whether flash attention's backward pass lacks the shared memory for wide heads."""
    return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)


def _trains(call: Call) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in (call.query, call.key, call.value))


def _dense(call: Call, types: tuple[torch.dtype, ...]) -> bool:
    """Check the conditions that all fused kernels have."""
    inputs = (call.query, call.key, call.value)
    return (
        all(one.dim() == 4 and one.dtype is call.query.dtype and one.stride(-1) == 1 for one in inputs)
        and call.query.dtype in types
        and min(call.query.shape[-2], call.key.shape[-2]) > 0
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


def _heads_match(call: Call, *, grouped: bool, same_pairs: bool = True) -> bool:
    """Check the numbers of heads. `grouped`: heads may share keys; `same_pairs`: keys and values need equal numbers."""
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
    """Run flash attention, which pads widths that are not multiples of 8 and keeps the padded copies."""
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
    """Return the mask in its additive form: a boolean mask becomes a new tensor of the query's type."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    return torch.where(call.mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=call.query.dtype))


_COMPUTE: dict[Backend, Callable[[Call], Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}


Capability = tuple[int, int]
_UNKNOWN: Capability = (8, 0)
"""Stands for an unknown GPU and for AMD's: it has flash attention, and cuDNN is not tried first."""

Applied = Counter[str]
"""How often each rule changed something; rules that changed nothing are not in it."""


@dataclass(frozen=True)
class Rule:
    name: str
    reason: str
    changes: Callable[[Met, Capability], Iterator[Kernel | Substitute]]
    """Yields kernels and substitutes; `Met` is called for each tensor that they change."""


@contextmanager
def as_cuda(*, without: Container[str] = (), capability: Capability | None = None) -> Iterator[Applied]:
    """Within the context, CPU operators keep what they would keep on a GPU of this compute capability.

    It is meant for FakeTensors. Results of real tensors stay right except for rounding: without such a kernel on the
    CPU, they are computed as before. `without` names rules to leave out. The context applies to the whole process.
    """
    applied: Applied = Counter()
    with ExitStack() as stack:
        # torch itself would keep the kernels until the end of the process.
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for rule in RULES:
            if rule.name not in without:
                for change in rule.changes(_counting(applied, rule.name), capability or _UNKNOWN):
                    _put(change, library, stack)
        yield applied


def _put(change: Kernel | Substitute, library: torch.library.Library, stack: ExitStack) -> None:
    if isinstance(change, Kernel):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            library.impl(change.operator, change.function, change.key)
    else:
        stack.callback(setattr, change.module, change.name, getattr(change.module, change.name))
        setattr(change.module, change.name, change.function)


def _counting(applied: Applied, name: str) -> Met:
    return lambda: applied.update((name,))


def _autocast(met: Met, _: Capability) -> Iterator[Kernel]:
    return autocast.kernels(met)


def _dropout(met: Met, _: Capability) -> Iterator[Kernel]:
    """Yield CUDA's fused dropout, where is_fused_kernel_acceptable of aten/src/ATen/native/Dropout.cpp allows it."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  as in aten
        if not train or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype))
        met()
        out: Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
        return out

    yield Kernel("dropout", COMPOSITE, dropout)


def _rms_norm(met: Met, _: Capability) -> Iterator[Kernel]:
    """Yield CUDA's fused kernel, which keeps its input and one number per row.

    native_layer_norm keeps the same and one more number. Without the kernel, CUDA and CPU compute rms_norm from the
    same parts.
    """
    if not releases.installed().fuses_rms_norm:
        return

    def rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002
        operators = torch.ops.aten
        mixed = weight is not None and weight.dtype is not input.dtype
        if not isinstance(input, FakeTensor) or mixed:
            plain: Tensor = operators._fused_rms_norm(input, shape, weight, eps)[0]
            return plain
        met()
        out: Tensor = operators.native_layer_norm(input, shape, weight, None, 0.0)[0]
        return out

    yield Kernel("rms_norm", COMPOSITE, rms_norm)


def _softmax(met: Met, _: Capability) -> Iterator[Kernel]:
    """Yield softmax as in aten/src/ATen/native/SoftMax.cpp, without names of dimensions."""

    def kernel(operator: Callable[[Tensor, int, bool], Tensor]) -> Callable[..., Tensor]:
        def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
            if isinstance(input, FakeTensor) and input.dtype is torch.float16 and dtype is torch.float32:
                met()
                return operator(input, dim, True)
            return operator(input if dtype is None else input.to(dtype), dim, False)

        return softmax

    yield Kernel("softmax.int", COMPOSITE, kernel(torch.ops.aten._softmax))
    yield Kernel("log_softmax.int", COMPOSITE, kernel(torch.ops.aten._log_softmax))


def _packing(met: Met, _: Capability) -> Iterator[Substitute]:
    if "transformers" not in sys.modules:  # then the model does not come from there either
        return
    from transformers import masking_utils

    plain = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if isinstance(position_ids, FakeTensor):
            met()
            return None
        found: Tensor | None = plain(position_ids)
        return found

    yield Substitute(masking_utils, plain.__name__, find_packed_sequence_indices)


RULES = (
    Rule(
        "autocast",
        "autocast on CUDA runs other operators in float32 than on the CPU, such as layer_norm, group_norm and softmax",
        _autocast,
    ),
    Rule("dropout", "CUDA keeps one byte per element for dropout, the CPU its noise in the input's type", _dropout),
    Rule(
        "attention",
        "CUDA's fused attention also supports dropout, and falls back to plain attention for other inputs than the CPU",
        kernels,
    ),
    Rule("rms_norm", "CUDA has a fused rms_norm, the CPU keeps intermediate results", _rms_norm),
    Rule(
        "softmax",
        "CUDA converts float16 to float32 within softmax and log_softmax, the CPU makes a copy first",
        _softmax,
    ),
    Rule(
        "packing",
        "transformers cannot read positions without memory, and would make a mask for packed sequences",
        _packing,
    ),
)
"""The rules. Their reasons are shown to users."""
