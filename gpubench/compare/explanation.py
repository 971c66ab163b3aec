"""Finds what a change goes together with: phases, ranks, clocks, profiles and memory. It does not prove causes."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from msgspec import structs

from gpubench import units
from gpubench.compare.comparability import same_step, samples_per_step
from gpubench.compare.evidence import PHASE, Side
from gpubench.compare.intervals import CONFIDENCE, MetricSample, difference, holm
from gpubench.compare.result import (
    Bottleneck,
    Causes,
    ClockEffect,
    Comparability,
    Explanation,
    Fate,
    FindingChange,
    Memory,
    MemoryPeak,
    NullMetric,
    PhaseChange,
    PhaseMemory,
    RankChange,
    SizeChange,
    Waterfall,
    Work,
    WorkChange,
)
from gpubench.compare.verdicts import interleaved, known_of, sample_of, samples_of
from gpubench.compare.warnings import RUNS_WATCHED, steady_telemetry
from gpubench.findings import Finding, Findings
from gpubench.memory.footprint import Amounts, Footprint, PhaseFootprint
from gpubench.metrics import DEFINITIONS
from gpubench.trace.profile import KernelChange, RankProfile, kernel_changes

MOST = 20  # number of changes of work that are listed
EVALUATED = "work.micro_batch"  # samples in a step of a pipeline


@dataclass(frozen=True)
class RunDiagnosis:
    run: str
    rank: RankProfile
    """The lowest of the recorded ranks."""
    findings: Findings


def diagnosis(side: Side) -> RunDiagnosis | None:
    """Returns the diagnosis of the side's first run that has one, or None."""
    for run in side.runs:
        if run.findings and run.profile and run.profile.ranks:
            return RunDiagnosis(run.label, run.profile.ranks[0], run.findings)
    return None


def find_causes(baseline: Side, candidate: Side, comparability: Comparability) -> Causes | None:
    """Compares the profiles and findings of both sides. Returns None if neither was profiled."""
    ours, theirs = diagnosis(baseline), diagnosis(candidate)
    if ours is None and theirs is None:
        return None
    obstacle: str | None = None
    kind: Work | None = None
    changes: list[WorkChange] = []
    if ours and theirs:
        obstacle = _obstacle(baseline, candidate, comparability) or _unlike(ours.rank, theirs.rank)
        if obstacle is None:
            kind, changes = _work(ours.rank, theirs.rank)
    return Causes(
        baseline=_bottleneck(ours),
        candidate=_bottleneck(theirs),
        findings=finding_changes(ours.findings if ours else None, theirs.findings if theirs else None),
        of=kind,
        work=changes[:MOST],
        others=len(changes[MOST:]),
        obstacle=obstacle,
    )


def finding_changes(before: Findings | None, after: Findings | None) -> list[FindingChange]:
    """Returns every finding of either side, the fixed ones first. A side that was not profiled is None."""
    was, now = _by_id(before), _by_id(after)
    return [
        FindingChange(
            id=name,
            title=(now.get(name) or was[name]).title,
            fate=_fate(name, before, after),
            baseline=was[name].severity if name in was else None,
            candidate=now[name].severity if name in now else None,
            baseline_saving=_saving(was.get(name)),
            candidate_saving=_saving(now.get(name)),
        )
        for name in [*(name for name in was if name not in now), *now]
    ]


def in_seconds(change: KernelChange) -> WorkChange:
    return WorkChange(change.name, change.before / 1e9, change.after / 1e9, change.calls_before, change.calls_after)


def _obstacle(baseline: Side, candidate: Side, comparability: Comparability) -> str | None:
    """Returns why a step is not the same work on both sides, or None."""
    if not (comparability.comparable or comparability.forced):
        return "the sides did not do the same work"
    alike = same_step(baseline, candidate) and not any(one.key == EVALUATED for one in comparability.differences)
    return None if alike else "a step is not as much work on both sides"


def _unlike(ours: RankProfile, theirs: RankProfile) -> str | None:
    """Returns why two traces are not comparable, or None."""
    if not (ours.step_numbers and theirs.step_numbers):
        return "a trace marks no steps"
    return "only one side's trace has work of a device" if ours.host_only != theirs.host_only else None


