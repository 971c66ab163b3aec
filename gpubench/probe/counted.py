"""Counts the work of training: the samples that the model is given, the backward passes, and what is updated."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import is_lazy

PASSES_WITHOUT_OPTIMIZER = 8
"""Backward passes after which a program that has made no optimizer is taken for one that updates its parameters itself.
A check of a model before its optimizer is made takes fewer."""


class ByHand:
    """Stands for the optimizer of such a program."""


BY_HAND = ByHand()


class Counted:
    """The work that this process has done so far. Counting reads no tensor, so that it never waits for a device."""

    def __init__(self) -> None:
        self.passes = 0
        """The backward passes."""
        self._forwarded = 0
        """The samples that the model was given, in calls that compute gradients."""
        self.last = False
        """Whether the step that runs is the last one of the repeat, whose updates are always counted."""
        self._updates: dict[int, int] = {}
        """The number of updates by the identity of their optimizer."""
        self._elements: dict[int, list[int]] = {}
        """The elements of the parameters that the counted updates of each optimizer have changed."""

    def forward(self, samples: int) -> int:
        """Counts the samples of a forward pass, and returns them."""
        self._forwarded += samples
        return samples

    def add(self, other: Counted) -> None:
        """Counts the passes that `other` has counted."""
        self.passes += other.passes
        self._forwarded += other._forwarded

    def update(self, optimizer: Any) -> None:
        """Counts what an update of the optimizer has changed: the parameters that have a gradient.

        That takes longer the more parameters there are, so that it is done in the first update, in ever rarer ones
        after it (the second, fourth, eighth and so on), and in the last step.
        """
        number = self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        if self.last or number & (number - 1) == 0:
            parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
            elements = sum(each.numel() for each in parameters if not is_lazy(each))
            self._elements.setdefault(id(optimizer), []).append(elements)

    @property
    def by_hand(self) -> bool:
        """Whether there were so many backward passes that an optimizer would have been made by now."""
        return self.passes >= PASSES_WITHOUT_OPTIMIZER

    def found(self) -> dict[str, int] | None:
        """Returns the counts as the fields of `gpubench.events.WorkCounted`; None if nothing was updated."""
        if not self._elements:
            return None
        return {
            "backward_passes": self.passes,
            "forwarded": self._forwarded,
            "updated_first": sum(found[0] for found in self._elements.values()),
            "updated_least": sum(min(found) for found in self._elements.values()),
        }
