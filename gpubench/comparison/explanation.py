"""Where the change of a step comes from: its phases, the ranks, the clock. What went together, not what caused it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np
from msgspec import structs

from gpubench import units
from gpubench.comparison.comparability import same_step, samples_per_step
from gpubench.comparison.conditions import RUNS_WATCHED, steady_telemetry
from gpubench.comparison.evidence import PHASE, Side
from gpubench.comparison.result import (
    ClockEffect,
    Comparability,
    Explanation,
    NullMetric,
    PhaseChange,
    RankChange,
    Waterfall,
)
from gpubench.comparison.sampling import interleaved, known_of, sample_of, samples_of
from gpubench.inference import CONFIDENCE, Sample, difference, holm
from gpubench.metrics import DEFINITIONS

MOST_RANKS = 5
WORTH_TELLING = 0.1  # of all movement: what is less is not what the reader asked for
ALONE = 0.25  # of the change of the rank that moved most: where no other moved further, it moved alone
OFTEN_STARVED = 0.5  # of the steps
ROUNDING = 1e-9  # of a step's time: less is no time that anything took

NOTHING = Explanation(None, [], None, [])
UNSETTLED = "whether there is a change at all is not settled: no phase is named as its cause"


def explain(
    baseline: Side,
    candidate: Side,
    comparability: Comparability,
    record: Sequence[NullMetric] = (),
    *,
    settled: bool = True,
) -> Explanation:
    """What the change of the step time goes with; nothing where the work differs or no step was timed.

    Times are per step, or per sample of a rank where a step is not the same work on both sides. `record` is what is
    known of how equal runs vary. Unless it is `settled` whether there is a change, nothing is named as its cause.
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
    """Seconds of the step that it speaks of."""
    sentence: str


@dataclass(frozen=True)
class _Step:
    """The two sides' steps, or samples, whichever is the same work on both."""

    baseline: Side
    candidate: Side
    per: Literal["step", "sample"]
    samples: tuple[int, int]
    """What the seconds of a step are divided by; 1 for those of a whole step."""
    record: Sequence[NullMetric]

    @classmethod
    def of(cls, baseline: Side, candidate: Side, record: Sequence[NullMetric]) -> "_Step | None":
        """None where a step differs by an amount that is not known."""
        if same_step(baseline, candidate):
            return cls(baseline, candidate, "step", (1, 1), record)
        ours, theirs = samples_per_step(baseline), samples_per_step(candidate)
        return cls(baseline, candidate, "sample", (ours, theirs), record) if ours and theirs else None

    def change(self, metric: str) -> PhaseChange | None:
        """The change of a time; a side without it spent none on it. None where neither has it."""
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
        """Every phase of either side, in the order of a step, phases of a later version before `other`."""
        sides = (self.baseline, self.candidate)
        present = {name for side in sides for name in side.runs[0].metrics if name.startswith(PHASE)}
        places = {name: place for place, name in enumerate(DEFINITIONS)}
        return sorted(present, key=lambda name: (places.get(name, places["phase_other"] - 0.5), name))


def _share(sample: Sample | None, samples: int) -> Sample:
    """Of one sample in a step; the errors of the steps behind it are relative, and stay."""
    return Sample(np.zeros(1)) if sample is None else replace(sample, units=sample.units / samples)


def _waterfall(step: _Step, whole: PhaseChange) -> Waterfall | None:
    """None where no phase was timed on some side. `rest` is what the phases leave open, beyond rounding."""
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
    """The phase with 0 for what is nothing but the rounding of a sum, such as what all other phases leave of a step."""

    def clean(seconds: float) -> float:
        return seconds if abs(seconds) > floor else 0.0

    found = PhaseChange(phase.phase, clean(phase.baseline), clean(phase.candidate), clean(phase.change), None)
    ends = phase.interval and (clean(phase.interval[0]), clean(phase.interval[1]))
    p_value = 1.0 if ends == (0.0, 0.0) else phase.p_value
    return structs.replace(found, interval=ends, p_value=p_value)


def _adjusted(phases: Sequence[PhaseChange]) -> list[PhaseChange]:
    """With p-values that hold for all phases together: the chance that any moved without cause stays below 5 %."""
    known = [phase.p_value for phase in phases if phase.p_value is not None]
    adjusted = iter(holm(known))
    return [phase if phase.p_value is None else structs.replace(phase, p_value=next(adjusted)) for phase in phases]


def _rank_changes(baseline: Side, candidate: Side) -> list[RankChange]:
    """All ranks, the one that moved most first; none unless both sides have the same several, and the same step."""
    ours, theirs = _busy_times(baseline), _busy_times(candidate)
    if ours.keys() != theirs.keys() or len(ours) < 2 or not same_step(baseline, candidate):
        return []
    changes = [RankChange(rank, ours[rank], theirs[rank], theirs[rank] - ours[rank]) for rank in sorted(ours)]
    return sorted(changes, key=lambda change: -abs(change.change))


def _busy_times(side: Side) -> dict[int, float]:
    """Seconds a step by rank, mean over the runs."""
    found: dict[int, list[float]] = {}
    for run in side.runs:
        for rank in run.ranks:
            found.setdefault(rank.rank, []).append(rank.busy_time)
    return {rank: fmean(times) for rank, times in found.items()}


