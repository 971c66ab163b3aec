"""From the names on the command line to the sides of a comparison: runs, groups of runs, the latest, and other logs."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpubench.comparison.evidence import DAMAGED, RunEvidence, Side, open_run
from gpubench.comparison.foreign import SUFFIXES, Column, open_log
from gpubench.comparison.sampling import WELL_KNOWN
from gpubench.errors import GpubenchError, NothingMeasured, RunDirectoryError, StillRunning, offer
from gpubench.run_names import TRIALS
from gpubench.runs import COMPLETED, RUN, STEPS, SUMMARY, Run
from gpubench.units import counted

RUN_ID = re.compile(r"\d{8}-\d{6}-\d{3}-[0-9a-f]{4}")  # as runs.create_directory makes them
LATEST = re.compile(r"(?:(?P<within>.+)/)?latest(?:~(?P<back>\d{1,9}))?")
MOST_LISTED = 8
SKIP = "--skip-invalid leaves it out"
SKIPPED = "skipped"
"""Begins the line on runs that were passed over without being asked to."""
UNKNOWN = "unknown"
WHAT = "give a run directory, a folder of runs, or latest"
OF_LOGS = "for logs of another tool, add --column NAME --unit UNIT"


def find(
    names: Sequence[str], results: Path, *, column: Column | None = None, skip_invalid: bool = False
) -> tuple[list[Side], list[str]]:
    """The sides that `names` stand for, in order, and what was left out of them and why.

    A name is the path of a run directory or of a folder that holds some (a group, in the order of their names);
    `latest`, or `latest~N` for the N-th newest before it, under `results` or as `FOLDER/latest` within a folder or
    experiment; or a run id or an experiment under `results`. With `column` it is a log of another tool, or a folder of
    them. Runs in which nothing was measured are passed over in a group and by `latest`, which counts the runs of one
    command: that of the sides named otherwise, else that of the newest run. `skip_invalid` leaves out the runs of a
    group that cannot be read.

    Raises RunDirectoryError for what is not there, is ambiguous, damaged or cannot be read, and for a run that is there
    twice.
    """
    left_out: list[str] = []
    newest = _Newest(results)
    found: dict[int, Side] = {}
    for number in sorted(range(len(names)), key=lambda number: _counts_back(names[number])):
        found[number] = side = _side(names[number], newest, column, left_out, skip_invalid)
        record = side.runs[0].record
        newest.command = newest.command or (record.command if record else None)
    sides = [found[number] for number in range(len(names))]
    _refuse_twice(sides)
    return _labelled(sides), [*newest.skipped(), *left_out]


def _side(name: str, newest: "_Newest", column: Column | None, left_out: list[str], skip_invalid: bool) -> Side:
    paths, is_group = _logs(name) if column else _runs(name, newest)

    def read(path: Path) -> RunEvidence:
        return open_log(path, column) if column else intact(open_run(path), deeply=len(paths) < WELL_KNOWN)

    if not is_group:
        return Side(name, (read(paths[0]),))
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
                raise RunDirectoryError(error.message, SKIP) from None
            unread.append(error.message)
            left_out.append(error.message)
    if not runs:
        raise RunDirectoryError(f"{name}: none of its {len(paths)} runs can be read", unread[-1])
    if unmeasured:
        left_out.append(f"{SKIPPED} {counted(len(unmeasured), 'run')} of {name} without results: {_listed(unmeasured)}")
    return Side(name, tuple(runs))


def intact(run: RunEvidence, deeply: bool) -> RunEvidence:
    """The run, if everything in its directory reads; `deeply` takes in steps, telemetry and memory.

    A run that was cut off may be torn where it ended, and warns of that. Raises RunDirectoryError for damage to one
    that was completed, naming the file and the line.
    """
    if run.status != COMPLETED:
        return run
    if deeply:
        run.series("step_time")
        run.telemetry  # noqa: B018 - read for its problems
        run.footprints  # noqa: B018 - the same
    if run.problems:
        more = f", and {len(run.problems) - 1} more problems" if len(run.problems) > 1 else ""
        raise RunDirectoryError(f"{run.problems[0]}{more}", DAMAGED)
    return run


def _logs(name: str) -> tuple[list[Path], bool]:
    """The logs behind a name, and whether it is a folder."""
    path = Path(name)
    if not _is_folder(path):
        if not _exists(path):
            close = _closest(path.name, {child.name: str(child) for child in _children(path.parent)})
            raise RunDirectoryError(f"{name}: no such file or folder", close or f"--column reads {', '.join(SUFFIXES)}")
        return [path], False
    if _exists(path / RUN):
        raise RunDirectoryError(f"{name} is a run directory, not a log of another tool", "leave --column out")
    found = _logs_in(path)
    if not found:
        raise RunDirectoryError(f"{name} holds no logs", f"--column reads {', '.join(SUFFIXES)}")
    return found, True


def _logs_in(path: Path) -> list[Path]:
    return sorted(child for child in _children(path) if child.suffix.lower() in SUFFIXES and not _is_folder(child))


def _runs(name: str, newest: "_Newest") -> tuple[list[Path], bool]:
    """The run directories behind a name, and whether it is a group."""
    path = Path(name)
    if not _exists(path):
        if latest := LATEST.fullmatch(name):
            return [newest.run(latest["within"], int(latest["back"] or 0))], False
        path = _under(name, newest.results)
    if not _is_folder(path):
        raise RunDirectoryError(f"{path} is a file, not a run directory", OF_LOGS)
    if _is_run(path):
        return [path], False
    if found := sorted(child for child in _folders(path) if _is_run(child)):
        return found, True
    if experiments := [child.name for child in _folders(path) if any(map(_is_run, _folders(child)))]:
        raise RunDirectoryError(
            f"{path} holds experiments, not runs",
            f"give one of them: {_listed([f'{path}/{one}' for one in experiments])}",
        )
    raise RunDirectoryError(f"{path} holds no runs", OF_LOGS if _logs_in(path) else WHAT)


def _under(name: str, results: Path) -> Path:
    """What `name` is among the experiments and the runs of `results`."""
    if _is_folder(results / name):
        return results / name
    experiments = list(_folders(results))
    found = [experiment / name for experiment in experiments if _is_folder(experiment / name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RunDirectoryError(f"{name} is in several experiments", f"give one of them: {_listed(map(str, found))}")
    raise RunDirectoryError(f"{name}: no such run, experiment or folder", _nearest(Path(name), results))


def _counts_back(name: str) -> bool:
    """Whether a name is `latest` of all results, which follows the command of the other sides."""
    found = LATEST.fullmatch(name)
    return bool(found and found["within"] is None and not _exists(Path(name)))


class _Newest:
    """The newest runs in which something was measured, and which others were passed over on the way to them."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.command: str | None = None
        """Whose runs `latest` counts; None before any side is known."""
        self._empty: dict[str, None] = {}
        self._of_others: dict[str, dict[str, None]] = {}

    def run(self, within: str | None, back: int) -> Path:
        """The newest run but `back`: of all results, or within a folder or experiment of the command of its newest."""
        folder = self.results
        if within is not None:
            folder = Path(within) if _is_folder(Path(within)) else _under(within, self.results)
        command = self.command if within is None else None
        found, empty, others = 0, 0, 0
        for path in _by_age(folder):
            measured = _measured_by(path)
            if measured is None:
                self._empty[path.name] = None
                empty += 1
            elif measured == UNKNOWN or measured == (command := command or measured):
                if found == back:
                    return path
                found += 1
            else:
                self._of_others.setdefault(f"{measured} where {command} is compared", {})[path.name] = None
                others += 1
        are = f"there {'is' if found == 1 else 'are'} {counted(found, 'run')}"
        kind = f"{f' of {command}' if others else ''}{' with results' if empty else ''}"
        hint = "latest is the newest, latest~1 the one before it" if found else WHAT
        if others:
            hint = "name a run of another command by its folder: EXPERIMENT/latest"
        raise RunDirectoryError(f"latest{f'~{back}' * bool(back)}: {are}{kind} in {folder}", hint)

    def skipped(self) -> Iterator[str]:
        """What was passed over, a line for each reason."""
        if self._empty:
            newer = counted(len(self._empty), "newer run")
            yield f"{SKIPPED} {newer} without results: {_listed(self._empty)}"
        for whose, runs in self._of_others.items():
            yield f"{SKIPPED} {counted(len(runs), 'newer run')} of {whose}: {_listed(runs)}"


