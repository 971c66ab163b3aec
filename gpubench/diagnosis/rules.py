"""Apply every rule to a profile, order the findings, and state the bottleneck in one headline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from gpubench import units
from gpubench.diagnosis import attention, measures, memory, phrases
from gpubench.diagnosis.attention import unfused_attention
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.communication import (
    every_rank_is_traced,
    exposed_communication,
    repeated_reduction,
    slowest,
    stragglers,
)
from gpubench.diagnosis.copies import (
    blocking_copies,
    casts,
    device_to_host,
    host_tensors,
    layout_in_model,
    layout_of_batches,
    nchw_convolutions,
    pinning,
)
from gpubench.diagnosis.data import data_loading, small_batch, small_batch_on_cpu
from gpubench.diagnosis.device import fp32_products, odd_shapes, unfused_optimizer, zeroed_gradients
from gpubench.diagnosis.host import (
    blocking_launches,
    dispatch_bound,
    gradient_scaler,
    graph_breaks,
    launch_bound,
    python_bound,
    recompilation,
    synchronisation,
    too_few_threads,
    too_many_threads,
)
from gpubench.diagnosis.measures import Answers
from gpubench.diagnosis.memory import allocator, memory_bound, recompute
from gpubench.findings import Finding, Findings, Unanswered
from gpubench.metrics import Metric
from gpubench.trace.analyse import analyse
from gpubench.trace.host import folded
from gpubench.trace.load import read
from gpubench.trace.profile import Breakdown, Cause, HostPart, Profile, Rank
from gpubench.trace.ranks import kind_of

EAGER = (
    "the clean repeats ran compiled, and the recorded one did not, to tell the operators apart; "
    "profiling.keep_compile=true records what ran"
)


@dataclass(frozen=True)
class Diagnosis:
    """The profile of one program's traces, and the findings from it."""

    profile: Profile
    findings: Findings
    traces: list[Path]
    """The trace files, one per rank."""


def of_files(paths: Sequence[Path]) -> Diagnosis:
    """Diagnose the traces of any program, one per rank.

    Raises DataError for a file that is not a trace, and for traces of two different programs.
    """
    profile = analyse([read(path) for path in paths])
    return Diagnosis(profile, diagnose(Case(profile)), list(paths))


def of_run(
    paths: Sequence[Path],
    settings: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    environment: Mapping[str, Any],
    unit_time: float | None,
) -> Diagnosis:
    """Diagnose a run of our own, with the settings, metrics and environment of its clean repeats, by dot-key.

    `paths` are all traces of the run; of several cycles of a rank, only the last counts. `unit_time` is the time of a
    clean step, in seconds. Raises DataError as `of_files` does.
    """
    latest = list(_latest(paths))
    profile = analyse([read(path) for path in latest])
    if settings.get("performance.compile") and not settings.get("profiling.keep_compile"):
        profile = _noted(profile, EAGER)
    case = Case(profile, settings, metrics, environment, _overhead(profile, unit_time))
    return Diagnosis(profile, msgspec.structs.replace(diagnose(case), overhead=case.overhead), latest)


