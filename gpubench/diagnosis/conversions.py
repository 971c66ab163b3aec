"""Rules about copies that change what a tensor is: its type, or the order of its elements in memory."""

import re

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, severity
from gpubench.trace.profile import Copy, CopyKind

WITHOUT_BF16 = frozenset({"AVX2", "DEFAULT"})
"""Capabilities that torch reports of x86 CPUs which have no arithmetic in bf16: it came with extensions of AVX-512."""
BEFORE_MODEL = frozenset({"data_wait", "host_to_device"})
TO_NHWC = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose", re.IGNORECASE)
"""Kernels of cuDNN and of MIOpen, before and behind convolutions that they compute in NHWC."""
OF_MIOPEN = "batched_transpose"


def casts(case: Case) -> Answers:
    found = [copy for copy in _of_kind(case, "dtype_cast") if copy.phase != "optimizer"]  # another rule's
    cost = _cost(case, found)
    if cost < NOTABLE:
        return
    narrow = case.rank.device is None and case.setting("precision") in ("bf16", "amp", "fp16")
    cause, advice = _narrow(case) if narrow else _WIDE[all(copy.phase in BEFORE_MODEL for copy in found)]
    yield Finding(
        id="casts",
        title="tensors are converted to another type",
        severity=severity(cost),
        evidence=[*_told(case, found), *(_capability(case) if narrow else [])],
        cause=cause,
        advice=advice,
        fix=case.fix(precision="fp32") if narrow else {},
        expected=None if narrow else measures.at_most(cost),  # the products become faster or slower as well
        threshold=f"from {units.percent(NOTABLE)} of the step on, as some conversion is part of mixed precision",
    )


def layout_of_batches(case: Case) -> Answers:
    found = [copy for copy in _of_kind(case, "layout_change") if copy.phase in BEFORE_MODEL]
    cost = _cost(case, found)
    if cost < WORTH:
        return
    asked = case.setting("performance.channels_last") is True
    on_cpu = case.rank.device is None  # a GPU's convolutions lose more by NCHW than these copies cost
    yield Finding(
        id="layout-of-batches",
        title="every batch is rearranged in memory",
        severity=severity(cost),
        evidence=_told(case, found),
        cause="performance.channels_last asks for NHWC, and the data comes as NCHW"
        if asked
        else "batches come in another memory layout than the one they are converted to",
        advice="give up channels_last where convolutions gain less than the copies cost, or make the data NHWC"
        if asked and on_cpu
        else "make the data in the layout that the model takes",
        fix=case.fix(performance__channels_last=False) if asked and on_cpu else {},
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def layout_in_model(case: Case) -> Answers:
    """Copies by the program's own code. What convolutions convert for themselves is another rule's."""
    found = [copy for copy in _of_kind(case, "layout_change") if copy.phase not in BEFORE_MODEL]
    cost = _cost(case, found)
    if cost < NOTABLE:
        return
    yield Finding(
        id="layout-in-model",
        title="tensors are rearranged in memory within the step",
        severity=severity(cost),
        evidence=_told(case, found),
        cause="an operator needs its input contiguous, and a transpose, permute or slice made it otherwise",
        advice="choose layouts that the next operator takes as they are, and leave out needless contiguous()",
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(NOTABLE)} of the step on, as few models do without any",
    )


def nchw_convolutions(case: Case) -> Answers:
    kernels = [kernel for kernel in case.rank.kernels if TO_NHWC.search(kernel.name)]
    cost = measures.share(case, sum(kernel.total for kernel in kernels))
    if cost < WORTH:
        return
    sharded = case.setting("distributed.strategy") == "fsdp2"  # it cannot shard parameters in NHWC
    off = case.setting("performance.channels_last") is False and not sharded
    rocm = any(OF_MIOPEN in kernel.name for kernel in kernels)
    yield Finding(
        id="nchw-convolutions",
        title="convolutions convert their tensors to NHWC and back",
        severity=severity(cost),
        evidence=[
            f"{phrases.shortened(kernel.name)}: {phrases.times_a_step(case, kernel.calls)}, "
            f"{phrases.a_step(case, kernel.total)}"
            for kernel in kernels[:3]
        ],
        cause=f"{'MIOpen' if rocm else 'tensor cores'} compute{'s' * rocm} these convolutions in NHWC, and "
        f"{'what reaches it is' if rocm else 'model and data are'} in NCHW",
        advice="model.to(memory_format=torch.channels_last), and the same for the batches"
        + (", with PYTORCH_MIOPEN_SUGGEST_NHWC=1: else PyTorch may pass NCHW on to MIOpen all the same" * rocm),
        fix=case.fix(performance__channels_last=True) if off else {},
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def _of_kind(case: Case, kind: CopyKind) -> list[Copy]:
    return [copy for copy in case.rank.copies if copy.kind == kind]


def _cost(case: Case, copies: list[Copy]) -> float:
    on_cpu = case.rank.device is None
    return measures.share(case, sum(copy.host if on_cpu else copy.device for copy in copies))


_WIDE = {
    True: (
        "the data does not come in the type that the model computes in",
        "make the data the right type where it is made, in the dataset",
    ),
    False: (
        "autocast, or the model itself, converts what it is given, each time",
        "hold tensors in the type they are used in, and convert them once",
    ),
}
"""Cause and advice, by whether all of it happens before the model."""


def _narrow(case: Case) -> tuple[str, str]:
    return (
        f"precision={case.setting('precision')} converts operands before each product and results after it",
        "compute in fp32 where the CPU has no arithmetic in the smaller type",
    )


def _capability(case: Case) -> list[str]:
    capability = case.environment.get("cpu.capability")
    if capability not in WITHOUT_BF16:
        return []
    return [f"the CPU's instructions ({capability}) have no arithmetic in that type"]


def _told(case: Case, copies: list[Copy]) -> list[str]:
    on_cpu = case.rank.device is None
    costly = sorted(copies, key=lambda copy: copy.host if on_cpu else copy.device, reverse=True)
    return [
        f"{copy.example or 'aten::copy_'}: {phrases.times_a_step(case, copy.calls)} in {copy.phase}, "
        f"{phrases.a_step(case, copy.host if on_cpu else copy.device)}{phrases.place(copy.where)}"
        for copy in costly[:3]
    ]
