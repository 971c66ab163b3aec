"""Runs git on the repository of a folder: what it has checked out, and a copy of one of its commits.

Nothing here changes that repository or runs its hooks. Git's own variables, which hooks, `git rebase --exec` and
aliases set, would name another repository or another index than those of the folder. They are removed.
"""

import hashlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpubench.errors import FEW, UsageError, alike, offer

LONGEST_SUBJECT = 100
"""The characters of a commit's subject that are kept."""
TIMEOUT = 2.0
"""The seconds that `state` waits for git."""
DIGITS = 12
"""The length of the digest of an edit."""
LOCAL = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_PARAMETERS",
        "GIT_DIR",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_INTERNAL_SUPER_PREFIX",
        "GIT_NAMESPACE",
        "GIT_NO_REPLACE_OBJECTS",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_QUARANTINE_PATH",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    }
)
"""The variables that belong to one repository: those of `git rev-parse --local-env-vars`, and two of git's server."""
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",  # nothing is written into the user's repository
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "LANGUAGE": "C",  # the messages are read
}
_HARMLESS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "submodule.recurse=false", "advice.detachedHead=false")
"""The configuration of every call: no hook of the user runs, nor a monitor of the file system, which is a hook too."""


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables without those that belong to one repository."""
    return {name: value for name, value in given.items() if name not in LOCAL}


def state(folder: Path, seconds: float = TIMEOUT) -> dict[str, Any] | None:
    """The `commit`, its `subject` and the `branch` that `folder` has checked out, and whether tracked files differ
    (`dirty`).

    Before the first commit there is no `commit`, on a detached HEAD no `branch`. Untracked files do not count, as in
    `git describe --dirty`, because results and scratch files are not part of the code. A file with a filter of the
    repository's own configuration differs if its time has changed. Files of submodules count. None if `folder` is in no
    repository, git is missing, or git takes longer than `seconds`.
    """
    end = time.monotonic() + seconds
    try:
        command = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
        status = _run(folder, *command, timeout=seconds, settings=_without_own_filters(folder))
        submodules = _submodules(folder)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.decode(errors="replace").splitlines()
    headers = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    commit, branch = headers.get("oid"), headers.get("head")
    found: dict[str, Any] = {"dirty": any(not line.startswith("#") for line in lines)}
    for submodule in submodules if not found["dirty"] else ():
        within = state(submodule, end - time.monotonic())
        if within is None:
            return None
        found["dirty"] = found["dirty"] or within["dirty"]
    if commit and commit != "(initial)":
        found["commit"] = commit
        with suppress(OSError, subprocess.SubprocessError):
            said = _run(folder, "log", "-1", "--format=%s", commit, timeout=max(0.1, end - time.monotonic()))
            found["subject"] = said.decode(errors="replace").strip()[:LONGEST_SUBJECT]
    if branch and branch != "(detached)":
        found["branch"] = branch
    return found


def changes_since(ref: str, folder: Path) -> str:
    """How the tracked files below `folder` differ from a commit, such as "1 file changed, 2 insertions(+)".

    "" if they do not differ, or if git does not say.
    """
    try:
        command = ("diff", "--shortstat", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
        filters = _without_own_filters(folder)
        found = _run(folder, *command, "--end-of-options", ref, "--", ".", timeout=TIMEOUT, settings=filters)
        return found.decode().strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def edit(folder: Path) -> str | None:
    """Returns a digest of what the tracked files have beyond the commit that is checked out; "" if they are the same.

    Returns None if git does not say.
    """
    try:
        command = ("diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
        found = _run(folder, *command, timeout=TIMEOUT, settings=_without_own_filters(folder))
    except (OSError, subprocess.SubprocessError):
        return None
    return hashlib.sha256(found).hexdigest()[:DIGITS] if found else ""


def _submodules(folder: Path) -> list[Path]:
    """The submodules that are checked out in the repository of a folder.

    `git status` would look for changed files in them with the filters of their own configurations.
    """
    top = Path(os.fsdecode(_run(folder, "rev-parse", "--show-toplevel", timeout=TIMEOUT).removesuffix(b"\n")))
    if not os.path.lexists(top / ".gitmodules"):
        return []
    entries = _run(top, "ls-files", "--stage", "-z", timeout=TIMEOUT).split(b"\0")
    paths = [top / os.fsdecode(entry.partition(b"\t")[2]) for entry in entries if entry.startswith(b"160000 ")]
    return [path for path in paths if os.path.lexists(path / ".git")]


def _without_own_filters(folder: Path) -> list[str]:
    """The configuration with which git runs no filter that the repository's own configuration defines.

    To compare a file whose time has changed, git runs its filter, which is a command. That of a repository from
    somebody else may be any. Raises CalledProcessError for one that cannot be named on a command line.
    """
    found = set[str]()
    for place in ("--local", "--worktree"):
        command = ("config", place, "--includes", "--null", "--name-only", "--get-regexp", r"^filter\.")
        with suppress(subprocess.CalledProcessError):  # it has none
            keys = os.fsdecode(_run(folder, *command, timeout=TIMEOUT)).split("\0")
            found |= {key.removeprefix("filter.").rpartition(".")[0] for key in keys if key}
    if any("=" in name for name in found):
        raise subprocess.CalledProcessError(1, "git", stderr=b"a filter has '=' in its name")
    return [f"filter.{name}.{off}" for name in sorted(found) for off in ("clean=", "process=", "required=false")]


def check_out(ref: str, folder: Path, copy: Path) -> tuple[Path, Path]:
    """Makes a copy of the repository that `folder` is in, at the commit `ref`, in the empty folder `copy`.

    Returns the top folder of the working tree, and the counterpart of `folder` in the copy. The copy is a clone, which,
    unlike a worktree, leaves nothing in the user's repository. It reads the objects there. Its files pass the filters
    of the user's own configuration, such as those of Git LFS, as in any other clone. Raises UsageError with git's
    reason.
    """
    top = _path(folder, "rev-parse", "--show-toplevel")
    commit_hash = commit(folder, ref)
    repository = folder / _path(folder, "rev-parse", "--git-common-dir")
    # without a template the copy has no hook either
    cloning = ("clone", "--quiet", "--shared", "--no-checkout", "--no-recurse-submodules", "--template=")
    _said(folder, *cloning, "--", str(repository.absolute()), str(copy.absolute()))
    _said(copy, "checkout", "--quiet", "--detach", commit_hash)
    if missing := _said(copy, "ls-files", "--deleted"):  # git reports them, and exits with 0
        name = os.fsdecode(missing.partition(b"\n")[0])
        raise UsageError(
            f"the repository does not have all files of commit {ref}, such as {name}",
            f"it is a partial clone: let git fetch them, for example by git archive {ref} > /dev/null",
        )
    if (copy / ".gitmodules").exists():
        raise UsageError(
            f"--vs-ref {ref} has submodules, which are not checked out", "clone it yourself, and use compare"
        )
    there = copy / os.path.relpath(folder.resolve(), top.resolve())
    if not there.is_dir():
        raise UsageError(f"commit {ref} has no directory {there.relative_to(copy)}", "name a commit that has it")
    return top, there


def is_at(ref: str, folder: Path) -> bool:
    """Whether `folder` has the commit `ref` checked out and no tracked file differs; False if it is unknown."""
    found = state(folder)
    if found is None or found["dirty"]:
        return False
    try:
        return found.get("commit") == commit(folder, ref)
    except UsageError:
        return False


def commit(folder: Path, ref: str) -> str:
    """The hash of a commit in the repository of a folder.

    Raises UsageError with git's reason, and with the nearest branches and tags if there is no such commit.
    """
    _path(folder, "rev-parse", "--show-toplevel")
    try:
        return (
            _run(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}").decode().strip()
        )
    except subprocess.CalledProcessError:
        raise _no_commit(folder, ref) from None


def _no_commit(folder: Path, ref: str) -> UsageError:
    """Says that a repository does not have a commit, and which it has that may be meant."""
    place = folder.absolute()
    named = _said(folder, "for-each-ref", "--format=%(refname:short)", "--sort=-creatordate").decode(errors="replace")
    names = named.splitlines()
    has_head = is_commit(folder, "HEAD")
    if not (names or has_head):
        return UsageError(
            f"the repository of {place} has no commit yet",
            "commit the version to compare with, and edit it after that: git add FILES && git commit",
        )
    known = ["HEAD"] * has_head + names
    name, sign, back = ref.partition("~") if "~" in ref else ref.partition("^")
    if sign and name in known:
        hint = f"{name} has not as many commits before it: git log --oneline {name} lists them"
        if _said(folder, "rev-parse", "--is-shallow-repository") == b"true":
            hint = "the clone is shallow, and lacks older commits: git fetch --unshallow"
    else:
        near = offer([f"{one}{sign}{back}" for one in alike(name, known, most=3)])
        hint = near or f"its branches and tags are {listed(names)}"
        if name == "HEAD":
            hint = f"the branch that is checked out has no commit yet; others are {listed(names)}"
    return UsageError(f"there is no commit {ref!r} in the repository of {place}", hint)


def repository(folder: Path) -> Path | None:
    """Returns the working tree that a folder is in, found without git; None if it is in none."""
    here = folder.absolute()
    return next((one for one in (here, *here.parents) if os.path.lexists(one / ".git")), None)


def is_commit(folder: Path, name: str) -> bool:
    """Whether a branch, a tag or another name stands for a commit of the repository of a folder."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        return bool(_run(folder, *command, timeout=TIMEOUT))
    return False


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (", ..., as git branch --all and git tag list them" if len(names) > FEW else "")


