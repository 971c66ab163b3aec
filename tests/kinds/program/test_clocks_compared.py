"""Whether the clocks of real programs are compared with the host's, and no true one is accused."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import forked
import pytest
from places import SUPPORT
from running import Finished, gpubench, started, wait_for_steps

from gpubench.runs.clocks import ClockRates

PROGRAM = str(SUPPORT / "clocked_program.py")
OPTIONS = ("--steps", "all", "--training.warmup_steps", "2", "-q")


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forked.PROGRAMS, "1")


def words(seconds: float, speed: float) -> tuple[str, ...]:
    return ("--", sys.executable, PROGRAM, str(seconds), str(speed))


def rates(run: Finished) -> list[ClockRates]:
    """The bounds in all repeats, which there have to be."""
    assert run.code == 0, run.stderr
    return [ClockRates(**found) for found in run.document("summary.json")["clock_rates"]]


def test_a_true_clock_is_compared_in_each_repeat_and_not_accused(tmp_path: Path) -> None:
    found = rates(gpubench("train-bench", "--repeats", "2", *OPTIONS, *words(0.6, 1), results=tmp_path))
    assert len(found) == 2
    for one in found:
        assert one.low <= 1.0 <= one.high
        assert one.agree is not False
        assert one.seconds > 0.1


@pytest.mark.parametrize("speed", [0.1, 10.0])
def test_a_false_clock_is_found_by_its_rate(tmp_path: Path, speed: float) -> None:
    (found,) = rates(gpubench("train-bench", "--repeats", "1", *OPTIONS, *words(1.2, speed), results=tmp_path))
    assert found.low <= 1 / speed <= found.high
    assert found.agree is False


def test_a_model_of_gpubench_has_no_clock_to_compare(finished_run: Path) -> None:
    assert json.loads((finished_run / "summary.json").read_text())["clock_rates"] == []


@pytest.mark.parametrize("who", ["host", "program"])
def test_a_host_or_a_program_that_is_stopped_for_a_second_accuses_nobody(tmp_path: Path, who: str) -> None:
    with started("train-bench", "--repeats", "1", *OPTIONS, *words(3.0, 1), results=tmp_path) as run:
        wait_for_steps(tmp_path, 5)
        stopped = [run.process.pid] if who == "host" else [one.pid for one in run.workers]
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)
            time.sleep(1.0 if sent is signal.SIGSTOP else 0.0)
        (found,) = rates(run.finish(60))
    assert found.low <= 1.0 <= found.high
    assert found.agree is not False
