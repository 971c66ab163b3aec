"""Gives the verdicts on the metrics of a comparison, corrected for testing several metrics together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpubench import units
from gpubench.compare import intervals, power
from gpubench.compare.comparability import Normalisation, normalise
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.intervals import SIGNIFICANT, USUAL, Error, Known, MetricSample, Ratio, Steps, two_sided
from gpubench.compare.result import Level, NullMetric, Outcome, Verdict
from gpubench.metrics import DEFINITIONS, LEADERS, SAYS_NOTHING, Better, Metric

WELL_KNOWN = 10  # so many units agree to the last digit only if they have no noise: their steps are not read


def sample_of(side: Side, metric: str, *, by_run: bool | None = None) -> MetricSample | None:
    """Returns the side's sample of a metric; None if a run lacks it. Rates are converted to times.

    The units of a group are its runs, each with the mean of its repeats, because conditions such as temperature and
    placement differ between runs but not between the repeats of a run. The units of a single run are its repeats,
    unless `by_run`.
    """
    if not all(metric in run.metrics for run in side.runs):
        return None
    metrics = [run.metrics[metric] for run in side.runs]
    grouped = len(metrics) > 1 if by_run is None else by_run
    units = np.asarray([one.estimate for one in metrics] if grouped else metrics[0].repeats, dtype=np.float64)
    steps = _steps(side.runs, metric, grouped) if len(units) < WELL_KNOWN else None
    return MetricSample(1 / units if side.runs[0].is_rate(metric) else units, steps)


def samples_of(baseline: Side, candidate: Side, metric: str) -> tuple[MetricSample, MetricSample]:
    """Returns both sides' samples of a metric. An interleaved pair is reduced to the repeats that both have, in order.

    Compared with a group, a single run is one unit. Raises KeyError if a run lacks the metric.
    """
    by_run = max(len(baseline.runs), len(candidate.runs)) > 1
    ours, theirs = (sample_of(side, metric, by_run=by_run) for side in (baseline, candidate))
    if ours is None or theirs is None:
        raise KeyError(metric)
    if not interleaved(baseline, candidate):
        return ours, theirs
    numbers = [[window.repeat for window in side.runs[0].windows] for side in (baseline, candidate)]
    common = sorted(set(numbers[0]) & set(numbers[1]))
    first, second = ([own.index(number) for number in common] for own in numbers)
    return pick(ours, first), pick(theirs, second)


def interleaved(baseline: Side, candidate: Side) -> bool:
    """Tells whether the sides are the two interleaved runs of one `--vs`. Runs that time nothing never are."""
    if len(baseline.runs) != 1 or len(candidate.runs) != 1 or baseline.runs[0].untimed or candidate.runs[0].untimed:
        return False
    ours, theirs = baseline.runs[0].record, candidate.runs[0].record
    return bool(ours and theirs and theirs.run_id in ours.interleaved_with)


def known_of(record: Sequence[NullMetric], metric: str, baseline: Side, candidate: Side) -> Known | None:
    """Returns the recorded variation of the units of such a comparison, or None.

    The variation of repeats does not apply to the runs of a group. A run records its own repeats with those of earlier
    runs, so that the record may contain all units that are compared.
    """
    entry = next((entry for entry in record if entry.metric == metric), None)
    grouped = max(len(baseline.runs), len(candidate.runs)) > 1
    if entry is None or (grouped and entry.level == "repeat"):
        return None
    of_runs = entry.level == "run" and one_after_the_other(baseline, candidate)
    runs = [*baseline.runs, *candidate.runs]
    compared = len(runs) if grouped else sum(run.repeats for run in runs)
    return Known(entry.spread, entry.units - 1, max(0, entry.units - 1 - compared), of_runs=of_runs)


def one_after_the_other(baseline: Side, candidate: Side) -> bool:
    """Tells whether the sides are single runs without interleaving, whose error does not contain machine drift."""
    return len(baseline.runs) == len(candidate.runs) == 1 and not interleaved(baseline, candidate)


def pick(sample: MetricSample, indices: Sequence[int]) -> MetricSample:
    """Returns the sample with only the units at `indices`."""
    steps = [sample.steps[index] for index in indices] if sample.steps and len(indices) < WELL_KNOWN else None
    return MetricSample(sample.units[list(indices)], steps)


def _steps(runs: Sequence[RunEvidence], metric: str, grouped: bool) -> list[list[Steps]] | None:
    series = [run.series(metric) for run in runs]
    known = [[Steps(repeat) for repeat in one] for one in series if one]
    if len(known) < len(series):
        return None
    return known if grouped else [[steps] for steps in known[0]]


DEFAULT_MARGIN = 0.005
ASSUMED = 0.05
"""The fraction by which equal processes are assumed to differ, at most, where too few show how they do.

