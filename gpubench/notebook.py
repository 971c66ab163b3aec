"""What is added to a run directory when the run is over: its noise on record, and a page that says what was learned."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpubench import runs
from gpubench.comparison import comparability, noise
from gpubench.comparison.compare import compare, null
from gpubench.comparison.evidence import RunEvidence, Side, open_run
from gpubench.comparison.result import Comparisons
from gpubench.errors import GpubenchError, RunDirectoryError
from gpubench.report.page import run_page

REMEMBERED = 20  # runs that a new one is laid beside

log = logging.getLogger("gpubench.notebook")


def write_up(path: Path) -> None:
    """Writes noise.json and report.html into a finished run's directory.

    A run that measured nothing gets neither, one that only looked for batch sizes the page alone. What cannot be
    written is said in the log: the measurements are safe.
    """
    try:
        run = open_run(path, measured=False)
    except RunDirectoryError:
        return
    try:
        earlier = list(before(run)) if run.metrics else []
        alike = Side(run.label, (run, *(other for other in earlier if not unlike(run, other))))
        if sum(one.repeats for one in alike.runs) > 1:
            noise.write(null(alike), path)
        runs.write_document(path / runs.REPORT, page(run, earlier[0] if earlier else None))
    except (OSError, GpubenchError) as error:
        log.warning("no report of %s: %s", path, error)


def judge_pair(paths: Sequence[Path], labels: Sequence[str]) -> Comparisons | None:
    """The second of two finished runs against the first; None where one measured nothing."""
    try:
        return compare([Side(label, (open_run(path),)) for path, label in zip(paths, labels, strict=True)])
    except GpubenchError:
        return None


def page(run: RunEvidence, previous: RunEvidence | None) -> str:
    """The run's report, beginning with what is new since the previous run of its experiment."""
    if previous is None:
        return run_page(run, None, None)
    sides = [Side(one.label, (one,)) for one in (previous, run)]
    return run_page(run, compare(sides).comparisons[0], previous)


def before(run: RunEvidence) -> Iterator[RunEvidence]:
    """The last runs before this one in the same experiment that are of the same command and read, newest first."""
    older = [path for path in run.path.parent.iterdir() if path.name < run.path.name and (path / runs.RUN).is_file()]
    for path in sorted(older, key=lambda path: path.name, reverse=True)[:REMEMBERED]:
        try:
            found = open_run(path)
        except RunDirectoryError:
            continue
        if found.record and run.record and found.record.command == run.record.command:
            yield found


def unlike(run: RunEvidence, other: RunEvidence) -> bool:
    """Whether anything but how long it was measured sets two runs apart."""
    return any(difference.kind != "protocol" for difference in comparability.differences(run, other))
