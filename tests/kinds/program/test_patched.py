"""The temporary copy of a program in which a patch is applied."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpubench.errors import SettingsError, UsageError
from gpubench.kinds.program import patched
from gpubench.patches.diff import Versions, written
from gpubench.settings.loading import apply_overrides
from gpubench.settings.programs import CommandSettings, ProgramSettings
from gpubench.settings.trust import code_in

TRAIN = "import pathlib, part, pack.inner\nprint(1, part.x, pack.inner.y, pathlib.Path('data/file').read_text())\n"


def program(folder: Path) -> Path:
    """Writes a program with modules, data, links, an environment and results; returns a patch of two of its files."""
    for name in ("data", "pack", "results/run", "venv", "__pycache__", ".hidden"):
        (folder / name).mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "part.py").write_text("x = 'old'\n")
    (folder / "pack" / "inner.py").write_text("y = 'old'\n")
    (folder / "data" / "file").write_text("data")
    (folder / "results" / "run" / "x.py").write_text("")
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (folder / "venv" / "x.py").write_text("")
    (folder / "link.py").symlink_to("part.py")
    files = {
        "part.py": Versions(b"x = 'old'\n", b"x = 'new'\n"),
        "pack/inner.py": Versions(b"y = 'old'\n", b"y = 'new'\n"),
    }
    (folder / "best.patch").write_bytes(written(files, [], lambda *_: ""))
    return folder / "best.patch"


def copied(folder: Path, target: Path, *words: str, directory: Path | None = None) -> tuple[list[str], Path]:
    command = CommandSettings(command=shlex.join(words), directory=directory or folder)
    settings, there = patched.copy(folder / "best.patch", command, folder / "results", target / "copy")
    return settings.words, there


@pytest.mark.parametrize("repository", [False, True])
def test_only_the_patched_files_differ_and_data_is_found(tmp_path: Path, repository: bool) -> None:
    folder, target = tmp_path / "own", tmp_path / "temporary"
    folder.mkdir()
    target.mkdir()
    program(folder)
    if repository:
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    words, there = copied(folder, target, sys.executable, str(folder / "train.py"))
    assert words == [sys.executable, str(there / "train.py")]
    done = subprocess.run(words, cwd=there, capture_output=True, text=True, check=False)
    assert done.stdout == "1 new new data\n", done.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert (there / "link.py").read_text() == "x = 'new'\n"
    assert all((there / name).is_symlink() for name in ("data", "results", "venv", ".hidden"))
    assert not (there / "__pycache__").is_symlink()
    assert not (there / "train.py").is_symlink()
    assert (there / ".git").is_symlink() == repository


def test_a_program_in_a_folder_of_a_repository_finds_what_is_beside_it(tmp_path: Path) -> None:
    folder, target = tmp_path / "own" / "scripts", tmp_path / "temporary"
    folder.mkdir(parents=True)
    target.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder.parent, check=True)
    program(folder)
    (folder.parent / "shared").mkdir()
    (folder.parent / "shared" / "file").write_text("beside")
    _, there = copied(folder, target, "python", "train.py")
    assert there == target / "copy" / "scripts"
    assert (there / ".." / "shared" / "file").read_text() == "beside"


def test_the_git_file_of_a_worktree_is_not_linked(tmp_path: Path) -> None:
    program(tmp_path)
    (tmp_path / ".git").write_text("gitdir: elsewhere\n")
    target = tmp_path.parent / f"{tmp_path.name}-copy"
    target.mkdir()
    _, there = copied(tmp_path, target, "python", "train.py")
    assert not os.path.lexists(there / ".git")


def test_a_word_that_leads_out_of_the_program_is_absolute(tmp_path: Path) -> None:
    folder, target = tmp_path / "own", tmp_path / "temporary"
    folder.mkdir()
    target.mkdir()
    program(folder)
    (tmp_path / "beside.yaml").write_text("")
    words, _ = copied(folder, target, "python", "train.py", "../beside.yaml", "data/file", "a/b")
    assert words == ["python", "train.py", str(tmp_path / "beside.yaml"), "data/file", "a/b"]


def test_a_patch_of_other_files_is_refused(tmp_path: Path) -> None:
    program(tmp_path)
    (tmp_path / "part.py").write_text("x = 'other'\n")
    with pytest.raises(UsageError, match=r"part\.py has changed since"):
        copied(tmp_path, tmp_path, "python", "train.py")
    with pytest.raises(SettingsError, match=r"program\.ref and program\.patch are different versions"):
        apply_overrides(ProgramSettings(), {"program.command": "x", "program.patch": "a", "program.ref": "b"})


def test_the_code_of_a_patched_program_is_known_by_the_content_of_the_patch(tmp_path: Path) -> None:
    patch = program(tmp_path)
    (tmp_path / "same.patch").write_bytes(patch.read_bytes())

    def digest(**given: str) -> str:
        code = code_in(ProgramSettings(program={"command": "python train.py", **given}))
        assert code
        return code.digest

    known = digest(patch=str(patch))
    assert known != digest()
    assert known == digest(patch=str(tmp_path / "same.patch"))
    patch.write_bytes(patch.read_bytes() + b"\n")
    assert known != digest(patch=str(patch))


def test_a_patch_that_is_replaced_after_it_was_shown_is_run_as_it_was(tmp_path: Path) -> None:
    folder, target = tmp_path / "own", tmp_path / "temporary"
    folder.mkdir()
    target.mkdir()
    patch = program(folder)
    shown = code_in(ProgramSettings(program={"command": "python train.py", "directory": folder, "patch": patch}))
    assert shown
    evil = {"part.py": Versions(b"x = 'old'\n", b"x = 'evil'\n")}
    patch.write_bytes(written(evil, [], lambda *_: ""))
    _, there = copied(folder, target, "python", "train.py")
    assert (there / "part.py").read_text() == "x = 'new'\n"
    patch.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        code_in(ProgramSettings(program={"command": "python train.py", "directory": folder, "patch": patch}))
