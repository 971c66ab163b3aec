"""Which rounds a judgement makes, with repeats that are made up."""

import math
import os
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpubench import judge, temporary
from gpubench.compare.decision import Needed, Observed
from gpubench.errors import UsageError
from gpubench.host.order import drawn
from gpubench.judge import BESIDE, Before, Judging, Terms, announced

NOISE = (1.0, 1.001, 0.999, 1.0005, 0.9995)


class Clock:
    """A clock that only the repeats advance."""

    now = 0.0

    @staticmethod
    def monotonic() -> float:
        return Clock.now


class MadeUp:
    """A recorder whose repeats have planned results; None is one that fails."""

    variant = "one"
    is_spread = False
    elsewhere = None
    order_seed: int | None = None

    def __init__(self, values: Sequence[float | None], name: str = "throughput", seconds: float = 0.0) -> None:
        """`seconds` is the time that a repeat takes."""
        self.values, self.name, self.made, self.seconds = values, name, 0, seconds
        self.round = ""
        self.writer = SimpleNamespace(update=lambda **changes: None)

    @property
    def has_failed(self) -> bool:
        return None in self.values[: self.made]

    def run(self) -> None:
        Clock.now += self.seconds
        self.made += 1

    def sum_up(self) -> Any:
        repeats = [value for value in self.values[: self.made] if value is not None]
        return SimpleNamespace(metrics=[SimpleNamespace(name=self.name, repeats=repeats)] if repeats else [])


def noisy(value: float, number: int = 40) -> list[float]:
    return [value * NOISE[place % len(NOISE)] for place in range(number)]


def values_of(judging: Judging, recorders: Sequence[MadeUp]) -> list[tuple[Any, ...]]:
    return [*judging.before.values, *zip(*(each.values[: each.made] for each in recorders), strict=True)]


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Observed]:
    """What is found about both versions, which a test may change."""
    said = {"observed": Observed(work="same", loss="unharmed")}
    monkeypatch.setattr(judge, "time", Clock)
    monkeypatch.setattr(Judging, "_sides", lambda self, recorders: ("base", "edited"))
    monkeypatch.setattr(Judging, "_values", values_of)
    monkeypatch.setattr(judge, "compare", lambda sides, **how: SimpleNamespace(comparisons=[None]))
    monkeypatch.setattr(judge, "observed_of", lambda comparison, side: said["observed"])
    return said


def made(judging: Judging, base: MadeUp, edited: MadeUp) -> tuple[list[int], list[str]]:
    """Returns the numbers of the recorders in the order of their repeats, and the lines of the progress."""
    order, said, recorders = [], list[str](), (base, edited)
    for place in judging.rounds(recorders, said.append):  # type: ignore[arg-type]  # they are made up
        order.append(place)
        recorders[place].run()
    return order, said


def test_a_clear_gain_takes_three_rounds_of_which_the_first_begins_with_the_base() -> None:
    judging, base = Judging(Terms()), MadeUp(noisy(10))
    order, said = made(judging, base, MadeUp(noisy(12)))
    assert order[:2] == [0, 1]
    assert order == [place for one in drawn(2, base.order_seed or 0)[:3] for place in one]
    assert judging.ending == "decided"
    assert judging.look.exceeds(0.005)
    assert said[-1].startswith("judge: round 3 of at most 30: gain +20.0 % [")


