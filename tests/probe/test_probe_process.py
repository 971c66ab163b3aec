"""The probe in a process: when it ends a program, forks, other profilers, and that it changes no program.

Each loop runs with the probe in a fork of this process (`probing.py`). One test runs a real program.
"""

import base64
import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import RECORDED, WARMUP, Loop, batches, probed, run_probed
from running import gpubench
from torch import nn

from gpubench.probe import connection, hooks, host, quiet, rhythm, timeline
from gpubench.probe.connection import Connection, Taken
from gpubench.probe.hooks import Probe
from gpubench.probe.measured import MeasuredStep
from gpubench.probe.steady import SteadyProbe


def test_a_program_is_ended_after_the_steps_that_are_wanted(tmp_path: Path) -> None:
    loop = Loop(100)
    marks = tmp_path / "marks"

    def run() -> None:
        try:
            loop()
        except Exception:  # a program's own handler for errors does not keep it going
            marks.write_text("caught")
        finally:
            marks.write_text(marks.read_text() + "cleaned up" if marks.exists() else "cleaned up")

    found = probed(tmp_path, run, steps=5)
    assert found.code == 0
    assert len(found.steps) == WARMUP + 5
    assert found.names[-1] == "done"
    assert marks.read_text() == "cleaned up"


@pytest.mark.parametrize("follow", [None, 3])
def test_what_ends_a_program_says_so_where_the_program_prints_it(tmp_path: Path, follow: int | None) -> None:
    printed = tmp_path / "printed"

    def run() -> None:
        try:
            Loop(100)()
        except BaseException as end:
            printed.write_text(f"{isinstance(end, SystemExit)} {end}")
            raise

    assert probed(tmp_path, run, steps=5, follow=follow).code == 0
    assert printed.read_text() == f"True {hooks.ALL_MEASURED}"


def test_no_more_steps_are_sent_than_wanted_although_turns_are_known_only_after_more(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(100)
        other = torch.optim.SGD(nn.Linear(3, 1).parameters())
        for (batch,) in loop.data:
            loop.step(batch)
            other.step()

    found = probed(tmp_path, run, steps=1)
    assert found.code == 0
    assert len(found.steps) == WARMUP + 1 < timeline.LONGEST_PERIOD
    assert sum(step["total"] for step in found.steps) == pytest.approx(found.events["repeatdone"]["wall"])


@pytest.mark.parametrize("follow", [None, 10**9])
def test_a_program_ends_when_its_host_is_gone(tmp_path: Path, follow: int | None) -> None:
    data = batches(20)

    def run() -> None:
        loop = Loop()
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            loop.data = data
            loop()

    assert probed(tmp_path, run, follow=follow, leaves=True).code == 1


def test_a_program_whose_host_was_killed_before_its_first_step_ends_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "host"))
    if not (child := os.fork()):
        os._exit(run_probed(str(tmp_path / "host"), Loop()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def close_all() -> None:
    os.closerange(3, 4096)


def put_a_file_in_place_of_each() -> None:
    with Path(os.devnull).open() as file:
        for number in range(3, 64):
            if number != file.fileno():
                with suppress(OSError):
                    os.fstat(number)
                    os.dup2(file.fileno(), number)


def close_all_in_a_thread() -> None:
    closing = threading.Thread(target=close_all)
    closing.start()
    closing.join()


@pytest.mark.parametrize("close", [close_all, put_a_file_in_place_of_each, close_all_in_a_thread])
def test_a_program_that_closes_all_descriptors_keeps_those_that_it_opens_then_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Callable[[], None]
) -> None:
    monkeypatch.setattr(host, "FLUSH_SECONDS", 0.0)
    loop = Loop()

    def run() -> None:
        loop()
        close()
        pairs = [socket.socketpair() for _ in range(8)]
        paths = [tmp_path / f"own{number}" for number in range(8)]
        files = [path.open("wb") for path in paths]
        loop()
        gc.collect()
        for path, file, (one, other) in zip(paths, files, pairs, strict=True):
            assert not path.stat().st_size
            file.write(b"own")
            file.close()
            one.sendall(b"own")
            assert other.recv(9) == b"own"

    found = probed(tmp_path, run)
    assert found.code == 0
    assert [(tmp_path / f"own{number}").read_bytes() for number in range(8)] == [b"own"] * 8
    assert 0 < len(found.steps) <= 12
    assert "done" not in found.names


def test_a_connection_that_is_not_own_any_more_is_neither_used_nor_closed_nor_freed() -> None:
    ours, theirs = socket.socketpair()
    kept = Connection(fileno=ours.detach())
    number = kept.fileno()
    kept.sendall(b"one")
    other, end = socket.socketpair()
    os.dup2(other.fileno(), number)
    with pytest.raises(Taken):
        kept.sendall(b"two")
    with pytest.raises(Taken):
        kept.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Taken):
        kept.makefile("rb").read(1)
    kept.close()
    assert theirs.recv(9) == b"one"
    os.write(number, b"alive")
    assert end.recv(9) == b"alive"
    kept = Connection(fileno=number)
    other.close()
    os.dup2(theirs.fileno(), number)
    del kept
    os.fstat(number)
    os.close(number)
    theirs.close()
    end.close()


