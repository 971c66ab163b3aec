from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces_made import LOADER, PUBLIC, Record, anything, document, numbered, slice_, step, write

from gpubench.errors import DataError
from gpubench.memory.allocation_log import AllocationLog, DeviceLog
from gpubench.memory.from_trace import memory_events, read

V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34089730048, "numSms": 80}
CUDA: Record = {"Device Type": 1, "Device Id": 0}
HOST: Record = {"Device Type": 0, "Device Id": -1}
UNKNOWN: Record = {"Device Type": "GPU"}


def memory(at: float, change: int, address: int | None = None, thread: int = 1, **args: Any) -> Record:
    """Of the first GPU, if args do not say otherwise."""
    told = {"Bytes": change, **CUDA, **({} if address is None else {"Addr": address}), **args}
    return {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": thread, "ts": at,
            "args": told}  # fmt: skip


def totalled(before: int, *events: Record, reserved: int = 4096) -> list[Record]:
    """The same events, with what the allocator has given out after each."""
    sums = accumulate((event["args"]["Bytes"] for event in events), initial=before)
    return [
        event | {"args": event["args"] | {"Total Allocated": total, "Total Reserved": reserved}}
        for event, total in zip(events, list(sums)[1:], strict=True)
    ]


def training(number: int, start: float) -> list[Record]:
    """A step of 100 us, with the backward pass on thread 2."""
    return [
        step(number, start, start + 100),
        slice_(LOADER, start, start + 10, cat="user_annotation"),
        slice_("module: layer (Linear)", start + 10, start + 30, cat="user_annotation"),
        numbered("aten::addmm", start + 12, start + 28, 7),
        slice_("aten::empty", start + 14, start + 16),
        numbered("aten::mse_loss", start + 32, start + 38, 8),
        numbered("autograd::engine::evaluate_function: MseLossBackward0", start + 41, start + 49, 8, 1, thread=2),
        numbered("autograd::engine::evaluate_function: AddmmBackward0", start + 50, start + 60, 7, 1, thread=2),
        slice_("aten::mm", start + 51, start + 59, thread=2),
        slice_("Optimizer.step#AdamW.step", start + 70, start + 80, cat="user_annotation"),
        slice_("Optimizer.zero_grad#AdamW.zero_grad", start + 90, start + 95, cat="user_annotation"),
    ]


def asked(number: int, start: float) -> list[Record]:
    """What that step asks for and gives back; its state in step 0 only."""
    return [
        memory(start + 5, 512, 1),
        memory(start + 15, 1024, 2),
        memory(start + 35, 2048, 3),
        memory(start + 55, 4096, 4, thread=2),
        memory(start + 57, 8192, 5, thread=2),
        memory(start + 58, -8192, 5, thread=2),
        memory(start + 59, -2048, 3, thread=2),
        memory(start + 59.5, -1024, 2, thread=2),
        *([memory(start + 75, 16384, 6)] if not number else []),
        memory(start + 92, -4096, 4),
        memory(start + 99, -512, 1),
    ]


def one(path: Path) -> DeviceLog:
    (found,) = read(path)
    return found


def sums(history: AllocationLog) -> list[int]:
    """Bytes held after each position."""
    changes = [0] * history.length
    for allocation in history.allocations:
        changes[allocation.begin] += allocation.size
        if allocation.end is not None:
            changes[allocation.end] -= allocation.size
    return list(accumulate(changes))


def test_slices_tell_what_memory_is_for(tmp_path: Path) -> None:
    events = [*training(0, 0), *training(1, 100), *asked(0, 0), *asked(1, 100)]
    found = one(write(tmp_path / "t.json", events)).history
    kinds = {one.size: (one.phase, one.category) for one in found.allocations}
    assert kinds == {
        512: ("data", "inputs"), 1024: ("forward", "activations"), 2048: ("loss", "activations"),
        4096: ("backward", "gradients"), 8192: ("backward", "temporaries"), 16384: ("optimizer", "optimizer_state"),
    }  # fmt: skip
    assert [one.step for one in found.allocations] == [0] * 6 + [1] * 5
    phases = [(mark.phase, mark.step) for mark in found.marks]
    assert phases[:6] == [(phase, 0) for phase in ("data", "forward", "loss", "backward", "optimizer", "zero_grad")]


