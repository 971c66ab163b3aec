"""The CPU time that the probe itself takes in a step, from a sample of the steps.

In some steps, chosen at random, the clock of the thread is read wherever the program enters a hook and leaves it. In
every step that would take about as long as the hooks do. What is done at once for many steps is timed each time.

To read the clock takes time too, the more of it the longer ago it was read last. Therefore every second step of the
sample is a control: there the clock is read in the same places, twice in a row, and tells the time of nothing.

The time is that of the probe's own code. What the program loses besides cannot be seen from inside: the calls by which
PyTorch gets to the hooks, and what they displace from the caches of the CPU.
"""

from __future__ import annotations

import os
import sys
import threading
from statistics import median
from typing import Any, Callable

from .clock import unreplaced_clock

MOST_APART = 128
"""The mean distance of the steps in the sample, once there are as many of them; before, it grows with their number. The
time of a step in the sample is longer by that of the clock, and fewer than one in a hundred cannot shift a p99."""
NEVER = sys.maxsize


class _InHook(threading.local):
    """Whether the calling thread is in a hook."""

    since: int | None = None
    """Since when it is in a hook, by its clock; 0 for a hook that is not timed, and None outside of hooks."""


class OwnCost:
    """The time of the probe in this process, in nanoseconds, by parts of the loop as those of `timeline`."""

    def __init__(self) -> None:
        self.is_timed = False
        """Whether the clock is read in the hooks of the current part."""
        self._left = NEVER
        """The number of parts until that changes."""
        self._clock = unreplaced_clock("thread_time_ns")
        self._here = _InHook()
        self._is_control = False
        """Whether the latest part of the sample is a control."""
        self._spent = self._stretches = 0
        """The time in hooks in that part, and the stretches that it was measured in."""
        self._taken = 0
        """The parts in the sample."""
        self._distance = self._next_distance = 0
        """The mean distance at which the latest one was chosen, and the next one is."""
        self._parts = self._in_hooks = self._timed_stretches = 0
        """The parts of the loop that those in the sample stand for, and what was found, times the same weights."""
        self._nothing: list[float] = []
        """What a stretch takes in which nothing is done, in each control."""
        self._reads = 0
        """The stretches of all parts."""
        self._at_once = self._times = 0
        """The time of what is done at once for many steps, and how often that was."""
        self._entered = 0
        self._began: tuple[int, int] | None = None
        """The parts and the steps before the first one that counts."""

    # The clock.

    def time(self, around: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a hook around a function of torch, whose time is not that of the probe."""
        entered = self.enter()
        try:
            return around(self.outside(call), *args, **kwargs)
        finally:
            if entered:
                self.leave()

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function for a hook to call whose time is not that of the probe."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            inside = self.leave()
            try:
                return call(*args, **kwargs)
            finally:
                if inside:
                    self.enter()

        return outside

    def enter(self) -> bool:
        """Notes that the thread enters a hook. Returns False if it is in one."""
        here = self._here
        if here.since is not None:
            return False
        here.since = self._clock()
        if self._is_control:
            self.leave()
            here.since = 0
        return True

    def leave(self) -> bool:
        """Notes that the thread leaves a hook. Returns False if it is in none."""
        here = self._here
        since, here.since = here.since, None
        if since:
            self._spent += self._clock() - since
            self._stretches += 1
        return since is not None

    def __enter__(self) -> None:
        """Begins what is done at once for many steps."""
        self._entered = self._clock()

    def __exit__(self, *error: object) -> None:
        took, here = self._clock() - self._entered, self._here
        self._at_once += took
        self._times += 1
        if here.since:  # the hook that does it does not count it too
            here.since += took

    # The sample.

    def begin(self, parts: int, steps: int) -> None:
        """Begins with the next part. So many parts and steps have ended before it."""
        if self._began is None:
            self._began = parts, steps
            self._at_once = self._times = 0
            self._choose()

    def end_part(self) -> None:
        """Notes the end of a part, in the hook that ends it. The rest of that hook belongs to the same part."""
        self._left -= 1
        if self._left > 0:
            return
        if self.is_timed:
            self.is_timed = False
            self._choose()
        else:
            self._take()
            self._here.since = None
            self._is_control = not self._is_control
            self._taken += 1
            self._distance, self._left, self.is_timed = self._next_distance, 1, True

    def _choose(self) -> None:
        """Chooses the next part of the sample: each of those up to twice the mean distance is as likely."""
        self._next_distance = min(self._taken + 2, MOST_APART)
        self._left = 1 + int.from_bytes(os.urandom(4), "little") % (2 * self._next_distance - 3)

    def _take(self) -> None:
        """Takes up the latest part of the sample."""
        if self._is_control:
            self._nothing += [self._spent / self._stretches] if self._stretches else []
        else:
            self._parts += self._distance
            self._in_hooks += self._distance * self._spent
            self._timed_stretches += self._distance * self._stretches
        self._reads += self._stretches
        self._spent = self._stretches = 0

    def end(self, parts: int, steps: int) -> float | None:
        """Ends the sample, and returns the time in a step in seconds; None if too few steps were timed."""
        is_whole = not self.is_timed and self._here.since is None
        self.stop()
        if self._began is None:
            return None
        if is_whole:
            self._take()
        parts, steps = parts - self._began[0], steps - self._began[1]
        if not self._parts or not self._nothing or steps < 1:
            return None
        nothing = median(self._nothing)
        hooks = max(0.0, self._in_hooks - nothing * self._timed_stretches) / self._parts
        return (hooks * parts + self._at_once + nothing * self._reads) / steps / 1e9

    def stop(self) -> None:
        """Times nothing more, as in a process or a program that is not measured any more."""
        self.is_timed, self._left = False, NEVER
        self._here.since = None


cost = OwnCost()
"""That of this process."""