In public logs of GPU training it leaves at most 5 % false verdicts on pairs of equal runs, in each collection and in
each benchmark of one. docs/statistics.md has the figures.
"""
COUNTS = ("peak_memory_allocated", "peak_memory_reserved", "peak_memory_total")
"""Metrics that are reproducible counts in a run that followed its memory, independent of the machine's state."""
COUNTED = "counted, not timed"
TOO_FAR_APART = "the repeats differ too much to tell"
MOST_ADVISED = 30
"""The largest number of further repeats that is advised. A larger one rests on a spread that is hardly known."""


@dataclass(frozen=True)
class Judged:
    """A verdict and its ratio, which is None if there is no interval."""

    verdict: Verdict
    ratio: Ratio | None


@dataclass(frozen=True)
class Circumstances:
    """The conditions that a verdict depends on besides the samples."""

    margin: float = DEFAULT_MARGIN
    withheld: str | None = None
    """Why no verdict may be given on any metric; None if verdicts may be given."""
    refused: str | None = None
    """Why any outcome is rejected: a side does less work, for example; None if verdicts may be given."""
    rejected: Mapping[Outcome, str] = field(default_factory=dict)
    """Outcomes that are rejected, with the reason: for example faster, if the candidate left work undone."""
    noise: Sequence[NullMetric] = ()
    """The recorded noise of this workload on this machine."""
    disturbance: float = 0.0
    """The change of a time that the machine alone may cause, as a fraction; see `warnings.accountable`."""
    assumed: float = ASSUMED
    """By how much equal processes are assumed to differ, at most, where too few show how they do."""


@dataclass(frozen=True)
class _Evidence:
    """The samples of one metric on both sides, and the variation of their units."""

    metric: Metric
    ours: MetricSample
    theirs: MetricSample
    rate: bool
    """Whether the metric is a rate, so that the samples are times."""
    paired: bool
    known: Known | None
    """The recorded variation of such units."""
    counted: bool
    """Whether the metric is a count, which has no noise unless noise is known."""
    rounding: tuple[float, float]
    """By which fractions both means may be off, as their values were rounded."""

    @property
    def unit_spread(self) -> tuple[float, float] | None:
        """The relative spread and its degrees of freedom, from the units and what was known; None if unknown."""
        own = intervals.pooled_spread(self.ours, self.theirs, paired=self.paired)
        return intervals.moderated(own, self.known) if own or self.known else None

    @property
    def floor(self) -> float | None:
        """The noise floor; None if it is unknown, or so high that it says nothing."""
        if self.known and self.known.of_runs:
            return power.telling(intervals.noise_floor(self.known.spread, self.known.df, 1, 1))
        if self.unit_spread is None:
            return None
        return power.telling(intervals.noise_floor(*self.unit_spread, self.ours.n, self.theirs.n))

    def ratio(self, assumed: float) -> Ratio | None:
        """Returns the ratio of the metric's values, before division by ranks; see `Circumstances.assumed`."""
        assumed = 0.0 if self.metric.unit == "B" else assumed
        found = intervals.ratio(self.ours, self.theirs, paired=self.paired, known=self.known, assumed=assumed)
        if found is None and self.counted and min(self.ours.mean, self.theirs.mean) > 0:
            found = Ratio(self.theirs.mean / self.ours.mean, Error(0.0, 1))
        found = found.rounded(*self.rounding) if found and any(self.rounding) else found
        return intervals.inverse(found) if found and self.rate else found

    def values(self) -> tuple[float, float]:
        ours, theirs = self.ours.mean, self.theirs.mean
        return (1 / ours, 1 / theirs) if self.rate else (ours, theirs)


