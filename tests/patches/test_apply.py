"""A patch is applied to all of its files or to none, and only if they are as they were."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpubench import foreign_files
from gpubench.errors import RunFailed, UsageError
from gpubench.patches.apply import apply
from gpubench.patches.diff import Versions, written

FILES = {name: Versions(f"{name} = 1\n".encode(), f"{name} = 2\n".encode()) for name in ("a.py", "b.py")}


def program(folder: Path) -> Path:
    """Writes the files as they were, and returns the patch."""
    for name, versions in FILES.items():
        (folder / name).write_bytes(versions.before)
    (folder / "best.patch").write_bytes(written(FILES, [], lambda *_: ""))
    return folder / "best.patch"


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


def run_of(folder: Path) -> None:
    """Makes a folder look as a profile does whose program is in `folder`."""
    (folder / "config.yaml").write_text(f"program: {{command: python a.py, directory: {folder}}}\n")
    (folder / "run.json").write_text(json.dumps({"command": "program"}))


def test_the_patch_of_somebody_else_is_not_applied_without_trust(
    tmp_path: Path, command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program(tmp_path)
    run_of(tmp_path)
    refused = command_line("tune", "--apply", str(tmp_path))
    assert refused.code == 2
    assert "names code that you have not run here before" in refused.stderr
    assert "patched by" in refused.stderr
    assert contents(tmp_path) == [versions.before for versions in FILES.values()]
    done = command_line("tune", "--apply", str(tmp_path), "--trust")
    assert done.code == 0
    assert done.stdout == f"{tmp_path / 'a.py'}: 1 line changed\n{tmp_path / 'b.py'}: 1 line changed\n"
    assert contents(tmp_path) == [versions.after for versions in FILES.values()]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--apply", "nowhere"), "has no best.patch"),
        (("--apply", "nowhere", "--budget", "3m"), "leave out all options"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    command_line: Callable[..., Any], words: tuple[str, ...], error: str
) -> None:
    found = command_line("tune", *words)
    assert found.code == 2
    assert error in found.stderr
