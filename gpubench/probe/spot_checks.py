"""Looks closely at a sample of the steps: whether training computes with new data, and whether its results are used.

Which steps these are is chosen at random, with numbers of the probe's own, so that a program cannot know it. Nothing is
read from a device: contents and parameters are read on the CPU, from their memory, between two steps. What is read of a
batch are a few of its bytes, and it is known again if it is the same tensor, unchanged.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from typing import Any, Callable
from weakref import ref

import torch

from .device import IN_MEMORY, stored

FIRST, ONE_IN, ENOUGH, THEN_ONE_IN = 8, 8, 64, 64
"""The first steps are all looked at, and of the others one in so many, until ENOUGH of these have been."""
MOST_CONTENTS = 4096
"""The contents that are remembered."""
PLACES, BYTES = 32, 8
"""Of a batch so many pieces of so many bytes are read, at equal distances."""
MOST_OUTPUTS = 4
"""The outputs of a forward pass of which one has to be reached by a backward pass."""
PARAMETERS, ELEMENTS = 16, 4
"""The parameters of an update whose values are read, and the elements of each."""


class SpotChecks:
    """What has been found in the sample of the steps so far."""

    def __init__(self) -> None:
        self.looks = True
        """Whether the current step is looked at."""
        self.looked_at = self.reached = self.contents = self.repeated = self.parameters = self.changed = 0
        """The counts of `gpubench.events.WorkCounted`."""
        self._number = 0
        """The number of the current step, and `_next` that of the next one to look at."""
        self._next = 1
        self._given: list[Any] = []
        """The tensors that the model was given on the CPU in this step."""
        self._seen: dict[bytes, None] = {}
        self._same: dict[int, tuple[Any, int]] = {}
        """The tensors of earlier steps by identity: a weak reference, and the version."""
        self._values: list[tuple[Any, list[tuple[int, float]]]] = []
        """The parameters of the update that runs, with the values before it by their places."""

    def give(self, tensor: Any) -> None:
        """Takes up the first tensor of a forward pass of training. One on the CPU is read at the end of the step."""
        if type(tensor) is not torch.Tensor or tensor.is_inference():  # one of inference mode has no version
            return
        self.contents += 1
        known = self._same.get(id(tensor))
        if known and known[0]() is tensor and known[1] == tensor._version:
            self.repeated += 1
            return
        if len(self._same) < MOST_CONTENTS:
            self._same[id(tensor)] = ref(tensor), tensor._version
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            self._given.append(tensor)

    def returned(self, result: Any) -> None:
        """Takes up the outputs of that forward pass, one of which a backward pass should reach."""
        self.looked_at += 1
        reached: list[None] = []

        def reach(*_: Any) -> None:
            if not reached:
                reached.append(None)
                self.reached += 1

        for node in _nodes(result, MOST_OUTPUTS):
            with suppress(Exception):  # a node of an older release of PyTorch, or of the program's own class
                node.register_prehook(reach)

    def before_update(self, optimizer: Any) -> None:
        """Reads some parameters that have a gradient, at places where it is not 0."""
        given = (_local(each) for group in optimizer.param_groups for each in group["params"])
        found = [each for each in given if _is_readable(*each)]
        self._values = []
        for parameter, gradient in found[:: max(1, len(found) // PARAMETERS)][:PARAMETERS]:
            places = [place for place in _places(parameter.numel(), ELEMENTS) if _value(gradient, place)]
            if values := [(place, value) for place in places if (value := _value(parameter, place)) is not None]:
                self._values.append((parameter, values))

    def after_update(self) -> None:
        """Reads them again."""
        for each, values in self._values:
            after = [_value(each, place) for place, _ in values]
            if None not in after:
                self.parameters += 1
                self.changed += after != [value for _, value in values]
        self._values = []

    def end_step(self) -> None:
        """Reads the contents of the step that has ended, and chooses whether to look at the next one."""
        if self.looks:
            self._read_contents()
            self._choose()
        self.skip(1)

    @property
    def until_next(self) -> int:
        """The number of steps before the next one that is looked at; 0 if that is the current one."""
        return self._next - self._number

    def skip(self, steps: int) -> None:
        """Takes up the end of steps that were not looked at."""
        if steps:
            self._number += steps
            self.looks = self._number == self._next

    def _read_contents(self) -> None:
        for tensor in self._given:
            if (content := _content(tensor)) is None:
                self.contents -= 1
            elif content in self._seen:
                self.repeated += 1
            elif len(self._seen) < MOST_CONTENTS:
                self._seen[content] = None
        self._given = []

    def _choose(self) -> None:
        """Chooses the next step to look at: each of those up to twice the usual distance is as likely."""
        one_in = ONE_IN if self._number < FIRST + ENOUGH * ONE_IN else THEN_ONE_IN
        random = int.from_bytes(os.urandom(4), "little") % (2 * one_in - 1)
        self._next = self._number + 1 + (random if self._number >= FIRST - 1 else 0)

    def found(self) -> dict[str, int]:
        """Returns the counts as fields of `gpubench.events.WorkCounted`."""
        return {
            "looked_at": self.looked_at,
            "reached": self.reached,
            "contents": self.contents,
            "repeated_contents": self.repeated,
            "looked_at_parameters": self.parameters,
            "changed_parameters": self.changed,
        }


def _nodes(result: Any, most: int) -> list[Any]:
    """Returns the nodes of the graph that have computed the outputs of a module, at most as many."""
    if isinstance(result, torch.Tensor):
        return [result.grad_fn] if result.grad_fn is not None else []
    if isinstance(result, (list, tuple)):
        parts = list(result)
    else:
        values = getattr(result, "values", None)
        try:
            parts = list(values()) if callable(values) else []
        except Exception:  # the result is of the program's own class
            parts = []
    found: list[Any] = []
    for part in parts:
        if len(found) < most and isinstance(part, (torch.Tensor, list, tuple, dict)):
            found += _nodes(part, most - len(found))
    return found[:most]


def _local(parameter: Any) -> tuple[Any, Any]:
    """Returns a parameter and its gradient, or their parts of this rank if they are sharded as DTensors."""
    gradient = getattr(parameter, "grad", None)
    return getattr(parameter, "_local_tensor", parameter), getattr(gradient, "_local_tensor", gradient)


def _is_readable(parameter: Any, gradient: Any) -> bool:
    """Returns whether a parameter with a gradient may be read from its memory."""
    return all(
        isinstance(each, torch.Tensor)
        and each.device.type == "cpu"
        and each.layout is torch.strided
        and each.dtype in IN_MEMORY
        and each.is_contiguous()
        and each.numel() > 0
        for each in (gradient, parameter)
    )


def _places(size: int, number: int) -> list[int]:
    return [(2 * place + 1) * size // (2 * number) for place in range(min(size, number))]


def _value(tensor: Any, place: int) -> float | None:
    """Returns an element of a tensor; None if it cannot be read, or not any more."""
    try:
        return stored(tensor, place)
    except Exception:  # it has no storage, or another type since
        return None


def _content(tensor: Any) -> bytes | None:
    """Returns some bytes of a tensor, in its layout in memory; None if it cannot be read."""
    try:
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        size = min((last + 1) * tensor.element_size(), storage.nbytes() - begin)
        address = storage.data_ptr()
        if not address or tensor.numel() == 0 or size < BYTES:
            return None
        return _reader(size)(address + begin)
    except Exception:  # it has no storage, as inside of torch.func
        return None


@lru_cache(maxsize=64)
def _reader(size: int) -> Callable[[int], bytes]:
    """Returns what reads the pieces of a batch of so many bytes from its address. Most batches have the same size."""
    memory = (ctypes.c_char * size).from_address
    pieces = [slice(place, place + BYTES) for place in _places(size - BYTES + 1, PLACES)]

    def read(address: int) -> bytes:
        content: Any = memory(address)
        return b"".join([content[piece] for piece in pieces])

    return read
