"""The verdict on a metric, from where the 95 % interval of its ratio lies against the margin that matters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench import inference, units
from gpubench.comparison.comparability import Normalisation, normalise
from gpubench.comparison.evidence import Side
from gpubench.comparison.result import Level, NullMetric, Outcome, Verdict
from gpubench.comparison.sampling import interleaved, one_after_the_other, samples_of
from gpubench.inference import Error, Ratio, Sample
from gpubench.metrics import RATES, Better, Metric

DEFAULT_MARGIN = 0.005
COUNTS = ("peak_memory_allocated", "peak_memory_reserved", "peak_memory_total")
"""Metrics that the same program comes to again: of a run that followed its memory, whatever the machine did."""
COUNTED = "counted, not timed"


@dataclass(frozen=True)
class Judged:
    """A verdict and the ratio it was read from; None where there is no interval."""

    verdict: Verdict
    ratio: Ratio | None


@dataclass(frozen=True)
class Circumstances:
    """What a verdict depends on beside the numbers."""

    margin: float = DEFAULT_MARGIN
    withheld: str | None = None
    """Why no verdict may be given on anything."""
    rejected: Mapping[Outcome, str] = field(default_factory=dict)
    """Verdicts that are not to be believed, and why: faster, where the candidate left work undone."""
    noise: Sequence[NullMetric] = ()
    """What is on record of this workload's noise on this machine."""
    disturbance: float = 0.0
    """The change of a time that the machine alone may account for, as a fraction; see `conditions.accountable`."""


@dataclass(frozen=True)
class _Evidence:
    """The samples of one metric on both sides, and how their units vary."""

    metric: Metric
    ours: Sample
    theirs: Sample
    paired: bool
    unit_spread: tuple[float, int] | None
    """Relative, with its degrees of freedom: from the units themselves, or else from the record."""
    between_runs: NullMetric | None
    """How equal runs differ, where the sides are single runs and their repeats cannot tell."""
    counted: bool
    """The metric is a count: where nothing tells its noise, it has none."""

    @property
    def floor(self) -> float | None:
        if self.between_runs:
            return self.between_runs.noise_floor
        return inference.noise_floor(*self.unit_spread, self.ours.n, self.theirs.n) if self.unit_spread else None

    def limit(self, margin: float, disturbance: float) -> tuple[float, str | None]:
        """What a change has to exceed, and why if that is not the margin."""
        limit, why = margin, None
        blind = self.between_runs or min(self.ours.n, self.theirs.n) == 1
        if blind and self.floor and self.floor > limit:
            limit, why = self.floor, f"the noise floor of {units.difference(self.floor)}"
        if is_speed(self.metric.unit) and disturbance > limit:
            limit, why = disturbance, f"the {units.difference(disturbance)} that the machine itself may account for"
        return limit, why

    def ratio(self) -> Ratio | None:
        """Of the figures as they are shown, before they are divided by ranks."""
        found = inference.ratio(self.ours, self.theirs, paired=self.paired)
        if found is None and self.unit_spread and min(self.ours.mean, self.theirs.mean) > 0:
            size, df = self.unit_spread
            error = Error(size * math.sqrt(1 / self.ours.n + 1 / self.theirs.n), df)
            found = inference.student(self.theirs.mean / self.ours.mean, error)
        if found is None and self.counted and min(self.ours.mean, self.theirs.mean) > 0:
            found = inference.student(self.theirs.mean / self.ours.mean, Error(0.0, 1))
        return inference.inverse(found) if found and self.metric.name in RATES else found

    def values(self) -> tuple[float, float]:
        ours, theirs = self.ours.mean, self.theirs.mean
        return (1 / ours, 1 / theirs) if self.metric.name in RATES else (ours, theirs)


def judge(metric: Metric, baseline: Side, candidate: Side, circumstances: Circumstances) -> Judged:
    """The verdict on one metric that every run of both sides has."""
    evidence = _gather(metric, baseline, candidate, circumstances.noise)
    margin, (limit, why) = circumstances.margin, evidence.limit(circumstances.margin, circumstances.disturbance)
    scale = normalise(metric.name, metric.unit, baseline, candidate)
    found = _scaled(evidence.ratio(), scale)
    ours, theirs = (
        value / ranks for value, ranks in zip(evidence.values(), (scale.baseline, scale.candidate), strict=True)
    )
    outcome, leaning, reason = _outcome(evidence, found, margin, limit)
    if outcome == "inconclusive" and why:
        reason = f"not beyond {why}"
    if doubt := circumstances.rejected.get(leaning or outcome):
        outcome, leaning, reason = "rejected", None, doubt
    if withheld := circumstances.withheld or scale.withheld:
        outcome, leaning, reason = "withheld", None, withheld
    exact = evidence.counted and found is not None and found.error.size == 0
    level = None if exact else _level(found, baseline, candidate)
    verdict = Verdict(
        metric=scale.metric,
        unit=scale.unit,
        better=metric.better,
        verdict=outcome,
        leaning=leaning,
        baseline=ours,
        candidate=theirs,
        ratio=found.estimate if found else theirs / ours if ours > 0 else None,
        interval=found.interval if found and not exact else None,
        margin=margin,
        noise_floor=evidence.floor,
        limit=limit,
        resolvable=inference.resolvable(found.error, limit) if found and not exact else None,
        level=level,
        units=(evidence.ours.n, evidence.theirs.n),
        effective_n=(_effective_n(baseline, metric.name), _effective_n(candidate, metric.name)),
        paired=evidence.paired,
        more_repeats=_more_repeats(evidence, found, margin, limit) if outcome == "inconclusive" else None,
        method="ratio of the counts" if exact else _method(evidence, level),
        reason=reason or (COUNTED if exact else None),
    )
    return Judged(verdict, found)


