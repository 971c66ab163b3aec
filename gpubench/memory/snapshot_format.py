"""The content of a memory snapshot, as far as it is read; format: the docstring of torch.cuda.memory._snapshot."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpubench.errors import DataError
from gpubench.memory.stacks import Frame, Sign, Told, sign, told
from gpubench.memory.unpickling import HOW, plain

Size = Annotated[int, Meta(ge=0, lt=2**48)]
"""Bytes; as many as a file can hold sum to an int64."""


class Block(Struct, gc=False):
    size: Size
    requested_size: Size | None = None
    """Missing before PyTorch 2.1."""
    state: str = "inactive"
    frames: Any = ()

    @property
    def asked(self) -> int:
        return self.size if self.requested_size is None else self.requested_size


class Segment(Struct, gc=False):
    address: int
    total_size: Size
    device: int = 0
    blocks: list[Block] = []
    frames: Any = ()


class Event(Struct, gc=False):
    action: str
    addr: int = 0
    size: Size = 0
    """Bytes asked for; of segments, bytes of the segment."""
    time_us: int = 0
    device_free: Size | None = None
    """Where memory did not suffice: what the driver had left."""
    frames: Any = ()


class Annotation(Struct, gc=False):
    """The beginning or the end of a torch.profiler.record_function, as of the optimizer's own."""

    name: str = ""
    stage: str = ""
    """START or END."""
    time_us: int = 0


class Snapshot(Struct):
    segments: list[Segment]
    device_traces: list[list[Event]] = []
    """By the number of the device."""
    external_annotations: list[Annotation] = []


def load(path: Path) -> Snapshot:
    """Raises DataError for a file that is no snapshot, is damaged, holds code, or does not fit in memory."""
    found = plain(path)
    if isinstance(found, list):
        raise DataError(f"{path} has no history: it is a list of segments", HOW)
    try:
        return msgspec.convert(found, Snapshot)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second for half a character
        raise DataError(f"{path} is a pickle of something else, or damaged: {error}", HOW) from None


class Stacks:
    """What the stacks of one file tell. The same ones stand at many events, made of the same frames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signs: dict[int, Sign] = {}
        self._told: dict[tuple[int, ...], Told] = {}

    def told(self, frames: Any) -> Told:
        """Raises DataError for what are no frames. They must outlive this: they are known by their identity."""
        try:
            key = tuple(map(id, frames))
            if key not in self._told:
                self._told[key] = told([self._sign(one) for one in frames])
        except (TypeError, UnicodeEncodeError, msgspec.ValidationError) as error:
            raise DataError(f"{self._path} is damaged, or no memory snapshot: a stack: {error}", HOW) from None
        return self._told[key]

    def _sign(self, frame: Any) -> Sign:
        if id(frame) not in self._signs:
            self._signs[id(frame)] = sign(msgspec.convert(frame, Frame))
        return self._signs[id(frame)]
