"""Rules about copies between host and device, and about what is meant to be on the device and is not."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, severity
from gpubench.trace.profile import Copy, CopyKind, Synchronisation

COPYING = frozenset({"aten::copy_", "aten::_to_copy", "aten::to", "cudaMemcpyAsync", "cudaMemcpy", "hipMemcpyAsync"})
"""Operators, or bare calls, that wait because they copy: their waits are told with the copies."""

BETWEEN: tuple[CopyKind, ...] = ("host_to_device", "device_to_host")

COMPUTING = frozenset({"forward", "backward", "optimizer"})
"""Phases that take everything from where it is; a copy to the device in there is something left on the host."""


def pinning(case: Case) -> Answers:
    """Batches in ordinary memory. That the host waits for their copies is a consequence, and said here."""
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
        evidence=[*(_told(case, copy) for copy in pageable), *_idle(case), *(_waited(case, wait) for wait in waits)],
        cause="the driver copies ordinary memory by way of a buffer of its own, while the host waits"
        + ("; data.pin_memory reaches only tensors that the DataLoader can see" if asked else ""),
        advice=(
            "give the classes of your batch a pin_memory() method, or return tensors in tuples, lists and mappings"
            if asked
            else "stage batches in page-locked memory: DataLoader(pin_memory=True) and .to(device, non_blocking=True)"
        ),
        fix={} if asked else case.fix(data__pin_memory=True),
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def blocking_copies(case: Case) -> Answers:
    """Page-locked memory, and the host waits all the same."""
    pageable = {copy.phase for copy in _batches(case) if copy.pinned is False}
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase not in pageable | COMPUTING]
    cost = measures.share(case, sum(wait.idle for wait in waits))
    if cost < WORTH:
        return
    yield Finding(
        id="blocking-copies",
        title="the host waits for copies to the device",
        severity=severity(cost),
        evidence=[_waited(case, wait) for wait in waits],
        cause="a copy that was not asked to be asynchronous ends only when the data has arrived",
        advice="batch.to(device, non_blocking=True): from page-locked memory the copy then runs beside the host",
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def device_to_host(case: Case) -> Answers:
    waits = _waits(case, "device_to_host")
    cost = measures.share(case, sum(wait.idle for wait in waits))
    if cost < WORTH:
        return
    copies = [copy for copy in case.rank.copies if copy.kind == "device_to_host"]
    yield Finding(
        id="device-to-host",
        title="tensors are copied back to the host in the loop",
        severity=severity(cost),
        evidence=[*(_told(case, copy) for copy in copies), *(_waited(case, wait) for wait in waits)],
        cause="the host waits for the device before it can copy, and the device then waits for the host's next launch",
        advice="keep results on the device, and copy them once in many steps, with non_blocking=True",
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def host_tensors(case: Case) -> Answers:
    """Tensors of the model, or made by it, that lie on the host."""
    found = [copy for copy in _uploads(case) if copy.phase in COMPUTING]
    waits = [wait for wait in _waits(case, "host_to_device") if wait.phase in COMPUTING]
    cost = _cost(case, found, waits)
    if not found or cost < WORTH:
        return
    yield Finding(
        id="host-tensors",
        title="the model copies tensors from the host while it computes",
        severity=severity(cost),
        evidence=[*(_told(case, copy) for copy in found), *(_waited(case, wait) for wait in waits)],
        cause="a tensor is made or kept on the CPU and moved to the device each time it is needed",
        advice="register_buffer() what is constant, and make the rest with device=x.device",
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def direction(case: Case, wait: Synchronisation) -> CopyKind | None:
    """Of the copy that is waited for, None where it is something else; of a phase that copies both ways, the place
    tells."""
    if wait.operator not in COPYING:
        return None
    beside = [copy for copy in case.rank.copies if copy.phase == wait.phase and copy.kind in BETWEEN]
    there = {copy.kind for copy in beside if copy.where == wait.where} or {copy.kind for copy in beside}
    return next((kind for kind in BETWEEN if kind in there), None)


def _batches(case: Case) -> list[Copy]:
    return [copy for copy in _uploads(case) if copy.phase not in COMPUTING]


def _uploads(case: Case) -> list[Copy]:
    return [copy for copy in case.rank.copies if copy.kind == "host_to_device"]


def _waits(case: Case, kind: CopyKind, phases: set[str] | None = None) -> list[Synchronisation]:
    return [
        wait
        for wait in case.rank.synchronisations
        if direction(case, wait) == kind and (phases is None or wait.phase in phases)
    ]


def _cost(case: Case, uploads: list[Copy], waits: list[Synchronisation]) -> float:
    """At most: idle time under these copies and their waits, and as much of the copying as nothing hides.

    Of the idle time under all copies from pageable memory they bear as much as of the copying.
    """
    device = case.rank.device
    every = _pageable_time(_uploads(case))
    idle = case.rank.idle.get("pageable_copy", 0) * _pageable_time(uploads) // every if every else 0
    exposed = min(device.exposed_copies, sum(copy.device for copy in uploads)) if device else 0
    return measures.share(case, idle + exposed + sum(wait.idle for wait in waits))


def _pageable_time(copies: list[Copy]) -> int:
    return sum(copy.device for copy in copies if copy.pinned is False)


def _idle(case: Case) -> list[str]:
    waiting = case.rank.idle.get("pageable_copy", 0)
    return [f"the GPU is idle {phrases.a_step(case, waiting)} while the host copies so"] if waiting else []


def _told(case: Case, copy: Copy) -> str:
    size = f"{units.size(copy.bytes / measures.steps(case))} in " if copy.bytes else ""
    return (
        f"{copy.example or 'copies'}: {phrases.times_a_step(case, copy.calls)} in {copy.phase}, "
        f"{size}{phrases.a_step(case, copy.device)}{phrases.place(copy.where)}"
    )


def _waited(case: Case, wait: Synchronisation) -> str:
    waits = phrases.a_step(case, wait.blocked)
    return f"{wait.operator} keeps the host {waits} in {wait.call}{phrases.place(wait.where)}"
