"""The order in which the repeats of several runs are made."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubench.host import order as orders
from gpubench.host import schedule


class Made:
    """A recorder that runs nothing, and has what was recorded of it."""

    is_spread = False
    elsewhere = None
    order_seed: int | None = None

    def __init__(self, name: str, settings: Any) -> None:
        self.name, self.settings = name, settings
        self.recorded: dict[str, Any] = {}
        self.writer = SimpleNamespace(update=lambda **changes: self.recorded.update(changes))


def recorders() -> list[Any]:
    settings = SimpleNamespace(
        profiling=SimpleNamespace(enabled=False),
        measurement=SimpleNamespace(repeats=2, target_precision=None, max_repeats=2),
    )
    return [Made(name, settings) for name in "AB"]


def made(order: schedule.Order) -> list[tuple[str, list[int]]]:
    known: Iterator[tuple[Any, list[int], Any]] = schedule.schedule(recorders(), (), order)
    return [(recorder.name, repeats) for recorder, repeats, _ in known]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ((), [("A", [0]), ("B", [0]), ("B", [1]), ("A", [1])]),
        ((1, 1, 0), [("B", [0]), ("B", [1]), ("A", [0])]),
    ],
)
def test_repeats_are_interleaved_or_in_the_order_that_is_given(
    monkeypatch: pytest.MonkeyPatch, order: Sequence[int], expected: list[tuple[str, list[int]]]
) -> None:
    monkeypatch.setattr(orders, "SystemRandom", lambda: Random(1))
    assert made(order) == expected


def test_the_order_is_drawn_for_each_run_and_its_seed_is_recorded() -> None:
    drawn = []
    for _ in range(20):
        known = recorders()
        rounds = [list(one) for one in islice(orders.rounds(known), orders.ROUNDS + 1)]
        (seed,) = {each.order_seed for each in known}
        assert [each.recorded for each in known] == [{"order_seed": seed}] * 2
        assert rounds[:-1] == orders.drawn(2, seed)
        assert rounds[0] == rounds[-1] == [0, 1]
        assert all(sorted(one) == [0, 1] for one in rounds)
        drawn.append(rounds)
    assert all(drawn.count(one) == 1 for one in drawn)


def test_all_machines_of_a_program_have_the_same_order() -> None:
    """One of them has ranks on others, and the other ones have no rank 0, which the first repeat shows."""
    here, there = recorders(), recorders()
    rounds = [orders.rounds(here), orders.rounds(there)]
    assert [list(next(one)) for one in rounds] == [[0, 1]] * 2
    here[0].is_spread, there[0].elsewhere = True, "machine-0"
    assert [list(islice(one, 10)) for one in rounds] == [orders.drawn(2, orders.SHARED)[1:11]] * 2
    assert here[1].recorded == there[1].recorded == {"order_seed": orders.SHARED}


@pytest.mark.parametrize("variants", [2, 3, 5])
def test_no_rhythm_of_the_machine_favours_one_variant(variants: int) -> None:
    """Where one of so many repeats is slow, Student's t of the rounds is as small as if these were random."""
    for seed in range(20):
        places = np.argsort(orders.drawn(variants, seed), axis=1) + variants * np.arange(orders.ROUNDS)[:, None]
        for period in range(2, 4 * variants + 1):
            for phase in range(period):
                slow = places % period == phase
                gains = slow[:, :1].astype(int) - slow[:, 1:]
                spread = np.maximum(gains.std(axis=0, ddof=1), 1e-9)
                assert np.all(np.abs(gains.mean(axis=0)) / spread * math.sqrt(orders.ROUNDS) < 3.5), (seed, period)


def test_an_order_may_be_chosen_on_the_way() -> None:
    """The next number is asked for once the repeat before it has ended."""
    seen = []

    def order(known: Sequence[Any]) -> Iterator[int]:
        for number in (1, 0, 1):
            seen.append(len(done))
            yield number
        seen.append(len(known))

    done: list[str] = []
    known: Iterator[tuple[Any, list[int], Any]] = schedule.schedule(recorders(), (), order)
    for recorder, _, _ in known:
        done.append(recorder.name)
    assert done == ["B", "A", "B"]
    assert seen == [0, 1, 2, 2]
