"""Finds the lines of the program that read values of tensors, make float64, compute softmax, and enter autocast.

The functions of torch that do it are replaced for one step of a repeat that is not measured, after those that
torch.profiler records. What makes a whole model compute in float64 is called before any step, and is seen from the
start. Nothing is replaced in a program that compiles, whose compiled code may depend on these functions.
"""

from __future__ import annotations

import sys
from collections import Counter
from threading import get_ident
from types import FrameType
from typing import Any, Callable, NamedTuple

import torch

from .observed import SourcePlaces
from .sampling import MOST_FUNCTIONS, MOST_ROWS, MOST_TEXT, StackRow, is_of_probe, row_of, source
from .treatments import stand_in

READ, DOUBLE, SOFTMAX, AUTOCAST = "read", "float64", "softmax", "autocast"
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")
CASTS = ("double", "to", "type")
MAKERS = ("tensor", "as_tensor", "from_numpy")
LEAST_DIMENSIONS = 3
"""The dimensions of the scores of attention: batch or heads, queries, keys."""
SET_UP = "set-up"
"""The phase of what is called before any step."""


class LineCall(NamedTuple):
    """A call that a line of the program makes, itself or through a package."""

    kind: str
    name: str
    row: StackRow


class CallLines:
    """The lines of one thread that make the calls."""

    def __init__(self, places: SourcePlaces) -> None:
        self._places = places
        self._calls: Counter[LineCall] = Counter()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """What was replaced: the owner, the name, the owner's attribute before, or _INHERITED, and that since."""
        self._thread = 0
        self._phase: Callable[[], str] = str
        self._inside = False

    def install(self) -> None:
        """Finds what makes a whole model compute in float64, from now on."""
        stand_in(torch.nn.Module, "double", self._double)
        stand_in(torch.nn.Module, "to", self._to)
        stand_in(torch, "set_default_dtype", self._set_default)

    def start(self, thread: int, phase: Callable[[], str]) -> None:
        """Finds the calls of a thread, until `stop`."""
        self._thread, self._phase = thread, phase
        for name in READS:
            self._replace(torch.Tensor, name, READ)
        for name in CASTS:
            self._replace(torch.Tensor, name, DOUBLE)
        for name in MAKERS:
            self._replace(torch, name, DOUBLE)
        for owner in (torch.Tensor, torch):
            self._replace(owner, "softmax", SOFTMAX)
        self._replace(torch.autocast, "__enter__", AUTOCAST, "torch.autocast")

    def stop(self) -> None:
        """Puts everything back that the program has not replaced itself."""
        for owner, name, before, now in self._replaced:
            if vars(owner).get(name) is not now:
                continue
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()

    def json(self) -> list[dict[str, Any]]:
        """Returns the fields of `gpubench.sampled.SeenCall` of each line."""
        return [
            {
                "kind": call.kind,
                "name": call.name.strip("_"),
                "phase": call.row.phase,
                "file": self._places.shown(call.row.path)[-MOST_TEXT:] if call.row.path else "",
                "function": call.row.function[:MOST_TEXT],
                "line": call.row.line,
                "calls": calls,
                "source": source(call.row.path, call.row.line),
                "within": call.row.within[:MOST_TEXT],
            }
            for call, calls in self._calls.most_common(MOST_FUNCTIONS)
        ]

    def _double(self, call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(DOUBLE, "Module.double", SET_UP, sys._getframe(2))
        return call(module, *args, **kwargs)

    def _to(self, call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.float64 in (*(each for each in args if isinstance(each, torch.dtype)), kwargs.get("dtype")):
            self._note(DOUBLE, "Module.to", SET_UP, sys._getframe(2))
        return call(module, *args, **kwargs)

    def _set_default(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        if torch.get_default_dtype() is torch.float64:
            self._note(DOUBLE, "torch.set_default_dtype", SET_UP, sys._getframe(2))
        return found

    def _replace(self, owner: Any, name: str, kind: str, called: str = "") -> None:
        """Replaces a function by one that notes its calls, as those of `called` if its own name does not say it."""
        if not hasattr(owner, name):
            return
        before = vars(owner).get(name, _INHERITED)
        stand_in(owner, name, lambda call, *args, **kwargs: self._see(kind, called or name, call, args, kwargs))
        self._replaced.append((owner, name, before, vars(owner)[name]))

    def _see(self, kind: str, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside or get_ident() != self._thread:
            return call(*args, **kwargs)
        self._inside = True
        try:
            found = call(*args, **kwargs)
        finally:
            self._inside = False
        phase = self._phase()
        if _counts(kind, name, phase, args[0] if args else None, found):
            self._note(kind, name, phase, sys._getframe(3))
        return found

    def _note(self, kind: str, name: str, phase: str, caller: FrameType) -> None:
        row = None if is_of_probe(caller) else row_of(caller, phase, self._places)
        if row is not None:
            call = LineCall(kind, name, row)
            if call in self._calls or len(self._calls) < MOST_ROWS:
                self._calls[call] += 1


_INHERITED: Any = object()


def _counts(kind: str, name: str, phase: str, given: Any, found: Any) -> bool:
    """Tells whether a call is of interest: a read that may wait for a device, or a result of the kind.

    In a program without a GPU all reads are, apart from those of an optimizer, which keeps its counts on the CPU.
    """
    if kind == READ:
        on_cpu = getattr(getattr(given, "device", None), "type", "cpu") == "cpu"
        may_wait = name not in ("cpu", "numpy") and phase != "optimizer" and not torch.cuda.is_initialized()
        return may_wait or not on_cpu
    if kind == AUTOCAST:
        return bool(getattr(given, "_enabled", True))
    if not isinstance(found, torch.Tensor):
        return False
    if kind == SOFTMAX:
        return found.dim() >= LEAST_DIMENSIONS
    return found.dtype is torch.float64 and getattr(given, "dtype", None) is not torch.float64
