"""What it would take to feed training: how many workers, and what keeps more of them from helping."""

from dataclasses import dataclass

from gpubench import units
from gpubench.data_cost import DataCost, WithWorkers
from gpubench.loader_record import SlowSample

ENOUGH = 0.98
"""The share of what training takes that a loader has to make to feed it."""
CLOSE = 0.02
"""Numbers of workers whose throughputs differ by less are alike."""
UNEXPLAINED = 1.5
"""How many times as long as with ready data and the loader together training takes if it waits for something else."""
BUSY_CORES = 0.85
"""The share of the cores from which on these limit."""
BUSY_MAIN = 0.8
"""The share of the time from which on the process that draws limits."""
WAITS = 0.5
"""The share of the time of a sample from which on it waits for more than it computes."""
SLOW = 5.0
"""A sample is slow if it takes so many times the median."""
NOTABLE_SECONDS = 1e-3
"""Samples that take less are not called slow: a change of the process that runs takes as long."""
SLOW_AGAIN = 0.5
"""It is slow again if it takes this share of its first time again, and SLOW medians."""


@dataclass(frozen=True)
class Slow:
    """Samples that are much slower than usual."""

    samples: list[SlowSample]
    again: bool
    """Whether they were slow when they were made again, too."""


def enough(found: DataCost) -> WithWorkers | None:
    """The smallest number of workers with which the loader makes as much as training takes.

    None if none does, or if it is not known how much training takes.
    """
    if found.ceiling is None or found.ceiling.verdict == "inconclusive":
        return None
    wanted = ENOUGH * found.ceiling.ready.value
    return next((one for one in found.scaling if one.throughput and one.throughput.value >= wanted), None)


def fastest(found: DataCost) -> WithWorkers | None:
    """The number of workers with the highest throughput."""
    known = [one for one in found.scaling if one.throughput]
    return max(known, key=lambda one: one.throughput.value if one.throughput else 0.0, default=None)


def as_fast(found: DataCost) -> WithWorkers | None:
    """The smallest number of workers with nearly the highest throughput."""
    best = fastest(found)
    if best is None or best.throughput is None:
        return None
    least = (1 - CLOSE) * best.throughput.value
    return next(one for one in found.scaling if one.throughput and one.throughput.value >= least)


def needed(found: DataCost) -> WithWorkers | None:
    """The number of workers to have: the smallest one that feeds training, or else one that is as fast as any."""
    return enough(found) or as_fast(found)


def elsewhere(found: DataCost) -> str:
    """Says that training waits for more than the measured DataLoader; "" if it does not, or if that is not known.

    The time of a sample in training is at most that with ready data and that of the loader alone, one after the other.
    """
    alone = next((one.throughput for one in found.scaling if one.workers == found.record.workers), None)
    if alone is None or found.ceiling is None or found.ceiling.verdict == "inconclusive":
        return ""
    if alone.value / found.ceiling.training.value < UNEXPLAINED * (1 + alone.value / found.ceiling.ready.value):
        return ""
    what = "another DataLoader" if found.record.others else "workers that start anew for each iterator, or other data"
    return f"training takes longer than with ready data and this loader together: it also waits, as for {what}"


def sentence(found: DataCost) -> str:
    """Says how many workers feed training, or why none do; "" if that is not known."""
    best = fastest(found)
    if best is None or found.ceiling is None or found.ceiling.verdict == "inconclusive" or len(found.scaling) < 2:
        return ""
    feeding = enough(found)
    if feeding:
        if feeding.workers == 0:
            return "the loader feeds training without workers, if it runs beside it"
        make = "makes" if feeding.workers == 1 else "make"
        return f"{units.counted(feeding.workers, 'worker')} {make} enough to feed it"
    cores, wanted = found.record.cores, found.ceiling.ready.value
    if best.cpu and cores:
        most = cores / best.cpu
        cost = (
            f"a sample costs {units.seconds(best.cpu)} of CPU, which is {units.rate(most, 'samples/s')} at most "
            f"on {units.counted(cores, 'core')}"
        )
        return f"no number of workers does: {cost}" if most < wanted else f"none of these numbers does; {cost}"
    return "none of these numbers of workers does"


def limit(one: WithWorkers, found: DataCost) -> str:
    """Says what keeps the loader from being faster with as many workers; "" if more of them may help."""
    cores = found.record.cores
    if one.cores is not None and cores and one.cores >= BUSY_CORES * cores and one.workers >= cores - 1:
        return f"all {cores} cores are busy" if cores > 1 else "the only core is busy"
    if one.main is not None and one.main >= BUSY_MAIN and one.workers:
        return f"the main process is busy {units.whole_percent(one.main)} of the time, receiving batches"
    last = max(found.scaling, key=lambda each: each.workers, default=one)
    grows = one is last and fastest(found) is one
    if one.workers and grows and found.sample > 0 and found.sample_cpu < WAITS * found.sample:
        waits = units.whole_percent(1 - found.sample_cpu / found.sample)
        return f"samples wait {waits} of their time, so that more workers may help"
    return ""


def slow_samples(found: DataCost) -> Slow | None:
    """The samples that are much slower than the median; None if there are none."""
    times = found.times
    if times is None or times.number < 8:
        return None
    middle = times.quantiles[50]
    slow = [one for one in times.slowest if one.seconds > max(SLOW * middle, NOTABLE_SECONDS)]
    if not slow:
        return None
    repeated = [one for one in slow if one.again and min(one.again) > max(SLOW * middle, SLOW_AGAIN * one.seconds)]
    return Slow(repeated or slow, bool(repeated))
