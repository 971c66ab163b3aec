"""The verdicts on the metrics of a comparison: which changes, and which lack of one, are established together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpubench import inference, units
from gpubench.comparison.comparability import Normalisation, normalise
from gpubench.comparison.evidence import Side
from gpubench.comparison.result import Level, NullMetric, Outcome, Verdict
from gpubench.comparison.sampling import interleaved, known_of, samples_of
from gpubench.inference import SIGNIFICANT, Error, Known, Ratio, Sample
from gpubench.metrics import Better, Metric

DEFAULT_MARGIN = 0.005
LEADERS = ("throughput", "throughput_per_device", "step_time", "peak_memory_total")
"""Metrics that speak for a comparison, the first of them that it has."""
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
    rate: bool
    """The samples are the times of one."""
    paired: bool
    known: Known | None
    """What is on record of how such units vary."""
    counted: bool
    """The metric is a count: where nothing tells its noise, it has none."""

    @property
    def unit_spread(self) -> tuple[float, float] | None:
        """Relative, with its degrees of freedom: from the units themselves, or else from the record."""
        own = inference.pooled_spread(self.ours, self.theirs, paired=self.paired)
        return own or ((self.known.spread, self.known.df) if self.known else None)

    @property
    def floor(self) -> float | None:
        if self.known and self.known.of_runs:
            return inference.noise_floor(self.known.spread, self.known.df, 1, 1)
        return inference.noise_floor(*self.unit_spread, self.ours.n, self.theirs.n) if self.unit_spread else None

    def ratio(self) -> Ratio | None:
        """Of the figures as they are shown, before they are divided by ranks."""
        found = inference.ratio(self.ours, self.theirs, paired=self.paired, known=self.known)
        if found is None and self.counted and min(self.ours.mean, self.theirs.mean) > 0:
            found = Ratio(self.theirs.mean / self.ours.mean, Error(0.0, 1))
        return inference.inverse(found) if found and self.rate else found

    def values(self) -> tuple[float, float]:
        ours, theirs = self.ours.mean, self.theirs.mean
        return (1 / ours, 1 / theirs) if self.rate else (ours, theirs)


@dataclass(frozen=True)
class _Case:
    """One metric before it is judged beside the others: its one-sided p-values, None where there is nothing to test."""

    evidence: _Evidence
    scale: Normalisation
    ratio: Ratio | None
    limit: float
    """What a change has to exceed."""
    why: str | None
    """Why that is not the margin."""
    withheld: str | None
    beyond: float | None = None
    """Of the change being larger than the limit."""
    within: float | None = None
    """Of the change being smaller than the margin; None where the limit is another."""
    unlike: float | None = None
    """Of there being a change at all."""
    certain: bool = False
    """There is no error, so that chance cannot make it wrong."""
    level: float = SIGNIFICANT
    """At which it is tested first, in its family."""

    @property
    def identity(self) -> tuple[float, ...] | None:
        """Equal for metrics that are one measurement in other words, as throughput and step time are; None for what
        cannot be wrong by chance."""
        if self.withheld or self.certain or self.beyond is None:
            return None
        found = (self.ratio.error.size, self.ratio.error.df) if self.ratio else (0.0, 0.0)
        return tuple(float(f"{number:.9g}") for number in (self.beyond, self.limit, *found))


def leading(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that speaks for all: on throughput, the step time or the whole memory, else the first that is one."""
    judged = [verdict for verdict in verdicts if verdict.verdict != "withheld"] or list(verdicts)
    return next((one for name in LEADERS for one in judged if one.metric == name), judged[0] if judged else None)


def judge(metric: Metric, baseline: Side, candidate: Side, circumstances: Circumstances) -> Judged:
    """The verdict on one metric that every run of both sides has, judged alone."""
    return judge_all([metric], baseline, candidate, circumstances)[0]


def judge_all(metrics: Sequence[Metric], baseline: Side, candidate: Side, circumstances: Circumstances) -> list[Judged]:
    """The verdicts on metrics that every run of both sides has, judged together.

    The chance that any change is named without cause stays below 5 %, and so does the chance that anything is called
    equivalent that is not: the p-values of each claim are corrected after Holm. The metric that speaks for all has half
    of that chance to itself, so that the company of a dozen others does not hide a change of the step time.
    """
    cases = _together([_case(metric, baseline, candidate, circumstances) for metric in metrics])
    family = len({case.identity for case in cases if case.identity})
    alone = [(case.beyond, case.within) for case in cases]
    adjusted = [_corrected(cases, [getattr(case, claim) for case in cases]) for claim in ("beyond", "within", "unlike")]
    together = [
        replace(case, beyond=beyond, within=within, unlike=unlike)
        for case, beyond, within, unlike in zip(cases, *adjusted, strict=True)
    ]
    return [
        Judged(_verdict(case, own, family, baseline, candidate, circumstances), case.ratio)
        for case, own in zip(together, alone, strict=True)
    ]


