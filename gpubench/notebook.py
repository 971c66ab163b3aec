"""What is added to a run directory when the run is over: its noise on record, and a page that says what was learned."""

import logging
from collections.abc import Sequence
from pathlib import Path

from gpubench import runs
from gpubench.comparison import noise
from gpubench.comparison.compare import compare
from gpubench.comparison.evidence import RunEvidence, Side, open_run
from gpubench.comparison.result import Comparisons
from gpubench.comparison.verdicts import DEFAULT_MARGIN
from gpubench.errors import GpubenchError, RunDirectoryError
from gpubench.report.page import run_page

log = logging.getLogger("gpubench.notebook")


def write_up(path: Path) -> None:
    """Writes noise.json and report.html into a finished run's directory.

    A run that measured nothing gets neither. What cannot be written is said in the log: the measurements are safe.
    """
    try:
        run = open_run(path)
    except RunDirectoryError:
        return
    try:
        if run.repeats > 1:
            directed = [metric for metric in run.metrics.values() if metric.better]
            noise.write(noise.learn(Side(run.label, (run,)), directed, DEFAULT_MARGIN, "repeats"), path)
        runs.write_document(path / runs.REPORT, page(run))
    except (OSError, GpubenchError) as error:
        log.warning("no report of %s: %s", path, error)


def judge_pair(paths: Sequence[Path], labels: Sequence[str]) -> Comparisons | None:
    """The second of two finished runs against the first; None where one measured nothing."""
    try:
        return compare([Side(label, (open_run(path),)) for path, label in zip(paths, labels, strict=True)])
    except GpubenchError:
        return None


def page(run: RunEvidence) -> str:
    """The run's report, beginning with what is new since the previous run of its experiment."""
    before = previous(run)
    if before is None:
        return run_page(run, None, None)
    sides = [Side(one.label, (one,)) for one in (before, run)]
    return run_page(run, compare(sides).comparisons[0], before)


def previous(run: RunEvidence) -> RunEvidence | None:
    """The newest run before this one, in the same experiment and of the same command, that measured anything."""
    older = [path for path in run.path.parent.iterdir() if path.name < run.path.name and (path / runs.RUN).is_file()]
    for path in sorted(older, key=lambda path: path.name, reverse=True):
        try:
            found = open_run(path)
        except RunDirectoryError:
            continue
        if found.record and run.record and found.record.command == run.record.command:
            return found
    return None
