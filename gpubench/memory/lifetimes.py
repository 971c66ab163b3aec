"""What allocations hold, told by when they were asked for and how long they lived."""

from bisect import bisect_right
from collections.abc import Sequence

from gpubench.memory.history import Category, History, Mark, Phase

_LASTING: dict[Phase, Category] = {
    "model": "parameters",
    "data": "inputs",
    "forward": "activations",
    "loss": "activations",
    "backward": "gradients",
    "optimizer": "optimizer_state",
}
"""What is held on when the phase that asked for it is over."""


def classify(history: History) -> None:
    """Gives allocations of category "unknown" one, in place, where something tells:

    - given back within the phase that asked for it, in the same step: temporaries;
    - asked for in forward or loss: activations if held when a backward pass of the same step begins, or if held beyond
      the step, as outputs that the loop keeps a name for, or where no backward pass follows; else temporaries;
    - in backward, and held when it is over: gradients, be they removed after the optimizer or in the next step. What
      it does again of the forward pass is given back within it, and so temporary;
    - in the optimizer, and held when it is over: its state. With the model: parameters, buffers among them;
    - with the data: inputs, however long they live, as a loop may drop the last batch with the next at hand;
    - where the phase is not known, nothing tells.

    Where the history ends within a phase, what it holds then counts as held on. Workspaces, which libraries ask for in
    a forward or backward pass and keep, have nothing in their lifetime that sets them apart.
    """
    starts = [mark.at for mark in history.marks]
    over = [*starts[1:], history.length]
    backward = _next_backward(history.marks, history.length)
    for one in history.allocations:
        if one.category == "unknown" and one.phase in _LASTING:
            span = bisect_right(starts, one.begin) - 1
            following = backward if one.phase in ("forward", "loss") else over
            held = one.phase == "data" or one.end is None or one.end >= following[span]
            one.category = _LASTING[one.phase] if held else "temporaries"


def _next_backward(marks: Sequence[Mark], length: int) -> list[int]:
    """For each phase where the next backward pass of its step begins; where none does, where its step ends."""
    found = [length] * len(marks)
    for number in range(len(marks) - 2, -1, -1):
        coming = marks[number + 1]
        near = coming.phase == "backward" or coming.step != marks[number].step
        found[number] = coming.at if near else found[number + 1]
    return found
