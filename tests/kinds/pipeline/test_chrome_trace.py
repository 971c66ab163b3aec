import json
from typing import Any

import msgspec
from piped import Line

from gpubench.events import Handoff
from gpubench.kinds.pipeline.chrome_trace import LANES, chrome_trace


def events_of(line: Line, handoffs: list[Handoff] | None = None) -> list[dict[str, Any]]:
    repeat = line.repeat()
    document = json.loads(chrome_trace(repeat.spans, repeat.handoffs if handoffs is None else handoffs))
    assert document["displayTimeUnit"] == "ms"
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_every_rank_is_a_process_with_its_loop_first() -> None:
    events = events_of(Line((2, 3), micro_batches=2))
    named = {(event["pid"], event["args"]["name"]) for event in of(events, "M") if event["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert threads == {(0, 0): "loop", (1, 0): "loop", (0, LANES["send"]): "send", (1, LANES["recv"]): "recv"}


def test_times_are_microseconds_since_the_first_event() -> None:
    slices = of(events_of(Line((2, 3), micro_batches=2, evaluation=0.25)), "X")
    assert min(event["ts"] for event in slices) == 0
    first = next(event for event in slices if event["name"] == "evaluate 0")
    assert (first["dur"], first["args"]) == (250_000, {"repeat": 0, "sample": 0, "step": 0})


def test_an_arrow_leads_from_every_send_to_its_receive() -> None:
    events = events_of(Line((1, 1, 1), micro_batches=4, transfer=0.01))
    starts, ends = of(events, "s"), of(events, "f")
    assert len(starts) == len(ends) == 2 * 4
    by_id = {event["id"]: event for event in ends}
    for start in starts:
        end = by_id[start["id"]]
        assert end["pid"] == start["pid"] + 1
        assert end["ts"] >= start["ts"]


def test_a_send_that_nobody_received_has_no_arrow() -> None:
    repeat = Line((1, 1), micro_batches=3).repeat()
    kept = [one for one in repeat.handoffs if one.direction == "send" or one.sequence != 1]
    events = events_of(Line((1, 1), micro_batches=3), kept)
    assert len(of(events, "s")) == len(of(events, "f")) == 2


def test_handoffs_that_overlap_get_lanes_of_their_own() -> None:
    repeat = Line((1, 1), micro_batches=3).repeat()
    long = [msgspec.structs.replace(one, total=1.0) for one in repeat.handoffs if one.direction == "send"]
    slices = [
        event for event in of(events_of(Line((1, 1), micro_batches=3), long), "X") if event["tid"] >= LANES["send"]
    ]
    assert [event["tid"] - LANES["send"] for event in slices] == [0, 1, 2]


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert json.loads(chrome_trace([], []))["traceEvents"] == []
