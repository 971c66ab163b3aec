"""The search for the fastest settings, on programs whose truth is planted. docs/search.md has the figures."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from planted import Ending, Planted, drawn, fixed, levelled, nothing, slow_to_load, solve, sparse, threefold, uneven

from gpubench.tuning.combination import Combination
from gpubench.tuning.conclusion import Factor, NextRuns
from gpubench.tuning.confirmation import Confirmation, ConfirmingRun
from gpubench.tuning.durations import Limit
from gpubench.tuning.knowledge import Result
from gpubench.tuning.model import EffectTerms, posterior
from gpubench.tuning.noises import Noises, compared
from gpubench.tuning.search import FEWEST_RUNS, Search

FEW = [2, pytest.param(30, marks=pytest.mark.stress)]
CLOSE = 0.01  # distance to the best in log throughput at which a search has found it


def endings(trials: int, make: Callable[[np.random.Generator], Planted], seed: int = 0) -> list[Ending]:
    found = [solve(make(np.random.default_rng([seed, trial]))) for trial in range(trials)]
    assert all(one.runs <= one.announced for one in found)
    return found


def close(found: Sequence[Ending]) -> float:
    return float(np.mean([one.regret < CLOSE for one in found]))


def covered(found: Sequence[Ending], kind: str) -> float:
    return 1 - float(np.mean([missed for one in found for missed in one.missed[kind]]))


def programmed(settings: int, rates: Callable[[Combination], Result], **options: float) -> Search:
    """A search that has ended, on a program without noise but for the fourth digit."""
    search = Search([Factor(f"setting {place}") for place in range(settings)], most_peak=options.get("most_peak"))
    finish(search, rates)
    return search


def finish(search: Search, rates: Callable[[Combination], Result]) -> list[NextRuns]:
    rng = np.random.default_rng(1)
    blocks = []
    while block := search.next():
        blocks.append(block)
        results = [rates(combination) for combination in block.runs]
        search.record(
            [
                Result(
                    None if one.rate is None else one.rate + 0.001 * rng.standard_normal(),
                    one.peak,
                    one.rejected,
                )
                for one in results
            ]
        )
    return blocks


@pytest.mark.parametrize("trials", [4, pytest.param(300, marks=pytest.mark.stress)])
def test_the_best_of_256_combinations_is_found_in_the_runs_announced_while_the_machine_drifts(trials: int) -> None:
    found = endings(trials, lambda rng: drawn(rng, 0.02, drift=0.03))
    assert close(found) >= (0.95 if trials > 100 else 3 / 4)
    assert np.mean([one.runs <= 55 for one in found]) >= (0.8 if trials > 100 else 3 / 4)
    for kind, count in (("with others", 4 * trials), ("alone", 4 * trials), ("gain", trials)):
        assert covered(found, kind) >= 0.93 - 2 * math.sqrt(0.95 * 0.05 / count)
    assert np.mean([one.false_pairs > 0 for one in found]) <= 0.1


@pytest.mark.parametrize("trials", FEW)
def test_two_settings_that_help_only_together_are_found_and_two_that_cancel_are_told_apart(trials: int) -> None:
    found = endings(trials, lambda rng: fixed(rng, 0.02))
    assert close(found) >= 5 / 6
    assert np.mean([len(one.conclusion.pairs) == 2 and not one.false_pairs for one in found]) >= 2 / 3


@pytest.mark.parametrize("trials", [4, pytest.param(300, marks=pytest.mark.stress)])
def test_no_gain_is_claimed_where_there_is_none(trials: int) -> None:
    found = endings(trials, lambda rng: nothing(rng, 0.02, drift=0.03))
    assert sum(one.conclusion.proved for one in found) <= 0.02 * trials
    assert not all(sum(one.conclusion.best) for one in found)


@pytest.mark.parametrize("trials", FEW)
def test_combinations_that_do_not_run_are_data_and_not_the_end(trials: int) -> None:
    found = endings(trials, lambda rng: drawn(rng, 0.02, failing=2), seed=3)
    assert close(found) >= 4 / 5
    assert all(math.isfinite(one.regret) for one in found)


@pytest.mark.parametrize("trials", [2, pytest.param(30, marks=pytest.mark.stress)])
def test_factors_of_several_levels_are_raced_beside_the_others(trials: int) -> None:
    found = endings(trials, lambda rng: levelled(rng, 0.01), seed=1)
    assert close(found) >= 3 / 4


def test_a_quantity_is_one_number_wherever_it_is_shown() -> None:
    for one in endings(3, lambda rng: drawn(rng, 0.02), seed=2):
        found = one.conclusion
        alone = {kept.factor: kept.alone for kept in found.contributions}
        assert found.ladder[-1].gain == found.gain
        if len(found.ladder) > 1:
            assert found.ladder[0].gain == alone[found.ladder[0].factor]


def test_a_setting_that_makes_no_difference_is_a_tie() -> None:
    found = programmed(3, lambda one: Result(0.1 * one[0] - 0.05 * one[2])).conclude()
    assert found.best == (1, 0, 0)
    assert [kept.tie for kept in found.contributions] == [False]
    assert {one.factor: one.reason for one in found.dropped} == {"setting 1": "tie", "setting 2": "slower"}
    nothing_helps = programmed(2, lambda _: Result(0.0)).conclude()
    assert {one.reason for one in nothing_helps.dropped} == {"no gain"}


def test_the_confirmation_tries_the_neighbours_that_may_be_faster() -> None:
    planted = Planted([(0.0, 0.15), (0.0, 0.0), (0.0, 0.0), (0.0, -0.2)], {}, 0.02, np.random.default_rng(1))
    search = Search(planted.factors)
    blocks: list[NextRuns] = []
    while block := search.next():
        blocks.append(block)
        search.record([planted.run(combination) for combination in block.runs])
    rounds = [set(block.runs) for block in blocks if block.stage == "confirming" and len(block.runs) > 2]
    assert rounds
    for tried in rounds:
        assert any(all(sum(map(int.__ne__, one, best)) <= 1 for one in tried) for best in tried)  # one level away
        assert {(1, 1, 0, 0), (1, 0, 1, 0)} & tried
        assert (1, 0, 0, 1) not in tried  # it is known to be slower


def test_more_runs_are_made_while_they_do_not_decide() -> None:
    runs = [solve(uneven(np.random.default_rng([4, trial]), 0.02)) for trial in range(3)]
    assert max(one.runs for one in runs) > 55
    assert all(one.runs <= one.announced for one in runs)


def test_a_setting_with_more_noise_gets_more_runs_and_less_weight() -> None:
    found = endings(2, lambda rng: uneven(rng, 0.02), seed=1)
    assert close(found) >= 1 / 2
    assert all(one.runs <= one.announced for one in found)


def test_the_noise_of_each_setting_is_told_from_runs_whose_effects_are_unknown() -> None:
    rng = np.random.default_rng(0)
    runs = [tuple(map(int, row)) for row in rng.integers(0, 2, (60, 4))]
    columns = np.array(runs, dtype=float)
    smooth = 16 * columns @ columns.T
    noise = np.where(columns[:, 2] == 1, 0.06, 0.02)
    rates = columns @ [0.1, 0.0, 0.05, -0.1]
    uneven_ones = compared(runs, rates + noise * rng.standard_normal(60), smooth, 0.02)
    assert list(uneven_ones.factors) == [(2, 1)]
    assert 2 < uneven_ones.factors[2, 1] < 5
    assert uneven_ones.of([(0, 0, 0, 0), (1, 1, 0, 1)]).tolist() == [1, 1]
    assert compared(runs, rates + 0.02 * rng.standard_normal(60), smooth, 0.02) == Noises()


def test_a_dozen_runs_that_differ_three_times_as_much_as_a_dozen_others_show_a_noisier_setting() -> None:
    runs, signs = [(number % 2,) for number in range(24)], np.tile([1, 1, -1, -1], 6)
    for times, shown in ((3.0, True), (1.5, False)):
        rates = 0.02 * signs * np.tile([1, times], 12)
        assert bool(compared(runs, rates, np.zeros((24, 24)), 0.02).factors) == shown


def test_what_is_likely_does_not_depend_on_the_random_numbers_of_a_walk() -> None:
    """A walk that is too short stays near its beginning, so that two of them differ by 0.4 here."""
    differences = []
    for seed in range(4):
        rng = np.random.default_rng([7, seed])
        planted = threefold(rng, 0.02)
        runs = [(0,) * 8] * 4 + [tuple(map(int, row)) for row in rng.integers(0, 2, (36, 8))]
        rates = [planted.run(one).rate or 0.0 for one in runs]
        one, other = (
            posterior(EffectTerms([2] * 8), runs, rates, np.linspace(0, 1, 40).tolist(), lambda _: 0.02, walk)
            for walk in (np.random.default_rng(0), np.random.default_rng(1))
        )
        differences.append(np.abs(one.certainty - other.certainty).max())
    assert np.mean(differences) < 0.3


def test_runs_that_prove_the_gain_are_not_those_by_which_the_combination_was_chosen() -> None:
    best, baseline, part = (1, 1), (0, 0), (1, 0)
    chosen = [
        ConfirmingRun(number, one, rate) for number in (0, 1) for one, rate in ((best, 5.0), (part, 0.1 * number))
    ]
    proving = [
        ConfirmingRun(number, one, rate + 0.001 * number, proves=True)
        for number in (2, 3, 4)
        for one, rate in ((best, 0.2), (baseline, 0.0))
    ]
    fresh = Confirmation([*chosen, *proving], (0.0, 0))
    found = fresh.log_ratio((best, True), (baseline, True))
    assert found
    assert found[0] == pytest.approx(0.2)


def test_the_gain_of_a_setting_that_helps_twofold_is_not_drawn_to_what_is_usual() -> None:
    def rate(combination: Combination) -> Result:
        return Result(0.7 * combination[1] + 0.08 * noise.standard_normal())

    noise = np.random.default_rng(4)
    search = Search([Factor(f"setting {place}") for place in range(4)])
    while block := search.next():
        search.record([rate(one) for one in block.runs])
    found = search.conclude()
    (kept,) = (one for one in found.contributions if one.factor == "setting 1")
    assert kept.alone
    assert kept.alone.low <= math.exp(0.7) <= kept.alone.high
    if sum(found.best) == 1:
        assert kept.alone == kept.with_others == found.gain


def test_three_settings_that_help_only_together_are_found() -> None:
    found = programmed(4, lambda one: Result(0.02 * one[0] - 0.02 * one[1] + 0.15 * one[0] * one[1] * one[2]))
    assert found.conclude().best[:3] == (1, 1, 1)


def test_three_of_thirteen_settings_are_found_and_three_settings_take_few_runs() -> None:
    many, few = endings(1, lambda rng: sparse(rng, 0.02, 13)), endings(3, lambda rng: drawn(rng, 0.02, 3))
    assert close(many) == 1
    assert many[0].conclusion.proved
    assert close(few) >= 2 / 3
    assert max(one.runs for one in few) <= 45


def in_time(runs: float) -> Search:
    """A search with time for so many runs, of which the first setting makes the program faster by a half."""
    search, seconds = Search([Factor(f"setting {place}") for place in range(6)]), runs
    search.limit(Limit(None, seconds, 1.0))
    rng = np.random.default_rng(2)
    while block := search.next():
        rates = [0.4 * one[0] + rng.normal(0, 0.01) for one in block.runs]
        search.record([Result(rate, seconds=1.0) for rate in rates])
        seconds -= len(block.runs)
        search.limit(Limit(None, max(0.0, seconds), 1.0))
    return search


def test_a_short_time_tries_and_proves_the_most_promising_setting_or_makes_no_run() -> None:
    assert in_time(FEWEST_RUNS - 0.5).conclude().tried == []
    for more in (0.5, 1.5, 3.5):
        found = in_time(FEWEST_RUNS + more).conclude()
        assert (found.proved, found.best[0]) == (True, 1)


def test_the_rest_of_an_interrupted_block_is_run_only_if_there_is_time_for_it() -> None:
    search = Search([Factor("setting 0"), Factor("setting 1")])
    block = search.next()
    assert block
    search.record([Result(0.0, seconds=2.0)])
    search.limit(Limit(None, 5.0, 2.0))
    rest = search.next()
    assert rest
    assert len(rest.runs) == min(2, len(block.runs) - 1)
    search.limit(Limit(None, 1.0, 2.0))
    assert search.next() is None


def test_a_setting_that_crashes_once_by_chance_is_tried_again() -> None:
    seen: list[Combination] = []

    def rate(combination: Combination) -> Result:
        seen.append(combination)
        if combination[0] and seen.count(combination) == 1 and combination == (1, 0, 0):
            return Result(None)
        return Result(0.1 * combination[0])

    found = programmed(3, rate).conclude()
    assert found.best == (1, 0, 0)
    assert found.proved


def test_a_setting_that_does_not_run_or_is_rejected_is_left_out_with_its_reason() -> None:
    def rate(combination: Combination) -> Result:
        if combination[0]:
            return Result(None)
        gain = 0.1 * combination[1] + 0.5 * combination[2]
        return Result(gain, rejected="the loss differs" if combination[2] else "")

    search = programmed(4, rate)
    found = search.conclude()
    assert found.best == (0, 1, 0, 0)
    assert found.proved
    assert found.gain
    assert found.gain.low <= math.exp(0.1) <= found.gain.high
    reasons = {one.factor: (one.reason, one.detail, one.gain is None) for one in found.dropped}
    assert reasons["setting 0"] == ("does not run", "does not run", True)
    assert reasons["setting 2"] == ("rejected", "the loss differs", True)
    assert reasons["setting 3"][0] == "tie"  # it changes nothing
    tried = {one.combination: one for one in found.tried}
    assert tried[1, 0, 0, 0].rate is None
    assert sum(1 for combination in tried if combination[0]) == 1


def test_peaks_over_the_limit_exclude_combinations_that_were_never_run() -> None:
    def rate(combination: Combination) -> Result:
        gain = float(np.dot((0.2, 0.1, 0.05, 0.0), combination))
        return Result(gain, peak=1e9 * 1.5 ** sum(combination[:3]))

    ran: list[Combination] = []
    search = Search([Factor(f"setting {place}") for place in range(4)], most_peak=2.5e9)
    for block in finish(search, rate):
        ran += block.runs
    found = search.conclude()
    assert found.best == (1, 1, 0, 0)
    assert all(sum(combination[:3]) < 3 for combination in ran)
    assert {one.factor: one.reason for one in found.dropped}["setting 2"] == "memory"


def test_a_baseline_that_does_not_run_ends_the_search() -> None:
    search = programmed(3, lambda combination: Result(0.1 if any(combination) else None))
    assert search.conclude().best == (0, 0, 0)
    assert not search.conclude().proved
    assert search.planned().done == search.planned().total


def test_a_baseline_over_the_limit_of_memory_is_left_for_what_fits_although_it_is_slower() -> None:
    def rate(combination: Combination) -> Result:
        return Result(0.1 * combination[0] - 0.05 * combination[1], peak=3e9 / 2 ** combination[1])

    found = programmed(3, rate, most_peak=2e9).conclude()
    assert found.best == (1, 1, 0)
    assert found.gain
    assert found.gain.low <= math.exp(0.05) <= found.gain.high


@pytest.mark.parametrize("most", [1, 6, 14, 23, 60])
def test_the_limit_of_runs_holds_whatever_it_is(most: int) -> None:
    planted = drawn(np.random.default_rng(5), 0.02)
    found = solve(planted, most_runs=most)
    assert found.runs <= most
    assert found.conclusion.proved == (found.conclusion.gain is not None and found.conclusion.gain.low > 1)


@pytest.mark.parametrize("trials", [4, pytest.param(100, marks=pytest.mark.stress)])
def test_little_time_goes_to_the_proof_of_a_clear_gain_and_not_to_runs_that_take_long(trials: int) -> None:
    found = [solve(slow_to_load(np.random.default_rng([2, trial]), 0.03), budget=25) for trial in range(trials)]
    assert np.mean([one.conclusion.proved for one in found]) >= (0.9 if trials > 10 else 0.75)
    assert all(one.spent <= 25 for one in found)
    assert all(one.conclusion.best[0] for one in found if one.conclusion.proved)


def test_interrupted_blocks_are_continued_and_the_same_results_lead_to_the_same_runs() -> None:
    planted = drawn(np.random.default_rng(7), 0.02, 4)
    whole, parts = Search(planted.factors, seed=3), Search(planted.factors, seed=3)
    with pytest.raises(ValueError, match="more results"):
        whole.record([Result(0.0)])
    while block := whole.next():
        assert whole.next() is block
        results = [planted.run(combination) for combination in block.runs]
        whole.record(results)
        first = parts.next()
        assert first
        assert first.runs == block.runs
        parts.record(results[:1])
        parts.conclude()
        rest = parts.next()
        if len(results) > 1:
            assert rest
            assert rest.runs == block.runs[1:]
            parts.record(results[1:])
    assert parts.next() is None
    assert parts.conclude() == whole.conclude()
    assert whole.planned().total == whole.planned().done == sum(one.runs for one in whole.conclude().tried)


def test_what_is_known_is_there_at_any_time() -> None:
    planted = fixed(np.random.default_rng(9), 0.02)
    search = Search(planted.factors)
    planned = []
    assert search.conclude().noise is None
    while block := search.next():
        search.record([planted.run(combination) for combination in block.runs])
        found = search.conclude()
        assert found.gain is None or block.stage == "confirming"
        assert {one.factor for one in search.standing()} == {one.name for one in planted.factors}
        planned.append(search.planned())
    planned.append(search.planned())
    assert planned[-1].total == planned[-1].done == len(planted.made)
    assert all(plan.total <= planned[0].most for plan in planned)
    assert all(one.gain and one.gain.low <= one.gain.ratio <= one.gain.high for one in search.standing())
    kept = {one.factor for one in search.standing() if one.kept}
    assert kept >= {one.factor for one in search.conclude().contributions}
