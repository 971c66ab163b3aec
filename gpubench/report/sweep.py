"""The report of runs that differ in one number only: the figures of each, and which number is best.

The kind of work says what the number is: `batch_sizes` or `rank_counts`.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from gpubench import units
from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.errors import NO_MESSAGE
from gpubench.metrics import Metric
from gpubench.report import quoted
from gpubench.report.document import Block, Command, Document, Paragraph, table
from gpubench.runs.directory import FAILED
from gpubench.runs.warnings import on_noise


class Sweep(Protocol):
    """What the report must know of the number in which the runs differ."""

    def named(self, run: RunEvidence) -> str:
        """Returns the number of a run, as "batch 8" or "4 ranks"."""

    def headline(self, runs: Sequence[RunEvidence]) -> str:
        """Returns which number is best."""

    def columns(self, run: RunEvidence) -> Sequence[str]:
        """Returns the names of the metrics in the table, for runs such as `run`."""

    def rows(self, runs: Sequence[RunEvidence], columns: Sequence[str]) -> list[Mapping[str, str]]:
        """Returns the rows of the table."""

    def notes(self, runs: Sequence[RunEvidence]) -> Sequence[str]:
        """Returns how to read the table."""


def document(paths: Sequence[Path]) -> Document:
    """Returns which number is best, the figures of each, and where the runs are. Their own reports have the rest.

    Raises RunDirectoryError for a run that cannot be read.
    """
    runs = [open_run(path, measured=False) for path in paths]
    sweep = cast("Sweep", import_module(runs[0].kind.swept_by))
    known = [name for name in sweep.columns(runs[0]) if any(name in run.metrics for run in runs)]
    loudest = max(runs, key=lambda run: (run.summary.others.cores if run.summary.others else None) or 0.0)
    doubts = _on_noise(loudest)
    doubts += dict.fromkeys(one for run in runs for one in run.summary.warnings if one not in _on_noise(run))
    failures = [
        f"{sweep.named(run)}: {run.record.error.get('message') or NO_MESSAGE}"
        for run in runs
        if run.status == FAILED and run.record and run.record.error
    ]
    made: list[Block] = [
        Paragraph(sweep.headline(runs), "strong"),
        table("", sweep.rows(runs, known)),
        Paragraph([_caption(runs), *sweep.notes(runs)], "quiet"),
        Paragraph(doubts, "warning", "warning: "),
        Paragraph(failures, "warning"),
    ]
    return Document("", [*made, *(Command(f"{sweep.named(run)} {run.status}", str(run.path)) for run in runs)])


def _on_noise(run: RunEvidence) -> list[str]:
    return on_noise(run.summary.others, run.metrics.get("throughput"), run.windows, run.settings)


def cells(run: RunEvidence, columns: Sequence[str]) -> dict[str, str]:
    return {units.words(name): _cell(run.metrics.get(name)) for name in columns}


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    if metric.name in ("throughput", "sample_latency") and not metric.too_noisy:
        return quoted.figure(metric)
    return quoted.central(metric)


def _caption(runs: Sequence[RunEvidence]) -> str:
    repeats = min((len(run.windows) for run in runs if run.windows), default=0)
    if not repeats:
        return ""
    times = "one repeat of each, so that the variation between processes is unknown" if repeats == 1 else ""
    return times or f"{repeats} repeats of each, interleaved; intervals are 95 %, over repeats"
