"""Where a rank's micro-batches arrive."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from gpubench.errors import HandoverError
from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.edges import Edge
from gpubench.pipeline.links import Clock, Sizes, Tell, computing_on, handoff
from gpubench.pipeline.wire import Expected, Route


class Admitted(Sizes, Protocol):
    """A manifest that has been read and found to be what was agreed."""

    @property
    def payload_bytes(self) -> int: ...


class Inbox:
    """Receives the micro-batches that `expected` lists, in that order.

    `admit` reads a manifest before its payload is received, and `unpack` makes a batch of both; either raises
    HandoverError for what does not fit. At most `bound` batches are received, or being received, and not yet taken. On
    a GPU, `unpack` runs on the default stream, as the evaluations have to: that orders the two.
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
        self._arrived: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-inbox")
        self._thread.start()

    def take(self) -> Batch:
        """The next batch, as soon as it is there.

        Raises HandoverError where another came than was agreed on, whatever torch raises where the connection broke,
        and EOFError after the last batch.
        """
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            self._arrived.put(arrived)  # for whoever asks again
            raise arrived
        self._room.release()
        return arrived

    def close(self) -> None:
        """Waits for the peer's word that it has sent all, after the last batch was taken. Raises as `take` does."""
        try:
            self.take()
        except EOFError:
            return
        raise RuntimeError("an inbox was closed with a batch left in it")

    def _run(self) -> None:
        try:
            with computing_on(self._edge.device):
                for sequence, samples in enumerate(self._expected):
                    self._room.acquire()
                    batch = self._receive(Expected(self._route, sequence, samples, self._done))
                    self.received += 1
                    self._arrived.put(batch)
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
                raise HandoverError("its payload was damaged on the way: the checksum does not fit")
            batch = self._unpack(manifest, payload)
        frames = wire.frames_size(manifest)
        self._tell(handoff(self._route, "recv", header, frames, admitted, began, self._now() - began, began - posted))
        return batch

    def _receive_end(self) -> None:
        expected = Expected(self._route, self.received, ())
        with expected.named():
            header, _ = wire.decode(self._edge.receive_frame(), self._edge.receive_frame)
        expected.check(header)
