"""The Outbox and Inbox, which send and receive micro-batches in threads, and the injection of faults.

`gpubench.pipeline.folders` defines the names of the faults. Faults of a hand-over wrap the functions of its sender;
neither the Outbox nor the receiver knows of them.
"""

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from gpubench.errors import HandoverError
from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.folders import Fault, FaultKind
from gpubench.pipeline.wire import (
    Clock,
    Edge,
    Expected,
    Header,
    Kind,
    Route,
    Sizes,
    Tell,
    beside_evaluations,
    handoff,
    record_issued,
)
from gpubench.worker.channel import Doing


class Packed(Sizes, Protocol):
    """A batch as it travels."""

    @property
    def manifest(self) -> bytes: ...
    @property
    def payload(self) -> Tensor: ...


class Outbox:
    """Sends batches in the order they are put.

    `inspect` sees each batch first and may refuse it; `pack` then turns it into bytes. Both run in the thread here, and
    on a GPU in a stream of its own, behind what the caller's stream had been given when the batch was put. `deadline`
    is the seconds that packing may take before this rank counts as stuck, and `evaluating` those that it may wait for
    the evaluations of its own GPU or of the rank that is to take the batch.
    """

    def __init__(
        self,
        edge: Edge,
        route: Route,
        *,
        bound: int,
        pack: Callable[[Batch], Packed],
        tell: Tell,
        now: Clock,
        deadline: float | None = None,
        evaluating: float | None = None,
        inspect: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self.sent = 0
        self._edge = edge
        self._route = route
        self._pack = pack
        self._tell = tell
        self._now = now
        self._inspect = inspect
        self._room = threading.Semaphore(bound)
        self._waiting: SimpleQueue[tuple[Batch, torch.cuda.Event | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._deadline = deadline
        self._evaluating = evaluating
        self._doing = Doing("preparing to send")
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-outbox")
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Queues `batch`, which the caller must not use again; waits while `bound` batches are unsent.

        Raises the error of an earlier batch: one of `inspect` or `pack`, or torch's if the connection broke.
        """
        self._room.acquire()
        if self._failure:
            self._room.release()  # for the next caller
            raise self._failure
        self._waiting.put((batch, record_issued(self._edge.device)))

    def doing(self) -> Doing:
        return self._doing

    def close(self) -> None:
        """Sends the end of the stream and waits until the peer has received it. Raises the same errors as `put`."""
        self._waiting.put(None)
        self._thread.join()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            with beside_evaluations(self._edge.device):
                while self._send_next():
                    self._room.release()
                taker = self._route.destination
                self._doing = Doing(f"waiting for rank {taker} to hear that all is sent", taker, self._evaluating)
                self._edge.send_frames(wire.encode(self._header(Kind.end)))
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _send_next(self) -> bool:
        """Sends the next batch. Returns False if there is none left."""
        waiting = self._waiting.get()
        if waiting is None:
            return False
        batch, issued = waiting
        if issued:
            self._doing = Doing(f"the GPU's evaluations of sample {batch.samples[0]}", within=self._evaluating)
            issued.synchronize()
        self._send(batch)
        if issued:
            torch.cuda.current_stream().synchronize()  # before the caller's stream may have the batch's memory back
        self.sent += 1
        return True

    def _send(self, batch: Batch) -> None:
        began = self._now()
        sample, taker = batch.samples[0], self._route.destination
        self._doing = Doing(f"the packing of sample {sample} for rank {taker}", None, self._deadline)
        self._inspect(batch)
        parcel = self._pack(batch)
        payload = self._edge.stage(parcel.payload)
        header = self._header(Kind.data, batch, payload)
        frames = wire.encode(header, parcel.manifest)
        self._doing = Doing(f"waiting for rank {taker} to take sample {sample}", taker, self._evaluating)
        offered = self._now()
        self._edge.send_frames(frames)
        taken = self._now()
        self._edge.send_payload(payload)
        total = self._now() - began
        self._tell(handoff(self._route, "send", header, len(frames), parcel, began, total, taken - offered))

    def _header(self, kind: Kind, batch: Batch | None = None, payload: Tensor | None = None) -> Header:
        route = self._route
        blank = Header(kind, route.run, route.source, route.destination, self.sent)
        if batch is None or payload is None:
            return blank
        return replace(
            blank,
            sample=batch.samples[0],
            samples=len(batch.samples),
            done=batch.done,
            payload_bytes=payload.numel(),
            payload_checksum=wire.checksum(payload),
        )


class Admitted(Sizes, Protocol):
    """A manifest that has been read and found to be what was agreed."""

    @property
    def payload_bytes(self) -> int: ...


class Inbox:
    """Receives the micro-batches that `expected` lists, in that order.

    `admit` reads a manifest before its payload is received, and `unpack` makes a batch of both; either raises
    HandoverError for what does not fit. At most `bound` batches are received, or being received, and not yet taken.

    On a GPU, all of it runs on a stream of the Inbox's own, so that a batch is received, checked and unpacked while
    other evaluations are queued. `take` makes the caller's stream wait for the batch; `unpack` has to call
    `record_stream` for tensors that the caller's stream uses.
    """

    def __init__(
        self,
        edge: Edge,
        route: Route,
        expected: Sequence[Sequence[int]],
        done: int,
        *,
        bound: int,
        admit: Callable[[bytes], Admitted],
        unpack: Callable[[bytes, Tensor], Batch],
        tell: Tell,
        now: Clock,
    ) -> None:
        self.received = 0
        self._edge = edge
        self._route = route
        self._expected = expected
        self._done = done
        self._admit = admit
        self._unpack = unpack
        self._tell = tell
        self._now = now
        self._room = threading.Semaphore(bound)
        self._arrived: SimpleQueue[tuple[Batch, torch.cuda.Event | None] | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-inbox")
        self._thread.start()

    def take(self) -> Batch:
        """Returns the next batch; waits for it.

        Raises HandoverError if another batch than expected arrives, torch's error if the connection broke, and EOFError
        after the last batch.
        """
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            self._arrived.put(arrived)  # for the next caller
            raise arrived
        self._room.release()
        batch, unpacked = arrived
        if unpacked:
            torch.cuda.current_stream(self._edge.device).wait_event(unpacked)
        return batch

    def close(self) -> None:
        """Waits for the end of the stream after the last batch was taken. Raises the same errors as `take`."""
        try:
            self.take()
        except EOFError:
            return
        raise RuntimeError("an inbox was closed with a batch left in it")

    def _run(self) -> None:
        try:
            with beside_evaluations(self._edge.device):
                for sequence, samples in enumerate(self._expected):
                    self._room.acquire()
                    batch = self._receive(Expected(self._route, sequence, samples, self._done))
                    self.received += 1
                    self._arrived.put((batch, record_issued(self._edge.device)))
                    del batch  # or it would stay here until the next one has come
                self._receive_end()
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(EOFError("all batches have been taken"))

    def _receive(self, expected: Expected) -> Batch:
        posted = self._now()
        first = self._edge.receive_frame()
        began = self._now()
        with expected.named():
            header, manifest = wire.decode(first, self._edge.receive_frame)
        expected.check(header)
        with expected.named():
            admitted = self._admit(manifest)
            if admitted.payload_bytes != header.payload_bytes:
                raise HandoverError(
                    f"its header announces {header.payload_bytes} bytes, its manifest {admitted.payload_bytes}"
                )
            payload = self._edge.receive_payload(header.payload_bytes)
            if header.payload_checksum and wire.checksum(payload) != header.payload_checksum:
                raise HandoverError("its payload was damaged in transit: the checksum does not fit")
            batch = self._unpack(manifest, payload)
        frames = wire.frames_size(manifest)
        self._tell(handoff(self._route, "recv", header, frames, admitted, began, self._now() - began, began - posted))
        return batch

    def _receive_end(self) -> None:
        expected = Expected(self._route, self.received, ())
        with expected.named():
            header, _ = wire.decode(self._edge.receive_frame(), self._edge.receive_frame)
        expected.check(header)


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
