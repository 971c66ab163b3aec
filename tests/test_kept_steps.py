import random
import tracemalloc

import msgspec
import pytest

from gpubench.events import Step
from gpubench.runs.steps import KeptSteps

PHASES = ("forward", "backward", "exposed_communication")


def step(number: int) -> Step:
    chance = random.Random(number)
    named = {name: chance.random() for name in PHASES if chance.random() < 0.8}
    loss = chance.choice([None, float("inf"), chance.random()])
    starved = chance.choice([None, False, True])
    return Step(1, 2, number // 7, number, 1e9 + number, 0.1, named, 0.05, 8, loss, starved, number % 5 == 0)


@pytest.fixture
def kept() -> KeptSteps:
    steps = KeptSteps()
    for number in range(50):
        steps.append(step(number))
    return steps


def test_steps_come_back_as_they_were(kept: KeptSteps) -> None:
    given = [step(number) for number in range(50)]
    assert list(kept) == given
    assert [*kept[10:20]] == given[10:20]
    assert (len(kept), kept[0], kept[-1]) == (50, given[0], given[-1])
    with pytest.raises(IndexError):
        kept[50]


def test_columns_are_those_of_the_steps(kept: KeptSteps) -> None:
    assert list(kept.phases) == list(dict.fromkeys(name for one in kept for name in one.phases))
    assert list(kept.totals) == [one.total for one in kept]
    for name in PHASES:
        assert kept.phase(name) == [one.phases.get(name, 0.0) for one in kept]
    assert kept.phase("unheard of") == [0.0] * 50


def test_a_loss_that_is_not_a_number_is_not_the_same_as_none() -> None:
    steps = KeptSteps()
    steps.append(msgspec.structs.replace(step(0), loss=float("nan")))
    assert steps[0].loss != steps[0].loss


def test_steps_without_phases_are_steps() -> None:
    steps = KeptSteps()
    steps.append(msgspec.structs.replace(step(0), phases={}))
    assert [one.phases for one in steps] == [{}]


def test_phases_keep_the_order_of_the_step() -> None:
    names = [f"phase {number}" for number in range(20)]
    steps = KeptSteps()
    steps.append(msgspec.structs.replace(step(0), phases=dict.fromkeys(names, 0.1)))
    assert list(steps.phases) == names
    assert list(steps[0].phases) == names


def test_a_step_takes_little_over_a_hundred_bytes_a_fifth_of_its_record() -> None:
    columns, records = held(KeptSteps()), held([])
    assert columns < 1.3e6
    assert columns < records / 4


def held(steps: "KeptSteps | list[Step]") -> int:
    """Bytes of ten thousand steps of three phases."""
    tracemalloc.start()
    try:
        for number in range(10_000):
            steps.append(step(number))
        assert len(steps) == 10_000
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
