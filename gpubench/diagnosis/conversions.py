"""Rules about conversions of type and of memory layout."""

import re

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, WORTH, Answers, ProfileCase, at_place, severity, shortened
from gpubench.findings import Finding
from gpubench.trace.profile import Copy

BEFORE_MODEL = frozenset({"data_wait", "host_to_device"})
TO_NHWC = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose", re.IGNORECASE)
"""Kernels of cuDNN and MIOpen that convert tensors before and after convolutions computed in NHWC."""
OF_MIOPEN = "batched_transpose"
_WIDE = {
    True: (
        "the data has another type than the model computes in",
        "make the data in the right type, in the dataset",
    ),
    False: (
        "autocast, or the model itself, converts its inputs each time",
        "keep tensors in the type in which they are used, and convert them once",
    ),
}
"""The cause and the advice, by whether all conversions happen before the model."""


def casts(case: ProfileCase) -> Answers:
    found = [
        copy for copy in case.copies("dtype_cast") if copy.phase != "optimizer"
    ]  # `unfused_optimizer` reports those
    cost = _conversion_cost(case, found)
    if cost < NOTABLE:
        return
    narrow = case.on_cpu and case.setting("precision") in ("bf16", "amp", "fp16")
    cause, advice = _narrow(case) if narrow else _WIDE[all(copy.phase in BEFORE_MODEL for copy in found)]
    yield Finding(
        id="casts",
        title="tensors are converted to another type",
        severity=severity(cost),
        evidence=[*_describe_conversions(case, found), *(_capability(case) if narrow else [])],
        cause=cause,
        advice=advice,
        fix=case.fix(precision="fp32") if narrow else {},
        expected=None if narrow else case.less_work(cost),  # the speed of the products changes too
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}, as mixed precision needs some conversions",
    )


def layout_of_batches(case: ProfileCase) -> Answers:
    found = [copy for copy in case.copies("layout_change") if copy.phase in BEFORE_MODEL]
    cost = _conversion_cost(case, found)
    if cost < WORTH:
        return
    asked = case.setting("performance.channels_last") is True
    avoidable = asked and case.on_cpu  # on a GPU, convolutions in NCHW lose more than these copies cost
    yield Finding(
        id="layout-of-batches",
        title="every batch is rearranged in memory",
        severity=severity(cost),
        evidence=_describe_conversions(case, found),
        cause="performance.channels_last requires NHWC, and the data arrives in NCHW"
        if asked
        else "batches arrive in a memory layout other than the one that the program needs",
        advice="switch channels_last off where convolutions gain less than the copies cost, or store the data in NHWC"
        if avoidable
        else "store the data in the layout that the model needs",
        fix=case.fix(performance__channels_last=False) if avoidable else {},
        expected=case.less_work(cost),
        threshold=case.worth_reason,
    )


def layout_in_model(case: ProfileCase) -> Answers:
    """Finds copies made by the program's own code; `nchw_convolutions` reports those of convolutions."""
    found = [copy for copy in case.copies("layout_change") if copy.phase not in BEFORE_MODEL]
    cost = _conversion_cost(case, found)
    if cost < NOTABLE:
        return
    yield Finding(
        id="layout-in-model",
        title=f"tensors are rearranged in memory within {case.window()}",
        severity=severity(cost),
        evidence=_describe_conversions(case, found),
        cause="an operator needs contiguous input, and a transpose, permute or slice made it non-contiguous",
        advice="choose layouts that the next operator takes unchanged, and remove needless contiguous() calls",
        expected=case.less_work(cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}, as most models need some of it",
    )


def nchw_convolutions(case: ProfileCase) -> Answers:
    kernels = [one for one in case.rank.kernels if TO_NHWC.search(one.name) and _may_be_convolutions(one.operator)]
    cost = case.share(sum(kernel.total for kernel in kernels))
    if cost < WORTH:
        return
    sharded = case.setting("distributed.strategy") == "fsdp2"  # FSDP2 cannot shard parameters in NHWC
    off = case.setting("performance.channels_last") is False and not sharded
    rocm = any(OF_MIOPEN in kernel.name for kernel in kernels)
    yield Finding(
        id="nchw-convolutions",
        title="convolutions convert their tensors to NHWC and back",
        severity=severity(cost),
        evidence=[
            f"{shortened(kernel.name)}: {case.calls_per_step(kernel.calls)}, {case.time_per_step(kernel.total)}"
            for kernel in kernels[:3]
        ],
        cause=f"{'MIOpen' if rocm else 'tensor cores'} compute{'s' * rocm} these convolutions in NHWC, and "
        f"{'its input is' if rocm else 'model and data are'} in NCHW",
        advice="use model.to(memory_format=torch.channels_last), and the same for the batches"
        + (", with PYTORCH_MIOPEN_SUGGEST_NHWC=1: without it PyTorch may still pass NCHW to MIOpen" * rocm),
        fix=case.fix(performance__channels_last=True) if off else {},
        expected=case.less_work(cost),
        threshold=case.worth_reason,
    )


def _may_be_convolutions(operator: str) -> bool:
    """Tells whether an operator is or may contain a convolution: matrix products are transposed too."""
    return not operator.startswith("aten::") or "conv" in operator


def _conversion_cost(case: ProfileCase, copies: list[Copy]) -> float:
    return case.share(sum(case.spent(copy) for copy in copies))


def _narrow(case: ProfileCase) -> tuple[str, str]:
    return (
        f"precision={case.setting('precision')} converts operands before each product and results after it",
        "compute in fp32 where the CPU has no arithmetic in the smaller type",
    )


def _capability(case: ProfileCase) -> list[str]:
    computes = case.cpu_computes_in(case.setting("precision"))
    return ["the CPU has no arithmetic in that type"] if computes is False else []


def _describe_conversions(case: ProfileCase, copies: list[Copy]) -> list[str]:
    costly = sorted(copies, key=lambda copy: case.spent(copy), reverse=True)
    return [
        f"{copy.example or 'aten::copy_'}: {case.calls_per_step(copy.calls)} in {copy.phase}, "
        f"{case.time_per_step(case.spent(copy))}{at_place(copy.where)}"
        for copy in costly[:3]
    ]
