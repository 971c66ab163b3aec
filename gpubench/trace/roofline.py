"""How near an operator comes to what its device can do: Williams, Waterman, Patterson, "Roofline" (CACM 52, 2009)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpubench.hardware import Accelerator
from gpubench.trace.costs import Cost
from gpubench.trace.profile import Bound

_PEAKS = {"float16": "fp16", "bfloat16": "bf16"}
# Matrix kernels of fp32 tensors by their names: those of cuBLAS, cuDNN and CUTLASS on the tensor cores, and on none.
_TF32 = re.compile(r"(?i)tf32|s1688")
_FP32 = re.compile(r"(?i)_sgemm|simt|ffma|scudnn")


@dataclass(frozen=True)
class Ceiling:
    bound: Bound
    fraction: float | None
    """The time that the device's ceiling allows over the time taken."""


UNKNOWN = Ceiling("insufficient data", None)


def ceiling(cost: Cost | None, seconds: float, peak: float | None, bandwidth: float | None) -> Ceiling:
    """The ceiling that the arithmetic intensity puts first, however much of it is reached, and how near `seconds` come.

    `peak` is in FLOP/s, `bandwidth` in bytes/s. Work bound by memory that is done faster than the bandwidth allows
    found its bytes in a cache: then no fraction is known. Arithmetic faster than the peak was of another kind than the
    peak is of: then nothing is known.
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
    """FLOP/s of matrix arithmetic in `dtype`; None if the device is not listed, or the arithmetic is not known.

    Matrix products of float32 run in fp32 or in TF32. If the device has TF32, the names of the kernels must tell.
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
