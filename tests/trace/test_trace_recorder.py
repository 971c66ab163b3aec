"""Waits that only the recording makes, apart from those of the program."""

from pathlib import Path

import pytest
from traces_made import PUBLIC, Record, call, frame, launched, made, slice_, step, work

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.trace.analyse import analyse
from gpubench.trace.columns import Trace
from gpubench.trace.load import read
from gpubench.trace.profile import RankProfile
from gpubench.trace.slices import ProgramSlices


def recorded(*parts: Record | list[Record]) -> list[int]:
    """When the waits of the recording began, in microseconds."""
    program = ProgramSlices.of(made(*parts))
    return [int(start) // 1000 for start in program.trace.cpu.start[program.recorder_waits]]


def ranked(trace: Trace) -> RankProfile:
    return analyse([trace]).ranks[0]


def wide(start: float, end: float) -> Record:
    return call("cudaDeviceSynchronize", start, end)


def a_step(number: int, at: float, *parts: Record) -> list[Record]:
    """A step of 100 us with a kernel of 10."""
    return [step(number, at, at + 100), *launched("k", at + 20, at + 25, at + 35, number), *parts]


def test_what_the_profiler_waits_for_as_it_stops_is_its_own() -> None:
    assert recorded(a_step(1, 0), a_step(2, 100), wide(205, 240)) == [205]


def test_a_wait_between_two_steps_is_the_recordings() -> None:
    first, second = step(1, 0, 90), step(2, 100, 200)
    assert recorded(first, launched("a", 20, 25, 35, 1), wide(92, 98), second, launched("b", 120, 125, 135, 2)) == [92]


def test_a_wait_before_all_else_in_the_first_step_is_the_recordings() -> None:
    assert recorded(a_step(1, 0, wide(2, 15)), a_step(2, 100), a_step(3, 200)) == [2]
    assert recorded(a_step(1, 0, wide(2, 15))) == [2]


def test_a_wait_that_every_step_begins_or_ends_with_is_the_programs() -> None:
    assert recorded(a_step(1, 0, wide(2, 15)), a_step(2, 100, wide(102, 110))) == []
    assert recorded(a_step(1, 0, wide(60, 70)), a_step(2, 100, wide(160, 170))) == []


def test_a_wait_behind_all_else_in_the_last_of_several_steps_is_the_recordings() -> None:
    assert recorded(a_step(1, 0), a_step(2, 100), a_step(3, 200, wide(260, 270))) == [260]


def test_a_wait_within_a_step_is_the_programs() -> None:
    assert recorded(a_step(1, 0, wide(40, 50), slice_("aten::mm", 55, 60))) == []
    assert recorded(a_step(1, 0, slice_("validate", 1, 18, "user_annotation"), wide(2, 15))) == []
    assert recorded(a_step(1, 0, slice_("aten::mm", 1, 1.5), wide(2, 15))) == []


def test_a_wait_for_one_stream_is_no_border() -> None:
    assert recorded(a_step(1, 0, call("cudaStreamSynchronize", 2, 15))) == []


def test_a_wait_under_the_profilers_own_frames_is_the_recordings() -> None:
    stop = [frame("torch/profiler/profiler.py(235): stop_trace", 45, 80), frame("torch/cuda/__init__.py(9): x", 46, 79)]
    events = [slice_("aten::mm", 19, 22), *launched("k", 20, 25, 35, 1), wide(50, 60), slice_("aten::mm", 90, 95)]
    assert recorded(events) == []
    assert recorded(events, stop) == [50]


def test_without_steps_the_wait_behind_everything_is_the_profilers() -> None:
    events = [*launched("a", 0, 2, 10, 1), wide(11, 14), *launched("b", 20, 22, 30, 2), wide(24, 31)]
    assert recorded(events) == [24]


def test_idle_time_behind_such_a_wait_is_apart_said_and_in_no_finding() -> None:
    backlog = [work("warm-up", -500, 300, 901)]
    first = [step(1, 0, 1000), wide(10, 310), *launched("a", 600, 605, 700, 1), *launched("b", 610, 700, 800, 2)]
    second = [step(2, 1000, 2000), *launched("c", 1010, 1015, 1900, 3)]
    events = [{**one, "ts": one["ts"] + 1000} for one in (*backlog, *first, *second)]
    profile = analyse([made(events)])
    rank = profile.ranks[0]
    assert rank.idle["recording"] == 300_000
    assert rank.idle["synchronisation"] == 0
    assert rank.synchronisations == []
    assert "the recording itself waited 300 us for the GPU (cudaDeviceSynchronize)" in " ".join(rank.notes)
    assert "synchronisation" not in {finding.id for finding in diagnose(ProfileCase(profile)).findings}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize("name", ["tracelens_h100_owlv2.json.gz", "tracelens_mi300_qwen.json.gz"])
def test_the_harness_of_public_traces_is_told_apart(name: str) -> None:
    rank = ranked(read(Path(PUBLIC / name)))
    assert not any(wait.call.endswith("DeviceSynchronize") for wait in rank.synchronisations)
