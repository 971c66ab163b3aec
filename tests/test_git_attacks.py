"""Nothing that a received repository says runs a program or waits for one, whichever question git is asked about it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from places import SUPPORT
from running import gpubench

from gpubench import git
from gpubench.errors import UsageError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def _words(text: str) -> list[str]:
    return text.split()


PROGRAMS = _words("""
    alias.status alias.rev-parse browser.b.cmd browser.b.path core.alternateRefsCommand core.askPass core.editor
    core.fsmonitor core.gitProxy core.pager core.sshCommand credential.helper diff.external diff.own.command
    diff.own.textconv difftool.t.cmd difftool.t.path filter.own.clean filter.own.process filter.own.smudge
    gpg.openpgp.program gpg.program gpg.ssh.defaultKeyCommand gpg.ssh.program gpg.x509.program guitool.t.cmd
    hook.h.command imap.tunnel instaweb.browser instaweb.httpd interactive.diffFilter lfs.customtransfer.t.path
    lfs.extension.e.clean lfs.extension.e.smudge man.m.cmd man.m.path merge.own.driver mergetool.t.cmd mergetool.t.path
    pager.diff pager.log pager.rev-list pager.status remote.away.receivepack remote.away.uploadpack
    sendemail.aliasesFile sendemail.ccCmd sendemail.smtpServer sendemail.toCmd sequence.editor tar.tar.command
    trailer.t.cmd trailer.t.command uploadpack.packObjectsHook web.browser
""")
"""The keys of git's manual (git-config, gitattributes, git-remote-helpers, git-lfs-config) whose value is a program."""
FILES = ["trace2.eventTarget", "trace2.normalTarget", "trace2.perfTarget"]
"""The keys whose value is a file that git writes."""
HOOKS = _words("""
    fsmonitor-watchman post-checkout post-commit post-index-change pre-auto-gc reference-transaction update
""")
OTHERS = {
    "extensions.partialClone": "away",
    "fetch.bundleURI": "ext::{trap}/fetch.bundleURI",
    "gc.auto": "1",
    "help.autoCorrect": "immediate",
    "hook.h.event": "reference-transaction",
    "log.showSignature": "true",
    "log.mailmap": "true",
    "protocol.allow": "always",
    "protocol.ext.allow": "always",
    "remote.away.promisor": "true",
    "remote.away.url": "{trap}/..",
    "remote.ext.promisor": "true",
    "remote.ext.url": "ext::{trap}/ext",
    "remote.git.promisor": "true",
    "remote.git.url": "git://localhost/x",
    "remote.ssh.promisor": "true",
    "remote.ssh.url": "ssh://localhost/x",
    "remote.vcs.promisor": "true",
    "remote.vcs.url": "{trap}/vcs",
    "remote.vcs.vcs": "ext",
    "status.submoduleSummary": "true",
    "diff.submodule": "diff",
    "submodule.part.update": "!{trap}/submodule.part.update",
    "submodule.recurse": "true",
}
RUN_BY_GIT = {
    "core.fsmonitor", "core.gitProxy", "core.sshCommand", "diff.own.command", "diff.own.textconv", "ext",
    "filter.own.process", "gpg.program", "lfs.extension.e.clean", "remote.away.uploadpack", "vcs",
}  # fmt: skip
"""What git itself runs, with no more than `status`, `diff` and `log`, in the repository that is made here."""
UNSIGNED = "tree {tree}\n{parent}author A <a@example.org> 1 +0000\ncommitter A <a@example.org> 1 +0000\n"
SIGNATURE = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n iQ==\n -----END PGP SIGNATURE-----\n"


