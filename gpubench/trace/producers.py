"""Which program wrote a trace, where torch.profiler did not.

Many programs write Chrome's format. They differ in the categories of their events, in the names of the processes, and
in what stands beside the events.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubench import units
from gpubench.trace.events import LEFT_OUT, OF_DEVICES, Event

SPANS = "XBE"
"""Phases of events that last: whole ones, and those that are written as a beginning and an end."""
TOLD = 4  # categories that a message names

_VIZTRACER = "VizTracer"
_SYSTRACE = "Android's systrace or Perfetto"
_XLA = "JAX, XLA or TensorFlow"
_CATEGORIES = (
    (
        r"devtools\.timeline|disabled-by-default-|blink|v8|latencyInfo|loading$|netlog|toplevel$",
        "Chrome or its DevTools",
    ),
    (r"FEE$", _VIZTRACER),
    (r"nvtx|cuda_api$|cuda$", "nsys2json, which converts reports of Nsight Systems"),
    (r"sched$|irq$|freq$|binder|gfx$|am$|wm$|ftrace", _SYSTRACE),
    (r"(Session|Node|Api)$", "ONNX Runtime's profiler"),
    (r"action processing|bazel|general information", "Bazel"),
)
_OF_HOST_TOOLS = r"FEE$|nvtx"
_PROCESSES = (
    (r"(/job:.*)?/(device|host):", _XLA),
    (
        r"(CPU|CUDA) functions$",
        "EventList.export_chrome_trace, which leaves most out: the profiler has an export_chrome_trace of its own",
    ),
    (r"CPU (HIP|HSA) API|GPU\d+$", "rocprof"),
    (r"rank \d+$", "gpubench pipe-infer, a timeline"),
)
_KEYS = {
    "viztracer_metadata": _VIZTRACER,
    "systemTraceEvents": _SYSTRACE,
    "beginningOfTime": "clang (-ftime-trace)",
}
"""Of what stands beside the events."""


@dataclass
class Signs:
    """What tells the program, collected from the events of a file."""

    categories: Counter[str] = field(default_factory=Counter)
    """Of events that last."""
    processes: set[str] = field(default_factory=set)
    """Their names, by metadata or as events have them."""

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.ph == "M" and event.name == "process_name" and event.args is not None:
                self.processes.add(str(event.args.name))
            elif event.ph and event.ph in SPANS:
                self.categories[event.cat] += 1
                if isinstance(event.pid, str):
                    self.processes.add(event.pid)

    def told(self, about: Mapping[str, Any]) -> str | None:
        """Why nothing in the file can be read, and which program it looks like one of; None where no event lasts.

        `about` is what stands beside the events.
        """
        if not self.categories:
            return None
        named = [category for category, _ in self.categories.most_common() if category]
        more = [f"{len(named) - TOLD} more"] if len(named) > TOLD else []
        what = "its events have no category"
        if named:
            number = "its categories are" if len(named) > 1 else "its only category is"
            what = f"{number} {units.listed([*named[:TOLD], *more])}"
        if all(category.lower() in LEFT_OUT for category in self.categories):
            return f"it has no operators, runtime calls or kernels: {what}"
        if any(map(OF_DEVICES.match, named)):
            return f"the events of its device are not read: {what}"
        producer = self._producer(about)
        return f"torch.profiler did not write it: {what}" + (f", as in traces of {producer}" if producer else "")

    def _producer(self, about: Mapping[str, Any]) -> str | None:
        source = about.get("metadata")
        if isinstance(source, dict) and source.get("source") == "DevTools":
            return "Chrome's DevTools"
        if isinstance(source, dict) and "highres-ticks" in source:
            return _XLA
        pieces = {piece.strip() for category in self.categories for piece in category.split(",")}
        every = (
            *(name for key, name in _KEYS.items() if key in about),
            *_matching(_PROCESSES, self.processes),
            *_matching(_CATEGORIES, pieces),
        )
        return next(iter(every), None)


def of_host_tool(category: str) -> bool:
    """Whether a category is one of a tool that records the host beside torch.profiler, and so of no device."""
    return bool(re.match(_OF_HOST_TOOLS, category))


def _matching(known: Iterable[tuple[str, str]], found: Iterable[str]) -> list[str]:
    return [producer for pattern, producer in known if any(re.match(pattern, one) for one in found)]
