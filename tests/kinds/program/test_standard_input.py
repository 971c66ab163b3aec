"""What programs of the user get as their standard input."""

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
from places import SUPPORT
from running import environment

from gpubench.errors import ProgramFailed
from gpubench.kinds.program import standard_input
from gpubench.kinds.program.standard_input import InputFeed, StandardInput

BINARY = bytes(range(256)) * 1000
PROGRAM = str(SUPPORT / "training_program.py")


@contextmanager
def piped(data: bytes, *, ends: bool = True) -> Iterator[StandardInput]:
    """Yields standard input that is a pipe with `data` in it, which `ends` after it or stays open."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(data)
            file.flush()
            if not ends:
                stays.wait()

    given, stays = StandardInput(reading), threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield given
    finally:
        given.close()
        stays.set()
        os.close(reading)
        writer.join()


def read(feed: InputFeed, number: int = -1) -> bytes:
    """Reads `number` bytes, or until the end, as a program would that is started with the feed."""
    assert feed.descriptor >= 0
    with os.fdopen(os.dup(feed.descriptor), "rb") as file:
        feed.release()
        found = file.read(number)
    feed.close()
    return found


def test_each_start_gets_all_of_a_pipe() -> None:
    with piped(BINARY) as given:
        assert [read(given.feed()) for _ in range(3)] == [BINARY] * 3
        assert not given.is_awaited


def test_a_start_that_reads_more_than_the_one_before_gets_the_rest_as_it_comes() -> None:
    with piped(BINARY) as given:
        assert read(given.feed(), 10) == BINARY[:10]
        assert read(given.feed()) == BINARY
        feed = given.feed()
        feed.close()  # one that never reads
        assert read(given.feed()) == BINARY


def test_a_stream_without_an_end_is_given_as_far_as_it_has_come() -> None:
    with piped(b"12345", ends=False) as given:
        assert [read(given.feed(), 5) for _ in range(2)] == [b"12345"] * 2
        assert given.is_awaited


def test_each_start_reads_a_file_from_where_it_was_given_and_leaves_it_there(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"head" + BINARY)
    with path.open("rb", buffering=0) as file:
        file.seek(4)
        path.unlink()  # as that of a here-document
        given = StandardInput(file.fileno())
        assert [read(given.feed()) for _ in range(2)] == [BINARY] * 2
        assert file.tell() == 4


def test_a_terminal_and_a_closed_descriptor_are_not_passed_on() -> None:
    ours, theirs = os.openpty()
    given = StandardInput(theirs)
    assert given.feed().descriptor == subprocess.DEVNULL
    for each in (ours, theirs):
        os.close(each)
    feed = given.feed()
    assert feed.descriptor == subprocess.DEVNULL
    feed.close()
    assert StandardInput(-1).feed().descriptor == subprocess.DEVNULL


def test_an_empty_input_is_at_its_end() -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    given = StandardInput(number)
    assert [read(given.feed()) for _ in range(2)] == [b"", b""]
    given.close()
    os.close(number)


def test_more_than_is_kept_can_be_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_input, "MOST_KEPT", 1000)
    with piped(BINARY) as given:
        assert read(given.feed()) == BINARY
        with pytest.raises(ProgramFailed, match="more than 1000 B came through a pipe") as error:
            given.feed()
    assert "< FILE" in (error.value.hint or "")


def test_later_repeats_that_have_at_once_what_the_first_waited_for_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "gpubench.program"):
        with piped(b"y\n") as given:
            assert [read(given.feed()) for _ in range(2)] == [b"y\n"] * 2
        assert not caplog.messages
        with piped(BINARY) as given:
            assert [read(given.feed()) for _ in range(3)] == [BINARY] * 3
        (said,) = caplog.messages
    assert "250 KiB" in said


@pytest.mark.parametrize("command", ["train-bench", "profile", "memory"])
def test_each_repeat_and_side_of_a_program_gets_the_standard_input_of_gpubench(tmp_path: Path, command: str) -> None:
    program = tmp_path / "reads.py"
    program.write_text(
        "import hashlib, runpy, sys\n"
        "sys.stdout.write(hashlib.sha256(sys.stdin.buffer.read()).hexdigest() + chr(10))\n"
        f"runpy.run_path({PROGRAM!r}, run_name='__main__')\n"
    )
    options = {
        "train-bench": ["--repeats", "2", "--steps", "5", "--vs-args", "0"],
        "profile": ["--repeats", "1", "--steps", "5"],
        "memory": ["--memory.steps=2", "--vs-args", "0"],
    }[command]
    words = [sys.executable, "-m", "gpubench", command, "--results", str(tmp_path / "results"), *options, "-q", "--"]
    reading, writing = os.pipe()
    os.write(writing, BINARY[:3000])
    os.close(writing)
    with os.fdopen(reading, "rb") as given:
        done = forked.run([*words, sys.executable, str(program), "500", "0"], 300, stdin=given, env=environment())
    assert done.returncode == 0, done.stderr
    printed = "".join(path.read_text() for path in tmp_path.glob("results/*/*/output.log"))
    starts = printed.count(hashlib.sha256(BINARY[:3000]).hexdigest())
    assert starts == {"train-bench": 4, "profile": 2, "memory": 2}[command]
