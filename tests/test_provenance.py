import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpubench import git as provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(path: Path, *arguments: str) -> str:
    # A hook's GIT_DIR must not lead these commands into the repository under test.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=path, env=clean, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _no_inherited_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "topic")
    (tmp_path / "model.py").write_text("layers = 2\n")
    git(tmp_path, "add", "model.py")
    git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def test_a_clean_tree_is_its_commit_and_branch(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert provenance.state(repository) == {
        "commit": commit,
        "subject": "start",
        "branch": "topic",
        "dirty": False,
    }


def test_a_folder_inside_the_tree_answers_for_it(repository: Path) -> None:
    (repository / "deep").mkdir()
    assert provenance.state(repository / "deep") == provenance.state(repository)


def test_a_changed_or_staged_file_makes_it_dirty(repository: Path) -> None:
    (repository / "model.py").write_text("layers = 3\n")
    assert (provenance.state(repository) or {})["dirty"] is True
    git(repository, "add", "model.py")
    assert (provenance.state(repository) or {})["dirty"] is True


def test_an_untracked_file_does_not_make_it_dirty(repository: Path) -> None:
    (repository / "results.json").write_text("{}")
    assert (provenance.state(repository) or {})["dirty"] is False


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--detach")
    assert set(provenance.state(repository) or {}) == {"commit", "subject", "dirty"}


def test_before_the_first_commit_there_is_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch", "topic")
    assert provenance.state(tmp_path) == {"branch": "topic", "dirty": False}


def test_outside_a_repository_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.state(tmp_path) is None
    assert provenance.state(tmp_path / "missing") is None


def test_without_git_there_is_no_state(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert provenance.state(repository) is None


def test_a_git_that_hangs_is_given_up(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "TIMEOUT", 0.1)
    assert provenance.state(repository) is None
