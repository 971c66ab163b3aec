"""Rules about copies between host and device, and about conversions of type and memory layout."""

import re

from gpubench import units
from gpubench.diagnosis.case import (
    NOTABLE,
    WORTH,
    Answers,
    ProfileCase,
    at_most,
    at_place,
    severity,
    shortened,
)
from gpubench.findings import Finding
from gpubench.trace.profile import Copy, CopyKind, Synchronisation

BEFORE_MODEL = frozenset({"data_wait", "host_to_device"})
TO_NHWC = re.compile(r"nchwToNhwc|nhwcToNchw|batched_transpose", re.IGNORECASE)
"""Kernels of cuDNN and MIOpen that convert tensors before and after convolutions computed in NHWC."""
OF_MIOPEN = "batched_transpose"


def casts(case: ProfileCase) -> Answers:
    found = [
        copy for copy in _of_kind(case, "dtype_cast") if copy.phase != "optimizer"
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
    found = [copy for copy in _of_kind(case, "layout_change") if copy.phase in BEFORE_MODEL]
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
    found = [copy for copy in _of_kind(case, "layout_change") if copy.phase not in BEFORE_MODEL]
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
    """Returns whether an operator is a convolution, or may contain one; matrix products are transposed too."""
    return not operator.startswith("aten::") or "conv" in operator


def _of_kind(case: ProfileCase, kind: CopyKind) -> list[Copy]:
    return [copy for copy in case.rank.copies if copy.kind == kind]


def _conversion_cost(case: ProfileCase, copies: list[Copy]) -> float:
    return case.share(sum(_conversion_time(case, copy) for copy in copies))


def _conversion_time(case: ProfileCase, copy: Copy) -> int:
    return copy.host if case.on_cpu else copy.device


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


def _narrow(case: ProfileCase) -> tuple[str, str]:
    return (
        f"precision={case.setting('precision')} converts operands before each product and results after it",
        "compute in fp32 where the CPU has no arithmetic in the smaller type",
    )


def _capability(case: ProfileCase) -> list[str]:
    computes = case.cpu_computes_in(case.setting("precision"))
    return ["the CPU has no arithmetic in that type"] if computes is False else []


def _describe_conversions(case: ProfileCase, copies: list[Copy]) -> list[str]:
    costly = sorted(copies, key=lambda copy: _conversion_time(case, copy), reverse=True)
    return [
        f"{copy.example or 'aten::copy_'}: {case.calls_per_step(copy.calls)} in {copy.phase}, "
        f"{case.time_per_step(_conversion_time(case, copy))}{at_place(copy.where)}"
        for copy in costly[:3]
    ]


COPYING = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "cudaMemcpyAsync", "cudaMemcpy", "hipMemcpyAsync"})
"""The operators and runtime calls that wait because they copy. The rules about copies report their waits."""

BETWEEN: tuple[CopyKind, ...] = ("host_to_device", "device_to_host")

COMPUTING = frozenset({"forward", "backward", "optimizer"})
"""The phases whose inputs should be on the device. A copy to the device in them is of a tensor left on the host."""