def _work(ours: RankProfile, theirs: RankProfile) -> tuple[Work, list[WorkChange]]:
    """Returns the kind of work that is compared, and its changes, the largest first."""
    if ours.host_only:
        return "operator", _moved(_operator_changes(ours, theirs))
    return "kernel", _moved(map(in_seconds, kernel_changes(ours, theirs)))


def _moved(changes: Iterable[WorkChange]) -> list[WorkChange]:
    return [change for change in changes if change.before != change.after]


def _operator_changes(before: RankProfile, after: RankProfile) -> list[WorkChange]:
    """Returns the changes of operators by name, for all shapes together, in their own time on the host."""
    (old, old_calls), (new, new_calls) = _operators(before), _operators(after)
    steps_before, steps_after = len(before.step_numbers), len(after.step_numbers)
    changes = [
        WorkChange(
            name=name,
            before=old[name] / steps_before / 1e9,
            after=new[name] / steps_after / 1e9,
            calls_before=old_calls[name] / steps_before,
            calls_after=new_calls[name] / steps_after,
        )
        for name in old | new
    ]
    return sorted(changes, key=lambda change: (-abs(change.after - change.before), change.name))


def _operators(rank: RankProfile) -> tuple[Counter[str], Counter[str]]:
    """Returns (nanoseconds, calls) in the window by operator name."""
    time: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for operator in rank.operators:
        time[operator.name] += operator.host
        calls[operator.name] += operator.calls
    return time, calls


def _bottleneck(found: RunDiagnosis | None) -> Bottleneck | None:
    if found is None:
        return None
    return Bottleneck(found.findings.headline, found.run, len(found.rank.step_numbers), found.findings.overhead)


def _fate(name: str, before: Findings | None, after: Findings | None) -> Fate | None:
    was, now = _judged(name, before), _judged(name, after)
    if was is None or now is None:
        return None
    return "gone" if not now else "still there" if was else "new"


def _judged(name: str, findings: Findings | None) -> bool | None:
    """Returns whether a side has the finding; None if the rule could not be applied."""
    if name in _by_id(findings):
        return True
    unknown = findings is None or any(one.id == name for one in findings.unanswered)
    return None if unknown else False


def _by_id(findings: Findings | None) -> dict[str, Finding]:
    return {one.id: one for one in findings.findings} if findings else {}


def _saving(finding: Finding | None) -> float | None:
    return finding.expected.estimate if finding and finding.expected else None


@dataclass(frozen=True)
class Followed:
    run: str
    footprint: Footprint


def followed(side: Side) -> Followed | None:
    """Returns the rank with the highest peak in the side's first run whose memory was followed, or None."""
    for run in side.runs:
        if run.footprints:
            return Followed(run.label, max(run.footprints.ranks, key=lambda rank: rank.peak.level.total))
    return None


def find_memory(baseline: Side, candidate: Side, comparability: Comparability) -> Memory | None:
    """Compares the memory of both sides. Returns None unless both were followed and did the same work (or --force)."""
    ours, theirs = followed(baseline), followed(candidate)
    if ours is None or theirs is None or not (comparability.comparable or comparability.forced):
        return None
    return against(ours, theirs)


def against(ours: Followed, theirs: Followed) -> Memory:
    """Returns the change of memory from the first to the second."""
    before, after = ours.footprint, theirs.footprint
    return Memory(
        baseline=_peak(ours),
        candidate=_peak(theirs),
        change=after.peak.level.total - before.peak.level.total,
        categories=size_changes(before.peak.amounts, after.peak.amounts),
        phases=phase_changes(before.phases, after.phases),
    )


def size_changes(before: Amounts, after: Amounts) -> list[SizeChange]:
    """Returns the changes of all categories of either side, the largest first."""
    changes = [
        SizeChange(name, before.get(name, 0), after.get(name, 0), after.get(name, 0) - before.get(name, 0))
        for name in before | after
    ]
    return sorted(changes, key=lambda one: -abs(one.change))


def phase_changes(before: Iterable[PhaseFootprint], after: Iterable[PhaseFootprint]) -> list[PhaseMemory]:
    """Returns the changes of all phases of either side, those with the largest change of the peak first."""
    ours, theirs = ({(one.stage, one.phase): one for one in side} for side in (before, after))
    changes = []
    for stage, phase in ours | theirs:
        old, new = ours.get((stage, phase)), theirs.get((stage, phase))
        changes.append(
            PhaseMemory(
                stage=stage,
                phase=phase,
                baseline=old.level.total if old else None,
                candidate=new.level.total if new else None,
                change=(new.level.total if new else 0) - (old.level.total if old else 0),
                categories=size_changes(old.peak if old else {}, new.peak if new else {}),
            )
        )
    return sorted(changes, key=lambda one: -abs(one.change))


