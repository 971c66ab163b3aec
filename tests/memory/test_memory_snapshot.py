import contextlib
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from snapshots_made import (
    BACKWARD,
    CALL,
    FORWARD,
    SCRIPT,
    STEP,
    TORCH,
    Record,
    alloc,
    block,
    event,
    flat,
    frame,
    free,
    native,
    segment,
    snapshot,
    write,
)
from traces_made import PUBLIC

from gpubench import units
from gpubench.diagnosis.rules import advise
from gpubench.errors import DataError
from gpubench.memory.allocation_log import AllocationLog, Counts, DeviceLog, PhaseStart
from gpubench.memory.analysis import footprints
from gpubench.memory.footprint import Level
from gpubench.memory.snapshot import read

MIB = 2**20
REAL = PUBLIC / "snapshot_magma27_small.pickle"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def one(file: Path, content: Record) -> DeviceLog:
    (found,) = read(write(file, content))
    return found


def held(history: AllocationLog) -> list[int]:
    """Bytes after each position."""
    changes = [0] * history.length
    for allocation in history.allocations:
        changes[allocation.begin] += allocation.size
        if allocation.end is not None:
            changes[allocation.end] -= allocation.size
    return [sum(changes[: at + 1]) for at in range(history.length)]


def refusal(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.skipif(not REAL.exists(), reason="the public snapshot is not here")
def test_a_real_recording_is_rebuilt_to_the_published_peak_and_end() -> None:
    (found,) = read(REAL)
    history = found.history
    peak, end = max(one.peak_allocated for one in history.readings), history.readings[-1].allocated
    assert (f"{peak / MIB:,.1f}", f"{end / MIB:,.1f}") == ("13,282.6", "1,313.9")
    assert found.history.readings[-1].reserved == 13_524 * MIB
    asked = held(history)
    assert (f"{max(asked) / MIB:,.2f}", f"{asked[-1] / MIB:,.2f}") == ("13,278.96", "1,310.27")
    assert [mark.phase for mark in history.marks] == ["start", "forward", "loss", "backward"]
    assert (history.late, history.truncated) == (True, False)  # the model was built before
    assert "1.28 GiB were allocated before the first of its 5,163 events" in history.notes[0]
    assert not any(one.category == "unknown" for one in history.allocations)


def test_what_was_asked_for_and_given_back_is_held_in_between(file: Path) -> None:
    found = one(file, snapshot(flat(alloc(0, 1000), alloc(1024, 600), free(0, 1000)), [segment(0, 2 * MIB)]))
    first, second = found.history.allocations
    assert (first.size, first.begin, first.end) == (1000, 0, 2)
    assert (second.size, second.begin, second.end) == (600, 1, None)
    assert (found.history.length, found.history.truncated, found.device) == (3, False, 0)


def test_readings_count_blocks_as_they_are_known_in_the_end(file: Path) -> None:
    events = flat(event("segment_alloc", 0, 2 * MIB), alloc(0, 1000), alloc(1024, 600), free(0, 1000))
    state = segment(0, 2 * MIB, block(1024, 0, "inactive"), block(2048, 600))
    found = one(file, snapshot(events, [state]))
    first, last = found.history.readings
    assert (first.at, first.allocated, first.reserved) == (0, 0, 0)
    assert (last.at, last.allocated, last.peak_allocated) == (3, 2048, 1024 + 2048)
    assert (last.reserved, last.peak_reserved) == (2 * MIB, 2 * MIB)


def test_what_is_unused_at_the_peak_is_what_was_reserved_at_that_very_event(file: Path) -> None:
    """The allocator may get more from the driver later in the same phase, when less is in use."""
    events = flat(
        event("segment_alloc", 0, 2 * MIB, FORWARD), alloc(0, 2 * MIB, FORWARD), free(0, 2 * MIB, FORWARD),
        event("segment_alloc", 4 * MIB, 20 * MIB, FORWARD), alloc(4 * MIB, MIB, FORWARD),
    )  # fmt: skip
    segments = [segment(0, 2 * MIB, block(2 * MIB, 0, "inactive")), segment(4 * MIB, 20 * MIB, block(MIB, MIB))]
    (found,) = footprints(read(write(file, snapshot(events, segments))), "snapshot")
    assert (found.peak.level.allocated, found.peak.level.reserved) == (2 * MIB, 2 * MIB)
    assert "fragmentation" not in found.peak.amounts
    assert found.most == 22 * MIB


def test_without_a_history_what_is_held_is_known_with_the_kinds_that_stacks_show(file: Path) -> None:
    moved = [frame("_apply", f"{TORCH}/nn/modules/module.py"), SCRIPT]
    blocks = [
        block(3 * MIB, 3 * MIB, frames=moved), block(MIB, 0, "inactive"), block(MIB, MIB, frames=FORWARD),
        block(MIB, MIB, frames=[SCRIPT]),
    ]  # fmt: skip
    other = segment(8 * MIB, 2 * MIB, block(2 * MIB, 2 * MIB, frames=STEP), device=1)
    segments = [segment(0, 6 * MIB, *blocks), other]
    for content in (snapshot([], segments), segments):
        first, second = footprints(read(write(file, content)), "snapshot")
        amounts = {"parameters": 3 * MIB, "activations": MIB, "unknown": MIB, "fragmentation": MIB}
        assert first.peak.amounts == amounts
        assert second.peak.amounts == {"optimizer_state": 2 * MIB}
        assert first.is_state
        assert "the file has no history" in first.notes[0]
        assert first.allocator
        assert first.allocator.largest_free == MIB
    free_alone = snapshot([], [segment(0, MIB, block(MIB, 0, "inactive"))])
    assert "nothing is allocated" in refusal(write(file, free_alone)).message


def test_a_request_that_failed_is_kept_with_what_was_held_then(file: Path) -> None:
    events = flat(
        event("segment_alloc", 0, 20 * MIB), alloc(0, 8 * MIB, FORWARD), alloc(8 * MIB, 6 * MIB, STEP),
        free(8 * MIB, 6 * MIB, STEP), {**event("oom", 0, 30 * MIB, FORWARD), "device_free": 10 * MIB},
    )  # fmt: skip
    state = [segment(0, 20 * MIB, block(8 * MIB, 8 * MIB), block(12 * MIB, 0, "inactive"))]
    (found,) = footprints(read(write(file, snapshot(events, state))), "snapshot")
    short = found.out_of_memory
    assert short
    assert (short.requested, short.left, short.where) == (30 * MIB, 10 * MIB, "gpt/model.py:54")
    assert (short.level.allocated, short.level.reserved, short.largest_free) == (8 * MIB, 20 * MIB, 12 * MIB)
    assert [(one.size, one.where) for one in short.holders] == [(8 * MIB, "gpt/model.py:54")]
    large = structs.replace(found, peak=structs.replace(found.peak, level=Level(2**30, 2**30, 2**30, 2**30)))
    first, *_ = advise(large, None).findings
    assert (first.id, first.cause) == ("out-of-memory", "20 MiB are missing")
    assert "20 MiB less in use would have made it fit" in first.advice
    in_pieces = structs.replace(large, out_of_memory=structs.replace(short, requested=22 * MIB))
    assert "expandable_segments" in advise(in_pieces, None).findings[0].advice


def test_segments_given_back_were_reserved_until_then(file: Path) -> None:
    events = flat(
        alloc(0, 512, FORWARD), free(0, 512, FORWARD), event("segment_unmap", 0, 20 * MIB, FORWARD),
        event("segment_map", 0, 2 * MIB, STEP), alloc(0, 512, STEP),
    )  # fmt: skip
    readings = one(file, snapshot(events, [segment(0, 2 * MIB, block(512, 512))])).history.readings
    assert [reading.reserved for reading in readings] == [20 * MIB, 20 * MIB, 2 * MIB]


def test_what_was_there_before_the_first_event_follows_from_the_end(file: Path) -> None:
    state = segment(0, 2 * MIB, block(1024, 1000, frames=FORWARD), block(512, 512))
    found = one(file, snapshot(flat(alloc(1024, 512), free(4096, 700)), [state])).history
    there, lost, new = found.allocations
    assert (there.size, there.category, there.phase, there.where) == (1000, "before", "start", "gpt/model.py:54")
    assert (lost.size, lost.begin, lost.end, lost.category) == (700, 1, 3, "before")
    assert (new.begin, new.end) == (2, None)
    assert found.marks[0] == PhaseStart(0, "start")
    assert found.marks[1].at == 2
    assert (found.truncated, found.late) == (True, False)  # a stack is known of what has no event
    assert "the allocation of 1 block was recorded, but is missing from the events" in found.notes[0]
    assert "1.66 KiB were allocated before the first of its 3 events" in found.notes[0]
    assert [reading.allocated for reading in found.readings] == [0, 1024 + 1024, 1024 + 512]


def test_a_release_counts_when_it_is_completed(file: Path) -> None:
    requested = event("free_requested", 0, 512)
    later = flat(alloc(0, 512), requested, alloc(512, 100), event("free_completed", 0, 512))
    assert one(file, snapshot(later)).history.allocations[0].end == 2
    never = flat(alloc(0, 512), requested, alloc(512, 100))
    state = segment(0, 2 * MIB, block(512, 512, "active_awaiting_free"), block(512, 100))
    found = one(file, snapshot(never, [state])).history
    assert (found.allocations[0].end, found.length, found.truncated) == (1, 3, False)


def test_an_address_that_is_given_out_again_was_given_back(file: Path) -> None:
    found = one(file, snapshot([alloc(0, 512), alloc(0, 100)], [segment(0, 2 * MIB, block(512, 100))])).history
    assert [(one.begin, one.end) for one in found.allocations] == [(0, 1), (2, None)]


def test_allocations_without_release_that_are_gone_in_the_end_are_told(file: Path) -> None:
    found = one(file, snapshot([alloc(0, 512)], [segment(0, 2 * MIB)])).history
    assert found.notes == ["no free was recorded of 1 allocation: assumed to be held to the end"]


def test_memory_that_did_not_suffice_is_told_with_its_place(file: Path) -> None:
    failure = {"action": "oom", "device_free": 3 * MIB, "size": 5 * MIB, "stream": 0, "frames": []}
    found = one(file, snapshot([alloc(0, 512), failure], [segment(0, 2 * MIB, block(512, 512))])).history
    assert found.notes == ["out of memory at event 2 of 2: 5 MiB requested, with 3 MiB left on the device"]


def test_allocations_frees_and_the_largest_free_block_are_counted(file: Path) -> None:
    failure = {"action": "oom", "device_free": 0, "size": 5 * MIB, "stream": 0, "frames": []}
    events = flat(alloc(0, 1000), alloc(1024, 600), free(0, 1000), failure)
    states = [segment(0, 2 * MIB, block(1024, 0, "inactive"), block(1024, 600)), segment(4 * MIB, 20 * MIB, device=1)]
    counts = one(file, snapshot(events, states)).history.counts
    assert counts == Counts(2, 1, retries=None, ooms=1, largest_free=2 * MIB - 2048)
    requested = [event for event in events if event["action"] != "free_completed"]
    completed = [event for event in events if event["action"] != "free_requested"]
    for some in (requested, completed):  # either may be left out of a recording
        assert one(file, snapshot(some, states)).history.counts == counts


def training(steps: int = 2) -> list[Record]:
    """Stacks of Python only: an activation at 0, a gradient at 1024, the optimizer's state at 2048 and 3072."""
    events: list[Record] = []
    for step in range(steps):
        events += flat(
            alloc(0, 1000, FORWARD), alloc(512, 100, FORWARD), free(512, 100, FORWARD), alloc(1024, 900, BACKWARD),
            alloc(512, 200, BACKWARD), free(512, 200, BACKWARD), free(0, 1000, BACKWARD),
            *([alloc(2048, 800, STEP), alloc(3072, 700, STEP)] if not step else []),
            alloc(512, 300, STEP), free(512, 300, STEP),
            free(1024, 900, [frame("zero_grad", f"{TORCH}/optim/optimizer.py"), SCRIPT]),
        )  # fmt: skip
    return events


def test_stacks_of_python_tell_a_training_loop_apart(file: Path) -> None:
    state = segment(2048, 2 * MIB, block(1024, 800), block(1024, 700))
    found = one(file, snapshot(training(), [state])).history
    assert [(mark.phase, mark.step) for mark in found.marks] == [
        (phase, step) for step in (0, 1) for phase in ("forward", "backward", "optimizer", "zero_grad")
    ]
    assert {one.size: one.category for one in found.allocations} == {
        1000: "activations", 100: "temporaries", 900: "gradients", 200: "temporaries", 800: "optimizer_state",
        700: "optimizer_state", 300: "temporaries",
    }  # fmt: skip
    assert {one.where for one in found.allocations if one.phase == "forward"} == {"gpt/model.py:54"}
    assert not found.truncated


def test_the_user_s_frame_is_told_or_the_innermost_where_all_are_a_library_s(file: Path) -> None:
    inside = [frame("einsum", r"D:\dev\.venv\Lib\site-packages\torch\functional.py", 373)]
    users = [*inside, frame("forward", r"D:\dev\gpt\model.py", 39), CALL, SCRIPT]
    found = one(file, snapshot([alloc(0, 8, users), alloc(512, 8, inside)])).history
    assert [one.where for one in found.allocations] == ["gpt/model.py:39", "torch/functional.py:373"]


def test_what_a_checkpoint_does_again_is_of_the_backward_pass(file: Path) -> None:
    again = [*FORWARD[:2], frame("unpack_hook", f"{TORCH}/utils/checkpoint.py", 1100)]
    custom = [frame("backward", "/home/me/ops.py"), frame("apply", f"{TORCH}/autograd/function.py")]
    events = flat(alloc(0, 8, FORWARD), alloc(512, 8, again), free(512, 8, again), alloc(1024, 8, custom))
    found = one(file, snapshot(events)).history
    assert [(one.phase, one.category) for one in found.allocations] == [
        ("forward", "activations"), ("backward", "temporaries"), ("backward", "gradients"),
    ]  # fmt: skip


def test_operators_that_a_mode_sees_in_a_thread_of_autograd_are_of_the_backward_pass(file: Path) -> None:
    seen = [frame("__call__", f"{TORCH}/_ops.py"), frame("__torch_dispatch__", "/home/me/mode.py")]
    wrapped = [*seen, frame("_fn", f"{TORCH}/_dynamo/eval_frame.py"), frame("inner", f"{TORCH}/_compile.py")]
    events = [alloc(0, 8, [*wrapped, *FORWARD]), alloc(512, 8, wrapped), alloc(1024, 8, seen)]
    found = one(file, snapshot(events)).history
    assert [found.phase for found in found.allocations] == ["forward", "backward", "backward"]


def test_a_free_with_the_stack_of_its_allocation_is_of_the_phase_in_which_it_happens(file: Path) -> None:
    given = alloc(0, 8, FORWARD)
    freed = [{**one, "frames": given["frames"]} for one in free(0, 8)]  # the same object, as in PyTorch's files
    events = flat(given, alloc(512, 8, BACKWARD), freed, alloc(1024, 8, BACKWARD))
    found = one(file, snapshot(events)).history
    assert [mark.phase for mark in found.marks] == ["forward", "backward"]


def test_a_function_of_autograd_is_forward_where_it_is_called_there(file: Path) -> None:
    custom = [frame("forward", "/home/me/ops.py"), frame("apply", f"{TORCH}/autograd/function.py"), *FORWARD]
    assert one(file, snapshot([alloc(0, 8, custom)])).history.allocations[0].phase == "forward"


def test_a_loss_module_is_the_loss_and_init_is_the_model(file: Path) -> None:
    loss = [frame("forward", f"{TORCH}/nn/modules/loss.py", 1385), CALL, SCRIPT]
    moved = [
        frame("convert", f"{TORCH}/nn/modules/module.py"),
        frame("_apply", f"{TORCH}/nn/modules/module.py"),
        SCRIPT,
    ]
    found = one(file, snapshot([alloc(0, 8, moved), alloc(512, 8, FORWARD), alloc(1024, 8, loss)])).history
    assert [(one.phase, one.category, one.step) for one in found.allocations] == [
        ("model", "parameters", None), ("forward", "activations", 0), ("loss", "activations", 0),
    ]  # fmt: skip


def test_what_is_made_beside_parts_of_the_model_is_no_parameter_without_a_reason(file: Path) -> None:
    moved = [frame("_apply", f"{TORCH}/nn/modules/module.py"), SCRIPT]
    own = [frame("LayerNorm.__init__", "/home/me/gpt/model.py", 20), SCRIPT]
    loaded = [frame("_load", "/venv/lib/python3.11/site-packages/transformers/modeling_utils.py", 700), SCRIPT]
    stacks = [moved, [SCRIPT], own, loaded, moved]
    found = one(file, snapshot([alloc(512 * place, 8, stack) for place, stack in enumerate(stacks)])).history
    kinds = ["parameters", "unknown", "parameters", "parameters", "parameters"]
    assert [one.category for one in found.allocations] == kinds


def test_a_softmax_that_is_written_out_is_known_by_the_name_of_its_function(file: Path) -> None:
    def calls(function: str) -> list[Record]:
        return [frame(function, "/home/me/gpt/ops.py", 7), *FORWARD]

    exp = [native("at::_ops::exp::call(at::Tensor const&)")]
    stacks = [calls("softmax"), [*exp, *calls("Ops.masked_softmax")], calls("log_softmax"), calls("normalise")]
    found = one(file, snapshot([alloc(512 * place, 8, stack) for place, stack in enumerate(stacks)])).history
    assert [one.operator for one in found.allocations] == ["in softmax", "aten::exp in softmax", "", ""]


def test_stacks_of_c_tell_the_engine_the_operator_and_workspaces(file: Path) -> None:
    mm = [
        native("at::_ops::empty_memory_format::redispatch(c10::DispatchKeySet)"),
        native("at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
    ]
    engine = [native("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)")]
    blas = [native("at::cuda::getCurrentCUDABlasHandle()"), *mm, *FORWARD]
    added = [native("at::_ops::add_Tensor::redispatch(c10::DispatchKeySet)"), *engine]
    found = one(file, snapshot([alloc(0, 8, blas), alloc(512, 8, [*mm, *FORWARD]), alloc(1024, 8, added)])).history
    assert [(one.phase, one.category, one.operator) for one in found.allocations] == [
        ("forward", "workspaces", "aten::mm"), ("forward", "activations", "aten::mm"),
        ("backward", "gradients", "aten::add"),
    ]  # fmt: skip


def test_a_name_of_any_length_takes_no_longer_than_a_short_one(file: Path) -> None:
    names = ["at::_ops::" + "_A" * 500_000, "torch/" * 200_000, "a." * 500_000]
    stack = [native(name) for name in names] + [frame(name, f"{name}.py") for name in names]
    assert one(file, snapshot([alloc(0, 8, stack)])).history.allocations[0].phase == "unknown"


def test_annotations_tell_the_optimizer_where_no_stack_does(file: Path) -> None:
    events = flat(
        alloc(0, 8, time=1),
        alloc(512, 8, time=5),
        alloc(1024, 8, time=6),
        free(1024, 8, time=7),
        alloc(2048, 8, time=9),
    )
    annotations = [
        {"device": 0, "stage": stage, "name": name, "time_us": time}
        for stage, name, time in (
            ("START", "train", 0), ("START", "Optimizer.step#AdamW.step", 5), ("END", "Optimizer.step#AdamW.step", 7),
            ("END", "train", 8),
        )
    ]  # fmt: skip
    found = one(file, snapshot(events, annotations=annotations)).history
    assert [(one.phase, one.category) for one in found.allocations] == [
        ("unknown", "unknown"), ("optimizer", "optimizer_state"), ("optimizer", "temporaries"), ("unknown", "unknown"),
    ]  # fmt: skip


def test_each_device_has_a_history_of_its_own(file: Path) -> None:
    content = snapshot([alloc(0, 8)], [segment(0, 2 * MIB, block(512, 8)), segment(0, 20 * MIB, device=1)])
    content["device_traces"][1] = flat(alloc(0, 16), free(0, 16))
    first, second = read(write(file, content))
    for found, device, reserved, size in ((first, 0, 2 * MIB, 8), (second, 1, 20 * MIB, 16)):
        history = found.history
        assert (found.device, history.readings[-1].reserved, history.allocations[0].size) == (device, reserved, size)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_any_binary_protocol_is_read(file: Path, protocol: int) -> None:
    content = snapshot(training(40), [segment(2048, 2 * MIB, block(1024, 800), block(1024, 700))])
    plain, other = (read(write(file, content, *chosen))[0].history for chosen in ((), (protocol,)))
    assert plain.levels
    assert other.levels
    assert np.array_equal(plain.levels, other.levels)
    assert structs.replace(other, levels=None) == structs.replace(plain, levels=None)


def recorded(begin: int, entries: int, length: int, device: int = 0) -> tuple[list[Record], Record]:
    """Events and segment of a program that allocates at 16 addresses in turn and frees what it finds there, recorded
    from its move `begin` on into a ring buffer of `entries` as the allocator has one."""
    events: list[Record] = []
    stacks: dict[int, list[Record]] = {}
    for number in range(length):
        place, stack = number * 7 % 16, FORWARD if number >= begin else []
        moves = [alloc(place * 8192, 1000, stack)]
        if place in stacks:
            del stacks[place]
            moves = free(place * 8192, 1000, stack)
        else:
            stacks[place] = stack
        events += moves if number >= begin else []
    blocks = [
        block(8192, 1000, "active_allocated" if place in stacks else "inactive", stacks.get(place, []))
        for place in range(16)
    ]
    return events[-entries:], segment(0, 2**21, *blocks, device=device)


def beginning(file: Path, *devices: tuple[list[Record], Record]) -> list[tuple[bool, bool | str, str]]:
    content = snapshot([], [state for _, state in devices])
    content["device_traces"] = [events for events, _ in devices]
    histories = [one.history for one in read(write(file, content))]
    truncated = [one.truncated and ("surely" if one.truncation_proven else "probably") for one in histories]
    return [(one.late, said, next(iter(one.notes), "")) for one, said in zip(histories, truncated, strict=True)]


def test_a_recording_that_began_late_lost_nothing(file: Path) -> None:
    ((late, truncated, note),) = beginning(file, recorded(begin=12, entries=10**6, length=81))
    assert (late, truncated) == (True, False)
    assert "nothing suggests that events were lost" in note
    assert "before the model is built" in note
    assert "max_entries" not in note
    assert beginning(file, recorded(begin=0, entries=10**6, length=81)) == [(False, False, "")]


def test_what_was_allocated_while_it_recorded_and_has_no_event_was_overwritten(file: Path) -> None:
    for begin in (0, 8):
        ((late, truncated, note),) = beginning(file, recorded(begin, entries=7, length=75))
        assert (late, truncated) == (False, "surely")
        assert "the allocation of 4 blocks was recorded, but is missing from the events" in note
        assert "larger max_entries" in note


@pytest.mark.parametrize(
    ("entries", "said"), [(100, True), (128, True), (1000, True), (12_000, True), (20_000, True), (103, False)]
)
def test_a_round_number_of_events_probably_is_all_that_the_buffer_took(file: Path, entries: int, said: bool) -> None:
    """Nothing proves it where all that is held was there before."""
    one_after_another = flat(alloc(0, 512, FORWARD), free(0, 512, FORWARD)) * entries
    events = [*free(8192, 100), *one_after_another][:entries]
    ((late, truncated, note),) = beginning(file, (events, segment(0, 2**21, block(8192, 1000))))
    assert (late, truncated) == (not said, said and "probably")
    assert ("events, probably max_entries" in note) == said


def test_a_device_with_fewer_events_than_another_did_not_fill_its_buffer(file: Path) -> None:
    """max_entries is the same for all."""
    more = recorded(begin=12, entries=10**6, length=300, device=1)
    few = recorded(begin=12, entries=10**6, length=81)
    few = (few[0][:100], few[1])
    (first, second) = beginning(file, few, more)
    assert first[:2] == second[:2] == (True, False)
    assert "no event was lost" in first[2]
    alike = recorded(begin=12, entries=10**6, length=81, device=1)
    for late, truncated, note in beginning(file, recorded(begin=12, entries=10**6, length=81), alike):
        assert (late, truncated) == (False, "probably")
        assert "events each, probably max_entries" in note


def test_a_segment_whose_stack_is_known_was_taken_while_it_recorded(file: Path) -> None:
    state = segment(0, 2**21, block(1024, 1000)) | {"frames": FORWARD}
    events = flat(alloc(8192, 100, FORWARD), free(8192, 100, FORWARD))
    ((_, truncated, note),) = beginning(file, (events, state))
    assert truncated == "surely"
    assert "1 segment" in note
    taken = [event("segment_alloc", 0, 2**21, FORWARD), *events]
    assert beginning(file, (taken, segment(0, 2**21) | {"frames": FORWARD})) == [(False, False, "")]


moves = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5000)), min_size=1, max_size=60)


