"""The test after each round: what it decides, its interval, its error rates, and the rounds that it foresees."""

import math

import numpy as np
import pytest

from gpubench.compare.sequential import FEWEST, LEVEL, MOST, look
from gpubench.distributions import student_t_quantile


def decided(gains: list[float], margin: float = 0.0) -> bool | None:
    """Returns what the first look that decides says; None if none does."""
    found = (look(gains[:rounds]).exceeds(margin) for rounds in range(1, len(gains) + 1))
    return next((one for one in found if one is not None), None)


def test_nothing_is_decided_before_the_third_round() -> None:
    assert look([]).exceeds(0) is None
    assert look([0.1]).exceeds(0) is None
    assert look([0.1, 0.1]).exceeds(0) is None
    assert look([0.1, 0.1, 0.1]).exceeds(0) is True


def test_a_gain_is_told_from_the_margin_and_not_only_from_none() -> None:
    gains = [math.log(1.02) + off for off in (0.0001, -0.0001, 0.0002, -0.0002)]
    assert look(gains).exceeds(0.01) is True
    assert look(gains).exceeds(0.03) is False
    assert look(gains).exceeds(0.02) is None
    assert look([-one for one in gains]).exceeds(0) is False


def test_rounds_that_agree_to_the_last_digit_are_exact() -> None:
    found = look([math.log(1.1)] * 3)
    assert found.interval == pytest.approx((1.1, 1.1))
    assert look([0.0] * 3).exceeds(0.005) is False
    assert look([0.0] * 3).exceeds(0) is None


def test_the_interval_is_students_at_the_level_of_a_look() -> None:
    gains = [0.01, 0.03, 0.02, 0.05]
    half = -student_t_quantile(3, LEVEL) * float(np.std(gains, ddof=1)) / 2
    found = look(gains)
    assert found.gain == pytest.approx(math.exp(np.mean(gains)))
    assert found.interval == pytest.approx((math.exp(np.mean(gains) - half), math.exp(np.mean(gains) + half)))


def test_more_rounds_are_foreseen_for_a_gain_nearer_to_the_margin() -> None:
    found = look([0.01, 0.03, -0.01, 0.02])
    near, far = found.needed(0.005), found.needed(-0.02)
    assert near is not None
    assert far is not None
    assert near > far >= 4
    assert look([0.0, 0.02, -0.02]).needed(0) is None
    assert look([]).needed(0) is None
    assert look([0.1]).needed(0) == look([0.1, 0.1]).needed(0) == FEWEST


@pytest.mark.stress
def test_the_level_of_a_look_is_that_of_all_looks_together() -> None:
    gains = np.random.default_rng(3).standard_normal((200_000, MOST))
    made = np.arange(1, MOST + 1)
    mean = np.cumsum(gains, axis=1) / made
    variance = (np.cumsum(gains**2, axis=1) - made * mean**2)[:, FEWEST - 1 :] / (made[FEWEST - 1 :] - 1)
    t = mean[:, FEWEST - 1 :] / np.sqrt(variance / made[FEWEST - 1 :])
    critical = np.array([-student_t_quantile(rounds - 1, LEVEL) for rounds in range(FEWEST, MOST + 1)])
    assert 0.0235 < np.mean((t > critical).any(axis=1)) < 0.0255


@pytest.mark.parametrize("trials", [200, pytest.param(4000, marks=pytest.mark.stress)])
def test_equal_programs_are_seldom_kept_however_often_it_looks(trials: int) -> None:
    clocks = np.random.default_rng(5).random((2, trials, MOST)) < 0.5
    noise = 0.001 * np.random.default_rng(6).standard_normal((trials, MOST))
    for gains in (0.01 * np.random.default_rng(4).standard_normal((trials, MOST)), clocks[0] * 1.0 - clocks[1] + noise):
        assert np.mean([decided(trial) is True for trial in gains.tolist()]) < 0.05
