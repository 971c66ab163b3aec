"""Processes of a program that train and are not measured: what is told of them."""

import os
import shlex
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from places import SUPPORT
from probing import Loop
from running import gpubench

from gpubench import events
from gpubench.kinds.program import beside
from gpubench.kinds.program.beside import StartedProcess
from gpubench.probe.steady import SteadyProbe

SHELL = StartedProcess(1, ("sh", "train.sh"))
FIRST = StartedProcess(2, ("python", "a.py"))
SECOND = StartedProcess(3, ("python", "b.py", "--lr", "1 2"))
SPAWNED = ("python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork")


def told(
    *found: StartedProcess, measured: tuple[StartedProcess, ...], repeat: int = 0, later: bool = False
) -> events.Unmeasured:
    return beside.unmeasured(found, measured, repeat, later=later)


def test_a_later_program_of_a_script_is_named_with_its_own_command() -> None:
    one = told(SHELL, SECOND, measured=(SHELL, FIRST))
    assert (one.is_own, one.command, one.measured) == (True, "python b.py --lr '1 2'", "python a.py")
    said = beside.warning([one], 1, inference=False)
    assert said == (
        "2 processes of the program trained, and 1 was measured: the first to take a step, of python a.py; not "
        "measured: python b.py --lr '1 2'; give one such command alone after -- to measure it"
    )


def test_the_ranks_of_another_launcher_are_named_with_the_launcher() -> None:
    launchers = [StartedProcess(number, ("torchrun", f"{name}.py")) for number, name in ((2, "a"), (5, "b"))]
    ranks = [StartedProcess(number, ("python", "-u", f"{name}.py")) for number, name in ((3, "a"), (6, "b"), (7, "b"))]
    measured = (SHELL, launchers[0], ranks[0])
    found = [told(SHELL, launchers[1], rank, measured=measured, later=True) for rank in ranks[1:]]
    said = beside.warning(found, 2, inference=False)
    assert said is not None
    assert "4 processes of the program trained, and 2 were measured: the ranks of torchrun a.py" in said
    assert "not measured: torchrun b.py (2 processes)" in said


@pytest.mark.parametrize(
    ("found", "measured"),
    [
        ((FIRST, StartedProcess(8, FIRST.words)), (FIRST, StartedProcess(7, FIRST.words))),  # both forked
        ((FIRST, StartedProcess(8, FIRST.words)), (FIRST,)),  # a fork of the rank itself
        ((FIRST, StartedProcess(8, SPAWNED)), (FIRST, StartedProcess(7, SPAWNED))),
        ((FIRST, StartedProcess(8, SPAWNED)), (FIRST,)),
        ((StartedProcess(9, ()),), (FIRST,)),  # it has ended already
        ((), (FIRST,)),
    ],
)
def test_another_process_of_the_same_command_is_not_said_to_be_a_command(
    found: tuple[StartedProcess, ...], measured: tuple[StartedProcess, ...]
) -> None:
    one = told(*found, measured=measured)
    assert (one.is_own, one.measured) == (False, "python a.py")
    said = beside.warning([one], 1, inference=True) or ""
    assert "2 processes of the program called a model, and 1 was measured: the first to take a step, of" in said
    assert "process group" in said
    assert "after --" not in said


def test_of_several_repeats_the_one_with_the_most_such_processes_is_told() -> None:
    one = told(SHELL, SECOND, measured=(SHELL, FIRST))
    other = [told(SHELL, FIRST, StartedProcess(n, FIRST.words), measured=(SHELL, FIRST), repeat=1) for n in (8, 9)]
    said = beside.warning([one, *other], 1, inference=False) or ""
    assert said.startswith("3 processes of the program trained, and 1 was measured")
    assert beside.warning([], 1, inference=False) is None


def test_the_ancestry_of_a_process_begins_with_the_first_one_of_the_program() -> None:
    own, parent = psutil.Process(), psutil.Process().parent()
    assert parent
    assert [each.pid for each in beside.ancestry(own.pid, parent.pid)] == [parent.pid, own.pid]
    assert beside.ancestry(own.pid, own.pid) == [StartedProcess(own.pid, tuple(own.cmdline()))]
    assert [each.pid for each in beside.ancestry(own.pid, 2**30)] == [own.pid]  # not below it
    assert beside.ancestry(2**30, own.pid) == []


@pytest.mark.parametrize("command", ["train-bench", "memory"])
def test_a_program_that_trains_after_the_measured_one_is_told(tmp_path: Path, command: str) -> None:
    program = str(SUPPORT / "training_program.py")
    one, other = (shlex.join([sys.executable, program, str(steps), "0"]) for steps in (500, 400))
    options = ["--repeats", "1", "--steps", "20"] if command == "train-bench" else ["--memory.steps=3"]
    run = gpubench(command, *options, "-q", "--", "sh", "-c", f"{one}; {other}; exit 0", results=tmp_path)
    assert run.code == 0, run.stderr
    (said,) = (each for each in run.document("summary.json")["warnings"] if "processes of the program" in each)
    assert said.startswith("2 processes of the program trained, and 1 was measured: the first to take a step, of ")
    assert f"{program} 500 0"[-60:] in said or "..." in said


def test_a_fork_of_a_rank_tells_the_host_once_that_it_trains(tmp_path: Path) -> None:
    address = str(tmp_path / "host")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if not (child := os.fork()):
            os._exit(forked_as_it_trains(address))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        listener.setblocking(False)
        connection, _ = listener.accept()
        with connection:
            seen = events.greeting(connection.recv(4096), "")
        assert isinstance(seen, events.Seen)
        assert seen.what == "trained"
        with pytest.raises(BlockingIOError):
            listener.accept()


def forked_as_it_trains(address: str) -> int:
    """Trains in a fork of a process that the host knows as a rank, and returns its exit code."""
    probe = SteadyProbe(address, {})
    probe.install()
    probe._host = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    if not (child := os.fork()):
        Loop()()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