@given(moves)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_much_of_it_was_lost_a_history_ends_with_what_is_held(file: Path, moves: list[tuple[int, int]]) -> None:
    live: dict[int, int] = {}
    events: list[Record] = []
    levels = [0]
    for place, size in moves:
        if place in live:
            events += free(place * 8192, live.pop(place))
        else:
            events.append(alloc(place * 8192, size))
            live[place] = size
        levels.append(sum(live.values()))
    state = segment(0, 8 * 8192, *(block(8192, live.get(place, 0), *_state(place in live)) for place in range(8)))
    for lost in range(len(events)):
        if not any(event["action"] == "alloc" for event in events[lost:]):
            break
        history = one(file, snapshot(events[lost:], [state])).history
        assert held(history)[-1] == levels[-1]
        assert max(held(history)) <= max(levels)
        if not lost:
            assert held(history) == levels[1:]
            assert not history.truncated
        assert history.readings[-1].allocated == 8192 * len(live)


def _state(is_held: bool) -> tuple[str]:
    return ("active_allocated" if is_held else "inactive",)


class Code:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(file: Path, protocol: int) -> None:
    trap = file.with_name("ran")
    for code in (Code(os.system, f"touch {trap}"), Code(eval, f"open({str(trap)!r}, 'w')")):
        for content in (code, snapshot([alloc(0, 8, [{"name": code}])]), [{"segments": {"a": [code]}}]):
            assert "holds code, refused" in refusal(write(file, content, protocol)).message
    assert not trap.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        *(b"cos\nsystem\n.", b"\x8c\x02os\x8c\x06system\x93.", b"ios\nsystem\n.", b"(cos\nsystem\no.", b"}}b."),
        *(b"\x82\x01.", b"Pmain\n.", b"K\x01Q.", b"})\x81."),
    ],
)
def test_every_opcode_that_reaches_out_of_a_pickle_is_refused(file: Path, opcodes: bytes) -> None:
    file.write_bytes(b"\x80\x04" + opcodes)
    assert "holds code, refused" in refusal(file).message


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(b"]r\xff\xff\xff\xff.", id="a memo of 64 GiB"),
        pytest.param(b"]p4294967295\n.", id="the same in text"),
        pytest.param(b"N" + b"\x85" * 2_000_000 + b"\x94}h\x00Ns.", id="a key of nested tuples"),
        pytest.param(b"K\x01K\x01\x86" + b"K\x01\x86" * 1_000_000 + b"}.", id="pairs of pairs"),
        pytest.param(b"hMhbMcd\x86.", id="a pair of what only looks like integers"),
        pytest.param(b"\x8a\xff" + b"\x7f" * 255 + b".", id="a long integer"),
        pytest.param(b"\x8e" + b"\xff" * 7 + b"\x0f.", id="a string of an exabyte"),
        pytest.param(b"\x96" + b"\xff" * 7 + b"\x0f.", id="a bytearray of an exabyte"),
        pytest.param(b"X\xff\xff\xff\xffabc.", id="a string longer than the file"),
        pytest.param(b"\x95" + b"\xff" * 7 + b"\x7fN.", id="a frame longer than the file"),
        pytest.param(b"(" * 1_000_000 + b".", id="marks"),
        pytest.param(b"aesu.", id="an empty stack"),
        pytest.param(b"]" * 1_000_000 + b"a" * 999_999 + b".", id="nested lists"),
        pytest.param(b"h\xff.", id="nothing in the memo"),
        pytest.param(b"}]Ns.", id="a list as key"),
        pytest.param(b"\x8c\x01\xff.", id="no UTF-8"),
    ],
)
def test_a_pickle_made_to_do_harm_does_none(file: Path, opcodes: bytes) -> None:
    file.write_bytes(b"\x80\x04" + opcodes)
    refusal(file)


