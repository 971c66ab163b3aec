"""The headline of a profile: its bottleneck in one sentence."""

from collections.abc import Mapping, Sequence

from gpubench import units
from gpubench.diagnosis.attention import attention_clause
from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.communication import collective_kind
from gpubench.diagnosis.memory_time import memory_bound_clause
from gpubench.diagnosis.stragglers import every_rank_is_traced, slowest
from gpubench.findings import DISTORTED, Finding
from gpubench.trace.profile import Cause, HostPart, WallBreakdown, folded

HEADLINE_MINIMUM = 0.1
"""The smallest part of the window that the headline names; smaller parts are in the tables."""

IDLE_CAUSES_IN_WORDS: dict[Cause, str] = {
    "first_calls": "goes to first calls, as the program was not warmed up",
    "data_loader": "waits for the data loader",
    "allocator": "waits for memory from the driver",
    "pageable_copy": "waits for copies from memory that is not page-locked",
    "communication_wait": "waits for other ranks",
    "synchronisation": "follows waits of the CPU for the GPU",
    "python_and_launch": "waits for Python and launches",
    "recording": "follows waits that only the recording makes",
    "queued": "comes after the launch of the next work (queued, or work that was not recorded)",
    "backlog": "comes before the first launch recorded",
    "unknown": "cannot be explained from the trace",
}
CPU_PARTS_IN_WORDS: dict[HostPart, str] = {
    "data_loader": "waits for the data",
    "communication": "waits for other ranks",
    "copies": "in copies and conversions",
    "optimizer": "in the optimizer",
    "operators": "in operators",
    "python": "in Python",
}

PHASES_IN_WORDS = {
    "data_wait": "waits for the data",
    "host_to_device": "in copies to the device",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "exposed_communication": "waits for other ranks",
    "optimizer": "in the optimizer",
}


OF_IDLE: dict[str, Cause] = {
    "not-warmed-up": "first_calls",
    **dict.fromkeys(("data-loading", "too-few-workers"), "data_loader"),
    "allocator": "allocator",
    "pinning": "pageable_copy",
    **dict.fromkeys(("exposed-communication", "straggler", "repeated-reduction"), "communication_wait"),
    **dict.fromkeys(
        ("synchronisation", "gradient-scaler", "device-to-host", "blocking-copies", "host-tensors"), "synchronisation"
    ),
    **dict.fromkeys(
        ("launch-bound", "python-bound", "slow-calls", "graph-breaks", "blocking-launches"), "python_and_launch"
    ),
}  # fmt: skip
"""The cause of idle time that a finding is about, by its id."""


def headline(case: ProfileCase, findings: Sequence[Finding] = ()) -> str:
    """Returns the bottleneck in one sentence; of idle time, what the first of `findings` on it is about."""
    if case.rank.wall <= 0:
        return "nothing was recorded that takes time"
    device = case.rank.device
    bottleneck = _on_cpu(case) if device is None else _on_gpu(case, device, findings)
    return f"{bottleneck}{attention_clause(case)}"


def _on_cpu(case: ProfileCase) -> str:
    if case.overhead is not None and case.overhead > DISTORTED and (clean := _clean_phases(case)):
        return f"CPU, without the profiler: {clean}"
    if not case.has_operators:
        lacking = "no operator, and no work of a GPU"
        return f"the recording captured nothing of what the program did in {case.window()}: {lacking}"
    who = "CPU"
    if case.rank.unread:
        who = f"CPU alone ({case.rank.unread[0]} is not read)"
    elif case.rank.work_missing:
        who = "CPU alone (the GPU's work was not recorded)"
    words = CPU_PARTS_IN_WORDS if who == "CPU" else CPU_PARTS_IN_WORDS | {"python": "outside operators"}
    parts = {words[part]: case.share(time) for part, time in case.rank.host.items()}
    return f"{who}: {_largest(parts, case.window()) or 'nothing is known of what the main thread did'}"


def _clean_phases(case: ProfileCase) -> str:
    """Returns the largest phases of the clean run, for a program that recording slows too unevenly."""
    shares = {words: case.clean_share(f"phase_{name}") or 0.0 for name, words in PHASES_IN_WORDS.items()}
    return _largest(shares, "a step")


