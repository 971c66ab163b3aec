"""Assigns evaluations to ranks.

An evaluation is one call of the denoiser on one micro-batch; a sample takes `total` of them, one after another.
"""

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
    balanced = Split(tuple(assign(total, world_size, BALANCED))).split
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
class Split:
    ranges: tuple[Range, ...]

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in self.ranges]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def remainder_cost(self) -> float:
        """By what fraction the busiest rank has more evaluations than a fair share, total / ranks."""
        return max(self.counts) * len(self.ranges) / self.total - 1

    @property
    def split(self) -> str:
        """The assignment as comma-separated counts, in the form that `assign` accepts."""
        return ",".join(map(str, self.counts))

    def sentence(self) -> str:
        counts = f"{_evaluations(self.total)} over {units.counted(len(self.ranges), 'rank')}"
        if min(self.counts) == max(self.counts):
            return counts if len(self.ranges) == 1 else f"{counts}, {self.counts[0]} each"
        return f"{counts}, {' + '.join(map(str, self.counts))}"


def _evaluations(number: int) -> str:
    return units.counted(number, "evaluation")
