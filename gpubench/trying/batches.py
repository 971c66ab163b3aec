"""Runs the largest batch that should fit, and closes in on the largest that does."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from gpubench.configuration import Configuration
from gpubench.dotkeys import flatten
from gpubench.errors import OutOfMemory, WorkerLost
from gpubench.host.benchmark import Outcome
from gpubench.memory.batch_sizes import BatchSizes, Confirmed, Speed, overrides, worth_timing
from gpubench.trying.bench import stop_if_interrupted
from gpubench.trying.memory import MemoryBench, peak_of, timed, untold

MOST_TRIES = 8
"""Batch sizes that are run, once one fits, to come closer to the largest that does."""
FINE = 0.05
"""Of the batch: closer they do not come."""
ROUGHLY = 2
"""Repeats of each batch size: halves differ by more than what two tell."""
ORIGIN = "a batch to confirm"


@dataclass(frozen=True)
class Searched:
    found: BatchSizes
    best: Outcome | None
    """The run of the largest that fits."""


def confirm(found: BatchSizes, run: Configuration[Any], bench: MemoryBench) -> Iterator[Searched]:
    """Runs the largest batch that should fit, and smaller ones until one does; then times it, and halves of it.

    Yields what is known after each run. Raises Interrupted where the user has had enough, and the error of a run that
    failed for another reason than its memory.
    """
    if found.largest is None:
        return
    base, flat = untold(run), flatten(run.settings.model_dump(mode="json"))
    best: Outcome | None = None
    good, bad, candidate = 0, found.largest + 1, found.largest
    while good < candidate < bad and (not good or len(found.confirmed) < MOST_TRIES):
        (outcome,) = bench.follow([base.with_overrides(overrides(candidate, flat), ORIGIN)])
        if outcome.error and not isinstance(outcome.error, OutOfMemory | WorkerLost):
            raise outcome.error
        total = peak_of(outcome)
        fits = total is not None and total <= found.limit
        reason = outcome.error.message if outcome.error else None if fits else "leaves too little to spare"
        good, bad, best = (candidate, bad, outcome) if fits else (good, candidate, best)
        confirmed = [*found.confirmed, Confirmed(candidate, total, reason)]
        found = msgspec.structs.replace(found, largest=good or None, confirmed=confirmed)
        yield Searched(found, best)
        if good and bad - good <= max(1, FINE * good):
            break
        candidate = (good + bad) // 2
    if not good:
        return
    sizes = sorted(worth_timing(good))
    outcomes = bench.time([timed(base, overrides(size, flat), ROUGHLY) for size in sizes])
    stop_if_interrupted(outcomes)
    speeds = [
        Speed(size, throughput.estimate)
        for size, outcome in zip(sizes, outcomes, strict=True)
        if (throughput := outcome.summary.get("throughput"))
    ]
    yield Searched(msgspec.structs.replace(found, speeds=speeds), best)