def _latest(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the last cycle of each rank. The recorder's file names are like rank0.1763748910.pt.trace.json.gz."""
    by_rank = {path.name.partition(".")[0]: path for path in sorted(paths, key=lambda path: path.name)}
    return iter(by_rank[rank] for rank in sorted(by_rank, key=lambda rank: (len(rank), rank)))


def _noted(profile: Profile, note: str) -> Profile:
    ranks = [msgspec.structs.replace(rank, notes=[*rank.notes, note]) for rank in profile.ranks]
    return msgspec.structs.replace(profile, ranks=ranks)


def _overhead(profile: Profile, unit_time: float | None) -> float | None:
    steps = profile.ranks[0].steps
    if not steps or not unit_time:
        return None
    return median(step.wall for step in steps) / 1e9 / unit_time - 1


TOLD = 0.1
"""The smallest part of the window that the headline names; smaller parts are in the tables."""

CHANGED = 1.0
"""The overhead of recording, as a fraction, from which on most of a recorded step is the profiler's own work."""

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
    """Return the phases of the clean run, for a program whose recording differs too much; None without such times."""
    shares = {name: measures.clean_share(case, f"phase_{name}") for name in PHASES}
    told = [(name, share) for name, share in shares.items() if share is not None and share >= TOLD]
    if not told:
        return None
    told.sort(key=lambda one: one[1], reverse=True)
    (first, most), *others = told
    rest = [f"{units.whole_percent(share)} {PHASES[name]}" for name, share in others[:2]]
    return f"CPU: {', '.join([f'{units.whole_percent(most)} of a clean step {PHASES[first]}', *rest])}"


def _on_gpu(case: Case, device: Breakdown) -> str:
    """State what takes most of the step: idle time with its causes, communication, copies, or else computing."""
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
    """Say whether the traces tell who waits for whom.

    They do if all ranks are traced, and for collectives that no rank can leave before the others have entered.
    """
    found = case.rank.collectives
    one_way = sum(one.total for one in found if (one.kind or kind_of(one.name)) in ("send_recv", "broadcast"))
    return every_rank_is_traced(case) and 2 * one_way <= sum(one.total for one in found)


def _why_idle(case: Case, idle: int) -> str:
    """Name the largest cause, and the second one if the first is less than half."""
    causes = sorted(((time, name) for name, time in case.rank.idle.items() if time > 0), reverse=True)
    if not causes:
        return "the trace does not tell why"
    (most, first), *others = causes
    said = f"{units.whole_percent(most / idle)} of it {WAITS[first]}"
    if most / idle < 0.5 and others and others[0][0] / idle >= TOLD:
        said += f", {units.whole_percent(others[0][0] / idle)} {WAITS[others[0][1]]}"
    return said


def _busiest(case: Case) -> str:
    """Name the phase with most of the computing."""
    known = [phase for phase in case.rank.phases if phase.name != "other" and phase.device > 0]
    if not known:
        return ""
    most = max(known, key=lambda phase: phase.device)
    return f", {units.whole_percent(measures.share(case, most.device))} in {most.name}{_layers(case)}"


def _layers(case: Case) -> str:
    """Name the group of equal layers with most of the computing, if that is at least TOLD of the step.

    A module that is nested in such a layer counts for itself.
    """
    layers = [(module, equal) for module, equal in folded(case.rank.modules) if equal > 1]
    if not layers or attention.of_the_headline(case):
        return ""
    module, equal = max(layers, key=lambda layer: layer[0].own)
    share = measures.share(case, module.own)
    name = module.kind or module.path.rpartition(".")[2]
    return f", {units.whole_percent(share)} in its {equal} {name} layers" if share >= TOLD else ""


Rule = Callable[[Case], Answers]

RULES: tuple[Rule, ...] = (
    data_loading, pinning, blocking_copies, device_to_host, host_tensors, casts, layout_of_batches, layout_in_model,
    nchw_convolutions, synchronisation, gradient_scaler, blocking_launches, launch_bound, python_bound, dispatch_bound,
    small_batch, small_batch_on_cpu, fp32_products, unfused_attention, odd_shapes, memory_bound, unfused_optimizer,
    zeroed_gradients, repeated_reduction, exposed_communication, stragglers, recompute, allocator, graph_breaks,
    recompilation, too_few_threads, too_many_threads,
)  # fmt: skip

OF_HOST: tuple[Rule, ...] = (data_loading,)
"""Rules that hold even if a device worked whose work was not read or not recorded."""

_BY_SEVERITY = {"high": 0, "medium": 1, "low": 2}


def diagnose(case: Case) -> Findings:
    """Return the findings ordered by expected saving; those with an unknown saving come last."""
    lacking = _lacking(case.rank)
    answers = [answer for rule in (OF_HOST if lacking else RULES) for answer in rule(case)]
    if lacking:
        answers.append(Unanswered("device", lacking, needs=""))
    findings = [answer for answer in answers if isinstance(answer, Finding) and answer.evidence]
    findings.sort(key=_urgency)
    return Findings(
        headline=headline(case),
        findings=findings,
        unanswered=[answer for answer in answers if isinstance(answer, Unanswered)],
    )


def _lacking(rank: Rank) -> str:
    """Return what is missing for a program whose device work is not in the trace; an empty string for one on a CPU."""
    if rank.host_only and rank.unread:
        return f"the device's work, as {rank.unread[0]} is not read"
    return "the GPU's work, which was not recorded (ProfilerActivity.CUDA)" if rank.work_missing else ""


def _urgency(finding: Finding) -> tuple[float, int]:
    saving = -1.0 if finding.expected is None else finding.expected.estimate
    return -saving, _BY_SEVERITY[finding.severity]
