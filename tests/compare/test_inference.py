import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as reference
from simulated import Drift

from gpubench.compare import intervals, power
from gpubench.compare.intervals import Error, Known, MetricSample, Ratio, Steps, difference, holm, ratio


def units(*values: float) -> MetricSample:
    return MetricSample(np.array(values))


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    ours, theirs = units(1.0, 1.02, 0.99), units(1.1, 1.13, 1.12)
    there, back = ratio(ours, theirs), ratio(theirs, ours)
    assert there
    assert back
    assert there.estimate == pytest.approx(1 / back.estimate)
    assert there.interval == pytest.approx((1 / back.interval[1], 1 / back.interval[0]))


def test_between_repeats_the_interval_is_students_of_relative_values() -> None:
    ours, theirs = np.array([10.0, 10.2, 9.9]), np.array([11.0, 11.3, 11.2, 11.1])
    found = ratio(MetricSample(ours), MetricSample(theirs))
    low, high = reference.ttest_ind(theirs / theirs.mean(), ours / ours.mean()).confidence_interval()
    assert found
    assert found.error.df == 5
    half = (high - low) / 2
    assert found.interval == pytest.approx((found.estimate * math.exp(-half), found.estimate * math.exp(half)))


def test_the_spread_of_few_repeats_is_moderated_by_what_is_known() -> None:
    ours, theirs = units(1.0, 1.002), units(1.1, 1.105)
    own = intervals.pooled_spread(ours, theirs)
    assert own
    for known in (intervals.USUAL, Known(0.01, 2, 2), Known(0.01, 30, 30)):
        weight = min(known.beside, intervals.MOST_DF_OF_RECORD) / (1 + (own[0] / intervals.NOISIER / known.spread) ** 2)
        found = ratio(ours, theirs, known=known)
        assert found
        assert found.error.df == pytest.approx(2 + weight)
        assert found.error.size == pytest.approx(math.sqrt((weight * known.spread**2 + 2 * own[0] ** 2) / (2 + weight)))
        assert found.moderated_by == known
    plain, usual = (ratio(ours, theirs, known=known) for known in (None, intervals.USUAL))
    assert plain
    assert usual
    assert usual.error.half_width() < plain.error.half_width()


def test_a_record_that_has_nothing_but_the_compared_repeats_tells_nothing_more() -> None:
    ours, theirs = units(1.0, 1.002), units(1.1, 1.105)
    assert ratio(ours, theirs, known=Known(0.001, 3, 0)) == ratio(ours, theirs)


def test_two_pairs_of_repeats_are_compared_as_two_sides() -> None:
    ours, theirs = units(1.0, 1.1), units(1.0, 1.11)
    assert ratio(ours, theirs, paired=True) == ratio(ours, theirs)
    assert difference(ours, theirs, paired=True) == difference(ours, theirs)


def test_more_equal_baselines_never_take_a_verdict_away() -> None:
    found = ratio(units(1.0, 1.001, 0.999), units(1.0559), known=intervals.USUAL)
    assert found
    assert not found.bias
    assert found.beyond(0.005) < intervals.SIGNIFICANT
    same = ratio(units(1.0, 1.0002, 0.9999), units(1.0), known=intervals.USUAL)
    assert same
    assert same.within(0.005) < intervals.SIGNIFICANT


def test_pairs_take_out_what_both_of_a_pair_share() -> None:
    drift = np.array([0.0, 0.2, -0.1, 0.15])
    ours, theirs = MetricSample(1 + drift), MetricSample(1.05 * (1 + drift) + np.array([0.0, 1e-3, -1e-3, 0.0]))
    alone, together = ratio(ours, theirs), ratio(ours, theirs, paired=True)
    assert alone
    assert together
    assert together.error.size < alone.error.size / 50
    assert together.interval[0] < 1.05 < together.interval[1]


def test_repeats_that_agree_by_chance_are_not_believed_beyond_their_steps() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = ([Drift(offset=0).repeat(rng) for _ in range(2)] for _ in range(2))
    series = [[[Steps(one / one.mean())] for one in side] for side in (ours, theirs)]
    found = ratio(MetricSample(np.ones(2), series[0]), MetricSample(np.ones(2), series[1]))
    assert found
    assert found.interval[0] < 0.999
    assert found.interval[1] > 1.001


