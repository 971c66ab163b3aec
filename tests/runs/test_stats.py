import subprocess
import sys
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter

from gpubench.metrics import DEFINITIONS, Distribution, Metric
from gpubench.runs.stats import (
    block_length,
    coarsened,
    common_warmup,
    describe,
    effective_size,
    level_change,
    mean_error,
    student_half_width,
    student_interval,
    warmup_length,
)

Series = NDArray[np.float64]


def steps(n: int, seed: int, rho: float = 0.0, noise: float = 0.01) -> Series:
    """Step times of 1 s with a first-order autoregression of correlation rho and standard deviation `noise`."""
    drawn = np.random.default_rng(seed).normal(size=n + 200) * np.sqrt(1 - rho * rho)
    return np.asarray(1 + noise * lfilter([1.0], [1.0, -rho], drawn)[200:], dtype=np.float64)


# Autocorrelation and what it costs


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_effective_size_of_an_autoregression_is_near_theory(rho: float) -> None:
    n = 2000
    found = np.mean([effective_size(steps(n, seed, rho)) for seed in range(100)])
    assert found == pytest.approx(n * (1 - rho) / (1 + rho), rel=0.08)


def test_effective_size_makes_the_error_of_the_mean_honest() -> None:
    """std / sqrt(n_eff) is the true scatter of means; std / sqrt(n) would be a third of it."""
    series = [steps(1000, seed, rho=0.8) for seed in range(300)]
    true_error = np.std([x.mean() for x in series])
    claimed = np.mean([x.std() / np.sqrt(effective_size(x)) for x in series])
    assert claimed == pytest.approx(true_error, rel=0.15)


def test_effective_size_stays_between_one_and_n() -> None:
    assert effective_size([1, 2] * 50) == 100
    assert 1 <= effective_size(np.arange(100)) < 10
    assert effective_size([3, 3, 3, 3]) == 4
    assert effective_size([7]) == 1
    assert effective_size([]) == 0


def test_blocks_are_four_correlation_times_and_stay_within_the_series() -> None:
    x = steps(1000, seed=1, rho=0.8)
    assert block_length(x) == round(4 * 1000 / effective_size(x))
    assert 15 < block_length(x) < 60
    assert block_length([1, 2] * 50) == 4
    assert block_length([4, 4, 4]) == block_length([4]) == block_length([]) == 1
    assert block_length(np.arange(300)) == 60


def test_the_error_of_a_mean_counts_autocorrelation() -> None:
    expected = 0.01 * np.sqrt((1 + 0.8) / (1 - 0.8) / 1000)  # of the mean of a long first-order autoregression
    found = [mean_error(steps(1000, seed, rho=0.8)) for seed in range(50)]
    sizes = [error[0] for error in found if error]
    assert np.mean(sizes) == pytest.approx(expected, rel=0.1)
    assert all(error[1] > 1 for error in found if error)


def test_the_error_of_a_mean_needs_values_and_a_mean() -> None:
    assert mean_error([1.0, 1.0, 1.0]) is None
    assert mean_error([0.0] * 10) is None
    assert mean_error([2.0] * 10) == (0.0, 4.0)


@pytest.mark.parametrize("place", [0, 1, 99, 196, 197])
def test_a_slow_step_moves_the_error_as_much_wherever_it_is(place: int) -> None:
    """Its own share of the mean is the least that it adds: without that a slow last step would be a certain change."""
    x = np.ones(198)
    x[place] = 10
    error = mean_error(x)
    assert error
    assert error[0] == pytest.approx(9 / 198 / x.mean(), rel=0.03)


def test_a_long_series_is_coarsened_without_changing_its_mean_or_its_error() -> None:
    x = steps(300_000, seed=4, rho=0.8)
    short = coarsened(x)
    assert len(short) <= 1 << 16
    assert short.mean() == pytest.approx(x.mean(), rel=1e-9)
    error = mean_error(x)
    assert error
    assert error[0] == pytest.approx(0.01 * 3 / np.sqrt(300_000), rel=0.15)
    assert np.array_equal(coarsened(x[:100]), x[:100])


