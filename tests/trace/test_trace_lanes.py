"""One step as a picture."""

import pytest
from traces_made import PUBLIC, Record, launched, made, slice_, step, work

from gpubench.trace.analyse import MOST_BOXES, timeline
from gpubench.trace.columns import span
from gpubench.trace.device import idle_causes
from gpubench.trace.load import read
from gpubench.trace.phases import phase_of
from gpubench.trace.profile import Box, StepTimeline
from gpubench.trace.slices import ProgramSlices


def drawn(*parts: Record | list[Record]) -> StepTimeline:
    program = ProgramSlices.of(made(*parts))
    found = timeline(program, phase_of(program), {})
    assert found is not None
    assert all(0 <= box.start < box.end <= found.wall for lane in found.lanes for box in lane.boxes)
    return found


def boxes(found: StepTimeline, lane: str) -> list[tuple[float, float, str]]:
    (one,) = [one for one in found.lanes if one.name == lane]
    return [(box.start / 1000, box.end / 1000, box.style) for box in one.boxes]


def test_the_median_step_is_drawn_from_its_own_start() -> None:
    steps = [step(7, 0, 100), step(8, 100, 120), step(9, 120, 150)]
    found = drawn(steps, slice_("forward", 125, 140, "user_annotation"))
    assert (found.step, found.wall) == (9, 30_000)
    assert boxes(found, "host") == [(0, 5, "other"), (5, 20, "forward"), (20, 30, "other")]


def test_every_stream_has_a_lane_with_its_work_by_kind() -> None:
    found = drawn(
        step(1, 0, 100), work("gemm", 10, 20), work("Memset (Device)", 30, 40, cat="gpu_memset"),
        work("ncclDevKernel_AllReduce", 20, 60, stream=20), work("Memcpy HtoD", 0, 10, stream=21, cat="gpu_memcpy"),
    )  # fmt: skip
    assert boxes(found, "stream 7") == [(10, 20, "compute"), (30, 40, "set")]
    assert boxes(found, "stream 20") == [(20, 60, "communication")]
    assert boxes(found, "stream 21") == [(0, 10, "copy")]


def test_work_nearer_than_can_be_seen_is_one_box() -> None:
    found = drawn(step(1, 0, 10_000), work("a", 10, 20), work("b", 24, 30), work("c", 40, 50))
    assert boxes(found, "stream 7") == [(10, 30, "compute"), (40, 50, "compute")]


def test_work_too_short_to_be_seen_is_counted() -> None:
    found = drawn(step(1, 0, 10_000), work("a", 10, 20), work("b", 100, 103))
    assert boxes(found, "stream 7") == [(10, 20, "compute")]
    assert found.left_out == 1


def test_only_the_longest_are_drawn() -> None:
    def row(stream: int, length: int) -> list[Record]:
        return [work("k", 25 * number, 25 * number + length, stream=stream) for number in range(500)]

    found = drawn(step(1, 0, 12_500), row(7, 10), row(8, 12))
    assert len(boxes(found, "stream 8")) == 500
    assert sum(len(lane.boxes) for lane in found.lanes) == MOST_BOXES
    assert found.left_out == 1001 - MOST_BOXES


def test_idle_time_is_a_lane_of_causes() -> None:
    program = ProgramSlices.of(made(step(1, 0, 100), launched("a", 1, 10, 20, 1)))
    found = timeline(program, phase_of(program), {"data_loader": span(30_000, 60_000), "unknown": span(0, 10_000)})
    assert found is not None
    assert found.lanes[-1].name == "idle"
    assert found.lanes[-1].boxes == [
        Box(0, 10_000, "unknown", "unknown"),
        Box(30_000, 60_000, "data_loader", "data_loader"),
    ]


def test_without_a_device_the_operators_are_drawn() -> None:
    found = drawn(step(1, 0, 100), slice_("aten::linear", 10, 40), slice_("aten::mm", 20, 30))
    (lane,) = [lane for lane in found.lanes if lane.name == "operators"]
    assert [(box.name, box.start, box.end) for box in lane.boxes] == [("aten::linear", 10_000, 40_000)]


def test_without_steps_the_window_is_drawn() -> None:
    found = drawn(work("a", 10, 20), work("b", 30, 40))
    assert (found.step, found.wall) == (0, 30_000)


def test_a_window_of_no_length_has_no_picture() -> None:
    program = ProgramSlices.of(made(slice_("aten::mm", 5, 5)))
    assert timeline(program, phase_of(program), {}) is None


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_real_step_fits_on_a_page() -> None:
    program = ProgramSlices.of(read(PUBLIC / "hta_v100_ddp_rank1of2.json.gz"))
    causes = idle_causes(program)
    found = timeline(program, phase_of(program), causes)
    assert found is not None
    assert [lane.name for lane in found.lanes] == ["host", "stream 7", "stream 14", "idle"]
    assert sum(len(lane.boxes) for lane in found.lanes) <= MOST_BOXES
