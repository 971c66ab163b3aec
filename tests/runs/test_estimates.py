"""What a metric's repeats tell: its mean, and one interval that every report shows."""

import math
from collections.abc import Mapping

import pytest

from gpubench.metrics import Metric
from gpubench.report import quoted
from gpubench.runs import warnings
from gpubench.runs.entries import EntryFigure
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import metric_of, relative_half_width

T2 = 4.302652729911275  # Student's t, 2 degrees of freedom, 95 %


def made(name: str, *repeats: float) -> Metric:
    return metric_of(name, list(repeats), 30, None, None)


def ends(name: str, *repeats: float) -> tuple[float, float]:
    interval = made(name, *repeats).interval
    assert interval is not None
    return interval


def test_the_interval_of_a_time_is_students_on_its_logarithm_around_the_mean() -> None:
    repeats = (0.1, 0.11, 0.14)
    logs = [math.log(value) for value in repeats]
    mean = sum(logs) / 3
    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / 2)
    low, high = ends("step_time", *repeats)
    estimate = made("step_time", *repeats).estimate
    assert estimate == pytest.approx(0.35 / 3)
    assert math.log(high / estimate) == pytest.approx(T2 * spread / math.sqrt(3))
    assert low * high == pytest.approx(estimate**2)


def test_a_rate_and_the_time_that_it_is_made_of_have_inverse_intervals() -> None:
    rates = (100.0, 120.0, 150.0)
    low, high = ends("throughput", *rates)
    assert ends("step_time", *(1 / rate for rate in rates)) == pytest.approx((1 / high, 1 / low))
    assert made("throughput", *rates).reach == pytest.approx(made("step_time", *(1 / rate for rate in rates)).reach)


@pytest.mark.parametrize("name", ["step_time", "throughput", "peak_memory_rss", "energy_per_sample", "warmup_time"])
def test_nothing_positive_has_an_interval_that_reaches_zero(name: str) -> None:
    for repeats in ((1.0, 5.0), (1e-9, 1e9), (0.02, 0.03, 4.0), (1e-300, 1e300)):
        low, high = ends(name, *repeats)
        assert 0 < low <= made(name, *repeats).estimate <= high < math.inf


@pytest.mark.parametrize("name", ["pipeline_efficiency", "bubble", "mfu", "hfu", "starved_steps", "verified_samples"])
@pytest.mark.parametrize("repeats", [(0.9, 0.99), (0.01, 0.6), (0.0, 0.2), (1.0, 1.0, 0.5), (0.98, 1.01)])
def test_no_share_has_an_interval_beyond_its_edges(name: str, repeats: tuple[float, ...]) -> None:
    low, high = ends(name, *repeats)
    assert 0 <= low <= made(name, *repeats).estimate <= high <= 1


def test_what_may_be_negative_keeps_an_interval_around_it() -> None:
    low, high = ends("final_loss", -1.0, -3.0, -2.0)
    assert (low + high) / 2 == pytest.approx(-2.0)


def test_repeats_that_agree_leave_a_point() -> None:
    assert set(ends("step_time", 0.1, 0.1, 0.1)) == {made("step_time", 0.1, 0.1, 0.1).estimate}
    assert ends("starved_steps", 0.0, 0.0) == (0.0, 0.0)
    assert not made("starved_steps", 0.0, 0.0).too_noisy


def test_one_repeat_says_nothing_of_how_sure_it_is() -> None:
    assert relative_half_width("throughput", [100.0]) is None
    assert relative_half_width("throughput", []) is None
    assert made("throughput", 100.0).interval is None


def test_a_precision_that_was_asked_for_holds_both_ends_of_the_interval() -> None:
    repeats = [100.0, 104.0, 108.0]
    low, high = ends("throughput", *repeats)
    estimate, width = made("throughput", *repeats).estimate, relative_half_width("throughput", repeats)
    assert width is not None
    assert estimate * (1 - width) <= low < high <= estimate * (1 + width) * (1 + 1e-12)


def test_an_interval_wider_than_a_factor_of_two_is_a_range_that_is_not_to_be_quoted() -> None:
    noisy = made("throughput", 20.0, 27.0, 60.0)
    low, high = ends("throughput", 20.0, 27.0, 60.0)
    assert high / low > 2
    assert quoted.figure(noisy) == f"median 27 samples/s ({low:.3g} to {high:.3g} samples/s, too noisy to quote)"
    assert not made("throughput", 100.0, 103.0, 110.0).too_noisy


def test_a_symmetric_half_width_is_shown_only_where_both_ends_are_as_far() -> None:
    wide = EntryFigure(100.0, 0.01, 1000.0, "samples/s", "higher")
    assert quoted.together(*quoted.of_entry(wide)) == "too noisy to quote"
    assert quoted.figure(made("throughput", 100.0, 101.0, 102.0)) == "101 samples/s +- 2.5 %"
    assert quoted.figure(made("throughput", 100.0, 107.0, 115.0)) == "107 samples/s (89.9 to 127 samples/s)"
    assert quoted.figure(made("throughput", 100.0)) == "100 samples/s"


def test_ends_of_a_range_that_have_different_units_both_say_theirs() -> None:
    assert quoted.uncertainty(made("step_time", 0.0008, 0.0015, 0.001)).endswith(" ms")
    assert quoted.uncertainty(made("step_time", 0.0008, 0.0015, 0.001)).startswith("498 us to ")
    assert quoted.uncertainty(made("makespan", 240.0, 250.0, 280.0)).count("min") == 2


@pytest.mark.parametrize(
    ("settings", "forbidden"),
    [
        ({"training.steps": "all"}, "--steps"),
        ({"measurement.target_precision": 0.01}, "--repeats"),
        ({}, "max_repeats"),
    ],
)
def test_no_warning_advises_what_the_settings_forbid(settings: Mapping[str, object], forbidden: str) -> None:
    noisy = made("throughput", 1.0, 100.0)
    short, long = ([SteadyWindow(0, 0, 9, True, 0.0, end)] for end in (0.5, 60.0))
    said = [
        *warnings.on_noise(None, noisy, short, settings),
        *warnings.on_noise(None, noisy, long, settings),
        warnings.evaluated_rarely(1, 9, settings),
        warnings.compiled_within(1, 9, settings),
        warnings.not_settled([False], warnings.longer(settings)),
        warnings.too_few_latencies(9, {"latency_p99": 100}, settings),
    ]
    assert len(said) == 6
    assert all(one and ("raise " in one or "let the program run longer" in one) for one in said)
    assert not any(forbidden in str(one) for one in said)
