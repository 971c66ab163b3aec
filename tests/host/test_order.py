"""The order in which the repeats of several runs are made."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.host import schedule


def recorders() -> list[Any]:
    settings = SimpleNamespace(
        profiling=SimpleNamespace(enabled=False),
        measurement=SimpleNamespace(repeats=2, target_precision=None, max_repeats=2),
    )
    return [SimpleNamespace(settings=settings, name=name) for name in "AB"]


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
    order: Sequence[int], expected: list[tuple[str, list[int]]]
) -> None:
    assert made(order) == expected


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