def _peak(side: Followed) -> MemoryPeak:
    found = side.footprint
    return MemoryPeak(
        run=side.run,
        rank=found.rank,
        source=found.source,
        device=found.device,
        stage=found.peak.stage,
        phase=found.peak.phase,
        level=found.peak.level,
    )


MOST_RANKS = 5
LEAST_REPORTED = 0.1  # share of all changes; a smaller change is not reported
ALONE = 0.25  # the rank with the largest change changed alone if no other changed by more than this share of it
OFTEN_IDLE = 0.5  # share of the steps that begin with an idle device
ROUNDING = 1e-9  # share of a step's time; a smaller change is rounding error

NOTHING = Explanation(None, [], None, [])
UNSETTLED = "it is not established whether there is a change, so no phase is named as its cause"


def explain(
    baseline: Side,
    candidate: Side,
    comparability: Comparability,
    record: Sequence[NullMetric] = (),
    *,
    settled: bool = True,
) -> Explanation:
    """Explains the change of the step time. The explanation is empty if the work differs or no step was timed.

    Times are per step, or per sample of a rank if a step is not the same work on both sides. `record` is the recorded
    noise of equal runs. `settled` tells whether a change, or its absence, is established; otherwise nothing is named as
    its cause.
    """
    if not (comparability.comparable or comparability.forced):
        return NOTHING
    step = _Step.of(baseline, candidate, record)
    whole = step.change("step_time") if step else None
    if step is None or whole is None:
        return NOTHING
    waterfall = _waterfall(step, whole)
    ranks = _rank_changes(baseline, candidate)
    clock = _clock_effect(baseline, candidate, whole)
    if not settled:
        return Explanation(waterfall, ranks[:MOST_RANKS], clock, [UNSETTLED] if waterfall else [])
    notes = [*_phase_notes(waterfall), *_rank_notes(ranks, whole, waterfall), *_clock_notes(clock, whole)]
    notes.sort(key=lambda note: -note.size)
    sentences = [note.sentence for note in notes] or _silence(waterfall)
    return Explanation(waterfall, ranks[:MOST_RANKS], clock, sentences + _symptoms(baseline, candidate, waterfall))


@dataclass(frozen=True)
class _Note:
    size: float
    """The time in the step that the note is about, in seconds."""
    sentence: str


@dataclass(frozen=True)
class _Step:
    """The steps of both sides, or their samples if a step is not the same work on both."""

    baseline: Side
    candidate: Side
    per: Literal["step", "sample"]
    samples: tuple[int, int]
    """The numbers that the times of a step are divided by; 1 for whole steps."""
    record: Sequence[NullMetric]

    @classmethod
    def of(cls, baseline: Side, candidate: Side, record: Sequence[NullMetric]) -> "_Step | None":
        """Returns None if the steps differ in size by an unknown factor."""
        if same_step(baseline, candidate):
            return cls(baseline, candidate, "step", (1, 1), record)
        ours, theirs = samples_per_step(baseline), samples_per_step(candidate)
        return cls(baseline, candidate, "sample", (ours, theirs), record) if ours and theirs else None

    def change(self, metric: str) -> PhaseChange | None:
        """Returns the change of a time. A side without the metric counts as 0; returns None if both are without it."""
        sides = (self.baseline, self.candidate)
        have = [all(metric in run.metrics for run in side.runs) for side in sides]
        if not any(have):
            return None
        both = samples_of(*sides, metric) if all(have) else tuple(sample_of(side, metric) for side in sides)
        ours, theirs = (_share(sample, samples) for sample, samples in zip(both, self.samples, strict=True))
        known = known_of(self.record, metric, *sides)
        found = difference(ours, theirs, paired=interleaved(*sides), known=known)
        return PhaseChange(
            phase=metric.removeprefix(PHASE),
            baseline=ours.mean,
            candidate=theirs.mean,
            change=found.estimate,
            interval=found.interval,
            p_value=None if found.p_value is None else min(1.0, 2 * found.p_value),
        )

    @property
    def phases(self) -> list[str]:
        """Returns the phases of either side in the order of a step. Unknown phases come before `other`."""
        sides = (self.baseline, self.candidate)
        present = {name for side in sides for name in side.runs[0].metrics if name.startswith(PHASE)}
        places = {name: place for place, name in enumerate(DEFINITIONS)}
        return sorted(present, key=lambda name: (places.get(name, places["phase_other"] - 0.5), name))


