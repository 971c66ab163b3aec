"""Measures what the data of a program costs: its loader alone, with each number of workers, and training without it."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import msgspec

from gpubench import devices, units
from gpubench.bench import Bench, stop_if_interrupted
from gpubench.data_cost import DataCost, Estimate, Proposed, ReadyCeiling, WithWorkers
from gpubench.diagnosis import data_needs as needs
from gpubench.errors import GpubenchError
from gpubench.host.schedule import Outcome
from gpubench.kinds.loader.recorder import LoaderRecorder
from gpubench.registry import PROGRAM, kind_of
from gpubench.settings.commands import COMMANDS
from gpubench.settings.keys import CACHED
from gpubench.settings.loading import Configuration, completed

WORKERS = "data.workers"
FIX = "loader"
MOST_TRIED = 6
"""The largest number of numbers of workers that are tried."""
MOST_WAITING = 32
"""The largest number of workers that is tried of its own accord."""
FEWEST_REPEATS = 2
"""The repeats of training at least, without which nothing is known of how they differ."""


def numbers(own: int, cores: int, *, waits: bool = False) -> list[int]:
    """Returns the numbers of workers to try: that of the program, none, and powers of two up to the cores.

    Workers whose samples wait for more than they compute do not need a core each, so that more of them are tried.
    """
    most = min(4 * cores, MOST_WAITING) if waits else cores
    powers = [1]
    while 2 * powers[-1] < most:
        powers.append(2 * powers[-1])
    found = sorted({0, *powers, most, own})
    while len(found) > MOST_TRIED:
        found.remove(next(one for one in found[2:] if one not in (own, most)))
    return found


def with_workers(run: Configuration[Any], outcome: Outcome, bench: Bench) -> Iterator[DataCost]:
    """Draws with each number of workers, and yields what the data costs with all of them."""
    recorder = outcome.recorder
    assert isinstance(recorder, LoaderRecorder)
    cost = recorder.cost
    if cost is None:
        return
    record = cost.record
    own = _scaled(record.workers, outcome)
    cost = msgspec.structs.replace(cost, scaling=[own])
    yield cost
    waits = cost.sample_cpu < needs.WAITS * cost.sample
    tried = numbers(record.workers, record.cores or devices.physical_cores(), waits=waits)
    others = [number for number in tried if number != record.workers]
    if not others:
        return
    base = _unrecorded(run)
    variants = [
        bench.complete(base.with_overrides({WORKERS: number}, FIX)).called(variant=units.counted(number, "worker"))
        for number in others
    ]
    outcomes = bench.run(variants, independent=True)
    stop_if_interrupted(outcomes)
    scaling = [own, *(_scaled(number, one) for number, one in zip(others, outcomes, strict=True))]
    yield msgspec.structs.replace(cost, scaling=sorted(scaling, key=lambda one: one.workers))


def with_ready_data(run: Configuration[Any], cost: DataCost, terminal: Any) -> Iterator[DataCost]:
    """Trains as the program does, with data that is always ready and with the number of workers that feeds it."""
    bench = Bench(kind_of(PROGRAM), terminal)
    base = _training(run, {}, "as it is")
    without, ready = bench.run([base, _training(run, {CACHED: True}, "data always ready")], independent=True)
    stop_if_interrupted([without, ready])
    for outcome in (without, ready):
        if outcome.error:
            raise outcome.error
    ours, theirs = (_throughput(one) for one in (without, ready))
    verdict = bench.throughput(without, ready)
    if ours is None or theirs is None or verdict is None:
        return
    ceiling = ReadyCeiling(
        ours, theirs, verdict.ratio, verdict.interval, verdict.verdict, (_name(without), _name(ready))
    )
    cost = msgspec.structs.replace(cost, ceiling=ceiling)
    yield cost
    wanted = needs.needed(cost)
    if wanted is None or wanted.workers == cost.record.workers or cost.record.style != "map":
        return
    fed = _training(run, {WORKERS: wanted.workers}, units.counted(wanted.workers, "worker"))
    again, more = bench.run([base, fed], independent=True)  # which runs are neighbours in time decides what they tell
    stop_if_interrupted([again, more])
    if found := bench.throughput(again, more):
        proposed = Proposed(wanted.workers, found.ratio, found.interval, found.verdict, (_name(again), _name(more)))
        yield msgspec.structs.replace(cost, proposed=proposed)


def _training(run: Configuration[Any], changes: dict[str, Any], variant: str) -> Configuration[Any]:
    """Returns the configuration of training the same program."""
    cls: Any = COMMANDS[PROGRAM]
    given = {key: value for key, value in run.settings.model_dump(mode="json").items() if key != "profiling"}
    given["training"] = {"steps": run.settings.training.steps}
    found = Configuration(cls.model_validate(given), dict(run.origins))
    repeats = {"measurement.repeats": max(FEWEST_REPEATS, run.settings.measurement.repeats)}
    return completed(found.with_overrides(repeats | changes, FIX), kind_of(PROGRAM).complete).called(variant=variant)


def _unrecorded(run: Configuration[Any]) -> Configuration[Any]:
    return run.with_overrides({"profiling.enabled": False}, FIX)


def _name(outcome: Outcome) -> str:
    return str(outcome.recorder.writer.path)


def _throughput(outcome: Outcome) -> Estimate | None:
    found = outcome.summary.get("throughput")
    return Estimate(found.estimate, found.interval) if found else None


def _scaled(number: int, outcome: Outcome) -> WithWorkers:
    recorder = outcome.recorder
    records = recorder.records if isinstance(recorder, LoaderRecorder) else []
    throughput = _throughput(outcome)
    if outcome.error or throughput is None or not records:
        error: GpubenchError | None = outcome.error
        return WithWorkers(number, None, error=error.message if error else "nothing was drawn")
    timed = [one for one in records if one.wall > 0 and one.cpu is not None]
    memory = [one for record in records for one in record.memory]
    restarts = [seconds for record in records for seconds in record.restarts]
    return WithWorkers(
        number,
        throughput,
        cpu=fmean((one.cpu or 0.0) / one.samples for one in timed if one.samples) if timed else None,
        cores=fmean((one.cpu or 0.0) / one.wall for one in timed) if timed else None,
        main=fmean((one.main_cpu or 0.0) / one.wall for one in timed) if timed else None,
        memory=fmean(one.pss for one in memory) if memory else None,
        shm=fmean(one.shm for one in memory) if memory else None,
        first_batch=fmean(record.first_batch for record in records),
        restart=fmean(restarts) if restarts else None,
        run=_name(outcome),
    )
