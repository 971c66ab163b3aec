"""One repeat of a training benchmark: a generator of events that knows no console and no file."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import msgspec
import torch

from gpubench import distributed, events
from gpubench.data import Feed, tensors
from gpubench.errors import DataError, NonFiniteLoss
from gpubench.events import Step
from gpubench.peaks import SetupPeaks, end_of_setup, peaks
from gpubench.settings import TrainingSettings
from gpubench.sources import plan
from gpubench.timing import StepTimer
from gpubench.trainer import Trainer

Event = events.Message

READ_SECONDS = 0.1  # between two looks at what the device has finished: on a GPU each costs the host some 50 us
CALIBRATION_STEPS = 3  # at the least, before a limit in seconds is turned into steps


def train(trainer: Trainer, feed: Feed, repeat: int, unix_time: float, steps: int | None = None) -> Iterator[Event]:
    """Runs `steps`, or those that the settings ask for, and yields them as the device finishes them.

    `unix_time` is now, in seconds since the epoch, on the calendar that the steps are to be placed on. Raises
    NonFiniteLoss naming the step, DataError when the data cannot fill a single step.
    """
    called = time.perf_counter()
    training, rank = trainer.settings.training, trainer.ranks.rank
    planned = steps or plan(training, feed.batches_per_epoch)
    yield events.Planned(rank=rank, repeat=repeat, steps=planned or 0)
    scale = trainer.arithmetic.scale()
    reader = StepReader(None if scale is None else float(scale))
    timer = trainer.timer
    setup = SetupPeaks(setup_peak_allocated=None, setup_peak_reserved=None)

    distributed.barrier()
    timer.synchronize()
    began = time.perf_counter()
    timer.start(unix_time + began - called)  # meeting the other ranks may have taken a while
    try:
        yield from _steps(trainer, Epochs(feed, _batch_size(training)), reader, repeat, planned, setup)
    except Exception:
        with suppress(RuntimeError):  # whatever happened, what was measured is kept, unless the device is past reading
            yield events.StepsMeasured(rank=rank, steps=reader.read(timer))
        raise
    timer.stop()
    wall = time.perf_counter() - began
    yield events.StepsMeasured(rank=rank, steps=reader.read(timer))
    reader.complain()
    yield events.RepeatDone(rank=rank, repeat=repeat, wall=wall, **peaks(trainer.device), **setup)


def _steps(
    trainer: Trainer,
    batches: "Epochs",
    reader: "StepReader",
    repeat: int,
    planned: int | None,
    setup: SetupPeaks,
) -> Iterator[Event]:
    """The loop itself. With a limit in seconds, `planned` is None until the pace is known.

    `setup` is filled in once the warm-up has been issued.
    """
    training, rank, timer = trainer.settings.training, trainer.ranks.rank, trainer.timer
    samples = training.grad_accumulation * _batch_size(training)
    step, read_next = 0, time.perf_counter()
    paces: list[float] = []
    while planned is None or step < planned:
        timer.begin(step)
        trainer.step(batches, samples)
        step += 1
        if step == training.warmup_steps:
            setup.update(end_of_setup(trainer.device))
        deciding = planned is None and step >= max(training.warmup_steps, CALIBRATION_STEPS)
        if deciding:
            timer.synchronize()  # the one wait that a limit in seconds costs
        if deciding or time.perf_counter() >= read_next:
            finished = reader.read(timer)
            yield events.StepsMeasured(rank=rank, steps=finished)
            reader.complain()
            paces += [one.total for one in finished if planned is None]
            read_next = time.perf_counter() + READ_SECONDS
        if deciding:
            # Without the first step, which may have compiled and tuned for as long as all the others take.
            planned = step + _steps_in(training.seconds or 0.0, median(paces[1:]), trainer.device)
            yield events.Planned(rank=rank, repeat=repeat, steps=planned)


def _steps_in(seconds: float, pace: float, device: torch.device) -> int:
    """How many steps of `pace` seconds fill `seconds`, the same on every rank."""
    return max(1, distributed.agree(math.ceil(seconds / pace), device))


def _batch_size(training: TrainingSettings) -> int:
    assert training.batch_size is not None, "filled in by defaults.complete"
    return training.batch_size


class Epochs:
    """An endless stream of batches that counts how often it has gone round."""

    def __init__(self, feed: Feed, batch_size: int) -> None:
        self.epoch = 0
        self._feed = feed
        self._batch_size = batch_size
        self._batches = feed.epoch(0)
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            if not self._given:
                self._check(batch)
            self._given += 1
            return batch
        if not self._given and not self.epoch:
            raise DataError("the data ran out before one batch was full", "lower --batch-size or add data")
        if not self._given:
            raise DataError(
                "the data ran out, and cannot be read a second time",
                "return a new iterator from __iter__ each time, or lower training.steps",
            )
        self.epoch += 1
        self._batches = self._feed.epoch(self.epoch)
        self._given = 0
        return next(self)

    def _check(self, batch: Any) -> None:
        """A batch of another size than was asked for would make every rate wrong. Raises DataError."""
        found = next((len(tensor) for tensor in tensors(batch) if tensor.dim()), self._batch_size)
        if found != self._batch_size:
            raise DataError(
                f"a batch of {self._batch_size} was asked for, and its first tensor holds {found}",
                "make_batch(n) and datasets give n samples along the first dimension",
            )


class StepReader:
    """Adds to the finished steps what their readings say: the loss, and whether the gradient scaler skipped them."""

    def __init__(self, scale: float | None) -> None:
        """`scale` is the gradient scale before the first step; None where nothing is scaled."""
        self._scale = scale
        self._diverged: NonFiniteLoss | None = None

    def read(self, timer: StepTimer[Any]) -> list[Step]:
        return [self._judge(step, *readings) for step, readings in timer.collect()]

    def complain(self) -> None:
        """Raises NonFiniteLoss, naming the step, if a loss read so far was not finite."""
        if self._diverged:
            raise self._diverged

    def _judge(self, step: Step, loss: float, scale: float | None = None) -> Step:
        finite = math.isfinite(loss)
        if not finite and not self._diverged:
            self._diverged = NonFiniteLoss(
                f"the loss became {loss} at step {step.step} of repeat {step.repeat} (counting from 0)",
                "lower training.learning_rate, or compare with --precision fp32",
            )
        # The scaler lowers its scale exactly when it skips (torch.amp.GradScaler, backoff_factor < 1).
        skipped = scale is not None and self._scale is not None and scale < self._scale
        self._scale = scale
        return msgspec.structs.replace(step, loss=loss if finite else None, skipped=skipped)
