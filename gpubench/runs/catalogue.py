"""Lists every run of a results folder, and keeps what it read of each one in a cache file in that folder.

A listing needs little of each run, and reading it again from thousands of folders takes minutes. The cache holds it
together with the size, time and inode of the files that it was read from, so that a folder which was added, copied in,
removed or has grown is noticed. The cache may be deleted at any time; a cache that is damaged, or written by something
else, is ignored and replaced.

The shell completes runs with this module, so that it imports neither numpy nor the settings.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError
from gpubench.foreign_files import SEARCH, SEARCH_LOCK, TRIALS
from gpubench.runs.directory import COMPARISON, CONFIG, INTERRUPTED, RUN, RUNNING, SUMMARY, status_of
from gpubench.runs.entries import RUN_ID, Entry, PartOf, read

CACHE = ".runs.cache"
"""The cache file in the results folder."""
VERSION = 4
"""The version of the cache. Raise it whenever `Entry` changes, or is read in another way."""
Marks = tuple[int, ...]
"""Size, time and inode of the files that an entry is read from."""


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    marks: Marks
    entry: Entry


class _Cache(msgspec.Struct, frozen=True, array_like=True):
    version: int
    runs: dict[str, _Kept]
    """By the path of the run directory, relative to the results folder."""


class Catalogue:
    """The runs of a results folder. A run is read when it is first asked for, and kept in the cache by `save`."""

    def __init__(self, results: Path) -> None:
        """Finds the run directories. Raises RunDirectoryError if the folder exists but cannot be read."""
        self.results = results
        self.found = dict(_run_directories(results))
        """What each run directory is a part of, by its path relative to the results folder; newest first by its name,
        and after these the ones that were renamed, and the folders of searches."""
        self._cached = _load(results / CACHE)
        self._read: dict[str, _Kept] = {}

    def entry(self, name: str, *, afresh: bool = False) -> Entry | None:
        """Returns the run with a path relative to the results folder; None if there is no run.

        It is read `afresh` if nothing may depend on the cache, which somebody else may have written.
        """
        folder = os.path.join(self.results, name)  # noqa: PTH118
        marks = _marks(folder)
        if marks is None:
            return None
        kept = self._cached.get(name)
        if kept is None or kept.marks != marks or afresh:
            kept = self._read[name] = _Kept(marks, read(folder))
        return self._as_reported(kept.entry, name)

    def entries(self) -> Iterator[Entry]:
        """Yields the runs, in the order of `found`."""
        for name in self.found:
            if entry := self.entry(name):
                yield entry

    def cached(self) -> Iterator[Entry]:
        """Yields the runs that the cache holds and whose folders are still there, without a look into the folders."""
        for name in self.found:
            if kept := self._cached.get(name):
                yield self._as_reported(kept.entry, name)

    def _as_reported(self, entry: Entry, name: str) -> Entry:
        """Returns the entry as it is now: the results may have moved, and the host of a running run been killed."""
        folder = os.path.join(self.results, name)  # noqa: PTH118
        record, tags = entry.record, entry.tags
        if entry.is_search:
            if record.status == RUNNING and not is_searching(folder):
                record = msgspec.structs.replace(record, status=INTERRUPTED)
            parts = (self._read.get(part) or self._cached.get(part) for part in self._parts.get(name, ()))
            runs = [part.entry for part in parts if part]  # `entries` has read them before the search
            tags = tuple(sorted({tag for run in runs for tag in run.tags}))
            if runs:
                record = msgspec.structs.replace(record, host=runs[0].record.host, git=runs[0].record.git)
        elif record.status == RUNNING:
            record = msgspec.structs.replace(record, status=status_of(record))
        return msgspec.structs.replace(entry, folder=folder, part_of=self.found.get(name), record=record, tags=tags)

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """The names of the runs of each search."""
        found: dict[str, list[str]] = {}
        for name, part_of in self.found.items():
            if part_of == "search":
                found.setdefault(name.rpartition("/")[0], []).append(name)
        return found

    def save(self) -> None:
        """Writes the cache, if anything in it has changed. A folder that cannot be written is left as it is."""
        current = {name: kept for name, kept in (self._cached | self._read).items() if name in self.found}
        if not self._read and len(current) == len(self._cached):
            return
        aside = self.results / f"{CACHE}.{os.getpid()}.tmp"
        with suppress(OSError, UnicodeEncodeError):  # the second one for a folder whose name is not UTF-8
            try:
                with aside.open("xb") as file:  # never through a link that somebody left there
                    file.write(msgspec.msgpack.encode(_Cache(VERSION, current)))
                aside.replace(self.results / CACHE)
            finally:
                aside.unlink(missing_ok=True)


def catalogue(results: Path) -> list[Entry]:
    """Returns every run of a results folder, newest first. Empty if there is no such folder.

    Raises RunDirectoryError if the folder exists but cannot be read.
    """
    found = Catalogue(results)
    entries = sorted(found.entries(), key=lambda entry: (entry.record.started, entry.run_id), reverse=True)
    found.save()
    return entries


def _run_directories(results: Path) -> Iterable[tuple[str, PartOf]]:
    found: list[tuple[bool, str, str, PartOf]] = []
    for folder in _folders(str(results)):
        if RUN_ID.fullmatch(folder.name) or os.path.exists(os.path.join(folder.path, RUN)):  # noqa: PTH110, PTH118
            found.append((RUN_ID.fullmatch(folder.name) is not None, folder.name, folder.name, None))
            continue
        part_of: PartOf = "trial" if folder.name.endswith(TRIALS) else None
        if os.path.exists(os.path.join(folder.path, SEARCH)):  # noqa: PTH110, PTH118
            part_of = "search"
            found.append((False, folder.name, folder.name, None))
        found += [
            (RUN_ID.fullmatch(run.name) is not None, run.name, f"{folder.name}/{run.name}", part_of)
            for run in _folders(folder.path, quietly=True)
        ]
    return ((name, part_of) for _, _, name, part_of in sorted(found, key=lambda one: one[:3], reverse=True))


def _folders(path: str, *, quietly: bool = False) -> list["os.DirEntry[str]"]:
    """Returns the visible folders in a folder; none if there is no such folder."""
    try:
        with os.scandir(path) as inside:
            return [one for one in inside if not one.name.startswith(".") and one.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if quietly:
            return []
        raise RunDirectoryError(
            f"{path} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None


def _marks(folder: str) -> Marks | None:
    """Returns the marks of a run directory, or of the folder of a search; None if the folder is neither."""
    marks = [mark for name in (RUN, SUMMARY, CONFIG, COMPARISON) for mark in _mark(f"{folder}/{name}")]
    if any(marks[:6]):
        return tuple(marks)
    search = _mark(f"{folder}/{SEARCH}")
    return search if any(search) else None


def _mark(path: str) -> Marks:
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands of runs
    except OSError:
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ino


def is_searching(folder: str) -> bool:
    """Returns whether a search is in progress, which holds a lock on its folder."""
    try:
        foreign_files.lock(Path(folder, SEARCH_LOCK), shared=True).close()
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _load(path: Path) -> dict[str, _Kept]:
    """Returns the content of the cache; empty if there is none, or if it is not one of this version."""
    try:
        found = msgspec.msgpack.decode(foreign_files.content(path), type=_Cache)
    except (OSError, ValueError, RecursionError):
        return {}
    return found.runs if found.version == VERSION else {}
