"""Judges the numbers that programs print and that the user watches, such as the accuracy of an evaluation."""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Literal

from gpubench import units
from gpubench.compare.losses import Margin
from gpubench.compare.result import LossFound, LossOutcome
from gpubench.distributions import student_t_quantile

LAST = 4
"""The final value of a repeat is the mean over the last of so many parts of its values."""
LOWER = ("loss", "err", "ppl", "perplexity", "mse", "mae", "fid", "wer", "nll")
HIGHER = ("acc", "f1", "auc", "bleu", "score", "iou", "psnr", "precision", "recall", "reward")
"""Parts of names of numbers that are better if they are lower, or higher."""


def better(name: str) -> Literal["lower", "higher"] | None:
    """Returns in which direction a number is better, by its name; None if that is not known."""
    lowered = name.lower()
    if any(part in lowered for part in LOWER):
        return "lower"
    return "higher" if any(part in lowered for part in HIGHER) else None


def judge(
    name: str, baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], margin: Margin
) -> LossFound:
    """Returns whether the final values of the candidate are within the margin of those of the baseline, or better.

    Each side has the values of each repeat. The interval is Welch's over the repeats. A number whose better direction
    is not known is harmed by a change in either.
    """
    ours, theirs = ([_final(values) for values in side if values] for side in (baseline, candidate))
    if not ours or not theirs:
        return LossFound(name=name, outcome="unknown", reason="it was not printed on both sides")
    change = fmean(theirs) - fmean(ours)
    allowed = margin.size * abs(fmean(ours)) if margin.is_share else margin.size
    width = _half_width(ours, theirs)
    said = f"its final value is {units.digits(fmean(theirs), 4)}, and {units.digits(fmean(ours), 4)} in the baseline"
    if width is None:
        equal = not change and not margin.is_set
        reason = f"{said}; one repeat a side does not tell how much it varies"
        return LossFound(name=name, outcome="unharmed" if equal else "unclear", reason=reason, change=change)
    outcome = _outcome(better(name), change, width, allowed)
    relation = {"harmed": "more than", "unharmed": "not worse by"}.get(outcome, "not certainly within")
    return LossFound(
        name=name,
        outcome=outcome,
        reason=f"{said}, {relation} the margin of {units.digits(allowed)}",
        change=change,
        interval=(change - width, change + width),
        margin=allowed,
    )


def _outcome(direction: str | None, change: float, width: float, allowed: float) -> LossOutcome:
    worse = [sign * change for sign, word in ((1, "lower"), (-1, "higher")) if direction in (word, None)]
    if any(one - width > allowed for one in worse):
        return "harmed"
    return "unharmed" if all(one + width <= allowed for one in worse) else "unclear"


def _final(values: Sequence[float]) -> float:
    return fmean(values[-max(1, len(values) // LAST) :])


def _half_width(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Returns half of the 95 % interval of the difference of the means; None if a side has one value."""
    if min(len(ours), len(theirs)) < 2:
        return None
    parts = [variance(side) / len(side) for side in (ours, theirs)]
    if not (total := math.fsum(parts)):
        return 0.0
    freedom = total**2 / math.fsum(part**2 / (len(side) - 1) for part, side in zip(parts, (ours, theirs), strict=True))
    return student_t_quantile(freedom, 0.975) * math.sqrt(total)