def _share(sample: MetricSample | None, samples: int) -> MetricSample:
    """Converts times per step to times per sample. The errors of the steps are relative, and do not change."""
    return MetricSample(np.zeros(1)) if sample is None else replace(sample, units=sample.units / samples)


def _waterfall(step: _Step, whole: PhaseChange) -> Waterfall | None:
    """Returns the change of each phase; None if a side has no phases.

    `rest` is the change that the phases do not explain, beyond rounding error.
    """
    for side in (step.baseline, step.candidate):
        if not any(name.startswith(PHASE) for name in side.runs[0].metrics):
            return None
    floor = ROUNDING * max(whole.baseline, whole.candidate)
    phases = _adjusted([_rounded(change, floor) for name in step.phases if (change := step.change(name))])
    ours, theirs = (
        whole.baseline - math.fsum(phase.baseline for phase in phases),
        whole.candidate - math.fsum(phase.candidate for phase in phases),
    )
    if max(abs(ours), abs(theirs)) > floor:
        phases.append(PhaseChange("rest", ours, theirs, theirs - ours, None))
    return Waterfall(step.per, whole.baseline, whole.candidate, phases)


def _rounded(phase: PhaseChange, floor: float) -> PhaseChange:
    """Returns the phase with 0 for values that are only rounding error, as for the remainder of a step."""

    def clean(seconds: float) -> float:
        return seconds if abs(seconds) > floor else 0.0

    found = PhaseChange(phase.phase, clean(phase.baseline), clean(phase.candidate), clean(phase.change), None)
    ends = phase.interval and (clean(phase.interval[0]), clean(phase.interval[1]))
    p_value = 1.0 if ends == (0.0, 0.0) else phase.p_value
    return structs.replace(found, interval=ends, p_value=p_value)


def _adjusted(phases: Sequence[PhaseChange]) -> list[PhaseChange]:
    """Adjusts the p-values for all phases together: the probability of any false change stays below 5 %."""
    known = [phase.p_value for phase in phases if phase.p_value is not None]
    adjusted = iter(holm(known))
    return [phase if phase.p_value is None else structs.replace(phase, p_value=next(adjusted)) for phase in phases]


def _rank_changes(baseline: Side, candidate: Side) -> list[RankChange]:
    """Returns the changes of all ranks, the largest first; empty unless both sides have the same ranks and step."""
    ours, theirs = _busy_times(baseline), _busy_times(candidate)
    if ours.keys() != theirs.keys() or len(ours) < 2 or not same_step(baseline, candidate):
        return []
    changes = [RankChange(rank, ours[rank], theirs[rank], theirs[rank] - ours[rank]) for rank in sorted(ours)]
    return sorted(changes, key=lambda change: -abs(change.change))


def _busy_times(side: Side) -> dict[int, float]:
    """Returns the busy time of each rank in seconds per step, as a mean over the runs."""
    found: dict[int, list[float]] = {}
    for run in side.runs:
        for rank in run.summary.ranks:
            found.setdefault(rank.rank, []).append(rank.busy_time)
    return {rank: fmean(times) for rank, times in found.items()}


def _clock_effect(baseline: Side, candidate: Side, whole: PhaseChange) -> ClockEffect | None:
    """Splits the change into a part from the SM clock and a rest; None unless both sides' clock was read.

    The parts are the terms of ln(t2 / t1) = -ln(f2 / f1) + rest. Both are converted from logarithms to fractions of t1
    by the same factor, the logarithmic mean of t1 and t2 divided by t1. They sum to t2 / t1 - 1 exactly, and the result
    does not depend on which side is the baseline (LMDI-I: Ang 2005, Energy Policy 33, 867).
    """
    clocks = _mean_clock(baseline), _mean_clock(candidate)
    if not (clocks[0] and clocks[1] and whole.baseline > 0 and whole.candidate > 0):
        return None
    time, clock = math.log(whole.candidate / whole.baseline), math.log(clocks[1] / clocks[0])
    factor = math.expm1(time) / time if time else 1.0
    return ClockEffect(clocks[0], clocks[1], by_clock=-clock * factor, by_work=(time + clock) * factor)


