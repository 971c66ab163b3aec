"""Models that copy, cast or tie themselves are built without memory as with it; what cannot be predicted is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from footprints_made import row
from test_tracker import H200, HOST, followed, on_gpu, predicted, settings, table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpubench.errors import ModelError
from gpubench.kinds.memory.predicted_device import Target
from gpubench.kinds.memory.worker.predict import _applied, build_without_memory
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.models import build

WIDTH = 32
Triple = tuple[nn.Module, Callable[[int], Any], Callable[[nn.Module, Any], Tensor]]


def trained(module: nn.Module, dtype: torch.dtype = torch.float32) -> Triple:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = (model(batch) ** 2).mean()
        return out

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
    def __init__(self, kind: Callable[[int, int], nn.RNNBase]) -> None:
        super().__init__()
        self.memory = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.memory(x)[0]
        return out


def lstm() -> Triple:
    return trained(Recurrent(nn.LSTM))


def gru() -> Triple:
    return trained(Recurrent(nn.GRU))


def truncated() -> Triple:
    """Its weights are drawn until they lie within bounds."""
    linear = nn.Linear(WIDTH, WIDTH)
    nn.init.trunc_normal_(linear.weight, std=0.02, a=-0.04, b=0.04)
    return trained(linear)


def own(name: str) -> str:
    return f"{__name__}:{name}"


def without_memory(name: str) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return build_without_memory(ModelSettings(name=own(name)), DataSettings(), 0).module


@pytest.mark.parametrize("name", ["copied", "half", "tied", "gru", "truncated"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_cpu_what_is_predicted_is_what_is_measured(name: str, optimizer: str) -> None:
    asked = settings(own(name), training__batch_size=16, training__optimizer=optimizer)
    truth, found = table(followed(asked)), table(predicted(asked))
    assert found.peak.level == truth.peak.level
    assert found.peak.amounts == truth.peak.amounts
    assert found.modules == truth.modules
    # What was made for the copies is thrown away as the model is built, here in another order than there.
    assert [one for one in found.phases if one.stage != "setup"] == [
        one for one in truth.phases if one.stage != "setup"
    ]


@pytest.mark.parametrize("name", ["copied", "half", "tied", "gru", "truncated"])
def test_without_memory_the_model_is_the_same_but_for_its_values(name: str) -> None:
    truth, found = build(ModelSettings(name=own(name)), DataSettings(), 0).module, without_memory(name)

    def told(tensors: Any) -> list[tuple[str, torch.Size, torch.dtype, bool]]:
        return [(path, one.shape, one.dtype, one.requires_grad) for path, one in tensors]

    assert told(found.named_parameters()) == told(truth.named_parameters())
    assert told(found.named_buffers()) == told(truth.named_buffers())
    assert [path for path, _ in found.named_modules()] == [path for path, _ in truth.named_modules()]
    assert all(isinstance(one, nn.Parameter) for one in found.parameters())


def test_copies_have_parameters_of_their_own_that_share_with_their_views() -> None:
    module = without_memory("copied")
    parameters = list(module.parameters())
    assert len({one.untyped_storage()._cdata for one in parameters}) == len(parameters) == 8
    for one in (*parameters, *module.buffers()):
        assert one.untyped_storage()._cdata == one.detach().view(-1).untyped_storage()._cdata


def test_a_constructor_that_casts_its_module_casts_all_that_is_in_it() -> None:
    module = without_memory("half")
    assert {one.dtype for one in (*module.parameters(), *module.buffers())} == {torch.bfloat16}
    assert [path for path, one in module.named_parameters() if not one.requires_grad] == ["frozen"]


def test_tied_parameters_stay_tied_when_they_are_cast() -> None:
    module = without_memory("tied")
    assert isinstance(module, Tied)
    assert module.first.weight is module.second.weight
    assert module.first.weight.dtype is torch.bfloat16
    assert module.first.bias is not module.second.bias
    end = row(table(predicted(settings(own("tied"), training__batch_size=4))), "steady", "optimizer").end
    assert end["parameters"] == end["gradients"] == 2 * (WIDTH * WIDTH + 2 * WIDTH)


def test_what_a_model_notes_on_its_parameters_is_there_for_its_forward_pass() -> None:
    module = nn.Linear(2, 2)
    vars(module.weight)["decays"] = False
    assert vars(_applied(module, torch.clone).weight)["decays"] is False


def test_torchs_own_way_to_build_is_there_again_whatever_happens() -> None:
    before = nn.Module._apply, torch.nn.init._no_grad_trunc_normal_
    without_memory("half")
    assert (nn.Module._apply, torch.nn.init._no_grad_trunc_normal_) == before
    with pytest.raises(ModelError, match="nowhere"):
        without_memory("nowhere")
    assert (nn.Module._apply, torch.nn.init._no_grad_trunc_normal_) == before


@pytest.mark.parametrize(
    ("name", "target", "kind", "whose"),
    [("lstm", HOST, "LSTM", "oneDNN"), ("lstm", H200, "LSTM", "cuDNN"), ("gru", H200, "GRU", "cuDNN")],
)
def test_recurrent_layers_that_take_memory_unseen_are_refused_by_name(
    name: str, target: Target, kind: str, whose: str
) -> None:
    asked = on_gpu(own(name)) if target.cuda else settings(own(name))
    with pytest.raises(ModelError, match=f"^{kind} at memory cannot be predicted: {whose}") as refused:
        predicted(asked, target)
    assert refused.value.hint
