"""A patch is applied to all of its files or to none, and only if they are as they were."""

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli import complaint

from gpubench import foreign_files
from gpubench.errors import RunFailed, UsageError
from gpubench.patches.apply import applied
from gpubench.patches.apply import apply as written_to
from gpubench.patches.diff import Versions, written
from gpubench.permission import permit
from gpubench.report.terminal import Terminal
from gpubench.settings.keys import PATCH, THE_RUN
from gpubench.settings.loading import load
from gpubench.settings.programs import ProgramSettings

FILES = {name: Versions(f"{name} = 1\n".encode(), f"{name} = 2\n".encode()) for name in ("a.py", "b.py")}


def program(folder: Path) -> Path:
    """Writes the files as they were, and returns the patch."""
    for name, versions in FILES.items():
        (folder / name).write_bytes(versions.before)
    (folder / "best.patch").write_bytes(written(FILES, [], lambda *_: ""))
    return folder / "best.patch"


def apply(patch: Path, folder: Path) -> Mapping[str, Versions]:
    files = applied(patch, folder)
    written_to(files, folder)
    return files


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def test_all_files_are_changed_and_keep_their_permissions(tmp_path: Path) -> None:
    patch = program(tmp_path)
    (tmp_path / "a.py").chmod(0o755)
    assert apply(patch, tmp_path) == FILES
    assert contents(tmp_path) == [versions.after for versions in FILES.values()]
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o755
    with pytest.raises(UsageError, match=r"it is applied already") as refused:
        apply(patch, tmp_path)
    assert refused.value.hint == f"git apply -R {patch} takes it back"
    (tmp_path / "a.py").write_bytes(b"else\n")
    with pytest.raises(UsageError, match=r"a.py and b.py have changed since"):
        apply(patch, tmp_path)


def test_no_file_is_changed_if_one_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, replace = program(tmp_path), foreign_files.replace

    def full(path: Path, data: bytes) -> None:
        if path.name == "b.py":
            raise OSError(28, "No space left on device", str(path))
        replace(path, data)

    monkeypatch.setattr(foreign_files, "replace", full)
    with pytest.raises(RunFailed, match=r"cannot write b.py: No space left on device; nothing is changed"):
        apply(patch, tmp_path)
    assert contents(tmp_path) == [versions.before for versions in FILES.values()]


@pytest.mark.parametrize("harm", ["changed", "gone", "a link", "a folder"])
def test_files_that_are_not_as_they_were_are_left(tmp_path: Path, harm: str) -> None:
    patch, file = program(tmp_path), tmp_path / "b.py"
    content = file.read_bytes()
    file.unlink()
    if harm == "changed":
        file.write_bytes(content + b"\n")
    elif harm == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    elif harm == "a folder":
        file.mkdir()
    with pytest.raises(UsageError, match=r"b\.py"):
        apply(patch, tmp_path)
    assert (tmp_path / "a.py").read_bytes() == FILES["a.py"].before


BY = "program: {{command: python a.py, directory: {directory}}}\n"