def _by_age(folder: Path) -> list[Path]:
    """The runs in a folder or its experiments, newest first by their ids; a run that was renamed has no time in its
    name and does not count, and trials of another run's fixes only where their experiment is named."""
    inside = [child for child in _folders(folder) if not child.name.endswith(TRIALS) or RUN_ID.fullmatch(child.name)]
    deeper = [run for child in inside if not RUN_ID.fullmatch(child.name) for run in _folders(child)]
    runs = [run for run in inside + deeper if RUN_ID.fullmatch(run.name)]
    return sorted(runs, key=lambda run: run.name, reverse=True)


def _measured_by(path: Path) -> str | None:
    """The command of a run in which something was measured, UNKNOWN of one that does not tell; None for any other.

    A damaged run counts, so that asking for the latest run reports the damage.
    """
    try:
        run = open_run(path)
        return run.record.command if run.record else None
    except NothingMeasured:
        return None
    except RunDirectoryError:
        try:
            return Run.open(path).record.command
        except RunDirectoryError:
            return UNKNOWN if any(_exists(path / name) for name in (RUN, SUMMARY)) else None


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
                raise RunDirectoryError(f"{run.path} is {twice}", "a run compared with itself tells nothing")
            seen[identity] = number


def _labelled(sides: Sequence[Side]) -> list[Side]:
    """Runs of one name in different folders are told apart by as much of their path as that takes; so are sides."""
    runs = [run for side in sides for run in side.runs]
    names = iter(_telling([(run.label, *_ends(run.path)) for run in runs]))
    shown = _telling([(_short(side.label), side.label) for side in sides])
    return [
        Side(label, tuple(run if run.label == (name := next(names)) else replace(run, label=name) for run in side.runs))
        for label, side in zip(shown, sides, strict=True)
    ]


