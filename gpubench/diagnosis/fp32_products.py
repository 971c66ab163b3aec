"""The rule about matrix products in fp32 on a device with matrix units for smaller types."""

import re
from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.diagnosis.case import Answers, ProfileCase, severity, shortened
from gpubench.findings import Finding
from gpubench.hardware import ACCELERATORS, find_accelerator

PRODUCTS_WORTH = 0.1  # of the step: another precision changes every number of a run, so that less is not worth it

FP32_PRODUCT = re.compile(r"(?<![a-z0-9])sgemm|scudnn|f32f32_f32f32_f32|convolve_sgemm")
"""Names of the kernels of cuBLAS, CUTLASS and cuDNN that multiply fp32 on the vector units. Kernels on tensor cores
have s884gemm, s1688gemm, s16816gemm or tf32f32 in their names."""

GENERATION = re.compile(r"(?i)volta_|turing_|sm70|sm75|ampere_|cutlass_80|sm80|sm86|sm89|sm90|sm100")
AMPERE_AND_LATER = frozenset({"ampere_", "cutlass_80", "sm80", "sm86", "sm89", "sm90", "sm100"})
_ADVICE: Mapping[str, str] = {
    "bf16": "compute in bf16 by autocast, or in TF32, which keeps tensors in fp32: "
    "torch.set_float32_matmul_precision('high')",
    "fp16": "compute in fp16 by autocast, with a gradient scaler in training",
}
_OUTSIDE = "bring these products under autocast too, or run them in TF32: torch.set_float32_matmul_precision('high')"


def fp32_products(case: ProfileCase) -> Answers:
    kernels = [kernel for kernel in case.rank.kernels if FP32_PRODUCT.search(kernel.name)]
    found = sum(kernel.total for kernel in kernels)
    better = better_precision(case)
    if better is None or case.share(found) < PRODUCTS_WORTH:
        return
    saving = case.share(found) * (1 - _speed_ratio(case, better))
    yield Finding(
        id="fp32-products",
        title="matrix products run in fp32, without the tensor cores",
        severity=severity(saving),
        evidence=[f"fp32 products take {case.time_per_step(found)}"]
        + [
            f"{shortened(kernel.name)}{f' of {kernel.operator}' if kernel.operator else ''}: "
            f"{case.calls_per_step(kernel.calls)}, {case.time_per_step(kernel.total)}"
            for kernel in kernels[:2]
        ],
        cause="the vector units compute fp32 in full precision; the tensor cores take smaller types",
        advice=_ADVICE[better] if case.setting("precision") in (None, "fp32") else _OUTSIDE,
        fix=_precision(case, better),
        expected=case.less_work(saving),
        threshold=f"at least {units.percent(PRODUCTS_WORTH)} of {case.window()}, as another precision changes every "
        "number of a run",
    )


def better_precision(case: ProfileCase) -> str | None:
    """Returns the type to compute in, from the device's peaks or compute capability; None if unknown."""
    listed = find_accelerator(case.rank.device_name or "")
    if listed is not None:
        return next((dtype for dtype in ("bf16", "fp16") if dtype in listed.peaks), None)
    major = case.compute_capability or _generation(case)
    return None if major is None or major < 7 else "bf16" if major >= 8 else "fp16"


def _generation(case: ProfileCase) -> int | None:
    """Returns the newest compute capability in the kernels' names: a kernel runs on no older device."""
    made_for = {name.lower() for kernel in case.rank.kernels for name in GENERATION.findall(kernel.name)}
    return max((8 if name in AMPERE_AND_LATER else 7 for name in made_for), default=None)


def _speed_ratio(case: ProfileCase, better: str) -> float:
    """Returns the time in the better type over that in fp32, from published peaks.

    For an unknown device it is the smallest ratio of all known ones.
    """
    listed = find_accelerator(case.rank.device_name or "")
    known = [listed] if listed is not None and "fp32" in listed.peaks else ACCELERATORS
    return min(one.peaks["fp32"] / one.peaks[better] for one in known if {"fp32", better} <= one.peaks.keys())


def _precision(case: ProfileCase, better: str) -> dict[str, Any]:
    """Returns the fix, in which training has fp16 as "amp", with autocast."""
    if case.setting("precision") != "fp32":
        return {}
    trains = "training.optimizer" in (case.settings or {})
    return case.fix(precision="amp" if trains and better == "fp16" else better)