def pinning(case: ProfileCase) -> Answers:
    """Finds batches in pageable memory; the waits of the host for their copies are evidence of the same finding."""
    pageable = [copy for copy in _batches(case) if copy.pinned is False]
    waits = _waits(case, "host_to_device", {copy.phase for copy in pageable})
    cost = _cost(case, pageable, waits)
    if not pageable or cost < WORTH:
        return
    asked = case.setting("data.pin_memory") is True
    yield Finding(
        id="pinning",
        title="batches are copied from memory that is not page-locked",
        severity=severity(cost),
        evidence=[
            *(_describe_copy(case, copy) for copy in pageable),
            *_idle(case),
            *(_describe_wait(case, wait) for wait in waits),
        ],
        cause="the driver copies pageable memory through a buffer of its own, while the host waits"
        + ("; data.pin_memory applies only to tensors that the DataLoader can see" if asked else ""),
        advice=(
            "give the classes of your batch a pin_memory() method, or return tensors in tuples, lists and mappings"
            if asked
            else "put batches into page-locked memory: DataLoader(pin_memory=True) and .to(device, non_blocking=True)"
        ),
        fix={} if asked else case.fix(data__pin_memory=True),
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def blocking_copies(case: ProfileCase) -> Answers:
    """Finds copies from page-locked memory for which the host waits nevertheless."""
    pageable = {copy.phase for copy in _batches(case) if copy.pinned is False}
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase not in pageable | COMPUTING]
    cost = case.share(sum(wait.idle for wait in waits))
    if cost < WORTH:
        return
    yield Finding(
        id="blocking-copies",
        title="the host waits for copies to the device",
        severity=severity(cost),
        evidence=[_describe_wait(case, wait) for wait in waits],
        cause="a copy without non_blocking=True returns only when the data has arrived",
        advice="use batch.to(device, non_blocking=True): from page-locked memory the copy then runs asynchronously",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def device_to_host(case: ProfileCase) -> Answers:
    waits = _waits(case, "device_to_host")
    cost = case.share(sum(wait.idle for wait in waits))
    if cost < WORTH:
        return
    yield Finding(
        id="device-to-host",
        title="tensors are copied back to the host" + " in the loop" * bool(case.rank.step_numbers),
        severity=severity(cost),
        evidence=[
            *(_describe_copy(case, copy) for copy in _of_kind(case, "device_to_host")),
            *(_describe_wait(case, wait) for wait in waits),
        ],
        cause="the host waits for the device before it can copy, and the device then waits for the host's next launch",
        advice=f"keep results on the device, and copy them {case.less_often()}, with non_blocking=True",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def host_tensors(case: ProfileCase) -> Answers:
    """Finds tensors that the model holds or makes on the host and copies to the device while it computes."""
    found = [copy for copy in _of_kind(case, "host_to_device") if copy.phase in COMPUTING]
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase in COMPUTING]
    cost = _cost(case, found, waits)
    if not found or cost < WORTH:
        return
    yield Finding(
        id="host-tensors",
        title="the model copies tensors from the host while it computes",
        severity=severity(cost),
        evidence=[*(_describe_copy(case, copy) for copy in found), *(_describe_wait(case, wait) for wait in waits)],
        cause="a tensor is made or kept on the CPU and copied to the device each time it is used",
        advice="register constants with register_buffer(), and make other tensors with device=x.device",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def direction(case: ProfileCase, wait: Synchronisation) -> CopyKind | None:
    """Returns the direction of the copy that the host waits for; None if it waits for something else.

    In a phase with copies in both directions, the source line decides.
    """
    if wait.operator not in COPYING:
        return None
    beside = [copy for copy in case.rank.copies if copy.phase == wait.phase and copy.kind in BETWEEN]
    there = {copy.kind for copy in beside if copy.where == wait.where} or {copy.kind for copy in beside}
    return next((kind for kind in BETWEEN if kind in there), None)


def _batches(case: ProfileCase) -> list[Copy]:
    return [copy for copy in _of_kind(case, "host_to_device") if copy.phase not in COMPUTING]


def _waits(case: ProfileCase, kind: CopyKind, phases: set[str] | None = None) -> list[Synchronisation]:
    return [
        wait
        for wait in case.rank.synchronisations
        if direction(case, wait) == kind and (phases is None or wait.phase in phases)
    ]


def _cost(case: ProfileCase, uploads: list[Copy], waits: list[Synchronisation]) -> float:
    """Returns an upper limit for the cost, as a fraction of the step.

    It is the idle time under these copies and their waits, plus the exposed part of the copying. Idle time under all
    copies from pageable memory is divided in proportion to the time of the copies.
    """
    device = case.rank.device
    every = _pageable_time(_of_kind(case, "host_to_device"))
    idle = case.rank.idle.get("pageable_copy", 0) * _pageable_time(uploads) // every if every else 0
    exposed = min(device.exposed_copies, sum(copy.device for copy in uploads)) if device else 0
    return case.share(idle + exposed + sum(wait.idle for wait in waits))


def _pageable_time(copies: list[Copy]) -> int:
    return sum(copy.device for copy in copies if copy.pinned is False)


def _idle(case: ProfileCase) -> list[str]:
    waiting = case.rank.idle.get("pageable_copy", 0)
    return [f"the GPU is idle {case.time_per_step(waiting)} during these copies"] if waiting else []


def _describe_copy(case: ProfileCase, copy: Copy) -> str:
    size = f"{units.size(copy.bytes / case.steps)} in " if copy.bytes else ""
    return (
        f"{copy.example or 'copies'}: {case.calls_per_step(copy.calls)} in {copy.phase}, "
        f"{size}{case.time_per_step(copy.device)}{at_place(copy.where)}"
    )


def _describe_wait(case: ProfileCase, wait: Synchronisation) -> str:
    waits = case.time_per_step(wait.blocked)
    return f"{wait.operator} blocks the host {waits} in {wait.call}{at_place(wait.where)}"
