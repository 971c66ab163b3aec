"""Finds what limits the throughput of a pipeline: the rank or the hand-off that takes longest for a micro-batch.

It uses measured times rather than counts of evaluations, because ranks and evaluations can differ in speed. A rank
works on one micro-batch at a time, and so does each of the threads that send and receive. So the pipeline finishes
micro-batches no faster than its slowest place, and the other places wait for it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median_low, variance

from gpubench import units
from gpubench.distributions import student_t_quantile
from gpubench.kinds.pipeline.repeats import Completed
from gpubench.runs import stats
from gpubench.runs.stages import OF_KIND

NOTABLE = 0.05  # of the longer time; a smaller difference between two places is no reason to change anything
NOTABLE_DELAY = 0.05  # of the makespan
ODDS = 0.05  # that some difference between equal ranks counts as significant

MicroBatch = tuple[int, int]
"""The repeat and the first sample of a micro-batch."""


@dataclass(frozen=True)
class Place:
    """A rank, or the hand-off from a rank to the next one."""

    rank: int
    """The rank, or the sender."""
    seconds: Mapping[MicroBatch, float]
    """How long each micro-batch occupied it."""
    evaluations: int = 0
    """The number of evaluations that the rank makes for each micro-batch; 0 for a hand-off."""
    evaluating: Mapping[MicroBatch, float] = field(default_factory=dict)
    """How much of `seconds` these evaluations took."""

    @property
    def name(self) -> str:
        return (
            f"rank {self.rank}" if self.evaluations else f"the hand-off from rank {self.rank} to rank {self.rank + 1}"
        )

    @property
    def usual(self) -> float:
        return median_low(self.seconds.values())

    def delay(self, one: MicroBatch) -> float:
        """By how many seconds a micro-batch took longer than usual, if it took at least twice as long; else 0."""
        excess = self.seconds[one] - self.usual
        return excess if excess >= self.usual else 0.0

    @cached_property
    def undelayed(self) -> list[float]:
        return [taken for one, taken in self.seconds.items() if not self.delay(one)]

    @cached_property
    def evaluation(self) -> float:
        """The mean time of one evaluation of a rank without delays, in seconds."""
        return fmean(taken for one, taken in self.evaluating.items() if not self.delay(one)) / self.evaluations

    @cached_property
    def mean(self) -> float:
        return fmean(self.undelayed)

    @cached_property
    def _variance_of_mean(self) -> float:
        return variance(self.undelayed) / stats.effective_size(self.undelayed)

    def is_above(self, other: "Place", level: float) -> bool:
        """Whether it takes notably and significantly longer than `other` (Welch's t-test)."""
        apart = self.mean - other.mean
        if apart < NOTABLE * self.mean or min(len(self.undelayed), len(other.undelayed)) < 2:
            return False
        each = [place._variance_of_mean for place in (self, other)]
        error = sum(each)
        if not error:
            return True
        shares = [
            (part / error) ** 2 / (len(place.undelayed) - 1) for part, place in zip(each, (self, other), strict=True)
        ]
        return apart > student_t_quantile(1 / sum(shares), 1 - level) * math.sqrt(error)

    @property
    def work(self) -> str:
        """The time for each micro-batch, with its evaluations if it is a rank."""
        if not self.evaluations:
            return units.seconds(self.mean)
        made = f"{units.counted(self.evaluations, 'evaluation')} of {units.seconds(self.evaluation)}"
        other = self.mean - self.evaluations * self.evaluation
        more = f", and {units.seconds(other)} of other work" if other > NOTABLE * self.mean else ""
        return f"{units.seconds(self.mean)} ({made}{more})"


def limiting(places: Sequence[Place]) -> list[Place]:
    """Returns the places that take longest, the longest first: those that no other is significantly above.

    Empty if they include every rank, because then no rank limits the others.
    """
    ranks = [place for place in places if place.evaluations]
    longest = max(places, key=lambda place: place.mean)
    level = ODDS / max(1, len(ranks) * (len(ranks) - 1))
    found = [place for place in places if not longest.is_above(place, level)]
    if all(rank in found for rank in ranks):
        return []
    return sorted(found, key=lambda place: place.mean, reverse=True)


def sentence(places: Sequence[Place], makespan: float, what: str) -> str | None:
    """Returns what limits the throughput, and the longest delay of a single micro-batch; None for a single rank.

    `places` are all ranks and hand-offs, and `what` is a sample or a micro-batch.
    """
    ranks = [place for place in places if place.evaluations]
    if len(ranks) < 2:
        return None
    return "; ".join(filter(None, [_limit(places, ranks, what), _delays(places, makespan, what)]))


def _limit(places: Sequence[Place], ranks: Sequence[Place], what: str) -> str:
    if min(len(rank.undelayed) for rank in ranks) < 2:
        return f"which rank is the bottleneck is unknown: each worked on one {what}"
    found = limiting(places)
    if not found:
        busiest = max(ranks, key=lambda rank: rank.mean)
        others = "the other rank takes" if len(ranks) == 2 else "the other ranks take"
        return (
            f"no rank is the bottleneck: {busiest.name} takes {busiest.work} for each {what}, and {others} about as "
            "long"
        )
    longest, rest = found[0], [place for place in ranks if place not in found]
    following = max(rest, key=lambda place: place.mean)
    names = units.listed([place.name for place in found])
    which = "it" if len(found) == 1 else longest.name
    said = f"{names} {'is' if len(found) == 1 else 'are'} the bottleneck: {which} takes {longest.work} for each {what}"
    return f"{said}, and {following.name} takes {following.work}"


def _delays(places: Sequence[Place], makespan: float, what: str) -> str:
    found = [(place, one) for place in places for one in place.seconds if place.delay(one) > NOTABLE_DELAY * makespan]
    if not found:
        return ""
    place, longest = max(found, key=lambda entry: entry[0].delay(entry[1]))
    taken, usual = units.seconds(place.seconds[longest]), units.seconds(place.usual)
    of = f"{what} {longest[1]}"
    who = f"{place.name} took {taken} for {of}" if place.evaluations else f"{place.name} took {taken} with {of}"
    said = f"{who}, and usually takes {usual}"
    return said if len(found) == 1 else f"{said} ({units.counted(len(found) - 1, 'more delay')} of this kind)"


def better_split(ranks: Sequence[Place]) -> tuple[list[int], float] | None:
    """Returns the split with the shortest time of the busiest rank, and this time in seconds.

    It assumes that the evaluations of each rank keep their time. None if it saves nothing notable.
    """
    fixed = [rank.mean - rank.evaluations * rank.evaluation for rank in ranks]
    counts = [1] * len(ranks)

    def load(rank: int, count: int) -> float:
        return fixed[rank] + count * ranks[rank].evaluation

    for _ in range(sum(rank.evaluations for rank in ranks) - len(ranks)):
        least = min(range(len(ranks)), key=lambda rank: load(rank, counts[rank] + 1))
        counts[least] += 1
    longest = max(load(rank, count) for rank, count in enumerate(counts))
    now = max(rank.mean for rank in ranks)
    return (counts, longest) if longest < (1 - NOTABLE) * now else None


def places(found: Sequence[Completed]) -> list[Place]:
    """Returns all ranks and hand-offs of the completed repeats, with the time that each micro-batch took there."""
    works: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    evaluating: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    links: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    for one in found:
        for span in one.repeat.spans:
            if OF_KIND[span.kind] == "compute":
                works[span.rank][span.repeat, span.sample] += span.total
            if span.kind == "evaluate":
                evaluating[span.rank][span.repeat, span.sample] += span.total
        for handoff in one.repeat.handoffs:
            sends = handoff.direction == "send"
            taken = handoff.total - handoff.waited if sends else handoff.total
            link, batch = links[handoff.rank if sends else handoff.peer], (handoff.repeat, handoff.sample)
            link[batch] = max(link[batch], taken)  # sender and receiver work at the same time
    ranks = [
        Place(rank, works[rank], count, evaluating[rank])
        for rank, count in enumerate(found[0].assignment.counts)
        if rank in evaluating
    ]
    return ranks + [Place(sender, seconds) for sender, seconds in sorted(links.items())]


def bottleneck(found: Sequence[Completed]) -> str | None:
    """A sentence with the rank or the hand-off that limits the throughput; None if it is unknown."""
    if not found:
        return None
    batches, samples = found[0].micro_batches, len(found[0].made)
    what = "sample" if batches == samples else "micro-batch"
    return sentence(places(found), fmean(one.makespan for one in found), what)
