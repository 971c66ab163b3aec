"""Which combinations of settings to run next, and what follows from the results.

`Search` is a dialogue: `next()` returns a block of runs, `record()` takes their results, and `conclude()` says what is
known, at any time. It starts no process, reads no clock and touches no file. The same results lead to the same blocks.
docs/search.md describes the method and its measured error rates.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from gpubench.compare.intervals import SIGNIFICANT
from gpubench.gain import Gain
from gpubench.tuning.combination import Combination
from gpubench.tuning.conclusion import (
    Conclusion,
    Contribution,
    Dropped,
    Factor,
    Interaction,
    NextRuns,
    Plan,
    Reason,
    Rung,
    Spread,
    Standing,
    TriedCombination,
)
from gpubench.tuning.confirmation import Arm, Confirmation, ConfirmingRun
from gpubench.tuning.designs import informative, least_alike
from gpubench.tuning.durations import Durations, Limit
from gpubench.tuning.knowledge import (
    NO_MATTER,
    USUAL_SIGMA,
    WORTH_CHANGING,
    Knowledge,
    Result,
    Stage,
    TriedRun,
    interval_of,
    spread_of_equals,
    with_level,
    without_each,
)
from gpubench.tuning.limits import DOES_NOT_RUN, MEMORY
from gpubench.tuning.model import EffectTerms
from gpubench.tuning.noises import Noises

STAGES: tuple[Stage, ...] = ("noise", "alone", "screening", "choosing", "confirming")

NOISE_RUNS = 4
NOISY = 0.02  # noise in log throughput that is worth twice the runs to know it
FEW_RUNS = 40  # runs below which all are needed for the settings
SCREENING_BLOCK = 8  # so that what does not run together is known before the rest of the screening
CHOOSING_BLOCK = 4
CHOOSING, CONFIRMING = 9, 18  # runs that are planned, or more for more settings
ROUNDS = 2  # of a confirmation, at least
PROOF_ROUNDS = 3  # of the final combination and the baseline, at least, where no limit is set
ROUNDS_OF_TWO = 3  # of a confirmation of two combinations, at least
FEWEST_RUNS = 2 + 1 + 2 * ROUNDS_OF_TWO  # that can prove one setting; with time for fewer, none is made
DOUBT_OF_TIME = 1.1  # factor by which the runs of a confirmation may well take longer than expected
LONG = 0.1  # share of the time left that is too much for one run
LEAST_DF = 3  # degrees of freedom of a confirmation's own estimate of the noise
CLEAR_REGRET = 0.0003  # an expected loss in log throughput at which the choice is made
CLOSE = 0.01  # difference in log throughput up to which two combinations may be a tie
FALSE_PAIRS = 0.05  # expected number of interactions that are named although there are none
NARROW = 0.01  # half-width of an interval in log throughput that is narrow enough for any purpose
CONFIRMED = 0.27  # share of the runs that are kept for the confirmation
USUAL_NOISE = 0.03  # in log throughput, up to which the usual number of runs is planned
NOISE_DOUBT = 1.2  # factor by which noise may well be larger than it was in a few runs
UNDECIDED = 0.005  # an expected loss in log throughput for which more runs are made than planned
UNDECIDED_MORE = 0.6  # these runs, in units of the usual number
MOST_MORE = 2.5  # additional runs for more noise, in units of the usual number
WHY: Mapping[Stage, str] = {
    "noise": "The settings as they are, to see how much equal runs differ.",
    "alone": "Each setting alone, to see whether it runs and what it does.",
    "screening": "Many settings at once, mixed so that their effects can be told apart.",
    "choosing": "Runs that tell best which of the leading combinations is the fastest.",
    "confirming": "Fresh runs of the best combination without each part, and then beside the settings as they are.",
}


class Search:
    """Finds the fastest combination of the factors' levels in few runs."""

    def __init__(
        self,
        factors: Sequence[Factor],
        *,
        most_peak: float | None = None,
        seed: int = 0,
    ) -> None:
        self._factors = tuple(factors)
        self._levels = [factor.levels for factor in factors]
        self._terms = EffectTerms(self._levels)
        self._limit = Limit()
        self._seconds = 0.0
        """The longest time that was ever left."""
        self._most_peak = most_peak
        self._seed = seed
        self._baseline: Combination = (0,) * len(factors)
        self._runs: list[TriedRun] = []
        self._blocks = 0
        self._pending: NextRuns | None = None
        self._over = False
        self._chosen: Combination | None = None
        self._since = 0  # the block with which the confirmation of `_chosen` began
        self._final: Combination | None = None
        """What the last runs compare with the baseline: what is left of `_chosen` by the rounds before them."""
        self._proving = 0  # the block with which they began
        self._latest: Knowledge | None = None
        self._expected = 0.0
        """The gain of `_final` that was expected then, in log throughput."""
        self._undecided = False
        """Whether the planned runs did not decide which combination is the best, so that more are made."""
        self._times = Durations((), 1.0)

    def next(self) -> NextRuns | None:
        """Returns the runs to make next; None if the search is over. The same block until `record` is called."""
        if self._pending is None and not self._over:
            self._pending = self._following()
            self._over = self._pending is None
        return self._pending

    def record(self, block_results: Sequence[Result]) -> None:
        """Takes the results of the block that `next` returned, in its order.

        If there are fewer, because the block was interrupted, `next` returns the rest of it.
        """
        block = self._pending
        if block is None or len(block_results) > len(block.runs):
            raise ValueError("there are more results than runs in the block")
        made = zip(block.runs, block_results, strict=False)
        self._runs += [TriedRun(self._blocks, block.stage, combination, result) for combination, result in made]
        self._latest = None
        self._times = Durations(self._runs, self._limit.each)
        left = block.runs[len(block_results) :]
        self._pending = NextRuns(block.stage, left, block.why) if left else None
        self._blocks += not left

    def limit(self, limit: Limit) -> None:
        """Sets what the search may use from now on. The number of runs is never exceeded."""
        self._limit = limit
        self._seconds = max(self._seconds, limit.seconds or 0.0)
        self._times = Durations(self._runs, limit.each)
        if block := self._pending:  # the rest of a block that was interrupted
            runs = self._times.fitting(block.runs, limit.seconds)[: max(0, self._most() - len(self._runs))]
            self._pending = NextRuns(block.stage, runs, block.why) if runs else None
            self._blocks += not runs

    def planned(self) -> Plan:
        """Returns the plan.

        Once the noise is known, its total is exceeded only if these runs do not decide which combination is the best.
        """
        made = self._made()
        most = self._most()
        left = 0 if self._over else most - len(self._runs)
        stages: dict[Stage, int] = dict(made)
        now = max((STAGES.index(run.stage) for run in self._runs), default=0)
        wanted = {"noise": self._noise_runs(), "alone": len(self._terms.mains), "screening": self._screening_runs()}
        for place, stage in enumerate(STAGES[:3]):
            if place >= now:
                more = min(left, max(0, wanted[stage] - made[stage]))
                stages[stage] += more
                left -= more
        if self._chosen or now < STAGES.index("confirming"):
            choosing = 0 if self._chosen else max(0, left - self._confirmation_runs())
            stages["choosing"] += choosing
            stages["confirming"] += left - choosing
        return Plan(stages, len(self._runs), most if self._chosen else self._most(undecided=True))

    def standing(self) -> Sequence[Standing]:
        """Returns what is known so far of each level of each factor."""
        known = self._knowledge()
        best = self._chosen or (known.best if known else self._baseline)
        found = []
        for place, level in self._terms.mains:
            why = known.limits.level(place, level) if known else ""
            gain = (
                known.estimate(with_level(best, place, level), with_level(best, place, 0))
                if known and not why
                else None
            )
            found.append(Standing(self._factors[place].name, level, gain, best[place] == level, why))
        return found

    def conclude(self) -> Conclusion:
        known = self._knowledge()
        if known is None:
            return Conclusion(self._baseline, False, None, [], [], [], [], [], self._tried(), self.noise())
        fresh = self._confirmation()
        best, level = self._confirmed(known, fresh)
        gain = _interval(fresh, self._headline(best), self._headline(self._baseline), level)
        return Conclusion(
            best=best,
            proved=gain is not None and gain.low > 1 and not known.limits.why_not(best),
            gain=gain,
            contributions=self._contributions(known, best, gain),
            pairs=self._pairs(known),
            interactions=self._interactions(known, best),
            ladder=self._ladder(known, best, gain),
            dropped=self._dropped(known, best),
            tried=self._tried(),
            noise=self.noise(),
        )

    def _following(self) -> NextRuns | None:
        made, left = self._made(), self._most() - len(self._runs)
        if not self._factors:
            return None
        if not self._runs and self._limit.seconds is not None and self._most() < FEWEST_RUNS:
            return None  # runs of the settings as they are would take the time and lead to nothing
        if more := self._noise_runs() - made["noise"]:
            return self._block("noise", [self._baseline] * min(more, NOISE_RUNS), left)
        known = self._knowledge()
        if known is None or left <= 0:
            return None
        if block := self._try_alone(known, left):
            return block
        if self._chosen is None:
            kept = self._confirmation_runs()
            block = self._screen(known, made["screening"], left - kept) or self._choose(known, left, kept)
            if block is None and known.clear_gain and known.regret > UNDECIDED and not self._undecided:
                self._undecided = True
                left, kept = self._most() - len(self._runs), self._confirmation_runs()
                block = self._choose(known, left, kept)
            if block is None and not known.clear_gain:
                block = self._choose(known, left, 0)  # what a confirmation would need finds out whether it needs it
            if block:
                return block
        return self._confirm(known, left)

    def _try_alone(self, known: Knowledge, left: int) -> NextRuns | None:
        """Returns the runs of each setting alone, and then again of those that failed, as a crash may be chance."""
        made = Counter(run.combination for run in self._runs if run.stage == "alone")
        if not made:
            wanted = [with_level(self._baseline, *main) for main in self._terms.mains]
        elif self._runs[-1].stage == "alone":
            failed = [run for run in self._runs if run.result.rate is None and not run.result.refused]
            wanted = [run.combination for run in failed if made[run.combination] == 1]
        else:
            return None
        return self._block("alone", wanted, left, self._spare(known)) if wanted else None

    def _screen(self, known: Knowledge, made: int, room: int) -> NextRuns | None:
        wanted = self._screening_runs() - made
        tried = {run.combination for run in self._runs}
        fresh = [one for one in known.candidates if one not in tried and self._is_short(one)]
        most = SCREENING_BLOCK if self._allowed() is None else CHOOSING_BLOCK  # a limit may shrink after each block
        count = min(wanted, room, len(fresh), most)
        if count <= 0 or any(run.stage in ("choosing", "confirming") for run in self._runs):
            return None
        good = [run.combination for run in self._runs if run.result.rate is not None]
        return self._block("screening", least_alike(fresh, good, count, self._random()), room, self._spare(known))

    def _choose(self, known: Knowledge, left: int, kept: int) -> NextRuns | None:
        count = min(CHOOSING_BLOCK, left - max(ROUNDS * len(_arms(known.best)), kept))
        daring = known.daring
        if count <= 0 or len(known.candidates) == 1 or (known.regret < CLEAR_REGRET and not daring):
            return None
        best = known.candidates.index(known.best)
        sigmas = known.posterior.sigmas_of(known.candidates)
        chances = known.chances * [self._is_short(one) for one in known.candidates]
        runs = informative(known.candidates, known.rates, best, chances, sigmas, count - bool(daring))
        if daring:
            runs.append(daring)
        return self._block("choosing", runs, left, self._spare(known) if kept else self._limit.seconds)

    def _confirm(self, known: Knowledge, left: int) -> NextRuns | None:
        if self._final is not None and not known.limits.why_not(self._final):
            return self._prove(known, self._final, left)
        best = self._confirmable(known)
        if self._chosen is None:
            is_promising = known.clear_gain or (self._is_hasty and known.gain(best, self._baseline)[0] > 0)
            self._chosen = best if is_promising else self._baseline
            self._since = self._blocks
        elif self._final is not None or self._changes(known, self._chosen, best, left):
            self._chosen, self._since, self._final = best, self._blocks, None
        if self._chosen == self._baseline:
            return None
        fresh, rounds = self._confirmation(), self._blocks - self._since
        enough = fresh is not None and rounds >= ROUNDS and fresh.own_df >= LEAST_DF
        narrow = fresh is not None and enough and self._narrow(known, fresh, self._chosen)
        if self._allowed() is not None:
            return None if narrow else self._confirm_in_limit(left, rounds)
        room = left - PROOF_ROUNDS * 2  # which are kept for the proof
        parts = [self._chosen, *without_each(self._chosen)]  # these tell what each level contributes
        runs = [*parts, *_rivals(known, self._chosen)][: room // max(1, ROUNDS - rounds)]
        if narrow or len(runs) < 2 or (rounds >= ROUNDS and room < len(parts)):
            self._final, self._proving = self._confirmed(known, fresh)[0], self._blocks
            self._expected = known.gain(self._final, self._baseline)[0]
            return self._prove(known, self._final, left)
        return self._block("confirming", runs, left)

    def _confirm_in_limit(self, left: int, rounds: int) -> NextRuns | None:
        arms = _arms(self._chosen or self._baseline)
        in_each = left // max(1, ROUNDS - rounds)
        if rounds < ROUNDS or left < max(1, 2 * ROUNDS - rounds) * len(arms):
            in_each = min(in_each, 2)  # a limit may shrink, so that the best and the baseline come first
        runs = self._times.fitting(arms[:in_each], self._limit.seconds)
        return self._block("confirming", runs if len(runs) >= 2 else [], left)

    def _prove(self, known: Knowledge, final: Combination, left: int) -> NextRuns | None:
        """Returns a round of the final combination and the baseline, until their ratio is known well enough.

        Nothing is chosen after these runs, and their results do not decide when they end, so that the gain they give is
        as likely to be too small as too large.
        """
        fresh, rounds = self._confirmation(), self._blocks - self._proving
        if final == self._baseline or left < 2:
            return None
        if fresh and rounds >= PROOF_ROUNDS and fresh.own_df >= LEAST_DF:
            width = fresh.half_width((final, True), (self._baseline, True), known.posterior.sigma)
            if width <= max(NARROW, self._expected / 2):
                return None
        return self._block("confirming", [final, self._baseline], left)

    def _confirmable(self, known: Knowledge) -> Combination:
        """Returns the best of the combinations that there is time to confirm.

        Runs that take long leave time for few rounds, so that a combination of such runs has to be clearly better.
        """
        seconds = self._limit.seconds
        if seconds is None:
            return known.best
        expected = self._times.expected
        in_each = seconds / ROUNDS_OF_TWO - expected(self._baseline)
        best = known.best_of({one for one in self._possible(known) if expected(one) <= in_each})
        short = known.best_of({one for one in self._possible(known) if self._is_short(one)})
        gain, deviation = known.gain(best, short)
        return best if gain > deviation else short

    def _possible(self, known: Knowledge) -> Sequence[Combination]:
        """Returns the candidates; those of a hasty search have only levels that have run, as others are guesses."""
        if not self._is_hasty:
            return known.candidates
        tried = {main for run in self._runs for main in enumerate(run.combination)}
        return [one for one in known.candidates if tried.issuperset((place, level) for place, level in enumerate(one))]

    @property
    def _is_hasty(self) -> bool:
        """Whether the time is too short to learn much of the settings before one of them is confirmed."""
        each = self._times.expected(self._baseline)
        return self._limit.seconds is not None and self._seconds < 2 * FEWEST_RUNS * each

    def _spare(self, known: Knowledge) -> float | None:
        """Returns the time that is left beside what confirms the best combination; None without a limit.

        It confirms each part too, if that takes no more than a third of the search's time.
        """
        if self._limit.seconds is None:
            return None
        expected, best = self._times.expected, self._confirmable(known)
        pair = expected(self._baseline) + expected(best)
        whole = DOUBT_OF_TIME * ROUNDS * (pair + sum(map(expected, _arms(best))))
        return self._limit.seconds - max(ROUNDS_OF_TWO * pair, min(whole, self._seconds / 3))

    def _changes(self, known: Knowledge, chosen: Combination, best: Combination, left: int) -> bool:
        """Tells whether another combination should be confirmed in place of the chosen one."""
        if known.limits.why_not(chosen):
            return True
        gain, deviation = known.gain(best, chosen)
        if self._allowed() is None:
            return gain > WORTH_CHANGING and left >= ROUNDS * len(_arms(best))
        return gain > max(WORTH_CHANGING, deviation) and left >= 2 * ROUNDS_OF_TWO

    def _narrow(self, known: Knowledge, fresh: Confirmation, best: Combination) -> bool:
        smallest = min(known.gain(best, one)[0] for one in without_each(best))
        sigma, parts = known.posterior.sigma, without_each(best)
        width = max(fresh.half_width((best, False), (one, False), sigma) for one in parts)
        return width <= max(NARROW, smallest / 2)

    def _block(
        self, stage: Stage, runs: Sequence[Combination], left: int, seconds: float | None = None
    ) -> NextRuns | None:
        """Returns a block of the first of these runs, as many as the number left and the time allow, in random order.

        The first are the most promising ones.
        """
        runs = self._times.fitting(runs, seconds)[: max(0, left)]
        order = self._random().permutation(len(runs))
        return NextRuns(stage, [runs[index] for index in order], WHY[stage]) if len(order) else None

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self._seed, len(self._runs), 1])

    def _made(self) -> dict[Stage, int]:
        return {stage: sum(run.stage == stage for run in self._runs) for stage in STAGES}

    def _most(self, undecided: bool = False) -> int:
        """Returns the largest number of runs in all; with `undecided`, what it becomes if they do not decide."""
        allowed = self._allowed()
        if allowed is not None:
            return allowed
        mains = len(self._terms.mains)
        mixed = self._screening_runs() + max(mains, CHOOSING) + CONFIRMING
        doubt = NOISE_DOUBT if self._made()["noise"] > NOISE_RUNS else 1
        more = min(MOST_MORE, max(0.0, (doubt * self._first_noise() / USUAL_NOISE) ** 2 - 1))
        if undecided or self._undecided:
            more = max(more, UNDECIDED_MORE)
        return NOISE_RUNS + mains + mixed + int(mixed * more)

    def _allowed(self) -> int | None:
        """Returns the number of runs in all that the limits allow; None without a limit."""
        most, seconds = self._limit.runs, self._limit.seconds
        if seconds is None:
            return most
        known, expected = self._knowledge(), self._times.expected
        each = expected(self._baseline)
        if known:
            each = (each + expected(self._chosen or self._confirmable(known))) / 2
        in_time = len(self._runs) + int(seconds / each)
        return in_time if most is None else min(most, in_time)

    def _is_short(self, combination: Combination) -> bool:
        """Tells whether a run of the combination takes about as long as others, or a small part of the time left."""
        seconds, expected = self._limit.seconds, self._times.expected
        return seconds is None or expected(combination) <= max(2 * expected(self._baseline), LONG * seconds)

    def _first_noise(self) -> float:
        """Returns the standard deviation of the first stage, or the usual one while it is not known."""
        rates = [run.result.rate for run in self._runs if run.stage == "noise" and run.result.rate is not None]
        return float(np.std(rates, ddof=1)) if len(rates) > 1 else USUAL_SIGMA

    def _noise_runs(self) -> int:
        made, most = self._made()["noise"], self._allowed()
        if any(run.stage != "noise" for run in self._runs):
            return made
        if most is not None and most < FEW_RUNS:
            return max(min(NOISE_RUNS, most // 4), 2, made)
        if made < NOISE_RUNS:
            return NOISE_RUNS
        return 2 * NOISE_RUNS if made > NOISE_RUNS or self._first_noise() > NOISY else NOISE_RUNS

    def _screening_runs(self) -> int:
        mains = len(self._terms.mains)
        return min(2 * mains, math.prod(self._levels) - mains - 1)

    def _confirmation_runs(self) -> int:
        """Returns the runs that are kept for the confirmation."""
        return max(ROUNDS * 4, int(self._most() * CONFIRMED))

    def _knowledge(self) -> Knowledge | None:
        """Returns what follows from the runs; None if fewer than two gave a rate."""
        if self._latest is None and self._factors and sum(run.result.rate is not None for run in self._runs) >= 2:
            self._latest = Knowledge(self._terms, self._levels, self._runs, self._most_peak, self._seed)
        return self._latest

    def _confirmation(self) -> Confirmation | None:
        if self._chosen is None:
            return None
        known = self._knowledge()
        noises = known.posterior.noises if known else Noises()
        runs = [
            ConfirmingRun(
                run.block, run.combination, run.result.rate, noises.of_one(run.combination), self._proves(run)
            )
            for run in self._runs
            if run.block >= self._since and run.stage == "confirming" and run.result.rate is not None
        ]
        noise = [run for run in self._runs if run.stage == "noise"]
        return Confirmation(runs, spread_of_equals(noise)) if runs else None

    def _proves(self, run: TriedRun) -> bool:
        return self._final is not None and run.block >= self._proving

    def _headline(self, combination: Combination) -> Arm:
        """Returns the arm whose runs prove the gain of a combination."""
        return combination, self._final is not None

    def _confirmed(self, known: Knowledge, fresh: Confirmation | None) -> tuple[Combination, float]:
        """Returns the best of the confirmed combinations and the level of the one-sided test of its gain."""
        if self._final is not None and not known.limits.why_not(self._final):
            return self._final, SIGNIFICANT
        if self._chosen is None or fresh is None:
            return self._chosen or known.best, SIGNIFICANT
        shared = SIGNIFICANT / (len(_arms(self._chosen)) - 1)  # by all that this may have become the best of
        if known.limits.why_not(self._chosen):
            return known.best, shared
        simpler = set(without_each(self._chosen))
        worth = {
            one: known.gain(one, self._chosen)[0] + (NO_MATTER if one in simpler else -NO_MATTER)
            for one in fresh.combinations
            if fresh.log_ratio((one, False), (self._chosen, False)) and any(one) and not known.limits.why_not(one)
        }
        best = max(worth, key=worth.__getitem__, default=self._chosen)
        return (best, shared) if worth.get(best, 0.0) > 0 else (self._chosen, SIGNIFICANT)

    def _contributions(self, known: Knowledge, best: Combination, gain: Gain | None) -> list[Contribution]:
        found = []
        for place, level in enumerate(best):
            if not level:
                continue
            alone = with_level(self._baseline, place, level)
            by_itself = known.estimate(alone, self._baseline)
            with_others = known.estimate(best, with_level(best, place, 0))
            if best == alone and gain:  # its gain beside no others, alone and of all is the same
                by_itself = with_others = gain
            name, tie = self._factors[place].name, _is_tie(known, with_level(best, place, 0), best)
            found.append(Contribution(name, level, with_others, by_itself, tie))
        return found

    def _pairs(self, known: Knowledge) -> list[Interaction]:
        """Returns the most certain interactions, as many as are expected to include at most FALSE_PAIRS false ones."""
        mains, found, doubt = self._terms.mains, [], 0.0
        certain = known.posterior.certainty[len(mains) :]
        for index in np.argsort(-certain, kind="stable"):
            doubt += 1 - float(certain[index])
            if doubt > FALSE_PAIRS:
                break
            levels = [mains[place] for place in self._terms.together[index]]
            effects = known.posterior.effects[:, len(mains) + index]
            effect = interval_of(float(effects.mean()), 1.96 * float(effects.std()))
            names = tuple(self._factors[place].name for place, _ in levels)
            found.append(Interaction(names, tuple(level for _, level in levels), effect))
        return found

    def _interactions(self, known: Knowledge, best: Combination) -> list[Interaction]:
        levels = {
            place: best[place] or max(levels, key=lambda level: known.gain(with_level(best, place, level), best)[0])
            for place, choices in enumerate(known.open)
            if (levels := choices[1:])
        }
        found = []
        for (one, level), (other, level_of_other) in combinations(levels.items(), 2):
            first = with_level(self._baseline, one, level)
            effect = known.interaction(
                first, with_level(self._baseline, other, level_of_other), with_level(first, other, level_of_other)
            )
            names = self._factors[one].name, self._factors[other].name
            found.append(Interaction(names, (level, level_of_other), effect))
        return found

    def _ladder(self, known: Knowledge, best: Combination, whole: Gain | None) -> list[Rung]:
        found: list[Rung] = []
        reached, left = self._baseline, {place for place, level in enumerate(best) if level}
        while left:
            steps = {place: with_level(reached, place, best[place]) for place in left}
            place = max(left, key=lambda place: known.gain(steps[place], reached)[0])
            reached = steps[place]
            left.remove(place)
            gain = (None if left else whole) or known.estimate(reached, self._baseline)
            found.append(Rung(self._factors[place].name, best[place], gain))
        return found

    def _dropped(self, known: Knowledge, best: Combination) -> list[Dropped]:
        found = []
        for place, level in self._terms.mains:
            if best[place] == level:
                continue
            with_it, without = with_level(best, place, level), with_level(best, place, 0)
            why = known.limits.level(place, level) or known.limits.why_not(with_it)
            gain = None if known.limits.level(place, level) else known.estimate(with_it, without)
            reason: Reason = "slower" if gain and gain.high < 1 else "no gain"
            if any(best) and _is_tie(known, with_it, best):
                reason = "tie"
            if why:
                reason = "does not run" if why == DOES_NOT_RUN else "memory" if why == MEMORY else "rejected"
            found.append(Dropped(self._factors[place].name, level, reason, gain, why))
        return found

    def noise(self) -> Spread | None:
        """Returns how much equal runs differ; None before any run was made twice."""
        squares, df = spread_of_equals(self._runs)
        return Spread(math.sqrt(squares / df), df) if df else None

    def _tried(self) -> list[TriedCombination]:
        found = []
        for combination in dict.fromkeys(run.combination for run in self._runs):
            results = [run.result for run in self._runs if run.combination == combination]
            rates = [one.rate for one in results if one.rate is not None]
            peaks = [one.peak for one in results if one.peak is not None]
            why = next((one.rejected for one in results if one.rejected), "")
            mean = float(np.mean(rates)) if rates else None
            found.append(TriedCombination(combination, len(results), mean, max(peaks, default=None), why))
        return found


def _is_tie(known: Knowledge, one: Combination, other: Combination) -> bool:
    """Tells whether the runs do not show which of two is faster, and their expected difference is small."""
    ratio = known.estimate(one, other)
    return ratio.low <= 1 <= ratio.high and abs(math.log(ratio.ratio)) < CLOSE


def _neighbours(known: Knowledge, combination: Combination) -> list[Combination]:
    """Returns the combinations that differ from this one in one level and may be kept."""
    levels = ((place, level) for place, some in enumerate(known.open) for level in some if level != combination[place])
    found = (with_level(combination, place, level) for place, level in levels)
    return [one for one in found if not known.limits.why_not(one)]


def _rivals(known: Knowledge, chosen: Combination) -> list[Combination]:
    """Returns the neighbours of the chosen combination that may be faster and have no fewer levels.

    The most promising come first.
    """
    simpler = {chosen, *without_each(chosen)}
    bounds = {one: sum(known.gain(one, chosen)) for one in _neighbours(known, chosen) if one not in simpler}
    return sorted((one for one, bound in bounds.items() if bound > 0), key=bounds.__getitem__, reverse=True)


def _arms(best: Combination) -> list[Combination]:
    """Returns the runs of a round of the confirmation: the best, the baseline, and the best without each level."""
    return list(dict.fromkeys([best, (0,) * len(best), *without_each(best)]))


def _interval(fresh: Confirmation | None, one: Arm, other: Arm, level: float) -> Gain | None:
    found = fresh.log_ratio(one, other) if fresh else None
    return interval_of(found[0], found[1].half_width(level)) if found else None
