"""A link within this process, and messages that become bytes and messages again."""

import io
import threading
from queue import SimpleQueue
from unittest.mock import patch

import torch
from torch import Tensor

from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.worker import link, packing
from gpubench.kinds.pipeline.worker.link import FRAME, LinkTerms, Message, Transport, decode, encode
from gpubench.kinds.pipeline.worker.packing import PackedBatch, pack, unpack
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build, create

CPU = torch.device("cpu")
RUN = b"thisrun!"


def decoded(frames: bytes) -> Message:
    rest = io.BytesIO(frames)
    message, size = decode(rest.read(FRAME), lambda: rest.read(FRAME))
    assert size == len(frames)
    assert not rest.read(), "frames were left over"
    return message


def framed(content: bytes) -> bytes:
    """The frames of any bytes, with checksums that match."""
    with patch.object(link, "_encoder") as encoder:
        encoder.encode.return_value = content
        return encode(Message("end", RUN, 0, 1, 0))


def as_received(packed: PackedBatch) -> PackedBatch:
    """The description after it became bytes and was read and checked."""
    received = decoded(encode(Message("batch", RUN, 0, 1, 0, packed))).batch
    assert received is not None
    packing.check(received)
    return received


def handed_off(batch: Batch, sampler: Sampler, seeds: list[int], receiver: Sampler | None = None) -> Batch:
    """The batch after it became bytes, as between two processes."""
    packed, payload = pack(batch, sampler)
    copy = torch.frombuffer(bytearray(payload.numpy().tobytes()), dtype=torch.uint8)
    return unpack(as_received(packed), copy, receiver or sampler, seeds)


def terms(shape: tuple[int, ...] = (4, 8, 8), *, run: bytes = RUN, source: int = 1, done: int = 12) -> LinkTerms:
    """Of a link whose batches have latents of this shape and a scheduler without state."""
    sampler = build(create("DDIMScheduler", {}, {}), 20, CPU)
    return LinkTerms(run, 0, source, source + 1, done, sampler, torch.float32, shape, Requests([], 0))


def batch_of(terms: LinkTerms, *samples: int) -> Batch:
    """Samples whose latents are their own number everywhere, when the source hands them off."""
    latents = torch.stack([torch.full(terms.latent_shape, float(sample)) for sample in samples])
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    return Batch(list(samples), latents, terms.sampler.fresh(samples[0]), generators, done=terms.done)


class Cable(Transport):
    """A connection within this process, both ends in one. The sender waits for the receive, as over gloo."""

    def __init__(self) -> None:
        self.device = CPU
        self.posted = 0
        """The number of frames and payloads whose receive has begun."""
        self._messages: SimpleQueue[bytes | Tensor] = SimpleQueue()
        self._ready = threading.Semaphore(0)

    def send_frames(self, frames: bytes) -> None:
        for start in range(0, len(frames), FRAME):
            self._send(frames[start : start + FRAME])

    def receive_frame(self) -> bytes:
        frame = self._receive()
        assert isinstance(frame, bytes)
        return frame

    def send_payload(self, payload: Tensor) -> None:
        self._send(payload.clone())

    def receive_payload(self, size: int) -> Tensor:
        payload = self._receive()
        assert isinstance(payload, Tensor)
        assert payload.numel() == size
        return payload

    def _send(self, message: bytes | Tensor) -> None:
        self._ready.acquire()
        self._messages.put(message)

    def _receive(self) -> bytes | Tensor:
        self.posted += 1
        self._ready.release()
        return self._messages.get()
