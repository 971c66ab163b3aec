"""When a rank's loop did what: work by marks on the device's timeline, waits by the host's clock."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

from gpubench.events import Span, SpanKind
from gpubench.timing import Clock, Mark


@dataclass(frozen=True)
class _Open(Generic[Mark]):
    """Work whose end the device may not have reached."""

    kind: SpanKind
    sample: int
    step: int | None
    begin: Mark
    end: Mark


class SpanTimer(Generic[Mark]):
    """Turns the marks of a loop into spans once the device has passed them; nothing waits for it."""

    def __init__(self, clock: Clock[Mark], now: Callable[[], float], repeat: int, rank: int) -> None:
        """`now` gives seconds since the epoch."""
        self._clock = clock
        self._now = now
        self._repeat = repeat
        self._rank = rank
        self._work: deque[_Open[Mark]] = deque()
        self._waits: list[Span] = []
        self._origin: tuple[Mark, float] | None = None
        self._border: Mark | None = None

    def start(self) -> float:
        """Ties the device's timeline to the calendar; the device must be idle. Returns the time."""
        self._clock.synchronize()
        now = self._now()
        self._origin = (self._clock.mark(), now)
        return now

    def begin(self) -> None:
        """Work begins."""
        self._border = self._clock.mark()

    def worked(self, kind: SpanKind, sample: int, step: int | None = None) -> None:
        """Everything issued since the last border was this; what is issued next begins here."""
        assert self._border is not None
        end = self._clock.mark()
        self._work.append(_Open(kind, sample, step, self._border, end))
        self._border = end

    @contextmanager
    def waiting(self, kind: SpanKind, sample: int) -> Iterator[None]:
        """The host waits meanwhile."""
        began = time.perf_counter()
        start = self._now()
        yield
        total = time.perf_counter() - began
        self._waits.append(Span(self._repeat, self._rank, kind, sample, start, total))

    def synchronize(self) -> float:
        """Waits for the device, and returns the time."""
        self._clock.synchronize()
        return self._now()

    def collect(self) -> list[Span]:
        """The spans that have ended since the last call."""
        ended, self._waits = self._waits, []
        while self._work and self._clock.passed(self._work[0].end):
            ended.append(self._span(self._work.popleft()))
        return ended

    def _span(self, work: _Open[Mark]) -> Span:
        """Placed by the end of the one before: a GPU's events tell short distances more finely than long ones."""
        assert self._origin is not None
        mark, known = self._origin
        began, total = known + self._clock.seconds(mark, work.begin), self._clock.seconds(work.begin, work.end)
        self._origin = (work.end, began + total)
        return Span(
            repeat=self._repeat,
            rank=self._rank,
            kind=work.kind,
            sample=work.sample,
            time=began,
            total=total,
            step=work.step,
        )
