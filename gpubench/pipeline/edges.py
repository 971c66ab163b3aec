"""An edge: how bytes get from one rank to the next.

Each edge has process groups of its own. On a shared one, the receive of the next hand-over, posted ahead, would hold up
the send of this one behind it: NCCL runs what it is given on one communicator in order.
"""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gpubench.errors import HandoverError
from gpubench.pipeline import wire

# As good as none. How long a rank waits for its first hand-over depends on all ranks before it, which only the host
# sees; and a wait of gloo's that times out closes the connection, so that no second try is left.
FOREVER = timedelta(days=365)


class Edge(Protocol):
    """One end of a connection between two ranks, used by one thread at a time."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def send_frames(self, frames: bytes) -> None:
        """Sends whole frames; returns when the peer has taken them."""
        ...

    def receive_frame(self) -> bytes: ...

    def stage(self, payload: Tensor) -> Tensor:
        """`payload` (uint8, one-dimensional) where `send_payload` can send it from."""
        ...

    def send_payload(self, payload: Tensor) -> None:
        """Returns when `payload` may be reused."""
        ...

    def receive_payload(self, size: int) -> Tensor:
        """The next `size` bytes, where this edge has them: on the CPU, or on the device, ready for its default stream.

        `size` has to be what the peer sends: see `gpubench.pipeline.wire`.
        """
        ...


class _Framed:
    """Frames over gloo, which every edge uses for them."""

    def __init__(self, frames: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.device = device
        self._frames = frames
        self._peer = peer

    def send_frames(self, frames: bytes) -> None:
        for frame in torch.frombuffer(bytearray(frames), dtype=torch.uint8).split(wire.FRAME):
            dist.send(frame, self._peer, group=self._frames)

    def receive_frame(self) -> bytes:
        frame = torch.empty(wire.FRAME, dtype=torch.uint8)
        dist.recv(frame, self._peer, group=self._frames)
        return frame.numpy().tobytes()


class GlooEdge(_Framed):
    """Everything over gloo, which knows CPU tensors only: a payload on a GPU is staged in page-locked memory."""

    def stage(self, payload: Tensor) -> Tensor:
        if payload.device.type == "cpu":
            return payload
        return self._buffer(payload.numel()).copy_(payload)

    def send_payload(self, payload: Tensor) -> None:
        dist.send(payload, self._peer, group=self._frames)

    def receive_payload(self, size: int) -> Tensor:
        payload = self._buffer(size)
        dist.recv(payload, self._peer, group=self._frames)
        return payload

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


class NcclEdge(_Framed):
    """Payloads over NCCL, from GPU to GPU."""

    def __init__(self, frames: dist.ProcessGroup, payloads: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        super().__init__(frames, peer, device)
        self._payloads = payloads
        self._side = torch.cuda.Stream(device)

    def stage(self, payload: Tensor) -> Tensor:
        return payload

    def send_payload(self, payload: Tensor) -> None:
        dist.send(payload, self._peer, group=self._payloads)
        torch.cuda.current_stream(self.device).synchronize()

    def receive_payload(self, size: int) -> Tensor:
        with torch.cuda.stream(self._side):  # the default stream has evaluations ahead, and this need not wait for them
            payload = torch.empty(size, dtype=torch.uint8, device=self.device)
            dist.recv(payload, self._peer, group=self._payloads)
            self._side.synchronize()
        payload.record_stream(torch.cuda.default_stream(self.device))
        return payload


def open_edges(rank: int, world_size: int, backend: str, device: torch.device) -> tuple[Edge | None, Edge | None]:
    """The edges from the rank before and to the rank after, both tried out; None at either end of the chain.

    All ranks have to call this together, with the default process group set up. Raises HandoverError where a peer is
    not the rank it should be.
    """
    edges: dict[int, Edge] = {}
    for source in range(world_size - 1):  # every rank takes part in making every group, and in this order
        pair = [source, source + 1]
        frames = dist.new_group(pair, timeout=FOREVER, backend="gloo")
        payloads = dist.new_group(pair, timeout=FOREVER, backend="nccl") if backend == "nccl" else None
        if rank in pair:
            peer = pair[1 - pair.index(rank)]
            edges[source] = NcclEdge(frames, payloads, peer, device) if payloads else GlooEdge(frames, peer, device)
    before, after = edges.get(rank - 1), edges.get(rank)
    if after:
        _say_hello(after, rank)
    if before:
        _hear_hello(before, rank)
    return before, after


def _say_hello(edge: Edge, rank: int) -> None:
    """Builds the connection, NCCL's communicator among it, before anything is timed."""
    edge.send_frames(wire.encode(wire.Header(wire.Kind.hello, bytes(wire.RUN_ID), rank, rank + 1, 0)))
    edge.send_payload(edge.stage(torch.zeros(1, dtype=torch.uint8, device=edge.device)))


def _hear_hello(edge: Edge, rank: int) -> None:
    header, _ = wire.decode(edge.receive_frame(), edge.receive_frame)
    if (header.kind, header.source, header.destination) != (wire.Kind.hello, rank - 1, rank):
        raise HandoverError(f"rank {rank} expected a hello from rank {rank - 1}, and got {header}")
    edge.receive_payload(1)
