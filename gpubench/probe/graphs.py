"""Finds what the program captures in CUDA graphs, because the replay of a captured update is an update.

A capture computes nothing, so that it belongs to no step. A replay computes all that was captured.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional
from weakref import WeakKeyDictionary

import torch

from .batches import DrawnBatches
from .counted import Counted
from .device import Timing
from .timeline import LoopPart
from .treatments import stand_in

GRAPH_CAPTURE, GRAPH_REPLAY = "graph_capture", "graph_replay"


class Computed(NamedTuple):
    """What a graph computes for an update, or after the last one."""

    owner: Any
    """The optimizer that updates, or the module whose call is inference; None after the last update."""
    part: LoopPart
    counted: Counted


class Captured:
    """What one graph has captured, and what the program has done before, which is set aside during the capture."""

    def __init__(self, part: LoopPart, drawn: DrawnBatches, counted: Counted, depth: int) -> None:
        self.aside: tuple[LoopPart, DrawnBatches, Counted] | None = (part, drawn, counted)
        self.depth = depth
        """The number of phases that were open when it began."""
        self.updates: list[Computed] = []
        self.rest: Computed | None = None
        self.replays = 0

    @property
    def trains(self) -> bool:
        return bool(self.updates or (self.rest and self.rest.counted.passes))


class Graphs:
    """The CUDA graphs of this process."""

    def __init__(
        self,
        begin: Callable[[], Optional[Captured]],
        end: Callable[[Captured], None],
        replay: Callable[[Captured, Callable[[], Any]], Any],
    ) -> None:
        """`begin` is called before a capture, and returns None for one that is not followed; `end` after the capture.

        `replay` replays a graph with a captured update or backward pass.
        """
        self._callbacks = begin, end, replay
        self._captured: WeakKeyDictionary[Any, Captured] = WeakKeyDictionary()

    def install(self) -> None:
        graph = getattr(torch.cuda, "CUDAGraph", None)
        if graph is not None:
            stand_in(graph, "capture_begin", self._capture_begin)
            stand_in(graph, "capture_end", self._capture_end)
            stand_in(graph, "replay", self._replay)

    def _capture_begin(self, call: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured = self._callbacks[0]()
        self._captured.pop(graph, None)
        if captured:
            self._captured[graph] = captured
        Timing.captures += 1
        try:
            return call(graph, *args, **kwargs)
        except BaseException:
            self._end(graph)
            raise

    def _capture_end(self, call: Callable[..., Any], graph: Any) -> Any:
        try:
            return call(graph)
        finally:
            self._end(graph)

    def _end(self, graph: Any) -> None:
        Timing.captures = max(0, Timing.captures - 1)  # a capture that never began may be ended too
        captured = self._captured.get(graph)
        if captured and captured.aside:
            self._callbacks[1](captured)

    def _replay(self, call: Callable[..., Any], graph: Any) -> Any:
        captured = self._captured.get(graph)
        if captured is None or not captured.trains:
            return call(graph)
        captured.replays += 1
        return self._callbacks[2](captured, lambda: call(graph))
