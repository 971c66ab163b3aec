"""Runs git on the repository of a folder: what it has checked out, and a copy of one of its commits.

A repository may come from somebody else, and many keys of its configuration name programs, which git runs as it looks
for changes, shows a signature or lacks an object. Git therefore reads another configuration in place of it, which has
those keys alone that say how the repository is stored (`_STORAGE`), and no hooks. It fetches nothing, and at the time
limit all that it has started ends.

Nothing here changes that repository. Git's own variables, which hooks, `git rebase --exec` and aliases set, would name
another repository or another index than those of the folder. They are removed.
"""

import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import FEW, UsageError, alike, offer
from gpubench.temporary import OwnedFolder

LONGEST_SUBJECT = 100
"""The characters of a commit's subject that are kept."""
TIMEOUT = 2.0
"""The seconds in which git is to say what is checked out; if it does not, that is unknown."""
PATIENCE = 30.0
"""The seconds in which git is to answer what a command depends on."""
LONGEST_CHECK_OUT = 600.0
"""The seconds in which git is to write the files of a commit, which a filter such as Git LFS may have to fetch."""
SLOW = "it may wait for a file of the repository that is a pipe, or for a slow disk: try git status there"
"""The hint if git has not answered in time."""
DIGITS = 12
"""The length of the digest of an edit."""
MOST_SHALLOW = 2**24
"""The largest size of the file with the oldest commits of a shallow clone."""
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
    "GIT_NO_LAZY_FETCH": "1",  # what a partial clone lacks stays unknown
    "GIT_ALLOW_PROTOCOL": "",  # the same for releases of git that do not know it
    "LANGUAGE": "C",  # the messages are read
}
_HARMLESS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "submodule.recurse=false",
    "advice.detachedHead=false",
    "init.defaultRefFormat=files",
)
"""The configuration of every call: no hook of the user runs, nor a monitor of the file system, which is a hook too."""
_STORAGE = re.compile(
    r"core\.(repositoryformatversion|filemode|symlinks|ignorecase|precomposeunicode|trustctime|checkstat"
    r"|autocrlf|eol|sparsecheckout|sparsecheckoutcone)"
    r"|extensions\.(objectformat|compatobjectformat|refstorage)"
    r"|branch\..+\.(remote|merge)|remote\..+\.fetch"  # for names such as main@{upstream}
)
"""The keys of a repository's own configuration that git reads. None of them names a program, a file or an address that
git uses here."""
_SHARED = ("objects", "refs", "packed-refs", "reftable", "logs", "info", "shallow")
"""What all working trees of a repository have in common, besides its configuration, and is read."""
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables without those that belong to one repository."""
    return {name: value for name, value in given.items() if name not in LOCAL}


def state(folder: Path, seconds: float | None = None) -> dict[str, Any] | None:
    """The `commit`, its `subject` and the `branch` that `folder` has checked out, and whether tracked files differ
    (`dirty`).

    Before the first commit there is no `commit`, on a detached HEAD no `branch`. Untracked files do not count, as in
    `git describe --dirty`, because results and scratch files are not part of the code. A file with a filter of the
    repository's own configuration differs if its time has changed. Files of submodules count. None if `folder` is in no
    repository, git is missing, or git takes longer than `seconds` (default: `TIMEOUT`).
    """
    with suppress(OSError, UsageError), _opened(folder, TIMEOUT if seconds is None else seconds) as repository:
        command = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
        lines = repository.ask(*command).decode(errors="replace").splitlines()
        headers = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
        commit, branch = headers.get("oid"), headers.get("head")
        found: dict[str, Any] = {"dirty": any(not line.startswith("#") for line in lines)}
        for submodule in repository.submodules() if not found["dirty"] else ():
            within = state(submodule, repository.left)
            if within is None:
                return None
            found["dirty"] = found["dirty"] or within["dirty"]
        if commit and commit != "(initial)":
            found["commit"] = commit
            with suppress(UsageError):
                said = repository.ask("rev-list", "--max-count=1", "--format=%s", "--encoding=UTF-8", commit)
                found["subject"] = said.partition(b"\n")[2].decode(errors="replace").strip()[:LONGEST_SUBJECT]
        if branch and branch != "(detached)":
            found["branch"] = branch
        return found
    return None


def changes_since(ref: str, folder: Path) -> str:
    """How the tracked files below `folder` differ from a commit, such as "1 file changed, 2 insertions(+)".

    "" if they do not differ, or if git does not say.
    """
    with suppress(OSError, UsageError), _opened(folder, TIMEOUT) as repository:
        options = ("--shortstat", "--ignore-submodules=all", "--end-of-options", ref, "--", ".")
        return repository.ask(*_DIFF, *options).decode().strip()
    return ""


def edit(folder: Path, seconds: float | None = None) -> str | None:
    """Returns a digest of what the tracked files have beyond the commit that is checked out; "" if they are the same.

    Returns None if git does not say within `seconds` (default: `TIMEOUT`).
    """
    with suppress(OSError, UsageError), _opened(folder, TIMEOUT if seconds is None else seconds) as repository:
        found = repository.ask(*_DIFF, "--binary", "--ignore-submodules=dirty", "HEAD")
        for submodule in repository.submodules():
            within = edit(submodule, repository.left)
            if within is None:
                return None
            found += os.fsencode(f"{os.path.relpath(submodule, repository.top)} {within}\n") if within else b""
        return hashlib.sha256(found).hexdigest()[:DIGITS] if found else ""
    return None


def check_out(ref: str, folder: Path, copy: Path) -> tuple[Path, Path]:
    """Makes a copy of the repository that `folder` is in, at the commit `ref`, in the empty folder `copy`.

    Returns the top folder of the working tree, and the counterpart of `folder` in the copy. The copy is a repository of
    its own, which, unlike a worktree, leaves nothing in the user's. It reads the objects there. Its files pass the
    filters of the user's own configuration, such as those of Git LFS, as in any clone. Raises UsageError with git's
    reason.
    """
    with _opened(folder, PATIENCE) as repository:
        commit_hash = repository.commit(ref)
        top = repository.top
        repository.refuse_pipes()
        _branch_off(repository, copy)
    _run("-C", str(copy), "checkout", "--quiet", "--detach", commit_hash, seconds=LONGEST_CHECK_OUT)
    if missing := _run(
        "-C", str(copy), "ls-files", "--deleted", seconds=PATIENCE
    ):  # git reports them, and exits with 0
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


def _branch_off(repository: "_Repository", copy: Path) -> None:
    """Makes a repository in `copy` that has the branches and tags of another one, as a clone has them.

    `git clone` would start git in the other repository, with its configuration.
    """
    _run(
        "init",
        "--quiet",
        "--template=",
        f"--object-format={repository.hashes}",
        "--",
        str(copy.absolute()),
        seconds=PATIENCE,
    )
    own = copy / ".git"
    (own / "objects" / "info").mkdir(exist_ok=True)
    (own / "objects" / "info" / "alternates").write_bytes(os.fsencode(repository.common / "objects") + b"\n")
    refs = repository.ask("for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/tags")
    if refs:
        (own / "packed-refs").write_bytes(refs.replace(b" refs/heads/", b" refs/remotes/origin/") + b"\n")
    if (repository.common / "shallow").is_file():
        (own / "shallow").write_bytes(foreign_files.content(repository.common / "shallow", MOST_SHALLOW))
    _run("-C", str(copy), "config", "remote.origin.url", str(repository.common), seconds=PATIENCE)


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
    with _opened(folder, PATIENCE) as repository:
        return repository.commit(ref)


def is_commit(folder: Path, name: str) -> bool:
    """Whether a branch, a tag or another name stands for a commit of the repository of a folder."""
    with suppress(OSError, UsageError), _opened(folder, TIMEOUT) as repository:
        return bool(repository.hash_of(name))
    return False


def is_tracked(folder: Path, file: Path) -> bool:
    """Whether a file is in the index of the repository of a folder. Raises UsageError with git's reason."""
    with _opened(folder, PATIENCE) as repository:
        return bool(repository.ask("ls-files", "--", str(file)))


