"""Whether a faster run still trains the same: its losses are held against the baseline's, and its work is counted.

docs/statistics.md describes the method, and how often it is wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Series, averaged
from gpubench.compare.intervals import Error
from gpubench.distributions import student_t_cdf
from gpubench.runs.stats import mean_error

Claim = Literal["same", "rounding", "type"]
"""What a treatment changes about the computed numbers: nothing, their last digits, or the type that they are computed
in; see `gpubench.settings.field.FromOutside.numbers`. Of several treatments the widest one counts."""

Outcome = Literal["unharmed", "harmed", "unclear", "unknown"]
"""Whether the loss is harmed; "unclear" if the steps and runs do not suffice to tell, "unknown" without losses."""

FEWEST_STEPS = 10
EARLY = 5
"""The first steps, in which rounding errors have not grown yet."""
ROUNDING = {"fp32": 1e-5, "tf32": 2e-3, "amp": 2e-3, "bf16": 1e-2}
"""The relative difference of a loss in EARLY steps that rounding explains, by the precision of the baseline."""
SHARE, MOST_SHARE = 0.05, 0.2
"""The margin as a share of the fall of the baseline's loss, and the largest share to which the spread may raise it."""


@dataclass(frozen=True)
class Curve:
    """The losses of one repeat."""

    losses: Series
    """The loss of each step from the first one of the process on; NaN where it was not finite."""
    seed: int | None = None
    """The seed that gpubench has set; None for a program of the user, whose seed is its own."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a treatment harms the loss. Losses are in the unit of the program's own loss."""

    outcome: Outcome
    reason: str
    """One plain sentence with the figures."""
    change: float | None = None
    """The loss of the candidate minus that of the baseline, as a mean over the second half of the steps."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of `change`."""
    margin: float | None = None
    """The largest change that does not matter."""
    power: float | None = None
    """The probability with which runs like these are found to be unharmed if nothing has changed."""
    runs: int | None = None
    """The runs on each side, with different seeds where they can be set, that tell with a probability of 80 %. It is
    given if the outcome is unclear, unless steps would have to be added."""
    steps: int | None = None
    """The steps of each run that tell. It is given if the outcome is unclear for want of steps."""


def curves_of(run: RunEvidence) -> list[Curve]:
    """Returns the losses of each repeat of a run, as means over its ranks; [] if it has none."""
    found = []
    seed = run.settings.get("seed")
    for window in run.windows:
        ranks = [rows.loss for rows in run.steps.of_repeat(window.repeat).values()]
        if ranks and not np.isnan(ranks[0]).all():
            found.append(Curve(averaged(ranks, np.mean), seed if isinstance(seed, int) else None))
    return found


def judge(
    baseline: Sequence[Curve], candidate: Sequence[Curve], claim: Claim, *, precision: str | None = None
) -> Judgement:
    """Returns whether the candidate's loss is harmed.

    The baseline may have several runs with one seed, which show whether it is deterministic, and with others, which
    show the spread between seeds. `precision` is the type in which the baseline computes, as in the settings; it
    decides how large rounding errors are.
    """
    if not baseline or not candidate:
        return Judgement(outcome="unknown", reason="no loss was recorded, so that nothing is known of it")
    n = min(len(curve.losses) for curve in (*baseline, *candidate))
    ours, theirs = ([Curve(one.losses[:n], one.seed) for one in side] for side in (baseline, candidate))
    if not all(np.isfinite(one.losses).all() for one in ours):
        return Judgement(outcome="unknown", reason="the loss of the baseline itself is not finite")
    for one in theirs:
        if not (finite := np.isfinite(one.losses)).all():
            step = int(np.argmin(finite))
            return Judgement(outcome="harmed", reason=f"its loss is not finite at step {step} (counting from 0)")
    if n < FEWEST_STEPS:
        reason = f"{units.counted(n, 'step')} cannot tell; {FEWEST_STEPS} may"
        return Judgement(outcome="unclear", reason=reason, steps=FEWEST_STEPS)
    pair = _Pair(ours, theirs, ROUNDING.get(precision or "fp32", ROUNDING["fp32"]))
    if claim != "type" and pair.same_at_all_steps:
        reason = f"its losses are the baseline's to rounding in all {n} steps"
        return Judgement(outcome="unharmed", reason=reason, change=pair.change, power=1.0)
    return _by_equivalence(pair)