@pytest.mark.parametrize("period", [3, 4, 8])
def test_a_machine_that_is_slow_now_and_then_favours_neither_of_two_equal_versions(
    monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """Every so manieth repeat is 20 % slower. In the order A B B A, that is always the same version in some periods."""
    rng, seeds = np.random.default_rng(period), Random(period)
    monkeypatch.setattr("gpubench.host.order.SystemRandom", lambda: seeds)
    ended = [rhythm(rng, period) for _ in range(40)]
    assert ended.count("decided") <= 40 * 0.05 + 3 * math.sqrt(40 * 0.05 * 0.95)


def rhythm(rng: np.random.Generator, period: int) -> str:
    """Returns how a judgement ends whose machine is slow in one of so many repeats."""
    judging, begins = Judging(Terms(margin=0)), int(rng.integers(period))
    base, edited = MadeUp([]), MadeUp([])
    for number, place in enumerate(judging.rounds((base, edited), lambda line: None)):  # type: ignore[arg-type]
        slow = 1.2 if (number + begins) % period == 0 else 1.0
        recorder = (base, edited)[place]
        recorder.values = [*recorder.values, 10 / slow * math.exp(0.005 * rng.standard_normal())]
        recorder.run()
    return judging.ending


def test_the_first_round_says_that_the_work_is_the_same_and_what_it_will_take() -> None:
    judging = Judging(Terms(budget=1200))
    _, said = made(judging, MadeUp(noisy(10), seconds=60), MadeUp(noisy(12), seconds=60))
    assert said[0].startswith("judge: round 1 of at most 30: gain +20.0 %")
    assert said[1] == (
        "judge: the same work; the losses agree so far; a round takes 2 min, and at least 2 more are needed, which is "
        "4 min, with 18 min left of the budget of 20 min"
    )
    assert [line[:14] for line in said[2:]] == ["judge: round 2", "judge: round 3"]


def test_a_budget_without_time_for_three_rounds_is_spent_on_one() -> None:
    judging = Judging(Terms(budget=600))
    order, _ = made(judging, MadeUp(noisy(10), seconds=150), MadeUp(noisy(12), seconds=150))
    assert (len(order), judging.ending) == (2, "budget")
    assert judging.doubt == (
        "a round takes 5 min, and at least 2 more are needed, which is 10 min, with 5 min left of the budget of 10 min"
    )
    assert judging.needed == Needed(3, 600.0)


def test_a_machine_that_is_too_busy_for_the_budget_is_said_after_three_rounds() -> None:
    base, edited = noisy(10), [10.2, 11.4, 10.3] * 10
    judging = Judging(Terms(budget=1210))
    order, said = made(judging, MadeUp(base, seconds=120), MadeUp(edited, seconds=120))
    assert (len(order), judging.ending) == (6, "budget")
    needed = judging.needed
    assert needed
    assert needed.rounds > 5
    assert needed.seconds == pytest.approx(240 * (needed.rounds - 3))
    assert judging.doubt.startswith(f"a round takes 4 min, and about {needed.rounds - 3} more are needed, which is ")
    assert judging.doubt.endswith("with 8 min left of the budget of 20 min")
    assert said[-1].endswith(judging.doubt)
    unlimited = Judging(Terms())
    assert len(made(unlimited, MadeUp(base, seconds=120), MadeUp(edited, seconds=120))[0]) > 6


def test_a_resumed_judgement_makes_a_round_even_if_it_was_hopeless() -> None:
    values = [(10.0, 11.0), (11.0, 9.0), (9.0, 11.0), (10.5, 9.0), (9.5, 11.0), (10.0, 8.0)] * 3
    before = Before([("a", "b")], values, 60.0, "throughput", "then")
    judging = Judging(Terms(), before)
    assert judging.look.is_hopeless(0.005)
    order, _ = made(judging, MadeUp([10] * 9), MadeUp([10] * 9))
    assert (len(order), judging.ending) == (2, "hopeless")


def test_what_is_hopeless_ends_early() -> None:
    judging = Judging(Terms(margin=0))
    values = [10.0, 11.0, 9.0, 10.5, 9.5, 10.0]
    order, _ = made(judging, MadeUp(values * 5), MadeUp(values[::-1] * 5))
    assert judging.ending == "hopeless"
    assert 6 < len(order) < 50
    assert judging.doubt.endswith("rounds a gain above the margin is hardly to be proved in 30")


def test_equal_versions_are_run_to_the_last_round() -> None:
    judging = Judging(Terms(margin=0, most=3))
    order, _ = made(judging, MadeUp(noisy(10)), MadeUp(noisy(10)[::-1]))
    assert (len(order), judging.ending) == (6, "rounds")
    assert judging.doubt == "3 rounds do not tell"


def test_a_time_is_better_if_it_is_smaller() -> None:
    judging = Judging(Terms(aim="latency"))
    made(judging, MadeUp(noisy(10), "step_time"), MadeUp(noisy(8), "step_time"))
    assert judging.look.gain == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_it_at_once(failing: int) -> None:
    values: list[list[float | None]] = [list(noisy(10)), list(noisy(12))]
    values[failing][1] = None
    judging = Judging(Terms())
    order, _ = made(judging, MadeUp(values[0]), MadeUp(values[1]))
    assert judging.ending == "failed"
    assert order[-1] == failing
    assert len(judging.values) == 1


def test_refused_work_ends_it_after_the_first_round(found: dict[str, Observed]) -> None:
    found["observed"] = Observed(work="less", refusals=["does less work"])
    judging = Judging(Terms())
    order, _ = made(judging, MadeUp(noisy(10)), MadeUp([10, 12] * 20))
    assert (len(order), judging.ending) == (2, "decided")


def test_a_harmed_loss_alone_ends_it_after_three_rounds(found: dict[str, Observed]) -> None:
    found["observed"] = Observed(work="same", loss="harmed", refusals=["harms the loss"])
    judging = Judging(Terms())
    order, _ = made(judging, MadeUp(noisy(10)), MadeUp([10, 12] * 20))
    assert (len(order), judging.ending) == (6, "decided")


def test_an_unclear_loss_is_measured_on(found: dict[str, Observed]) -> None:
    found["observed"] = Observed(work="same", loss="unclear")
    judging = Judging(Terms(most=6))
    order, _ = made(judging, MadeUp(noisy(10)), MadeUp(noisy(12)))
    assert (len(order), judging.ending) == (12, "rounds")


def test_a_budget_begins_no_round_that_it_has_no_time_for(found: dict[str, Observed]) -> None:
    found["observed"] = Observed(work="same", loss="unclear")
    judging = Judging(Terms(budget=100))
    order, _ = made(judging, MadeUp(noisy(10), seconds=10), MadeUp(noisy(12), seconds=9))
    assert judging.ending == "budget"
    assert len(order) == 10
    assert judging.doubt == "the budget of 100 s sufficed for 5 rounds"


def test_what_is_not_measured_here_is_refused_after_the_first_round() -> None:
    with pytest.raises(UsageError, match="energy_per_sample"):
        made(Judging(Terms(aim="energy")), MadeUp(noisy(10)), MadeUp(noisy(12)))


def test_a_version_that_does_not_measure_what_the_base_does_ends_it_and_is_named() -> None:
    judging = Judging(Terms())
    order, _ = made(judging, MadeUp(noisy(10)), MadeUp(noisy(12), "step_time"))
    assert (len(order), judging.ending, judging.lacking) == (2, "failed", "it has no throughput in round 1")


def test_a_program_on_several_machines_is_refused_after_the_first_repeat() -> None:
    spread = MadeUp(noisy(10))
    spread.is_spread = True
    with pytest.raises(UsageError, match="on one machine"):
        made(Judging(Terms()), spread, MadeUp(noisy(12)))
    assert spread.made == 1


def test_a_resumed_judgement_counts_the_rounds_of_before() -> None:
    before = Before([("a", "b")], list(zip(noisy(10, 2), noisy(12, 2), strict=True)), 60.0, "throughput", "then")
    judging = Judging(Terms(), before)
    edited = MadeUp(noisy(12), seconds=1)
    order, _ = made(judging, MadeUp(noisy(10)), edited)
    assert (len(order), judging.look.rounds) == (2, 3)
    assert edited.round == "round 3 of at most 30"
    assert judging.seconds == 61


def test_a_limit_of_memory_ends_it_at_once() -> None:
    class Large(MadeUp):
        def sum_up(self) -> Any:
            found = super().sum_up()
            return SimpleNamespace(metrics=[*found.metrics, SimpleNamespace(name="peak_memory_rss", repeats=[3e9])])

    judging = Judging(Terms(max_memory=2e9))
    order, _ = made(judging, MadeUp(noisy(10)), Large(noisy(12)))
    assert (len(order), judging.ending) == (2, "decided")


def test_two_judgements_at_once_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MARK", f"judges-{os.getpid()}")  # those that run beside this test do not count
    with announced() as first:
        assert not first()
        with announced() as second:
            assert first()
            assert second()
            judging = Judging(Terms(), others=first)
            made(judging, MadeUp(noisy(10)), MadeUp(noisy(12)))
            assert list(judging.warnings) == [BESIDE]
        assert not first()
    assert not temporary.marked(judge.MARK)
