"""The modules and parameters of a model, whatever its class makes of them."""

from typing import Any

import pytest
from torch import nn

from gpubench.probe.modules import first_parameter, parameters_of


def cyclic() -> nn.Module:
    outer, inner = nn.Sequential(), nn.Sequential()
    outer.add_module("inner", inner)
    inner.add_module("outer", outer)
    outer.add_module("last", nn.Linear(1, 1))
    return outer


def without(name: str) -> nn.Module:
    module = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    setattr(module, name, None)
    return module


class Overriding(nn.Linear):
    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not these")


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Sequential(nn.ReLU(), nn.Sequential()), nn.Linear(2, 2), nn.Linear(3, 3)),
        nn.Linear(2, 2, bias=False),
        nn.ReLU(),
        nn.ModuleDict({"one": nn.BatchNorm1d(2, affine=False), "two": nn.Embedding(2, 2)}),
        without("other"),
        cyclic(),
        Overriding(2, 2),
    ],
)
def test_the_first_parameter_is_that_of_all_of_them(model: nn.Module) -> None:
    assert first_parameter(model) is next(parameters_of(model), None)


def test_a_parameter_that_was_removed_is_not_the_first() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("weight", None)
    assert first_parameter(model) is model.bias


def test_an_object_that_is_no_module_inside_has_none() -> None:
    model = nn.Module()
    vars(model).pop("_modules")
    assert first_parameter(model) is None
