"""Judges whether a run still trains the same, by comparing its losses with the baseline's.

docs/same-work.md describes the method, and how often it is wrong.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Series, averaged
from gpubench.compare.intervals import MOST_REPEATS, POWER, SIGNIFICANT, Error, combined
from gpubench.compare.warnings import fell_apart, scatter
from gpubench.distributions import student_t_cdf, student_t_quantile
from gpubench.runs.stats import mean_error

Claim = Literal["same", "rounding", "type"]
"""What a treatment changes about the computed numbers: nothing, their last digits, or the type that they are computed
in. Of several treatments the widest one counts, which is the last one in CLAIMS."""
CLAIMS: Sequence[Claim] = ("same", "rounding", "type")

Outcome = Literal["unharmed", "harmed", "unclear", "unknown"]
"""Whether the loss is harmed; "unclear" if the steps and runs do not suffice to tell, "unknown" without losses."""

FEWEST_STEPS = 10
EARLY = 5
"""The first steps, in which rounding errors have not grown much yet."""
ROUNDING = {"fp32": 2e-5, "tf32": 5e-4, "amp": 5e-4, "bf16": 2e-3}
"""The relative difference of the first loss that rounding explains, by the type in which the baseline computes. On a
GPU a program computes convolutions in TF32 unless it says otherwise, so that TF32 counts if the type is not known."""
SMALLEST = 1e-6
"""The relative difference of losses that is none in any type."""
GROWTH = 2.0
"""The factor by which that difference may grow with each of the EARLY steps."""
ALIKE = 0.07
"""The largest difference of first losses on the same data, by the standard deviation of the loss of a step."""
LEAST, MOST = 0.0025, 0.05
"""The bounds of a margin that the user has not set, as shares of the fall of the baseline's loss: 1 % of a loss that
goes to 0 is too little to matter, and 1 % of one that has hardly begun to fall is all that the training has done."""
CHANCE = 0.02
"""The share of the fall by which runs with one seed can come to differ by rounding alone."""
TAIL, SHORTEST_TAIL = 8, 8
"""The part of the steps at the end that is judged too: one in TAIL, and at least SHORTEST_TAIL steps."""
END = 2.0
"""The factor on CHANCE at the end, which has about a quarter of the steps of the second half."""
RERUNS = 3.0
"""The factor by which a run may differ more than the baseline's own runs with its seed, if those differ."""
FEW = 3
"""Seeds from which on their spread is used."""
LEARNS = 3.0
"""The errors by which a loss has to fall to show that the baseline learns."""
CORRELATED = 1.5
"""The factor by which correlated steps increase the error of a mean, for the check that the baseline learns."""
END_PART, SHORTEST_END, RISE, SURE = 20, 3, 0.1, 6.0
"""A loss diverges if it rises in the last of so many parts of the steps, and at least so many steps, by more than this
share of the baseline's fall and so many errors."""
SEED = "with the same seed in each run, by --seed 0 or set in the program, one may tell"
"""What makes runs of a program comparable that sets no seed."""
MOST_LONGER = 10.0
"""The largest factor on the number of steps that is proposed."""


@dataclass(frozen=True)
class LossCurve:
    """The losses of one repeat."""

    losses: Series
    """The loss of each step from the first one of the process on: NaN where it is unknown, infinite if not finite."""
    seed: int | None = None
    """The seed that gpubench has set; None for a program of the user, whose seed is its own."""
    samples: float = 1.0
    """The samples of a step. Losses are compared after equally many samples."""


@dataclass(frozen=True)
class Margin:
    """The largest change of the final loss that does not matter."""

    size: Annotated[float, Meta(ge=0, le=1e70)] = 0.01
    is_share: bool = True
    """Whether `size` is a share of the baseline's final loss; otherwise it has the unit of the loss."""
    is_set: bool = False
    """Whether the user has set it."""

    def within(self, final: float, fall: float) -> float:
        """Returns the margin in the unit of the loss, for a baseline with this final loss that fell by `fall`."""
        wanted = self.size * abs(final) if self.is_share else self.size
        return wanted if self.is_set else min(max(wanted, LEAST * fall), MOST * fall)