def words(better: Better | None, unit: str, ratio: float) -> Outcome:
    """What a ratio away from 1 is called: faster and slower for times and rates, more and less for the rest."""
    if is_speed(unit):
        return "faster" if (ratio < 1) == (better != "higher") else "slower"
    return "more" if ratio > 1 else "less"


def is_speed(unit: str) -> bool:
    """Whether a unit is that of a time or a rate."""
    return unit == "s" or unit.endswith("/s")


def _case(metric: Metric, baseline: Side, candidate: Side, circumstances: Circumstances) -> _Case:
    evidence = _gather(metric, baseline, candidate, circumstances.noise)
    scale = normalise(metric.name, metric.unit, baseline, candidate)
    margin, limit, why = circumstances.margin, circumstances.margin, None
    if is_speed(metric.unit) and circumstances.disturbance > limit:
        limit = circumstances.disturbance
        why = f"the {units.difference(limit)} that the machine itself may account for"
    found = _scaled(evidence.ratio(), scale)
    case = _Case(evidence, scale, found, limit, why, circumstances.withheld or scale.withheld)
    if found is None:
        change = inference.difference(evidence.ours, evidence.theirs, known=evidence.known)
        above = min(evidence.ours.mean, evidence.theirs.mean) > 0
        certain = change.error is not None and change.error.size == 0
        return case if above else replace(case, beyond=change.p_value, certain=certain)
    within = found.within(margin) if limit <= margin else None
    certain = found.error.size == 0
    return replace(case, beyond=found.beyond(limit), within=within, unlike=found.beyond(0), certain=certain)


def _gather(metric: Metric, baseline: Side, candidate: Side, noise: Sequence[NullMetric]) -> _Evidence:
    ours, theirs = samples_of(baseline, candidate, metric.name)
    return _Evidence(
        metric=metric,
        ours=ours,
        theirs=theirs,
        rate=baseline.runs[0].is_rate(metric.name),
        paired=interleaved(baseline, candidate),
        known=known_of(noise, metric.name, baseline, candidate),
        counted=metric.name in COUNTS and any(run.untimed for side in (baseline, candidate) for run in side.runs),
    )


def _scaled(found: Ratio | None, scale: Normalisation) -> Ratio | None:
    """The ratio of the figures as they are shown, divided by ranks where there are more on one side."""
    return replace(found, estimate=found.estimate * scale.baseline / scale.candidate) if found else None


def _weights(cases: Sequence[_Case]) -> dict[tuple[float, ...], float]:
    """Of each different measurement in the family; that which speaks for all has as much as the others together."""
    found = {case.identity: 1.0 for case in cases if case.identity}
    by_name = {case.scale.metric: case.identity for case in cases if case.identity}
    leader = next((by_name[name] for name in LEADERS if name in by_name), None)
    if leader and len(found) > 1:
        found[leader] = len(found) - 1.0
    return found


def _together(cases: Sequence[_Case]) -> list[_Case]:
    """The cases with the level at which each is tested as one of them."""
    weights = _weights(cases)
    total = math.fsum(weights.values())
    return [
        replace(case, level=SIGNIFICANT * weights[case.identity] / total) if case.identity else case for case in cases
    ]