def test_what_stands_in_itself_or_in_many_places_is_not_unrolled(file: Path) -> None:
    bomb: list[Any] = ["x"]
    for _ in range(60):
        bomb = [bomb] * 10
    circle: list[Any] = []
    circle.append(circle)
    content = snapshot([alloc(0, 8)], user_metadata=bomb, more=circle)
    assert one(file, content).history.allocations[0].size == 8
    content["device_traces"][0][0]["frames"] = circle
    assert "a stack" in refusal(write(file, content)).message


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"", "is empty", "_record_memory_history"),
        (b"hello", "is not a pickle", "_dump_snapshot"),
        (b"PK\x03\x04rest", "a zip archive", "_dump_snapshot"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a checkpoint of torch.save", "_dump_snapshot"),
        (b'{"traceEvents": []}', "JSON", "--trace"),
        (b"\x1f\x8b\x08", "compressed by gzip", "--trace"),
        (b"\x80\x06N.", "a pickle of unknown protocol 6", "_dump_snapshot"),
        (b"\x80\x04", "cut short", "copy it again"),
        (b"\x80", "cut short", "copy it again"),
        (pickle.dumps({"a": 1}, 4), "a pickle of something else", "_dump_snapshot"),
        (pickle.dumps(7, 4), "a pickle of something else", "_dump_snapshot"),
        (pickle.dumps([{"address": 0}], 4), "is a pickle of something else, or damaged", "_record_memory_history"),
        (pickle.dumps(snapshot([]), 4), "has no history", 'stacks="python"'),
        (pickle.dumps({"segments": []}, 4), "has no history", 'stacks="python"'),
        (pickle.dumps(snapshot([alloc(0, -1)]), 4), "`$.device_traces[0][0].size`", "_dump_snapshot"),
        (pickle.dumps(snapshot([alloc(0, 2**48)]), 4), "alloc of 281,474,976,710,656 bytes", "_dump_snapshot"),
        (pickle.dumps(snapshot([{"addr": 0}]), 4), "missing required field `action`", "_dump_snapshot"),
        (pickle.dumps(snapshot([alloc(0, 8) | {"frames": 3}]), 4), "a stack", "_dump_snapshot"),
        (pickle.dumps(snapshot([alloc(0, 8, [{"line": "x"}])]), 4), "a stack", "_dump_snapshot"),
    ],
)
def test_what_is_no_snapshot_is_said_to_be_none(file: Path, content: bytes, what: str, hint: str) -> None:
    file.write_bytes(content)
    error = refusal(file)
    assert what in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize("line", [2**64 - 1, -1, 0, 2**31])