def repository(folder: Path) -> Path | None:
    """Returns the working tree that a folder is in, found without git; None if it is in none."""
    here = folder.absolute()
    return next((one for one in (here, *here.parents) if os.path.lexists(one / ".git")), None)


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (", ..., as git branch --all and git tag list them" if len(names) > FEW else "")


@dataclass(frozen=True)
class _Repository:
    """The repository of a folder, as git reads it with the configuration that `_opened` has made for it."""

    folder: Path
    top: Path
    """The top folder of the working tree."""
    common: Path
    """The folder with what all working trees of the repository have in common, such as its objects."""
    hashes: str
    """The name of the function that computes the names of its objects."""
    places: Mapping[str, str]
    """The environment variables that lead git to it."""
    until: float

    @property
    def left(self) -> float:
        """The seconds that are left for further questions."""
        return self.until - time.monotonic()

    def ask(self, *words: str) -> bytes:
        """What git prints, without the end of the last line. Raises UsageError with git's reason."""
        return _run("-C", str(self.folder), *words, seconds=self.left, places=self.places).removesuffix(b"\n")

    def hash_of(self, name: str) -> str:
        """The hash of the commit that a name stands for; "" if there is none."""
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        said = _run("-C", str(self.folder), *words, seconds=self.left, places=self.places, may_fail=True)
        return said.decode().strip()

    def commit(self, ref: str) -> str:
        if found := self.hash_of(ref):
            return found
        raise self._no_commit(ref)

    def submodules(self) -> list[Path]:
        """The submodules that are checked out.

        `git status` would look for changed files in them with their own configurations.
        """
        if not os.path.lexists(self.top / ".gitmodules"):
            return []
        words = ("-C", str(self.top), "ls-files", "--stage", "-z")
        entries = _run(*words, seconds=self.left, places=self.places).split(b"\0")
        paths = [self.top / os.fsdecode(entry.partition(b"\t")[2]) for entry in entries if entry.startswith(b"160000 ")]
        return [path for path in paths if os.path.lexists(path / ".git")]

    def refuse_pipes(self) -> None:
        """Raises UsageError if an object is no file.

        Git would wait for a pipe as long as it may take to write all files. `git count-objects` names the other
        repositories that this one has objects of.
        """
        lines = self.ask("-c", "core.quotePath=false", "count-objects", "-v").splitlines()
        others = [Path(os.fsdecode(line.removeprefix(b"alternate: "))) for line in lines if line.startswith(b"alt")]
        for folder in (found for objects in (self.common / "objects", *others) for found in objects.glob("??")):
            with suppress(OSError), os.scandir(folder) as entries:
                if wrong := next((entry.path for entry in entries if not entry.is_file()), None):
                    raise UsageError(f"{wrong} is no file, but an object of git is", "clone the repository again")

    def _no_commit(self, ref: str) -> UsageError:
        """Says that the repository does not have a commit, and which it has that may be meant."""
        place = self.folder.absolute()
        named = self.ask("for-each-ref", "--format=%(refname:short)", "--sort=-creatordate").decode(errors="replace")
        names = named.splitlines()
        has_head = bool(self.hash_of("HEAD"))
        if not (names or has_head):
            return UsageError(
                f"the repository of {place} has no commit yet",
                "commit the version to compare with, and edit it after that: git add FILES && git commit",
            )
        known = ["HEAD"] * has_head + names
        name, sign, back = ref.partition("~") if "~" in ref else ref.partition("^")
        if sign and name in known:
            hint = f"{name} has not as many commits before it: git log --oneline {name} lists them"
            if self.ask("rev-parse", "--is-shallow-repository") == b"true":
                hint = "the clone is shallow, and lacks older commits: git fetch --unshallow"
        else:
            near = offer([f"{one}{sign}{back}" for one in alike(name, known, most=3)])
            hint = near or f"its branches and tags are {listed(names)}"
            if name == "HEAD":
                hint = f"the branch that is checked out has no commit yet; others are {listed(names)}"
        return UsageError(f"there is no commit {ref!r} in the repository of {place}", hint)


