"""Files added to a run directory after the run: noise.json, and report.html, which compares with previous runs."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpubench.compare import comparability, noise
from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import RunEvidence, Side, open_run
from gpubench.compare.gate import Condition
from gpubench.compare.result import Comparisons
from gpubench.errors import GpubenchError, RunDirectoryError
from gpubench.report import run as report
from gpubench.report.page import render
from gpubench.report.profile_tables import PLAIN, Arrangement
from gpubench.runs import directory
from gpubench.settings.keys import in_words, is_empty

REMEMBERED = 20  # previous runs that a new one is compared with

log = logging.getLogger("gpubench.report.after_run")


def write_up(path: Path, arranged: Arrangement = PLAIN) -> None:
    """Writes noise.json and report.html into a finished run's directory.

    `arranged` is how the tables of a profile are shown. A run that measured nothing gets neither, and one that only
    searched for batch sizes gets only the page. Errors are logged as warnings, because the measurements themselves are
    safe.
    """
    try:
        run = open_run(path, measured=False)
    except RunDirectoryError:
        return
    if not (run.metrics or run.batch_sizes):
        return
    try:
        earlier = list(before(run)) if run.metrics else []
        alike = Side(run.label, (run, *(other for other in earlier if not unlike(run, other))))
        if sum(one.repeats for one in alike.runs) > 1:
            noise.write(null(alike), path)
        previous = (other for other in earlier if comparability.judge(_alone(other), _alone(run)).comparable)
        directory.write_document(path / directory.REPORT, page(run, next(previous, None), arranged))
    except (OSError, GpubenchError) as error:
        log.warning("no report of %s: %s", path, error)


def judge_pair(
    paths: Sequence[Path],
    labels: Sequence[str] = (),
    metrics: Sequence[str] = (),
    conditions: Sequence[Condition] = (),
) -> Comparisons | None:
    """Compares the second of two finished runs with the first; None if one of them measured nothing.

    By default the labels are the settings in which the runs differ, and all metrics are compared. Raises UsageError for
    a condition that these runs cannot decide.
    """
    try:
        runs = [open_run(path) for path in paths]
        sides = [Side(label, (run,)) for label, run in zip(labels or differences(*runs), runs, strict=True)]
        return compare(sides, metrics=metrics, conditions=conditions)
    except GpubenchError:
        if conditions:
            raise
        return None


def differences(base: RunEvidence, other: RunEvidence) -> tuple[str, str]:
    """Returns the settings in which two runs differ, as ("precision=bf16", "precision=fp32").

    Settings that were filled in on both sides are left out, because they follow from other settings.
    """
    given = [key for key in base.settings if key not in base.chosen & other.chosen]
    keys = [key for key in given if base.settings[key] != other.settings.get(key)]
    first, second = (" ".join(_assigned(key, run.settings.get(key)) for key in keys) for run in (base, other))
    return first or "the first", second or "the same again"


def _assigned(key: str, value: Any) -> str:
    return f"{key} {in_words(value)}" if is_empty(value) else f"{key}={value}"


def page(run: RunEvidence, previous: RunEvidence | None, arranged: Arrangement = PLAIN) -> str:
    """Returns the run's report, which begins with what changed since the previous run of the same work."""
    if previous is None:
        return render(report.page(run, arranged=arranged))
    return render(report.page(run, compare([_alone(previous), _alone(run)]).comparisons[0], previous, arranged))


def _alone(run: RunEvidence) -> Side:
    return Side(run.label, (run,))


def before(run: RunEvidence) -> Iterator[RunEvidence]:
    """Yields the readable earlier runs of the same command in this experiment, newest first.

    The programs of a user share an experiment, so that only runs of the same program count.
    """
    older = [
        path for path in run.path.parent.iterdir() if path.name < run.path.name and (path / directory.RUN).is_file()
    ]
    for path in sorted(older, key=lambda path: path.name, reverse=True)[:REMEMBERED]:
        try:
            found = open_run(path)
        except RunDirectoryError:
            continue
        of_program = (one.settings.get("program.command") for one in (found, run))
        if found.record and run.record and found.record.command == run.record.command and len({*of_program}) == 1:
            yield found


def unlike(run: RunEvidence, other: RunEvidence) -> bool:
    """Returns whether two runs differ in more than how long they were measured."""
    return any(difference.kind != "protocol" for difference in comparability.differences(run, other))