@dataclass(frozen=True)
class _Case:
    """One metric before the correction for several: its one-sided p-values, each None if there is nothing to test."""

    evidence: _Evidence
    scale: Normalisation
    ratio: Ratio | None
    limit: float
    """The threshold that a change must exceed, as a fraction: the margin, or what the machine may account for."""
    withheld: str | None
    beyond: float | None = None
    """The p-value of a change larger than the limit."""
    within: float | None = None
    """The p-value of a change smaller than the margin; None if the limit is not the margin."""
    unlike: float | None = None
    """The p-value of any change."""
    certain: bool = False
    """Whether the metric has no error, so that no test is needed."""
    level: float = SIGNIFICANT
    """The level of its first test in the family."""

    @property
    def identity(self) -> tuple[float, ...] | None:
        """A key that is equal for metrics of the same measurement, as throughput and step time; None without error."""
        if self.withheld or self.certain or self.beyond is None:
            return None
        found = (self.ratio.error.size, self.ratio.error.df) if self.ratio else (0.0, 0.0)
        return tuple(float(f"{number:.9g}") for number in (self.beyond, self.limit, *found))


def leading(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Returns the main verdict: on one of LEADERS, or else the first one that is given."""
    judged = [verdict for verdict in verdicts if verdict.verdict != "withheld"] or list(verdicts)
    return next((one for name in LEADERS for one in judged if one.metric == name), judged[0] if judged else None)


def judge(metric: Metric, baseline: Side, candidate: Side, circumstances: Circumstances) -> Judged:
    """Returns the verdict on one metric that every run of both sides has, without correction for other metrics."""
    return judge_all([metric], baseline, candidate, circumstances)[0]


def judge_all(metrics: Sequence[Metric], baseline: Side, candidate: Side, circumstances: Circumstances) -> list[Judged]:
    """Returns the verdicts on metrics that every run of both sides has, corrected for testing them together.

    Holm's correction applies to the p-values of each claim: the probability of any false change stays below 5 %, and so
    does the probability of any false equivalence. The main metric has half of that level to itself, so that a dozen
    other metrics do not hide a change of the step time.
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
    """Returns the outcome for a ratio other than 1: faster or slower for times and rates, else more or less."""
    if is_speed(unit):
        return "faster" if (ratio < 1) == (better != "higher") else "slower"
    return "more" if ratio > 1 else "less"


def of_machine(limit: float) -> str:
    """Returns what a change has to exceed if that is more than the margin."""
    return f"the {units.difference(limit)} that the machine itself may account for"


def of_processes(assumed: float) -> str:
    """Returns what is assumed of single processes, and part of their interval."""
    return f"the {units.difference(assumed)} by which equal processes are assumed to differ"


def is_speed(unit: str) -> bool:
    """Tells whether a unit is that of a time or a rate."""
    return unit == "s" or unit.endswith("/s")


def _case(metric: Metric, baseline: Side, candidate: Side, circumstances: Circumstances) -> _Case:
    evidence = _gather(metric, baseline, candidate, circumstances.noise)
    scale = normalise(metric.name, metric.unit, baseline, candidate)
    margin = limit = circumstances.margin
    found = _scaled(evidence.ratio(circumstances.assumed), scale)
    if is_speed(metric.unit):
        limit = max(margin, circumstances.disturbance)
    withheld = circumstances.withheld or scale.withheld or _too_coarse(evidence.rounding, margin)
    case = _Case(evidence, scale, found, limit, withheld)
    if found is None:
        change = intervals.difference(evidence.ours, evidence.theirs, paired=evidence.paired, known=evidence.known)
        above = min(evidence.ours.mean, evidence.theirs.mean) > 0
        certain = change.error is not None and change.error.size == 0
        return case if above else replace(case, beyond=change.p_value, certain=certain)
    within = found.within(margin) if limit <= margin else None
    certain = found.error.size == 0 and not found.bias
    return replace(case, beyond=found.beyond(limit), within=within, unlike=found.beyond(0), certain=certain)


def _gather(metric: Metric, baseline: Side, candidate: Side, noise: Sequence[NullMetric]) -> _Evidence:
    ours, theirs = samples_of(baseline, candidate, metric.name)
    is_usual = _is_of_steps(metric) and min(ours.n, theirs.n) > 1
    known = known_of(noise, metric.name, baseline, candidate)
    return _Evidence(
        metric=metric,
        ours=ours,
        theirs=theirs,
        rate=baseline.runs[0].is_rate(metric.name),
        paired=interleaved(baseline, candidate),
        known=USUAL if is_usual and not (known and (known.beside or known.of_runs)) else known,
        counted=metric.name in COUNTS and any(run.untimed for side in (baseline, candidate) for run in side.runs),
        rounding=(rounding(baseline, metric.name), rounding(candidate, metric.name)),
    )


def rounding(side: Side, metric: str) -> float:
    """Returns by which fraction the mean of a side may be off, as values were rounded: alike in runs that are alike."""
    return max(run.rounding(metric) for run in side.runs)


def _too_coarse(rounding: tuple[float, float], margin: float) -> str | None:
    """Returns why values are rounded too coarsely for a verdict; None if they are not."""
    if max(rounding) <= margin:
        return None
    return (
        f"its values are rounded, which may change their mean by {units.difference(max(rounding))}, more than the "
        f"margin of {units.percent(margin)}: log more digits, or raise --margin"
    )


def _is_of_steps(metric: Metric) -> bool:
    """Tells whether a metric is the speed of whole steps, as in the logs that show how such speeds usually differ."""
    is_part = metric.name in DEFINITIONS or metric.name.startswith(("phase_", "stage_"))
    return is_speed(metric.unit) and (metric.name in LEADERS or not is_part)


def _scaled(found: Ratio | None, scale: Normalisation) -> Ratio | None:
    """Returns the ratio of the displayed values, which are divided by the ranks if the sides have different ranks."""
    return replace(found, estimate=found.estimate * scale.baseline / scale.candidate) if found else None


def _weights(cases: Sequence[_Case]) -> dict[tuple[float, ...], float]:
    """Returns the weight of each measurement in the family. The main one has as much as all others together."""
    found = {case.identity: 1.0 for case in cases if case.identity}
    by_name = {case.scale.metric: case.identity for case in cases if case.identity}
    leader = next((by_name[name] for name in LEADERS if name in by_name), None)
    if leader and len(found) > 1:
        found[leader] = len(found) - 1.0
    return found


def _together(cases: Sequence[_Case]) -> list[_Case]:
    """Returns the cases with the level at which each is tested within the family."""
    weights = _weights(cases)
    total = math.fsum(weights.values())
    return [
        replace(case, level=SIGNIFICANT * weights[case.identity] / total) if case.identity else case for case in cases
    ]


def _corrected(cases: Sequence[_Case], p_values: Sequence[float | None]) -> list[float | None]:
    """Returns the adjusted p-values of one claim for all cases. Cases without error are not part of the family."""
    weights = _weights(cases)
    family = {case.identity: p for case, p in zip(cases, p_values, strict=True) if case.identity and p is not None}
    adjusted = intervals.holm(list(family.values()), [weights[identity] for identity in family])
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
    """Returns the verdict. `alone` holds the p-values of "beyond" and "within" before the correction for the family."""
    evidence, found, scale, margin = case.evidence, case.ratio, case.scale, circumstances.margin
    ours, theirs = (
        value / ranks for value, ranks in zip(evidence.values(), (scale.baseline, scale.candidate), strict=True)
    )
    outcome, leaning, reason = _outcome(case)
    if outcome == "inconclusive" and case.limit > margin and found is not None:
        reason = f"not beyond {of_machine(case.limit)}"
    elif outcome == "inconclusive" and found is not None and found.bias > margin:
        reason = f"not beyond {of_processes(found.bias)}"
    elif outcome == "inconclusive" and any(map(_significant, alone)):
        place = "beyond" if _significant(alone[0]) else "within"
        reason = f"{place} the margin if judged alone, but not after the correction for {family} metrics"
    ends = found.interval if found else None
    vague = ends is not None and _says_nothing(ends)
    if outcome == "inconclusive" and vague:
        reason = TOO_FAR_APART
    if doubt := circumstances.rejected.get(leaning or outcome):
        outcome, leaning, reason = "rejected", None, doubt
    if case.withheld:
        outcome, leaning, reason = "withheld", None, case.withheld
    if circumstances.refused:
        outcome, leaning, reason = "rejected", None, circumstances.refused
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
        medians=(_median(baseline, metric.name, scale.baseline), _median(candidate, metric.name, scale.candidate)),
        ratio=None if vague else found.estimate if found else theirs / ours if ours > 0 else None,
        interval=ends if not exact and not vague else None,
        p_value=None if exact else two_sided(case.within if outcome == "equivalent" else case.beyond),
        margin=margin,
        noise_floor=evidence.floor,
        limit=case.limit,
        assumed=found.bias or None if found else None,
        resolvable=_resolvable(found, case) if found and not exact else None,
        level=level,
        units=(1, 1) if found and found.rests_on == "runs" else (evidence.ours.n, evidence.theirs.n),
        effective_n=(_effective_n(baseline, metric.name), _effective_n(candidate, metric.name)),
        paired=evidence.paired,
        more_repeats=_more_repeats(case, margin) if outcome == "inconclusive" and not vague else None,
        method="ratio of the counts" if exact else _method(evidence, found, level),
        reason=reason or (COUNTED if exact else None),
    )