def test_identical_repeats_without_steps_leave_no_doubt() -> None:
    found = ratio(units(512.0, 512.0), units(640.0, 640.0, 640.0))
    assert found
    assert found.estimate == 1.25
    assert found.interval == (1.25, 1.25)


def test_a_single_repeat_without_steps_has_no_interval() -> None:
    assert ratio(units(512.0), units(512.0)) is None


def test_a_single_unit_is_taken_to_vary_as_the_others_do() -> None:
    many, one = units(1.0, 1.02, 0.98), units(1.05)
    found = ratio(many, one)
    assert found
    assert found.rests_on == "units"
    assert (found.error.size, found.error.df) == pytest.approx((0.02 * math.sqrt(1 / 3 + 1), 2))
    back = ratio(one, many)
    assert back
    assert back.error == found.error


@pytest.mark.parametrize(
    ("ours", "theirs", "known", "of_steps"),
    [
        ([1.0], [1.1], Known(0.01, 5, 3), False),
        ([1.0], [1.1], None, True),
        ([1.0, 1.01], [1.1], None, False),
        ([1.0, 1.01], [1.1, 1.11], None, False),
    ],
)
def test_only_a_single_unit_beside_another_shows_nothing_of_how_units_vary(
    ours: list[float], theirs: list[float], known: Known | None, of_steps: bool
) -> None:
    steps = np.random.default_rng(0).normal(1, 0.01, 50)
    samples = [MetricSample(np.array(side), [[Steps(steps)] for _ in side]) for side in (ours, theirs)]
    found = ratio(*samples, known=known, assumed=0.05)
    assert found
    assert (found.rests_on == "steps") == of_steps
    assert found.bias == (0.05 if of_steps else 0)


def test_two_runs_vary_as_equal_runs_did_however_well_their_repeats_agree() -> None:
    ours, theirs = units(1.0, 1.001, 1.0), units(1.02, 1.021, 1.02)
    found = ratio(ours, theirs, known=Known(0.02, 9, 7, of_runs=True))
    assert found
    assert found.rests_on == "runs"
    assert (found.error.size, found.error.df) == pytest.approx((0.02 * math.sqrt(2), 9))
    change = difference(ours, theirs, known=Known(0.02, 9, 7, of_runs=True))
    assert change.error
    assert change.error.size == pytest.approx(0.02 * math.sqrt(2), rel=0.02)


@pytest.mark.parametrize("estimate", [0.98, 0.994, 1.0, 1.0049, 1.013])
def test_an_interval_excludes_what_its_test_rejects(estimate: float) -> None:
    for margin, bias in product((0.0, 0.005, 0.01), (0.0, 0.002, 0.006)):
        found = Ratio(estimate, Error(0.003, 4.5), bias=bias)
        low, high = found.interval
        band = 1 + margin
        assert (found.beyond(margin) < intervals.SIGNIFICANT) == (low > band or high < 1 / band)
        assert (found.within(margin) < intervals.SIGNIFICANT) == (low > 1 / band and high < band)


def test_holm_with_weights_gives_each_its_share() -> None:
    assert holm([0.01, 0.01, 0.04], [2, 1, 1]) == pytest.approx([0.02, 0.02, 0.04])
    assert holm([0.02, 0.01], [1, 1]) == holm([0.02, 0.01])


def test_a_mean_of_zero_has_no_ratio_but_a_difference() -> None:
    assert ratio(units(0.0, 0.0), units(1.0, 1.1)) is None
    interval = difference(units(0.0, 0.0), units(1.0, 1.1)).interval
    assert interval
    assert interval[0] < 1.05 < interval[1]


def test_pairs_of_nothing_but_zeros_have_no_spread() -> None:
    assert intervals.pooled_spread(units(0.0, 0.0), units(0.0, 0.0), paired=True) is None


def test_the_difference_of_pairs_is_students() -> None:
    ours, theirs = np.array([1.0, 1.2, 0.9]), np.array([1.1, 1.35, 0.95])
    expected = reference.ttest_rel(theirs, ours).confidence_interval()
    assert difference(MetricSample(ours), MetricSample(theirs), paired=True).interval == pytest.approx(
        (expected.low, expected.high)
    )


def test_rates_are_the_inverse_of_times() -> None:
    found = ratio(units(1.0, 1.02), units(2.0, 2.1))
    assert found
    turned = intervals.inverse(found)
    assert turned.estimate == pytest.approx(1 / found.estimate)
    assert turned.interval == pytest.approx((1 / found.interval[1], 1 / found.interval[0]))


