"""What a host leaves behind that was killed: no process, and no folder once the next one starts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from running import started

from gpubench import temporary
from gpubench.host.guardian import Guardian, end_all
from gpubench.temporary import OWNER, OwnedFolder, folder_of_worker, remove_abandoned


def in_a_process_that_is_killed(action: Callable[[], object]) -> None:
    """Calls `action` in a fork, which SIGKILL ends."""
    if not (child := os.fork()):
        try:
            kept = action()  # which would otherwise be removed at once
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
            del kept
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has temporary folders made in a folder of this test."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(temporary, "_parents", lambda: [Path(name)])
        yield Path(name)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_live_one_is_not(parent: Path) -> None:
    def leave() -> OwnedFolder:
        folder = OwnedFolder()
        (folder.path / "clone" / "deep").mkdir(parents=True)
        (folder.path / "clone" / "away").symlink_to(parent / "mine")
        (folder.path / "away").symlink_to(parent / "mine")
        return folder

    (parent / "mine").mkdir()
    (parent / "mine" / "file").touch()
    with OwnedFolder() as first:
        in_a_process_that_is_killed(leave)
        assert len(list(parent.iterdir())) == 3
        with OwnedFolder() as second:
            assert {str(path) for path in parent.iterdir()} == {first, second, str(parent / "mine")}
        assert Path(first).is_dir()
    assert [path.name for path in parent.rglob("*")] == ["mine", "file"]


def test_only_a_folder_with_the_regular_file_of_an_owner_of_this_user_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aim = tmp_path / "aim"
    aim.mkdir()
    (aim / OWNER).touch()
    (tmp_path / "gpubench-link").symlink_to(aim)
    for name in ("plain", "linked", "pipe", "other"):
        (tmp_path / f"gpubench-{name}").mkdir()
    (tmp_path / "gpubench-linked" / OWNER).symlink_to(aim / OWNER)
    os.mkfifo(tmp_path / "gpubench-pipe" / OWNER)
    (tmp_path / "gpubench-file").touch()
    (tmp_path / "gpubench-other" / OWNER).touch()
    before = set(tmp_path.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(tmp_path)
    assert set(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert before - set(tmp_path.rglob("*")) == {tmp_path / "gpubench-other", tmp_path / "gpubench-other" / OWNER}


def test_what_a_worker_writes_is_in_the_folder_of_its_host(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with OwnedFolder() as host:
        monkeypatch.setenv(temporary.FOLDER_VARIABLE, host)
        with folder_of_worker() as own:
            assert Path(own).parent == Path(host)
    with folder_of_worker() as own:  # the host's is on another machine
        assert Path(own).is_dir()


def sleepers(seconds: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", seconds]]


def wait_for_end_of(seconds: str) -> None:
    until = time.monotonic() + 20
    while sleepers(seconds) and time.monotonic() < until:  # one that nobody reaps has no command line
        time.sleep(0.05)
    alive = sleepers(seconds)
    for one in alive:
        one.kill()
    assert not alive


@pytest.mark.parametrize("leader", ["sleep 0.5", "exit"], ids=["the leader lives", "the leader has ended"])
def test_the_processes_of_a_killed_host_end_also_those_of_other_sessions_or_without_the_mark(leader: str) -> None:
    def run() -> None:
        guardian = Guardian("_OF_THIS_TEST", "1")
        script = f"env -i sleep 7661 & setsid sleep 7661 & {leader}"
        mark = os.environ | {"_OF_THIS_TEST": "1"}
        child = subprocess.Popen(["sh", "-c", script], env=mark, start_new_session=True)
        guardian.watch(child.pid)
        if leader == "exit":
            child.wait()
        until = time.monotonic() + 20
        while len(sleepers("7661")) < 2 and time.monotonic() < until:
            time.sleep(0.01)

    bystander = subprocess.Popen(["sleep", "7662"], start_new_session=True)
    in_a_process_that_is_killed(run)
    wait_for_end_of("7661")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_program_that_does_not_end_in_its_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubench.host.guardian.SECONDS_TO_END", 0.5)
    mark = os.environ | {"_OF_THIS_TEST": "4"}
    child = subprocess.Popen(["sleep", "7665"], env=mark, start_new_session=True)
    end_all("_OF_THIS_TEST=4", {child.pid})
    assert child.wait(10) == -signal.SIGKILL


def test_the_session_of_a_program_ends_also_if_the_host_was_killed_before_it_told_of_it() -> None:
    mark = os.environ | {"_OF_THIS_TEST": "5"}
    child = subprocess.Popen(["sh", "-c", "env -i sleep 7666 & sleep 60"], env=mark, start_new_session=True)
    while not sleepers("7666"):
        time.sleep(0.01)
    end_all("_OF_THIS_TEST=5", set())
    wait_for_end_of("7666")
    assert child.wait(10) == -signal.SIGKILL


def test_semaphores_of_killed_processes_are_removed_by_what_tracks_them(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, pathlib, sys, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "pathlib.Path(sys.argv[1]).write_text(lock._semlock.name)\n"
        "time.sleep(1000)\n"
    )
    written = tmp_path / "name"

    def run() -> object:
        guardian = Guardian("_OF_THIS_TEST", "3")  # which gives time to end only to those that it watches
        mark = os.environ | {"_OF_THIS_TEST": "3"}
        child = subprocess.Popen([sys.executable, "-c", program, str(written)], env=mark)
        until = time.monotonic() + 20
        while not (written.exists() and written.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        return guardian, child

    in_a_process_that_is_killed(run)
    semaphore = Path("/dev/shm") / f"sem.{written.read_text().lstrip('/')}"
    until = time.monotonic() + 60
    while semaphore.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not semaphore.exists()


def test_a_guardian_that_is_dismissed_ends_nothing() -> None:
    child = subprocess.Popen(["sleep", "7663"], env=os.environ | {"_OF_THIS_TEST": "2"}, start_new_session=True)
    guardian = Guardian("_OF_THIS_TEST", "2")
    guardian.watch(child.pid)
    guardian.dismiss()
    assert guardian._shell.returncode == 0
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_program_whose_host_is_killed_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = ("sh", "-c", "env -i sleep 7664 & sleep 1")
    with started("train-bench", "-q", "--", *program, results=tmp_path / "results") as going:
        while not sleepers("7664"):
            time.sleep(0.02)
        going.process.kill()
    assert len(list(tmp_path.glob("gpubench-*"))) == 1
    wait_for_end_of("7664")
    remove_abandoned(tmp_path)
    assert not list(tmp_path.glob("gpubench-*"))
