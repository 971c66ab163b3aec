"""Removes runs from a results folder: which ones may be removed, what they take, and nothing outside the folder."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.runs.catalogue import Catalogue, is_searching
from gpubench.runs.directory import COMPLETED, RUNNING
from gpubench.runs.entries import DAMAGED, RUN_ID, Entry
from gpubench.runs.selection import stamp


@dataclass(frozen=True)
class Unit:
    """What is removed together: a run, or a search with all its runs, which mean nothing without each other."""

    path: Path
    runs: tuple[Entry, ...]

    @property
    def label(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def started(self) -> str:
        """The start of its newest run."""
        return max(entry.record.started for entry in self.runs)

    @property
    def failed(self) -> bool:
        """Whether none of its runs was completed."""
        return not any(entry.record.status == COMPLETED for entry in self.runs)

    def bytes(self) -> int:
        """Returns the disk space of all its files."""
        return sum(_sizes(self.path))


def units(entries: Iterable[Entry]) -> list[Unit]:
    """Groups runs into what can be removed, in their order; a search is at the place of its first run."""
    found: dict[Path, list[Entry]] = {}
    for entry in entries:
        if entry.is_search:
            continue  # its runs stand for it
        found.setdefault(entry.path.parent if entry.part_of == "search" else entry.path, []).append(entry)
    return [Unit(path, tuple(runs)) for path, runs in found.items()]


def prunable(
    results: Path, entries: Sequence[Entry], *, keep: int | None, failed: bool, older: datetime | None
) -> tuple[list[Unit], list[Unit]]:
    """Returns what may be pruned of the runs, which are the newest first, and what is spared although it was chosen.

    A run is chosen if it meets every given condition: it is not among the newest `keep` of its experiment, it `failed`,
    it began before `older`. Spared are runs that are protected, that the user has named, or that cannot be read.
    """
    places: dict[str, int] = {}
    found: list[Unit] = []
    spared: list[Unit] = []
    for unit in units(entries):
        experiment = unit.path.parent.name if unit.runs[0].part_of != "search" else "searches"
        places[experiment] = place = places.get(experiment, 0) + 1
        if keep is not None and place <= keep:
            continue
        if (failed and not unit.failed) or (older is not None and unit.started >= stamp(older)):
            continue
        named = any(entry.name or entry.record.status == DAMAGED for entry in unit.runs)
        (spared if named or protection(results, unit) else found).append(unit)
    return found, spared


def protection(results: Path, unit: Unit) -> str | None:
    """Returns why the unit must not be removed; None if it may be."""
    for entry in unit.runs:
        if entry.record.status == RUNNING:
            return f"it is running on {entry.record.host} (process {entry.record.pid})"
        if entry.tags:
            return f"it is tagged {', '.join(entry.tags)}"
        if entry.record.status == DAMAGED and not RUN_ID.fullmatch(entry.run_id):
            return f"it is not sure to be a run: {entry.problem}"
    if not _is_inside(results, unit.path):
        return f"it is not in {results}, but behind a link"
    if unit.runs[0].part_of == "search" and is_searching(str(unit.path)):
        return "the search is running"
    return None


def remedy(unit: Unit) -> str | None:
    """Returns what makes a protected unit removable; None if nothing does."""
    if any(entry.record.status == RUNNING for entry in unit.runs):
        return "wait until it has ended"
    tagged = next((entry for entry in unit.runs if entry.tags), None)
    if tagged is None:
        return None
    name = unit.path.name if tagged.part_of == "search" else tagged.run_id
    return f"gpubench runs tag {name} --remove {tagged.tags[0]}"


def remove(known: Catalogue, unit: Unit) -> None:
    """Removes the unit, after checking again that it may be removed, and its experiment if nothing else is in it.

    Raises RunDirectoryError if it is protected by now, and RunFailed if a file cannot be removed.
    """
    names = (os.path.relpath(entry.folder, known.results) for entry in unit.runs)
    current = Unit(unit.path, tuple(entry for name in names if (entry := known.entry(name, afresh=True))))
    if not current.runs:
        return  # somebody else has removed it
    if reason := protection(known.results, current):
        raise RunDirectoryError(f"{unit.path} is not removed: {reason}")
    try:
        while unit.path.exists():
            with suppress(FileNotFoundError):  # somebody else removes it at the same time
                shutil.rmtree(unit.path)
    except OSError as error:
        raise RunFailed(
            f"cannot remove {error.filename or unit.path}: {error.strerror}", "check who owns the folder"
        ) from None
    if unit.path.parent != known.results:
        with suppress(OSError):  # other runs are in it
            unit.path.parent.rmdir()


def _is_inside(results: Path, path: Path) -> bool:
    """Tells whether a folder really lies in the results folder, without a link on its path."""
    whole, real = os.path.realpath(results), os.path.realpath(path)
    return real == os.path.join(whole, os.path.relpath(path, results)) and real.startswith(whole + os.sep)  # noqa: PTH118


def _sizes(folder: Path) -> Iterator[int]:
    """Yields the disk space of each file and folder in a folder, without following links."""
    for path, inner, files in os.walk(folder):
        for name in [*inner, *files]:
            with suppress(OSError):
                yield os.lstat(os.path.join(path, name)).st_blocks * 512  # noqa: PTH118
