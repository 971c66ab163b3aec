"""How a tool runs the command line: line by line, to its end, and to its end also if nobody waits for it any longer."""

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest
from places import SUPPORT
from running import environment, processes_of

pytest.importorskip("mcp")  # which brings anyio

import anyio

from gpubench.agents import command_line
from gpubench.agents.command_line import GPUBENCH, CommandLine, Ended
from gpubench.errors import Interrupted, UsageError


def stand_in(code: str) -> CommandLine:
    """Returns what runs `code` in place of gpubench."""
    return CommandLine((sys.executable, "-S", "-c", textwrap.dedent(code)))


async def nothing(seconds: float, line: str) -> None:
    pass


def ended(code: str, folder: Path, told: Callable[[float, str], Awaitable[None]] = nothing, *words: str) -> Ended:
    return anyio.run(lambda: stand_in(code).run(words, folder, told))


def test_the_words_reach_the_command_as_they_are_and_it_works_in_the_directory(tmp_path: Path) -> None:
    words = ("$HOME", "a b", "; touch x", "*", "")
    found = ended("import sys, os; print(sys.argv[1:], os.getcwd(), sys.stdin.read())", tmp_path, nothing, *words)
    assert found == Ended(0, f"{list(words)} {tmp_path.resolve()} \n", ())


def test_progress_is_told_line_by_line_without_colours_and_errors_are_not_progress(tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []

    async def tell(seconds: float, line: str) -> None:
        told.append((seconds, line))

    code = r"""
        import sys
        sys.stderr.write("one\n\x1b[1;31mtwo\x1b[0m\nthr\udcff\nerror: no\nhint: yes\nlast" + "x" * 1000)
        sys.exit(3)
    """
    found = ended(code, tmp_path, tell)
    lines = [line for _, line in told]
    assert lines[:2] == ["one", "two"]
    assert lines[3].startswith("lastx")
    assert len(lines[3]) == command_line.MOST_OF_A_LINE
    assert [seconds for seconds, _ in told] == sorted(seconds for seconds, _ in told)
    assert (found.code, found.error) == (3, "error: no\nhint: yes")


def test_a_failure_without_an_error_message_keeps_its_last_lines(tmp_path: Path) -> None:
    found = ended("import sys; sys.exit('\\n'.join(map(str, range(100))) + 'x' * 5000)", tmp_path)
    first, *last = found.error.splitlines()
    assert first == "error: gpubench ended with 1"
    assert last[:-1] == [*map(str, range(80, 99))]
    assert last[-1].startswith("99x")
    assert len(last[-1]) == command_line.MOST_OF_A_LINE


@pytest.mark.parametrize("word", ["a\0b", "x" * 10_000_000])
def test_a_word_that_no_process_can_be_given_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(UsageError, match="cannot be started with these words"):
        ended("", tmp_path, nothing, word)


def cancelled(code: str, folder: Path) -> None:
    """Cancels the command once it has written the file `started`."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stand_in(code).run, (), folder, nothing)
            while not (folder / "started").exists():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    anyio.run(main)


def test_a_cancelled_command_gets_ctrl_c_and_is_waited_for_while_it_writes_its_results(tmp_path: Path) -> None:
    code = """
        import pathlib, sys, time
        try:
            pathlib.Path("started").touch()
            time.sleep(600)
        except KeyboardInterrupt:
            for stream in (sys.stdout, sys.stderr):
                stream.write("x" * 1_000_000)  # more than a pipe holds
            pathlib.Path("ended").touch()
    """
    cancelled(code, tmp_path)
    assert (tmp_path / "ended").exists()


def test_a_command_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "SECONDS_TO_END", 0.1)
    code = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path("pid").write_text(str(os.getpid()))
        pathlib.Path("started").touch()
        time.sleep(600)
    """
    cancelled(code, tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_all_commands_end_when_the_server_does_and_none_begins_that_waited(tmp_path: Path) -> None:
    code = """
        import pathlib, sys, time
        pathlib.Path("started" + sys.argv[1]).touch()
        try:
            time.sleep(600)
        finally:
            pathlib.Path("ended" + sys.argv[1]).touch()
    """
    ended: list[str] = []

    async def main() -> None:
        commands = stand_in(code)

        async def run(start: Callable[..., Awaitable[Ended]], name: str) -> None:
            with pytest.raises(Interrupted):
                await start((name,), tmp_path, nothing)
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, commands.run, "reads")
            for name in ("measures", "waits"):
                tasks.start_soon(run, commands.measure, name)
                await anyio.sleep(0)
            while len([*tmp_path.glob("started*")]) < 2:
                await anyio.sleep(0.01)
            await commands.end_all()
            assert {path.name for path in tmp_path.iterdir()} == {
                "startedreads",
                "endedreads",
                "startedmeasures",
                "endedmeasures",
            }

    anyio.run(main)
    assert sorted(ended) == ["measures", "reads", "waits"]
    assert not (tmp_path / "startedwaits").exists()


def test_measurements_run_one_after_the_other_and_the_second_is_told_that_it_waits(tmp_path: Path) -> None:
    code = """
        import os, pathlib, time
        others = pathlib.Path("running")
        others.mkdir()  # fails if another one runs
        time.sleep(0.1)
        others.rmdir()
        print("[]")
    """
    told: list[str] = []
    found: list[Ended] = []

    async def tell(seconds: float, line: str) -> None:
        told.append(line)

    async def main() -> None:
        commands = stand_in(code)

        async def measure() -> None:
            found.append(await commands.measure((), tmp_path, tell))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(measure)

    anyio.run(main)
    assert [json.loads(one.output) for one in found] == [[], [], []]
    assert told == ["waits until the measurement before it has ended"] * 2


def killed(folder: Path, launcher: Sequence[str], words: Sequence[str], started: str) -> None:
    """Kills a server that runs a command of the launcher, once there is a file that matches `started`."""
    code = f"""
        import anyio, pathlib
        from gpubench.agents.command_line import CommandLine

        async def nothing(seconds, line):
            pass

        anyio.run(lambda: CommandLine({list(launcher)}).measure({list(words)}, pathlib.Path({str(folder)!r}), nothing))
    """
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment())
    try:
        while not [*folder.glob(started)]:
            assert server.poll() is None
            time.sleep(0.01)
    finally:
        server.kill()
        server.wait()


