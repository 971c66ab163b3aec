"""The training step on its real device, followed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gpubench.channel import Activity
from gpubench.precision import arithmetic
from gpubench.ranks import Ranks
from gpubench.settings import TrainSettings
from gpubench.tracker.loop import follow, load
from gpubench.tracker.mode import Tracker
from gpubench.tracker.sharding import trials_unseen
from gpubench.train_worker import open_feed
from gpubench.training import Epochs

EVENTS = 1_000_000
"""That the allocator's own record keeps: steps of large models have some ten thousand each."""

log = logging.getLogger("gpubench.tracker")


@dataclass(frozen=True)
class Room:
    """What the driver says of a device, in bytes."""

    capacity: int
    other: int
    """In use, and not by this process's allocator: context, libraries, and whoever else is there."""


def measure(
    settings: TrainSettings, ranks: Ranks, device: torch.device, activity: Activity, tracker: Tracker, steps: int
) -> None:
    """Trains `steps` steps under `tracker`, which is closed at their end, or where they go wrong."""
    assert settings.precision
    assert settings.training.batch_size
    with trials_unseen() if ranks.world_size > 1 else nullcontext(), tracker:
        try:
            trainer = load(settings, ranks, device, activity, tracker, arithmetic(settings.precision, device))
            with open_feed(settings, ranks, device, trainer.workload) as feed:
                follow(trainer, Epochs(feed, settings.training.batch_size), tracker, steps)
        except BaseException:
            tracker.close()  # before all that held the memory is taken down
            raise


def room(device: torch.device) -> Room | None:
    """None on a CPU, whose memory is everybody's."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    return Room(capacity, max(0, capacity - free - torch.cuda.memory_reserved(device)))


@contextmanager
def recorded(device: torch.device, path: Path) -> Iterator[None]:
    """The allocator's own record of what goes on inside, left at `path` whatever happens; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    # Python's stacks alone: with those of C++ a large snapshot takes minutes to write.
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
    try:
        yield
    finally:
        with suppress(OSError):
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
