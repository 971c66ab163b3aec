"""Where the time of each rank of a pipeline went, by what its loop recorded of itself."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from gpubench.events import Span, SpanKind

Part = Literal["compute", "recv_wait", "send_wait", "idle"]
PARTS: tuple[Part, ...] = ("compute", "recv_wait", "send_wait", "idle")
OF_KIND: dict[SpanKind, Part] = {
    "prepare": "compute",
    "evaluate": "compute",
    "decode": "compute",
    "recv_wait": "recv_wait",
    "send_wait": "send_wait",
}


class Times(Struct, frozen=True):
    """The time of one rank, in seconds. The four parts are disjoint and sum to the makespan."""

    makespan: float
    compute: float
    """Preparing, evaluating or decoding, whatever else went on meanwhile."""
    recv_wait: float
    """Nothing to work on: the hand-over from the rank before had not come."""
    send_wait: float
    """Work in hand held up: the rank behind had not taken enough."""
    idle: float
    """None of these: before the first micro-batch, after the last, and what the loop itself took."""

    def share(self, part: Part) -> float:
        """Of the makespan."""
        seconds: float = getattr(self, part)
        return seconds / self.makespan if self.makespan else 0.0


def times(spans: Iterable[Span], start: float, end: float) -> Times:
    """What the spans of one rank make of [start, end]; what lies outside does not count.

    A wait counts only while nothing is computed, and where both waits coincide it is for the receive.
    """
    opened: dict[float, Counter[Part]] = {}
    closed: dict[float, Counter[Part]] = {}
    for span in spans:
        first, last = max(start, span.time), min(end, span.time + span.total)
        if first < last:
            opened.setdefault(first, Counter())[OF_KIND[span.kind]] += 1
            closed.setdefault(last, Counter())[OF_KIND[span.kind]] += 1
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    under_way: Counter[Part] = Counter()
    for border, following in pairwise(sorted({start, end, *opened, *closed})):
        under_way += opened.get(border, Counter())
        under_way -= closed.get(border, Counter())
        part: Part = next((part for part in PARTS if under_way[part]), "idle")
        seconds[part] += following - border
    return Times(
        makespan=end - start,
        compute=seconds["compute"],
        recv_wait=seconds["recv_wait"],
        send_wait=seconds["send_wait"],
        idle=seconds["idle"],
    )


def mean(found: Iterable[Times]) -> Times:
    """Part by part, so that the parts still sum to the makespan. At least one is needed."""
    every = list(found)
    return Times(*(sum(getattr(one, name) for one in every) / len(every) for name in Times.__struct_fields__))