def _corrected(cases: Sequence[_Case], p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values of one claim about all cases, adjusted; what cannot be wrong by chance is no part of the family."""
    weights = _weights(cases)
    family = {case.identity: p for case, p in zip(cases, p_values, strict=True) if case.identity and p is not None}
    adjusted = inference.holm(list(family.values()), [weights[identity] for identity in family])
    found = dict(zip(family, adjusted, strict=True))
    return [
        found[case.identity] if case.identity and p is not None else p for case, p in zip(cases, p_values, strict=True)
    ]


def _verdict(
    case: _Case,
    alone: tuple[float | None, float | None],
    family: int,
    baseline: Side,
    candidate: Side,
    circumstances: Circumstances,
) -> Verdict:
    """`alone` are the p-values of "beyond" and "within" before they were corrected for a family of so many."""
    evidence, found, scale, margin = case.evidence, case.ratio, case.scale, circumstances.margin
    ours, theirs = (
        value / ranks for value, ranks in zip(evidence.values(), (scale.baseline, scale.candidate), strict=True)
    )
    outcome, leaning, reason = _outcome(case)
    if outcome == "inconclusive" and case.why:
        reason = f"not beyond {case.why}"
    elif outcome == "inconclusive" and any(map(_significant, alone)):
        place = "beyond" if _significant(alone[0]) else "within"
        reason = f"{place} the margin by itself, but not established with {family} metrics judged together"
    if doubt := circumstances.rejected.get(leaning or outcome):
        outcome, leaning, reason = "rejected", None, doubt
    if case.withheld:
        outcome, leaning, reason = "withheld", None, case.withheld
    exact = evidence.counted and found is not None and found.error.size == 0
    level = None if exact else _level(found, baseline, candidate)
    metric = evidence.metric
    return Verdict(
        metric=scale.metric,
        unit=scale.unit,
        better=metric.better,
        verdict=outcome,
        leaning=leaning,
        baseline=ours,
        candidate=theirs,
        ratio=found.estimate if found else theirs / ours if ours > 0 else None,
        interval=found.interval if found and not exact else None,
        p_value=None if exact else _two_sided(case.within if outcome == "equivalent" else case.beyond),
        margin=margin,
        noise_floor=evidence.floor,
        limit=case.limit,
        resolvable=inference.resolvable(found.error, case.limit, case.level) if found and not exact else None,
        level=level,
        units=(1, 1) if found and found.rests_on == "runs" else (evidence.ours.n, evidence.theirs.n),
        effective_n=(_effective_n(baseline, metric.name), _effective_n(candidate, metric.name)),
        paired=evidence.paired,
        more_repeats=_more_repeats(case, margin) if outcome == "inconclusive" else None,
        method="ratio of the counts" if exact else _method(evidence, found, level),
        reason=reason or (COUNTED if exact else None),
    )


def _outcome(case: _Case) -> tuple[Outcome, Outcome | None, str | None]:
    """The verdict, where it leans, and why there is none."""
    if case.ratio is None:
        return _without_ratio(case)
    word = words(case.evidence.metric.better, case.evidence.metric.unit, case.ratio.estimate)
    if _significant(case.beyond):
        return word, None, None
    if _significant(case.within):
        return "equivalent", None, None
    return "inconclusive", word if case.within is not None and _significant(case.unlike) else None, None


def _without_ratio(case: _Case) -> tuple[Outcome, Outcome | None, str | None]:
    metric, ours, theirs = case.evidence.metric, case.evidence.ours, case.evidence.theirs
    if not ours.units.any() and not theirs.units.any():
        return "equivalent", None, "0 on both sides"
    if min(ours.mean, theirs.mean) > 0:
        steps = "too few steps" if ours.steps and theirs.steps else "no steps"
        return "inconclusive", None, f"one repeat on each side and {steps} behind it: nothing tells its noise"
    if _significant(case.beyond):
        word = words(metric.better, metric.unit, 2.0 if theirs.mean > ours.mean else 0.5)
        return word, None, "one side is not above 0"
    return "inconclusive", None, "one side is not above 0: there is no ratio"


def _significant(p_value: float | None) -> bool:
    return p_value is not None and p_value < SIGNIFICANT


def _two_sided(p_value: float | None) -> float | None:
    return None if p_value is None else min(1.0, 2 * p_value)


def _more_repeats(case: _Case, margin: float) -> int | None:
    """None where it is not repeats that are missing: runs, or a quieter machine."""
    evidence, found = case.evidence, case.ratio
    not_repeats = case.limit > margin or (evidence.known is not None and evidence.known.of_runs)
    if found is None or evidence.unit_spread is None or not_repeats:
        return None
    change = math.expm1(abs(math.log(found.estimate)))
    spread = evidence.unit_spread[0]
    needed = inference.repeats_for(change, spread, margin, paired=evidence.paired, level=case.level)
    return None if needed is None else max(1, needed - min(evidence.ours.n, evidence.theirs.n))


def _level(found: Ratio | None, baseline: Side, candidate: Side) -> Level | None:
    if found is None:
        return None
    if found.rests_on == "steps":
        return "step"
    grouped = max(len(baseline.runs), len(candidate.runs)) > 1
    return "run" if grouped or found.rests_on == "runs" else "repeat"


def _method(evidence: _Evidence, found: Ratio | None, level: Level | None) -> str:
    if found is None or level is None:
        return "none"
    if found.rests_on == "steps":
        return "Student's t over blocks of steps"
    if found.rests_on == "runs" or evidence.ours.n == evidence.theirs.n == 1:
        return f"Student's t; single {level}s taken to vary as equal ones on record did"
    if evidence.paired:
        return "Student's t over interleaved pairs of repeats"
    if min(evidence.ours.n, evidence.theirs.n) == 1:
        return f"Student's t; a single {level} taken to vary as the others do"
    return f"Welch's t over {level}s"


def _effective_n(side: Side, metric: str) -> float | None:
    counts = [run.metrics[metric].effective_n for run in side.runs]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