@contextmanager
def _opened(folder: Path, seconds: float) -> Iterator[_Repository]:
    """Finds the repository of a folder, and makes a configuration for it that lasts as long as the context.

    It lies in a folder that takes the place of the repository's common one, and has links to what else is in that. So
    no key of the repository's own configuration acts that is not in `_STORAGE`, whichever keys a release of git knows.
    Raises UsageError with git's reason if `folder` is in no repository, or git does not answer within `seconds`.
    """
    until = time.monotonic() + seconds
    words = ("rev-parse", "--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    # the first question is asked with the repository's own configuration, which this command takes no program from
    said = _run("-C", str(folder), *words, seconds=seconds).removesuffix(b"\n").split(b"\n")
    if len(said) != len(words) - 1:
        raise UsageError(f"the path of the repository of {folder} has a line break", "move it, or use compare")
    top, own, common = (Path(os.path.normpath(folder.resolve() / os.fsdecode(each))) for each in said)
    if not folder.resolve().is_relative_to(top.resolve()):
        raise UsageError(f"{folder} is not below {top}, which its repository names as its files", "see core.worktree")
    with OwnedFolder() as name:
        made = Path(name)
        entries = _entries(common / "config", until)
        if (b"extensions.worktreeconfig", b"true") in entries and os.path.lexists(own / "config.worktree"):
            entries += _entries(own / "config.worktree", until)
        entries = [(key, value) for key, value in entries if _STORAGE.fullmatch(os.fsdecode(key))]
        (made / "config").write_bytes(b"".join(starmap(_entry, entries)))
        for each in _SHARED:
            if os.path.lexists(common / each):
                (made / each).symlink_to(common / each)
        places = {"GIT_DIR": str(own), "GIT_COMMON_DIR": str(made), "GIT_WORK_TREE": str(top)}
        hashes = os.fsdecode(dict(entries).get(b"extensions.objectformat", b"sha1"))
        yield _Repository(folder, top, common, hashes, places, until)


def _entries(file: Path, until: float) -> list[tuple[bytes, bytes]]:
    """The keys of a file of git's configuration and their values, without those of the files that it includes."""
    words = ("config", "--file", str(file), "--no-includes", "--null", "--list")
    found = _run(*words, seconds=until - time.monotonic()).split(b"\0")
    parts = (entry.partition(b"\n") for entry in found if entry)
    return [(key, value if sign else b"true") for key, sign, value in parts]


def _entry(key: bytes, value: bytes) -> bytes:
    """A key with its value, as a file of git's configuration has them."""
    section, _, rest = key.partition(b".")
    part, dot, name = rest.rpartition(b".")
    head = section + (b' "%s"' % _escaped(part) if dot else b"")
    return b'[%s]\n\t%s = "%s"\n' % (head, name, _escaped(value).replace(b"\n", b"\\n"))


def _escaped(text: bytes) -> bytes:
    return text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _run(*words: str, seconds: float, places: Mapping[str, str] | None = None, may_fail: bool = False) -> bytes:
    """Runs git and returns what it prints. Nothing else in this package may run git.

    `places` are the variables that lead it to a repository. Raises UsageError with git's reason if it fails, unless it
    `may_fail`, and if it takes longer than `seconds`; all that it has started is ended then.
    """
    options = [word for setting in _HARMLESS for word in ("-c", setting)]
    try:
        process = subprocess.Popen(
            ["git", *options, *words],
            env=variables(os.environ) | _QUIET | dict(places or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its children are known by it
        )
    except FileNotFoundError:
        raise UsageError("git is not installed", "install it, or measure both versions and use compare") from None
    try:
        said, errors = process.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        raise UsageError("git has not answered in time", SLOW) from None
    finally:
        if process.returncode is None:
            _end(process)
    if process.returncode and not may_fail:
        reason = _reason(os.fsdecode(errors))
        raise UsageError(f"the program cannot be checked out: {reason}", _hint(reason))
    return said


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a git that has not ended, with its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        assert stream
        stream.close()
    with suppress(subprocess.TimeoutExpired):  # a file system that does not answer keeps it
        process.wait(TIMEOUT)


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
