"""What a history adds up to."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from allocation_logs_made import MIB, Script, adamw, histories, with_readings
from footprints_made import row
from hypothesis import given
from hypothesis import strategies as st

from gpubench.errors import DataError
from gpubench.memory.allocation_log import Allocation, AllocationLog, AllocatorReading, Counts, PhaseStart
from gpubench.memory.allocator import Rules, replay
from gpubench.memory.analysis import HOLDERS, MODULES, POINTS, footprint
from gpubench.memory.footprint import CATEGORIES, OTHERS, Footprint, Source

N = 12_345
"""Elements of the made model's parameters."""


def of(history: AllocationLog, source: Source = "measured", **known: Any) -> Footprint:
    return footprint(history, source=source, device="cpu", capacity=None, **known)


def names(found: Footprint) -> list[tuple[str, str]]:
    return [(one.stage, one.phase) for one in found.phases]


# Closed forms


def test_adamw_in_float32_holds_four_four_and_eight_bytes_an_element() -> None:
    first = row(of(adamw(N, steps=1)), "first", "optimizer")
    kept = {"parameters": 4 * N, "gradients": 4 * N, "optimizer_state": 8 * N, "activations": 16}
    assert first.end == kept
    assert first.peak == {**kept, "temporaries": 4 * N}
    assert first.level.requested == first.level.allocated == first.level.total == 20 * N + 16
    assert first.level.reserved is None


def test_the_state_is_there_from_the_first_step_on_and_gradients_go_with_zero_grad() -> None:
    found = of(adamw(N, steps=2))
    assert "optimizer_state" not in row(found, "first", "backward").peak
    assert row(found, "first", "zero_grad").peak["gradients"] == 4 * N
    assert row(found, "first", "zero_grad").end == {"parameters": 4 * N, "optimizer_state": 8 * N, "activations": 16}
    forward = row(found, "steady", "forward")
    assert forward.peak == {
        "parameters": 4 * N, "optimizer_state": 8 * N, "inputs": 64, "activations": 1000 + 16
    }  # fmt: skip
    assert row(found, "setup", "start").peak == {}
    assert row(found, "setup", "model").end == {"parameters": 4 * N}


def test_the_peak_is_in_the_phase_that_holds_most() -> None:
    found = of(adamw(N, steps=1))
    assert (found.peak.stage, found.peak.phase) == ("first", "optimizer")
    found = of(adamw(N, steps=2, activations=100 * N))
    assert (found.peak.stage, found.peak.phase) == ("steady", "backward")
    assert found.peak.amounts["activations"] == 100 * N + 16
    assert found.peak.amounts == row(found, "steady", "backward").peak
    assert found.peak.level == row(found, "steady", "backward").level


def test_of_equal_peaks_the_first_is_the_peak() -> None:
    found = of(adamw(N, steps=3))
    assert row(found, "first", "optimizer").level == row(found, "steady", "optimizer").level
    assert found.peak.stage == "first"


def test_a_phase_that_only_gives_back_peaks_at_what_it_found() -> None:
    found = row(of(adamw(N, steps=1)), "first", "zero_grad")
    assert sum(found.peak.values()) - sum(found.end.values()) == 4 * N


# Stages


def test_the_phases_come_in_order_each_once_a_stage() -> None:
    step = ["data", "forward", "backward", "optimizer", "zero_grad"]
    assert names(of(adamw(N, steps=4, batches=3))) == [
        ("setup", "start"),
        ("setup", "model"),
        *(("first", phase) for phase in step),
        *(("steady", phase) for phase in step),
    ]


def test_of_micro_batches_the_highest_peak_and_the_last_end_stay() -> None:
    script = Script()
    script.phase("start")
    for size, rest in ((300, 7), (500, 5), (400, 6)):
        script.phase("forward", 0)
        script.release(script.hold(size, "temporaries"))
        script.hold(rest, "activations")
        script.phase("backward", 0)
    forward = row(of(script.log()), "first", "forward")
    assert forward.peak == {"temporaries": 500, "activations": 7}
    assert forward.end == {"activations": 7 + 5 + 6}


