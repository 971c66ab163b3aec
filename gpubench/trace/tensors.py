"""Types and shapes of an operator's inputs, as traces write them."""

import math
import re
from dataclasses import dataclass
from typing import Any

from gpubench.trace.columns import Signature

TYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "long long": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
}
"""What the C++ type of a tensor's elements is called in PyTorch, and its bytes."""

_NUMBERS = re.compile(r"\[(-?\d{1,18}(?:, ?-?\d{1,18})*)\]$")


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...] | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """In memory: along a dimension of stride 0 there is one element."""
        if self.strides is None or len(self.strides) != len(self.shape) or not self.elements:
            return self.elements * self.itemsize
        return self.itemsize * math.prod(size for size, step in zip(self.shape, self.strides, strict=True) if step)


def tensor(signature: Signature, argument: int) -> Tensor | None:
    """The tensor at a place among the inputs, from 0; None if there is none, or it is not known to be one."""
    if argument >= len(signature.dims) or argument >= len(signature.types):
        return None
    shape, known = _sizes(signature.dims[argument]), TYPES.get(signature.types[argument])
    if shape is None or known is None:
        return None
    strides = _sizes(signature.strides[argument]) if argument < len(signature.strides) else None
    return Tensor(shape, *known, strides)


def tensors(signature: Signature) -> list[Tensor]:
    found = [tensor(signature, argument) for argument in range(len(signature.dims))]
    return [one for one in found if one is not None]


def numbers(signature: Signature, argument: int) -> list[int] | None:
    """A list of integers at a place among the inputs, as "[1, 1]"; None where values were not recorded."""
    match = _NUMBERS.match(_value(signature, argument))
    return [int(one) for one in match[1].split(",")] if match else None


def flag(signature: Signature, argument: int) -> bool | None:
    return {"True": True, "False": False}.get(_value(signature, argument))


def shapes_text(signature: Signature) -> str:
    """As "[64, 3, 224, 224] [64, 3, 7, 7]": what is no tensor, or one of no dimensions, is left out."""
    return " ".join(str(dims) for dims in signature.dims if isinstance(dims, list) and dims)


def dtype_text(signature: Signature) -> str:
    """The type of the first tensor."""
    return next((TYPES[one][0] for one in signature.types if one in TYPES), "")


def _value(signature: Signature, argument: int) -> str:
    return str(signature.concrete[argument]) if argument < len(signature.concrete) else ""


def _sizes(found: Any) -> tuple[int, ...] | None:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < 2**40 for size in found):
        return None
    return tuple(found)