def test_operators_and_modules_are_told_and_of_backward_those_of_its_forward(tmp_path: Path) -> None:
    found = one(write(tmp_path / "t.json", [*training(0, 0), *asked(0, 0)])).history
    told = {one.size: (one.operator, one.module) for one in found.allocations}
    assert told[1024] == ("aten::addmm", "layer")
    assert told[2048] == ("aten::mse_loss", "")
    assert told[4096] == ("aten::mm", "layer")


def test_the_user_s_line_is_told_where_stacks_were_recorded(tmp_path: Path) -> None:
    frame = slice_("train.py(25): step", 0, 100, cat="python_function")
    found = one(write(tmp_path / "t.json", [frame, *training(0, 0), *asked(0, 0)])).history
    assert {one.where for one in found.allocations if one.phase == "forward"} == {"train.py:25"}


def test_between_slices_a_thread_of_autograd_s_own_is_in_the_backward_pass(tmp_path: Path) -> None:
    events = [memory(56, 512, 1, thread=2), memory(65, -512, 1, thread=2), memory(75, 64, 2)]
    found = one(write(tmp_path / "t.json", [*training(0, 0), *events])).history
    assert [(one.phase, one.category) for one in found.allocations] == [
        ("backward", "temporaries"), ("optimizer", "optimizer_state"),
    ]  # fmt: skip


def test_without_marked_steps_the_optimizer_ends_them(tmp_path: Path) -> None:
    slices = [one for start in (0, 100) for one in training(0, start) if not one["name"].startswith("ProfilerStep")]
    found = one(write(tmp_path / "t.json", [*slices, *asked(0, 0), *asked(1, 100)])).history
    assert [one.step for one in found.allocations] == [0] * 6 + [1] * 5


def test_totals_tell_what_was_there_before_and_what_is_reserved(tmp_path: Path) -> None:
    events = totalled(10_000, memory(20, 512, 1), memory(30, -4000, 9), memory(40, -512, 1), reserved=20_000)
    found = one(write(tmp_path / "t.json", [*training(0, 0), *events], deviceProperties=[V100]))
    history = found.history
    rest, given_back, new = history.allocations
    assert (rest.size, rest.category, rest.phase, rest.end) == (6000, "before", "start", None)
    assert (given_back.size, given_back.category, given_back.end) == (4000, "before", 3)
    assert (new.begin, new.end) == (2, 4)
    assert sums(history) == [6000, 10_000, 10_512, 6512, 6000]
    assert (history.readings[-1].allocated, history.readings[-1].reserved) == (6000, 20_000)
    assert max(one.peak_allocated for one in history.readings) == 10_512
    assert (found.name, found.capacity) == (V100["name"], V100["totalGlobalMem"])
    assert (history.late, history.truncated) == (True, False)
    assert history.notes == ["9.77 KiB were allocated before the recording began: their contents are unknown"]


def test_events_count_in_the_order_of_time_not_of_the_file(tmp_path: Path) -> None:
    events = totalled(0, memory(20, 512, 1), memory(30, 100, 2), memory(40, -512, 1))
    found = one(write(tmp_path / "t.json", [*training(0, 0), *events[::-1]])).history
    assert sums(found) == [512, 612, 100]
    assert found.notes == []


def test_totals_that_the_events_do_not_sum_to_are_told(tmp_path: Path) -> None:
    events = totalled(0, memory(20, 512, 1), memory(30, 2048, 2), memory(40, -512, 1))
    del events[1]
    found = one(write(tmp_path / "t.json", [*training(0, 0), *events])).history
    assert found.notes == ["the trace's own totals differ by up to 2 KiB from the sum of its events"]


def test_without_addresses_the_newest_of_a_size_is_given_back(tmp_path: Path) -> None:
    events = [memory(12, 512), memory(14, 512), memory(16, -512), memory(18, -100), memory(55, -512)]
    found = one(write(tmp_path / "t.json", [*training(0, 0), *events])).history
    before, first, second = found.allocations
    assert (before.size, before.category) == (100, "before")
    assert (first.begin, first.end, second.begin, second.end) == (1, 5, 2, 3)
    assert "no totals" in found.notes[1]
    assert "no addresses" in found.notes[2]
    assert found.readings == []


def test_the_host_s_memory_is_told_only_where_no_other_device_has_any(tmp_path: Path) -> None:
    host = memory(20, 64, 7, **HOST)
    found = one(write(tmp_path / "host.json", [*training(0, 0), host], deviceProperties=[V100]))
    assert (found.device, found.name, found.history.readings) == (-1, None, [])
    assert one(write(tmp_path / "both.json", [*training(0, 0), host, memory(30, 512, 1)])).device == 0


