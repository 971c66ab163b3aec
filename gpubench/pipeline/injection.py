"""Faults that a pipeline provokes in itself; see `gpubench.diffusion.faults` for what they are called.

Those of a hand-over wrap what its sender sends: neither the Outbox nor the receiver knows of them.
"""

import io
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpubench.diffusion.faults import Fault, FaultKind
from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.edges import Edge
from gpubench.pipeline.outbox import Packed
from gpubench.pipeline.wire import Kind

OF_A_MESSAGE = frozenset({FaultKind.drop, FaultKind.duplicate, FaultKind.corrupt, FaultKind.step})
WHILE_PACKING = frozenset({FaultKind.late, FaultKind.shape, FaultKind.dtype})

# The type whose values have as many bytes: what a library that only counts bytes takes for the same.
LOOKALIKE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def faulty_edge(edge: Edge, fault: Fault | None, rank: int) -> Edge:
    """`edge` as `rank` sends by it, with the fault where it is one of the rank's messages."""
    if fault is None or fault.rank != rank or fault.kind not in OF_A_MESSAGE:
        return edge
    return FaultyEdge(edge, fault)


def faulty_pack(pack: Callable[[Batch], Packed], fault: Fault | None, rank: int) -> Callable[[Batch], Packed]:
    """`pack` as `rank` uses it: too late, or a latent of another shape or type with as many bytes as was agreed on."""
    if fault is None or fault.rank != rank or fault.kind not in WHILE_PACKING:
        return pack
    kind, sample, seconds = fault.kind, fault.sample, fault.seconds

    def packed(batch: Batch) -> Packed:
        if sample not in batch.samples:
            return pack(batch)
        if kind is FaultKind.late:
            time.sleep(seconds)
            return pack(batch)
        latents = batch.latents
        other = latents.unsqueeze(1) if kind is FaultKind.shape else latents.view(LOOKALIKE[latents.itemsize])
        return pack(replace(batch, latents=other))

    return packed


def before_evaluations(fault: Fault | None, rank: int, samples: Sequence[int]) -> None:
    """Called by `rank` before it evaluates `samples`: where a fault of the rank itself strikes."""
    if fault is None or fault.rank != rank or fault.sample not in samples:
        return
    if fault.kind is FaultKind.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind is FaultKind.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind is FaultKind.slow:
        time.sleep(fault.seconds)


class FaultyEdge:
    """Sends as `edge` does, except for the hand-over with the fault's sample."""

    def __init__(self, edge: Edge, fault: Fault) -> None:
        self.device = edge.device
        self._edge = edge
        self._fault = fault
        self._frames = b""
        self._struck: FaultKind | None = None
        """What is wrong with the hand-over under way."""

    def send_frames(self, frames: bytes) -> None:
        rest = io.BytesIO(frames)
        header, manifest = wire.decode(rest.read(wire.FRAME), lambda: rest.read(wire.FRAME))
        hit = header.kind is Kind.data and 0 <= self._fault.sample - header.sample < header.samples
        self._struck = self._fault.kind if hit else None
        self._frames = frames
        if self._struck is FaultKind.drop:
            return
        if self._struck is FaultKind.step:
            frames = wire.encode(replace(header, done=header.done + 1), manifest)
        self._edge.send_frames(frames)

    def send_payload(self, payload: Tensor) -> None:
        if self._struck is FaultKind.drop:
            return
        if self._struck is FaultKind.corrupt:
            payload = payload.clone()
            payload[0] ^= 1
        self._edge.send_payload(payload)
        if self._struck is FaultKind.duplicate:
            self._edge.send_frames(self._frames)
            self._edge.send_payload(payload)

    def stage(self, payload: Tensor) -> Tensor:
        return self._edge.stage(payload)

    def receive_frame(self) -> bytes:
        return self._edge.receive_frame()

    def receive_payload(self, size: int) -> Tensor:
        return self._edge.receive_payload(size)