DEFAULT = Margin()


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a treatment harms the loss. Losses are in the unit of the program's own loss."""

    outcome: Outcome
    reason: str
    """One plain sentence with the figures, without a capital letter and a full stop."""
    change: float | None = None
    """The loss of the candidate minus that of the baseline, as a mean over the second half of the steps."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of `change`."""
    margin: float | None = None
    """The largest change that does not matter; None if the baseline's loss does not fall measurably."""
    power: float | None = None
    """The probability with which runs like these are found to be unharmed if nothing has changed."""
    runs: int | None = None
    """The number of runs on each side for a `power` of 80 %, with different seeds where they can be set.

    It is given if the outcome is unclear and more runs can decide.
    """
    steps: int | None = None
    """The steps of each run that may tell. It is given if the outcome is unclear for want of steps."""


def curves_of(run: RunEvidence) -> list[LossCurve]:
    """Returns the losses of each measured repeat of a run, as means over its ranks; [] if it has none."""
    found = []
    seed = run.settings.get("seed")
    for window in run.windows:
        ranks = list(run.steps.of_repeat(window.repeat).values())
        if ranks and not np.isnan(ranks[0].loss).all():
            losses = averaged([rows.loss for rows in ranks], np.mean)
            samples = sum(float(np.median(rows.samples)) for rows in ranks)
            found.append(LossCurve(losses, seed if isinstance(seed, int) else None, samples or 1.0))
    return found


def judge(
    baseline: Sequence[LossCurve],
    candidate: Sequence[LossCurve],
    claim: Claim,
    *,
    precision: str | None = None,
    margin: Margin = DEFAULT,
) -> Judgement:
    """Returns whether the candidate's loss is harmed, by the steps whose loss is known in all runs.

    The baseline may have several runs with one seed, which show whether it is deterministic, and with others, which
    show the spread between seeds. `precision` is the type in which the baseline computes, as in the settings, or None;
    it decides how large rounding errors are.
    """
    if not baseline or not candidate:
        return Judgement(outcome="unknown", reason="no loss was recorded")
    most = max(one.samples for one in (*baseline, *candidate))
    n = min(len(_after(one, most)) for one in (*baseline, *candidate))
    ours, theirs = ([LossCurve(_after(one, most)[:n], one.seed) for one in side] for side in (baseline, candidate))
    if any(np.isinf(one.losses).any() for one in ours):
        return Judgement(outcome="unknown", reason="the loss of the baseline itself is not finite")
    for one in theirs:
        if (infinite := np.isinf(one.losses)).any():
            step = int(np.argmax(infinite))
            return Judgement(outcome="harmed", reason=f"its loss is not finite at step {step} (counting from 0)")
    places = np.flatnonzero(np.isfinite([one.losses for one in (*ours, *theirs)]).all(axis=0))
    if n and not len(places):
        return Judgement(outcome="unknown", reason="no step has a known loss in all runs")
    if len(places) < FEWEST_STEPS:
        known = units.counted(len(places), "step") + (" with a known loss" if len(places) < n else "")
        steps = math.ceil(FEWEST_STEPS * n / len(places)) if n else FEWEST_STEPS
        return Judgement(outcome="unclear", reason=f"{known} cannot tell whether the loss is harmed", steps=steps)
    ours, theirs = ([LossCurve(one.losses[places], one.seed) for one in side] for side in (ours, theirs))
    sides = _Sides(ours, theirs, places, ROUNDING.get(precision or "tf32", ROUNDING["tf32"]))
    return _by_rounding(sides, claim) or _by_divergence(sides) or _by_equivalence(sides, margin)


def _after(curve: LossCurve, samples: float) -> Series:
    """Returns the mean of the known losses over so many samples each."""
    steps = max(1, round(samples / curve.samples))
    whole = len(curve.losses) // steps * steps
    losses = curve.losses[:whole].reshape(-1, steps)
    unknown = np.isnan(losses)
    known = np.count_nonzero(~unknown, axis=1)
    sums = np.where(unknown, 0.0, losses).sum(axis=1)
    return np.asarray(np.where(known > 0, sums / np.maximum(known, 1), np.nan))


