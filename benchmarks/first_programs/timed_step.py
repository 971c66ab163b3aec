"""A step of training whose operators are issued one by one, with the program's own time of each part."""

from collections.abc import Callable

import torch
from own_time import OwnTime
from torch import nn


def by_operators(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, own: OwnTime
) -> Callable[[], None]:
    """Returns a function that issues one step, which `own` has begun."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        own.end("optimizer")
        output = model(batch)
        own.end("forward")
        loss = output.square().mean()
        own.end("other")
        loss.backward()
        own.end("backward")
        optimizer.step()
        own.end("optimizer")

    return step
