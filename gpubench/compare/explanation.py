"""Finds what a change goes together with: phases, ranks, clocks, profiles and memory. It does not prove causes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from msgspec import structs

from gpubench import units
from gpubench.compare.comparability import lengths, same_step, samples_per_step
from gpubench.compare.evidence import PHASE, Side
from gpubench.compare.intervals import CONFIDENCE, MetricSample, difference, holm, two_sided
from gpubench.compare.result import (
    ClockEffect,
    Comparability,
    Explanation,
    NullMetric,
    PhaseChange,
    RankChange,
    Waterfall,
)
from gpubench.compare.verdicts import ASSUMED, interleaved, known_of, sample_of, samples_of
from gpubench.compare.warnings import RUNS_WATCHED, steady_telemetry
from gpubench.metrics import place_of_phase

MOST_RANKS = 5
LEAST_REPORTED = 0.1  # share of all changes; a smaller change is not reported
ALONE = 0.25  # the rank with the largest change changed alone if no other changed by more than this share of it
OFTEN_IDLE = 0.5  # share of the steps that begin with an idle device
ROUNDING = 1e-9  # share of a step's time; a smaller change is rounding error

NOTHING = Explanation(None, [], None, [])
OPEN = "whether the whole changed is not established"
UNSETTLED = f"{OPEN}, so no phase is named as its cause"


def explain(
    baseline: Side,
    candidate: Side,
    comparability: Comparability,
    record: Sequence[NullMetric] = (),
    *,
    assumed: float = ASSUMED,
    settled: bool = True,
) -> Explanation:
    """Explains the change of the step time. The explanation is empty if the work differs or no step was timed.

    Times are per step, or per sample of a rank if a step is not the same work on both sides. `record` is the recorded
    noise of equal runs, and `assumed` that of `Circumstances`. `settled` tells whether a change, or its absence, is
    established; otherwise the phases that changed are named, but nothing as a cause.
    """
    if not (comparability.comparable or comparability.forced):
        return NOTHING
    step = _Step.of(baseline, candidate, record, assumed)
    whole = step.change("step_time") if step else None
    if step is None or whole is None:
        return NOTHING
    waterfall = _waterfall(step, whole)
    ranks = _rank_changes(baseline, candidate)
    clock = _clock_effect(baseline, candidate, whole)
    if not settled:
        return Explanation(waterfall, ranks[:MOST_RANKS], clock, _unsettled(waterfall) if waterfall else [])
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
    assumed: float

    @classmethod
    def of(cls, baseline: Side, candidate: Side, record: Sequence[NullMetric], assumed: float) -> "_Step | None":
        """Returns the steps of both sides; None if they differ in size by an unknown factor, or in length."""
        if same_step(baseline, candidate):
            return cls(baseline, candidate, "step", (1, 1), record, assumed)
        if lengths(baseline, candidate):
            return None
        ours, theirs = samples_per_step(baseline), samples_per_step(candidate)
        return cls(baseline, candidate, "sample", (ours, theirs), record, assumed) if ours and theirs else None

    def change(self, metric: str) -> PhaseChange | None:
        """Returns the change of a time. A side without the metric counts as 0; returns None if both are without it."""
        sides = (self.baseline, self.candidate)
        have = [all(metric in run.metrics for run in side.runs) for side in sides]
        if not any(have):
            return None
        both = samples_of(*sides, metric) if all(have) else tuple(sample_of(side, metric) for side in sides)
        ours, theirs = (_share(sample, samples) for sample, samples in zip(both, self.samples, strict=True))
        known = known_of(self.record, metric, *sides)
        found = difference(ours, theirs, paired=interleaved(*sides), known=known, assumed=self.assumed)
        return PhaseChange(
            phase=metric.removeprefix(PHASE),
            baseline=ours.mean,
            candidate=theirs.mean,
            change=found.estimate,
            interval=found.interval,
            p_value=two_sided(found.p_value),
        )

    @property
    def phases(self) -> list[str]:
        """The phases of either side in the order of a step. Unknown phases come before `other`."""
        sides = (self.baseline, self.candidate)
        present = {name for side in sides for name in side.runs[0].metrics if name.startswith(PHASE)}
        return sorted(present, key=lambda name: (place_of_phase(name.removeprefix(PHASE)), name))


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
    """Returns the phase with 0 in place of rounding errors, as in the remainder of a step."""

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
    a = " a sample" if waterfall.per == "sample" else ""
    for phase in filter(_established, _large(waterfall)):
        name, change = units.words(phase.phase), units.signed_seconds(phase.change)
        if total and 0 < phase.change / total <= 1:
            part = units.whole_percent(phase.change / total)
            said = f"{name} accounts for {change} of the {units.signed_seconds(total)}{a} ({part})"
        else:
            said = f"{name} changed by {change}{a}, while the whole changed by {units.signed_seconds(total)}"
        yield _Note(abs(phase.change), said)


def _large(waterfall: Waterfall) -> list[PhaseChange]:
    """Returns the phases with a large share of all changes."""
    moved = math.fsum(abs(phase.change) for phase in waterfall.phases)
    return [phase for phase in waterfall.phases if abs(phase.change) >= LEAST_REPORTED * moved]


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
    """Returns why no phase is named, without denying an interval that excludes 0."""
    if waterfall is None:
        return []
    return _doubtful(waterfall) or ["no phase with a large share of the change exceeds its own noise"]


def _unsettled(waterfall: Waterfall) -> list[str]:
    """Returns the phases that changed although it is open whether the whole did."""
    a = " a sample" if waterfall.per == "sample" else ""
    changed = [
        f"{units.words(phase.phase)} changed by {units.signed_seconds(phase.change)}{a}"
        for phase in sorted(filter(_established, _large(waterfall)), key=lambda phase: -abs(phase.change))
    ]
    return [*changed, OPEN] if changed else _doubtful(waterfall) or [UNSETTLED]


def _doubtful(waterfall: Waterfall) -> list[str]:
    """Returns a sentence on large phases whose interval alone excludes 0, if no change of a phase is established."""
    names = [
        units.words(phase.phase)
        for phase in _large(waterfall)
        if phase.interval and (phase.interval[0] > 0 or phase.interval[1] < 0)
    ]
    if not names:
        return []
    tested = sum(phase.p_value is not None for phase in waterfall.phases)
    return [
        f"no phase changed after the correction for {units.counted(tested, 'phase')}; judged alone, "
        f"{units.listed(names)} would have"
    ]


def _symptoms(baseline: Side, candidate: Side, waterfall: Waterfall | None) -> list[str]:
    """Returns notes that a phase may have grown only because the device was idle."""
    idle = _mean_of(candidate, "starved_steps")
    before = _mean_of(baseline, "starved_steps")
    grew = [phase for phase in waterfall.phases if _established(phase) and phase.change > 0] if waterfall else []
    if idle is None or before is None or idle < OFTEN_IDLE or not grew:
        return []
    return [
        f"the device was idle at the start of {units.percent(idle)} of the steps ({units.percent(before)} before): "
        "a phase that grew in them reflects the CPU's speed, not the device's"
    ]


def _mean_of(side: Side, metric: str) -> float | None:
    known = [run.metrics[metric].estimate for run in side.runs if metric in run.metrics]
    return fmean(known) if known else None


def _established(phase: PhaseChange) -> bool:
    return phase.p_value is not None and phase.p_value < 1 - CONFIDENCE
