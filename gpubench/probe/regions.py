"""Makes phases of the program's own `torch.profiler.record_function` regions.

A region splits the time outside of the phases that the probe finds itself: what runs in the forward or backward pass, a
loader or an optimizer belongs to these, also inside of a region.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from .timeline import EVALUATION, Timeline

MOST_NAMES = 16
"""The largest number of regions that become phases."""
MOST_WAITING = 256
"""The largest number of names of which one region has been seen."""
LONGEST_NAME = 40
MEASURED = frozenset({
    "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer", EVALUATION, "other",
})  # fmt: skip
"""The names of the other phases. A region with one of them is left to that phase."""


class Regions:
    """The regions of the thread that trains."""

    def __init__(self, timeline: Callable[[], Timeline | None]) -> None:
        """`timeline` returns the current timeline; None if the calling thread is not measured."""
        self._timeline = timeline
        self._names: dict[str, str] = {}
        """The phases by the names of their regions."""
        self._waiting: dict[str, int] = {}
        """The number of the part in which a name was seen first. A name that changes in every step is no phase."""
        self._open: dict[int, list[tuple[Timeline, int, str] | None]] = {}
        """For each region object that has been entered, where its phases are on the timeline; None for no phase."""

    def enter(self, call: Callable[..., Any], region: Any) -> Any:
        found = call(region)
        if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            timeline = self._timeline()
            phase = self._phase(region, timeline) if timeline else None
            if timeline and phase:
                self._open.setdefault(id(region), []).append((timeline, timeline.depth, phase))
                timeline.enter(phase)
            elif id(region) in self._open:
                self._open[id(region)].append(None)
        return found

    def leave(self, call: Callable[..., Any], region: Any, *error: Any) -> Any:
        if self._open and (entered := self._open.get(id(region))):
            place = entered.pop()
            if not entered:
                del self._open[id(region)]
            if place:
                timeline, depth, phase = place
                timeline.leave_at(depth, phase)
        return call(region, *error)

    @staticmethod
    def cut(timeline: Timeline) -> None:
        """Ends the regions that run at the end of a part: one around the whole loop is no phase of its steps."""
        for depth, phase in reversed(list(enumerate(timeline.open))):
            if phase not in MEASURED:
                timeline.leave_at(depth, phase)

    def _phase(self, region: Any, timeline: Timeline) -> str | None:
        """Returns the phase of a region that begins now; None if its time belongs to another phase."""
        if timeline.base == EVALUATION or any(name in MEASURED for name in timeline.open):
            return None
        name = region.name
        if name not in self._names:
            if not isinstance(name, str) or len(self._names) >= MOST_NAMES or len(self._waiting) >= MOST_WAITING:
                return None
            phase = "".join(each if each.isprintable() else " " for each in name).strip()[:LONGEST_NAME]
            if not phase or phase in MEASURED or self._waiting.setdefault(name, timeline.ended) == timeline.ended:
                return None
            self._names[name] = phase
            del self._waiting[name]
        return self._names[name]


_OWN = ("torch", (__package__ or "").partition(".")[0])
"""The packages whose regions are none of the program."""
