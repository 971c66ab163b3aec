"""Traces of other programs, and devices that are not read: what is said of them is true."""

import json
from pathlib import Path
from typing import Any

import pytest
from traces_made import Record, call, launched, made, slice_, step, work, write

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.errors import DataError
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read


def slices(*categories: str, **more: Any) -> list[Record]:
    """One of each category; "" is none."""
    plain: Record = {"ph": "X", "name": "something", "pid": 1, "tid": 1, "ts": 5, "dur": 3}
    return [plain | more | ({"cat": category} if category else {}) for category in categories]


def process(name: str) -> Record:
    return {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read(path)
    assert error.value.hint
    return str(error.value)


@pytest.mark.parametrize(
    ("events", "about", "producer"),
    [
        (
            slices("devtools.timeline", "disabled-by-default-v8.gc"),
            {"metadata": {"source": "DevTools"}},
            "Chrome's DevTools",
        ),
        (slices("devtools.timeline,v8", "toplevel"), {}, "Chrome or its DevTools"),
        (slices("toplevel"), {}, "Chrome or its DevTools"),
        ([process("/device:GPU:0 H100"), *slices("")], {"displayTimeUnit": "ns"}, "JAX"),
        ([process("/job:localhost/replica:0/task:0/device:GPU:0 Compute"), *slices("Op")], {}, "JAX"),
        (slices(""), {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}}, "JAX"),
        (slices("FEE"), {"viztracer_metadata": {"version": "1.0"}}, "VizTracer"),
        (slices("FEE"), {}, "VizTracer"),
        (slices("cuda", "nvtx", "cuda_api", pid="Device 0"), {}, "nsys2json"),
        ([{"ph": phase, "cat": "gfx", "ts": 1, "pid": 1, "tid": 1} for phase in "BE"], {}, "Android's systrace"),
        (slices("", pid="CUDA functions"), {}, "EventList.export_chrome_trace"),
        (slices("Session", "Node"), {}, "ONNX Runtime"),
        (slices("", pid=3), {"beginningOfTime": 5}, "clang"),
    ],
)
def test_a_trace_of_another_program_is_refused_by_its_name(
    tmp_path: Path, events: list[Record], about: dict[str, Any], producer: str
) -> None:
    said = refused(write(tmp_path / "t.json", events, **about))
    assert "torch.profiler did not write it" in said
    assert f"as in traces of {producer}" in said
    assert "has a duration" not in said


def test_a_trace_that_no_known_program_writes_is_told_by_its_categories(tmp_path: Path) -> None:
    said = refused(write(tmp_path / "t.json", slices("a", "b", "b", "c", "d", "e", "f")))
    assert said.endswith("cannot be read: torch.profiler did not write it: its categories are b, a, c, d and 2 more")
    assert "its events have no category" in refused(write(tmp_path / "t.json", slices("")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n\x8a\x01\n\x05abcde\x10\x01", "a binary trace, as written by Perfetto"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"# tracer: nop\n", "ftrace"),
        (b"SQLite format 3\x00", "Nsight Systems"),
        (json.dumps({"$schema": "https://www.speedscope.app/file-format-schema.json"}).encode(), "speedscope"),
    ],
)
def test_a_file_of_another_format_is_told_by_how_it_begins(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert said in refused(path)


def test_what_the_profiler_writes_beside_the_work_is_no_work(tmp_path: Path) -> None:
    assert "it has no operators, runtime calls or kernels" in refused(
        write(tmp_path / "t.json", slices("overhead", "Trace"))
    )


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "mlu_memcpy", "my_private_device"])
def test_a_device_whose_events_are_not_read_is_no_program_on_a_cpu(category: str) -> None:
    events = [step(1, 0, 1000), *(slice_("aten::mm", at, at + 2) for at in range(10, 900, 3))]
    device = [{**one, "cat": category} for one in (work("a", 5, 400), work("b", 410, 900))]
    profile = analyse([made(events, device)])
    notes = " ".join(profile.ranks[0].notes)
    assert f"events of {category} are not read (2 of" in notes
    assert "there is no GPU work in the trace" not in notes
    assert "there is no work of CUDA, ROCm or XPU in the trace" in notes
    findings = diagnose(ProfileCase(profile))
    assert findings.findings == []
    assert [one.id for one in findings.unanswered] == ["device"]
    assert findings.headline.startswith(f"CPU alone ({category} is not read): ")


