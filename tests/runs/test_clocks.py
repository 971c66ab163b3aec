"""What exchanges with a host tell about the clock of a program: nothing false, however late anything is."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import step

from gpubench.events import StepsMeasured
from gpubench.runs import clocks
from gpubench.runs.clocks import DRIFT, NARROW, SLACK, ClockRates, Exchanges

RATES = [1 / 10, 1 / 2, 1 / 1.5, 1.5, 2.0, 10.0]
"""The seconds of the host's clock in a second of a false one."""


@dataclass(frozen=True)
class Turn:
    """A step of a program, and what follows it. All times are true ones, in seconds."""

    takes: float
    """The time until the CPU has issued the step."""
    computes: float = 0.0
    """The time in which the device computes it, after all before it."""
    reports: bool = True
    """Whether a report is due after it."""
    read_after: float = 0.0
    """How much later the host reads the report than it is sent."""
    sent_after: float = 0.0
    """How much later the host sends a token."""
    heard_after: float = 0.0
    """How much later the token arrives."""


def exchanged(turns: Sequence[Turn], clock: Callable[[float], float]) -> Exchanges:
    """What a host makes of a program whose device tells the time by `clock`."""
    found = Exchanges()
    now = free = 0.0
    device: list[float] = []
    before = 0.0
    tokens: list[tuple[float, float]] = []
    """When each was sent, and when it has arrived."""
    named: dict[int, int] = {}
    """The token by the first step that ends after it was heard."""
    read = heard = -1
    sent_steps = 0
    for number, turn in enumerate(turns):
        now += turn.takes
        free = max(now, free) + turn.computes
        device.append(free)
        if not turn.reports:
            continue
        ready = sum(end <= now for end in device)
        steps = []
        for place in range(sent_steps, ready):
            end = clock(device[place])
            steps.append(step(place, total=end - before))
            before = end
        token = max((place for place in named if sent_steps <= place < ready), default=None)
        if steps:
            read_at = max([now + turn.read_after, *(sent for sent, _ in tokens[-1:])])
            report = StepsMeasured(
                rank=0,
                steps=steps,
                token=None if token is None else (token, named[token]),
                sent=None if token is None else tokens[named[token]][0],
                read=read_at,
            )
            found.add(report)
            sent_at = read_at + turn.sent_after
            tokens.append((sent_at, sent_at + turn.heard_after))
        sent_steps = ready
        heard = max((place for place, (_, arrives) in enumerate(tokens) if arrives <= now), default=-1)
        if heard > read:
            named[number + 1] = read = heard
    return found