def test_the_same_data_give_the_same_interval() -> None:
    one = MetricSample(np.array([1.0]), [[Steps(Drift().repeat(np.random.default_rng(2)))]])
    two = MetricSample(np.array([1.0]), [[Steps(Drift().repeat(np.random.default_rng(3)))]])
    assert ratio(one, two) == ratio(one, two)


def test_more_repeats_than_anybody_would_run_are_not_proposed() -> None:
    assert power.repeats_for(0.0051, 0.05, 4, 0.005) is None


@pytest.mark.parametrize(("change", "margin"), [(0.03, 0.005), (0.0, 0.005), (0.01, 0.02)])
def test_a_certain_spread_needs_fewer_repeats_than_an_estimated_one(change: float, margin: float) -> None:
    certain, many, few = (power.repeats_for(change, 0.01, df, margin) for df in (math.inf, 20, 2))
    assert certain
    assert many
    assert few
    assert certain <= many <= 1.5 * certain
    assert few > 1.3 * many
    low, high = power.repeats_range(change, 0.01, 4, margin)
    assert low
    assert high
    assert low < certain < high


def measured(rng: np.random.Generator, n: int, change: float = 0.0, noise: float = 0.01) -> Ratio:
    """The ratio of two sides of new repeats."""
    sides = [MetricSample(level * (1 + noise * rng.standard_normal(n))) for level in (1.0, 1 + change)]
    found = ratio(*sides)
    assert found
    return found


def kept(promised: list[bool]) -> bool:
    """Whether a promise of 80 % was kept, within three standard errors."""
    return bool(abs(np.mean(promised) - intervals.POWER) < 0.04 + 3 * math.sqrt(0.16 / len(promised)))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_new_measurements_find_the_resolvable_change_with_eighty_percent_power(n: int) -> None:
    """What is resolvable was learned from as few repeats, whose spread may be far off."""
    rng, margin, found = np.random.default_rng([4, n]), 0.005, []
    for _ in range(300):
        change = power.resolvable(measured(rng, n).error, margin)
        if change is None:  # of two repeats that differ so much that no change tells
            assert n == 2
            continue
        found.append(measured(rng, n, change).interval[0] > 1 + margin)
    assert kept(found)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_resolvable_change_of_equal_repeats_holds_for_new_ones_and_so_does_its_range(n: int) -> None:
    rng, margin, found, covered = np.random.default_rng([5, n]), 0.005, [], []
    known = power.resolvable_by(0.01, math.inf, n, margin)
    assert known
    for _ in range(300):
        spread = intervals.spread(MetricSample(1 + 0.01 * rng.standard_normal(2 * n)))
        assert spread
        learned = power.resolvable_by(spread, 2 * n - 1, n, margin)
        assert learned
        change, (low, high) = learned
        found.append(measured(rng, n, change).interval[0] > 1 + margin)
        covered.append(low <= known[0] <= high)
    assert kept(found)
    assert 0.91 < np.mean(covered) < 0.99


def test_noise_that_hides_more_than_a_factor_of_two_resolves_no_change() -> None:
    for spread in (0.2, 2.0, 400.0):
        assert power.resolvable_by(spread, 1, 2, 0.005) is None
        assert power.resolvable(Error(spread, 1), 0.005) is None
    found = power.resolvable_by(0.02, 1, 2, 0.005)
    assert found
    assert 0 < found[1][0] <= found[0] <= found[1][1] <= 1


@pytest.mark.parametrize(("change", "margin"), [(0.02, 0.005), (0.0, 0.01)])
@pytest.mark.parametrize("n", [2, 4])
def test_the_proposed_repeats_settle_the_question_in_four_of_five_new_measurements(
    n: int, change: float, margin: float
) -> None:
    rng, settled = np.random.default_rng([6, n]), []
    for _ in range(200):
        noise = intervals.pooled_spread(*(MetricSample(1 + 0.01 * rng.standard_normal(n)) for _ in range(2)))
        assert noise
        needed = power.repeats_for(change, *noise, margin)
        assert needed
        low, high = measured(rng, needed, change).interval
        settled.append(low > 1 + margin or (low > 1 / (1 + margin) and high < 1 + margin))
    assert kept(settled)