def _largest(shares: Mapping[str, float], whole: str) -> str:
    """Returns the three largest parts in words; "" if none reaches HEADLINE_MINIMUM."""
    named = [part for part in shares.items() if part[1] >= HEADLINE_MINIMUM]
    named.sort(key=lambda part: part[1], reverse=True)
    if not named:
        return ""
    (first, most), *others = named[:3]
    rest = [f"{units.whole_percent(share)} {words}" for words, share in others]
    return ", ".join([f"{units.whole_percent(most)} of {whole} {first}", *rest])


def _on_gpu(case: ProfileCase, device: WallBreakdown, findings: Sequence[Finding]) -> str:
    """States what takes most of the step: idle time with its causes, communication, copies, or else computing."""
    parts = {
        "idle": device.idle,
        "communicates": device.exposed_communication,
        "copies": device.exposed_copies,
    }
    lost, most = max(parts.items(), key=lambda part: part[1])
    share = case.share(most)
    computes = case.share(device.compute)
    if share < HEADLINE_MINIMUM:
        does = f"GPU computes {units.whole_percent(computes)} of the time{_busiest(case)}"
        return f"{does}{memory_bound_clause(case)}{_hidden(case, device)}"
    if lost == "idle":
        return f"GPU idle {units.whole_percent(share)}: {_why_idle(case, device.idle, findings)}"
    if lost == "copies":
        return f"GPU copies {units.whole_percent(share)} of the time and computes {units.whole_percent(computes)}"
    does = "communicates" if _waits_are_known(case) else "communicates, or waits for other ranks,"
    slow = slowest(case)
    why = f"; rank {slow.rank} keeps the others waiting" if slow is not None and slow.whole else ""
    return f"GPU {does} {units.whole_percent(share)} of the time and computes {units.whole_percent(computes)}{why}"


def _hidden(case: ProfileCase, device: WallBreakdown) -> str:
    """Says how much communication computing hides, if it takes at least HEADLINE_MINIMUM of the time."""
    share = case.share(device.communication)
    if share < HEADLINE_MINIMUM:
        return ""
    hidden = units.whole_percent(device.hidden_communication / device.communication)
    return f"; communication takes {units.whole_percent(share)}, of which computing hides {hidden}"


def _waits_are_known(case: ProfileCase) -> bool:
    """Tells whether the traces show who waits for whom.

    They do if all ranks are traced, for collectives that no rank can leave before the others have entered.
    """
    found = case.rank.collectives
    one_way = sum(one.total for one in found if collective_kind(one) in ("send_recv", "broadcast"))
    return every_rank_is_traced(case) and 2 * one_way <= sum(one.total for one in found)


def _why_idle(case: ProfileCase, idle: int, findings: Sequence[Finding]) -> str:
    """Names the largest cause, and a second one: that of the first finding, or if the first is below half."""
    causes = sorted(((time, name) for name, time in case.rank.idle.items() if time > 0), reverse=True)
    if not causes:
        return "the trace does not show why"
    (most, first), *others = causes
    sentence = f"{units.whole_percent(most / idle)} of it {IDLE_CAUSES_IN_WORDS[first]}"
    found = next((OF_IDLE[one.id] for one in findings if one.id in OF_IDLE), None)
    second = [each for each in others if each[1] == found and first != found]
    if not second and most / idle < 0.5:
        second = others[:1]
    if second and second[0][0] / idle >= HEADLINE_MINIMUM:
        sentence += f", {units.whole_percent(second[0][0] / idle)} {IDLE_CAUSES_IN_WORDS[second[0][1]]}"
    return sentence


def _busiest(case: ProfileCase) -> str:
    """Names the phase with most of the computing, if that is at least HEADLINE_MINIMUM of the step."""
    known = [phase for phase in case.rank.phases if phase.name != "other" and phase.device > 0]
    if not known:
        return ""
    most = max(known, key=lambda phase: phase.device)
    if case.share(most.device) < HEADLINE_MINIMUM:
        return ""
    return f", {units.whole_percent(case.share(most.device))} in {most.name}{_layers(case)}"


def _layers(case: ProfileCase) -> str:
    """Names the group of equal layers with most of the computing, if that is at least HEADLINE_MINIMUM of the step.

    A module that is nested in such a layer counts for itself.
    """
    layers = [(module, equal) for module, equal in folded(case.rank.modules) if equal > 1]
    if not layers or attention_clause(case):
        return ""
    module, equal = max(layers, key=lambda layer: layer[0].own)
    share = case.share(module.own)
    name = module.kind or module.path.rpartition(".")[2]
    return f", {units.whole_percent(share)} in its {equal} {name} layers" if share >= HEADLINE_MINIMUM else ""