def _mean_clock(side: Side) -> float | None:
    """Returns the mean SM clock over the GPUs and the steady steps, in MHz; None if it was not read."""
    readings = [
        gpu.sm_clock_mhz
        for run in side.runs[:RUNS_WATCHED]
        for sample in steady_telemetry(run)
        for gpu in sample.gpus
        if gpu.sm_clock_mhz is not None
    ]
    return fmean(readings) if readings else None


def _phase_notes(waterfall: Waterfall | None) -> Iterator[_Note]:
    """Yields a sentence on each phase that changed beyond its noise and by a large share of all changes."""
    if waterfall is None:
        return
    total = waterfall.candidate - waterfall.baseline
    moved = math.fsum(abs(phase.change) for phase in waterfall.phases)
    for phase in waterfall.phases:
        if not _established(phase) or abs(phase.change) < LEAST_REPORTED * moved:
            continue
        said = f"{units.words(phase.phase)} takes {units.signed_seconds(phase.change)}"
        a = " a sample" if waterfall.per == "sample" else ""
        if total and 0 < phase.change / total <= 1:
            said += f" of the {units.signed_seconds(total)}{a} ({units.whole_percent(phase.change / total)})"
        else:
            said += f"{a}, while the whole takes {units.signed_seconds(total)}"
        yield _Note(abs(phase.change), said)


def _rank_notes(ranks: Sequence[RankChange], whole: PhaseChange, waterfall: Waterfall | None) -> Iterator[_Note]:
    """Yields a sentence on a rank that changed alone, with the waiting of the other ranks."""
    if len(ranks) < 2 or not _established(whole):
        return
    most, next_ = ranks[0], ranks[1]
    if abs(most.change) < LEAST_REPORTED * abs(whole.change) or abs(next_.change) > ALONE * abs(most.change):
        return
    direction = "busier" if most.change > 0 else "less busy"
    said = f"rank {most.rank} became {units.seconds(abs(most.change))} {direction}, the others did not change"
    waiting = [phase for phase in waterfall.phases if phase.phase == "exposed_communication"] if waterfall else []
    if waiting and _established(waiting[0]) and min(waiting[0].change, most.change) > 0:
        said += f": the {units.signed_seconds(waiting[0].change)} of waiting in exposed communication is a consequence"
    yield _Note(abs(most.change), said)


def _clock_notes(clock: ClockEffect | None, whole: PhaseChange) -> Iterator[_Note]:
    if clock is None or round(clock.baseline_mhz) == round(clock.candidate_mhz):  # NVML reads whole MHz
        return
    if abs(clock.by_clock) < LEAST_REPORTED * (abs(clock.by_clock) + abs(clock.by_work)):
        return
    direction = "fell" if clock.candidate_mhz < clock.baseline_mhz else "rose"
    total = clock.by_clock + clock.by_work
    said = (
        f"the SM clock {direction} from {clock.baseline_mhz:.0f} to {clock.candidate_mhz:.0f} MHz, which can explain "
    )
    said += f"{units.signed_percent(clock.by_clock, 1)} of {units.signed_percent(total, 1)}; work changed by "
    yield _Note(abs(clock.by_clock) * whole.baseline, said + units.signed_percent(clock.by_work, 1))


def _silence(waterfall: Waterfall | None) -> list[str]:
    return ["no phase with a large share of the change exceeds its own noise"] if waterfall else []


def _symptoms(baseline: Side, candidate: Side, waterfall: Waterfall | None) -> list[str]:
    """Returns notes that a phase may have grown only because the device was idle."""
    idle = _mean_of(candidate, "starved_steps")
    before = _mean_of(baseline, "starved_steps")
    grew = [phase for phase in waterfall.phases if _established(phase) and phase.change > 0] if waterfall else []
    if idle is None or before is None or idle < OFTEN_IDLE or not grew:
        return []
    return [
        f"the device was idle at the start of {units.percent(idle)} of the steps ({units.percent(before)} before): "
        "a phase that grew in them reflects the host's speed, not the device's"
    ]


def _mean_of(side: Side, metric: str) -> float | None:
    known = [run.metrics[metric].estimate for run in side.runs if metric in run.metrics]
    return fmean(known) if known else None


def _established(phase: PhaseChange) -> bool:
    return phase.p_value is not None and phase.p_value < 1 - CONFIDENCE
