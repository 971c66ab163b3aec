"""The two ends of the connection, without torch in between."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gpubench import events, launch, peers
from gpubench.channel import Activity, Channel
from gpubench.errors import NonFiniteLoss, WorkerLost
from gpubench.launch import Workers

JOB = events.Job(worker="", lighter="", settings={}, repeats=[0], clock=(0.0, 0.0), host=socket.gethostname())

PYTHON = sys.executable

SCRIPT = """
import os, sys, time
from gpubench import events
from gpubench.channel import ADDRESS_VARIABLE, Activity, Channel
channel, job = Channel.connect(os.environ[ADDRESS_VARIABLE], 0, 1, Activity())
failed = lambda **more: events.Failed(
    rank=0, traceback=None, doing="forward", step=3, **({"hint": None, "secondary": False} | more))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the host start a script of the test's own in place of the worker."""

    def write(code: str, prelude: str = SCRIPT) -> None:
        (tmp_path / "python").write_text(f"#!{PYTHON}\n{prelude}{code}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return write


def said(world_size: int = 1, stall_timeout: float = 60.0) -> list[events.Message]:
    with Workers(JOB, world_size, {}, stall_timeout) as workers:
        return [event for event in workers.stream() if event is not None]


def test_events_arrive_in_order_and_done_ends_the_stream(worker: Callable[..., None]) -> None:
    worker("channel.put(events.Planned(rank=0, repeat=0, steps=7)); channel.close()")
    hello, planned, done = said()
    assert isinstance(hello, events.Hello)
    assert planned == events.Planned(rank=0, repeat=0, steps=7)
    assert isinstance(done, events.Done)


def test_an_error_of_ours_keeps_its_class_message_and_hint(worker: Callable[..., None]) -> None:
    worker("channel.send(failed(kind='NonFiniteLoss', message='nan', hint='less')); sys.exit(1)")
    with pytest.raises(NonFiniteLoss, match=r"^nan$") as caught:
        said()
    assert caught.value.hint == "less"


def test_a_worker_that_dies_in_silence_is_lost_with_its_last_words(worker: Callable[..., None]) -> None:
    worker("print('segmentation something', flush=True); os._exit(3)")
    with pytest.raises(WorkerLost, match=r"rank 0 \(pid \d+ on .*\) died") as caught:
        said()
    assert "segmentation something" in str(caught.value.hint)


def test_a_worker_that_never_reports_is_lost_with_its_last_words(worker: Callable[..., None]) -> None:
    worker("raise SystemExit('no torch here')", prelude="")
    with pytest.raises(WorkerLost, match="rank 0 ended before it reported") as caught:
        said()
    assert "no torch here" in str(caught.value.hint)


def test_a_worker_that_babbles_is_cut_off(worker: Callable[..., None]) -> None:
    worker("channel._write(b'what?' + bytes([10])); time.sleep(30)")
    with pytest.raises(WorkerLost):
        said()


def test_a_worker_without_a_heartbeat_is_silent_and_without_progress_stuck(
    worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker("channel.activity.doing = 'backward'; channel.activity.step = 4; time.sleep(60)")
    with pytest.raises(WorkerLost, match=r"made no progress for \d+ s, in backward of step 4"):
        said(stall_timeout=3.0)
    monkeypatch.setattr(peers, "SILENCE", 1.5)
    worker("channel._closing.set(); time.sleep(60)")
    with pytest.raises(WorkerLost, match=r"has been silent for \d+ s"):
        said()


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit()"])
def test_no_process_is_left_behind(worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN", 0.5)
    worker(f"import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); channel.close(); {end}")
    with Workers(JOB, 1, {}, 60.0) as workers:
        list(workers.stream())
    for pid in (workers._child.pid, int(workers.output[0])):
        assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds; one that nobody has reaped yet has ended."""
    for _ in range(50):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_host_that_goes_at_the_last_word_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr("gpubench.channel.os._exit", exits.append)
    host, worker = socket.socketpair()

    class Impatient(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            super().sendall(data, flags)
            host.close()
            ending.join(5)

    with Impatient(fileno=worker.detach()) as connection:
        rank = Channel(connection, 1, Activity())
        ending = rank._listener
        ending.start()
        rank.close()
    assert not ending.is_alive()
    assert exits == []


def test_a_second_machine_needs_the_secret(monkeypatch: pytest.MonkeyPatch, worker: Callable[..., None]) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    worker("time.sleep(60)", prelude="import time\n")
    with Workers(JOB, 2, {}, 60.0, under_torchrun=True) as workers:
        port = workers._listener.getsockname()[1]
        stream = workers.stream()
        strangers = [
            events.Hello(rank=1, world_size=2, pid=1, host="x", secret="wrong"),
            events.Hello(rank=7, world_size=2, pid=1, host="x", secret=workers._secret),
            events.Heartbeat(rank=1, doing="pretending", step=None),
        ]
        for stranger in strangers:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(events.encode(stranger))
                connection.settimeout(0.1)
                assert hung_up(connection, stream)
        assert workers.peers == {}

        with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
            hello = events.Hello(rank=1, world_size=2, pid=1, host="x", secret=workers._secret)
            connection.sendall(events.encode(hello))
            while not workers.peers:
                next(stream)
            assert msgspec.json.decode(connection.makefile("rb").readline(), type=events.Job) == JOB


def hung_up(connection: socket.socket, stream: Iterator[object]) -> bool:
    """Whether the host closes the connection without a word, while it goes on listening."""
    for _ in range(100):
        next(stream)
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionResetError:
            return True
    return False