def test_events_of_a_tool_for_the_host_are_not_taken_for_a_devices() -> None:
    events = [step(1, 0, 1000), *(slice_("aten::mm", at, at + 2) for at in range(10, 900, 3))]
    profile = analyse([made(events, slices("FEE"))])
    notes = " ".join(profile.ranks[0].notes)
    assert "events of FEE are not read (1 of" in notes
    assert "there is no GPU work in the trace" in notes
    findings = diagnose(ProfileCase(profile))
    assert findings.headline.startswith("CPU: ")
    assert "device" not in [one.id for one in findings.unanswered]


@pytest.mark.parametrize(
    "launch", ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "hipLaunchKernel", "nccl:all_to_all"]
)
def test_a_gpu_program_without_its_gpu_work_is_no_program_on_a_cpu(launch: str) -> None:
    operators = [slice_("aten::mm", at, at + 2) for at in range(10, 900, 3)]
    profile = analyse([made([step(1, 0, 1000), *operators], call(launch, 10, 11, 1))])
    assert any("though it was launched" in note for note in profile.ranks[0].notes)
    findings = diagnose(ProfileCase(profile))
    assert findings.findings == []
    assert [one.id for one in findings.unanswered] == ["device"]
    assert findings.headline.startswith("CPU alone (the GPU's work was not recorded): ")
    on_cpu = diagnose(ProfileCase(analyse([made([step(1, 0, 1000), *operators])])))
    assert on_cpu.headline.startswith("CPU: ")


def test_only_a_devices_unread_events_are_told_as_such(tmp_path: Path) -> None:
    said = refused(write(tmp_path / "t.json", slices("mtia_ccp_events")))
    assert "the events of its device are not read: its only category is mtia_ccp_events" in said


def test_what_the_profiler_writes_twice_under_other_categories_is_known() -> None:
    beside = slices("gpu_user_annotation", "cuda_sync", "overhead", "Trace")
    trace = made(launched("k", 0, 2, 10, 1), beside)
    assert trace.unread == {}


def test_the_driver_calls_of_an_xpu_launch_its_kernels() -> None:
    launch = {**call("zeCommandListAppendLaunchKernel", 0, 1, 1), "cat": "xpu_driver"}
    trace = made(launch, work("k", 2, 10, 1))
    assert (len(trace.cpu), trace.unread) == (1, {})


@pytest.mark.parametrize("times", [2, 3])
def test_a_trace_that_is_in_the_file_several_times_counts_once(times: int) -> None:
    events = [step(1, 0, 100), slice_("aten::mm", 1, 5), *launched("k", 2, 10, 30, 1), *launched("k", 31, 40, 60, 2)]
    once, several = analyse([made(events)]).ranks[0], analyse([made(*[events] * times)]).ranks[0]
    assert several.kernels == once.kernels
    assert several.operators == once.operators
    assert several.launches == once.launches
    repeated, written = (times - 1) * len(events), times * len(events)
    assert any(note.startswith(f"{repeated} of {written} events are exact duplicates") for note in several.notes)
    assert not any("duplicate" in note for note in once.notes)


def test_kernels_that_differ_in_anything_are_two() -> None:
    one = work("k", 0, 10, 1)
    others = [work("k", 0, 10, 2), work("k", 0, 10, 1, stream=8), work("k", 0, 11, 1), work("j", 0, 10, 1)]
    others += [work("k", 0, 10, 1, device=1), work("k", 0, 10, 1, grid=[2, 1, 1])]
    trace = made(one, others, one)
    assert (len(trace.device), trace.repeated) == (7, 1)


def test_an_operator_within_another_of_the_same_name_and_time_is_its_own() -> None:
    numbers: list[dict[str, Any]] = [{"External id": 7}, {"External id": 8}]
    nested = [slice_("aten::zeros", 0, 4, **number) for number in numbers]
    trace = made(nested, nested)
    assert (len(trace.cpu), trace.repeated) == (2, 2)
