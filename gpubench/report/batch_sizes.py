"""Runs that differ in the batch size: which one has the highest throughput and, for inference, the lowest latency."""

from collections.abc import Mapping, Sequence

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.metrics import LATENCIES, Metric
from gpubench.report import quoted
from gpubench.report.sweep import cells
from gpubench.runs import headlines

COLUMNS = ("step_time", "throughput", "token_throughput", "energy_per_sample", "peak_memory_reserved")
"""The metrics of a table for training; one of inference has the latency in place of the step time."""


def named(run: RunEvidence) -> str:
    return f"batch {_size(run)}"


def headline(runs: Sequence[RunEvidence]) -> str:
    """Returns the batch size with the highest throughput and, for inference, the one with the lowest latency.

    Batch sizes whose intervals overlap that of the best one are named with it.
    """
    first = runs[0]
    ranks = first.record.world_size if first.record else 1
    what = f"{headlines.model_in(first.settings)}{headlines.over(ranks)}"
    what += f" on {first.settings.get('device') or '?'}"
    best = [
        said
        for name, word in (("throughput", "the highest throughput"), ("latency_p50", "the lowest latency"))
        if (said := _best(runs, name, word))
    ]
    return f"{what}: {'; '.join(best)}" if best else f"{what}: nothing was measured"


def columns(run: RunEvidence) -> Sequence[str]:
    return [*LATENCIES, *COLUMNS[1:]] if run.settings.get("inference") else COLUMNS


def rows(runs: Sequence[RunEvidence], columns: Sequence[str]) -> list[Mapping[str, str]]:
    return [{"batch": _size(run)} | cells(run, columns) for run in runs]


def notes(runs: Sequence[RunEvidence]) -> Sequence[str]:
    return ()


def _best(runs: Sequence[RunEvidence], name: str, word: str) -> str:
    found = {_size(run): run.metrics[name] for run in runs if name in run.metrics}
    if not found:
        return ""
    size, best = (max if name == "throughput" else min)(found.items(), key=lambda pair: pair[1].estimate)
    alike = [other for other, metric in found.items() if other == size or _overlap(best, metric)]
    if len(alike) == 1:
        return f"batch {size} has {word}, {quoted.figure(best)}"
    return f"batches {units.listed(alike)} have {word}, with intervals that overlap"


def _overlap(one: Metric, other: Metric) -> bool:
    """Tells whether two intervals overlap; a single repeat has none."""
    if one.interval is None or other.interval is None:
        return False
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


def _size(run: RunEvidence) -> str:
    return str(run.settings.get("training.batch_size") or "?")