def test_a_command_gets_ctrl_c_if_the_server_is_killed(tmp_path: Path) -> None:
    code = """
        import pathlib, time
        try:
            pathlib.Path("started").touch()
            time.sleep(600)
        except KeyboardInterrupt:
            pathlib.Path("ended").touch()
    """
    killed(tmp_path, (sys.executable, "-S", "-c", textwrap.dedent(code)), (), "started")
    while not (tmp_path / "ended").exists():
        time.sleep(0.01)


@pytest.mark.stress
def test_a_killed_server_leaves_no_process_of_the_program_that_it_measured(tmp_path: Path) -> None:
    program = [sys.executable, str(SUPPORT / "training_program.py"), "5", "hang"]
    words = ("train-bench", "--json", "--repeats", "1", "--steps", "500", "--", *program)
    killed(tmp_path, GPUBENCH, words, "results/*/*/steps.jsonl")
    (run,) = tmp_path.glob("results/*/*/run.json")
    while json.loads(run.read_text())["status"] == "running" or processes_of(program):
        time.sleep(0.05)
    assert json.loads(run.read_text())["status"] == "interrupted"


def test_of_a_document_and_of_lines_without_end_only_a_part_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "MOST_OUTPUT", 100_000)
    code = "import sys; sys.stderr.write('x' * 10**6 + '\\n' + 'line\\n' * 5000); print('y' * {})"
    done = ended(code.format(10_000), tmp_path)
    assert (len(done.output), len(done.lines)) == (10_001, command_line.MOST_LINES)
    told: list[str] = []

    async def tell(seconds: float, line: str) -> None:
        told.append(line)

    with pytest.raises(UsageError, match="the command printed 977 KiB"):
        ended(code.format(1_000_000), tmp_path, tell)
    assert max(map(len, told)) <= command_line.MOST_OF_A_LINE
