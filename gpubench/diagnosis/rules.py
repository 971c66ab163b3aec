"""Applies the rules to a profile or to a footprint, and orders the findings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from gpubench import units
from gpubench.data_cost import DataCost
from gpubench.diagnosis import data_making
from gpubench.diagnosis.attention import is_restricted, unfused_attention
from gpubench.diagnosis.batch_size import small_batch, small_batch_on_cpu
from gpubench.diagnosis.case import WORTH_SAVING, Answers, Case, Estimated, FootprintCase, ProfileCase, ReadyData
from gpubench.diagnosis.changed_level import slower_from_a_step_on
from gpubench.diagnosis.cloned import needless_clones
from gpubench.diagnosis.communication import exposed_communication, repeated_reduction
from gpubench.diagnosis.compilation import graph_breaks, recompilation
from gpubench.diagnosis.conversions import casts, layout_in_model, layout_of_batches, nchw_convolutions
from gpubench.diagnosis.copies import blocking_copies, device_to_host, host_tensors, pinning
from gpubench.diagnosis.cpu_time import dispatch_bound, launch_bound, python_bound
from gpubench.diagnosis.data_loading import data_loading, restarted_workers
from gpubench.diagnosis.debugging import debugging_modes
from gpubench.diagnosis.double_precision import double_precision
from gpubench.diagnosis.first_calls import not_warmed_up
from gpubench.diagnosis.footprint_activations import (
    activations_kept,
    attention_matrix,
    evaluation,
    inputs,
    large_logits,
    micro_batch,
    wide_activations,
)
from gpubench.diagnosis.footprint_state import (
    foreach_temporaries,
    fragmentation,
    gradients,
    growth,
    optimizer_state,
    out_of_memory,
    parameters,
    workspaces,
)
from gpubench.diagnosis.fp32_products import fp32_products
from gpubench.diagnosis.gradients_unused import unused_gradients
from gpubench.diagnosis.headline import headline
from gpubench.diagnosis.kernel_speed import below_ceiling, dominant_kernel
from gpubench.diagnosis.matrix_products import odd_shapes
from gpubench.diagnosis.memory_time import allocator, memory_bound, recompute
from gpubench.diagnosis.optimizer import unfused_optimizer, zeroed_gradients
from gpubench.diagnosis.reduced_types import slow_reduced_type
from gpubench.diagnosis.stragglers import stragglers
from gpubench.diagnosis.synchronisation import blocking_launches, gradient_scaler, synchronisation
from gpubench.diagnosis.threads import too_few_threads, too_many_threads
from gpubench.findings import Finding, Findings, Unanswered
from gpubench.memory.footprint import Footprint
from gpubench.metrics import Metric
from gpubench.runs.levels import ChangedLevel
from gpubench.sampled import SampledCode
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.profile import Profile, RankProfile

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
    settings: Mapping[str, Any] | None = None
    """The settings of the program, corrected by what the trace shows; None if they are unknown."""


def of_files(paths: Sequence[Path]) -> Diagnosis:
    """Diagnoses the traces of any program, one per rank.

    Raises DataError for a file that is not a trace, and for traces of two different programs.
    """
    profile = analyse([read(path) for path in paths])
    return Diagnosis(profile, diagnose(ProfileCase(profile)), list(paths))


def of_run(
    paths: Sequence[Path],
    settings: Mapping[str, Any] | None,
    metrics: Mapping[str, Metric],
    environment: Mapping[str, Any],
    unit_time: float | None,
    others: float = 0.0,
    sampled: Mapping[int, SampledCode] = MappingProxyType({}),
    ready: ReadyData | None = None,
    changed: ChangedLevel | None = None,
) -> Diagnosis:
    """Diagnoses a run, with the settings, metrics and environment of its clean repeats, by dot-key.

    `others` is the number of CPU cores that other processes kept busy meanwhile. `sampled` has the samples of the
    program's own code by rank, and `ready` is what is known of it with data that is always ready. `changed` is from
    which clean step on they take another time.

    `settings` is None if it is unknown how the run ran, so that findings propose no settings. `paths` are all traces of
    the run; of several cycles of a rank, only the last counts. `unit_time` is the time of a clean step, in seconds.
    Raises DataError as `of_files` does.
    """
    latest = _latest(paths)
    profile = _with_samples(analyse([read(path) for path in latest]), sampled)
    if settings and settings.get("performance.sdpa") and any(map(is_restricted, profile.ranks)):
        settings = {**settings, "performance.sdpa": "math"}  # a context in the program cannot be seen from outside
    if settings and settings.get("performance.compile") and not settings.get("profiling.keep_compile"):
        profile = _noted(profile, EAGER)
    overhead = _overhead(profile, unit_time)
    case = ProfileCase(profile, metrics, environment, overhead, others, ready, changed, settings=settings)
    return Diagnosis(profile, msgspec.structs.replace(diagnose(case), overhead=overhead), latest, settings)


def _latest(paths: Sequence[Path]) -> list[Path]:
    """Returns the last cycle of each rank. The recorder's file names are like rank0.1763748910.pt.trace.json.gz."""
    by_rank = {path.name.partition(".")[0]: path for path in sorted(paths, key=lambda path: path.name)}
    return [by_rank[rank] for rank in sorted(by_rank, key=lambda rank: (len(rank), rank))]


