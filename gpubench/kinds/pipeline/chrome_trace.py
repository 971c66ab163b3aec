"""The timeline of a pipeline as a Chrome trace for https://ui.perfetto.dev and chrome://tracing.

It has the JSON object form of the Chromium project's "Trace Event Format". A process is a rank, whose threads are its
loop and one lane for each hand-off in progress at the same time. Times are microseconds since the first event.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpubench.events import Handoff, Span

Record = dict[str, Any]

LOOP = 0
LANES = {"recv": 100, "send": 200}
"""The thread number of the first lane of each direction."""


def chrome_trace(spans: Sequence[Span], handoffs: Sequence[Handoff]) -> str:
    """The trace as JSON. Arrows lead from the send of a hand-off to its receive if both were recorded."""
    began = min([*(span.time for span in spans), *(handoff.time for handoff in handoffs)], default=0.0)
    events = [_slice(span.rank, LOOP, _name(span), span.time - began, span.total, _about(span)) for span in spans]
    threads = {(span.rank, LOOP): "loop" for span in spans}
    placed = list(_lanes(handoffs))
    for handoff, thread in placed:
        name = f"{handoff.direction} sample {handoff.sample}"
        events.append(_slice(handoff.rank, thread, name, handoff.time - began, handoff.total, _about_handoff(handoff)))
        lane = thread - LANES[handoff.direction]
        threads[handoff.rank, thread] = handoff.direction + (f" {lane + 1}" if lane else "")
    events += _arrows(placed, began)
    document = {"traceEvents": [*_names(threads), *events], "displayTimeUnit": "ms"}
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _slice(rank: int, thread: int, name: str, start: float, seconds: float, about: Record) -> Record:
    times = {"ts": _microseconds(start), "dur": _microseconds(seconds)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, "args": about}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(span: Span) -> str:
    return span.kind if span.step is None else f"{span.kind} {span.step}"


def _about(span: Span) -> Record:
    return {"repeat": span.repeat, "sample": span.sample} | ({} if span.step is None else {"step": span.step})


def _about_handoff(handoff: Handoff) -> Record:
    names = (
        "repeat", "peer", "sample", "step", "sequence", "waited", "header_bytes", "latent_bytes", "state_bytes",
        "generator_bytes",
    )  # fmt: skip
    return {name: getattr(handoff, name) for name in names}


def _names(threads: dict[tuple[int, int], str]) -> Iterator[Record]:
    for rank in sorted({rank for rank, _ in threads}):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for (rank, thread), name in sorted(threads.items()):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _lanes(handoffs: Iterable[Handoff]) -> Iterator[tuple[Handoff, int]]:
    """Gives each hand-off a free thread of its rank, because slices of a thread must not overlap."""
    busy: dict[tuple[int, str], list[float]] = {}
    for handoff in sorted(handoffs, key=lambda handoff: handoff.time):
        ends = busy.setdefault((handoff.rank, handoff.direction), [])
        lane = next((lane for lane, end in enumerate(ends) if end <= handoff.time), len(ends))
        ends[lane : lane + 1] = [handoff.time + handoff.total]
        yield handoff, LANES[handoff.direction] + lane


def _arrows(placed: Sequence[tuple[Handoff, int]], began: float) -> Iterator[Record]:
    """Yields two flow events for each hand-off, which belong to the slices that enclose them."""
    taken = {
        (one.repeat, one.peer, one.rank, one.sequence): (one, thread)
        for one, thread in placed
        if one.direction == "recv"
    }
    for number, (sent, thread) in enumerate(placed):
        received = taken.get((sent.repeat, sent.rank, sent.peer, sent.sequence))
        if sent.direction == "recv" or received is None:
            continue
        end, end_thread = received
        arrow = {"name": "hand-off", "cat": "hand-off", "id": number}
        start_ts, end_ts = _microseconds(sent.time - began), _microseconds(end.time + end.total - began)
        yield {"ph": "s", "pid": sent.rank, "tid": thread, "ts": start_ts, **arrow}
        yield {"ph": "f", "bp": "e", "pid": end.rank, "tid": end_thread, "ts": end_ts, **arrow}