@dataclass(frozen=True)
class _Change:
    """The loss of the candidate minus that of the baseline over some steps."""

    estimate: float
    error: Error | None
    """None if it is unknown."""
    each: float = 0.0
    """The error that a single pair of runs would have or, if runs cannot be paired, the spread of single runs."""
    paired: bool = True

    @property
    def width(self) -> float:
        return self.error.half_width() if self.error else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        return self.estimate - self.width, self.estimate + self.width

    def beyond(self, margin: float) -> bool:
        """Returns whether the change is surely larger. Half of the level is for each of two parts of the steps."""
        return self.error is not None and abs(self.estimate) - self.error.half_width(SIGNIFICANT / 2) > margin

    def within(self, margin: float) -> bool:
        return abs(self.estimate) + self.width < margin

    def power(self, margin: float) -> float:
        """Returns the probability that no change is found to be within the margin."""
        if not self.error or not self.error.size:
            return 1.0 if self.error else 0.0
        return max(0.0, 2 * student_t_cdf(self.error.df, (margin - self.width) / self.error.size) - 1)

    def runs_for(self, margin: float) -> int | None:
        """Returns the runs on each side with which `power` is POWER; None for more than MOST_REPEATS."""

        def suffice(runs: int) -> bool:
            df = runs - 1 if self.paired else 2 * runs - 2
            error = Error(self.each * math.sqrt((1 if self.paired else 2) / runs), df)
            return _Change(0.0, error).power(margin) >= POWER

        runs = bisect_left(range(MOST_REPEATS + 1), True, lo=FEW, key=suffice)
        return runs if runs <= MOST_REPEATS else None

    def longer(self, margin: float) -> float:
        """Returns the factor on the number of steps with which `power` is POWER, if the error falls as their root."""
        if not self.error:
            return math.inf
        found = self.width + student_t_quantile(self.error.df, (1 + POWER) / 2) * self.error.size
        return max(1.0, found / margin) ** 2


