"""Models that copy, cast or tie themselves are built without memory as with it; what cannot be predicted is refused."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_tracker import H200, HOST, followed, on_gpu, predicted, row, settings, table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpubench.errors import ModelError
from gpubench.memory.history import History
from gpubench.models import build
from gpubench.settings import DataSettings, ModelSettings
from gpubench.tracker.building import build_without_memory, refuse_unknown
from gpubench.tracker.prediction import HOST as CPU

WIDTH = 32
Triple = tuple[nn.Module, Callable[[int], Any], Callable[[nn.Module, Any], Tensor]]


def trained(module: nn.Module, dtype: torch.dtype = torch.float32) -> Triple:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) ** 2).mean()

    return module, lambda size: torch.rand(size, WIDTH, dtype=dtype), loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.relu(self.inner(x))) * self.scale
        return out


def copied() -> Triple:
    """As nn.TransformerEncoder makes its layers."""
    first = Block()
    return trained(nn.Sequential(*(copy.deepcopy(first) for _ in range(2))))


class Half(nn.Module):
    """Casts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x) * self.frozen
        return out


def half() -> Triple:
    return trained(Half(), torch.bfloat16)


class Tied(nn.Module):
    """Its two products are of one parameter, also when it has cast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def tied() -> Triple:
    return trained(Tied(), torch.bfloat16)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.memory = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.memory(x)[0]
        return out


def lstm() -> Triple:
    return trained(Recurrent(nn.LSTM))


def gru() -> Triple:
    return trained(Recurrent(nn.GRU))


def own(name: str) -> str:
    return f"{__name__}:{name}"


def without_memory(name: str) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return build_without_memory(ModelSettings(name=own(name)), DataSettings(), 0).module


def counted(history: History, category: str) -> list[int]:
    return [one.size for one in history.allocations if one.category == category]


@pytest.mark.parametrize("name", ["copied", "half", "tied", "gru"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_cpu_what_is_predicted_is_what_is_measured(name: str, optimizer: str) -> None:
    asked = settings(own(name), training__batch_size=4, training__optimizer=optimizer)
    truth, found = table(followed(asked)), table(predicted(asked))
    assert found.peak == truth.peak
    assert [one for one in found.phases if one.stage != "setup"] == [
        one for one in truth.phases if one.stage != "setup"
    ]
