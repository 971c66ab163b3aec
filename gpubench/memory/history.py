"""Allocations in their order: the one form that a followed run, a prediction, a snapshot and a trace are brought to."""

from typing import Literal

from msgspec import Struct

Category = Literal[
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "inputs", "temporaries", "workspaces",
    "before", "unknown",
]  # fmt: skip
"""What an allocation holds. `before`: it was there when the recording began. `unknown`: nothing tells."""

Phase = Literal["start", "model", "data", "forward", "loss", "backward", "optimizer", "zero_grad", "unknown"]
"""What the program was doing. Forward is the model's own; what comes between it and the backward pass is the loss."""
PLACES: dict[Phase, str] = {
    "start": "at the start",
    "model": "while the model is built",
    "data": "in the {}loading of data",
    "forward": "in the {}forward pass",
    "loss": "in the {}loss",
    "backward": "in the {}backward pass",
    "optimizer": "in the {}optimizer step",
    "zero_grad": "in the {}zero_grad",
    "unknown": "",
}
"""In a sentence, with room for "first "; nothing where nothing tells."""


class Allocation(Struct, gc=False):
    """One piece of memory from when it was asked for until it was given back.

    `begin` and `end` are positions in the history: 0 is the first event, and each allocation and each release takes a
    position of its own. It is held from `begin` on and up to, not including, `end`.
    """

    size: int
    """Bytes asked for."""
    begin: int
    end: int | None = None
    """None where it is held when the history ends."""
    category: Category = "unknown"
    phase: Phase = "unknown"
    """When it was asked for; so are the next four."""
    step: int | None = None
    """Counts from 0; None before the first."""
    module: str = ""
    """Path of the nn.Module, as "transformer.h.0.attn"; "" where it is the model itself, or not known."""
    operator: str = ""
    """As "aten::mm"."""
    shape: str = ""
    """As "float32[8, 1024, 768]"."""
    where: str = ""
    """file:line of the innermost frame that is the user's."""


class Mark(Struct, frozen=True, gc=False):
    """From position `at` on the program was in `phase`."""

    at: int
    phase: Phase
    step: int | None = None


class Reading(Struct, frozen=True, gc=False):
    """What the device's own allocator said of the time between the mark before `at` and `at` itself, in bytes."""

    at: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Counts(Struct, frozen=True):
    """What an allocator did over a history. None: nothing tells."""

    allocations: int
    """Where no device's allocator counts, as on a CPU, of what the history holds: tensors' memory."""
    frees: int
    retries: int | None = None
    """Allocations that the driver had too little for, until the allocator gave back what it kept unused."""
    ooms: int | None = None
    """Allocations that failed for want of memory."""
    largest_free: int | None = None
    """Bytes of the largest block that the allocator keeps unused when the history ends."""


class History(Struct):
    allocations: list[Allocation]
    """In the order of `begin`."""
    marks: list[Mark]
    """In order; the first at 0."""
    length: int
    """Positions: every `begin` and `end` lies below."""
    readings: list[Reading] = []
    """One for each mark, where the device has an allocator that counts."""
    counts: Counts | None = None
    """As the device's allocator told them, where it did."""
    late: bool = False
    """Memory was held when the recording began, and no event is known to be lost."""
    truncated: bool = False
    """Events before the first that is here were lost."""
    truncation_proven: bool = False
    """It follows from the file; else the number of events suggests it."""
    notes: list[str] = []
    """A sentence each: what a reader must know."""
