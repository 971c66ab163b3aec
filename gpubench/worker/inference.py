"""The loop of inference: a step is one forward pass over one batch, without gradients, whose end the host awaits."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from gpubench.ranks import Ranks
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.worker.dataloader import to_device
from gpubench.worker.models import Workload
from gpubench.worker.precision import Arithmetic
from gpubench.worker.timing import StepTimer
from gpubench.worker.training import Batches, Loop, compiled, placed


@dataclass(frozen=True, kw_only=True)
class Predictor(Loop):
    """Everything that a step of inference needs. Several ranks each have a model of their own."""

    PASSES = "one real forward pass"

    def step(self, batches: Batches, samples: int) -> None:
        """Runs one forward pass, and waits for the device, because an answer is of use only once it is there."""
        timer = self.timer
        batch = next(batches)
        timer.enter("host_to_device")
        batch = to_device(batch, self.device, non_blocking=True, channels_last=self.settings.performance.channels_last)
        timer.enter("forward")
        with torch.inference_mode(), self.arithmetic.forward():
            self.workload.forward(self.module, batch)
        timer.synchronize()
        timer.issued(batches.epoch, samples, [])

    def compute(self, batch: Any) -> None:
        with torch.no_grad(), self.arithmetic.forward():
            self.workload.forward(self.workload.module, batch)


def build_predictor(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    workload: Workload,
    arithmetic: Arithmetic,
    timer: StepTimer[Any],
) -> Predictor:
    """Moves the model, which is in evaluation mode, to the device, and compiles it."""
    plain = placed(workload.module, settings.performance, device)
    return Predictor(
        settings=settings,
        ranks=ranks,
        device=device,
        workload=replace(workload, module=plain),
        module=compiled(plain, settings.performance),
        arithmetic=arithmetic,
        timer=timer,
    )
