"""Temporary folders that do not stay: one whose owner was killed is removed by the next process that makes one.

A folder belongs to the process that holds a lock on a file in it. The kernel releases the lock when the process ends,
however it ends. What a worker writes goes into the folder of its host, so that it goes with it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "gpubench-"
OWNER = ".gpubench-owner"
"""The file that the owner of a folder has locked."""
FOLDER_VARIABLE = "_GPUBENCH_FOLDER"
"""The environment variable with the host's folder."""
LONGEST_PARENT = 80
"""The bytes of a path that leave room for a Unix socket in the folder, whose path has 107 bytes at most."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KNOWN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnedFolder(tempfile.TemporaryDirectory[str]):
    """A folder that only this user can read, with a path that is short enough for a Unix socket."""

    def __init__(self) -> None:
        """Removes the folders whose owner has ended, and makes a new one."""
        for parent in _parents():
            remove_abandoned(parent)
        super().__init__(prefix=PREFIX, dir=_parents()[0], ignore_cleanup_errors=True)
        self.path = Path(self.name)
        self._lock: int | None = _locked(self.path)

    def cleanup(self) -> None:
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def marked(name: str) -> list[Path]:
    """Returns the files of this name in the folders whose owners live."""
    for parent in _parents():
        remove_abandoned(parent)
    return [path for parent in dict.fromkeys(_parents()) for path in parent.glob(f"{PREFIX}*/{name}")]


def folder_of_worker() -> "tempfile.TemporaryDirectory[str]":
    """Makes a temporary folder for a worker: in that of the host, if it runs on this machine."""
    parent = os.environ.get(FOLDER_VARIABLE)
    inside = parent if parent and Path(parent).is_dir() else None
    return tempfile.TemporaryDirectory(prefix=PREFIX, dir=inside, ignore_cleanup_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user in `parent` whose owner has ended."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                _remove_if_abandoned(Path(entry.path))


def _parents() -> list[Path]:
    """Returns the folders in which there can be temporary folders, the one for new ones first."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    if len(os.fsencode(usual)) < LONGEST_PARENT:
        return [usual] if usual == short else [usual, short]
    return [short, usual]


def _locked(folder: Path) -> int:
    """Makes the locked file of a new folder, and returns its descriptor. It never exists without the lock."""
    new = folder / f"{OWNER}.new"
    descriptor = os.open(new, _NEW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(folder / OWNER)
    return descriptor


def _remove_if_abandoned(folder: Path) -> None:
    """Removes a folder if it is this user's and has the file of an owner, which nobody has locked."""
    with suppress(OSError), _opened(folder, _DIRECTORY) as directory:
        if os.fstat(directory).st_uid != os.geteuid():
            return
        with _opened(OWNER, _KNOWN, directory) as lock:
            found = os.fstat(lock)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if the owner lives
            for entry in list(os.scandir(directory)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, ignore_errors=True, dir_fd=directory)
                elif entry.name != OWNER:  # the last one, so that it can be found again if this process is killed
                    os.unlink(entry.name, dir_fd=directory)
            os.unlink(OWNER, dir_fd=directory)
            folder.rmdir()


@contextmanager
def _opened(path: Path | str, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