def words(better: Better | None, unit: str, ratio: float) -> Outcome:
    """What a ratio away from 1 is called: faster and slower for times and rates, more and less for the rest."""
    if is_speed(unit):
        return "faster" if (ratio < 1) == (better != "higher") else "slower"
    return "more" if ratio > 1 else "less"


def is_speed(unit: str) -> bool:
    """Whether a unit is that of a time or a rate."""
    return unit == "s" or unit.endswith("/s")


def _gather(metric: Metric, baseline: Side, candidate: Side, noise: Sequence[NullMetric]) -> _Evidence:
    paired = interleaved(baseline, candidate)
    ours, theirs = samples_of(baseline, candidate, metric.name)
    recorded = next((entry for entry in noise if entry.metric == metric.name), None)
    unit_spread = inference.pooled_spread(ours, theirs, paired=paired)
    if unit_spread is None and recorded:
        unit_spread = recorded.spread, recorded.units - 1
    blind = one_after_the_other(baseline, candidate)
    between_runs = recorded if recorded and recorded.level == "run" and blind else None
    counted = metric.name in COUNTS and any(run.untimed for side in (baseline, candidate) for run in side.runs)
    return _Evidence(metric, ours, theirs, paired, unit_spread, between_runs, counted)


def _scaled(found: Ratio | None, scale: Normalisation) -> Ratio | None:
    """The ratio of the figures as they are shown, divided by ranks where there are more on one side."""
    factor = scale.baseline / scale.candidate
    if found is None or factor == 1:
        return found
    low, high = found.interval
    return Ratio(found.estimate * factor, (low * factor, high * factor), found.error, found.over_units)


def _outcome(
    evidence: _Evidence, found: Ratio | None, margin: float, limit: float
) -> tuple[Outcome, Outcome | None, str | None]:
    """The verdict, where it leans, and why there is none."""
    metric = evidence.metric
    if found is None:
        return _without_ratio(evidence)
    low, high = found.interval
    if low > 1 + limit or high < 1 / (1 + limit):  # the band is symmetric in the logarithm: rate or time, one verdict
        return words(metric.better, metric.unit, found.estimate), None, None
    if limit <= margin and low >= 1 / (1 + margin) and high <= 1 + margin:
        return "equivalent", None, None
    leans = limit <= margin and (low > 1 or high < 1)
    leaning = words(metric.better, metric.unit, found.estimate) if leans else None
    return "inconclusive", leaning, None


def _without_ratio(evidence: _Evidence) -> tuple[Outcome, Outcome | None, str | None]:
    metric, ours, theirs = evidence.metric, evidence.ours, evidence.theirs
    if not ours.units.any() and not theirs.units.any():
        return "equivalent", None, "0 on both sides"
    if min(ours.mean, theirs.mean) > 0:
        return "inconclusive", None, "one repeat on each side and no steps behind it: nothing tells its noise"
    interval = inference.difference(ours, theirs)
    if interval and (interval[0] > 0 or interval[1] < 0):
        return words(metric.better, metric.unit, 2.0 if interval[0] > 0 else 0.5), None, "one side is not above 0"
    return "inconclusive", None, "one side is not above 0: there is no ratio"


def _more_repeats(evidence: _Evidence, found: Ratio | None, margin: float, limit: float) -> int | None:
    """None where it is not repeats that are missing: runs, or a quieter machine."""
    alone = min(evidence.ours.n, evidence.theirs.n) == 1
    if found is None or evidence.unit_spread is None or evidence.between_runs:
        return None
    if limit > margin and not (alone and limit == evidence.floor):
        return None
    change = math.expm1(abs(math.log(found.estimate)))
    needed = inference.repeats_for(change, evidence.unit_spread[0], margin, paired=evidence.paired)
    return None if needed is None else max(1, needed - min(evidence.ours.n, evidence.theirs.n))


def _level(found: Ratio | None, baseline: Side, candidate: Side) -> Level | None:
    if found is None:
        return None
    if not found.over_units:
        return "step"
    return "run" if max(len(baseline.runs), len(candidate.runs)) > 1 else "repeat"


def _method(evidence: _Evidence, level: Level | None) -> str:
    if level is None:
        return "none"
    if level == "step":
        return "moving-block bootstrap of steps"
    if evidence.paired:
        return "Student's t over interleaved pairs of repeats"
    if min(evidence.ours.n, evidence.theirs.n) == 1:
        return f"Student's t; a single {level} taken to vary as the others do"
    return f"Welch's t over {level}s"


def _effective_n(side: Side, metric: str) -> float | None:
    counts = [run.metrics[metric].effective_n for run in side.runs]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