def test_a_frame_without_a_line_is_read_and_named_by_its_file(file: Path, line: int) -> None:
    stack = [frame("forward", "/home/me/gpt/model.py", line), frame("", "", line), SCRIPT]
    assert one(file, snapshot([alloc(0, 8, stack)])).history.allocations[0].where == "gpt/model.py"


def test_a_failed_request_of_any_size_is_read(file: Path) -> None:
    """A shape that overflowed asks for exabytes."""
    notes = one(file, snapshot([alloc(0, 8), event("oom", 0, 2**62, device_free=2**30)])).history.notes
    assert notes[-1] == "out of memory at event 2 of 2: 4,194,304 TiB requested, with 1 GiB left on the device"


def test_a_name_with_half_a_character_is_read(file: Path) -> None:
    content = snapshot([alloc(0, 8, [frame("forward", "/home/me/\ud800/model.py", 3)])])
    assert one(file, content | {"half a character \ud800": 1}).history.allocations[0].where == "???/model.py:3"


def test_what_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.pickle").message
    assert "Is a directory" in refusal(tmp_path).message


def test_a_snapshot_cut_anywhere_is_refused(file: Path) -> None:
    whole = pickle.dumps(snapshot(training(), [segment(0, 2 * MIB, block(1024, 800))]), protocol=4)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refusal(file)


@pytest.mark.parametrize("available", [1000, 20_000])
def test_a_file_that_does_not_fit_in_memory_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    write(file, snapshot(training(3)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    error = refusal(file)
    assert "does not fit in memory" in error.message
    assert units.size(16 * file.stat().st_size) in error.message


WHOLE = pickle.dumps(snapshot(training(), [segment(0, 2 * MIB, block(1024, 800, frames=FORWARD))]), protocol=4)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_snapshot_is_read_or_refused(file: Path, damage: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for at, byte in damage:
        content[at] = byte
    file.write_bytes(content)
    with contextlib.suppress(DataError):
        for device in read(file):
            history = device.history
            assert all(0 <= one.begin < (one.end or history.length) <= history.length for one in history.allocations)


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_opcodes_are_refused(file: Path, opcodes: bytes) -> None:
    file.write_bytes(b"\x80\x04" + opcodes)
    refusal(file)
