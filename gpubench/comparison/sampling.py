"""From the evidence of a side to the sample that is reasoned about: which units it has, and the steps inside them."""

from collections.abc import Sequence

import numpy as np

from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.comparison.result import NullMetric
from gpubench.inference import Known, Sample, Steps

WELL_KNOWN = 10  # units whose own spread tells enough: the steps inside them are not read


def sample_of(side: Side, metric: str, *, by_run: bool | None = None) -> Sample | None:
    """The side's sample of a metric; None unless every run of it has that. Rates are given as the time of one.

    Runs of a group are its units, each with the mean of its repeats, because what differs from run to run, such as
    temperature and placement, is the same for all repeats of one. The repeats are the units of a single run, unless
    `by_run`.
    """
    if not all(metric in run.metrics for run in side.runs):
        return None
    metrics = [run.metrics[metric] for run in side.runs]
    grouped = len(metrics) > 1 if by_run is None else by_run
    units = np.asarray([one.estimate for one in metrics] if grouped else metrics[0].repeats, dtype=np.float64)
    steps = _steps(side.runs, metric, grouped) if len(units) < WELL_KNOWN else None
    return Sample(1 / units if side.runs[0].is_rate(metric) else units, steps)


def samples_of(baseline: Side, candidate: Side, metric: str) -> tuple[Sample, Sample]:
    """Both sides' samples of a metric that both have; of an interleaved pair the repeats that both have, in order.

    Beside a group a lone run is one unit like any of that. KeyError for a metric that some run lacks.
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
    """Whether the sides are the two runs of one `--vs`, measured in turn; runs that time nothing never are."""
    if len(baseline.runs) != 1 or len(candidate.runs) != 1 or baseline.runs[0].untimed or candidate.runs[0].untimed:
        return False
    ours, theirs = baseline.runs[0].record, candidate.runs[0].record
    return bool(ours and theirs and theirs.run_id in ours.interleaved_with)


def known_of(record: Sequence[NullMetric], metric: str, baseline: Side, candidate: Side) -> Known | None:
    """What is on record of how the units of such a comparison vary; None where that is nothing.

    What repeats vary by says nothing of the runs of a group.
    """
    entry = next((entry for entry in record if entry.metric == metric), None)
    grouped = max(len(baseline.runs), len(candidate.runs)) > 1
    if entry is None or (grouped and entry.level == "repeat"):
        return None
    of_runs = entry.level == "run" and one_after_the_other(baseline, candidate)
    return Known(entry.spread, entry.units - 1, of_runs)


def one_after_the_other(baseline: Side, candidate: Side) -> bool:
    """Whether the sides are single runs that the machine had time to change between; groups and pairs show that."""
    return len(baseline.runs) == len(candidate.runs) == 1 and not interleaved(baseline, candidate)


def pick(sample: Sample, indices: Sequence[int]) -> Sample:
    """Some of the units."""
    steps = [sample.steps[index] for index in indices] if sample.steps and len(indices) < WELL_KNOWN else None
    return Sample(sample.units[list(indices)], steps)


def _steps(runs: Sequence[RunEvidence], metric: str, grouped: bool) -> list[list[Steps]] | None:
    series = [run.series(metric) for run in runs]
    known = [[Steps(repeat) for repeat in one] for one in series if one]
    if len(known) < len(series):
        return None
    return known if grouped else [[steps] for steps in known[0]]
