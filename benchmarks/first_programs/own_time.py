"""A program's own stopwatch: CUDA events on the device that it names, which are read after the last step."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

FIRST = 5


class OwnTime:
    """Times the parts of each step on `device`, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[tuple[str, Any]]] = []
        self._until = 0.0

    @property
    def steps(self) -> int:
        return len(self._steps)

    def goes_on(self, seconds: float, most: int) -> bool:
        """Returns whether one more step is to be issued, of at most `most`.

        They are issued for `seconds` from the last of the FIRST ones on, which may compile and search for algorithms.
        """
        if self.steps == FIRST:
            self._until = time.monotonic() + seconds
        return self.steps < most and (self.steps <= FIRST or time.monotonic() < self._until)

    def begin(self) -> None:
        """Begins a step, and with it its first part."""
        self._steps.append([("", self._event())])

    def end(self, part: str) -> None:
        """Ends a part of the current step. Parts of one name are added."""
        self._steps[-1].append((part, self._event()))

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, path: Path, **facts: Any) -> None:
        """Writes the seconds of each part of each step, those from the end of one step to the next, and `facts`."""
        torch.cuda.synchronize(self._device)
        parts = []
        for step in self._steps:
            seconds: dict[str, float] = {}
            for (_, before), (name, after) in pairwise(step):
                seconds[name] = seconds.get(name, 0.0) + before.elapsed_time(after) / 1e3
            parts.append(seconds)
        totals = [before[-1][1].elapsed_time(after[-1][1]) / 1e3 for before, after in pairwise(self._steps)]
        path.write_text(json.dumps({"parts": parts, "totals": totals, **facts}))
