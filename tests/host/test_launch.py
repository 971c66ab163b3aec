"""The two ends of the connection, without torch in between."""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import IO, Any

import msgspec
import psutil
import pytest

from gpubench import events
from gpubench.channel import Activity, Channel, calendar, limit_silence
from gpubench.errors import HostLost, NonFiniteLoss, ProgramFailed, UsageError, WorkerLost
from gpubench.host import launch, supervision
from gpubench.host.launch import LONGEST_HANDSHAKE, Workers
from gpubench.kinds.program import machines
from gpubench.kinds.program.machines import SpreadWorkers
from gpubench.probe.connection import Connection
from gpubench.probe.host import Host
from gpubench.ranks import machine

JOB = events.Job(worker="", lighter="", settings={}, repeats=[0], clock=(0.0, 0.0), machine=machine())

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
    with pytest.raises(WorkerLost, match=r"rank 0 \(pid \d+ on .*\) exited with code 3; its last report") as caught:
        said()
    assert "segmentation something" in str(caught.value.hint)


def test_a_model_that_closes_all_descriptors_is_named_and_keeps_those_that_it_opens_then(
    worker: Callable[..., None], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    worker(f"os.closerange(3, 4096); files = [open({str(own)!r}, 'ab') for _ in range(8)]; time.sleep(30)")
    with pytest.raises(WorkerLost, match=r"rank 0 \(pid \d+ on .*\) exited with code 75") as caught:
        said()
    assert "the model or its data has closed the file descriptor of the connection" in str(caught.value.hint)
    assert own.read_bytes() == b""


def test_a_worker_that_never_reports_is_lost_with_its_last_words(worker: Callable[..., None]) -> None:
    worker("raise SystemExit('no torch here')", prelude="")
    with pytest.raises(WorkerLost, match="rank 0 exited with code 1 before it reported") as caught:
        said()
    assert "no torch here" in str(caught.value.hint)


def test_a_worker_that_is_stopped_as_it_imports_is_lost_as_soon_as_a_silent_one(
    worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "SHORTEST_SILENCE", 0.5)
    monkeypatch.setattr(supervision, "LONGEST_SILENCE", 0.5)
    worker("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", prelude="")
    with pytest.raises(
        WorkerLost, match=r"rank 0 \(pid \d+\) has been stopped for \d+ s, before it connected"
    ) as caught:
        said(stall_timeout=600.0)
    assert "SIGCONT" in str(caught.value.hint)


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
    monkeypatch.setattr(supervision, "LONGEST_SILENCE", 1.5)
    worker("channel.send(events.Planned(rank=0, repeat=0, steps=7)); channel._closing.set(); time.sleep(60)")
    with pytest.raises(WorkerLost, match=r"has been silent for \d+ s"):
        said()


def test_what_a_worker_prints_as_it_exits_is_read_to_the_end(worker: Callable[..., None]) -> None:
    worker("channel.close(); print('x' * 79 + '\\n', end='', flush=True) or [print('y' * 79) for _ in range(3000)]")
    with Workers(JOB, 1, {}, 60.0) as workers:
        list(workers.stream())
    assert workers.output[-1] == "y" * 79


def test_what_has_been_printed_is_known_before_the_host_next_waits_for_it(worker: Callable[..., None]) -> None:
    worker("print('its last line', flush=True); os._exit(3)", prelude="import os\n")
    with Workers(JOB, 1, {}, 60.0) as workers:
        assert workers._children[0].wait(timeout=60) == 3
        assert workers.output == ["its last line"]


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit()"])
def test_no_process_is_left_behind(worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN", 0.5)
    worker(f"import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); channel.close(); {end}")
    with Workers(JOB, 1, {}, 60.0) as workers:
        list(workers.stream())
    for pid in (workers._children[0].pid, int(workers.output[0])):
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

    class Impatient(Connection):
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
        assert workers._listener
        port = workers._listener.sockets[0].getsockname()[1]
        secret = workers._listener.address.partition("#")[2]
        stream = workers.stream()
        clients = [
            events.encode(events.Hello(rank=1, world_size=2, pid=1, host="x", machine="x", secret="wrong")),
            events.encode(events.Hello(rank=1, world_size=2, pid=1, host="x", machine="x", secret="gro\u00df")),
            events.encode(events.Hello(rank=7, world_size=2, pid=1, host="x", machine="x", secret=secret)),
            events.encode(events.Heartbeat(rank=1, doing="pretending", step=None)),
            b'{"event":"log","rank":1,"fields":{"a":' + b"[" * 2000 + b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\xff" * LONGEST_HANDSHAKE,
        ]
        for client in clients:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(client)
                connection.settimeout(0.1)
                assert hung_up(connection, stream)
        assert workers.peers == {}

        with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
            hello = events.Hello(rank=1, world_size=2, pid=1, host="x", machine="x", secret=secret)
            connection.sendall(events.encode(hello))
            while not workers.peers:
                next(stream)
            assert msgspec.json.decode(connection.makefile("rb").readline(), type=events.Job) == JOB


class HostOfProgram(SpreadWorkers):
    """A host whose ranks are connections of the test."""

    def _start(self, address: str) -> tuple[list["subprocess.Popen[bytes]"], IO[bytes]]:
        self.address = address.removeprefix("unix:")
        reading, writing = os.pipe()
        os.close(writing)
        return [], os.fdopen(reading, "rb", buffering=0)

    def answer(self, connection: socket.socket, **hello: Any) -> bytes:
        """Returns the host's answer to a rank."""
        usual: dict[str, Any] = {"world_size": 2, "pid": 1, "host": "x", "machine": "x", "secret": ""}
        connection.sendall(events.encode(events.Hello(**usual | hello)))
        connection.settimeout(0.1)
        for _ in range(100):
            list(self.receive())
            with suppress(TimeoutError):
                return connection.makefile("rb").readline()
        raise TimeoutError


def test_the_host_of_a_program_opens_a_port_only_for_ranks_elsewhere_and_with_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    job = msgspec.structs.replace(JOB, settings={"measurement": {"target_precision": None}})
    with HostOfProgram(job, None, {}, 60.0) as host, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(host.address)
        assert msgspec.json.decode(host.answer(rank, rank=0), type=events.Job).address is None
        assert host._listener
        assert len(host._listener.sockets) == 1
    with HostOfProgram(job, None, {}, 60.0) as host, ExitStack() as stack:
        rank = stack.enter_context(socket.socket(socket.AF_UNIX))
        rank.connect(host.address)
        told = msgspec.json.decode(host.answer(rank, rank=0, ranks_here=(0, 1)), type=events.Job).address
        assert told
        address, _, secret = told.partition("#")
        port = int(address.rpartition(":")[2])
        for wrong in ("", "wrong"):
            with socket.create_connection(("127.0.0.1", port)) as client:
                assert host.answer(client, rank=1, secret=wrong) == b""
        relay = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        answer = msgspec.json.decode(host.answer(relay, rank=1, secret=secret), type=events.Job)
        assert (answer.address, answer.host) == (None, socket.gethostname())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        relay.close()
        monkeypatch.setattr(machines, "GRACE", 0.0)
        with pytest.raises(ProgramFailed, match=r"the connection to rank 1 \(pid 1 on x\) is lost"):
            deque(chain.from_iterable(host.receive() for _ in range(100)))


@pytest.mark.parametrize(
    ("home", "error"),
    [
        ("", "rank 1 has not found the gpubench of rank 0"),
        ("unix:/etc/passwd", "rank 1 has not found the gpubench of rank 0"),
        ("tcp:127.0.0.1:1#secret", "cannot reach rank 0's host at 127.0.0.1:1: Connection refused"),
    ],
)
def test_a_rank_whose_home_cannot_be_reached_is_an_error(home: str, error: str) -> None:
    job = msgspec.structs.replace(JOB, settings={"measurement": {"target_precision": None}})
    with HostOfProgram(job, None, {}, 60.0) as host, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(host.address)
        with pytest.raises(ProgramFailed, match=error):
            host.answer(rank, rank=1, ranks_here=(1, 1), home=home)


def test_a_rank_has_no_open_connection_while_it_looks_for_the_host_of_rank_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    hellos: list[events.Message] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as connection:
                hellos.append(events.decode(connection.makefile("rb").readline()))
                connection.sendall(events.encode(JOB))

        answering = Thread(target=answer)

        class Store:
            def check(self, _: list[str]) -> bool:
                with listening.accept()[0] as connection:
                    connection.settimeout(5)
                    assert connection.recv(1) == b""
                answering.start()
                return True

            def get(self, _: str) -> bytes:
                return b"tcp:first:1#secret"

        Host(str(tmp_path / "socket"), 1, 2, Store).close()
        answering.join()
    (hello,) = hellos
    assert isinstance(hello, events.Hello)
    assert (hello.home, hello.ranks_here) == ("tcp:first:1#secret", (1, 1))


def test_hosts_that_measure_in_different_ways_are_told_the_first_difference() -> None:
    settings = {"training": {"steps": 50}, "program": {"command": "torchrun --node-rank 0"}}
    job = msgspec.structs.replace(JOB, settings=settings, host="first")
    ours = msgspec.structs.replace(job, settings=settings | {"program": {"command": "torchrun --node-rank 1"}})
    machines.check_same(job, ours)
    with pytest.raises(UsageError, match=r"training.steps is 9 on .* and 50 on first"):
        machines.check_same(job, msgspec.structs.replace(ours, settings={"training": {"steps": 9}}))
    with pytest.raises(UsageError, match=r"repeat is 1 on .* and 0 on first"):
        machines.check_same(job, msgspec.structs.replace(ours, repeats=[1]))


def test_silent_unauthenticated_clients_are_disconnected_and_the_port_closes_once_all_ranks_are_connected(
    monkeypatch: pytest.MonkeyPatch, worker: Callable[..., None]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(launch, "MOST_UNAUTHENTICATED", 3)
    worker("time.sleep(60)", prelude="import time\n")
    with Workers(JOB, 2, {}, 60.0, under_torchrun=True) as workers, ExitStack() as stack:
        assert workers._listener
        address = ("127.0.0.1", workers._listener.sockets[0].getsockname()[1])
        secret = workers._listener.address.partition("#")[2]
        stream = workers.stream()
        crowd = [stack.enter_context(socket.create_connection(address, timeout=0.1)) for _ in range(6)]
        crowd[0].sendall(b'{"event":"hello",')
        assert hung_up(crowd[0], stream), "the oldest of too many"
        monkeypatch.setattr(launch, "HANDSHAKE_SECONDS", 0.0)
        assert hung_up(crowd[1], stream), "one that took too long"
        monkeypatch.undo()
        late = stack.enter_context(socket.create_connection(address, timeout=0.1))
        for rank in range(2):
            hello = events.Hello(rank=rank, world_size=2, pid=1, host="x", machine="x", secret=secret)
            stack.enter_context(socket.create_connection(address)).sendall(events.encode(hello))
        while len(workers.peers) < 2:
            next(stream)
        assert hung_up(late, stream)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_a_host_that_cannot_be_reached_is_named_with_what_may_be_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HostLost, match=rf"rank 1 cannot reach rank 0's host at 127.0.0.1:{port}: ") as caught:
        Channel.connect(f"tcp:127.0.0.1:{port}#secret", 1, 2, Activity())
    assert "firewall" in str(caught.value.hint)


def test_a_silent_link_fails_after_as_long_as_the_host_would_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        limit_silence(connection, 12.0)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3


def test_the_clock_of_another_machine_is_not_taken_for_ones_own_though_it_has_ones_name() -> None:
    here, there = (msgspec.structs.replace(JOB, machine=name) for name in (machine(), socket.gethostname()))
    assert calendar(here)() < 1e9 < calendar(there)(), "the job began its clock at zero"


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
