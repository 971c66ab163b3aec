"""What settings run as code, and whether this user has run it before.

Any file of settings or results may come from somebody else, and can name a command, a callable or a patch. Digests of
all code that a user has run are kept in the folder of the user's own state. What is not among them was not made or run
here by this user. Nothing in or beside the file takes part in this, so that none can claim to be this user's.
"""

import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import UsageError
from gpubench.settings.callables import ARGUMENTS
from gpubench.settings.data_sources import names_callable
from gpubench.settings.keys import COMMAND, PATCH, REF, flatten

DIRECTORY = "program.directory"
CALLABLES = ("model.name", "data.source")
"""The settings that may be module:callable. The module is looked up in the current directory first."""
FILE = "code_run_before"
"""The file in the folder of the user's state, with a digest in each line."""


_PATCHES: dict[Path, bytes] = {}
"""The patches that this process has read, by their absolute paths."""


@dataclass(frozen=True)
class Code:
    """The code that settings run, with all that decides which code it is."""

    parts: Mapping[str, Any]
    """The settings that are given and name the code, or are given to it, by dot-key."""
    directory: Path
    """The directory in which it runs."""
    patch: bytes = b""
    """The content of the patch that it is run with; empty without one."""

    @property
    def said(self) -> str:
        """What is run, and where, in words."""
        names = [str(self.parts[key]) for key in (COMMAND, *CALLABLES) if key in self.parts]
        ref = f" of commit {self.parts[REF]}" if REF in self.parts else ""
        ref += f" patched by {self.parts[PATCH]}" if PATCH in self.parts else ""
        given = "".join(f", {key}={value}" for key, value in self.parts.items() if key.startswith(f"{ARGUMENTS}."))
        return f"{' and '.join(filter(None, names)) or 'files'}{given}{ref}, in {self.directory}"

    @property
    def digest(self) -> str:
        named = sorted((key, value) for key, value in self.parts.items() if key != PATCH)
        patch = [hashlib.sha256(self.patch).hexdigest()] if self.patch else []
        content = json.dumps([named, str(self.directory), *patch], default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def without(self, keys: Collection[str]) -> "Code":
        """The code without some of the settings that name it, such as its commit or its patch."""
        parts = {key: value for key, value in self.parts.items() if key not in keys}
        return Code(parts, self.directory, self.patch if PATCH in parts else b"")


def code_in(settings: Any) -> Code | None:
    """The code that the settings of a command run, beside that of gpubench; None if there is none.

    Raises UsageError for a patch that cannot be read.
    """
    values = {key: value for key, value in flatten(settings.model_dump()).items() if value is not None}
    if values.get(COMMAND) or PATCH in values:
        parts = {key: values[key] for key in (COMMAND, DIRECTORY, REF, PATCH) if key in values}
        patch = _read_patch(Path(parts[PATCH])) if PATCH in parts else b""
        return Code(parts, Path(values.get(DIRECTORY, "")).resolve(), patch)
    parts = {key: values[key] for key in CALLABLES if names_callable(str(values.get(key)))}
    if CALLABLES[0] in parts:
        parts |= {key: value for key, value in values.items() if key.startswith(f"{ARGUMENTS}.")}
    return Code(parts, Path().resolve()) if parts else None


def _read_patch(path: Path) -> bytes:
    try:
        found = foreign_files.content(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "name a patch that can be read") from None
    _PATCHES[path.absolute()] = found
    return found


def patch_in(path: Path) -> bytes | None:
    """The content of a patch as `code_in` has read it last in this process; None if it has not.

    What is run is thus what was shown, even if somebody has replaced the file meanwhile.
    """
    return _PATCHES.get(path.absolute())


def has_run(code: Code) -> bool:
    """Whether this user has run this code before; False if that cannot be known, as without a home."""
    return code.digest in _digests()


def remember(codes: Collection[Code]) -> None:
    """Notes that the user has run this code. Without a folder of the user's own it is not noted."""
    known = _digests()
    new = dict.fromkeys(code.digest for code in codes if code.digest not in known)
    if not new or (folder := _folder()) is None:
        return
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder):
            with foreign_files.appended(folder / FILE) as file:
                os.fchmod(file.fileno(), 0o600)  # the user's mask may let others write
                file.write("".join(f"{digest}\n" for digest in new).encode())


def _digests() -> frozenset[str]:
    folder = _folder()
    if folder is None or not _is_own(folder) or not _is_own(folder / FILE):
        return frozenset()
    try:
        return frozenset(foreign_files.content(folder / FILE).decode(errors="replace").split())
    except OSError:
        return frozenset()


def _folder() -> Path | None:
    """The folder of gpubench's state of this user; None without one."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        state = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"  # noqa: PTH117
    except RuntimeError:
        return None
    return state / "gpubench" if state.is_absolute() else None


def _is_own(path: Path) -> bool:
    """Whether a file or folder, and no link, belongs to this user, and nobody else can write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    mine = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
