"""The training step whose memory every estimator predicts, and the format of the answers.

Each estimator is a fresh process that gets the `Subject` as its only argument and prints its answer: the bytes of the
`peak`, and those of each of the `PARTS` that it reports.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gpubench.worker.models import Workload

PARTS = ("parameters", "gradients", "optimizer", "activations", "rest")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Subject:
    """Training with AdamW in one process on one GPU, with PyTorch's defaults, and autocast if `precision` is bf16."""

    model: str
    """The name of a built-in model."""
    precision: str
    """Either fp32 or bf16."""
    batch_size: int
    image_size: int | None
    """The side of an image in pixels."""
    sequence_length: int | None
    """The number of tokens in a sample."""
    device_model: str
    capacity: int
    """The memory of the device in bytes."""

    @classmethod
    def given(cls) -> Self:
        return cls(**json.loads(sys.argv[1]))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def build(self) -> "Workload":
        """Build the model with random weights, on the default device."""
        from gpubench.settings.sections import DataSettings, ModelSettings
        from gpubench.worker.models import build

        sizes = DataSettings(image_size=self.image_size, sequence_length=self.sequence_length)
        return build(ModelSettings(name=self.model), sizes, seed=0)

    def optimizer(self, workload: "Workload") -> "Optimizer":
        import torch

        return torch.optim.AdamW(workload.module.parameters(), LEARNING_RATE)


def answer(peak: int, **parts: int | None) -> None:
    """Print the answer of an estimator, in bytes; None stands for a part that it does not report."""
    print(json.dumps({"peak": peak, **parts}))
