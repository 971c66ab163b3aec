"""The course of a training loop, where only parts of it tell what they are."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from gpubench.memory.history import Phase

_LOOP: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "optimizer", "zero_grad")
_PASS: tuple[Phase, ...] = ("forward", "loss")
_BATCH: tuple[Phase, ...] = ("data", "backward", "optimizer", "zero_grad")


def filled(told: Sequence[Phase | None]) -> list[Phase]:
    """The phase of each event, of those that tell none by what was told before and after it.

    Between two of one phase it is that phase; between forward and backward pass the loss; between backward pass and
    optimizer what prepares its step; and before the next forward pass a batch is fetched.
    """
    runs = [(phase, len(list(run))) for phase, run in groupby(told)]
    phases = [None, *(phase for phase, _ in runs), None]
    found: list[Phase] = []
    for number, (phase, length) in enumerate(runs):
        found += [phase or _between(phases[number], phases[number + 2])] * length
    return found


def steps(phases: Sequence[Phase]) -> Iterator[int | None]:
    """The step of each event, from 0; None before the loop begins.

    A step ends with the optimizer, and with the gradients' removal where that follows; in a loop without optimizer
    with its backward pass.
    """
    last: Phase = "optimizer" if "optimizer" in phases else "backward"
    step, ending = None, False
    for phase in phases:
        if phase in _LOOP:
            if step is None:
                step = 0
            elif ending and phase not in (last, "zero_grad"):
                step, ending = step + 1, False
            ending |= phase == last
        yield step


def _between(before: Phase | None, after: Phase | None) -> Phase:
    """Before the first forward pass the model may be built as well as a batch: nothing is said of what stands there."""
    if before is not None and before == after:
        return before
    if before in _PASS and after in (*_PASS, "zero_grad", "backward"):
        return "loss"
    if before == "zero_grad" and after == "backward":  # gradients may be removed as late as that
        return "loss"
    if before == "backward" and after == "optimizer":
        return "optimizer"
    return "data" if before in _BATCH and after in ("data", "forward") else "unknown"