def test_a_connection_is_recognised_without_the_cookie_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "COOKIE", 2**20)
    ours, theirs = socket.socketpair()
    with Connection(fileno=ours.detach()) as kept, theirs:
        kept.sendall(b"one")
        os.dup2(theirs.fileno(), kept.fileno())
        assert not kept.is_own
        os.close(kept.fileno())


def test_a_program_may_replace_functions_that_the_probe_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:  # as libraries do that freeze the time, or forbid the network in tests
        for name in ("time", "monotonic", "monotonic_ns", "sleep"):
            monkeypatch.setattr(time, name, lambda *_: 0)
        for owner, name in ((socket, "gethostname"), (socket, "socket"), (json, "dumps"), (json, "loads")):
            monkeypatch.setattr(owner, name, None)
        Loop()()

    found = probed(tmp_path, run, steps=2)
    assert found.code == 0
    assert len(found.steps) == WARMUP + 2
    assert all(step["total"] > 0 for step in found.steps)


@pytest.mark.parametrize("sends", [True, False])
def test_an_exception_of_a_signal_within_the_probe_ends_the_measurement_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    monkeypatch.setattr(host, "FLUSH_SECONDS", 0.0)
    step, send = Probe._step, Connection.sendall

    def interrupted_step(self: Probe, parts: list[timeline.LoopPart]) -> MeasuredStep:
        if self._sent == 6:
            raise TimeoutError
        return step(self, parts)

    def interrupted_send(self: Connection, data: bytes, flags: int = 0) -> None:
        half = b"stepsmeasured" in data and b'"step":6,' in data
        send(self, data[: len(data) // 2] if half else data)
        if half:
            raise TimeoutError

    def run() -> None:
        if sends:
            monkeypatch.setattr(Connection, "sendall", interrupted_send)
        else:
            monkeypatch.setattr(Probe, "_step", interrupted_step)
        loop = Loop()
        with pytest.raises(TimeoutError):
            loop()
        loop()

    found = probed(tmp_path, run)
    assert found.code == 0
    assert [step["step"] for step in found.steps] == list(range(6))
    assert "done" not in found.names


def test_a_program_whose_child_closes_all_that_it_has_inherited_is_measured_to_its_end(tmp_path: Path) -> None:
    loop = Loop()

    def run() -> None:
        loop()
        if not (child := os.fork()):
            close_all()
            os._exit(0)
        os.waitpid(child, 0)
        loop()

    found = probed(tmp_path, run)
    assert (found.code, len(found.steps), found.names[-1]) == (0, 24, "done")


@pytest.mark.parametrize("sequential", [True, False], ids=["one after the other", "at once"])
def test_one_of_several_threads_that_train_is_measured_and_the_others_are_named(
    tmp_path: Path, sequential: bool
) -> None:
    loops = [Loop() for _ in range(3)]
    begun = threading.Barrier(3)

    def train(loop: Loop) -> None:
        if not sequential:
            begun.wait()
        loop()
        if not sequential:
            begun.wait()
            loop()

    def run() -> None:
        threads = [threading.Thread(target=train, args=(loop,)) for loop in loops]
        for thread in threads:
            thread.start()
            if sequential:
                thread.join()
        for thread in threads:
            thread.join()

    found = probed(tmp_path, run)
    assert (found.code, found.names[-1]) == (0, "done")
    assert len(found.steps) == 36 if sequential else 24 <= len(found.steps) < 72  # one that has ended is followed
    said = [event["message"] for event in found.all if event["event"] == "log"]
    assert any("several threads" in message for message in said) is not sequential


def test_the_workers_of_a_loader_and_a_process_without_updates_are_no_ranks(tmp_path: Path) -> None:
    loop = Loop()
    loop.data = batches(workers=1)
    assert len(probed(tmp_path, loop).steps) == 12
    (tmp_path / "host").unlink()
    assert probed(tmp_path, lambda: [nn.Linear(3, 1)(batch) for (batch,) in batches()]).names == []


def test_a_model_can_be_copied_saved_and_compiled_as_without_the_probe(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run() -> None:
        loop = Loop()
        loop()
        torch.save(loop.model, path)
        assert not loop.model._forward_pre_hooks
        assert not loop.model._forward_hooks
        assert "probe" not in repr(nn.Module.__call__)

    assert probed(tmp_path, run).code == 0
    assert b"probe" not in path.read_bytes()
    assert isinstance(torch.load(path, weights_only=False), nn.Sequential)


@pytest.mark.parametrize("stacks", [False, True], ids=["", "with stacks"])
def test_a_recorded_repeat_sends_the_trace_of_its_steps_and_ends(tmp_path: Path, stacks: bool) -> None:
    found = probed(tmp_path, Loop(100), profiling=RECORDED.model_dump() | {"with_stack": stacks})
    assert found.code == 0
    assert len(found.steps) >= rhythm.CERTAIN + RECORDED.units  # those whose code is sampled follow
    pieces = [event for event in found.all if event["event"] == "tracerecorded"]
    assert [piece["last"] for piece in pieces] == [True]
    trace = json.loads(base64.b64decode(pieces[0]["data"]))
    names = [event["name"] for event in trace["traceEvents"]]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == RECORDED.active
    assert names.count("module: 1.0 (ReLU)") == RECORDED.active


def test_a_program_with_a_profiler_of_its_own_is_not_recorded_and_says_so(tmp_path: Path) -> None:
    def run() -> None:
        with torch.profiler.profile():
            Loop(100)()

    found = probed(tmp_path, run, profiling=RECORDED.model_dump())
    assert found.code == 0
    assert "cannot be recorded" in found.events["log"]["message"]
    assert "tracerecorded" not in found.names
    (tmp_path / "host").unlink()
    assert "slows it down" in probed(tmp_path, run, steps=8).events["log"]["message"]


HOST_THAT_STOPS_TO_LISTEN = """
import _socket, os, signal, sys

listening = _socket.socket(_socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()

class Socket(_socket.socket):
    def connect(self, address):
        super().connect(address)
        listening.close()

_socket.socket = Socket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.environ["_GPUBENCH_PROBE"] = sys.argv[1]
exec(open(sys.argv[2]).read(), {"__file__": sys.argv[2], "__name__": "sitecustomize"})
"""


def test_a_program_that_does_not_ignore_sigpipe_survives_a_host_that_stops_to_listen(tmp_path: Path) -> None:
    start = Path(hooks.__file__).with_name("sitecustomize.py")
    command = [sys.executable, "-I", "-S", "-c", HOST_THAT_STOPS_TO_LISTEN, str(tmp_path / "host"), str(start)]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_program_without_a_host_runs_on(tmp_path: Path) -> None:
    loop = Loop()
    child = os.fork()
    if not child:
        os._exit(run_probed(str(tmp_path / "nobody"), loop) or len(loop.losses) != 12)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_that_trains_is_a_rank_although_its_parent_has_imported_torch(tmp_path: Path) -> None:
    def run() -> None:
        assert next(iter(batches())) is not None
        child = multiprocessing.get_context("fork").Process(target=Loop(12))
        child.start()
        child.join()
        assert child.exitcode == 0

    found = probed(tmp_path, run)
    assert len(found.steps) == 12
    assert found.names[-1] == "done"


def test_a_process_that_never_updates_does_not_collect_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hooks, "LONGEST_SETUP", 64)
    kept: list[int] = []

    def run() -> None:
        probe = SteadyProbe(str(tmp_path / "host"), {})
        probe.install()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # without one, backward passes are steps
        for _ in range(200):
            nn.Linear(3, 1)(torch.randn(4, 3)).mean().backward()
            kept.append(len(probe._timeline.part.marks) + len(probe._timeline.part.losses))
        assert max(kept) < 128
        del optimizer

    assert probed(tmp_path, run).code == 0


def test_a_compiled_update_is_not_measured_and_works(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        warnings.simplefilter("ignore")  # of the compiler's own
        update = torch.compile(loop.optimizer.step, backend="eager")
        for (batch,) in loop.data:
            loop.model(batch).mean().backward()
            update()

    found = probed(tmp_path, run)
    assert (found.code, found.names) == (0, [])


def test_a_real_program_prints_the_same_losses_with_the_probe(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch')\n"  # as transformers does before it imports torch
        "import sitecustomize, torch\n"
        "assert sitecustomize.OWN\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(30):\n"
        "    loss = model(torch.randn(4, 3)).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(repr(loss.item()))\n"
        "import sys\n"
        "print([entry for entry in sys.path if entry.endswith('gpubench/probe')])\n"
    )
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("OWN = True\n")
    command = f"PYTHONPATH=$PYTHONPATH:{own} {sys.executable} {script}"
    options = ("--repeats", "1", "--steps", "all")
    run = gpubench("train-bench", *options, "--", "sh", "-c", command, results=tmp_path)
    assert run.code == 0
    *losses, path = (run.run / "output.log").read_text().splitlines()
    assert path == "[]"
    assert [step["loss"] for step in run.lines("steps.jsonl")] == [float(loss) for loss in losses]


@pytest.mark.parametrize("profiling", [None, RECORDED.model_dump()])
def test_a_warning_that_python_prints_once_is_printed_once(tmp_path: Path, profiling: dict[str, Any] | None) -> None:
    printed = tmp_path / "printed"
    shown: list[str] = []

    def run() -> None:
        loop = Loop()
        warnings.resetwarnings()
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        try:
            for (batch,) in loop.data:
                warnings.warn("of the program", stacklevel=1)
                loop.step(batch)
        finally:
            printed.write_text("\n".join(shown))

    assert probed(tmp_path, run, profiling=profiling).code == 0
    assert [each for each in printed.read_text().splitlines() if each == "of the program"] == ["of the program"]


def test_warnings_of_own_calls_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
        for quietly in (True, False, True, False):
            with quiet.ignored_warnings() if quietly else nullcontext():
                warnings.warn_explicit("one", UserWarning, "a.py", 1, registry=REGISTRY)
        with quiet.ignored_warnings("thr"):
            for each in ("two", "three"):
                warnings.warn_explicit(each, UserWarning, "a.py", 2, registry=REGISTRY)
    assert shown == ["one", "two"]


REGISTRY: dict[Any, Any] = {}


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
def test_a_program_that_sets_the_precision_of_one_backend_is_measured(tmp_path: Path) -> None:
    def run() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        Loop()()

    found = probed(tmp_path, run)
    assert (found.code, len(found.steps)) == (0, 12)
    assert "performance.matmul_precision" not in found.settings
