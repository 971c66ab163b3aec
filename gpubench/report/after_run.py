"""Files added to a run directory after the run: noise.json, and report.html, which compares with previous runs."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from gpubench.compare import comparability, noise
from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import RunEvidence, Side, aligned, open_run
from gpubench.compare.gate import Condition
from gpubench.compare.losses import DEFAULT, Margin
from gpubench.compare.result import Comparisons, PairComparison, SideSummary, to_json
from gpubench.compare.verdicts import leading
from gpubench.errors import GpubenchError, RunDirectoryError
from gpubench.report import comparison, perfetto, phrases
from gpubench.report import run as report
from gpubench.report.document import Document
from gpubench.report.page import render
from gpubench.report.profile_tables import PLAIN, Arrangement
from gpubench.runs import directory
from gpubench.settings.keys import PATCH, REF

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
            noise.write(null(*aligned([alike])), path)
        perfetto.write_pages((path / directory.TRACES).glob(directory.TRACE_FILES))
        previous = (other for other in earlier if comparability.judge(_alone(other), _alone(run)).comparable)
        directory.write_document(path / directory.REPORT, page(run, next(previous, None), arranged))
    except (OSError, GpubenchError) as error:
        log.warning("no report of %s: %s", path, error)


def judge_pair(
    paths: Sequence[Path],
    labels: Sequence[str] = (),
    metrics: Sequence[str] = (),
    conditions: Sequence[Condition] = (),
    loss_margin: Margin | None = None,
) -> Comparisons | None:
    """Compares the second of two finished runs with the first; None if one of them measured nothing.

    By default the sides are called by their variants, and all metrics are compared. Raises UsageError for a condition
    that these runs cannot decide.
    """
    try:
        runs = [open_run(path) for path in paths]
        sides = aligned([Side(label, (run,)) for label, run in zip(labels or called(runs), runs, strict=True)])
        return compare(sides, metrics=metrics, conditions=conditions, loss_margin=loss_margin or DEFAULT)
    except GpubenchError:
        if conditions:
            raise
        return None


def keep_pair(paths: Sequence[Path], found: Comparisons) -> Path | None:
    """Writes comparison.json and comparison.html into the directory of the second run, the candidate.

    Returns the path of the page; None if it cannot be written, because the results of the runs are safe.
    """
    sides = aligned([Side(side.label, (open_run(path),)) for path, side in zip(paths, _sides(found), strict=True)])
    (pair,) = found.comparisons
    verdict = leading(pair.verdicts) if pair.comparability.comparable or pair.comparability.forced else None
    kept = PairComparison(
        schema_version=directory.SCHEMA_VERSION,
        baseline=paths[0].name,
        labels=(pair.baseline.label, pair.candidate.label),
        answer=phrases.headline(pair),
        metric=verdict.metric if verdict else None,
        verdict=verdict.verdict if verdict else "withheld",
        ratio=verdict.ratio if verdict else None,
        interval=verdict.interval if verdict else None,
        result=found,
    )
    try:
        directory.write_document(paths[1] / directory.COMPARISON, to_json(kept))
        directory.write_document(paths[1] / directory.COMPARISON_PAGE, render(_pair_page(found, sides)))
    except OSError as error:
        log.warning("no comparison in %s: %s", paths[1], error)
        return None
    for path in paths:  # their pages lead to that of the comparison
        write_up(path)
    return paths[1] / directory.COMPARISON_PAGE


def _pair_page(found: Comparisons, sides: Sequence[Side]) -> Document:
    """Returns the page of a comparison, with links from the folder of the candidate."""
    runs = [side.runs[0] for side in sides]
    ours = [
        (side.label if side.label == role else f"{role}: {side.label}", f"../{quote(run.path.name)}/{directory.REPORT}")
        for role, side, run in zip(("baseline", "candidate"), sides, runs, strict=True)
    ]
    return replace(comparison.document(found, sides), links=[("All runs", "../../index.html"), *ours])


def _sides(found: Comparisons) -> "Sequence[SideSummary]":
    (pair,) = found.comparisons
    return pair.baseline, pair.candidate


def called(runs: Sequence[RunEvidence]) -> list[str]:
    """Returns the variants of runs or, if these do not tell them apart, their labels."""
    variants = [(run.record and run.record.variant) or "" for run in runs]
    return variants if all(variants) and len({*variants}) == len(runs) else [run.label for run in runs]


def page(run: RunEvidence, previous: RunEvidence | None, arranged: Arrangement = PLAIN) -> str:
    """Returns the run's report, which begins with what changed since the previous run of the same work."""
    if previous is None:
        return render(report.page(run, arranged=arranged))
    (change,) = compare(aligned([_alone(previous), _alone(run)])).comparisons
    return render(report.page(run, change, previous, arranged))


def _alone(run: RunEvidence) -> Side:
    return Side(run.label, (run,))


def before(run: RunEvidence) -> Iterator[RunEvidence]:
    """Yields the readable earlier runs of the same command in this experiment that were completed, newest first.

    They were asked for in the same way: the same program, commit and settings. Runs of 0.2.0 and older do not say how.
    """
    older = [
        path for path in run.path.parent.iterdir() if path.name < run.path.name and (path / directory.RUN).is_file()
    ]
    for path in sorted(older, key=lambda path: path.name, reverse=True)[:REMEMBERED]:
        try:
            found = open_run(path)
        except RunDirectoryError:
            continue
        if found.record and run.record and found.status == directory.COMPLETED and _asked_alike(found, run):
            yield found


def _asked_alike(one: RunEvidence, other: RunEvidence) -> bool:
    keys = ("program.command", REF, PATCH)
    commands = {found.record.command for found in (one, other) if found.record}
    asked = [found.record.asked for found in (one, other) if found.record and found.record.asked is not None]
    alike = all(one.settings.get(key) == other.settings.get(key) for key in keys)
    return alike and len(commands) == 1 and (len(asked) < 2 or asked[0] == asked[1])


def unlike(run: RunEvidence, other: RunEvidence) -> bool:
    """Tells whether two runs differ in more than how long they were measured."""
    return any(difference.kind != "protocol" for difference in comparability.differences(run, other))