def _noted(profile: Profile, note: str) -> Profile:
    ranks = [msgspec.structs.replace(rank, notes=[*rank.notes, note]) for rank in profile.ranks]
    return msgspec.structs.replace(profile, ranks=ranks)


def _with_samples(profile: Profile, sampled: Mapping[int, SampledCode]) -> Profile:
    ranks = [msgspec.structs.replace(rank, code=sampled.get(rank.rank or 0)) for rank in profile.ranks]
    return msgspec.structs.replace(profile, ranks=ranks)


def _overhead(profile: Profile, unit_time: float | None) -> float | None:
    steps = profile.ranks[0].steps
    if not steps or not unit_time:
        return None
    return median(step.wall for step in steps) / 1e9 / unit_time - 1


TimeRule = Callable[[ProfileCase], Answers]
MemoryRule = Callable[[FootprintCase], Answers]

TIME_RULES: tuple[TimeRule, ...] = (
    debugging_modes, not_warmed_up, data_loading, restarted_workers, pinning, blocking_copies, device_to_host,
    host_tensors, casts,
    layout_of_batches, layout_in_model, needless_clones, nchw_convolutions, synchronisation, gradient_scaler,
    blocking_launches, launch_bound, python_bound, dispatch_bound, small_batch, small_batch_on_cpu, double_precision,
    slow_reduced_type, fp32_products, unfused_attention, odd_shapes, below_ceiling, memory_bound,
    unfused_optimizer, zeroed_gradients, repeated_reduction, exposed_communication, stragglers, recompute,
    unused_gradients, allocator, graph_breaks, recompilation, too_few_threads, too_many_threads, slower_from_a_step_on,
)  # fmt: skip

DEVICELESS_RULES: tuple[TimeRule, ...] = (debugging_modes, data_loading, restarted_workers, slower_from_a_step_on)
"""Rules that hold even if the work of the device was not read or not recorded."""

MEMORY_RULES: tuple[MemoryRule, ...] = (
    out_of_memory, growth, evaluation, activations_kept, micro_batch, wide_activations, large_logits, attention_matrix,
    foreach_temporaries, optimizer_state, gradients, parameters, inputs, fragmentation, workspaces,
)  # fmt: skip

OF_TRAINING = frozenset({
    gradient_scaler, unfused_optimizer, zeroed_gradients, repeated_reduction, recompute, unused_gradients,
    activations_kept, micro_batch, large_logits, foreach_temporaries, optimizer_state, gradients,
})  # fmt: skip
"""Rules about what a backward pass and an update need, which inference does not have."""