def test_one_step_has_no_steady_stage() -> None:
    assert {one.stage for one in of(adamw(N, steps=1)).phases} == {"setup", "first"}


def test_a_step_that_was_cut_off_does_not_stand_for_the_others() -> None:
    whole = adamw(N, steps=3)
    at = next(mark.at for mark in whole.marks if (mark.step, mark.phase) == (2, "optimizer"))
    assert row(of(_until(whole, at)), "steady", "optimizer") == row(of(adamw(N, steps=2)), "steady", "optimizer")
    assert {one.stage for one in of(_until(adamw(N, steps=2), at // 2)).phases} == {"setup", "first"}


def _until(history: AllocationLog, at: int) -> AllocationLog:
    begun = [one for one in history.allocations if one.begin < at]
    return AllocationLog(
        [
            Allocation(one.size, one.begin, one.end if one.end is not None and one.end < at else None, one.category)
            for one in begun
        ],
        [mark for mark in history.marks if mark.at < at],
        at,
    )


def test_a_peak_in_a_step_in_between_is_called_steady() -> None:
    script = Script()
    script.phase("model")
    for step, size in enumerate((1, 5, 2)):
        script.phase("forward", step)
        script.release(script.hold(size, "activations"))
    found = of(script.log())
    assert (found.peak.stage, found.peak.phase, found.peak.amounts) == ("steady", "forward", {"activations": 5})
    assert row(found, "steady", "forward").peak == {"activations": 2}


def test_what_comes_after_a_step_and_belongs_to_none_has_no_row_and_can_hold_the_peak() -> None:
    script = Script()
    script.phase("forward", 0)
    script.hold(1, "activations")
    script.phase("unknown")
    script.hold(2, "unknown")
    found = of(script.log())
    assert names(found) == [("first", "forward")]
    assert (found.peak.stage, found.peak.phase) == ("first", "unknown")


def test_a_history_that_begins_in_a_later_step_has_no_first() -> None:
    script = Script()
    script.phase("forward", 5)
    script.hold(1, "activations")
    assert names(of(script.log())) == [("steady", "forward")]


def test_a_mark_that_only_closes_the_history_is_no_phase() -> None:
    history = adamw(N)
    closed = AllocationLog(history.allocations, [*history.marks, PhaseStart(history.length, "unknown")], history.length)
    assert of(closed).phases == of(history).phases


def test_without_steps_all_is_set_up() -> None:
    script = Script()
    script.phase("unknown")
    script.hold(3, "before")
    found = of(script.log())
    assert names(found) == [("setup", "unknown")]
    assert found.peak.amounts == {"before": 3}


# Counts


def test_under_rules_what_a_block_has_over_is_fragmentation() -> None:
    script = Script()
    script.phase("model")
    script.hold(25 * MIB - 100, "parameters")
    found = of(script.log(), "predicted", rules=Rules(), other=400 * MIB)
    assert found.peak.amounts == {"parameters": 25 * MIB, "fragmentation": MIB, "other": 400 * MIB}
    level = found.peak.level
    assert (level.requested, level.allocated, level.reserved) == (25 * MIB - 100, 26 * MIB, 26 * MIB)
    assert level.total == 426 * MIB


def test_under_rules_what_is_kept_back_is_fragmentation() -> None:
    script = Script()
    script.phase("forward", 0)
    script.release(script.hold(30 * MIB, "temporaries"))
    script.hold(513, "activations")
    found = row(of(script.log(), "predicted", rules=Rules()), "first", "forward")
    assert found.peak == {"temporaries": 30 * MIB}
    assert found.end == {"activations": 1024, "fragmentation": 32 * MIB - 1024}


def test_a_device_that_is_too_small_is_seen_to_be() -> None:
    history = adamw(10 * MIB)
    small = of(history, "predicted", rules=Rules(capacity=100 * MIB))
    assert small.peak == of(history, "predicted", rules=Rules()).peak
    assert small.peak.level.total > 100 * MIB


def _read(*readings: tuple[int, int, int, int]) -> AllocationLog:
    """1 KiB of parameters, then a forward pass that goes up to 5 KiB and ends with 3 KiB."""
    script = Script()
    script.phase("model")
    script.hold(1024, "parameters")
    script.phase("forward", 0)
    kept = script.hold(2048, "activations")
    script.release(script.hold(2048, "temporaries"))
    script.phase("backward", 0)
    script.release(kept)
    history = script.log()
    ats = [*(mark.at for mark in history.marks), history.length]
    history.readings = [AllocatorReading(at, *one) for at, one in zip(ats, readings, strict=False)]
    return history


def test_what_the_allocator_counts_beyond_the_history_are_workspaces() -> None:
    found = of(_read((0, 0, 0, 0), (1024, 8192, 1024, 8192), (3072 + 500, 9000, 5120 + 700, 9500)), other=77)
    assert row(found, "setup", "model").peak == {"parameters": 1024, "fragmentation": 8192 - 1024, "other": 77}
    forward = row(found, "first", "forward")
    assert forward.peak == {
        "parameters": 1024, "activations": 2048, "temporaries": 2048, "workspaces": 700,
        "fragmentation": 9500 - 5820, "other": 77,
    }  # fmt: skip
    assert (forward.level.requested, forward.level.allocated, forward.level.reserved) == (5120, 5820, 9500)
    assert forward.end == {
        "parameters": 1024, "activations": 2048, "workspaces": 500, "fragmentation": 9000 - 3572, "other": 77,
    }  # fmt: skip


def test_a_phase_without_a_reading_goes_on_as_the_one_before_ended() -> None:
    found = of(_read((0, 0, 0, 0), (1024, 8192, 1024, 8192), (3072 + 500, 9000, 5120 + 700, 9500)))
    assert row(found, "first", "backward").end == {
        "parameters": 1024, "workspaces": 500, "fragmentation": 9000 - 1524
    }  # fmt: skip
    assert row(found, "first", "backward").peak == row(found, "first", "forward").end


def test_a_reading_tells_a_peak_at_the_end_of_a_phase_from_the_end() -> None:
    script = Script()
    script.phase("optimizer", 0)
    script.hold(1024, "optimizer_state")
    history = script.log()
    history.readings = [AllocatorReading(0, 0, 0, 0, 0), AllocatorReading(1, 1024, 4096, 3000, 4096)]
    optimizer = row(of(history), "first", "optimizer")
    assert optimizer.peak == {"optimizer_state": 1024, "workspaces": 3000 - 1024, "fragmentation": 4096 - 3000}
    assert optimizer.end == {"optimizer_state": 1024, "fragmentation": 4096 - 1024}


@pytest.mark.parametrize(("source", "category"), [("snapshot", "fragmentation"), ("trace", "unknown")])
def test_what_a_file_counts_beyond_its_events_is_no_workspace(source: Source, category: str) -> None:
    found = of(_read((0, 0, 0, 0), (1024, 1024, 1024, 1024), (3072, 5820, 5820, 5820)), source)
    assert row(found, "first", "forward").peak[category] == 700
    assert "workspaces" not in found.peak.amounts


def test_a_reading_of_less_than_the_history_holds_is_doubted() -> None:
    found = of(_read((0, 0, 0, 0), (1024, 8192, 1024, 8192), (3072, 9000, 4096, 4096)))
    level = row(found, "first", "forward").level
    assert (level.allocated, level.reserved) == (5120, 5120)
    assert "workspaces" not in row(found, "first", "forward").peak
    assert found.notes == [
        "in a forward phase the recorded allocations hold 1 KiB more than the allocator counted; the footprint shows "
        "the recorded allocations"
    ]


def test_a_reading_of_hardly_less_is_not_worth_a_word() -> None:
    assert of(_read((0, 0, 0, 0), (1024, 8192, 1024, 8192), (3072, 9000, 5100, 9000))).notes == []


@given(histories(), st.sampled_from((0, 34 * MIB)))
def test_readings_as_the_rules_give_them_lead_to_the_levels_of_the_rules(history: AllocationLog, beyond: int) -> None:
    """Only what was held by the allocator's own side differs, and that is the same everywhere."""
    measured = of(with_readings(history, Rules(), beyond))
    predicted = of(history, "predicted", rules=Rules())
    assert names(measured) == names(predicted)
    for ours, theirs in zip(measured.phases, predicted.phases, strict=True):
        assert ours.level.allocated - theirs.level.allocated == beyond
        assert sum(ours.end.values()) - sum(theirs.end.values()) == beyond
    assert measured.peak.level.allocated - predicted.peak.level.allocated == beyond


# Always


def _made(history: AllocationLog, how: str) -> Footprint:
    if how == "rules":
        return of(history, "predicted", rules=Rules(), other=1000)
    if how == "readings":
        return of(with_readings(history, Rules(), 12_345), "measured", other=1000)
    return of(history, "measured")


@given(histories(), st.sampled_from(("rules", "readings", "neither")))
def test_amounts_sum_to_the_total_everywhere(history: AllocationLog, how: str) -> None:
    found = _made(history, how)
    for one in (*((one.peak, one.level) for one in found.phases), (found.peak.amounts, found.peak.level)):
        amounts, level = one
        assert sum(amounts.values()) == level.total
        assert all(size > 0 for size in amounts.values())
        assert list(amounts) == [name for name in CATEGORIES if name in amounts]
        assert level.requested <= level.allocated <= (level.reserved or level.allocated) <= level.total
    assert (found.peak.level.reserved is None) == (how == "neither")
    drawn = found.timeline
    assert {
        name: series[found.peak.position] for name, series in drawn.amounts.items() if series[found.peak.position]
    } == (found.peak.amounts)
    if drawn.reserved is not None:
        sums = [sum(sizes) for sizes in zip(*drawn.amounts.values(), strict=True)]
        assert [one + 1000 for one in drawn.reserved] == sums


@given(histories())
def test_phases_hold_what_going_through_the_events_one_by_one_holds(history: AllocationLog) -> None:
    found = of(history)
    borders = list(pairwise([*(mark.at for mark in history.marks), history.length]))
    times: dict[tuple[str, str], list[tuple[int, int]]] = {}
    last = max((mark.step for mark in history.marks if mark.step is not None), default=0)
    for mark, border in zip(history.marks, borders, strict=True):
        stage = {last: "steady", 0: "first", None: "setup"}.get(mark.step)
        if stage:
            times.setdefault((stage, mark.phase), []).append(border)
    assert names(found) == list(times)
    for (stage, phase), came_up in times.items():
        states = [_held(history, state) for start, end in came_up for state in range(start, end + 1)]
        assert row(found, stage, phase).peak == max(states, key=lambda state: sum(state.values()))
        assert row(found, stage, phase).end == _held(history, came_up[-1][1])
    whole = [_held(history, state) for state in range(history.length + 1)]
    assert found.peak.amounts == max(whole, key=lambda state: sum(state.values()))


def _held(history: AllocationLog, state: int) -> dict[str, int]:
    """Bytes by category after so many events."""
    amounts: dict[str, int] = {}
    for one in history.allocations:
        if one.size and one.begin < state and (one.end is None or one.end >= state):
            amounts[one.category] = amounts.get(one.category, 0) + one.size
    return amounts


@given(histories(), st.sampled_from(("rules", "neither")))
def test_modules_and_holders_split_the_blocks_that_are_held_at_the_peak(history: AllocationLog, how: str) -> None:
    found = _made(history, how)
    held = {name: size for name, size in found.peak.amounts.items() if name not in ("fragmentation", "other")}
    by_module: dict[str, int] = {}
    for module in found.modules:
        for name, size in module.amounts.items():
            by_module[name] = by_module.get(name, 0) + size
    assert by_module == held
    assert sum(holder.size for holder in found.holders) == sum(held.values())


@given(histories())
def test_what_a_replay_was_asked_for_is_what_is_said_to_have_been_requested(history: AllocationLog) -> None:
    assert of(history, "predicted", rules=Rules()).peak.level.allocated == replay(history, Rules()).allocated.max()
    level = of(history).peak.level
    assert level.requested == level.allocated == replay(history, Rules()).requested.max()


# Modules and holders


def test_modules_come_by_size_and_with_what_they_hold_at_the_peak() -> None:
    found = of(adamw(N, steps=1)).modules
    assert [(one.path, sum(one.amounts.values())) for one in found] == [("layer", 16 * N), ("", 4 * N), ("head", 16)]
    assert found[0].amounts == {"parameters": 4 * N, "gradients": 4 * N, "optimizer_state": 8 * N}


def test_the_smallest_of_very_many_modules_and_holders_are_taken_together() -> None:
    script = Script()
    script.phase("model")
    for number in range(MODULES + 50):
        script.hold(1000 + number, "parameters", module=f"layer.{number}")
    found = of(script.log())
    assert len(found.modules) == MODULES + 1
    assert found.modules[0].path == f"layer.{MODULES + 49}"
    assert found.modules[-1].path == OTHERS
    assert found.modules[-1].amounts == {"parameters": sum(range(1000, 1050))}
    assert len(found.holders) == HOLDERS + 1
    assert (found.holders[-1].category, found.holders[-1].count) == ("", MODULES + 50 - HOLDERS)
    assert sum(holder.size for holder in found.holders) == found.peak.level.total


def test_allocations_that_are_alike_are_one_holder() -> None:
    script = Script()
    script.phase("forward", 0)
    for _ in range(3):
        script.hold(100, "activations", module="a", operator="aten::mm", shape="float32[25]", where="train.py:3")
    script.hold(100, "activations", module="a", operator="aten::mm", shape="float32[5, 5]", where="train.py:3")
    first, second = of(script.log()).holders
    assert (first.shape, first.count, first.size) == ("float32[25]", 3, 300)
    assert (second.shape, second.count, second.size) == ("float32[5, 5]", 1, 100)


# The timeline


def _saw(teeth: int) -> AllocationLog:
    """Each tooth a little higher than the one before it but for the middle one, which is the highest."""
    script = Script()
    script.phase("model")
    script.hold(1000, "parameters")
    for number in range(teeth):
        script.phase("forward", number)
        script.release(script.hold(10 * teeth if number == teeth // 2 else number, "activations"))
    return script.log()


def test_a_short_history_is_drawn_whole() -> None:
    found = of(_saw(3))
    drawn = found.timeline
    assert drawn.reserved is None
    assert drawn.amounts["activations"] == [*[0] * 8, 30, 0, 0, 0, 2, 0, 0]
    assert [(mark.at, mark.phase, mark.step) for mark in drawn.marks] == [
        (0, "model", None), (3, "forward", 0), (7, "forward", 1), (11, "forward", 2),
    ]  # fmt: skip
    assert drawn.amounts["activations"][found.peak.position] == 30


def test_between_readings_the_lesser_is_drawn_and_reserved_grows_as_it_must() -> None:
    drawn = of(_read((0, 0, 0, 0), (1024, 4000, 1024, 4000), (3072 + 500, 9000, 5120 + 700, 9500))).timeline
    model, forward = slice(0, 3), slice(3, 8)
    assert drawn.reserved is not None
    assert drawn.reserved[model] == [0, 4000, 4000]
    assert drawn.amounts["workspaces"][forward] == [500, 500, 700, 500, 500]
    assert drawn.reserved[forward] == [4000, 4000, 9500, 9000, 9000]


def test_a_long_history_is_thinned_out_and_keeps_its_peaks() -> None:
    teeth = 20_000
    found = of(_saw(teeth), "predicted", rules=Rules())
    points = len(found.timeline.amounts["activations"])
    assert POINTS <= points <= POINTS + 2 * len(found.phases) + 4
    assert found.timeline.amounts["activations"][found.peak.position] == max(found.timeline.amounts["activations"])
    assert found.peak.amounts["activations"] == -(-10 * teeth // 512) * 512
    assert sum(size > 0 for size in found.timeline.amounts["activations"]) >= POINTS - 1
    at = [mark.at for mark in found.timeline.marks]
    assert len(at) == teeth + 1
    assert at == sorted(at)
    assert max(at) < points
    assert abs(at[teeth // 2] - found.peak.position) <= 2
    steady = row(found, "steady", "forward").peak["activations"]
    assert steady in found.timeline.amounts["activations"][-3:]


@pytest.mark.parametrize("step", [2600, 2601, 2602])
def test_the_most_that_was_reserved_stays_though_little_was_held(step: int) -> None:
    history = _saw(5000)
    ats = [*(mark.at for mark in history.marks), history.length]
    history.readings = [
        AllocatorReading(at, 1024, 10**6, 1024, 10**9 if place == step + 2 else 10**6) for place, at in enumerate(ats)
    ]
    reserved = of(history).timeline.reserved
    assert reserved is not None
    assert sorted(reserved)[-2:] == [10**6, 10**9]


# What is told besides


def test_notes_and_lost_events_are_handed_on() -> None:
    history = adamw(N)
    history.truncated, history.notes = True, ["from the history"]
    found = of(history, notes=["from the caller"])
    assert (found.truncated, found.late) == (True, False)
    assert found.notes == ["from the history", "from the caller"]
    history.truncated, history.late = False, True
    assert (of(history).truncated, of(history).late) == (False, True)


def test_the_allocator_s_counts_are_its_own_or_the_replay_s_or_the_history_s() -> None:
    history = adamw(N)
    given, freed = len(history.allocations), sum(one.end is not None for one in history.allocations)
    assert of(history).allocator == Counts(given, freed)
    history.counts = Counts(7, 6, 1, 0, largest_free=512)
    assert of(history).allocator == history.counts
    replayed = replay(history, Rules())
    assert of(history, "predicted", rules=Rules()).allocator == replayed.counts
    most = int(replayed.reserved.max())
    for capacity, retries, ooms in ((most, 0, 0), (int(replayed.allocated.max()) // 2, 1, 1)):
        found = of(history, "predicted", rules=Rules(capacity=capacity))
        assert found.allocator == msgspec.structs.replace(replayed.counts, retries=retries, ooms=ooms)
        assert found.peak == of(history, "predicted", rules=Rules()).peak


def test_what_was_there_before_was_not_allocated_in_the_history() -> None:
    there = Allocation(10, begin=0, end=2, category="before")
    history = AllocationLog([there, Allocation(20, begin=1)], [PhaseStart(0, "start")], 3)
    assert of(history).allocator == Counts(1, 1)


def test_a_history_without_allocations_is_refused() -> None:
    with pytest.raises(DataError, match="no allocations were recorded \\(source: snapshot\\)") as error:
        of(AllocationLog([], [PhaseStart(0, "start")], 0), "snapshot")
    assert error.value.hint


def test_what_a_step_leaves_counts_if_it_outlives_the_second_step_after_it() -> None:
    script = Script()
    left: list[Allocation] = []
    for step in range(5):
        script.phase("data", step)
        if step > 1:
            script.release(left.pop(0))  # a batch that is held while the next one is used
        left.append(script.hold(100, "inputs"))
        script.phase("forward", step)
        script.hold(1000 + step, "activations", where="train.py:3")
    found = footprint(script.log(), source="measured", device="cpu", capacity=None)
    assert found.kept == [1001, 1002]
    assert [(one.where, one.size) for one in found.keepers] == [("train.py:3", 2003)]