@dataclass(frozen=True)
class _Pair:
    """The curves of both sides, equally long and finite."""

    ours: Sequence[Curve]
    theirs: Sequence[Curve]
    rounding: float
    """The relative difference of a loss in EARLY steps that rounding explains."""

    @cached_property
    def n(self) -> int:
        return len(self.ours[0].losses)

    @cached_property
    def mean(self) -> Series:
        """The losses of the baseline, as a mean over its runs."""
        return np.asarray(np.mean([one.losses for one in self.ours], axis=0))

    @cached_property
    def fall(self) -> float:
        """How far the baseline's loss falls from the first tenth of the steps to their second half."""
        return float(self.mean[: max(1, self.n // 10)].mean() - self.mean[self.n // 2 :].mean())

    @cached_property
    def seeds(self) -> list[int | None]:
        """The seeds that both sides have."""
        return [seed for seed in dict.fromkeys(one.seed for one in self.ours) if _of(self.theirs, seed)]

    @cached_property
    def reproduces(self) -> bool:
        """Whether the baseline's runs with one seed begin alike. A program that sets no seed does not."""
        groups = [_of(self.ours, seed) for seed in self.seeds]
        return all(np.ptp([one[0] for one in group]) <= self.tolerance[0] for group in groups)

    @cached_property
    def tolerance(self) -> Series:
        """The difference at each step that rounding explains, or that runs of the baseline with one seed have."""
        own = np.zeros(self.n)
        for seed in {one.seed for one in self.ours}:
            group = _of(self.ours, seed)
            own = np.maximum(own, np.ptp(group, axis=0))
        return np.asarray(np.maximum(self.rounding * np.abs(self.mean), 3 * np.maximum.accumulate(own)))

    @cached_property
    def apart(self) -> Series:
        """The largest difference at each step between runs of both sides with one seed; NaN without such runs."""
        found = np.full(self.n, np.nan)
        for seed in self.seeds:
            for one in _of(self.theirs, seed):
                found = np.fmax(found, np.min(np.abs(np.subtract(_of(self.ours, seed), one)), axis=0))
        return found

    @cached_property
    def same_at_all_steps(self) -> bool:
        return bool((self.apart <= self.tolerance).all())

    @cached_property
    def begins_alike(self) -> bool:
        """Whether runs of both sides with one seed have the same loss at the first step, so that they can be paired."""
        return self.reproduces and bool(self.apart[0] <= max(self.tolerance[0], ROUNDING["bf16"] * abs(self.mean[0])))

    @cached_property
    def change(self) -> float:
        return self.change_over(self.n // 2)

    def change_over(self, start: int) -> float:
        """Returns the loss of the candidate minus that of the baseline, as a mean over the steps from `start` on."""
        if self.reproduces and self.seeds:
            return float(np.mean(self.differences(start)))
        return float(np.mean(_late(self.theirs, start)) - np.mean(_late(self.ours, start)))

    def differences(self, start: int) -> Series:
        """Returns the same for each seed that both sides have."""
        return np.array([_mean_of(self.theirs, seed, start) - _mean_of(self.ours, seed, start) for seed in self.seeds])

    def spread(self, start: int) -> Error | None:
        """Returns the standard deviation of the baseline's loss between seeds; None for a single one."""
        seeds = dict.fromkeys(one.seed for one in self.ours)
        values = [_mean_of(self.ours, seed, start) for seed in seeds] if self.reproduces else _late(self.ours, start)
        return Error(float(np.std(values, ddof=1)), len(values) - 1) if len(values) > 1 else None

    def error(self, start: int) -> Error | None:
        """Returns the error of `change_over`; None if these runs do not show it."""
        spread = self.spread(start)
        if not self.reproduces:
            if spread is None:
                return None
            return Error(spread.size * math.sqrt(1 / len(self.ours) + 1 / len(self.theirs)), spread.df)
        found = self.differences(start)
        if len(found) >= 3:
            return Error(float(np.std(found, ddof=1)) / math.sqrt(len(found)), len(found) - 1)
        if len(found) and spread is not None:
            return Error(spread.size * math.sqrt(2 / len(found)), spread.df)
        return self._of_steps(start) if self.begins_alike else None

    def _of_steps(self, start: int) -> Error | None:
        seed = self.seeds[0]
        steps = np.mean(_of(self.theirs, seed), axis=0)[start:] - np.mean(_of(self.ours, seed), axis=0)[start:]
        found = mean_error(steps - steps.mean() + 1)
        return Error(*found) if found else None


def _of(curves: Sequence[Curve], seed: int | None) -> list[Series]:
    return [one.losses for one in curves if one.seed == seed]


def _late(curves: Sequence[Curve], start: int) -> list[float]:
    return [float(one.losses[start:].mean()) for one in curves]


def _mean_of(curves: Sequence[Curve], seed: int | None, start: int) -> float:
    return float(np.mean([losses[start:] for losses in _of(curves, seed)]))


def _by_equivalence(pair: _Pair) -> Judgement:
    half = pair.n // 2
    error, change = pair.error(half), pair.change
    if error is None:
        reason = "one run on each side cannot tell; three with different seeds may"
        return Judgement(outcome="unclear", reason=reason, change=change, runs=3)
    width = error.half_width()
    margin = SHARE * pair.fall
    power = _power(margin, error)
    outcome: Outcome = "unclear"
    if change - width > margin or change + width < -margin:
        outcome = "harmed"
    elif abs(change) + width < margin:
        outcome = "unharmed"
    shares = [units.signed_percent(value / pair.fall) for value in (change, change - width, change + width)]
    reason = (
        f"over the second half of {pair.n} steps its loss differs by {shares[0]} of the baseline's fall "
        f"({shares[1]} to {shares[2]}; up to {units.percent(margin / pair.fall)} does not matter)"
    )
    return Judgement(
        outcome=outcome,
        reason=reason,
        change=change,
        interval=(change - width, change + width),
        margin=margin,
        power=power,
    )


def _power(margin: float, error: Error) -> float:
    """Returns the probability that no change is found to be within the margin."""
    if not error.size:
        return 1.0
    return max(0.0, 2 * student_t_cdf(error.df, margin / error.size - error.half_width() / error.size) - 1)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has done, counted independently of its settings."""

    samples: float | None
    """The samples of one step, as a mean over the steps after the warm-up; None if they are unknown."""
    skipped: int = 0
    """The updates that the gradient scaler has skipped after the warm-up."""
    updated: float | None = None
    """The elements of the parameters that one step updates, at least; None if they were not counted."""
    passes: float | None = None
    """The backward passes of one step, as a mean over all steps; None if they were not counted."""
    flops: float | None = None
    """The model FLOPs of one sample; None if they were not counted."""


def work_of(run: RunEvidence) -> Work:
    """Returns the work of a run, of the repeat that did least."""
    windows = [list(ranks.values()) for window in run.windows if (ranks := run.steps.steady(window))]
    samples = [
        sum(int(rows.counted_samples.sum()) for rows in ranks) / min(len(rows) for rows in ranks) for ranks in windows
    ]
    return Work(
        samples=min(samples, default=None) or None,
        skipped=sum(int(rows.skipped.sum()) for ranks in windows for rows in ranks),
        updated=_least(run, "updated_parameters"),
        passes=_least(run, "backward_passes"),
        flops=_least(run, "model_flops_per_sample"),
    )


def _least(run: RunEvidence, name: str) -> float | None:
    metric = run.metrics.get(name)
    return min(metric.repeats) if metric else None


def less_work(baseline: Work, candidate: Work) -> str:
    """Returns in which way the candidate does less work than the baseline, with figures; "" if it does as much.

    What is unknown on a side is not compared.
    """
    if candidate.skipped > baseline.skipped:
        more = units.counted(candidate.skipped - baseline.skipped, "more update")
        return f"the gradient scaler skipped {more} than in the baseline"
    for name, unit in LESS.items():
        before, after = getattr(baseline, name), getattr(candidate, name)
        if before is not None and after is not None and after < before * (1 - COUNTED_ALIKE):
            return f"{units.count(after)} {unit} instead of {units.count(before)}"
    return ""


COUNTED_ALIKE = 1e-3
"""The share by which two counts of the same work may differ, such as those of FLOPs that fusion leaves out."""
LESS = {
    "samples": "samples a step",
    "updated": "elements of parameters updated a step",
    "passes": "backward passes a step",
    "flops": "FLOPs a sample",
}
"""The counts that must not be smaller, in words."""
