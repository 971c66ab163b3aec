"""The decision which updates make a step, from the order of the optimizers alone."""

import random
from collections.abc import Iterable

import pytest

from gpubench.probe import rhythm
from gpubench.probe.rhythm import Rhythm

CRITIC, GENERATOR, ACTOR, ENTROPY = range(4)
TURN = [CRITIC, GENERATOR]
WGAN = [CRITIC] * 5 + [GENERATOR]
LONG = [CRITIC] * 100 + [GENERATOR]


def taken(order: Iterable[int], *, alone: bool = False) -> Rhythm:
    found = Rhythm()
    for optimizer in order:
        found.add(optimizer, alone=alone)
    return found


def ended(order: Iterable[int], *, alone: bool = False) -> Rhythm:
    found = taken(order, alone=alone)
    found.end()
    return found


def sizes(order: Iterable[int], *, alone: bool = False) -> list[int]:
    return list(ended(order, alone=alone).steps)


STYLEGAN = [
    each
    for number in range(160)
    for each in [GENERATOR] * (1 + (number % 4 == 0)) + [CRITIC] * (1 + (number % 16 == 0))
]
"""A GAN with regularisations, which are updates of their own in every fourth and sixteenth iteration."""
DELAYED = [each for number in range(40) for each in [CRITIC] + [ACTOR] * (number % 2) + [ENTROPY] * (number % 4 == 3)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param(TURN * 50, [2] * 50, id="GAN"),
        pytest.param(WGAN * 24, [6] * 24, id="WGAN"),
        pytest.param(LONG * 25, [101] * 25, id="long turns"),
        pytest.param(LONG * 25 + WGAN * 20, [101] * 25 + [6] * 20, id="turns that become short"),
        pytest.param(WGAN * 20 + LONG + WGAN * 20, [6] * 20 + [101] + [6] * 20, id="one long turn"),
        pytest.param([CRITIC, CRITIC, ACTOR] * 40, [3] * 40, id="delayed actor"),
        pytest.param([CRITIC, ACTOR, ENTROPY] * 40, [3] * 40, id="three optimizers"),
        pytest.param(DELAYED, [7] * 10, id="two delays"),
        pytest.param(list(range(300)) * 20, [300] * 20, id="an optimizer for each parameter"),
        pytest.param([CRITIC] * 20 + TURN * 100, [1] * 20 + [2] * 100, id="the second one begins later"),
        pytest.param(
            [CRITIC] * 20 + [CRITIC, CRITIC, GENERATOR] * 100,
            [1] * 20 + [3] * 100,
            id="begins later, in another rhythm",
        ),
        pytest.param([CRITIC] * 1000, [1] * 1000, id="the second one never updates"),
        pytest.param(([CRITIC] * 50 + [GENERATOR] * 50) * 10, [1] * 1000, id="half an epoch each"),
        pytest.param(WGAN * 2, [6] * 2, id="two turns"),
        pytest.param(WGAN, [1] * 6, id="one turn"),
        pytest.param([*TURN * 30, CRITIC], [2] * 30, id="an incomplete turn"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_a_step_is_a_turn_of_all_optimizers(order: list[int], expected: list[int]) -> None:
    assert sizes(order) == expected


def test_steps_hold_every_update_once() -> None:
    for order in (WGAN * 30, STYLEGAN, TURN * 100 + [CRITIC] * 400, random.Random(0).choices(range(5), k=1000)):
        assert sum(sizes(order)) == len(order)


def test_regularisations_belong_to_the_turns_of_their_optimizers() -> None:
    assert ended(STYLEGAN).complete in (160, 161)


def test_an_optimizer_made_later_changes_the_rhythm_from_then_on() -> None:
    found = taken([CRITIC] * 20, alone=True)
    assert found.complete == 20
    for optimizer in [CRITIC, *[GENERATOR, CRITIC] * 100]:
        found.add(optimizer, alone=False)
    assert (found.complete, found.changed, found.uncertain) == (121, 21, False)


def test_a_rhythm_is_found_again_after_a_long_time_without_the_second_optimizer() -> None:
    found = ended([CRITIC] * 2000 + TURN * 100)
    assert abs(found.complete - 2100) <= 1
    assert found.changed in (2000, 2001)


def test_an_optimizer_that_stops_leaves_steps_of_the_other() -> None:
    found = ended(TURN * 100 + [CRITIC] * 400)
    assert (found.complete, found.changed) == (500, 100)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("weights", [[1, 1], [9, 1], [1, 1, 1], [4, 2, 1, 1, 1]], ids=str)
def test_optimizers_chosen_at_random_make_a_step_each(weights: list[int], seed: int) -> None:
    order = random.Random(seed).choices(range(len(weights)), weights, k=2000)
    found = ended(order)
    assert found.uncertain
    assert found.complete > 0.9 * len(order)  # a few turns may come by chance


def test_a_missing_update_changes_no_rhythm() -> None:
    order = [*TURN * 20, CRITIC, *TURN * 20]
    assert ended(order).complete == 40
    layers = [each for step in range(30) for each in range(100) if (step, each) != (20, 50)]
    assert ended(layers).complete == 30


@pytest.mark.parametrize("order", [WGAN * 30, LONG * 12, STYLEGAN, DELAYED, random.Random(1).choices(range(3), k=600)])
def test_a_decision_is_not_taken_back(order: list[int]) -> None:
    found, before = Rhythm(), 0
    for optimizer in order:
        found.add(optimizer, alone=False)
        assert found.complete >= before
        before = found.complete
    assert len(found.steps) == before


def test_one_optimizer_is_certain_early_and_one_of_several_later() -> None:
    assert taken([CRITIC] * rhythm.CERTAIN, alone=True).complete == rhythm.CERTAIN
    assert taken([CRITIC] * (rhythm.LONGEST_RUN - 1)).complete == 0
    assert taken([CRITIC] * rhythm.LONGEST_RUN).complete == rhythm.LONGEST_RUN
    assert taken(WGAN * 3).complete == 3


def test_what_follows_the_last_wanted_step_is_forgotten() -> None:
    found = taken(WGAN * 4 + [CRITIC])
    assert found.keep(2) == 13
    assert list(found.steps) == [6, 6]


def test_one_of_several_optimizers_is_certain_once_the_time_is_over() -> None:
    found = taken([CRITIC] * 12)
    assert (found.complete, found.is_alone) == (0, True)
    found.longest = 14
    found.add(CRITIC, alone=False)
    assert found.complete == 0
    found.add(CRITIC, alone=False)
    assert (found.complete, found.is_alone) == (14, False)


def test_a_second_optimizer_in_time_makes_turns_all_the_same() -> None:
    found = taken(WGAN)
    assert not found.is_alone
    found.longest = 7
    for optimizer in WGAN * 3:
        found.add(optimizer, alone=False)
    found.end()
    assert list(found.steps) == [6] * 4
