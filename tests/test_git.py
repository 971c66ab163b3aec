"""Git is run on the user's repository without a change to it, whatever the environment of git says."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from gpubench import events, git
from gpubench.commands.variants import Versus, without_change
from gpubench.errors import UsageError
from gpubench.registry import PROGRAM, kind_of
from gpubench.runs.directory import write_document
from gpubench.settings.loading import load
from gpubench.settings.programs import ProgramSettings

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def run(folder: Path, *arguments: str) -> bytes:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, env=clean, capture_output=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two commits, a staged change, another one, and a stash."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "deep").mkdir()
    run(folder, "init", "--quiet", "--initial-branch", "topic")
    for text in ("first", "second"):
        (folder / "deep" / "train.py").write_text(text)
        run(folder, "add", ".")
        run(folder, "commit", "--quiet", "--message", text)
    (folder / "deep" / "train.py").write_text("stashed")
    run(folder, "stash")
    (folder / "staged.py").write_text("staged")
    run(folder, "add", "staged.py")
    (folder / "deep" / "train.py").write_text("changed")
    return folder


@pytest.fixture
def repository(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "own"))


def content(folder: Path) -> dict[str, object]:
    """Returns every file below a folder; in .git also the times, which tell whether one was written at all."""
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_all_variables_of_one_repository_are_known() -> None:
    assert set(run(Path(), "rev-parse", "--local-env-vars").decode().split()) <= git.LOCAL


def test_git_is_run_in_one_place() -> None:
    package = Path(git.__file__).parent
    assert [path.name for path in package.rglob("*.py") if '"git",' in path.read_text()] == ["git.py"]


IN_A_HOOK: list[Mapping[str, str]] = [
    {"GIT_DIR": "{own}/.git"},
    {"GIT_DIR": "{own}/.git", "GIT_WORK_TREE": "{own}", "GIT_PREFIX": "deep/", "GIT_REFLOG_ACTION": "rebase"},
    {"GIT_DIR": "{other}/.git", "GIT_INDEX_FILE": "{other}/.git/index", "GIT_COMMON_DIR": "{other}/.git"},
    {
        "GIT_INDEX_FILE": ".git/index",
        "GIT_EDITOR": ":",
        "GIT_CONFIG_PARAMETERS": "'core.bare'='true'",
        "GIT_TRACE": "1",
    },
    {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.worktree", "GIT_CONFIG_VALUE_0": "{other}"},
    {"GIT_QUARANTINE_PATH": "{own}/.git/objects/incoming", "GIT_NAMESPACE": "n", "GIT_WORK_TREE": "{other}"},
]


def subject(repository: Path, ref: str) -> str:
    return run(repository, "log", "-1", "--format=%s", ref).decode()


@pytest.mark.parametrize("variables", IN_A_HOOK, ids=" ".join)
def test_the_copy_of_a_commit_leaves_the_repository_as_it_is(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    other = Path(shutil.copytree(repository, tmp_path / "other"))
    before = content(repository), content(other)
    monkeypatch.chdir(repository)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(own=repository, other=other))
    top, there = git.check_out("HEAD~1", Path("deep"), tmp_path / "copy")
    assert (top, there) == (repository, tmp_path / "copy" / "deep")
    assert (there / "train.py").read_text() == "first"
    assert git.is_tracked(top, repository / "staged.py")
    found = git.state(Path())
    commits = [(run(repository, "rev-parse", ref).decode(), subject(repository, ref)) for ref in ("topic", "topic~1")]
    now, then = ({"commit": commit, "subject": said} for commit, said in commits)
    assert found == now | {"branch": "topic", "dirty": True}
    assert git.state(there) == then | {"dirty": False}
    assert git.changes_since("HEAD~1", Path()).startswith("2 files changed, 2 insertions(+)")
    assert git.changes_since("nothing", Path()) == ""
    assert (content(repository), content(other)) == before


def test_a_program_in_the_copy_does_not_see_the_repository_of_a_hook() -> None:
    hooked = {"GIT_DIR": "/own/.git", "GIT_INDEX_FILE": "/own/.git/index", "GIT_SSH_COMMAND": "ssh", "PATH": "/bin"}
    assert git.variables(hooked) == {"GIT_SSH_COMMAND": "ssh", "PATH": "/bin"}


def test_the_working_trees_of_a_repository_are_copied_in_the_same_way(repository: Path, tmp_path: Path) -> None:
    linked, bare, outer = (
        tmp_path / "linked",
        tmp_path / "bare.git",
        Path(shutil.copytree(repository, tmp_path / "outer")),
    )
    run(repository, "worktree", "add", "--quiet", "--detach", str(linked), "HEAD~1")
    run(tmp_path, "clone", "--quiet", "--bare", str(repository), str(bare))
    run(bare, "worktree", "add", "--quiet", str(tmp_path / "of_bare"), "topic")
    run(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(repository), "inner")
    for number, folder in enumerate([linked, tmp_path / "of_bare", outer / "inner"]):
        before = content(repository / ".git"), content(bare), content(outer / ".git"), content(folder)
        top, there = git.check_out("HEAD", folder / "deep", tmp_path / f"copy{number}")
        assert top == folder
        assert (there / "train.py").read_text() == ("first" if folder == linked else "second")
        assert (content(repository / ".git"), content(bare), content(outer / ".git"), content(folder)) == before


@pytest.mark.parametrize("name", [b"na\xefve ", b"-c"], ids=repr)
def test_a_folder_may_have_any_name(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes) -> None:
    repository = Path(shutil.copytree(source, tmp_path / os.fsdecode(name)))
    (repository / os.fsdecode(b"\xff.py")).write_text("")
    monkeypatch.chdir(repository.parent)
    top, there = git.check_out("HEAD", Path(repository.name, "deep"), tmp_path / "copy")
    assert top == repository
    assert (there / "train.py").read_text() == "second"
    assert (git.state(Path(repository.name)) or {})["dirty"]


def test_an_event_and_a_document_may_name_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    told = events.Failed(
        rank=0,
        kind="DataError",
        message="\udcff.png is no image",
        hint=None,
        traceback=None,
        doing="",
        step=None,
        secondary=False,
    )
    assert events.decode(events.encode(told)) == msgspec.structs.replace(told, message=r"\udcff.png is no image")
    write_document(tmp_path / "run.json", {"argv": ["\udcff"]})
    assert msgspec.json.decode((tmp_path / "run.json").read_bytes()) == {"argv": ["\\udcff"]}


def test_no_hook_runs_and_no_monitor(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, templates = tmp_path / "hooks", tmp_path / "templates" / "hooks"
    templates.mkdir(parents=True)
    hooks.mkdir()
    trap = f"#!/bin/sh\necho $0 >> {tmp_path}/ran\n"
    names = ["post-checkout", "reference-transaction", "post-index-change", "fsmonitor", "pre-auto-gc"]
    for place in (hooks, templates, repository / ".git" / "hooks"):
        for name in names:
            (place / name).write_text(trap)
            (place / name).chmod(0o755)
    run(repository, "config", "core.fsmonitor", str(hooks / "fsmonitor"))
    run(repository, "config", "filter.own.smudge", str(hooks / "fsmonitor"))
    (tmp_path / "home" / ".gitconfig").write_text(
        f"[core]\nhooksPath = {hooks}\nfsmonitor = {hooks}/fsmonitor\n[init]\ntemplateDir = {tmp_path}/templates\n"
    )
    (repository / ".gitattributes").write_text("*.py filter=own\n*.txt filter=other\n")
    (repository / "words.txt").write_text("words")
    run(
        repository, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "add", ".gitattributes", "words.txt"
    )
    run(repository, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "commit", "-qm", "filtered")
    run(repository, "config", "filter.own.clean", str(hooks / "fsmonitor"))
    run(repository, "config", "filter.own.required", "true")
    run(repository, "config", "extensions.worktreeConfig", "true")
    run(repository, "config", "--worktree", "filter.other.process", str(hooks / "fsmonitor"))
    for file in ("deep/train.py", "words.txt"):  # so that git status compares their content
        os.utime(repository / file, (1, 1))
    (tmp_path / "ran").unlink(missing_ok=True)
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    _, there = git.check_out("HEAD", repository / "deep", tmp_path / "copy")
    assert git.state(repository)
    assert git.state(there)
    run(repository, "config", "filter.not=other.process", str(hooks / "fsmonitor"))
    (repository / ".gitattributes").write_text("*.py filter=not=other\n")
    os.utime(repository / "deep" / "train.py", (2, 2))
    assert (git.state(repository) or {})["dirty"]
    assert not (tmp_path / "ran").exists()


def test_a_changed_file_of_a_submodule_counts_and_none_of_its_filters_runs(source: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    run(whole, "init", "--quiet")
    run(whole, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", source.as_uri(), "part")
    run(whole, "commit", "--quiet", "--message", "with a part")
    part, ran = whole / "part", tmp_path / "ran"
    (part / ".gitattributes").write_text("*.py filter=own\n")
    run(part, "add", ".gitattributes")
    run(part, "commit", "--quiet", "--message", "filtered")
    run(whole, "commit", "--quiet", "--all", "--message", "its filter")
    run(part, "config", "filter.own.clean", f"touch {ran}; cat")
    assert not (git.state(whole) or {"dirty": True})["dirty"]
    (part / "deep" / "train.py").write_text("changed!")
    assert (git.state(whole) or {})["dirty"]
    assert not ran.exists()


def test_a_commit_whose_files_a_partial_clone_lacks_is_refused_until_git_has_fetched_them(
    source: Path, tmp_path: Path
) -> None:
    run(source, "config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    run(tmp_path, "clone", "--quiet", "--filter=blob:none", source.as_uri(), str(partial))

    with pytest.raises(UsageError, match=r"does not have all files of commit HEAD~1, such as deep/train.py") as error:
        git.check_out("HEAD~1", partial, tmp_path / "copy")
    assert error.value.hint
    assert "git archive HEAD~1" in error.value.hint

    run(partial, "archive", "--output", os.devnull, "--format", "tar", "HEAD~1")
    _, there = git.check_out("HEAD~1", partial, tmp_path / "second")
    assert (there / "deep" / "train.py").read_text() == "first"


def test_a_copy_has_the_branches_and_tags_of_its_repository(repository: Path, tmp_path: Path) -> None:
    run(repository, "tag", "-am", "release", "v1", "HEAD~1")
    _, there = git.check_out("topic", repository, tmp_path / "copy")
    assert run(there, "describe", "--tags").startswith(b"v1-1-g")
    assert run(there, "rev-parse", "origin/topic") == run(repository, "rev-parse", "topic")
    assert run(there, "remote") == b"origin"


def test_repositories_are_read_however_they_are_stored(repository: Path, tmp_path: Path) -> None:
    text = repository / "deep" / "train.py"
    run(repository, "checkout", "--quiet", "--force", "--detach")
    run(repository, "config", "core.autocrlf", "true")
    text.write_bytes(b"second\r\n")
    run(repository, "commit", "--quiet", "--all", "--message", "lines")
    os.utime(text, (1, 1))
    run(repository, "sparse-checkout", "set", "deep")
    shallow, other = tmp_path / "shallow", tmp_path / "other"
    run(repository, "checkout", "--quiet", "-B", "new", "--track", "topic")
    run(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), str(shallow))
    run(tmp_path, "init", "--quiet", "--object-format", "sha256", "--initial-branch", "topic", str(other))
    (other / "train.py").write_text("other")
    run(other, "add", ".")
    run(other, "commit", "--quiet", "--message", "third")
    for number, (folder, name) in enumerate([(repository, "HEAD@{upstream}"), (shallow, "HEAD"), (other, "@")]):
        assert not (git.state(folder) or {"dirty": True})["dirty"]
        assert git.edit(folder) == ""
        _, there = git.check_out(name, folder, tmp_path / f"copy{number}")
        assert run(there, "log", "--format=%H").split()[0].decode() == git.commit(folder, name)
    with pytest.raises(UsageError, match="there is no commit 'HEAD~1'") as refused:
        git.commit(shallow, "HEAD~1")
    assert "git fetch --unshallow" in str(refused.value.hint)


def test_filters_of_the_users_own_configuration_make_the_files(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / ".gitconfig").write_text('[filter "up"]\n\tclean = tr A-Z a-z\n\tsmudge = tr a-z A-Z\n')
    (repository / ".gitattributes").write_text("*.txt filter=up\n")
    (repository / "words.txt").write_text("WORDS")
    run(repository, "add", ".")
    run(repository, "commit", "--quiet", "--all", "--message", "filtered")
    os.utime(repository / "words.txt", (1, 1))
    assert not (git.state(repository) or {"dirty": True})["dirty"]
    _, there = git.check_out("HEAD", repository, tmp_path / "copy")
    assert (there / "words.txt").read_text() == "WORDS"


def test_a_folder_without_a_repository_is_named_with_what_to_do(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UsageError, match="not a git repository") as refused:
        git.check_out("HEAD", tmp_path, tmp_path / "copy")
    assert str(refused.value.hint).startswith("start gpubench in the working tree")
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    with pytest.raises(UsageError, match="not a git repository") as refused:
        git.check_out("HEAD", tmp_path, tmp_path / "copy")
    assert str(refused.value.hint).startswith("GIT_DIR is set, and is not used: start")
    with pytest.raises(UsageError, match="must be run in a work tree") as refused:
        git.check_out("HEAD", repository / ".git", tmp_path / "copy")
    assert "working tree" in str(refused.value.hint)
    with pytest.raises(UsageError, match="there is no commit"):
        git.check_out("--all", repository, tmp_path / "copy")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_repository_of_another_user_is_refused_as_git_does(repository: Path, tmp_path: Path) -> None:
    for path in (repository, repository / ".git"):
        os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="dubious ownership") as refused:
        git.check_out("HEAD", repository, tmp_path / "copy")
    assert "safe.directory" in str(refused.value.hint)


def test_a_folder_is_at_a_commit_if_no_tracked_file_differs(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    assert not git.is_at("HEAD", folder), "no repository"
    run(folder, "init", "--quiet", "--initial-branch", "topic")
    for text in ("first", "second"):
        (folder / "train.py").write_text(text)
        run(folder, "add", ".")
        run(folder, "commit", "--quiet", "--message", text)
    (folder / "untracked").write_text("")
    base = load(ProgramSettings, None, {"program.command": "true", "program.directory": str(folder)})
    said = [without_change(Versus(ref=ref).variants(base, kind_of(PROGRAM).complete)) for ref in ("topic", "HEAD~1")]
    assert said == [
        "--vs-ref topic is what is checked out, and no tracked file differs: two equal versions are compared",
        None,
    ]
    assert [git.is_at(ref, folder) for ref in ("HEAD", "HEAD~1", "absent")] == [True, False, False]
    (folder / "train.py").write_text("third")
    assert not git.is_at("HEAD", folder)


def test_files_elsewhere_that_a_repository_names_as_its_own_are_not_looked_at(tmp_path: Path) -> None:
    repository, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run(["git", "-C", str(repository), "config", "core.worktree", str(elsewhere)], check=True)
    assert git.state(repository) is None
    with pytest.raises(UsageError, match="is not below"):
        git.check_out("HEAD", repository, tmp_path / "clone")
