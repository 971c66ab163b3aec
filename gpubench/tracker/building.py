"""Models built on tensors without memory: what their constructors do there that needs values, or swaps tensors."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpubench.errors import ModelError
from gpubench.models import Workload, build
from gpubench.settings import DataSettings, ModelSettings

RECURRENT = "cuDNN computes it in memory of its own, of which nothing is known"


def build_without_memory(model: ModelSettings, data: DataSettings, seed: int) -> Workload:
    """As `build`, under a FakeTensorMode."""
    with _buildable():
        workload = build(model, data, seed)
        if any(_parted(tensor) for tensor in (*workload.module.parameters(), *workload.module.buffers())):
            workload.module._apply(lambda tensor: tensor.detach())
    return workload


def refuse_unknown(module: nn.Module, cuda: bool) -> None:
    """Raises ModelError for what is known not to be predicted. On a CPU, oneDNN's LSTM has such memory too."""
    kinds = nn.RNNBase if cuda else nn.LSTM
    for path, part in module.named_modules():
        if isinstance(part, kinds):
            raise ModelError(
                f"{type(part).__name__} at {path or 'the top'} cannot be predicted: "
                f"{RECURRENT if cuda else 'oneDNN computes it in memory that no tensor shows beforehand'}",
                "measure it on the device",
            )


def _parted(tensor: Tensor) -> bool:
    """Whether its views would not share its storage: so it is with fakes that copy.deepcopy made."""
    return bool(tensor.untyped_storage()._cdata != tensor.detach().untyped_storage()._cdata)


@contextmanager
def _buildable() -> Iterator[None]:
    """Weights are left as they are where torch draws until the values please, as it does itself for meta tensors; and
    Module.to() puts new parameters in the place of the old, as fakes cannot be swapped."""
    drawing, apply = torch.nn.init._no_grad_trunc_normal_, nn.Module._apply
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    nn.Module._apply = _applied  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by copy.deepcopy
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_, nn.Module._apply = drawing, apply  # type: ignore[method-assign]


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    made: dict[Any, nn.Parameter] = {}  # tied parameters stay tied
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
            part._parameters[name] = made[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module
