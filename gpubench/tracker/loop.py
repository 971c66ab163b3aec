"""A few steps of a training run under the tracker."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpubench.channel import Activity
from gpubench.memory.history import Phase
from gpubench.models import Workload, build
from gpubench.precision import Arithmetic
from gpubench.ranks import Ranks
from gpubench.settings import DataSettings, ModelSettings, TrainSettings
from gpubench.timing import HostClock, StepTimer
from gpubench.tracker.mode import Tracker
from gpubench.trainer import Batches, Trainer, build_trainer

PHASES: dict[str, Phase] = {
    "data_wait": "data",
    "host_to_device": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""Of memory, by those that are timed. Communication is part of the backward pass: it ends no phase."""


class PhaseMarks(StepTimer[int]):
    """In the place of a step's timer: times nothing, and tells the tracker where the step is."""

    def __init__(self, tracker: Tracker, activity: Activity, repeat: int, rank: int) -> None:
        super().__init__(HostClock(), activity, repeat, rank)
        self._tracker = tracker
        self._doing = activity

    def begin(self, step: int) -> None:
        self._doing.step, self._doing.doing = step, "data_wait"
        self._tracker.enter("data", step)

    def enter(self, phase: str) -> None:
        if phase in PHASES:
            self._doing.doing = phase
            self._tracker.enter(PHASES[phase])

    def issued(self, epoch: int, samples: int, readings: list[Tensor]) -> None:
        """Keeps nothing: a reading that is held would be memory that training does not take."""


def load(
    settings: TrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    tracker: Tracker,
    arithmetic: Arithmetic,
    build: Callable[[ModelSettings, DataSettings, int], Workload] = build,
) -> Trainer:
    """The model ready to train, under the tracker from its first weight on."""
    activity.doing = "building the model"
    tracker.enter("model")
    workload = build(settings.model, settings.data, settings.seed)
    marks = PhaseMarks(tracker, activity, 0, ranks.rank)
    trainer = build_trainer(settings, ranks, device, workload, arithmetic, marks)
    tracker.claim_model(trainer.workload.module)
    activity.doing = "opening the data"
    tracker.enter("data")
    return trainer


def follow(trainer: Trainer, batches: Batches, tracker: Tracker, steps: int) -> None:
    """Trains `steps` steps under `tracker`."""
    training, module = trainer.settings.training, trainer.workload.module
    assert training.batch_size
    with tracker.following(module), _claiming(trainer, tracker):
        for step in range(steps):
            trainer.timer.begin(step)
            trainer.step(batches, training.grad_accumulation * training.batch_size)
    tracker.close()


@contextmanager
def _claiming(trainer: Trainer, tracker: Tracker) -> Iterator[None]:
    """Tells the tracker what gradients and optimizer state are, when they are complete, and where zeroing begins."""
    module, optimizer = trainer.workload.module, trainer.optimizer

    def before(*_: object) -> None:
        tracker.claim_gradients(module)

    def after(*_: object) -> None:
        tracker.claim_state(optimizer, module)
        tracker.enter("zero_grad")

    removals: list[Callable[[], None]] = [
        optimizer.register_step_pre_hook(before).remove,
        optimizer.register_step_post_hook(after).remove,
    ]
    try:
        yield
    finally:
        for remove in removals:
            remove()