def plain(folder: Path, *arguments: str, given: str = "", check: bool = True) -> str:
    """Runs git as a user does who trusts the repository, but for its hooks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "core.hooksPath=/dev/null"]
    words = ["git", *identity, *arguments]
    done = subprocess.run(words, cwd=folder, env=clean, input=given, capture_output=True, text=True, check=check)
    return done.stdout.strip()


def committed(folder: Path, message: str) -> str:
    """Commits everything in a folder, with a signature."""
    plain(folder, "add", ".")
    parent = plain(folder, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    head = UNSIGNED.format(tree=plain(folder, "write-tree"), parent=f"parent {parent}\n" if parent else "")
    said = f"{head}{SIGNATURE}\n{message}\n"
    new = plain(folder, "hash-object", "-t", "commit", "-w", "--stdin", given=said)
    plain(folder, "update-ref", "HEAD", new)
    return new


def without_object(folder: Path, name: str) -> None:
    """Removes an object that git knows by a name, as in a partial clone."""
    digest = plain(folder, "rev-parse", name)
    (folder / ".git" / "objects" / digest[:2] / digest[2:]).unlink()


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".gitconfig").write_text(GIT_LFS)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


GIT_LFS = """[filter "lfs"]\n\tclean = "sh -c '$(git config lfs.extension.e.clean || echo true); cat'"\n"""
"""A filter of the user that reads the configuration of the repository, as Git LFS does."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits, both signed, a submodule, and a changed file of each."""
    whole = tmp_path / "whole"
    for folder in (whole / "part", whole):
        folder.mkdir(parents=True, exist_ok=True)
        plain(folder, "init", "--quiet", "--initial-branch", "topic")
        (folder / ".gitattributes").write_text("*.py filter=own diff=own merge=own\n*.bin filter=lfs\n")
        (folder / "data.bin").write_text("data")
        for text in ("first", "second"):
            (folder / "train.py").write_text(f"print({text!r})\n")
            committed(folder, text)
    return whole


def plant(repository: Path, tmp_path: Path) -> tuple[Path, Callable[[], set[str]]]:
    """Puts every attack into a repository and its submodule. Returns their folder, and what asks which have run."""
    trap, ran = tmp_path / "trap", tmp_path / "ran"
    trap.mkdir()
    for name in (*PROGRAMS, *HOOKS, *OTHERS, "ext", "vcs", "fetch.bundleURI"):
        file = trap / name
        file.write_text(f"#!/bin/sh\necho '{name}' >> {ran}\nexit 1\n")
        file.chmod(0o755)
    values = {key: f"{trap}/{key}" for key in PROGRAMS} | {key: f"{ran}-{key}" for key in FILES}
    values |= {key: value.format(trap=trap) for key, value in OTHERS.items()}
    for folder in (repository, repository / "part"):
        for name in HOOKS:
            shutil.copy(trap / name, folder / ".git" / "hooks" / name)
        text = "".join(_lines(key, value) for key, value in values.items())
        (folder / ".git" / "more").write_text(text)
        (folder / ".git" / "config.worktree").write_text(text)
        text = f'[include]\n\tpath = more\n[includeIf "gitdir:**"]\n\tpath = more\n{text}'
        with (folder / ".git" / "config").open("a") as configuration:
            configuration.write(f"[extensions]\n\tworktreeConfig = true\n[core]\n\trepositoryFormatVersion = 1\n{text}")
        (folder / "train.py").write_text("print('edited')\n")
        os.utime(folder / "data.bin", (1, 1))
    (repository / ".gitmodules").write_text("")

    def found() -> set[str]:
        said = set(ran.read_text().split()) if ran.exists() else set()
        return said | {path.name.removeprefix("ran-") for path in tmp_path.glob("ran-*")}

    return trap, found


