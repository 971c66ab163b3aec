"""The steps that a run collects while it goes on."""

import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from gpubench.events import Step
from gpubench.runs.steps import WAITING, GrowingSteps, StepTable

PHASES = ("forward", "backward", "exposed_communication")
FIELDS = ("repeat", "rank", "step", "time", "total", "samples", "skipped")


def step(number: int) -> Step:
    chance = random.Random(number)
    named = {name: chance.random() for name in PHASES if chance.random() < 0.8}
    loss, not_finite = chance.choice([(None, False), (None, True), (chance.random(), False)])
    starved = chance.choice([None, False, True])
    return Step(
        1, 2, number // 7, number, 1e9 + number, 0.1, named, 0.05, 8, loss, starved, number % 5 == 0, not_finite
    )


def collected(*steps: Step) -> GrowingSteps:
    growing = GrowingSteps()
    for one in steps:
        growing.append(one)
    return growing


def known(column: np.ndarray) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


@pytest.mark.parametrize("count", [0, 1, 50, WAITING, 3 * WAITING + 1])
def test_columns_are_those_of_the_steps(count: int) -> None:
    given = [step(number) for number in range(count)]
    growing = collected(*given)
    table = growing.table()
    assert len(growing) == len(table) == count
    for name in FIELDS:
        assert getattr(table, name).tolist() == [getattr(one, name) for one in given]
    assert known(table.loss) == [float("inf") if one.not_finite else one.loss for one in given]
    assert known(table.starved) == [one.starved for one in given]
    assert list(table.phases) == list(dict.fromkeys(name for one in given for name in one.phases))
    for name in PHASES:
        assert table.phase(name).tolist() == [one.phases.get(name, 0.0) for one in given]
    assert table.phase("unheard of").tolist() == [0.0] * count


@pytest.mark.parametrize("at", ["_reserve", "_write"])
def test_an_interruption_loses_no_step(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    growing, real = collected(*map(step, range(WAITING - 1))), getattr(GrowingSteps, at)

    def interrupted(*arguments: object) -> None:
        monkeypatch.setattr(GrowingSteps, at, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingSteps, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        growing.append(step(WAITING - 1))
    growing.append(step(WAITING))
    assert growing.table().step.tolist() == list(range(WAITING + 1))


def test_a_table_holds_the_steps_so_far() -> None:
    growing = collected(*map(step, range(10)))
    before = growing.table()
    for number in range(10, 1000):
        growing.append(step(number))
    assert before.step.tolist() == list(range(10))
    assert growing.table().step.tolist() == list(range(1000))


def test_a_slice_is_a_table_of_its_rows() -> None:
    given = [step(number) for number in range(50)]
    part: StepTable = collected(*given).table()[10:20]
    assert part.time.tolist() == [one.time for one in given[10:20]]
    assert part.wall == sum(one.total for one in given[10:20])
    assert part.counted_samples.tolist() == [0 if one.skipped else one.samples for one in given[10:20]]
    assert part.phase("forward").tolist() == [one.phases.get("forward", 0.0) for one in given[10:20]]


def test_steps_without_phases_are_steps() -> None:
    table = collected(msgspec.structs.replace(step(0), phases={})).table()
    assert (len(table), table.phases) == (1, {})


def test_phases_keep_the_order_of_the_step() -> None:
    names = [f"phase {number}" for number in range(20)]
    assert list(collected(msgspec.structs.replace(step(0), phases=dict.fromkeys(names, 0.1))).table().phases) == names


def test_ten_thousand_steps_take_a_quarter_of_the_memory_of_their_records() -> None:
    columns, records = held(GrowingSteps()), held([])
    assert columns < 1.5e6
    assert columns < records / 4


def held(steps: "GrowingSteps | list[Step]") -> int:
    """Bytes of ten thousand steps of three phases."""
    tracemalloc.start()
    try:
        for number in range(10_000):
            steps.append(step(number))
        assert len(steps) == 10_000
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
