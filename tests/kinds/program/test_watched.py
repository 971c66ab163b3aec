"""The numbers that a pattern finds in what a program prints, and patterns that would never come to an end."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import complaint
from running import PATIENCE, Finished

from gpubench.kinds.program import matching, watched
from gpubench.kinds.program.watched import WatchedOutput

ENDLESS = "(a+)+$"
UNSEEN = r"(?:[\x51]+)+:(\d)"
"""A pattern that no line of a trial shows to be endless, as none has its letter Q."""


@pytest.mark.parametrize("pattern", [ENDLESS, r"(?:acc|loss|accloss)*=(\d)", r"(.*)(.*)(.*)=x", r"(?:é|[é ]|  )+(\d)x"])
def test_a_slow_pattern_is_refused(
    command_line: Callable[..., Finished], tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "TRIAL_SECONDS", 0.5)
    said, hint = complaint(command_line("train-bench", "--watch", pattern, "--", sys.executable, "-c", "pass"))
    assert said == f"program.watch: {pattern!r} is not done with lines of 1000 characters after 0.5 s"
    assert "val_loss=([0-9.]+)" in hint
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("pattern", ["(" * 500 + ")" * 500, "a" * 1001, "((x){1,1000}){1,99999999999}"])
def test_a_pattern_that_python_cannot_use_or_that_is_too_long_is_refused(
    command_line: Callable[..., Finished], pattern: str
) -> None:
    said, _ = complaint(command_line("train-bench", "--watch", pattern, "--", sys.executable, "-c", "pass"))
    assert said.startswith("program.watch")
    assert any(reason in said for reason in ("is not a regular expression", "at most 1000 characters"))


@pytest.mark.parametrize("pattern", ["val_loss=([0-9.]+)", r".*(?<!val_)loss: (?P<loss>.*?) acc: (?P<acc>.*)$"])
def test_an_ordinary_pattern_is_not_refused(pattern: str) -> None:
    WatchedOutput(pattern)


def test_a_pattern_that_turns_out_to_take_too_long_ends_its_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "SECONDS", 0.5)
    output = WatchedOutput(UNSEEN)
    output.add(b"QQ:1\n")
    output.begin(1)
    assert output.warning is None
    output.add(b"Q" * 900 + b"\nQQ:2\n")
    output.begin(2)
    output.add(b"QQ:3\n")
    assert output.of_repeats([0, 1, 2]) == {"watched": [[1.0], [], []]}
    assert output.warning == (
        "what program.watch finds is unknown from repeat 2 on: the search of its output was not done after 0.5 s"
    )


def test_a_search_ends_by_itself() -> None:
    def ignore_and_block() -> None:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])

    command = [sys.executable, "-I", "-S", str(matching.__file__), "0.2"]
    search = subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=ignore_and_block)
    search.communicate(b'"(a+)+$"\n' + b"a" * 900 + b"!\n", PATIENCE)
    assert search.returncode == -signal.SIGPROF


def test_a_search_that_somebody_has_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopping = tmp_path / "python"
    stopping.write_text("#!/bin/sh\nkill -STOP $$\n")
    stopping.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stopping))
    assert matching.numbers("(a)", b"a\n", 0.05) is None


def test_a_search_has_a_limit_of_memory() -> None:
    assert matching.numbers(r"(?:a?){4000000000}(\d)", b"a" * 100 + b"1\n", 60.0) is None
