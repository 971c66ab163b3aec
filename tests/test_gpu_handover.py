"""On a GPU, hand-overs are packed, sent, received and unpacked beside the evaluations, and are not used too early."""

import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from gpubench.pipeline import wire
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.handover import pack, read_manifest, unpack
from gpubench.pipeline.schedulers import Sampler, build, create
from gpubench.pipeline.transfer import Inbox, Outbox
from gpubench.pipeline.wire import GlooEdge, Route, beside_evaluations
from gpubench.worker.timing import CudaClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
ROUTE = Route(b"thisrun!", 0, 0, 1)
SECOND = 2_000_000_000  # cycles of `torch.cuda._sleep`, or somewhat more than a second


class Wire(GlooEdge):
    """Both ends of a gloo or NCCL edge in one process: all but the library's own transport."""

    def __init__(self, nccl: bool) -> None:
        self.device = DEVICE
        self._nccl = nccl
        self._messages: SimpleQueue[bytes | Tensor] = SimpleQueue()

    def send_frames(self, frames: bytes) -> None:
        for start in range(0, len(frames), wire.FRAME):
            self._messages.put(frames[start : start + wire.FRAME])

    def receive_frame(self) -> bytes:
        frame = self._messages.get()
        assert isinstance(frame, bytes)
        return frame

    def stage(self, payload: Tensor) -> Tensor:
        return payload if self._nccl else super().stage(payload)

    def send_payload(self, payload: Tensor) -> None:
        self._messages.put(payload.clone())
        torch.cuda.current_stream(DEVICE).synchronize()

    def receive_payload(self, size: int) -> Tensor:
        payload = self._messages.get()
        assert isinstance(payload, Tensor)
        assert payload.is_cuda == self._nccl
        arrived = torch.empty(size, dtype=torch.uint8, device=payload.device, pin_memory=not self._nccl)
        return arrived.copy_(payload)


@pytest.fixture(params=["gloo", "nccl"])
def edge(request: pytest.FixtureRequest) -> Wire:
    return Wire(request.param == "nccl")


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return build(create("PNDMScheduler", {"skip_prk_steps": True}, {}), 10, DEVICE)


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def queue_evaluations() -> torch.cuda.Event:
    """The end of a second's work on the default stream: `query` says whether the GPU has reached it."""
    torch.cuda._sleep(SECOND)
    end: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return end


def stepped(sampler: Sampler) -> Batch:
    """Sample 0 after three evaluations, which the GPU has finished."""
    latents = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    batch = Batch([0], latents, sampler.fresh(0), [torch.Generator().manual_seed(0)])
    for _ in range(3):
        sampler.step(batch, batch.latents * 0.5)
    torch.cuda.synchronize()
    return batch


class Ends:
    """An Outbox and an Inbox on the two ends of one edge."""

    def __init__(self, edge: Wire, sampler: Sampler, batches: int = 1, delay: int = 0) -> None:
        """`delay` is the cycles that the GPU takes over each unpacking."""
        self.unpacked: list[torch.cuda.Event] = []
        self._sampler = sampler
        self._delay = delay
        self.outbox = Outbox(
            edge, ROUTE, bound=2, pack=lambda batch: pack(batch, sampler), tell=lambda handoff: None, now=time.time
        )
        self.inbox = Inbox(
            edge,
            ROUTE,
            [[0]] * batches,
            3,
            bound=1,
            admit=read_manifest,
            unpack=self._unpack,
            tell=lambda handoff: None,
            now=time.time,
        )

    def _unpack(self, manifest: bytes, payload: Tensor) -> Batch:
        batch = unpack(manifest, payload, self._sampler, [0])
        if self._delay:
            torch.cuda._sleep(self._delay)
        self.unpacked.append(torch.cuda.current_stream().record_event())
        return batch


def tensors(batch: Batch) -> list[Tensor]:
    return [batch.latents, *batch.scheduler.ets]


def test_a_batch_is_packed_sent_received_and_unpacked_while_evaluations_are_queued(
    edge: Wire, sampler: Sampler
) -> None:
    batch = stepped(sampler)
    expected = [tensor.cpu() for tensor in tensors(batch)]
    ends = Ends(edge, sampler)
    ends.outbox.put(batch)
    evaluations = queue_evaluations()
    arrived = ends.inbox.take()
    ends.unpacked[0].synchronize()
    assert not evaluations.query()
    assert all(torch.equal(*pair) for pair in zip(map(Tensor.cpu, tensors(arrived)), expected, strict=True))


def test_what_uses_a_batch_waits_until_it_is_unpacked(edge: Wire, sampler: Sampler) -> None:
    ends = Ends(edge, sampler, delay=SECOND)
    ends.outbox.put(stepped(sampler))
    ends.inbox.take()
    use = torch.cuda.current_stream().record_event()
    assert not use.query()
    use.synchronize()
    assert ends.unpacked[0].query()


def test_the_memory_of_a_batch_is_not_used_again_before_its_evaluations_are_done(edge: Wire, sampler: Sampler) -> None:
    ends = Ends(edge, sampler, batches=2)
    ends.outbox.put(stepped(sampler))
    second = stepped(sampler)
    first = ends.inbox.take()
    evaluations = queue_evaluations()
    used = {tensor.data_ptr() for tensor in tensors(first)}
    del first
    with beside_evaluations(DEVICE):  # or the outbox would wait for the evaluations, as those of this batch
        ends.outbox.put(second)
    arrived = ends.inbox.take()
    assert not evaluations.query()
    assert not used & {tensor.data_ptr() for tensor in tensors(arrived)}


def test_streams_beside_the_evaluations_have_a_higher_priority() -> None:
    with beside_evaluations(DEVICE):
        assert torch.cuda.current_stream().priority < torch.cuda.default_stream().priority
    assert CudaClock(DEVICE)._read_stream.priority < torch.cuda.default_stream().priority