def _lines(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    section, _, part = section.partition(".")
    head = f'[{section} "{part}"]' if part else f"[{section}]"
    return f'{head}\n\t{name} = "{value}"\n'


def ask_everything(folder: Path, copies: Path) -> None:
    """Asks about a repository all that can be asked, and makes a copy of each of its commits."""
    git.state(folder)
    git.edit(folder)
    git.is_at("HEAD", folder)
    git.is_commit(folder, "topic")
    for ref in ("HEAD", "HEAD~1", "topic~9", "0" * 40, "absent"):
        git.changes_since(ref, folder)
        with suppress(UsageError):
            git.commit(folder, ref)
        with suppress(UsageError):
            git.check_out(ref, folder, copies / f"{len(list(copies.iterdir()))}")
    with suppress(UsageError):
        git.is_tracked(folder, folder / "train.py")


@pytest.mark.parametrize("missing", [None, "HEAD:train.py", "HEAD~1:train.py", "HEAD^{tree}", "HEAD"])
def test_no_key_of_a_repository_and_no_hook_runs_anything(
    repository: Path, tmp_path: Path, missing: str | None
) -> None:
    if missing:
        without_object(repository, missing)
    _, ran = plant(repository, tmp_path)
    (tmp_path / "copies").mkdir()
    for folder in (repository, repository / "part"):
        ask_everything(folder, tmp_path / "copies")
    assert ran() == set()


def test_git_itself_runs_what_is_planted(repository: Path, tmp_path: Path) -> None:
    without_object(repository, "HEAD~1:train.py")
    _, ran = plant(repository, tmp_path)
    unfiltered = "-c filter.own.process= diff"  # git ends if that program does not answer
    for words in (
        "diff HEAD",
        "status",
        f"{unfiltered} HEAD",
        f"{unfiltered} --no-ext-diff HEAD",
        "log -1",
        "show HEAD~1:train.py",
    ):
        plain(repository, *words.split(), check=False)
    assert ran() >= RUN_BY_GIT


@pytest.mark.parametrize("command", ["train-bench", "train-bench --vs-ref HEAD~1", "judge --base HEAD~1 --rounds 3"])
def test_no_command_runs_anything_of_the_repository_of_its_program(
    repository: Path, tmp_path: Path, command: str
) -> None:
    (repository / "train.py").write_bytes((SUPPORT / "training_program.py").read_bytes())
    (repository / "more.py").write_text("")
    for text in ("", "# changed\n"):
        (repository / "more.py").write_text(text)
        committed(repository, text)
    _, ran = plant(repository, tmp_path)
    shutil.copy(SUPPORT / "training_program.py", repository / "train.py")
    name, *options = command.split()
    options += ["--steps", "12", "--training.warmup_steps", "2", "-q", "--", sys.executable, "train.py", "500", "0"]
    done = gpubench(name, *options, results=tmp_path / "results", cwd=repository)
    assert done.code in (0, 3, 4), done
    assert [json.loads((run / "run.json").read_text())["git"]["dirty"] for run in done.runs][-1]
    assert ran() == set()


@pytest.mark.parametrize("place", ["include", "config.worktree", "alternates", "info/attributes", "commit-graph"])
def test_no_pipe_in_place_of_a_file_of_git_blocks(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    own = repository / ".git"
    where = {"include": "pipe", "alternates": "objects/info/alternates", "commit-graph": "objects/info/commit-graph"}
    pipe = own / where.get(place, place)
    pipe.parent.mkdir(exist_ok=True)
    with (own / "config").open("a") as file:
        file.write("[extensions]\n\tworktreeConfig = true\n" + "[include]\n\tpath = pipe\n" * (place == "include"))
    os.mkfifo(pipe)
    (repository / "train.py").write_text("print('edited')\n")
    monkeypatch.setattr(git, "TIMEOUT", 0.2)
    monkeypatch.setattr(git, "PATIENCE", 0.5)
    assert git.state(repository) is None
    assert git.edit(repository) is None
    if place != "info/attributes":  # which a copy does not have
        with pytest.raises(UsageError, match="git has not answered in time") as refused:
            git.check_out("HEAD", repository, tmp_path / "copy")
        assert "pipe" in str(refused.value.hint)
    assert not [each for each in psutil.Process().children(recursive=True) if each.name() == "git"]


def test_a_pipe_in_place_of_an_object_is_refused_before_files_are_written(repository: Path, tmp_path: Path) -> None:
    borrowing = tmp_path / "borrowing \u00e4"
    plain(tmp_path, "clone", "--quiet", "--shared", str(repository), str(borrowing))
    digest = plain(repository, "rev-parse", "HEAD~1:train.py")
    pipe = repository / ".git" / "objects" / digest[:2] / digest[2:]
    pipe.unlink()
    os.mkfifo(pipe)
    for folder in (repository, borrowing):
        with pytest.raises(UsageError, match=f"{digest[2:]} is no file"):
            git.check_out("HEAD~1", folder, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_at_the_time_limit_all_that_git_has_started_ends(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(git, "TIMEOUT", 2.0)
    assert git.state(repository) is None
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
