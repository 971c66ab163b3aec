"""The report of runs that differ in their batch size only: the latency and the throughput of each."""

from collections.abc import Sequence
from pathlib import Path

from gpubench import units
from gpubench.compare import comparability
from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.metrics import Metric
from gpubench.report import phrases
from gpubench.report.document import Block, Command, Document, Paragraph, table
from gpubench.report.run import LATENCIES
from gpubench.runs.directory import FAILED
from gpubench.runs.warnings import on_noise

COLUMNS = ("step_time", "throughput", "token_throughput", "energy_per_sample", "peak_memory_reserved")
"""The metrics of a table for training; one of inference has the latency in place of the step time."""


def document(paths: Sequence[Path]) -> Document:
    """Returns which batch size is best, the figures of each, and where the runs are. Their own reports have the rest.

    Raises RunDirectoryError for a run that cannot be read.
    """
    runs = [open_run(path, measured=False) for path in paths]
    columns = [*LATENCIES, *COLUMNS[1:]] if runs[0].settings.get("inference") else COLUMNS
    known = [name for name in columns if any(name in run.metrics for run in runs)]
    loudest = max(runs, key=lambda run: (run.summary.others.cores if run.summary.others else None) or 0.0)
    doubts = on_noise(loudest.summary.others, loudest.metrics.get("throughput"), loudest.windows)
    failures = [
        f"batch {_size(run)}: {run.record.error.get('message')}"
        for run in runs
        if run.status == FAILED and run.record and run.record.error
    ]
    made: list[Block] = [
        Paragraph(headline(runs), "strong"),
        Paragraph(doubts, "warning", "warning: "),
        table("", [_row(run, known) for run in runs]),
        Paragraph(_caption(runs), "quiet"),
        Paragraph(failures, "warning"),
    ]
    return Document("", [*made, *(Command(f"batch {_size(run)} {run.status}", str(run.path)) for run in runs)])


def headline(runs: Sequence[RunEvidence]) -> str:
    """Returns the batch size with the highest throughput and, for inference, the one with the lowest latency.

    Batch sizes whose intervals overlap that of the best one are named with it.
    """
    first = runs[0]
    ranks = first.record.world_size if first.record else 1
    what = f"{comparability.model_in(first.settings)}{comparability.over(ranks)} on {first.settings.get('device')}"
    best = [
        said
        for name, word in (("throughput", "the highest throughput"), ("latency_p50", "the lowest latency"))
        if (said := _best(runs, name, word))
    ]
    return f"{what}: {'; '.join(best)}" if best else f"{what}: nothing was measured"


def _best(runs: Sequence[RunEvidence], name: str, word: str) -> str:
    found = {_size(run): run.metrics[name] for run in runs if name in run.metrics}
    if not found:
        return ""
    size, best = (max if name == "throughput" else min)(found.items(), key=lambda pair: pair[1].estimate)
    alike = [other for other, metric in found.items() if other == size or _overlap(best, metric)]
    if len(alike) == 1:
        return f"batch {size} has {word}, {phrases.figure(best)}"
    return f"batches {units.listed(alike)} have {word}, with intervals that overlap"


def _overlap(one: Metric, other: Metric) -> bool:
    """Returns whether two intervals overlap; two repeats or more have one."""
    if one.interval is None or other.interval is None:
        return False
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


def _size(run: RunEvidence) -> str:
    return str(run.settings.get("training.batch_size"))


def _row(run: RunEvidence, columns: Sequence[str]) -> dict[str, str]:
    cells = {units.words(name): _cell(run.metrics.get(name)) for name in columns}
    return {"batch": _size(run)} | cells


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    if metric.name == "throughput":
        return phrases.figure(metric)
    return phrases.TOO_NOISY if metric.too_noisy else units.quantity(metric.estimate, metric.unit)


def _caption(runs: Sequence[RunEvidence]) -> str:
    repeats = min((len(run.windows) for run in runs if run.windows), default=0)
    if not repeats:
        return ""
    times = "one repeat of each, so that the variation between processes is unknown" if repeats == 1 else ""
    return times or f"{repeats} repeats of each, interleaved; intervals are 95 %, over repeats"