# Describing


def test_a_distribution_pools_values_and_adds_effective_sizes() -> None:
    groups = [steps(300, seed, rho=0.8).tolist() for seed in range(3)]
    found = describe(groups)
    pooled = np.concatenate(groups)
    assert found.n == 900
    assert found.mean == pytest.approx(pooled.mean())
    assert found.std == pytest.approx(pooled.std(ddof=1))
    assert (found.min, found.max) == (pooled.min(), pooled.max())
    assert found.min < found.median < found.p95 < found.p99 < found.max
    assert found.effective_n == pytest.approx(sum(effective_size(group) for group in groups))


def test_one_value_has_no_standard_deviation() -> None:
    found = describe([[2.5], []])
    assert found == Distribution(2.5, None, 2.5, 2.5, 2.5, 2.5, 2.5, 1, 1.0)


@pytest.mark.parametrize("groups", [[], [[]], [[], []]])
def test_nothing_cannot_be_described(groups: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="no values"):
        describe(groups)


# Intervals over repeats


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_student_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    drawn = np.random.default_rng(n).normal(10, 2, size=(4000, n))
    intervals = np.array([student_interval(values) for values in drawn])
    covered = np.mean((intervals[:, 0] <= 10) & (intervals[:, 1] >= 10))
    assert 0.93 < covered < 0.97


def test_the_student_interval_matches_a_worked_example() -> None:
    low, high = student_interval([9.0, 10.0, 11.0]) or (0, 0)
    assert (low, high) == pytest.approx((10 - 4.30265 / 3**0.5, 10 + 4.30265 / 3**0.5), rel=1e-5)
    assert student_half_width([9.0, 10.0, 11.0]) == pytest.approx(4.30265 / 3**0.5, rel=1e-5)


def test_one_repeat_has_no_interval() -> None:
    assert student_interval([]) is None
    assert student_interval([3.0]) is None
    assert student_interval([3.0, 3.0]) == (3.0, 3.0)


# Warm-up


@pytest.mark.parametrize("rho", [0.0, 0.8])
@pytest.mark.parametrize("n", [50, 200, 1000])
def test_a_slow_first_step_is_the_whole_warm_up(n: int, rho: float) -> None:
    found = []
    for seed in range(100):
        x = steps(n, seed, rho)
        x[0] *= 9
        found.append(warmup_length(x))
    assert np.mean(np.equal(found, 1)) >= 0.9


@pytest.mark.parametrize("n", [6, 10, 20])
def test_a_slow_first_step_is_mostly_found_in_a_short_run(n: int) -> None:
    found = []
    for seed in range(200):
        x = steps(n, seed)
        x[0] *= 9
        found.append(warmup_length(x))
    assert np.mean(np.equal(found, 1)) >= 0.7


def test_a_decaying_warm_up_is_found_within_a_few_steps() -> None:
    """0.5 exp(-t / 10) falls to the noise of 0.01 at step 39 and to twice that at 32."""
    found = [warmup_length(steps(200, seed) + 0.5 * np.exp(-np.arange(200) / 10)) for seed in range(100)]
    assert 32 <= np.median(found) <= 45
    assert np.quantile(found, 0.05) >= 28


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_a_warm_up_that_ends_at_once_is_found_to_the_step(rho: float) -> None:
    found = [warmup_length(steps(200, seed, rho) + 0.1 * (np.arange(200) < 30)) for seed in range(100)]
    assert np.mean(np.equal(found, 30)) >= 0.9


def test_steps_that_start_faster_than_the_rest_are_not_warm_up() -> None:
    assert warmup_length(steps(200, seed=3) - 0.1 * (np.arange(200) < 20)) == 0
    assert warmup_length(steps(80, seed=3) * np.where(np.arange(80) < 40, 1, 5)) == 0


