"""What a rule of `as_cuda` is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """`function` takes the place of the operator's own kernel for a dispatch key of torch."""

    operator: str
    """As in aten, with its overload: "softmax.int"."""
    key: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Substitute:
    """`function` takes the place of the one that is called `name` in a Python module."""

    module: ModuleType
    name: str
    function: Callable[..., Any]


Met = Callable[[], None]
"""To be called where a rule has changed something."""

COMPOSITE = "CompositeImplicitAutograd"
"""The key of operators that are made of others: autograd sees only what they call."""