@st.composite
def programs(draw: st.DrawFn) -> list[Turn]:
    """Steps with delays, half of which are none. Most others have one size in all steps, up to far more than a step."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    sizes = [draw(st.sampled_from([0.0, 0.001, 0.1, 1.0, 5.0])) for _ in range(4)]
    usual, rare = draw(st.sampled_from([0.001, 0.1, 2.0])), draw(st.sampled_from([0.0, 0.1]))

    def some(size: float) -> float:
        return chance.choice([0.0, chance.uniform(0.0, 5.0 if chance.random() < rare else size)])

    return [
        Turn(0.001 + some(usual), some(sizes[0]), chance.random() < 0.7, *map(some, sizes[1:]))
        for _ in range(draw(st.integers(0, 40)))
    ]


def off(rate: float) -> Callable[[float], float]:
    """A clock of which one second takes `rate` true seconds."""
    return lambda at: at / rate


def quiet(seconds: float) -> list[Turn]:
    """Steps of 5 ms on a machine that does nothing else: each of the first ten is reported, and then one in forty."""
    delays = random.Random(0)
    late = [[delays.uniform(0.0, 0.002) for _ in range(3)] for _ in range(round(seconds / 0.005))]
    return [Turn(0.005, 0.0, number < 10 or number % 40 == 0, *each) for number, each in enumerate(late)]


@given(programs())
@settings(deadline=None, max_examples=300)
def test_a_true_clock_is_within_its_bounds_however_late_anything_is(turns: list[Turn]) -> None:
    found = exchanged(turns, off(1.0)).rates()
    if found:
        assert found.low <= 1.0 + 1e-9
        assert found.high >= 1.0 - 1e-9
        assert found.agree is not False


@given(programs(), st.floats(0.995, 1.005), st.floats(0.995, 1.005))
@settings(deadline=None, max_examples=300)
def test_a_clock_that_drifts_as_clocks_of_devices_do_is_not_accused(
    turns: list[Turn], first: float, then: float
) -> None:
    middle = sum(turn.takes for turn in turns) / 2
    found = exchanged(turns, lambda at: min(at, middle) / first + max(0.0, at - middle) / then).rates()
    assert found is None or found.agree is not False


@given(programs(), st.sampled_from(RATES) | st.floats(1.12, 1.6) | st.floats(0.6, 0.88))
@settings(deadline=None, max_examples=300)
def test_a_false_clock_is_never_called_the_same_however_late_anything_is(turns: list[Turn], rate: float) -> None:
    found = exchanged(turns, off(rate)).rates()
    if found:
        assert found.low <= rate * (1 + 1e-9)
        assert found.high >= rate * (1 - 1e-9)
        assert found.agree is not True


@pytest.mark.parametrize("rate", RATES)
def test_a_false_clock_is_found_on_a_quiet_machine(rate: float) -> None:
    found = exchanged(quiet(2.0), off(rate)).rates()
    assert found
    assert found.agree is False
    assert 0.85 * rate < found.low <= rate, "a token is read in the flush after that to which it answers"
    assert rate <= found.high < 1.02 * rate
    assert found.seconds == pytest.approx(2.0 / rate, rel=0.25)


def test_a_true_clock_is_found_to_agree_on_a_quiet_machine() -> None:
    found = exchanged(quiet(3.0), off(1.0)).rates()
    assert found
    assert found.agree is True


@pytest.mark.parametrize("stopped", [1.0, 100.0])
@pytest.mark.parametrize("who", ["read_after", "sent_after", "heard_after", "takes"])
def test_whatever_stops_for_a_while_a_true_clock_agrees_after_it(who: str, stopped: float) -> None:
    turns = quiet(6.0)
    place = next(place for place, turn in enumerate(turns) if turn.reports and place > 400)
    turns[place] = Turn(**vars(turns[place]) | {who: stopped})
    found = exchanged(turns, off(1.0)).rates()
    assert found
    assert found.agree is True


def jumps(at: float) -> float:
    return at if at < 1.5 else at + 1.0


def goes_back(at: float) -> float:
    """It stands still for a second, as a step of no time is none."""
    return min(at, 1.5) + 1e-6 * at if at < 2.5 else at - 1.0 + 1e-6 * at


def is_wrong_for_a_second(at: float) -> float:
    return at + 0.5 * min(max(0.0, at - 1.0), 1.0)


@pytest.mark.parametrize("clock", [jumps, goes_back, is_wrong_for_a_second])
def test_a_clock_that_is_wrong_only_in_a_part_of_the_repeat_is_found(clock: Callable[[float], float]) -> None:
    found = exchanged(quiet(4.0), clock).rates()
    assert found
    assert found.agree is False


def test_a_machine_that_is_so_busy_that_all_is_a_second_late_tells_nothing_in_two_seconds() -> None:
    turns = [Turn(0.005, 0.0, number % 40 == 0, 0.5, 0.5, 0.5) for number in range(400)]
    for rate in (1.0, 1.5):
        found = exchanged(turns, off(rate)).rates()
        assert found is None or found.agree is None


@given(st.data())
@settings(deadline=None)
def test_the_bounds_are_those_of_all_pairs(data: st.DataObject) -> None:
    places = st.lists(st.integers(0, 50), min_size=1, max_size=15, unique=True).map(sorted)
    numbers = st.floats(-100, 100)
    points, later = (np.array([(x, data.draw(numbers)) for x in data.draw(places)], float) for _ in range(2))
    pairs = ((one, other) for one, other in itertools.product(points, later) if other[0] > one[0])
    slopes = [(other[1] - one[1]) / (other[0] - one[0]) for one, other in pairs]
    found = clocks._steepest(points, later)
    assert (found is None) == (not slopes)
    if found is not None:
        assert found == pytest.approx(max(slopes), abs=1e-9)


def test_the_bounds_of_a_long_repeat_take_few_passes_over_it() -> None:
    found = exchanged([Turn(0.2, 0.0, True, 0.01, 0.0, 0.001)] * 3000, off(1.0)).rates()
    assert found
    assert found.agree is True
    assert found.high - found.low < 2e-3


# What is taken up of a report.


def report(first: int, count: int, read: float | None, **fields: object) -> StepsMeasured:
    steps = [step(first + number, total=0.1) for number in range(count)]
    return StepsMeasured(rank=0, steps=steps, read=read, **fields)  # type: ignore[arg-type]


def of(*reports: StepsMeasured) -> ClockRates | None:
    found = Exchanges()
    for one in reports:
        found.add(one)
    return found.rates()


def test_reports_without_times_tell_nothing() -> None:
    assert of() is None
    assert of(report(0, 10, None), report(10, 10, None)) is None
    assert of(report(0, 10, 1.0), report(10, 10, 2.0)) is None


def test_the_end_of_a_step_is_bounded_by_the_token_that_it_names_and_by_the_reading_of_its_report() -> None:
    found = of(report(0, 10, 51.0), report(10, 10, 52.0, token=(12, 1), sent=51.1))
    assert found
    assert found.low == pytest.approx((51.1 - 51.0 - 2 * SLACK) / 0.3)
    assert found.high == pytest.approx((52.0 - 51.1 + 2 * SLACK) / 0.7)
    assert found.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("token", [(9, 1), (20, 1), (2**31 - 1, 1)])
def test_a_token_for_a_step_that_the_report_has_not_is_ignored(token: tuple[int, int]) -> None:
    assert of(report(0, 10, 51.0), report(10, 10, 52.0, token=token, sent=51.1)) is None


def test_another_timeline_begins_anew() -> None:
    reports = [report(0, 10, 51.0), report(10, 10, 62.0, token=(12, 1), sent=51.1, anew=True)]
    assert of(*reports) is None
    found = of(*reports, report(20, 10, 63.0, token=(20, 2), sent=62.0))
    assert found
    assert found.agree is None
    assert found.seconds == pytest.approx(1.0)


# What follows from the bounds.

SAME, FAST, SLOW = ClockRates(0.98, 1.03, 9.0), ClockRates(0.66, 0.67, 9.0), ClockRates(1.5, 1.52, 9.0)
WIDE = ClockRates(0.0, 9.0, 1.0)
UNEVEN = ClockRates(1.4, 1.1, 9.0)


@pytest.mark.parametrize(
    ("found", "agree"),
    [
        (SAME, True), (FAST, False), (SLOW, False), (WIDE, None), (UNEVEN, False),
        (ClockRates(1 - 0.49 * NARROW, 1 + 0.49 * NARROW, 1.0), True),
        (ClockRates(0.9, 1.01, 1.0), None),
        (ClockRates(1.0 + DRIFT, 1.05, 1.0), True),
        (ClockRates(1.0 + 2 * DRIFT, 99.0, 1.0), False),
        (ClockRates(1.0 + DRIFT, 1.0 - DRIFT, 1.0), True),
    ],
)  # fmt: skip
def test_clocks_differ_only_if_the_bounds_exclude_that_they_agree(found: ClockRates, agree: bool | None) -> None:
    assert found.agree is agree


@pytest.mark.parametrize(
    ("found", "different"),
    [
        ([], None), ([None], None), ([SAME, SAME], False), ([SAME, None], None), ([SAME, WIDE], None),
        ([None, WIDE, SLOW], True), ([SAME, FAST], True),
    ],
)  # fmt: skip
def test_one_repeat_accuses_a_program_and_all_of_them_acquit_it(
    found: list[ClockRates | None], different: bool | None
) -> None:
    assert clocks.differ(found) is different
    assert bool(clocks.contradiction(found)) is bool(different)


def test_of_several_ranks_the_least_certain_one_counts() -> None:
    for ranks in permuted((SAME, ClockRates(0.99, 1.0, 9.0))):
        assert clocks.worst(ranks) is SAME
    for ranks in permuted((SAME, WIDE)):
        assert clocks.worst(ranks) is WIDE
    for ranks in permuted((SAME, WIDE, SLOW)):
        assert clocks.worst(ranks) is SLOW
    assert clocks.worst([]) is None


def permuted(ranks: Iterable[ClockRates]) -> Iterable[Sequence[ClockRates]]:
    return itertools.permutations(ranks)


def test_a_contradiction_is_said_with_its_figures_for_the_repeat_that_shows_it_best() -> None:
    assert clocks.contradiction([SAME, SLOW, FAST]) == "one second of its clock took 1.50 to 1.52 s by the host's clock"
    assert clocks.contradiction([FAST]) == "one second of its clock took 660 to 670 ms by the host's clock"
    took = "at least 1.40 s by the host's clock in one part of a repeat, and at most 1.10 s in another"
    assert clocks.contradiction([UNEVEN]) == f"one second of its clock took {took}"
