"""Rules about the type that matrix products are computed in."""

import re
from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import Answers
from gpubench.findings import Finding, severity
from gpubench.hardware import ACCELERATORS, find_accelerator

PRODUCTS_WORTH = 0.1  # another precision changes every number of a run, for a tenth of the step at the least

FP32_PRODUCT = re.compile(r"(?<![a-z0-9])sgemm|scudnn|f32f32_f32f32_f32|convolve_sgemm")
"""What cuBLAS, CUTLASS and cuDNN call kernels that multiply fp32 on the vector units. s884gemm, s1688gemm, s16816gemm
and tf32f32 name the tensor cores'."""

GENERATION = re.compile(r"(?i)volta_|turing_|sm70|sm75|ampere_|cutlass_80|sm80|sm86|sm89|sm90|sm100")
AMPERE_AND_LATER = frozenset({"ampere_", "cutlass_80", "sm80", "sm86", "sm89", "sm90", "sm100"})


def fp32_products(case: Case) -> Answers:
    kernels = [kernel for kernel in case.rank.kernels if FP32_PRODUCT.search(kernel.name)]
    found = sum(kernel.total for kernel in kernels)
    better = better_precision(case)
    if better is None or measures.share(case, found) < PRODUCTS_WORTH:
        return
    saving = measures.share(case, found) * (1 - _speed_ratio(case, better))
    yield Finding(
        id="fp32-products",
        title="matrix products run in fp32, without the tensor cores",
        severity=severity(saving),
        evidence=[f"fp32 products take {phrases.a_step(case, found)}"]
        + [
            f"{phrases.shortened(kernel.name)}{f' of {kernel.operator}' if kernel.operator else ''}: "
            f"{phrases.times_a_step(case, kernel.calls)}, {phrases.a_step(case, kernel.total)}"
            for kernel in kernels[:2]
        ],
        cause="fp32 is computed in full by the vector units; the tensor cores take smaller types",
        advice=_ADVICE[better] if case.setting("precision") in (None, "fp32") else _OUTSIDE,
        fix=_precision(case, better),
        expected=measures.at_most(saving),
        threshold=f"from {units.percent(PRODUCTS_WORTH)} of the step on, as another precision changes every number of "
        "a run",
    )


_ADVICE: Mapping[str, str] = {
    "bf16": "compute in bf16 by autocast, or in TF32, which keeps tensors in fp32: "
    "torch.set_float32_matmul_precision('high')",
    "fp16": "compute in fp16 by autocast, with a gradient scaler in training",
}


_OUTSIDE = "bring these products under autocast too, or run them in TF32: torch.set_float32_matmul_precision('high')"


def better_precision(case: Case) -> str | None:
    """The type to compute in, by what is published of the device or by its compute capability; None if unknown."""
    listed = find_accelerator(case.rank.device_name or "")
    if listed is not None:
        return next((dtype for dtype in ("bf16", "fp16") if dtype in listed.peaks), None)
    major = _capability(case) or _generation(case)
    return None if major is None or major < 7 else "bf16" if major >= 8 else "fp16"


def _capability(case: Case) -> int | None:
    major = str(measures.gpu(case).get("compute_capability", "")).partition(".")[0]
    return int(major) if major.isdecimal() else None


def _generation(case: Case) -> int | None:
    """The newest that any kernel was made for, as its name has it: no kernel runs on an older device."""
    made_for = {name.lower() for kernel in case.rank.kernels for name in GENERATION.findall(kernel.name)}
    return max((8 if name in AMPERE_AND_LATER else 7 for name in made_for), default=None)


def _speed_ratio(case: Case, better: str) -> float:
    """Time in the better type over that in fp32, by published peaks: the least of any device where they are unknown."""
    listed = find_accelerator(case.rank.device_name or "")
    known = [listed] if listed is not None and "fp32" in listed.peaks else ACCELERATORS
    return min(one.peaks["fp32"] / one.peaks[better] for one in known if {"fp32", better} <= one.peaks.keys())


def _precision(case: Case, better: str) -> dict[str, Any]:
    """A training run computes in fp16 under the name of amp."""
    if case.setting("precision") != "fp32":
        return {}
    trains = "training.optimizer" in (case.settings or {})
    return case.fix(precision="amp" if trains and better == "fp16" else better)
