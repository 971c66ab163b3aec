"""Where in the user's own Python something was asked for, as recorded stacks tell."""

import re
import sys
from dataclasses import dataclass
from typing import Self

import numpy as np

from gpubench.trace.columns import HostKind, Ids, Trace
from gpubench.trace.nesting import nearest
from gpubench.trace.program import Program

_FRAME = re.compile(r"(?P<path>[^<].*)\((?P<line>\d+)\): (?P<function>.+)$")
_NOT_THE_USERS = re.compile(
    r"(^|.*/)(torch|site-packages|dist-packages|torchvision|gpubench)/|(^|.*/)lib/python\d\.\d+/"
    r"|(.*/)?(threading|contextlib|typing|functools|runpy)\.py$"
)


@dataclass(frozen=True)
class UserFrames:
    """For each slice the innermost function around it that is the user's.

    The line is the one recorded: where that function begins, or in traces that write stacks at operators, as old ones
    do, where it calls on.
    """

    _trace: Trace
    _frame: Ids
    _stack: Ids

    @classmethod
    def of(cls, program: Program) -> Self:
        trace = program.trace
        return cls(trace, innermost_frames(program), nearest(program.nest, trace.host.stack >= 0))

    def at(self, slice_: int) -> str | None:
        """As "train.py:25 in step"; None where no stack was recorded, or nothing in it is the user's."""
        if (frame := self._frame[slice_]) >= 0:
            return user_frame(self._trace.names[self._trace.host.name[frame]])
        if (operator := self._stack[slice_]) < 0:
            return None
        frames = re.split(r"[;\n]", self._trace.names[self._trace.host.stack[operator]])
        return next((found for one in frames if (found := user_frame(one.strip()))), None)


def innermost_frames(program: Program) -> Ids:
    """For each slice the innermost function around it that is the user's, as a slice, or -1."""
    names, host = program.trace.names, program.trace.host
    users = np.fromiter((user_frame(name) is not None for name in names), np.bool_, len(names))
    return nearest(program.nest, users[host.name] & (host.kind == HostKind.PYTHON))


def user_frame(name: str) -> str | None:
    """The place that a frame's name tells, as "train.py(25): step"; None if it is no frame, or a library's."""
    match = _FRAME.match(name)
    if not match or _NOT_THE_USERS.match(match["path"]):
        return None
    # The profiler takes what is on sys.path off a name: json/encoder.py. A module such as profile.py may be the user's.
    package, inside, _ = match["path"].partition("/")
    if inside and package in sys.stdlib_module_names:
        return None
    return f"{match['path']}:{match['line']} in {match['function']}"