def _telling(candidates: Sequence[tuple[str, ...]]) -> list[str]:
    """The first way of naming all things that gives no two the same name; or the last."""
    ways = [list(way) for way in zip(*candidates, strict=True)]
    return next((way for way in ways if len(set(way)) == len(way)), ways[-1])


def _ends(path: Path) -> tuple[str, str]:
    return "/".join(path.resolve().parts[-2:]), str(path.resolve())


def _short(name: str) -> str:
    """The last part of a path; latest as it is."""
    return name if LATEST.fullmatch(name) else Path(name).resolve().name or name


def _is_run(path: Path) -> bool:
    """Whether a folder is, or was, a run directory."""
    return any(_exists(path / name) for name in (RUN, SUMMARY, STEPS)) or RUN_ID.fullmatch(path.name) is not None


def _folders(path: Path) -> Iterator[Path]:
    return (child for child in _children(path) if _is_folder(child))


def _children(path: Path) -> list[Path]:
    """By name, hidden ones left out; none where there is no such folder."""
    try:
        return sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read: {error.strerror}", "check the path, and that you may read it"
        ) from None


def _nearest(path: Path, results: Path) -> str:
    """A hint that offers what resembles `path`: an experiment, a run, or something that lies beside it."""
    experiments = {child.name: child.name for child in _folders(results)}
    runs = {run.name: run.name for experiment in experiments for run in _folders(results / experiment)}
    beside = {child.name: str(child) for child in _children(path.parent)}
    for known in (experiments, runs, beside):
        if close := _closest(path.name, known):
            return close
    return f"experiments under {results} are {_listed(experiments)}" if experiments else WHAT


def _closest(name: str, known: Mapping[str, str]) -> str:
    """A hint that offers what goes by nearly that name."""
    return offer([known[close] for close in difflib.get_close_matches(name, known, n=1)])


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:MOST_LISTED]) + (", ..." if len(every) > MOST_LISTED else "")


# Path's own raise for a name that is too long or a folder out of bounds.


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112
