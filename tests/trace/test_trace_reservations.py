"""What a reader of a profile is told beforehand."""

from pathlib import Path

from traces_made import Record, document, launched, made, slice_, step

from gpubench.trace.analyse import notes
from gpubench.trace.columns import Trace
from gpubench.trace.load import read
from gpubench.trace.slices import ProgramSlices


def told(*parts: Record | list[Record]) -> str:
    return of(made(*parts))


def of(trace: Trace) -> str:
    return "; ".join(notes(ProgramSlices.of(trace)))


def test_a_device_that_is_behind_its_host_is_pointed_out() -> None:
    ahead = [launched("gemm", 10 * place, 20 + 100 * place, 120 + 100 * place, place + 1) for place in range(4)]
    assert "the GPU ran up to 289 us behind the CPU" in told(step(1, 0, 100), *ahead)
    assert "behind" not in told(step(1, 0, 500), *ahead)


def test_steps_that_are_missing_are_pointed_out() -> None:
    assert "the 3 consecutive ones of 4" in told(step(1, 0, 9), step(4, 30, 40), step(5, 40, 50), step(6, 50, 60))
    assert "missing" not in told(step(4, 30, 40), step(5, 40, 50), slice_("aten::mm", 31, 35))


def test_a_file_that_ends_behind_its_events_is_pointed_out(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(document([step(1, 0, 9)])[:-1])
    assert "the file is truncated: its events are complete" in of(read(file))
    assert "truncated" not in told(step(1, 0, 9))


def test_events_without_a_time_are_counted() -> None:
    assert "2 of 3 events are invalid" in told(
        step(1, 0, 9), {**step(2, 9, 20), "dur": -1}, {**step(3, 0, 9), "ts": "x"}
    )
