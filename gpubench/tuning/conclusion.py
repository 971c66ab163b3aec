"""What a search says: the runs to make next, its plan, and what follows from the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from gpubench.gain import Gain
from gpubench.tuning.combination import Combination, LevelNumber
from gpubench.tuning.knowledge import Stage

Reason = Literal["slower", "tie", "no gain", "does not run", "rejected", "memory"]
"""Why a level is not kept.

With a tie the result would be as fast, as far as the runs tell: the interval of the difference contains 0, and the
expected difference is below 1 %.
"""


@dataclass(frozen=True)
class Factor:
    """A treatment with its number of levels."""

    name: str
    levels: int = 2


@dataclass(frozen=True)
class NextRuns:
    """Runs to make next, in this order."""

    stage: Stage
    runs: Sequence[Combination]
    why: str
    """One plain sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """The runs of each stage, those made and those still to come."""

    runs: Mapping[Stage, int]
    """Expected number of runs of each stage, in all."""
    done: int
    """Runs made so far."""
    most: int
    """The number of runs that is never exceeded."""

    @property
    def total(self) -> int:
        """The expected number of runs."""
        return sum(self.runs.values())


@dataclass(frozen=True)
class Standing:
    """What is known so far of one level of a factor: its gain beside the others of the best combination so far."""

    factor: str
    level: LevelNumber
    gain: Gain | None
    """None before the first result, and for a level that does not run."""
    kept: bool
    """Whether it is part of the best combination so far."""
    excluded: str = ""
    """Why it cannot be kept: it does not run, is rejected, or needs too much memory."""


@dataclass(frozen=True)
class Contribution:
    """What one kept level contributes."""

    factor: str
    level: LevelNumber
    with_others: Gain | None
    """Its gain with all other kept levels: best against best without it."""
    alone: Gain | None
    """Its gain alone against the baseline."""
    tie: bool = False
    """Whether the result would be as fast without it, as far as the runs tell."""


@dataclass(frozen=True)
class Interaction:
    """What levels of different factors do together beyond what they do apart.

    Of two, it is the gain of both divided by the product of their own gains; of three, what is left beyond the gains of
    each and the interactions of each two.
    """

    factors: tuple[str, ...]
    levels: Combination
    effect: Gain


@dataclass(frozen=True)
class Rung:
    """A step of the way from the baseline to the best combination: one more of its levels."""

    factor: str
    level: LevelNumber
    gain: Gain
    """The gain over the baseline with this level and those of the steps before it, from all runs of the search.

    At the last step it is the gain of the conclusion, where there is one.
    """


@dataclass(frozen=True)
class Dropped:
    """A factor of which no level is kept, or another level than this one."""

    factor: str
    level: LevelNumber
    reason: Reason
    gain: Gain | None
    """Its estimated gain beside the kept levels; None if it does not run."""
    detail: str = ""
    """The reason of a rejection, in the words of who rejected it."""


@dataclass(frozen=True)
class TriedCombination:
    """A combination with the results of its runs."""

    combination: Combination
    runs: Annotated[int, Meta(ge=1, le=10**6)]
    rate: Annotated[float, Meta(ge=-100, le=100)] | None
    """Mean of the logarithms of the throughput; None if it does not run."""
    peak: Annotated[float, Meta(ge=0, le=1 << 63)] | None
    """The largest peak memory in bytes."""
    rejected: str


@dataclass(frozen=True)
class Spread:
    """The standard deviation of the logarithm of the throughput between equal runs."""

    sigma: Annotated[float, Meta(ge=0, le=100)]
    df: Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Conclusion:
    """What follows from the results."""

    best: Combination
    proved: bool
    """Whether `best` is faster than the baseline, by a two-sided test at 95 % on the confirmation's runs alone."""
    gain: Gain | None
    """best / baseline, from the confirmation's runs alone; None without a confirmation."""
    contributions: Sequence[Contribution]
    pairs: Sequence[Interaction]
    """The established interactions."""
    interactions: Sequence[Interaction]
    """What is known of the interaction of any two factors, at the kept level of each, or else its best one."""
    ladder: Sequence[Rung]
    """The way from the baseline to the best combination, the largest gain first."""
    dropped: Sequence[Dropped]
    tried: Sequence[TriedCombination]
    noise: Spread | None

    @property
    def established(self) -> Sequence[Contribution]:
        """The kept levels whose own part of the gain is established. A single one is as established as the gain."""
        if len(self.contributions) == 1:
            return self.contributions
        return [one for one in self.contributions if one.with_others and one.with_others.low > 1]
