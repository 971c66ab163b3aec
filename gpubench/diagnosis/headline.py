"""The bottleneck in one sentence: where most of the time goes, and what it waits for."""

from gpubench import units
from gpubench.diagnosis import attention, measures, memory, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.stragglers import every_rank_is_traced, slowest
from gpubench.trace.communication import kind_of
from gpubench.trace.modules import folded
from gpubench.trace.profile import Breakdown, Cause, HostPart

TOLD = 0.1
"""Parts below a tenth are left to the tables."""

CHANGED = 1.0
"""An overhead: most of a recorded step is then the profiler's, and its parts tell of the profiler."""

WAITS: dict[Cause, str] = {
    "data_loader": "waits for the data loader",
    "allocator": "waits for memory from the driver",
    "pageable_copy": "waits for copies from memory that is not page-locked",
    "communication_wait": "waits for other ranks",
    "synchronisation": "follows waits of the host for the GPU",
    "python_and_launch": "waits for Python and launches",
    "recording": "follows waits that only the recording makes",
    "queued": "comes after the launch of the next work (queued, or work that was not recorded)",
    "backlog": "comes before the first launch recorded",
    "unknown": "cannot be explained from the trace",
}
DOES: dict[HostPart, str] = {
    "data_loader": "waits for the data",
    "communication": "waits for other ranks",
    "copies": "in copies and conversions",
    "optimizer": "in the optimizer",
    "operators": "in operators",
    "python": "in Python",
}

PHASES = {
    "data_wait": "waits for the data",
    "host_to_device": "in copies to the device",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "exposed_communication": "waits for other ranks",
    "optimizer": "in the optimizer",
}


def headline(case: Case) -> str:
    if case.rank.wall <= 0:
        return "nothing was recorded that takes time"
    device = case.rank.device
    said = _on_cpu(case) if device is None else _on_gpu(case, device)
    return f"{said}{attention.of_the_headline(case)}"


def _on_cpu(case: Case) -> str:
    if case.overhead is not None and case.overhead > CHANGED and (clean := _clean_phases(case)):
        return clean
    who = "CPU"
    if case.rank.unread:
        who = f"host alone ({case.rank.unread[0]} is not read)"
    elif case.rank.work_missing:
        who = "host alone (the GPU's work was not recorded)"
    parts = sorted(case.rank.host.items(), key=lambda part: part[1], reverse=True)
    told = [(name, share) for name, time in parts if (share := measures.share(case, time)) >= TOLD]
    if not told:
        return f"{who}: nothing is known of what the main thread did"
    (first, most), *others = told
    rest = [f"{units.whole_percent(share)} {DOES[name]}" for name, share in others[:2]]
    return f"{who}: {', '.join([f'{units.whole_percent(most)} of {phrases.whole(case)} {DOES[first]}', *rest])}"


def _clean_phases(case: Case) -> str | None:
    """Of a program that recording changes beyond recognition; None without times of a clean run."""
    shares = {name: measures.clean_share(case, f"phase_{name}") for name in PHASES}
    told = [(name, share) for name, share in shares.items() if share is not None and share >= TOLD]
    if not told:
        return None
    told.sort(key=lambda one: one[1], reverse=True)
    (first, most), *others = told
    rest = [f"{units.whole_percent(share)} {PHASES[name]}" for name, share in others[:2]]
    return f"CPU: {', '.join([f'{units.whole_percent(most)} of a clean step {PHASES[first]}', *rest])}"


def _on_gpu(case: Case, device: Breakdown) -> str:
    """What takes most of the step: idle time with its causes, communication, copies or, which is well, computing."""
    parts = {
        "idle": device.idle,
        "communicates": device.exposed_communication,
        "copies": device.exposed_copies,
    }
    lost, most = max(parts.items(), key=lambda part: part[1])
    share = measures.share(case, most)
    computes = measures.share(case, device.compute)
    if share < TOLD:
        return f"GPU computes {units.whole_percent(computes)} of the time{_busiest(case)}{memory.of_the_headline(case)}"
    if lost == "idle":
        return f"GPU idle {units.whole_percent(share)}: {_why_idle(case, device.idle)}"
    if lost == "copies":
        return f"GPU copies {units.whole_percent(share)} of the time and computes {units.whole_percent(computes)}"
    does = "communicates" if _waits_are_known(case) else "communicates, or waits for other ranks,"
    slow = slowest(case)
    why = "" if slow is None else f"; rank {slow.rank} keeps the others waiting"
    return f"GPU {does} {units.whole_percent(share)} of the time and computes {units.whole_percent(computes)}{why}"


def _waits_are_known(case: Case) -> bool:
    """Whether traces of all ranks tell who waits for whom, which they do for collectives that no rank leaves early."""
    found = case.rank.collectives
    one_way = sum(one.total for one in found if (one.kind or kind_of(one.name)) in ("send_recv", "broadcast"))
    return every_rank_is_traced(case) and 2 * one_way <= sum(one.total for one in found)


def _why_idle(case: Case, idle: int) -> str:
    """The largest cause, and the second where the first is not most of it."""
    causes = sorted(((time, name) for name, time in case.rank.idle.items() if time > 0), reverse=True)
    if not causes:
        return "the trace does not tell why"
    (most, first), *others = causes
    said = f"{units.whole_percent(most / idle)} of it {WAITS[first]}"
    if most / idle < 0.5 and others and others[0][0] / idle >= TOLD:
        said += f", {units.whole_percent(others[0][0] / idle)} {WAITS[others[0][1]]}"
    return said


def _busiest(case: Case) -> str:
    """The phase that most of it belongs to."""
    known = [phase for phase in case.rank.phases if phase.name != "other" and phase.device > 0]
    if not known:
        return ""
    most = max(known, key=lambda phase: phase.device)
    return f", {units.whole_percent(measures.share(case, most.device))} in {most.name}{_layers(case)}"


def _layers(case: Case) -> str:
    """The equal layers that most of it belongs to, if that is much; modules within them are counted by themselves."""
    layers = [(module, equal) for module, equal in folded(case.rank.modules) if equal > 1]
    if not layers or attention.of_the_headline(case):
        return ""
    module, equal = max(layers, key=lambda layer: layer[0].own)
    share = measures.share(case, module.own)
    name = module.kind or module.path.rpartition(".")[2]
    return f", {units.whole_percent(share)} in its {equal} {name} layers" if share >= TOLD else ""
