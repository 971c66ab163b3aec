"""The worker of `gpubench memory`: records the memory of a few training steps on its device, or predicts it."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import torch

from gpubench import events
from gpubench.channel import Activity
from gpubench.diagnosis.rules import advise
from gpubench.findings import Findings
from gpubench.kinds.memory.predicted_device import Target, target_of
from gpubench.kinds.memory.settings import CompletedMemorySettings
from gpubench.kinds.memory.worker.predict import Forecast
from gpubench.kinds.memory.worker.tracker import AllocationTracker, device_memory, measure, recorded
from gpubench.kinds.training.worker.rank import set_up
from gpubench.memory.allocation_log import classify
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Footprint
from gpubench.ranks import Ranks
from gpubench.runs.directory import SNAPSHOT
from gpubench.settings.keys import flatten
from gpubench.temporary import folder_of_worker
from gpubench.worker import distributed
from gpubench.worker.environment import capture_env_metadata
from gpubench.worker.loop import Event
from gpubench.worker.process import Assignment
from gpubench.worker.profiler import recorded as file_events

log = logging.getLogger("gpubench.memory")


def work(assignment: Assignment) -> Iterator[Event]:
    """Runs every repeat of the job and yields the events."""
    job, ranks, store, activity = assignment.job, assignment.ranks, assignment.store, assignment.activity
    settings = CompletedMemorySettings.model_validate(job.settings)
    predicting = settings.memory.predict
    device = torch.device("cpu") if predicting else set_up(settings, ranks, store)
    if ranks.is_rank_zero:
        decided = distributed.decided(settings.distributed)
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata(), settings=decided)
    for repeat in job.repeats:
        if predicting:
            yield from _predict(settings, target_of(settings.memory, settings.device), activity, repeat)
        else:
            yield from _measure(settings, ranks, device, activity, repeat)
    distributed.cleanup_ddp()


def _predict(settings: CompletedMemorySettings, target: Target, activity: Activity, repeat: int) -> Iterator[Event]:
    forecast = Forecast(settings, target, activity)
    if settings.memory.find_batch_size:
        sizes = forecast.batch_sizes()
        yield events.BatchSizesFound(rank=0, repeat=repeat, found=msgspec.json.encode(sizes))
        if sizes.largest is None:
            return
        forecast = forecast.with_batch_size(sizes.largest)
    found = forecast.footprint()
    yield _followed_event(0, repeat, found)  # before the advice, which takes about as long
    if settings.memory.advise:
        activity.doing = "predicting what fixes save"
        yield _followed_event(0, repeat, found, _advice(forecast, found))


def _measure(
    settings: CompletedMemorySettings, ranks: Ranks, device: torch.device, activity: Activity, repeat: int
) -> Iterator[Event]:
    forecast = Forecast(settings, _local_target(settings, device), activity)
    if settings.memory.find_batch_size:
        if ranks.is_rank_zero:
            yield events.BatchSizesFound(rank=0, repeat=repeat, found=msgspec.json.encode(forecast.batch_sizes()))
        return
    tracker = AllocationTracker(device)
    with folder_of_worker() as folder:
        path = Path(folder) / f"rank{ranks.rank}{SNAPSHOT}"
        try:
            with recorded(device, path):
                measure(settings, ranks, device, activity, tracker, settings.memory.steps)
        except Exception:
            where = f"it ended in the {activity.doing.replace('_', ' ')} of step {activity.step}"
            if (found := _found(settings, ranks, device, tracker, [where])) is not None:
                yield _followed_event(ranks.rank, repeat, found)  # the memory until the error
            yield from file_events([path] if path.exists() else [], ranks.rank, repeat)
            raise
        activity.doing = "sending the footprint"
        found = _found(settings, ranks, device, tracker)
        assert found is not None
        yield _followed_event(ranks.rank, repeat, found)
        yield from file_events([path] if path.exists() else [], ranks.rank, repeat)
    if ranks.is_rank_zero and settings.memory.advise:
        activity.doing = "predicting what fixes save"
        try:
            yield _followed_event(ranks.rank, repeat, found, _advice(forecast, found))
        except Exception as error:  # an error of the prediction must not discard the measurement
            log.warning("the savings of fixes cannot be predicted: %s", error)


def _advice(forecast: Forecast, found: Footprint) -> Findings:
    return forecast.with_savings(advise(found, flatten(forecast.settings.model_dump(mode="json"))), found)


def _local_target(settings: CompletedMemorySettings, device: torch.device) -> Target:
    space, limit = device_memory(device), settings.memory.device_memory
    if space is None:
        return Target("cpu", limit or psutil.virtual_memory().available, None, cuda=False)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return Target(name, limit or space.capacity, None if torch.version.hip else capability, context=space.other)


def _found(
    settings: CompletedMemorySettings,
    ranks: Ranks,
    device: torch.device,
    tracker: AllocationTracker,
    notes: Sequence[str] = (),
) -> Footprint | None:
    """The recorded footprint; None if an error occurred before the first allocation."""
    found = tracker.allocation_log()
    if not found.allocations:
        return None
    classify(found)
    space = device_memory(device)
    return footprint(
        found,
        source="measured",
        device=torch.cuda.get_device_name(device) if space else "cpu",
        capacity=settings.memory.device_memory or (space.capacity if space else None),
        rank=ranks.rank,
        other=space.other if space else 0,
        notes=notes,
    )


def _followed_event(rank: int, repeat: int, found: Footprint, advice: Findings | None = None) -> events.MemoryFollowed:
    findings = None if advice is None else msgspec.json.encode(advice)
    return events.MemoryFollowed(rank=rank, repeat=repeat, footprint=msgspec.json.encode(found), findings=findings)