def _resolvable(found: Ratio, case: _Case) -> float | None:
    return power.resolvable(found.error, (1 + case.limit) * (1 + found.bias) - 1, case.level)


def _median(side: Side, metric: str, ranks: float) -> float | None:
    """Returns the median over the repeats of a lone run that is too noisy; None for any other side."""
    found = side.runs[0].metrics.get(metric) if len(side.runs) == 1 else None
    return found.median / ranks if found and found.repeats and found.too_noisy else None


def _says_nothing(interval: tuple[float, float]) -> bool:
    """Tells whether the interval contains no change, and is too wide to print."""
    low, high = interval
    return low < 1 < high and high > SAYS_NOTHING * low


def _outcome(case: _Case) -> tuple[Outcome, Outcome | None, str | None]:
    """Returns (outcome, leaning of an inconclusive outcome or None, reason for no verdict or None)."""
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
        return "inconclusive", None, f"one repeat on each side and {steps} behind it: its noise is unknown"
    if _significant(case.beyond):
        word = words(metric.better, metric.unit, 2.0 if theirs.mean > ours.mean else 0.5)
        return word, None, "one side is not above 0"
    return "inconclusive", None, "one side is not above 0: there is no ratio"


def _significant(p_value: float | None) -> bool:
    return p_value is not None and p_value < SIGNIFICANT


