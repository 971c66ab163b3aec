"""Change points on simulated series: how many are found, placed well, false, or put down to the machine."""

import math

import numpy as np
import pytest
from drifting import DISTURBANCES, Disturbance, Made, false_when_disturbed, made, rates

from gpubench.compare.changepoints import FEWEST, MOST, ChangePoint, find

COUNTS = [20, pytest.param(200, marks=pytest.mark.stress)]


def of_code(one: Made, *, reference: bool = True) -> list[int]:
    return [point.index for point in search(one, reference=reference) if point.cause == "code"]


def search(one: Made, *, reference: bool = True) -> list[ChangePoint]:
    known = one.reference if reference else None
    return find(one.values, days=one.days, errors=one.errors, reference=known)


def slack(share: float, count: int) -> float:
    """Three standard errors of a share of a few series, beyond those of 200, which have to hold the bar itself."""
    return 3 * math.sqrt(share * (1 - share)) * (1 / math.sqrt(count) - 1 / math.sqrt(200))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("reference", [True, False], ids=["with a reference", "without"])
def test_a_step_of_3_percent_is_found_within_two_runs_and_little_else(count: int, reference: bool) -> None:
    found = rates(lambda one: of_code(one, reference=reference), count, 0.005)
    assert found.found >= 0.95 - slack(0.05, count)
    assert max(found.false, found.false_in_drift) <= 0.05 + slack(0.05, count)
    assert found.elsewhere <= 0.08 + slack(0.08, count)


@pytest.mark.stress
def test_more_noise_makes_fewer_steps_visible_and_no_more_false_ones() -> None:
    for noise, least in ((0.0075, 0.90), (0.01, 0.75)):
        found = rates(of_code, 200, noise)
        assert found.found >= least
        assert max(found.false, found.false_in_drift) <= 0.05


@pytest.mark.parametrize("count", COUNTS)
def test_a_step_that_the_reference_workload_shows_too_is_that_of_the_machine(count: int) -> None:
    series = [made(np.random.default_rng([5, number]), noise=(0.005,) * 2, of_machine=True) for number in range(count)]
    points = [search(one) for one in series]
    assert np.mean([any(one.cause == "machine" for one in each) for each in points]) >= 0.9
    assert np.mean([any(one.cause == "code" for one in each) for each in points]) <= 0.05


@pytest.mark.parametrize("of_days", [0.01, 0.03])
def test_days_that_differ_by_more_than_their_runs_are_no_change_points(of_days: float) -> None:
    found = 0
    for number in range(8):
        rng = np.random.default_rng([21, number])
        day = np.repeat(np.arange(15), rng.integers(3, 6, 15))
        values = of_days * rng.standard_normal(15)[day] + 0.003 * rng.standard_normal(len(day))
        found += bool(find(values, days=[f"2026-01-{one + 1:02}" for one in day]))
    assert found <= 1  # of such series, nearly all had some where the variance of days was at most that of runs


def test_a_point_says_how_much_changed_and_where() -> None:
    rng = np.random.default_rng(4)
    values = 0.002 * rng.standard_normal(30) + np.where(np.arange(30) >= 18, 0.05, 0.0)
    (point,) = find(values)
    assert (point.index, point.first, point.last) == (18, 18, 18)
    assert point.probability > 0.99
    assert abs(point.change - 0.05) < 1.5 * point.half_width < 0.01


def test_outliers_and_short_disturbances_are_no_change_points() -> None:
    values = 0.002 * np.random.default_rng(4).standard_normal(30)
    values[[10, 29]] += 0.2
    values[20:22] += 0.05
    assert not find(values)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", DISTURBANCES)
def test_disturbances_cycles_and_lasting_correlation_are_no_change_points(kind: Disturbance, count: int) -> None:
    for noise in (0.003, 0.01):
        found = false_when_disturbed(of_code, kind, count, noise)
        most = 0.1 if kind == "correlated" and noise > 0.003 else 0.05  # docs/decisions.md states this limit
        assert found <= most + slack(most, count)


def test_the_runs_of_a_disturbance_may_differ_and_there_may_be_several() -> None:
    values = 0.003 * np.random.default_rng(4).standard_normal(40)
    values[10:14] += [0.03, 0.05, 0.02, 0.04]
    values[25:28] -= 0.03
    assert not find(values)


def test_a_change_beside_a_disturbance_is_found() -> None:
    values = 0.003 * np.random.default_rng(4).standard_normal(40) + np.where(np.arange(40) >= 22, 0.03, 0.0)
    values[10:14] += 0.05
    assert [point.index for point in find(values)] == [22]


@pytest.mark.parametrize("outlier", [17, 18])
def test_of_the_places_before_and_after_an_outlier_the_first_one_is_named(outlier: int) -> None:
    values = 0.002 * np.random.default_rng(4).standard_normal(30) + np.where(np.arange(30) >= 18, 0.05, 0.0)
    values[outlier] += 0.3
    assert [(point.index, point.first, point.last) for point in find(values)] == [(outlier, outlier, outlier + 1)]


def test_a_step_is_visible_after_three_runs_and_not_before() -> None:
    values = 0.002 * np.random.default_rng(4).standard_normal(30)
    values[-FEWEST:] += 0.05
    assert [point.index for point in find(values)] == [30 - FEWEST]
    assert not find(values[:-1])


def test_changes_up_to_the_margin_do_not_count() -> None:
    values = 0.0002 * np.random.default_rng(4).standard_normal(30) + np.where(np.arange(30) >= 15, 0.004, 0.0)
    assert [point.index for point in find(values, margin=0.001)] == [15]
    assert not find(values, margin=0.005)


@pytest.mark.parametrize("values", [np.zeros(0), np.ones(1), np.ones(2 * FEWEST - 1), np.ones(40)], ids=len)
def test_constant_and_short_series_have_none(values: np.ndarray) -> None:
    assert not find(values, days=["one"] * len(values), errors=np.zeros(len(values)))


def test_a_series_longer_than_a_window_is_searched_to_its_end() -> None:
    n = MOST + 60
    values = 0.005 * np.random.default_rng(4).standard_normal(n)
    for place in (40, MOST // 2, n - 20):
        values[place:] += 0.05
    assert [point.index for point in find(values)] == [40, MOST // 2, n - 20]
