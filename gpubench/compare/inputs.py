"""Finds the sides of a comparison from the names on the command line: runs, groups, `latest`, logs of other tools."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side, open_run
from gpubench.compare.log_columns import LogColumn
from gpubench.compare.log_formats import BENCHMARKS
from gpubench.compare.logs import LogEvidence, open_log
from gpubench.compare.verdicts import WELL_KNOWN
from gpubench.errors import (
    GpubenchError,
    NothingMeasured,
    RunDirectoryError,
    StillRunning,
)
from gpubench.foreign_files import SEARCH
from gpubench.registry import kind_of
from gpubench.runs import references
from gpubench.runs.directory import COMPLETED, RUN
from gpubench.runs.reader import DAMAGED
from gpubench.runs.references import LOGS, SKIPPED, TABLES, children, closest, counts_back, exists, is_folder, listed
from gpubench.units import counted

TIME = "time"
"""The metric of two logs of a benchmark each, whatever the benchmarks are called."""
SKIP = "--skip-invalid leaves it out"


def find(
    names: Sequence[str], results: Path, *, column: LogColumn | None = None, skip_invalid: bool = False
) -> tuple[list[Side], list[str]]:
    """Returns the sides that `names` stand for, in order, and a line on each reason for which runs were left out.

    A name is one of those of `references.Lookup`, or a log of another tool or a folder of logs; with `column`, only
    these.

    Groups and `latest` skip runs without measurements. `latest` counts the runs of one command: that of the other
    sides, or else of the newest run. `skip_invalid` leaves out the runs of a group that cannot be read.

    Raises RunDirectoryError for a name that is missing, ambiguous, damaged or unreadable, for a run that occurs twice,
    and for logs of several kinds.
    """
    left_out: list[str] = []
    known = references.Lookup(results, measured=True)
    found: dict[int, Side] = {}
    for number in sorted(range(len(names)), key=lambda number: references.counts_back(names[number])):
        found[number] = side = _side(names[number], known, column, left_out, skip_invalid)
        record = side.runs[0].record
        known.command = known.command or (record.command if record else None)
    sides = [found[number] for number in range(len(names))]
    _refuse_twice(sides)
    _refuse_mixture(sides)
    return _labelled(_alike(sides)), [*known.skipped(), *left_out]


def _side(
    name: str, known: references.Lookup, column: LogColumn | None, left_out: list[str], skip_invalid: bool
) -> Side:
    logs = _logs(name) if column else _unnamed_logs(name, known)
    paths, is_group = logs or known.runs(name)

    def read(path: Path) -> RunEvidence:
        return open_log(path, column) if logs else intact(open_run(path), deeply=len(paths) < WELL_KNOWN)

    if not is_group:
        return Side(name, (read(paths[0]),))
    if (paths[0].parent / SEARCH).is_file():
        raise RunDirectoryError(
            f"{name} is a search by tune, whose runs have different settings",
            f"gpubench runs show {name} prints its result; single runs of it can be compared",
        )
    runs, unread, unmeasured = [], [], []
    for path in paths:
        try:
            runs.append(read(path))
        except GpubenchError as error:
            if isinstance(error, NothingMeasured) and not isinstance(error, StillRunning):
                unmeasured.append(path.name)
                unread.append(error.message)
                continue
            if not skip_invalid:
                hint = f"{error.hint}; {SKIP}" if logs and error.hint else SKIP
                raise RunDirectoryError(error.message, hint) from None
            unread.append(error.message)
            left_out.append(error.message)
    if not runs:
        raise RunDirectoryError(f"{name}: none of its {len(paths)} runs can be read", unread[-1])
    if unmeasured:
        left_out.append(f"{SKIPPED} {counted(len(unmeasured), 'run')} of {name} without results: {listed(unmeasured)}")
    return Side(name, tuple(runs))


def intact(run: RunEvidence, deeply: bool) -> RunEvidence:
    """Returns the run if all its files are readable. `deeply` also reads steps, telemetry and memory.

    The last lines of an interrupted run may be incomplete, which is only a warning. Raises RunDirectoryError with file
    and line if a completed run is damaged.
    """
    if run.status != COMPLETED:
        return run
    if deeply:
        run.series("step_time")
        run.telemetry  # noqa: B018 - reading it finds its problems
        run.footprints  # noqa: B018 - the same
    if run.problems:
        more = f", and {len(run.problems) - 1} more problems" if len(run.problems) > 1 else ""
        raise RunDirectoryError(f"{run.problems[0]}{more}", DAMAGED)
    return run


def _logs(name: str) -> tuple[list[Path], bool]:
    """Returns the tables that a name stands for, and whether it is a folder."""
    path = Path(name)
    if not is_folder(path):
        if not exists(path):
            close = closest(path.name, {child.name: str(child) for child in children(path.parent)})
            raise RunDirectoryError(f"{name}: no such file or folder", close or f"--column reads {', '.join(TABLES)}")
        return [path], False
    if exists(path / RUN):
        raise RunDirectoryError(f"{name} is a run directory, not a log of another tool", "leave --column out")
    found = _files(path, TABLES)
    if not found:
        raise RunDirectoryError(f"{name} holds no logs", f"--column reads {', '.join(TABLES)}")
    return found, True


def _unnamed_logs(name: str, known: references.Lookup) -> tuple[list[Path], bool] | None:
    """Returns the logs that a name stands for without a column, and whether it is a folder; None if it is no log."""
    if not exists(Path(name)):
        return None
    path = known.path(name)
    if not is_folder(path):
        return None if references.is_run(path.parent) else ([path], False)
    if references.holds_runs(path):
        return None
    found = _files(path, LOGS)
    return (found, True) if found else None


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(child for child in children(path) if child.suffix.lower() in suffixes and not is_folder(child))


def _refuse_mixture(sides: Sequence[Side]) -> None:
    logs: dict[str, Path] = {}
    for run in (run for side in sides for run in side.runs if run.record is None):
        logs.setdefault(run.kind_of_log, run.path)
    if len(logs) > 1:
        said = units.listed(f"{path} is {kind}" for kind, path in logs.items())
        raise RunDirectoryError(said, "compare logs of one tool, or write them as CSV with the same columns")


def _alike(sides: Sequence[Side]) -> Sequence[Side]:
    """Gives the metrics of two benchmarks the same name if each log has one, such as the time of another command."""
    runs = [run for side in sides for run in side.runs]
    alone = all(
        isinstance(run, LogEvidence) and run.kind_of_log in BENCHMARKS and len(run.metrics) == 1 for run in runs
    )
    if not alone or len({name for run in runs for name in run.metrics}) == 1:
        return sides
    return [Side(side.label, tuple(map(_renamed, side.runs))) for side in sides]


def _renamed(run: RunEvidence) -> RunEvidence:
    """Returns a log of one benchmark with a metric called "time", and a line that names the benchmark."""
    if not isinstance(run, LogEvidence):
        return run
    ((name, series),) = run.measured.items()
    metrics = [msgspec.structs.replace(run.metrics[name], name=TIME)]
    problems = ["; ".join([*run.problems, f"its time is that of {name!r}"])]
    summary = msgspec.structs.replace(run.summary, metrics=metrics)
    return replace(run, summary=summary, measured={TIME: series}, problems=problems)


def _refuse_twice(sides: Sequence[Side]) -> None:
    seen: dict[str, int] = {}
    for number, side in enumerate(sides):
        for run in side.runs:
            identity = f"{run.record.host}/{run.record.run_id}" if run.record else os.path.realpath(run.path)
            if identity in seen:
                other = seen[identity]
                twice = (
                    f"on two sides, {sides[other].label} and {side.label}" if other != number else "twice on one side"
                )
                raise RunDirectoryError(f"{run.path} is {twice}", _another(run, sides))
            seen[identity] = number


def _another(run: RunEvidence, sides: Sequence[Side]) -> str:
    """Returns the hint for a run that is named twice: what `latest` stands for, if that is one of its names."""
    if not run.record or not any(counts_back(side.label) for side in sides):
        return "compare it with another run"
    if {side.label for side in sides} == {"latest"}:
        return "gpubench compare latest~1 latest compares the two newest runs"
    command = kind_of(run.record.command).run_by
    hint = f"beside a run of {command}, latest is the newest run of {command}"
    return hint if command == "train-bench" else f"{hint}: latest:train-bench is that of train-bench"


def _labelled(sides: Sequence[Side]) -> list[Side]:
    """Gives runs, and sides, of the same name labels with enough of their paths to be unique."""
    runs = [run for side in sides for run in side.runs]
    names = iter(_telling([(run.label, *_ends(run.path)) for run in runs]))
    shown = _telling([(_short(side.label), side.label) for side in sides])
    return [
        Side(label, tuple(run if run.label == (name := next(names)) else replace(run, label=name) for run in side.runs))
        for label, side in zip(shown, sides, strict=True)
    ]


def _telling(candidates: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the first of the lists of candidates that has no duplicates, or else the last list."""
    ways = [list(way) for way in zip(*candidates, strict=True)]
    return next((way for way in ways if len(set(way)) == len(way)), ways[-1])


def _ends(path: Path) -> tuple[str, str]:
    return "/".join(path.resolve().parts[-2:]), str(path.resolve())


def _short(name: str) -> str:
    """Returns the last part of a path, and `latest` unchanged."""
    return name if references.LATEST.fullmatch(name) else Path(name).resolve().name or name