def _more_repeats(case: _Case, margin: float) -> int | None:
    """Returns how many more repeats a side settle a change of the estimated size.

    Returns None if more do not help, or if it takes more than MOST_ADVISED. They help against an assumption on
    processes, because they show how these differ.
    """
    evidence, found = case.evidence, case.ratio
    not_repeats = case.limit > margin or (evidence.known is not None and evidence.known.of_runs)
    if found is None or evidence.unit_spread is None or not_repeats:
        return None
    change = math.expm1(abs(math.log(found.estimate)))
    needed = power.repeats_for(change, *evidence.unit_spread, margin, paired=evidence.paired, level=case.level)
    more = math.inf if needed is None else max(1, needed - min(evidence.ours.n, evidence.theirs.n))
    return int(more) if more <= MOST_ADVISED else None


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
        return f"Student's t; single {level}s with the recorded variation of equal ones"
    if evidence.paired and evidence.ours.n >= intervals.FEWEST_PAIRS:
        said = "Student's t over interleaved pairs of repeats"
    elif min(evidence.ours.n, evidence.theirs.n) == 1:
        said = f"Student's t; a single {level} with the variation of the other side"
    else:
        said = f"Student's t over {level}s"
    prior = found.moderated_by
    if prior is None:
        return said
    source = "what is usual of training on accelerators" if prior == USUAL else f"equal {level}s on record"
    return f"{said}, their spread moderated by {source} ({units.percent(prior.spread)})"


def _effective_n(side: Side, metric: str) -> float | None:
    counts = [run.metrics[metric].effective_n for run in side.runs]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
