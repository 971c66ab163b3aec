"""Counts the work of training: the samples that the model is given, the backward passes, and what is updated."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch.nn.parameter import is_lazy

PASSES_WITHOUT_OPTIMIZER = 8
"""Backward passes after which a program that has made no optimizer is taken for one that updates its parameters itself.
A check of a model before its optimizer is made takes fewer."""


MOST_SHAPES, NAMED_SHAPES = 64, 8
"""The shapes that are noted, and those that the host is told."""


class ByHand:
    """Stands for the optimizer of such a program."""


BY_HAND = ByHand()


class Counted:
    """The work that this process has done so far. Counting reads no tensor, so that it never waits for a device."""

    def __init__(self) -> None:
        self.passes = 0
        """The backward passes."""
        self.forwarded = 0
        """The samples that the model was given, in calls that compute gradients."""
        self.last = False
        """Whether the step that runs is the last one of the repeat, whose updates are always counted."""
        self._updates: dict[int, int] = {}
        """The number of updates by the identity of their optimizer."""
        self._elements: dict[int, list[tuple[int, int, int]]] = {}
        """For the counted updates of each optimizer: the elements of the parameters that it has changed, their bytes,
        and their number.
        """
        self._calls = self._given = self._squares = 0
        """The forward passes whose first tensor was seen, its elements in all of them, and the sum of their squares."""
        self._shapes: Counter[str] = Counter()
        """The shapes and types of that tensor in a sample of these forward passes."""
        self.parts = self._before = 0
        """The parts of the loop that have ended, and those before the first of these forward passes."""
        self._unused = self._used_until = 0
        """The backward passes whose gradients were cleared, and those until the last update, or until then."""
        self.batches = 0
        """The batches that were drawn from DataLoaders in training."""

    def give(self, samples: int, size: int, shape: str = "") -> None:
        """Counts a forward pass: its samples, and the elements of its first tensor, whose shape is noted unless ""."""
        self.forwarded += samples
        if not self._calls:
            self._before = self.parts
        self._calls += 1
        self._given += size
        self._squares += size * size
        if shape and len(self._shapes) < MOST_SHAPES:
            self._shapes[shape] += 1

    def clear(self) -> None:
        """Counts the backward passes since the last update, whose gradients are cleared now."""
        self._unused += self.passes - self._used_until
        self._used_until = self.passes

    def end_part(self) -> None:
        """Takes up the end of a part of the loop, by an update or by one that is skipped."""
        self.parts += 1
        self._used_until = self.passes

    def add(self, other: Counted) -> None:
        """Counts what `other` has counted."""
        if other._calls and not self._calls:
            self._before = self.parts
        self.passes += other.passes
        self.forwarded += other.forwarded
        self._calls += other._calls
        self._given += other._given
        self._squares += other._squares
        self._shapes.update(other._shapes)

    def is_due(self, optimizer: Any) -> bool:
        """Returns whether the next update of the optimizer is one of those that are counted; see `update`."""
        return not self.until_due(id(optimizer))

    def update(self, optimizer: Any) -> None:
        """Counts what an update of the optimizer has changed: the parameters that have a gradient.

        That takes longer the more parameters there are, so that it is done in the first update, in ever rarer ones
        after it (the second, fourth, eighth and so on), and in the last step.
        """
        due = self.is_due(optimizer)
        self.skip(id(optimizer), 1)
        if due:
            parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
            known = [each for each in parameters if not is_lazy(each)]
            sizes = [each.numel() for each in known]
            held = sum(size * each.element_size() for size, each in zip(sizes, known))
            self._elements.setdefault(id(optimizer), []).append((sum(sizes), held, len(known)))

    def skip(self, optimizer: int, updates: int) -> None:
        """Counts updates by the optimizer with this identity of which nothing is read; see `update`."""
        self._updates[optimizer] = self._updates.get(optimizer, 0) + updates

    def until_due(self, optimizer: int) -> int:
        """Returns the number of updates before the next one that `update` reads."""
        number = self._updates.get(optimizer, 0)
        return 0 if self.last else (1 << number.bit_length()) - number - 1

    @property
    def by_hand(self) -> bool:
        """Whether there were so many backward passes that an optimizer would have been made by now."""
        return self.passes >= PASSES_WITHOUT_OPTIMIZER

    def found(self, steps: int) -> dict[str, Any] | None:
        """Returns the counts as the fields of `gpubench.events.WorkCounted`; None if nothing was updated.

        `steps` is the number of steps, each of which has one part of the loop or more.
        """
        if not self._elements:
            return None
        least = [min(found) for found in self._elements.values()]
        mean = self._given / self._calls if self._calls else 0.0
        spread = math.sqrt(max(0.0, self._squares / self._calls - mean * mean)) if self._calls else None
        counted = self.parts - self._before if self._calls else self.parts
        return {
            "backward_passes": self.passes,
            "forwarded": self.forwarded,
            "updated_first": sum(found[0][0] for found in self._elements.values()),
            "updated_least": sum(elements for elements, _, _ in least),
            "updated_bytes": sum(held for _, held, _ in least),
            "updated_parameters": sum(number for _, _, number in least),
            "calls": self._calls,
            "counted_steps": round(steps * counted / self.parts) if self.parts else steps,
            "elements": self._given or None,
            "elements_spread": spread,
            "shapes": [shape for shape, _ in self._shapes.most_common(NAMED_SHAPES)],
            "batches": self.batches,
            "unused_passes": self._unused,
        }


def elements_of(tensor: Any) -> int:
    """Returns the elements of a tensor; 0 if there is none, or one of the program's own class, or without a shape."""
    try:
        return int(tensor.numel())
    except Exception:
        return 0


def shape_of(tensor: Any) -> str:
    """Returns the shape and the type of a tensor in words; "" for one without a shape, as a nested one."""
    try:
        return f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).rpartition('.')[2]}"
    except Exception:
        return ""
