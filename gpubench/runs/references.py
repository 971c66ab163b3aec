"""Finds the runs that a user names: by path, id, the beginning of an id, name, experiment, or as the latest ones.

All commands name runs alike, because all of them use this module.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gpubench.errors import RunDirectoryError, UsageError, alike, offer
from gpubench.registry import COMMANDS, OF_PROGRAMS, TUNE, kind_of
from gpubench.runs.catalogue import Catalogue
from gpubench.runs.directory import RUN, RUNNING, STEPS, SUMMARY
from gpubench.runs.entries import RUN_ID, Entry
from gpubench.units import counted

LATEST = re.compile(
    r"(?:(?P<within>.+)/)?latest(?:~(?P<back>\d{1,9}))?(?::(?P<command>[a-z-]+))?(?:~(?P<before>\d{1,9}))?"
)
NAME = re.compile(r"[A-Za-z][\w.+-]{0,99}", re.ASCII)
"""What a run may be called. An id begins with a digit, so that no name is the beginning of an id."""
TAG = re.compile(r"\w[\w.+:/@=-]{0,99}")
"""What a tag may be."""
MOST_LISTED = 8
RESULTS = "results"
"""The name of the results folder, unless the user says otherwise."""
OF_SEARCHES = f"{TUNE}, which cannot be a side of a comparison"
SKIPPED = "skipped"
"""The first word of the line on skipped runs."""
TABLES = (".csv", ".tsv", ".jsonl")
"""The suffixes of the logs of other tools that are tables."""
LOGS = (*TABLES, ".json", ".log", ".txt", ".out")
"""The suffixes of the logs of other tools."""
WHAT = "give a run directory, a folder of runs, or latest"


class Lookup:
    """Finds the runs of a results folder, and notes which runs `latest` has skipped.

    A name is one of these:
    - the path of a run directory, or of a folder of run directories, which is a group in the order of their names;
    - `latest`, or `latest~N` for the N-th run before it, `latest:COMMAND` for the runs of one command, or
      `FOLDER/latest` within a folder or an experiment;
    - a run id, or the beginning of one that no other run has;
    - the name that a run was given; if several runs were given it, the newest of them;
    - an experiment, which is a group.

    `latest` counts neither the runs of a search nor the trials of another run's fixes, unless their folder is named.
    `path` counts the search itself, as one; `run` and `runs` do so only for `latest:tune`.
    """

    def __init__(self, results: Path, *, measured: bool = False) -> None:
        """With `measured`, `latest` skips runs that have no results."""
        self.results = results
        self.command: str | None = None
        """The command of run.json whose runs `latest` counts; None before it is known. Used only with `measured`."""
        self._measured = measured
        self._empty: dict[str, None] = {}
        self._of_others: dict[str, dict[str, None]] = {}

    def run(self, name: str) -> Path:
        """Returns the run directory that a name stands for.

        Raises RunDirectoryError for a name that is missing, ambiguous, or stands for a folder of runs.
        """
        paths, is_group = self.runs(name)
        if is_group:
            raise RunDirectoryError(f"{name} is a folder of {counted(len(paths), 'run')}", f"for example {name}/latest")
        return paths[0]

    def runs(self, name: str) -> tuple[list[Path], bool]:
        """Returns the run directories that a name stands for, and whether it is a group.

        Raises RunDirectoryError for a name that is missing or ambiguous.
        """
        path = self._path(name, searches=False)
        if not is_folder(path):
            raise RunDirectoryError(f"{path} is a file, not a run directory", self._of_file(path))
        if is_run(path):
            return [path], False
        if found := sorted(child for child in folders(path) if is_run(child)):
            return found, True
        if experiments := [child.name for child in folders(path) if any(map(is_run, folders(child)))]:
            raise RunDirectoryError(
                f"{path} holds experiments, not runs",
                f"give one of them: {listed([f'{path}/{one}' for one in experiments])}",
            )
        raise RunDirectoryError(f"{path} holds no runs", WHAT)

    @staticmethod
    def _of_file(path: Path) -> str:
        """Returns the hint for a file in place of a run."""
        if is_run(path.parent):
            return f"name the run, and not a file of it: {path.parent}"
        if path.name.endswith((".json", ".json.gz")):
            return f"if it is a trace: gpubench profile --trace {path}"
        return WHAT

    def path(self, name: str) -> Path:
        """Returns the path that a name stands for: of a run directory, of the folder of a search, or of any other.

        `latest` may be a search. Raises RunDirectoryError for a name that is missing or ambiguous.
        """
        return self._path(name, searches=True)

    def _path(self, name: str, *, searches: bool) -> Path:
        path = Path(name)
        if not exists(path):
            if latest := LATEST.fullmatch(name):
                if (command := latest["command"]) and command not in (*COMMANDS, *OF_PROGRAMS):
                    hint = f"commands are {', '.join(COMMANDS)}"
                    raise RunDirectoryError(f"{name}: {command} is not a command that makes runs", hint)
                return self._latest(latest, searches=searches)
            path = self._under(name)
        if NAME.fullmatch(name) and not is_run(path) and (named := self.named(name)):
            raise RunDirectoryError(f"{name} is the name of a run, and also {path}", f"give {path}/ or {named}")
        return path

    def skipped(self) -> Iterator[str]:
        """Yields a line for each reason for which `latest` has skipped runs."""
        if self._empty:
            newer = counted(len(self._empty), "newer run")
            yield f"{SKIPPED} {newer} without results: {listed(self._empty)}"
        for whose, runs in self._of_others.items():
            yield f"{SKIPPED} {counted(len(runs), 'newer run')} of {whose}: {listed(runs)}"

    def _under(self, name: str) -> Path:
        """Returns the path of the experiment or run `name` in the results folder."""
        if is_folder(self.results / name):
            return self.results / name
        known = Catalogue(self.results)
        exact = [one for one in known.found if one.rpartition("/")[2] == name]
        if len(exact) > 1:
            where = listed(str(self.results / one) for one in sorted(exact))
            raise RunDirectoryError(f"{name} is in several experiments", f"give one of them: {where}")
        begun = [one for one in known.found if (one if "/" in name else one.rpartition("/")[2]).startswith(name)]
        if not exact and not begun and NAME.fullmatch(name) and (named := self.named(name)):
            return named
        if found := exact[0] if exact else begun[0] if len(begun) == 1 else None:
            return self.results / found
        if begun:
            several = listed(sorted(begun, reverse=True))
            raise RunDirectoryError(
                f"{name} is the beginning of {counted(len(begun), 'run')}", f"give more of it: {several}"
            )
        hint = f"add --results {there}" if (there := around(self.results)) else _nearest(Path(name), self.results)
        raise RunDirectoryError(f"{name}: no such run, experiment or folder", hint)

    def named(self, name: str) -> Path | None:
        """Returns the newest run that was given a name; None if there is none."""
        known = Catalogue(self.results)
        try:
            return next((run.path for run in known.entries() if run.name == name), None)
        finally:
            known.save()

    def _latest(self, asked: re.Match[str], *, searches: bool) -> Path:
        """Returns the run that `latest` stands for, among all results or within a folder, or the search.

        Of runs with results, it counts the ones of a single command: the one that is asked for, else that of the
        sides that are known already, else that of the newest run.
        """
        folder, within, wanted = self.results, asked["within"], asked["command"]
        back = int(asked["back"] or asked["before"] or 0)
        if within is not None:
            folder = Path(within) if is_folder(Path(within)) else self._under(within)
        command = self.command if within is None and wanted is None else None
        found, empty, others, other = 0, 0, 0, ""
        known = Catalogue(folder)
        try:
            for name, entry in _newest_first(known):
                if wanted and not (entry and wanted in (entry.command, entry.record.command)):
                    continue
                if entry and entry.is_search and not (searches or wanted):
                    self._of_others.setdefault(OF_SEARCHES, {})[entry.run_id] = None
                    continue
                if entry is None or (self._measured and not _has_results(entry)):
                    self._empty[name.rpartition("/")[2]] = None
                    empty += 1
                elif not self._measured or entry.record.command in ("", command := command or entry.record.command):
                    if found == back:
                        return entry.path
                    found += 1
                else:
                    whose = f"{entry.command} where {_as_typed(command)} is compared"
                    self._of_others.setdefault(whose, {})[entry.run_id] = None
                    other, others = other or entry.command, others + 1
        finally:
            if folder == self.results:
                known.save()
        are = f"there {'is' if found == 1 else 'are'} {counted(found, 'run')}"
        of = wanted or (_as_typed(command) if others else None)
        kind = f"{f' of {of}' if of else ''}{' with results' if empty else ''}"
        hint = "latest is the newest, latest~1 the one before it" if found else _instead(folder)
        if others:
            hint = f"latest:{other} and latest~1:{other} are the newest runs of {other}"
        raise RunDirectoryError(
            f"{asked[0] if within is None else asked[0].rpartition('/')[2]}: {are}{kind} in {folder}", hint
        )


def around(results: Path) -> str | None:
    """Returns the results folder that the user is in, as seen from there; None if this one exists, or there is none."""
    if exists(results) or results.is_absolute():
        return None
    for there, depth in ((".", "*/*/"), ("..", "*/"), ("../..", "")):
        if any(Path().glob(f"{depth}{RUN}")):
            return there
    return None


def _instead(folder: Path) -> str:
    """Returns a hint for a name that stands for nothing in a folder."""
    if there := around(folder):
        return f"add --results {there}"
    if not is_folder(folder):
        return "gpubench train-bench makes a run, or name --results DIR"
    inside = folder / RESULTS
    return f"--results {inside} names the folder inside of it" if is_folder(inside) else WHAT


def check_name(name: str, results: Path | None = None) -> None:
    """Raises UsageError for a name by which a run could not be found.

    Names of files, and of folders in `results`, would be found instead.
    """
    if not NAME.fullmatch(name) or LATEST.fullmatch(name):
        raise UsageError(
            f"--name {name!r} is not a name for a run",
            "begin it with a letter, and use letters, digits and . _ + - only; latest has a meaning already",
        )
    for taken in (Path(name), *([results / name] if results else [])):
        if exists(taken):
            raise UsageError(f"--name {name}: {taken} exists, and would be found by that name", "choose another name")


def counts_back(name: str) -> bool:
    """Tells whether a name is `latest` among all results, of the same command as the other sides."""
    found = LATEST.fullmatch(name)
    return bool(found and found["within"] is None and found["command"] is None and not exists(Path(name)))


def is_run(path: Path) -> bool:
    """Tells whether a folder is a run directory, or a damaged one."""
    return any(exists(path / name) for name in (RUN, SUMMARY, STEPS)) or RUN_ID.fullmatch(path.name) is not None


def holds_runs(path: Path) -> bool:
    """Tells whether a folder is a run, or holds runs or experiments."""
    return is_run(path) or any(is_run(child) or any(map(is_run, folders(child))) for child in folders(path))


def folders(path: Path) -> Iterator[Path]:
    """Yields the visible folders in a folder by name."""
    return (child for child in children(path) if is_folder(child))


def children(path: Path) -> list[Path]:
    """Returns the visible entries of a folder by name; empty if there is no such folder."""
    try:
        return sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None


def closest(name: str, known: Mapping[str, str]) -> str:
    return offer([known[close] for close in alike(name, known)])


def listed(names: Iterable[str]) -> str:
    """Joins the first few names."""
    every = list(names)
    return ", ".join(every[:MOST_LISTED]) + (", ..." if len(every) > MOST_LISTED else "")


# The methods of Path raise for a name that is too long or a folder without permission.


def exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def _as_typed(command: str | None) -> str:
    """Returns the command that the user typed for the command in a run.json."""
    return kind_of(command or "").run_by


def _newest_first(known: Catalogue) -> Iterator[tuple[str, Entry | None]]:
    """Yields runs and searches by name with what is known of them, without those that are part of another."""
    whole = [name for name, part_of in known.found.items() if not part_of]
    others = [(name, entry) for name in whole if "/" not in name and (entry := known.entry(name)) and entry.is_search]
    searches = sorted(others, key=lambda one: one[1].record.started)
    for name in whole:
        if not RUN_ID.fullmatch(name.rpartition("/")[2]):
            continue
        entry = known.entry(name)
        while entry and searches and searches[-1][1].record.started > entry.record.started:
            yield searches.pop()
        yield name, entry
    yield from reversed(searches)


def _has_results(entry: Entry) -> bool:
    """Tells whether a run has ended with results. Damaged ones count, so that the damage is reported."""
    if entry.is_search:
        return True
    return entry.record.status != RUNNING and (entry.measured or entry.problem is not None)


def _nearest(path: Path, results: Path) -> str:
    """Returns a hint with similar names: experiments, runs, or entries of the same folder."""
    if path.suffix and is_run(path.parent):
        return f"name the run, and not a file of it: {path.parent}"
    if alike(path.name, ["latest"], cutoff=0.7) or path.name.lower().startswith(("latest", "last")):
        back = re.search(r"\d+$", path.name)
        return offer([f"latest~{back[0]}" if back and not RUN_ID.match(path.name) else "latest"])
    experiments = {child.name: child.name for child in folders(results)}
    runs = {run.name: run.name for experiment in experiments for run in folders(results / experiment)}
    # a word without a suffix is not a misspelt log of another tool
    beside = {child.name: str(child) for child in children(path.parent) if path.suffix or child.is_dir()}
    for known in (experiments, runs, beside):
        if close := closest(path.name, known):
            return close
    return f"experiments under {results} are {listed(experiments)}" if experiments else WHAT
