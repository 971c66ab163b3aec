"""Assigns evaluations to ranks, and computes the bounds of an assignment.

An evaluation is one call of the denoiser on one micro-batch; a sample takes `total` of them, one after another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench import units
from gpubench.errors import SettingsError
from gpubench.settings.sections import ProfilingSettings

Range = tuple[int, int]

SETTING = "pipeline.split"
EVEN = "even"
BALANCED = "balanced"


def assign(total: int, world_size: int, split: str) -> list[Range]:
    """Returns the evaluations [start, end) of each rank. Every rank has at least one.

    even: total // world_size each, and the last rank has the remainder too. balanced: the first ranks have one more
    each until the remainder is distributed. Counts separated by commas apply as given. Raises SettingsError for an
    impossible split.
    """
    if world_size > total:
        raise SettingsError(
            f"{world_size} ranks for {_evaluations(total)}: some would have nothing to do",
            f"give --world-size {total} or fewer, or more --steps",
        )
    each, remainder = divmod(total, world_size)
    if split == EVEN:
        counts = [each] * (world_size - 1) + [each + remainder]
    elif split == BALANCED:
        counts = [each + (rank < remainder) for rank in range(world_size)]
    else:
        counts = _parse(split, total, world_size)
    ends = [sum(counts[: rank + 1]) for rank in range(world_size)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def check(split: str, world_size: int) -> None:
    """Raises SettingsError for a split that is invalid for any number of evaluations."""
    if split not in (EVEN, BALANCED):
        example = ",".join(["10"] * world_size)
        _counts(split, world_size, f"for example {example}; the counts must add up to the scheduler's evaluations")


def refuse_short(profiling: ProfilingSettings, ranges: Sequence[Range], batches: int) -> None:
    """Raises SettingsError if a profiled rank has fewer evaluations than the profiler's schedule needs."""
    if not profiling.enabled:
        return
    start, end = min(ranges, key=lambda one: one[1] - one[0]) if profiling.all_ranks else ranges[0]
    source = f"{end - start} evaluations of {batches} micro-batches"
    if short := profiling.shortfall(batches * (end - start), source):
        hint = "raise --samples or --steps, or lower profiling.wait or profiling.repeat"
        raise SettingsError(short, hint, keys=profiling.SCHEDULE)


def _parse(split: str, total: int, world_size: int) -> list[int]:
    balanced = Assignment(tuple(assign(total, world_size, BALANCED))).split
    hint = f"for example --split {balanced}, or even, or balanced"
    counts = _counts(split, world_size, hint)
    if sum(counts) != total:
        arithmetic = " + ".join(map(str, counts))
        message = f"pipeline.split: {arithmetic} = {sum(counts)}, but the scheduler makes {_evaluations(total)}"
        raise SettingsError(message, hint, keys=[SETTING])
    return counts


def _counts(split: str, world_size: int, hint: str) -> list[int]:
    try:
        counts = [int(count) for count in split.split(",")]
    except ValueError:
        message = f"pipeline.split = {split!r} is not even, balanced or counts like 13,13,12"
        raise SettingsError(message, hint, keys=[SETTING]) from None
    if len(counts) != world_size:
        have = f"{units.counted(len(counts), 'count')} for {units.counted(world_size, 'rank')}"
        raise SettingsError(f"pipeline.split = {split!r} has {have}", hint, keys=[SETTING])
    if min(counts) < 1:
        message = f"pipeline.split = {split!r} gives rank {counts.index(min(counts))} nothing to do"
        raise SettingsError(message, hint, keys=[SETTING])
    return counts


@dataclass(frozen=True)
class Assignment:
    """The evaluations of all ranks, and the bounds that follow for equally fast ranks."""

    ranges: tuple[Range, ...]

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in self.ranges]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def largest(self) -> int:
        """The number of evaluations of the bottleneck."""
        return max(self.counts)

    @property
    def bottleneck(self) -> int:
        """The first rank with the most evaluations, for which the others wait."""
        return self.counts.index(self.largest)

    @property
    def remainder_cost(self) -> float:
        """The additional time of the bottleneck over a fair share, total / ranks, as a fraction."""
        return self.largest * len(self.ranges) / self.total - 1

    @property
    def split(self) -> str:
        """The assignment as comma-separated counts, in the form that `assign` accepts."""
        return ",".join(map(str, self.counts))

    @property
    def better(self) -> "Assignment | None":
        """The balanced split of the same evaluations if its bottleneck is smaller, otherwise None."""
        balanced = Assignment(tuple(assign(self.total, len(self.ranges), BALANCED)))
        return balanced if balanced.largest < self.largest else None

    def evaluations(self, micro_batches: int) -> int:
        """Returns the evaluations on the longest path from the first noise to the last latent, fill and drain included.

        The first micro-batch goes through all ranks; each further one leaves the bottleneck one turn later:
        sum(k) + (M - 1) max(k). Times an evaluation's time this is the least makespan of M equal jobs through a line
        of machines in one order (Johnson 1954, Naval Research Logistics Quarterly 1, 61).
        """
        return self.total + (micro_batches - 1) * self.largest

    def bubble(self, micro_batches: int) -> float:
        """Returns the least share of all ranks' time spent waiting: 1 - M total / (N (total + (M - 1) max(k))).

        With equal shares that is (N - 1) / (M + N - 1), the bubble of GPipe (Huang et al. 2019, section 2.3).
        """
        return 1 - micro_batches * self.total / (len(self.ranges) * self.evaluations(micro_batches))

    def turns(self, micro_batches: int) -> int:
        """Returns the micro-batches of the busiest rank if each rank makes whole samples instead: ceil(M / N).

        Never longer than the pipeline takes: N ceil(M / N) <= M + N - 1 for all M and N.
        """
        return math.ceil(micro_batches / len(self.ranges))

    def sentence(self) -> str:
        """Returns a sentence with the evaluations of each rank and the cost of the remainder."""
        counts = f"{_evaluations(self.total)} over {units.counted(len(self.ranges), 'rank')}"
        if min(self.counts) == self.largest:
            return counts if len(self.ranges) == 1 else f"{counts}, {self.largest} each"
        return (
            f"{counts}, {' + '.join(map(str, self.counts))}: rank {self.bottleneck} is the bottleneck, "
            f"{units.percent(self.remainder_cost)} above a fair share of {units.digits(self.total / len(self.ranges))}"
        )


def _evaluations(number: int) -> str:
    return units.counted(number, "evaluation")