OF_STEADY_CPU = frozenset({launch_bound, python_bound, synchronisation, allocator, graph_breaks})
"""Rules about delays of the CPU, which a program that is still warming up has anyway."""

_BY_SEVERITY = {"high": 0, "medium": 1, "low": 2}


def diagnose(case: ProfileCase) -> Findings:
    """Returns the findings on a program's time."""
    lacking = _lacking(case.rank)
    rules = DEVICELESS_RULES if lacking else tuple(rule for rule in TIME_RULES if not _is_early(case, rule))
    found = _apply(rules, case)
    if not lacking and all(one.severity == "low" for one in found.findings):
        found = _apply((*rules, dominant_kernel), case)
    unanswered = [*found.unanswered, *([Unanswered("device", lacking, needs="")] if lacking else [])]
    return msgspec.structs.replace(found, headline=headline(case, found.findings), unanswered=unanswered)


def _is_early(case: ProfileCase, rule: TimeRule) -> bool:
    return case.warms_up and rule in OF_STEADY_CPU


def _lacking(rank: RankProfile) -> str:
    """Returns what the trace lacks of the work of the device; "" if nothing, or if the program runs on a CPU."""
    if rank.host_only and rank.unread:
        return f"the device's work, as {rank.unread[0]} is not read"
    return "the GPU's work, which was not recorded (ProfilerActivity.CUDA)" if rank.work_missing else ""


def advise(footprint: Footprint, settings: Mapping[str, Any] | None) -> Findings:
    """Returns the findings on a program's memory. They have no headline, because the footprint has its own.

    `settings` are the run's, by dot-key; None for other programs, whose findings propose no settings. The saving of a
    fix is set where it follows from the footprint; a prediction gives the others. Those of a peak below `WORTH_SAVING`
    are withheld.
    """
    found = _apply(MEMORY_RULES, FootprintCase(footprint, settings=settings))
    if footprint.peak.level.total >= WORTH_SAVING or not found.findings:
        return found
    return msgspec.structs.replace(found, withheld=f"no advice below a peak of {units.size(WORTH_SAVING)}")


def of_data(cost: DataCost, code: SampledCode | None) -> Findings:
    """Returns the findings on how a program makes its batches. `code` is what was sampled of it; None if nothing was.

    The number of workers that training was run with has its measured saving.
    """
    case = data_making.DataCase(cost=cost, code=code, settings=data_making.settings_of(cost.record))
    found = _apply(data_making.RULES, case)
    return msgspec.structs.replace(
        found,
        headline=data_making.headline(case),
        findings=[data_making.tried(one, cost) for one in found.findings],
    )


CaseT = TypeVar("CaseT", bound=Case)


def _apply(rules: Sequence[Callable[[CaseT], Answers]], case: CaseT) -> Findings:
    """Returns the findings of all rules that have evidence, the most severe and of these the largest saving first.

    Of several findings with the same fix only the first has it, so that it is tried once.
    """
    answers = [answer for rule in rules if not (case.infers and rule in OF_TRAINING) for answer in rule(case)]
    found = [_estimated(answer) for answer in answers if not isinstance(answer, Unanswered)]
    estimated = [one for one in found if one.finding.evidence]
    estimated.sort(key=lambda one: (_BY_SEVERITY[one.finding.severity], -one.saving))
    findings: list[Finding] = []
    for finding, _ in estimated:
        known = any(finding.fix == other.fix for other in findings)
        findings.append(msgspec.structs.replace(finding, fix={}) if known else finding)
    return Findings("", findings, [answer for answer in answers if isinstance(answer, Unanswered)])


def _estimated(answer: Finding | Estimated) -> Estimated:
    if isinstance(answer, Estimated):
        return answer
    return Estimated(answer, -1.0 if answer.expected is None else answer.expected.estimate)
