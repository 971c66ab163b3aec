"""Which code was measured: the state of the git working tree that a run was started in."""

import os
import subprocess
from pathlib import Path
from typing import Any

GIT_TIMEOUT = 2.0


def git_state(path: Path) -> dict[str, Any] | None:
    """The `commit` and `branch` that `path` has checked out, and whether tracked files differ from it (`dirty`).

    Before the first commit there is no `commit`; on a detached HEAD no `branch`. Untracked files do not count, as in
    `git describe --dirty`: results and scratch files are no part of the code. None where `path` is in no repository,
    git is missing, or it does not answer within two seconds.
    """
    try:
        status = subprocess.run(
            ["git", "-C", str(path), "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # a benchmark must not write to the user's repository
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.stdout.splitlines()
    headers = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    commit, branch = headers.get("oid"), headers.get("head")
    state: dict[str, Any] = {"dirty": any(not line.startswith("#") for line in lines)}
    if commit and commit != "(initial)":
        state["commit"] = commit
    if branch and branch != "(detached)":
        state["branch"] = branch
    return state
