"""The machine that a check runs on, and how it runs a program of first_programs/ there: alone, or by gpubench."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import last_words, run_for, without_settings

from gpubench.devices import Gpu
from gpubench.tuning.result import FILE, Tuning, read

PROGRAMS = Path(__file__).resolve().parents[1] / "first_programs"
PATIENCE = 150.0  # seconds for one process, of which some compile
SEARCH = 240.0  # and for a search, which has a budget of its own
CLEANING = 8.0  # seconds in which an interrupted process may clean up, less than those that its check has
ERROR = re.compile(r"(error|[\w.]*Error|[\w.]*Exception|torch[\w.]*): .")  # torch: one of its own exceptions
WORDS = 200  # characters of the reason for a failure


class Failed(Exception):
    """A process failed or ran out of time. Its argument is the reason in one line."""


@dataclass(frozen=True)
class Here:
    folder: Path
    """For run directories and for what the programs write."""
    gpus: Sequence[Gpu]
    tiny: bool = False
    """Whether the programs are so small that a simulated GPU computes them. Their times mean nothing."""
    parts: Sequence[str] = field(default_factory=tuple)
    """The parts of the check to run; empty for all."""

    @property
    def root(self) -> Path:
        return PROGRAMS.parents[1]

    def wants(self, part: str) -> bool:
        return not self.parts or part in self.parts

    def alone(self, program: str, *arguments: str) -> Any:
        """Returns what a program wrote that ran without gpubench. Raises Failed."""
        output = self._place("alone")
        _run(self._program(program, output, arguments), self.root)
        return json.loads(output.read_text())

    def measured(self, program: str, *arguments: str, options: Sequence[str] = ()) -> tuple["Run", Any]:
        """Returns the run that gpubench made of a program, and what the program wrote in it. Raises Failed."""
        output = self._place("measured")
        command = self._program(program, output, arguments)
        run = self.run("train-bench", "--steps=all", "--repeats=1", *options, program=command)
        return run, json.loads(output.read_text())

    def searched(self, program: str, *arguments: str, options: Sequence[str]) -> Tuning:
        """Returns what a search for the fastest settings of a program found. Raises Failed."""
        command = self._program(program, self._place("searched"), arguments)
        results = self._call("tune", *options, program=command, limit=SEARCH)
        return read(max(results.glob(f"*/{FILE}")).parent)

    def run(self, command: str, *options: str, program: Sequence[str] = ()) -> "Run":
        """Returns the run of a command of gpubench. Raises Failed."""
        return Run(max(self._call(command, *options, program=program).glob("*/*/run.json")).parent)

    def _call(self, command: str, *options: str, program: Sequence[str], limit: float = PATIENCE) -> Path:
        """Runs a command of gpubench, and returns its folder of results. Raises Failed."""
        results = self._place(command)
        called = [sys.executable, "-m", "gpubench", command, "--quiet", "--results", str(results)]
        _run([*called, *options, *(("--", *program) if program else ())], self.root, limit)
        return results

    def _program(self, name: str, output: Path, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, str(PROGRAMS / name), str(output), *arguments]

    def _place(self, name: str) -> Path:
        """A path that is not there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}-{sum(1 for _ in self.folder.iterdir())}"


def _run(command: Sequence[str], folder: Path, limit: float = PATIENCE) -> None:
    ended = run_for(command, limit, folder, without_settings(), together=True, patience=CLEANING)
    if ended.code is None:
        raise Failed(f"not done after {limit:.0f} s")
    if ended.code:
        raise Failed(reason(ended.printed) or f"exit code {ended.code}")


def reason(printed: str) -> str:
    """Returns the error that a program ended with, in one line, or else the last line that it printed."""
    errors = [line.strip() for line in printed.splitlines() if ERROR.match(line)]
    return (errors[-1].removeprefix("error: ") if errors else last_words(printed))[:WORDS]


@dataclass(frozen=True)
class Run:
    """A run directory of one repeat."""

    path: Path

    def document(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    def metrics(self) -> dict[str, float]:
        """The estimates by name."""
        return {one["name"]: one["estimate"] for one in self.document("summary.json")["metrics"]}

    def steps(self, rank: int = 0) -> list[Any]:
        return [step for step in self.lines("steps.jsonl") if step["rank"] == rank]

    def window(self) -> Any:
        """The steady window of the repeat: `first`, `steps`, `start` and `end`; None if there is none."""
        return next(iter(self.document("summary.json")["steady"]), None)

    def last(self, rank: int = 0) -> tuple[int, int]:
        """The steps of the steady window, counted from the last step back: from the first one to the one after it.

        They are none if the run has no steady window.
        """
        count, window = len(self.steps(rank)), self.window()
        return (count - window["first"], count - window["first"] - window["steps"]) if window else (0, 0)


def within(values: Sequence[Any], last: tuple[int, int]) -> Sequence[Any]:
    """Returns the values of the steps that `Run.last` names. Values are of one step each, up to the last step."""
    first, after = last
    return values[max(0, len(values) - first) : len(values) - after]
