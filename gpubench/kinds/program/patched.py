"""Makes a temporary copy of a program with a patch applied, to run it as it would be with the patch.

Files that hold code are copied, and everything else is a link to the original: data, checkpoints, environments and
large files, whether git tracks them or not. The program finds there what it finds in its own directory, and only the
files that the patch changes differ.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from gpubench import git
from gpubench.patches.apply import applied, replaced
from gpubench.settings.programs import CommandSettings
from gpubench.settings.trust import patch_in

CODE = (".py", ".pyi", ".sh")
"""The suffixes of the files that are copied: a linked script would find the modules beside the original."""
NO_CODE = frozenset({"__pycache__", "node_modules", "site-packages"})
"""The folders that hold no code of the program's own."""


def copy(patch: Path, program: CommandSettings, results: Path, folder: Path) -> tuple[CommandSettings, Path]:
    """Makes a copy of the directory of a program in the empty folder `folder`, with the patch applied.

    Returns the program and its directory in the copy. Nothing of `results` is copied. Raises UsageError for a patch
    that does not apply.
    """
    directory = (program.directory or Path()).absolute()
    files = applied(patch, directory, patch_in(patch))
    top = git.repository(directory) or directory
    real = {top, *_with_code(top, directory, results.absolute())}
    real |= {parent for name in files for parent in (directory / name).parents if parent.is_relative_to(top)}
    for source in sorted(real):
        _copy(source, folder / source.relative_to(top), real, top)
    there = folder / directory.relative_to(top)
    for name, versions in files.items():
        replaced(there / name, versions.after)
    words = [_word(word, directory, top, folder) for word in program.words]
    return program.model_copy(update={"command": shlex.join(words)}), there


def _with_code(top: Path, directory: Path, results: Path) -> Iterator[Path]:
    """The folders below a program's directory that hold code, and all that they are in, up to `top`."""
    for name, folders, files in os.walk(directory):
        here = Path(name)
        folders[:] = [one for one in folders if _may_hold_code(here / one) and here / one != results]
        if here == directory or any(file.endswith(CODE) for file in files):
            yield from (one for one in (here, *here.parents) if one.is_relative_to(top))


def _may_hold_code(folder: Path) -> bool:
    return not (folder.name.startswith(".") or folder.name in NO_CODE or (folder / "pyvenv.cfg").exists())


def _copy(source: Path, target: Path, real: set[Path], top: Path) -> None:
    """Makes the counterpart of a folder, with what is in it but for the folders in `real`."""
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            path, new = Path(entry.path), target / entry.name
            if (
                entry.is_symlink()
                and path.resolve().is_relative_to(top.resolve())
                and not path.readlink().is_absolute()
            ):
                new.symlink_to(path.readlink())
            elif entry.name == ".git" and not entry.is_dir():  # git would take the copy for the new place of a worktree
                continue
            elif entry.is_file(follow_symlinks=False) and entry.name.endswith(CODE):
                shutil.copy2(path, new)
            elif path not in real and entry.name != "__pycache__":
                new.symlink_to(path)


def _word(word: str, directory: Path, top: Path, folder: Path) -> str:
    """A word of the command for the copy: a file of code in it has its path there, and one outside an absolute one."""
    path = Path(os.path.normpath(directory / word))
    if not path.exists() or os.sep not in word:
        return word
    if not path.is_relative_to(top):
        return str(path)
    there = folder / path.relative_to(top)
    return str(there) if Path(word).is_absolute() and there.exists() and not there.is_symlink() else word
