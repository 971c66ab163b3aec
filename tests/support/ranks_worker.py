"""Run by torchrun from test_distributed.py: one training step through the project's own wrapping, gradients saved.

    ranks_worker.py STRATEGY ACCUMULATION FOLDER

STRATEGY is that of the settings; "fsdp2-separate" is fsdp2 with distributed.separate_reduce_scatter.

Every rank takes its share of one fixed batch. Rank 0 writes the full gradients to FOLDER/gradients.pt, and every rank
how often it was told that its last bucket was ready.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpubench.ranks import Ranks
from gpubench.settings.schema import Precision
from gpubench.settings.sections import DistributedSettings
from gpubench.worker import distributed
from gpubench.worker.process import leave

SAMPLES = 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (SAMPLES,), generator=generator)


def main(strategy: str, accumulation: int, folder: Path) -> None:
    ranks, cpu = Ranks.from_environment(), torch.device("cpu")
    strategy, _, separate = strategy.partition("-")
    given = {"world_size": ranks.world_size, "strategy": strategy, "separate_reduce_scatter": bool(separate)}
    settings = DistributedSettings.model_validate(given)
    settings = settings.model_copy(update={"backend": "gloo"})
    distributed.setup_ddp(settings, ranks, distributed.open_store(ranks, 60), cpu)
    calls: list[int] = []
    module = distributed.wrap(model(), settings, Precision.fp32, cpu, lambda: calls.append(1))
    assert len(dist.distributed_c10d._world.pg_map) == (2 if separate else 1)
    inputs, targets = (part.chunk(ranks.world_size)[ranks.rank].chunk(accumulation) for part in batch())
    for micro in range(accumulation):
        last = micro == accumulation - 1
        with nullcontext() if last else distributed.without_sync(module):
            loss = nn.functional.cross_entropy(module(inputs[micro]), targets[micro]) / accumulation
            loss.backward()
    gradients = [whole(parameter.grad) for parameter in module.parameters()]
    if ranks.is_rank_zero:
        torch.save(gradients, folder / "gradients.pt")
    (folder / f"calls-{ranks.rank}").write_text(str(len(calls)))
    del module, loss  # before the group: freed after it, the reducer joins a thread that waits for the GIL
    distributed.cleanup_ddp()


def whole(gradient: Tensor | None) -> Tensor:
    """A sharded gradient, gathered."""
    assert gradient is not None
    gathered = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    assert isinstance(gathered, Tensor)
    return gathered


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    leave(0)
