"""Where a rank's micro-batches leave."""

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from gpubench.channel import Doing
from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.edges import Edge
from gpubench.pipeline.links import Clock, Sizes, Tell, computing_on, handoff
from gpubench.pipeline.wire import Header, Kind, Route


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
        self._stream = torch.cuda.Stream(edge.device) if edge.device.type == "cuda" else None
        self._room = threading.Semaphore(bound)
        self._waiting: SimpleQueue[tuple[Batch, torch.cuda.Event | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._deadline = deadline
        self._evaluating = evaluating
        self._doing = Doing("preparing to send")
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-outbox")
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Hands `batch` over, which the caller may not touch again; waits while `bound` batches are unsent.

        Raises what went wrong with a batch before: what `inspect` and `pack` raise, or torch where the connection
        broke.
        """
        self._room.acquire()
        if self._failure:
            self._room.release()  # for whoever asks again
            raise self._failure
        issued = torch.cuda.current_stream(self._edge.device).record_event() if self._stream else None
        self._waiting.put((batch, issued))

    def doing(self) -> Doing:
        return self._doing

    def close(self) -> None:
        """Says that all is sent, and waits until the peer has taken it. Raises as `put` does."""
        self._waiting.put(None)
        self._thread.join()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            with computing_on(self._edge.device):
                while self._send_next():
                    self._room.release()
                taker = self._route.destination
                self._doing = Doing(f"waiting for rank {taker} to hear that all is sent", taker, self._evaluating)
                self._edge.send_frames(wire.encode(self._header(Kind.end)))
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _send_next(self) -> bool:
        """False when there is nothing left to send."""
        waiting = self._waiting.get()
        if waiting is None:
            return False
        batch, issued = waiting
        if self._stream and issued:
            self._doing = Doing(f"the GPU's evaluations of sample {batch.samples[0]}", within=self._evaluating)
            issued.synchronize()
            with torch.cuda.stream(self._stream):
                self._send(batch)
                self._stream.synchronize()  # before the caller's stream may have the batch's memory back
        else:
            self._send(batch)
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