def sent(folder: Path, files: dict[str, str]) -> Path:
    """Makes a program, and a folder with a patch of it and with these files; returns that folder."""
    made = folder / "sent"
    made.mkdir()
    program(folder).rename(made / "best.patch")
    for name, content in files.items():
        (made / name).write_text(content.format(directory=folder))
    return made


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's state, in which nothing is noted yet."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"best.yaml": BY, "tune.json": "{{}}"},
        {"best.yaml": BY},
        {"config.yaml": BY, "run.json": '{{"command": "program"}}'},
        {"config.yaml": BY},
        {"best.yaml": "program: {{directory: {directory}}}\n", "tune.json": "{{}}"},
        {"best.yaml": "", "tune.json": "{{}}"},
    ],
)
def test_the_patch_of_somebody_else_is_not_applied_without_trust(
    tmp_path: Path, command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = sent(tmp_path, files)
    refused = command_line("tune", "--apply", str(folder))
    said, hint = complaint(refused)
    assert "names code that you have not run here before" in said
    assert f"patched by {folder / 'best.patch'}, in {tmp_path}" in said
    assert f"gpubench tune --apply {folder} --dry-run" in hint
    assert "--trust" in hint
    assert contents(tmp_path) == [versions.before for versions in FILES.values()]
    done = command_line("tune", "--apply", str(folder), "--trust")
    assert done.code == 0
    assert [line.rpartition("/")[2] for line in done.stdout.splitlines()] == [
        "a.py: 1 line changed",
        "b.py: 1 line changed",
    ]
    assert contents(tmp_path) == [versions.after for versions in FILES.values()]


def test_what_was_applied_once_is_known_wherever_its_folder_is_and_without_a_record_it_is_not(
    tmp_path: Path, command_line: Callable[..., Any], state: Path
) -> None:
    folder = sent(tmp_path, {"best.yaml": BY})
    assert command_line("tune", "--apply", str(folder), "--trust").code == 0
    folder.rename(tmp_path / "moved")
    program(tmp_path)
    assert command_line("tune", "--apply", str(tmp_path / "moved")).code == 0
    program(tmp_path)
    for file in state.glob("gpubench/*"):
        file.unlink()
    (state / "gpubench").rmdir()
    (state / "gpubench").touch()  # in place of the folder, so that nothing can be noted
    for trust, code in ((), 2), (("--trust",), 0), ((), 2):
        program(tmp_path)
        assert command_line("tune", "--apply", str(tmp_path / "moved"), *trust).code == code


def test_a_patch_that_was_made_here_is_applied_without_a_question(
    tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    folder = sent(tmp_path, {})
    base = load(ProgramSettings, None, {"program.command": "python a.py", "program.directory": str(tmp_path)})
    (folder / "best.yaml").write_text(base.to_yaml())
    patched = base.with_overrides({PATCH: os.path.relpath(folder / "best.patch")}, THE_RUN)
    permit([base, patched], Terminal(quiet=True, verbosity=0))  # as the search does that has made the patch
    assert command_line("tune", "--apply", str(folder)).code == 0
    assert contents(tmp_path) == [versions.after for versions in FILES.values()]


def test_a_dry_run_prints_the_change_and_the_directory_and_changes_nothing(
    tmp_path: Path, command_line: Callable[..., Any]
) -> None:
    folder = sent(tmp_path, {"best.yaml": BY})
    done = command_line("tune", "--apply", str(folder), "--dry-run")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"# {folder / 'best.patch'} would change 2 files in {tmp_path}",
        *("--- a/a.py", "+++ b/a.py", "@@ -1,1 +1,1 @@", "-a.py = 1", "+a.py = 2"),
        *("--- a/b.py", "+++ b/b.py", "@@ -1,1 +1,1 @@", "-b.py = 1", "+b.py = 2"),
    ]
    found = json.loads(command_line("tune", "--apply", str(folder), "--dry-run", "--json").stdout)
    assert found["directory"] == str(tmp_path)
    assert found["lines"] == {"a.py": 1, "b.py": 1}
    assert found["diff"].splitlines() == done.stdout.splitlines()[1:]
    assert contents(tmp_path) == [versions.before for versions in FILES.values()]
    assert complaint(command_line("tune", "--apply", str(folder)))


@pytest.mark.parametrize(("answer", "after"), [("y\n", True), ("\n", False)])
def test_the_question_shows_the_change_and_not_what_the_patch_says_of_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    after: bool,
) -> None:
    folder = sent(tmp_path, {"best.yaml": BY})
    files = {"a.py": Versions(b"a.py = 1\n", "a.py = 2  # \x1b[2J\u202e\u200b\n".encode())}
    (folder / "best.patch").write_bytes(written(files, ["nothing but a comment"], lambda *_: "heading"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = load(ProgramSettings, str(folder / "best.yaml")).with_overrides({PATCH: str(folder / "best.patch")}, "file")
    if after:
        permit([run], Terminal(quiet=True, verbosity=0))
    else:
        with pytest.raises(UsageError, match="names code"):
            permit([run], Terminal(quiet=True, verbosity=0))
    asked = capsys.readouterr().err
    assert "-a.py = 1\n+a.py = 2  # \\x1b[2J\\u202e\\u200b\n" in asked
    assert str(tmp_path) in asked
    assert "comment" not in asked
    assert "heading" not in asked


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--apply", "nowhere"), "has no best.patch"),
        (("--apply", "nowhere", "--budget", "3m"), "leave out all options"),
        (("--dry-run",), "--dry-run shows what --apply would change"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    command_line: Callable[..., Any], words: tuple[str, ...], error: str
) -> None:
    found = command_line("tune", *words)
    assert found.code == 2
    assert error in found.stderr
