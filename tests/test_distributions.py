"""Student's t and the binomial distribution against scipy's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy.special import bdtrc, stdtr

from gpubench.distributions import binomial_tail, student_t_cdf, student_t_quantile

DEGREES = some.floats(0.5, 1e5)


@given(df=DEGREES, t=some.floats(-200, 200))
def test_probabilities_of_students_t_are_scipys(df: float, t: float) -> None:
    assert student_t_cdf(df, t) == pytest.approx(stdtr(df, t), rel=1e-8, abs=1e-300)


@given(df=DEGREES, probability=some.floats(1e-6, 1 - 1e-6))
def test_a_quantile_of_students_t_has_its_probability(df: float, probability: float) -> None:
    assert student_t_cdf(df, student_t_quantile(df, probability)) == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize(
    ("df", "probability", "value"),
    [
        (1, 0.975, math.tan(0.475 * math.pi)),
        (2, 0.975, 0.95 * math.sqrt(2 / 0.0975)),
        (10, 0.95, 1.8124611228107335),
        (3, 0.5, 0),
    ],
)
def test_quantiles_of_tables(df: float, probability: float, value: float) -> None:
    assert student_t_quantile(df, probability) == pytest.approx(value, rel=1e-12)
    assert student_t_quantile(df, 1 - probability) == pytest.approx(-value, rel=1e-9)


@given(trials=some.integers(1, 500), data=some.data(), probability=some.floats(0.001, 0.999))
def test_binomial_tails_are_scipys(trials: int, data: some.DataObject, probability: float) -> None:
    least = data.draw(some.integers(0, trials))
    expected = 1.0 if least == 0 else bdtrc(least - 1, trials, probability)
    assert binomial_tail(least, trials, probability) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("df", "probability"), [(0, 0.5), (3, 0), (3, 1), (math.nan, 0.5)])
def test_a_quantile_that_there_is_not_is_refused(df: float, probability: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_t_quantile(df, probability)
