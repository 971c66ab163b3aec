"""gpubench's own loop and the bare one, turn about in one process, on one network.

Processes differ from one another by more than a careful loop costs. Here both loops have the same memory, the same
clocks and the same neighbours, and a short block of the one is always beside one of the other. The harness is complete:
its events go over a real connection to a process that reads them.

Blocks come in units of four, bare ours ours bare and ours bare bare ours by turns, so that a steady drift of the
machine cancels. Prints, for each unit, the logarithm of our speed relative to the bare loop's.
"""

import json
import math
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from subject import BATCHES, LEARNING_RATE, Subject, settle

from gpubench import events
from gpubench.channel import Activity, Channel
from gpubench.host.launch import listen
from gpubench.probe.length import Length
from gpubench.ranks import Ranks, machine
from gpubench.settings.defaults import complete
from gpubench.settings.schema import CompletedTrainSettings, TrainSettings
from gpubench.worker.dataloader import Feed
from gpubench.worker.loop import build_trainer, run_steps
from gpubench.worker.models import build
from gpubench.worker.precision import arithmetic
from gpubench.worker.process import FLUSH_SECONDS
from gpubench.worker.timing import StepTimer, clock_of

Block = Callable[[], None]

WARMUP_BLOCKS = 2


def main(units: int, steps: int) -> None:
    """`units` of four blocks, each of `steps` steps."""
    subject = Subject.from_environment()
    settings = settings_for(subject, steps)
    with tempfile.TemporaryDirectory() as folder:
        listener, address, _ = listen(Path(folder))
        sent = settings.model_dump(mode="json")  # as a worker gets them; a model of pydantic cannot be pickled
        reader = multiprocessing.get_context("spawn").Process(target=read, args=(listener, sent), daemon=True)
        reader.start()
        channel, _ = Channel.connect(address, rank=0, world_size=1, activity=Activity())
        bare, ours = loops(subject, settings, channel)
        for _ in range(WARMUP_BLOCKS):
            bare()
            ours()
        found = [unit(bare, ours, ours_first=number % 2 == 1) for number in range(units)]
        channel.close()
        reader.join()
    print(json.dumps(found))


def unit(bare: Block, ours: Block, ours_first: bool) -> float:
    outer, inner = (ours, bare) if ours_first else (bare, ours)
    first, second, third, fourth = (timed(block) for block in (outer, inner, inner, outer))
    speed_of_inner = math.log((first + fourth) / (second + third))
    return -speed_of_inner if ours_first else speed_of_inner


def timed(block: Block) -> float:
    began = time.perf_counter()
    block()
    return time.perf_counter() - began


def settings_for(subject: Subject, steps: int) -> CompletedTrainSettings:
    given = {
        "device": subject.device,
        "precision": "fp32",
        "model": {"name": subject.model},
        "data": {"image_size": subject.image_size},
        "training": {
            "batch_size": subject.batch_size,
            "steps": steps,
            "warmup_steps": 0,
            "learning_rate": LEARNING_RATE,
        },
        "performance": {"channels_last": False, "cpu_threads": 1},
    }
    return complete(TrainSettings.model_validate(given))[0]


def loops(subject: Subject, settings: CompletedTrainSettings, channel: Channel) -> tuple[Block, Block]:
    """One block of the bare loop and one of gpubench's; either returns when the device is done."""
    settle(subject)
    device, ranks, steps = torch.device(subject.device), Ranks(0, 0, 1, 1), settings.training.steps
    workload = build(settings.model, settings.data, settings.seed)
    clock = clock_of(device)
    timer = StepTimer(clock, channel.activity, 0, ranks.rank)
    trainer = build_trainer(settings, ranks, device, workload, arithmetic(settings.precision, device), timer)
    feed = Feed(settings.data, None, workload.make_batch, subject.batch_size, 0, 1, settings.seed, device)
    batches = cycle(list(islice(feed.epoch(0), BATCHES)))

    def bare() -> None:
        for batch in islice(batches, steps):
            workload.loss(trainer.module, batch).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
        clock.synchronize()

    def ours() -> None:
        for event in run_steps(trainer, feed, 0, time.time(), Length(0, steps or 0)):
            channel.put(event)
            channel.flush(FLUSH_SECONDS if isinstance(event, events.StepsMeasured) else 0.0)

    return bare, ours


def read(listener: socket.socket, settings: dict[str, Any]) -> None:
    """The host: answers the worker's hello, and reads all that follows."""
    connection, _ = listener.accept()
    job = events.Job(
        worker="",
        lighter="",
        settings=settings,
        repeats=[0],
        clock=(time.time(), time.monotonic()),
        machine=machine(),
    )
    for line in connection.makefile("rb"):
        if isinstance(events.decode(line), events.Hello):
            connection.sendall(events.encode(job))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