def test_each_device_has_a_history_of_its_own(tmp_path: Path) -> None:
    events = [memory(20, 512, 1), memory(20, 1024, 1, **CUDA | {"Device Id": 1})]
    first, second = read(write(tmp_path / "t.json", [*training(0, 0), *events]))
    assert (first.device, first.history.allocations[0].size) == (0, 512)
    assert (second.device, second.history.allocations[0].size) == (1, 1024)


def test_what_is_nearly_json_is_read_as_in_a_profile(tmp_path: Path) -> None:
    odd = slice_("aten::add", 1, 2, value=float("nan"), device="cpu")
    path = write(tmp_path / "t.json.gz", [*training(0, 0), odd, *asked(0, 0)])
    assert len(one(path).history.allocations) == 6


def test_events_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    odd = [
        memory(20, 2**60, 1), memory(-1, 64, 2), memory(21, 0, 3), memory(22, 64, 4, **UNKNOWN),
        memory(23, 64, 5) | {"ts": "soon"}, memory(24, 64, 6) | {"args": [1]}, {"name": "[memory]", "ph": "i"},
    ]  # fmt: skip
    found = one(write(tmp_path / "t.json", [*training(0, 0), *odd, memory(30, 512, 9)])).history
    assert [one.size for one in found.allocations] == [512]


def test_a_trace_without_memory_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no \\[memory\\] events") as caught:
        read(write(tmp_path / "t.json", training(0, 0)))
    assert "profile_memory" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\x80\x04N.", "a pickle, not a trace"),
        (b"hello", "is not a trace"),
        (document([*training(0, 0), *asked(0, 0)])[:-400], "cut short or damaged"),
        (b"\x1f\x8b\x08\x00cut", "cut short or damaged"),
        (b'{"traceEvents": []}', "an empty trace"),
    ],
)
def test_what_is_no_trace_is_refused_as_a_profile_does(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what):
        read(path)


@given(anything(), st.lists(st.tuples(st.integers(0, 80), st.integers(-3, 3), st.integers(0, 4)), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_trace_memory_sums_up(
    tmp_path: Path, slices: list[Record], moves: list[tuple[int, int, int]]
) -> None:
    events = [memory(at, change, address, thread=1 + address % 2) for at, change, address in moves]
    path = write(tmp_path / "t.json", [*slices, *events])
    if not any(change for _, change, _ in moves):
        with pytest.raises(DataError):
            read(path)
        return
    history = one(path).history
    assert all(0 <= one.begin < (one.end or history.length) <= history.length for one in history.allocations)
    assert min(sums(history)) >= 0
    assert [mark.at for mark in history.marks] == sorted({mark.at for mark in history.marks})
    assert history.marks[0].at == 0


DDP = PUBLIC / "hta_v100_ddp_rank1of2.json.gz"


@pytest.mark.skipif(not DDP.exists(), reason="the public trace is not here")
def test_of_a_real_trace_every_total_is_rebuilt() -> None:
    found = one(DDP)
    events = sorted(memory_events(DDP), key=lambda event: event.at)
    totals = [event.about.allocated for event in events if event.about.kind == 1]
    assert len(totals) == 26_770
    assert len(events) == 28_010
    assert sums(found.history)[1:] == totals
    assert (found.device, found.rank, found.name) == (1, 1, "Tesla V100-SXM2-32GB")
    assert found.history.readings[-1].reserved == 12_782_141_440
    assert max(mark.step or 0 for mark in found.history.marks) == 4
    assert not any(one.category == "unknown" for one in found.history.allocations)
    assert {one.phase for one in found.history.allocations if one.category == "activations"} == {"forward", "loss"}
    assert sums(found.history)[-1] == 4_096_614_400


@pytest.mark.parametrize(("workers", "moves"), [(0, 8220), (4, 8280)])
def test_of_a_real_trace_of_2021_sums_return_to_where_they_began(workers: int, moves: int) -> None:
    path = PUBLIC / f"kineto_v100_resnet50_workers{workers}.pt.trace.json.gz"
    if not path.exists():
        pytest.skip("the public trace is not here")
    history = one(path).history
    assert history.length == moves
    assert sums(history)[-1] == 0
    images = [one.size for one in history.allocations if one.phase == "data" and one.size > 2**20]
    assert images == [32 * 3 * 224 * 224 * 4] * 6
    assert {one.category for one in history.allocations if one.phase == "data"} == {"inputs"}
    assert not any(one.category == "unknown" for one in history.allocations)
