"""Times the calls that read files, which are written in C and cannot be replaced, by the profile function of Python.

A call in C is not slowed by it, while Python code around the call is. So only some batches of a repeat that is not
measured are made under it.
"""

from __future__ import annotations

import io
import sys
from time import perf_counter_ns, thread_time_ns
from typing import Any, Dict, List

from .stages import Stages

NAMES = frozenset(
    {"read", "read1", "readall", "readinto", "readinto1", "readline", "readlines", "open", "pread", "preadv"}
)
"""The names of the functions that open or read files."""
MODULES = frozenset({"_io", "io", "posix", "nt", "mmap"})
IN_MEMORY = (io.BytesIO, io.StringIO)


class ReadTimes:
    """The time of the calls that read files, by the stage in which they are."""

    def __init__(self, stages: Stages) -> None:
        self.found: Dict[str, List[int]] = {}
        """Wall time and CPU time in nanoseconds, by stage."""
        self._stages = stages
        self._began = self._cpu = 0
        self._call: Any = None
        """The function that reads now, since `_began`; None between two reads."""
        self._before: Any = None

    def start(self) -> None:
        self._before = sys.getprofile()
        if self._before is None:  # the program has none of its own
            sys.setprofile(self._see)

    def stop(self) -> None:
        if self._before is None:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, call: Any) -> None:
        """Reads the clock first where a call ends, and last where one begins: a small read takes a microsecond."""
        now = perf_counter_ns()
        if event == "c_call":
            if call.__name__ in NAMES and _reads_file(call):
                self._call = call
                self._cpu = thread_time_ns()
                self._began = perf_counter_ns()
        elif self._call is not None and call == self._call:  # from Python 3.12 on it is another object than at its call
            total = self.found.setdefault(self._stages.current, [0, 0, 0])
            total[0] += now - self._began
            total[1] += thread_time_ns() - self._cpu
            total[2] += 1
            self._call = None


def _reads_file(call: Any) -> bool:
    of = getattr(call, "__self__", None)
    module = getattr(call, "__module__", None) or type(of).__module__
    return module in MODULES and not isinstance(of, IN_MEMORY)