@dataclass(frozen=True)
class _Sides:
    """The curves of both sides, equally long and finite."""

    ours: Sequence[LossCurve]
    theirs: Sequence[LossCurve]
    places: NDArray[np.intp]
    """The numbers of the steps, some of which are missing where their loss is unknown."""
    rounding: float
    """The relative difference of the first loss that rounding explains."""

    @cached_property
    def n(self) -> int:
        return len(self.ours[0].losses)

    @property
    def half(self) -> int:
        return self.n // 2

    @cached_property
    def mean(self) -> Series:
        """The losses of the baseline, as a mean over its runs."""
        return np.asarray(np.mean([one.losses for one in self.ours], axis=0))

    @cached_property
    def own_seeds(self) -> list[int | None]:
        """The seeds of the baseline."""
        return list(dict.fromkeys(one.seed for one in self.ours))

    @cached_property
    def seeds(self) -> list[int | None]:
        """The seeds that both sides have."""
        return [seed for seed in self.own_seeds if _of(self.theirs, seed)]

    @cached_property
    def scatter(self) -> float:
        """The standard deviation of the loss of a step of the baseline."""
        return float(np.mean([scatter(one.losses[self.half :]) for one in self.ours]))

    @cached_property
    def fall(self) -> float:
        """How far the baseline's loss falls from the first tenth of the steps to their second half."""
        return float(self.mean[: max(1, self.n // 10)].mean() - self.mean[self.half :].mean())

    @cached_property
    def fall_error(self) -> float:
        """The error of the fall. A fall that is not LEARNS times as large does not show that the baseline learns."""
        error = CORRELATED * self.scatter * math.sqrt(1 / max(1, self.n // 10) + 1 / (self.n - self.half))
        return error / math.sqrt(len(self.own_seeds))

    @property
    def scale(self) -> float:
        """The fall or, if it does not show that the baseline learns, the smallest one that would."""
        return max(self.fall, LEARNS * self.fall_error)

    @cached_property
    def tolerance(self) -> Series:
        """The difference at each step that rounding explains."""
        return self.grown(self.rounding)

    def grown(self, rounding: float) -> Series:
        """Returns the difference at each step from a relative difference of the first loss."""
        return np.asarray(rounding * GROWTH ** np.minimum(self.places, EARLY - 1) * np.abs(self.mean))

    @cached_property
    def own(self) -> Series:
        """The largest difference until each step between runs of the baseline with one seed."""
        found = np.max([np.ptp(_of(self.ours, seed), axis=0) for seed in self.own_seeds], axis=0)
        return np.asarray(np.maximum.accumulate(found))

    @cached_property
    def apart(self) -> Series:
        """By step, the largest distance of a candidate's run from the nearest run of the baseline with its seed."""
        runs = [(_of(self.ours, seed), one) for seed in self.seeds for one in _of(self.theirs, seed)]
        return np.asarray(np.max([np.min(np.abs(np.subtract(ours, one)), axis=0) for ours, one in runs], axis=0))

    @cached_property
    def paired(self) -> bool:
        """Whether runs with one seed get the same data in the same order, so that its noise is common to both sides.

        Otherwise their first losses differ as those of two steps do.
        """
        groups = [[one[0] for one in (*_of(self.ours, seed), *_of(self.theirs, seed))] for seed in self.seeds]
        noise = float(np.mean([scatter(one.losses) for one in self.ours]))
        return bool(groups) and max(map(np.ptp, groups)) <= max(ALIKE * noise, self.tolerance[0])

    def change(self, start: int, *, harm: bool = False) -> _Change:
        """Returns the change as a mean over the steps from `start` on, with the error for any seed.

        A few pairs of runs can agree by chance, so that the error is at least that of the steps inside them. With
        `harm` it is that of the steps alone, because harm in the runs at hand is enough, however different they are.
        """
        theirs, ours = ([self._mean(side, seed, start) for seed in self.seeds] for side in (self.theirs, self.ours))
        pairs = np.subtract(theirs, ours)
        if len(pairs) < FEW and not self.paired:
            return _of_runs(self._independent(self.ours, start), self._independent(self.theirs, start))
        error = self._of_steps(start, drifts=harm) if self.paired else None
        if len(pairs) >= FEW and not (error and harm):
            between = Error(float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), len(pairs) - 1)
            error = max(between, error, key=Error.half_width) if error else between
        return _Change(float(pairs.mean()), error, error.size * math.sqrt(len(pairs)) if error else 0.0)

    def spread(self, start: int) -> float | None:
        """Returns the standard deviation of the baseline's loss between seeds; None if there are fewer than FEW."""
        values = self._independent(self.ours, start)
        return float(values.std(ddof=1)) if len(values) >= FEW else None

    def _independent(self, curves: Sequence[LossCurve], start: int) -> Series:
        """Returns the mean loss of each seed or, where one seed does not reproduce the losses, of each run."""
        seeds = list(dict.fromkeys(one.seed for one in curves))
        if len(seeds) > 1 or self.paired:
            return np.array([self._mean(curves, seed, start) for seed in seeds])
        return np.array([one.losses[start:].mean() for one in curves])

    def _mean(self, curves: Sequence[LossCurve], seed: int | None, start: int) -> float:
        return float(np.mean([losses[start:] for losses in _of(curves, seed)]))

    def _of_steps(self, start: int, *, drifts: bool) -> Error | None:
        """Returns the error of the mean difference from its steps, in which the noise of the data cancels.

        `drifts` means that a steady drift, as towards a run that learns less, is not part of the error.
        """
        found = []
        for seed in self.seeds:
            steps = np.mean(_of(self.theirs, seed), axis=0)[start:] - np.mean(_of(self.ours, seed), axis=0)[start:]
            place = np.arange(len(steps)) - (len(steps) - 1) / 2
            drift = float(place @ steps / (place @ place)) * place if drifts else 0.0
            if (error := mean_error(steps - steps.mean() - drift + 1)) is None:
                return None
            found.append(Error(error[0] / len(self.seeds), error[1]))
        return combined(*found)


def _of(curves: Sequence[LossCurve], seed: int | None) -> list[Series]:
    return [one.losses for one in curves if one.seed == seed]


def _of_runs(ours: Series, theirs: Series) -> _Change:
    """Returns the change of independent runs, with an error from their pooled spread."""
    estimate = float(theirs.mean() - ours.mean())
    df = len(ours) + len(theirs) - 2
    squares = float(sum(((side - side.mean()) ** 2).sum() for side in (ours, theirs)))
    if not df or not squares:
        return _Change(estimate, None, paired=False)
    each = math.sqrt(squares / df)
    return _Change(estimate, Error(each * math.sqrt(1 / len(ours) + 1 / len(theirs)), df), each, paired=False)


def _by_rounding(sides: _Sides, claim: Claim) -> Judgement | None:
    """Judges a treatment by single steps; None if they do not decide.

    Losses that are the same up to the rounding of fp32 at all steps are unharmed, whether they fall or not. Rounding
    errors grow with every update, so that after many steps the losses of a sound treatment differ too, and are judged
    by their means.
    But if the numbers are claimed to be the same, a first loss that is the same, and others soon after it that are not,
    come from another update of the parameters. (A first loss that is not the same can come from other random numbers,
    such as those of dropout in another kernel.)
    """
    if not sides.paired:
        return None
    least = SMALLEST * np.abs(sides.mean)
    if (sides.apart <= np.maximum(least, np.minimum(sides.grown(ROUNDING["fp32"]), CHANCE * sides.fall))).all():
        reason = f"its losses are those of the baseline in all {sides.n} steps, up to rounding"
        return Judgement(outcome="unharmed", reason=reason, change=sides.change(sides.half).estimate, power=1.0)
    if claim == "type":
        return None
    allowed = np.maximum(sides.tolerance, RERUNS * sides.own)
    over = np.flatnonzero(sides.apart[:EARLY] > allowed[:EARLY])
    if not len(over) or not over[0]:
        return None
    first = int(over[0])
    found, most = (units.percent(float(one[first] / abs(sides.mean[first]))) for one in (sides.apart, allowed))
    where = f"at step {sides.places[first]} (counting from 0)"
    reason = f"its loss differs by {found} {where}, and rounding explains at most {most}"
    return Judgement(outcome="harmed", reason=reason)


def _by_divergence(sides: _Sides) -> Judgement | None:
    """Judges a loss that rises at the end while that of the baseline does not; None for others.

    One run is enough, because a divergence begins at another step in each run, so that their means hardly show it.
    """
    last = max(SHORTEST_END, sides.n // END_PART)
    # Where both sides get the same data, the noise of the data cancels.
    common = {one.seed: one.losses for one in sides.ours} if sides.paired else {}
    for one in sides.theirs:
        losses = one.losses - common.get(one.seed, sides.mean)
        noise = scatter(losses[sides.half :]) * math.sqrt(1 / last + 1 / (sides.n - sides.half - last))
        rises = [float(each[-last:].mean() - each[sides.half : -last].mean()) for each in (one.losses, losses)]
        if min(rises) > RISE * sides.scale and rises[1] > SURE * noise:
            share = units.percent(rises[0] / sides.scale)
            reason = (
                f"it diverges: in the last {last} of {sides.n} steps its loss rises by {share} of the baseline's fall"
            )
            return Judgement(outcome="harmed", reason=reason, change=sides.change(sides.half).estimate)
    return None


def _by_equivalence(sides: _Sides, margin: Margin) -> Judgement:
    """Judges a treatment by the means of the losses over the second half of the steps, and over their end.

    Both have to be equivalent. One that differs by more than its margin is harm, also if it is lower: then something
    else is trained, or on other data. Fewer than FEW pairs do not show how far runs drift apart by rounding alone, so
    that they have to differ by more than CHANCE, or than seeds do. Of fewer a lower loss has to be lower in both parts:
    an edit that draws other random numbers, such as those of dropout in another memory format, may end lower by chance.
    """
    last = min(sides.half, max(SHORTEST_TAIL, sides.n // TAIL))
    starts = (sides.half, sides.n - last)
    middle, end = (sides.change(start) for start in starts)
    if middle.error is None or end.error is None:
        return _by_fall(sides, middle)
    scale = sides.scale
    learns = sides.fall >= scale
    final = float(sides.mean[-last:].mean())
    allowed = margin.within(final, scale) if learns else scale
    by_chance = min(max(sides.spread(sides.half) or 0.0, CHANCE * scale), MOST * scale) if learns else scale
    wheres = (f"in the second half of {sides.n} steps", f"in the last {last} of {sides.n} steps")
    judged = list(zip((middle, end), (allowed, allowed), wheres, strict=True))
    sure = [sides.change(start, harm=True) for start in starts]
    least = [max(allowed, factor * by_chance) for factor in ((1.0, END) if learns else (1.0, 1.0))]
    harm = [one for one in zip(sure, least, wheres, strict=True) if one[0].beyond(one[1])]
    enough = not middle.paired or len(sides.seeds) >= FEW
    if not enough and len(harm) == 1 and harm[0][0].estimate < 0:
        harm = []
    if not harm and enough:
        harm = [one for one in judged if one[0].beyond(one[1])]
    doubt = [one for one in judged if not one[0].within(one[1])]
    if not learns and not harm:
        return _too_short(sides, middle)
    change, _, where = (harm or doubt or judged)[0]
    relation = "more than" if harm else "not certainly within" if doubt else "within"
    judgement = Judgement(
        outcome="harmed" if harm else "unclear" if doubt else "unharmed",
        reason=f"{where} its loss {_in_words(change)}, {relation} {_margin_in_words(allowed, final, scale, learns)}",
        change=middle.estimate,
        interval=(sure[0] if harm else middle).interval,
        margin=allowed if learns else None,
        power=min(one.power(most) for one, most, _ in judged) if learns else 0.0,
    )
    return _with_needs(sides, judgement, judged) if doubt and not harm else judgement


def _by_fall(sides: _Sides, change: _Change) -> Judgement:
    """Judges runs whose error is unknown: only a loss that falls while the other one does not can be told."""
    theirs = np.asarray(np.mean([one.losses for one in sides.theirs], axis=0))
    if fell_apart(sides.mean, theirs):
        reason = f"over {sides.n} steps its loss goes {_way(theirs)}, and that of the baseline {_way(sides.mean)}"
        return Judgement(outcome="harmed", reason=reason, change=change.estimate)
    reason = f"it and the baseline use different data or random numbers, so each side needs {FEW} runs or more; {SEED}"
    return Judgement(outcome="unclear", reason=reason, change=change.estimate, power=0.0, runs=FEW)


def _too_short(sides: _Sides, change: _Change) -> Judgement:
    """Judges runs in which the baseline's loss does not fall. The fall is taken to go on as it began."""
    steps = _longer(sides.n, (LEARNS * sides.fall_error / max(sides.fall, sides.fall_error / 2)) ** (2 / 3))
    reason = f"the loss of the baseline itself does not fall measurably in {sides.n} steps"
    return Judgement(
        outcome="unclear",
        reason=f"{reason}; {steps} may be enough to tell",
        change=change.estimate,
        interval=change.interval,
        power=0.0,
        steps=steps,
    )


def _with_needs(sides: _Sides, judgement: Judgement, judged: Sequence[tuple[_Change, float, str]]) -> Judgement:
    """Adds the runs that would tell or, if each run is the same as the others, the steps."""
    if judged[0][0].paired and sides.own_seeds == [None]:
        steps = _longer(sides.n, max(change.longer(most) for change, most, _ in judged))
        return replace(judgement, reason=f"{judgement.reason}; {steps} steps may tell", steps=steps)
    needs = [change.runs_for(most) for change, most, _ in judged]
    known = [runs for runs in needs if runs is not None]
    if len(known) < len(needs):
        steps = _longer(sides.n, MOST_LONGER)
        return replace(judgement, reason=f"{judgement.reason}; {steps} steps may tell", steps=steps)
    return replace(judgement, reason=f"{judgement.reason}; {max(known)} runs on each side would tell", runs=max(known))


def _longer(steps: int, factor: float) -> int:
    """Returns a larger number of steps, at most MOST_LONGER times as many, rounded up to two digits."""
    wanted = steps * min(max(factor, 1.1), MOST_LONGER)
    unit: int = 10 ** max(0, math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / unit) * unit


def _in_words(change: _Change) -> str:
    """Returns a change with signs where its interval has both, and else as "higher by 0.2 (0.1 to 0.3)"."""
    low, high = change.interval
    if low < 0 < high:
        return f"differs by {change.estimate:+.2g} (95 % interval {low:+.2g} to {high:+.2g})"
    side, (least, most) = "higher" if change.estimate >= 0 else "lower", sorted(map(abs, (low, high)))
    return f"is {side} by {abs(change.estimate):.2g} (95 % interval {least:.2g} to {most:.2g})"


def _margin_in_words(margin: float, final: float, fall: float, learns: bool) -> str:
    if not learns:
        return f"the {margin:.2g} that the loss of the baseline can have fallen by"
    if margin <= abs(final):
        return f"the margin of {margin:.2g}, {units.percent(margin / abs(final))} of the final loss"
    return f"the margin of {margin:.2g}, {units.percent(margin / fall)} of the fall of the loss"


def _way(losses: Series) -> str:
    return f"from {losses[0]:.3g} to {losses[len(losses) // 2 :].mean():.3g}"