@pytest.mark.parametrize("where", [10, 15, 21, 25])
def test_a_pause_after_steps_at_the_usual_speed_is_not_warm_up(where: int) -> None:
    pause = (np.arange(60) >= where) & (np.arange(60) < where + 4)
    found = [warmup_length(steps(60, seed) * np.where(pause, 3, 1)) for seed in range(100)]
    assert np.mean(np.equal(found, 0)) >= 0.9


def test_the_warm_up_that_all_repeats_share_is_one_that_most_of_a_side_need() -> None:
    assert common_warmup([[10, 10, 29]]) == 10
    assert common_warmup([[10, 29]]) == 10
    assert common_warmup([[7]]) == 7
    assert common_warmup([[10, 10, 10], [10, 30, 30]]) == 30
    assert common_warmup([[], []]) == 0


# The level of the steps


@pytest.mark.parametrize(("factor", "rho"), [(5.0, 0.0), (5.0, 0.9), (1.1, 0.0), (0.2, 0.5)])
def test_a_change_of_the_level_is_found_with_its_place_and_factor(factor: float, rho: float) -> None:
    for seed in range(50):
        found = level_change(steps(80, seed, rho) * np.where(np.arange(80) < 40, 1, factor))
        assert found is not None
        assert found[0] == pytest.approx(40, abs=0 if factor > 2 else 3)
        assert found[1] == pytest.approx(factor, rel=0.05)


def test_leading_steps_that_are_faster_are_a_change_of_the_level() -> None:
    found = [level_change(steps(60, seed) * np.where(np.arange(60) < 5, 0.8, 1)) for seed in range(50)]
    assert np.mean([one is not None and one[0] == 5 for one in found]) >= 0.9


