"""Rules about copies between CPU and device, and about waits for them."""

from gpubench import units
from gpubench.diagnosis.case import WORTH, Answers, ProfileCase, at_most, at_place, severity
from gpubench.findings import Finding
from gpubench.trace.profile import Copy, CopyKind, Synchronisation

COPYING = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "cudaMemcpyAsync", "cudaMemcpy", "hipMemcpyAsync"})
"""The operators and runtime calls that wait because they copy. The rules about copies report their waits."""

BETWEEN: tuple[CopyKind, ...] = ("host_to_device", "device_to_host")

COMPUTING = frozenset({"forward", "backward", "optimizer"})
"""The phases whose inputs should be on the device: a copy to it is of a tensor that was left on the CPU."""


def pinning(case: ProfileCase) -> Answers:
    """Finds batches in pageable memory; the waits of the CPU for their copies are evidence of the same finding."""
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
        cause="the driver copies pageable memory through a buffer of its own, while the CPU waits"
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
    """Finds copies from page-locked memory for which the CPU waits nevertheless."""
    pageable = {copy.phase for copy in _batches(case) if copy.pinned is False}
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase not in pageable | COMPUTING]
    cost = case.share(sum(wait.idle for wait in waits))
    if cost < WORTH:
        return
    yield Finding(
        id="blocking-copies",
        title="the CPU waits for copies to the device",
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
        title="tensors are copied back to the CPU" + " in the loop" * bool(case.rank.step_numbers),
        severity=severity(cost),
        evidence=[
            *(_describe_copy(case, copy) for copy in case.copies("device_to_host")),
            *(_describe_wait(case, wait) for wait in waits),
        ],
        cause="the CPU waits for the device before it can copy, and the device then waits for the CPU's next launch",
        advice=f"keep results on the device, and copy them {case.less_often()}, with non_blocking=True",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def host_tensors(case: ProfileCase) -> Answers:
    """Finds tensors that the model holds or makes on the CPU and copies to the device while it computes."""
    found = [copy for copy in case.copies("host_to_device") if copy.phase in COMPUTING]
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase in COMPUTING]
    cost = _cost(case, found, waits)
    if not found or cost < WORTH:
        return
    yield Finding(
        id="host-tensors",
        title="the model copies tensors from the CPU while it computes",
        severity=severity(cost),
        evidence=[*(_describe_copy(case, copy) for copy in found), *(_describe_wait(case, wait) for wait in waits)],
        cause="a tensor is made or kept on the CPU and copied to the device each time it is used",
        advice="register constants with register_buffer(), and make other tensors with device=x.device",
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def direction(case: ProfileCase, wait: Synchronisation) -> CopyKind | None:
    """Returns the direction of the copy that the CPU waits for; None if it waits for something else.

    In a phase with copies in both directions, the source line decides.
    """
    if wait.operator not in COPYING:
        return None
    beside = [copy for copy in case.rank.copies if copy.phase == wait.phase and copy.kind in BETWEEN]
    there = {copy.kind for copy in beside if copy.where == wait.where} or {copy.kind for copy in beside}
    return next((kind for kind in BETWEEN if kind in there), None)


def _batches(case: ProfileCase) -> list[Copy]:
    return [copy for copy in case.copies("host_to_device") if copy.phase not in COMPUTING]


def _waits(case: ProfileCase, kind: CopyKind, phases: set[str] | None = None) -> list[Synchronisation]:
    return [
        wait
        for wait in case.rank.synchronisations
        if not case.on_cpu and direction(case, wait) == kind and (phases is None or wait.phase in phases)
    ]


def _cost(case: ProfileCase, uploads: list[Copy], waits: list[Synchronisation]) -> float:
    """Returns an upper limit for the cost, as a fraction of the step.

    It is the idle time under these copies and their waits, plus the part of the copying that computing does not hide.
    Idle time under all copies from pageable memory is divided in proportion to the time of the copies.
    """
    device = case.rank.device
    every = _pageable_time(case.copies("host_to_device"))
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
    return f"{wait.operator} blocks the CPU {waits} in {wait.call}{at_place(wait.where)}"
