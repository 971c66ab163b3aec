"""The stopwatch of planted_data.py, which spends the time that is planted in the stages and knows how much that is.

data_cost.py puts it into a folder of packages, so that for gpubench it is no code of the program.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpubench.probe.fetching import ALONE_VARIABLE

LARGEST, OTHER = 5e-3, 0.2e-3
"""The seconds of the cost that is planted, for each sample, and of that in every other stage."""
TOUCHED = 24
"""The mebibytes of memory that are touched as a cost."""


@dataclass(frozen=True)
class Case:
    stage: str
    """The stage that has the largest cost."""
    cost: str
    """What it consists of: "sleep", "burn", "touch", or "work" for one that consists of what its stage does."""
    workers: int = 0
    start: str = ""
    style: str = "map"

    def __str__(self) -> str:
        how = f"{self.workers} workers by {self.start}" if self.workers else "no workers"
        return f"{self.stage}, {self.cost}, {self.style}-style, {how}"


class Truth:
    """What this process has timed."""

    def __init__(self, folder: Path, case: Case) -> None:
        self._folder, self._case = folder, case
        self._seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Count the time in here as that of the stage, without what is timed inside it."""
        self._inside.append(0.0)
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        inside = self._inside.pop()
        if self._inside:
            self._inside[-1] += took
        self._seconds[stage] = self._seconds.get(stage, 0.0) + took - inside

    def spend(self, stage: str, samples: int = 1) -> None:
        """Spend the time that is planted in a stage for so many samples."""
        with self.of(stage):
            seconds, kind = (LARGEST, self._case.cost) if stage == self._case.stage else (OTHER, "sleep")
            if kind == "sleep":
                time.sleep(samples * seconds)
            elif kind == "burn":
                until = time.thread_time() + samples * seconds
                while time.thread_time() < until:
                    pass
            elif kind == "touch":
                for _ in range(TOUCHED * samples):
                    np.ones(2**20, dtype=np.uint8).sum()

    def end_batch(self, what: str) -> None:
        """Write what was timed since the batch before, if gpubench counts it."""
        seconds, self._seconds = self._seconds, {}
        if os.environ.get(ALONE_VARIABLE, "").startswith("timed"):
            with (self._folder / f"{what}-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(seconds) + "\n")