def test_of_a_staircase_one_of_the_stairs_is_told() -> None:
    found = [level_change(steps(60, seed) * (1 + 0.3 * (np.arange(60) // 20))) for seed in range(50)]
    assert np.mean([one is not None and one[0] in (19, 20, 21, 39, 40, 41) for one in found]) >= 0.9


@pytest.mark.parametrize(
    "made",
    [
        lambda seed: steps(60, seed, noise=0.1),
        lambda seed: steps(60, seed, rho=0.8),
        lambda seed: steps(60, seed) * np.linspace(1, 1.3, 60),
        lambda seed: steps(60, seed) * np.where((np.arange(60) >= 20) & (np.arange(60) < 24), 3, 1),
        lambda seed: steps(60, seed) * np.tile([1, 1.6], 30),
        lambda seed: steps(60, seed) * np.random.default_rng(seed).choice([1, 1.6], 60),
        lambda seed: np.exp(np.random.default_rng(seed).normal(0, 0.5, 60)),
        lambda seed: np.ones(60),
    ],
    ids=["noise", "correlated noise", "drift", "pause", "alternating", "two lengths", "heavy tails", "constant"],
)
def test_noise_drifts_and_pauses_are_no_change_of_the_level(made: Callable[[int], Series]) -> None:
    assert np.mean([level_change(made(seed)) is not None for seed in range(200)]) <= 0.03


@pytest.mark.parametrize(("n", "often"), [(50, 0.88), (200, 0.97), (1000, 0.97)])
def test_correlated_noise_is_not_warm_up(n: int, often: float) -> None:
    found = [warmup_length(steps(n, seed, rho=0.8)) for seed in range(200)]
    assert np.mean(np.equal(found, 0)) >= often


def test_a_slow_first_step_is_warm_up_even_where_the_rest_drifts() -> None:
    """So it is in public logs of an H200: a first step of 8.7 times the others, which drift by a few per mille."""
    x = steps(198, seed=5, noise=1e-4) + np.linspace(0, 0.003, 198)
    x[0] = 8.7
    assert warmup_length(x) >= 1


@pytest.mark.parametrize("n", [4, 5, 8, 20, 200])
def test_plain_noise_is_not_warm_up(n: int) -> None:
    found = [warmup_length(steps(n, seed)) for seed in range(300)]
    assert np.mean(np.equal(found, 0)) >= 0.97


@pytest.mark.parametrize("where", [20, 50, 150, 199])
def test_a_single_later_outlier_is_not_warm_up(where: int) -> None:
    found = []
    for seed in range(100):
        x = steps(200, seed)
        x[where] *= 9
        found.append(warmup_length(x))
    assert np.mean(np.equal(found, 0)) >= 0.97


def test_a_clock_drop_past_the_middle_is_not_warm_up() -> None:
    found = [warmup_length(steps(200, seed, rho=0.8) + 0.1 * (np.arange(200) >= 120)) for seed in range(100)]
    assert np.mean(np.equal(found, 0)) >= 0.95


def test_a_run_that_settles_only_in_its_second_half_hits_the_cap() -> None:
    assert warmup_length(steps(200, seed=1) + 0.1 * (np.arange(200) < 100)) == 100
    assert warmup_length(steps(201, seed=1) + 0.1 * (np.arange(201) < 105)) == 100


def test_identical_steps_need_no_warm_up_but_one_slow_start_shows() -> None:
    assert warmup_length([0.1] * 101) == 0
    assert warmup_length([0.9] + [0.1] * 100) == 1
    assert warmup_length([0.1] * 80 + [0.9] + [0.1] * 20) == 0


def test_too_few_steps_show_no_warm_up() -> None:
    assert [warmup_length([9.0, 1.0, 1.0][:n]) for n in range(4)] == [0, 0, 0, 0]


def test_warm_up_does_not_depend_on_the_unit_and_leaves_its_input_alone() -> None:
    x = steps(200, seed=5, rho=0.8) + 0.5 * np.exp(-np.arange(200) / 10)
    before = x.copy()
    assert warmup_length(x) == warmup_length(1e9 * x) == warmup_length(x.tolist())
    assert np.array_equal(x, before)


def test_a_million_steps_are_no_obstacle() -> None:
    x = steps(1_000_000, seed=0, rho=0.8)
    x[:1000] += 0.1
    assert warmup_length(x) == pytest.approx(1000, abs=30)


# All of them


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "function", [effective_size, block_length, student_interval, student_half_width, warmup_length]
)
def test_a_value_that_is_not_finite_is_refused(function: Callable[[list[float]], object], bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        function([1.0, bad, 2.0, 3.0])
    with pytest.raises(ValueError, match="not finite"):
        describe([[1.0, 2.0], [bad]])


def test_a_table_is_not_a_series() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        warmup_length([[1.0, 2.0], [3.0, 4.0]])


def test_the_statistics_load_without_scipy_or_torch() -> None:
    code = "import sys, gpubench.runs.stats; print([m for m in ('scipy', 'torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The records they fill


def test_a_metric_survives_the_trip_through_json() -> None:
    groups = [steps(50, seed).tolist() for seed in range(2)]
    repeats = [float(np.mean(group)) for group in groups]
    metric = Metric("step_time", "s", "lower", 1.0, student_interval(repeats), 100, 98.5, repeats, describe(groups))
    assert msgspec.json.decode(msgspec.json.encode(metric), type=Metric) == metric


def test_every_definition_explains_itself() -> None:
    for name, definition in DEFINITIONS.items():
        assert name == name.casefold().replace(" ", "_")
        assert len(definition.meaning) > 20
        assert "\n" not in definition.meaning
        assert definition.better in ("lower", "higher", None)
        assert definition.unit or name == "final_loss"


def test_times_are_better_when_lower_and_rates_when_higher() -> None:
    for name, definition in DEFINITIONS.items():
        if definition.unit == "s" and name not in ("yardstick_time", "probe_time"):  # which are not of the subject
            assert definition.better == "lower", name
        if definition.unit in ("samples/s", "tokens/s", "FLOP/s"):
            assert definition.better == (None if name == "mean_of_rates" else "higher"), name
