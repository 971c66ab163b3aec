"""The training step whose memory every estimator predicts, and the format of the answers.

Each estimator is a fresh process that gets the `Subject` as its only argument and prints its answer: bytes by `PARTS`,
as far as it has them, and its `peak`.
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
    """One process on one GPU, trained with AdamW as PyTorch makes it, by autocast where `precision` is bf16."""

    model: str
    """A built-in one."""
    precision: str
    """fp32 or bf16."""
    batch_size: int
    image_size: int | None
    """Pixels each way."""
    sequence_length: int | None
    """Tokens."""
    device_model: str
    capacity: int
    """Bytes of that device."""

    @classmethod
    def given(cls) -> Self:
        return cls(**json.loads(sys.argv[1]))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def build(self) -> "Workload":
        """With random weights, on the CPU or wherever new tensors go at the time."""
        from gpubench.settings.schema import DataSettings, ModelSettings
        from gpubench.worker.models import build

        sizes = DataSettings(image_size=self.image_size, sequence_length=self.sequence_length)
        return build(ModelSettings(name=self.model), sizes, seed=0)

    def optimizer(self, workload: "Workload") -> "Optimizer":
        import torch

        return torch.optim.AdamW(workload.module.parameters(), LEARNING_RATE)


def answer(peak: int, **parts: int | None) -> None:
    """Bytes; None for a part that the estimator does not report."""
    print(json.dumps({"peak": peak, **parts}))