def is_tracked(top: Path, file: Path) -> bool:
    """Whether a file is in the index of the working tree `top`. Raises UsageError with git's reason."""
    return bool(_said(top, "ls-files", "--", str(file)))


def _path(folder: Path, *arguments: str) -> Path:
    """The path that git prints. Its name may have any bytes."""
    return Path(os.fsdecode(_said(folder, *arguments)))


def _said(folder: Path, *arguments: str) -> bytes:
    """What git prints, without the end of the last line. Raises UsageError with git's reason."""
    try:
        return _run(folder, *arguments).removesuffix(b"\n")
    except FileNotFoundError:
        raise UsageError("git is not installed", "install it, or measure both versions and use compare") from None
    except subprocess.CalledProcessError as error:
        reason = _reason(os.fsdecode(error.stderr))
        raise UsageError(f"the program cannot be checked out: {reason}", _hint(reason)) from None


def _run(folder: Path, *arguments: str, timeout: float | None = None, settings: Sequence[str] = ()) -> bytes:
    """Runs git in a folder and returns what it prints. Nothing else in this package may run git.

    `settings` are more of its configuration, as NAME=VALUE.
    """
    options = [word for setting in (*_HARMLESS, *settings) for word in ("-c", setting)]
    return subprocess.run(
        ["git", *options, "-C", str(folder), *arguments],
        env=variables(os.environ) | _QUIET,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        check=True,
    ).stdout


def _reason(errors: str) -> str:
    lines = errors.strip().splitlines() or ["there is no such commit"]
    return next((line for line in lines if line.startswith("fatal: ")), lines[-1]).removeprefix("fatal: ")


def _hint(reason: str) -> str:
    if "dubious ownership" in reason:
        return "the repository is another user's; if you trust it: git config --global --add safe.directory FOLDER"
    if "not a git repository" in reason:
        named = next((name for name in ("GIT_DIR", "GIT_WORK_TREE") if name in os.environ), None)
        unused = f"{named} is set, and is not used: " if named else ""
        return (
            f"{unused}start gpubench in the working tree of the repository, or give its --program.directory; without "
            "git, measure one version after the other, and then: gpubench compare latest~1 latest"
        )
    if "must be run in a work tree" in reason:
        return "the folder is in a bare repository or in .git: start gpubench in a working tree"
    return "name a commit of its repository"