def _clock_effect(baseline: Side, candidate: Side, whole: PhaseChange) -> ClockEffect | None:
    """None unless both sides' SM clock was read while they ran.

    The two parts are terms of one sum, ln(t2 / t1) = -ln(f2 / f1) + rest, each brought from logarithms to fractions of
    t1 by the same factor, the logarithmic mean of t1 and t2 over t1, so that they add up to t2 / t1 - 1 exactly and
    neither side is preferred (LMDI-I: Ang 2005, Energy Policy 33, 867).
    """
    clocks = _mean_clock(baseline), _mean_clock(candidate)
    if not (clocks[0] and clocks[1] and whole.baseline > 0 and whole.candidate > 0):
        return None
    time, clock = math.log(whole.candidate / whole.baseline), math.log(clocks[1] / clocks[0])
    factor = math.expm1(time) / time if time else 1.0
    return ClockEffect(clocks[0], clocks[1], by_clock=-clock * factor, by_work=(time + clock) * factor)


def _mean_clock(side: Side) -> float | None:
    """MHz, over the GPUs and the steady steps."""
    readings = [
        gpu.sm_clock_mhz
        for run in side.runs[:RUNS_WATCHED]
        for sample in steady_telemetry(run)
        for gpu in sample.gpus
        if gpu.sm_clock_mhz is not None
    ]
    return fmean(readings) if readings else None


def _phase_notes(waterfall: Waterfall | None) -> Iterator[_Note]:
    """A sentence on each phase that moved beyond its own noise and makes up much of all that moved."""
    if waterfall is None:
        return
    total = waterfall.candidate - waterfall.baseline
    moved = math.fsum(abs(phase.change) for phase in waterfall.phases)
    for phase in waterfall.phases:
        if not _established(phase) or abs(phase.change) < WORTH_TELLING * moved:
            continue
        said = f"{units.words(phase.phase)} takes {units.signed_seconds(phase.change)}"
        a = " a sample" if waterfall.per == "sample" else ""
        if total and 0 < phase.change / total <= 1:
            said += f" of the {units.signed_seconds(total)}{a} ({units.whole_percent(phase.change / total)})"
        else:
            said += f"{a}, while the whole takes {units.signed_seconds(total)}"
        yield _Note(abs(phase.change), said)


def _rank_notes(ranks: Sequence[RankChange], whole: PhaseChange, waterfall: Waterfall | None) -> Iterator[_Note]:
    """One rank that moved alone, and the others' waiting that goes with it."""
    if len(ranks) < 2 or not _established(whole):
        return
    most, next_ = ranks[0], ranks[1]
    if abs(most.change) < WORTH_TELLING * abs(whole.change) or abs(next_.change) > ALONE * abs(most.change):
        return
    direction = "busier" if most.change > 0 else "less busy"
    said = f"rank {most.rank} became {units.seconds(abs(most.change))} {direction}, the others stayed"
    waiting = [phase for phase in waterfall.phases if phase.phase == "exposed_communication"] if waterfall else []
    if waiting and _established(waiting[0]) and min(waiting[0].change, most.change) > 0:
        said += f": the {units.signed_seconds(waiting[0].change)} of waiting in exposed communication goes with it"
    yield _Note(abs(most.change), said)


def _clock_notes(clock: ClockEffect | None, whole: PhaseChange) -> Iterator[_Note]:
    if clock is None or round(clock.baseline_mhz) == round(clock.candidate_mhz):  # NVML reads whole MHz
        return
    if abs(clock.by_clock) < WORTH_TELLING * (abs(clock.by_clock) + abs(clock.by_work)):
        return
    direction = "fell" if clock.candidate_mhz < clock.baseline_mhz else "rose"
    total = clock.by_clock + clock.by_work
    said = (
        f"the SM clock {direction} from {clock.baseline_mhz:.0f} to {clock.candidate_mhz:.0f} MHz, which can explain "
    )
    said += f"{units.signed_percent(clock.by_clock, 1)} of {units.signed_percent(total, 1)}; work changed by "
    yield _Note(abs(clock.by_clock) * whole.baseline, said + units.signed_percent(clock.by_work, 1))


def _silence(waterfall: Waterfall | None) -> list[str]:
    return ["no phase that makes up much of the movement stands out from its own noise"] if waterfall else []


def _symptoms(baseline: Side, candidate: Side, waterfall: Waterfall | None) -> list[str]:
    """Where a phase may have grown only because the device had nothing to do."""
    starved = _mean_of(candidate, "starved_steps")
    before = _mean_of(baseline, "starved_steps")
    grew = [phase for phase in waterfall.phases if _established(phase) and phase.change > 0] if waterfall else []
    if starved is None or before is None or starved < OFTEN_STARVED or not grew:
        return []
    return [
        f"the device had run out of work in {units.percent(starved)} of the steps ({units.percent(before)} before): "
        "a phase that grew there shows the host's pace, not the device's"
    ]


def _mean_of(side: Side, metric: str) -> float | None:
    known = [run.metrics[metric].estimate for run in side.runs if metric in run.metrics]
    return fmean(known) if known else None


def _established(phase: PhaseChange) -> bool:
    return phase.p_value is not None and phase.p_value < 1 - CONFIDENCE
