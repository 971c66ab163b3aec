"""On a GPU, hand-offs are packed, sent, received and unpacked beside the evaluations, and are not used too early."""

import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.worker.background import Receiver, Sender, beside_evaluations
from gpubench.kinds.pipeline.worker.link import FRAME, Link, LinkTerms, Transport
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build, create
from gpubench.worker.timing import CudaClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
SECOND = 2_000_000_000  # cycles of `torch.cuda._sleep`, or somewhat more than a second


class Wire(Transport):
    """Both ends of a gloo or NCCL connection in one process: all but the library itself."""

    def __init__(self, nccl: bool) -> None:
        self.device = DEVICE
        self._nccl = nccl
        self._messages: SimpleQueue[bytes | Tensor] = SimpleQueue()

    def send_frames(self, frames: bytes) -> None:
        for start in range(0, len(frames), FRAME):
            self._messages.put(frames[start : start + FRAME])

    def receive_frame(self) -> bytes:
        frame = self._messages.get()
        assert isinstance(frame, bytes)
        return frame

    def stage(self, payload: Tensor) -> Tensor:
        return payload if self._nccl else super().stage(payload)

    def send_payload(self, payload: Tensor) -> None:
        copy = payload.clone()
        torch.cuda.current_stream(DEVICE).synchronize()  # the receiver reads it on a stream of its own
        self._messages.put(copy)

    def receive_payload(self, size: int) -> Tensor:
        payload = self._messages.get()
        assert isinstance(payload, Tensor)
        assert payload.is_cuda == self._nccl
        arrived = torch.empty(size, dtype=torch.uint8, device=payload.device, pin_memory=not self._nccl)
        return arrived.copy_(payload)


@pytest.fixture(params=["gloo", "nccl"])
def wire(request: pytest.FixtureRequest) -> Wire:
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


class Watched(Link):
    """A link that takes the GPU some cycles longer over each unpacking."""

    def __init__(self, wire: Wire, terms: LinkTerms, delay: int) -> None:
        super().__init__(wire, terms, now=time.time, report=lambda handoff: None)
        self.unpacked: list[torch.cuda.Event] = []
        self._delay = delay

    def receive(self, samples: Sequence[int]) -> Batch:
        batch = super().receive(samples)
        if self._delay:
            torch.cuda._sleep(self._delay)
        self.unpacked.append(torch.cuda.current_stream().record_event())
        return batch


class Ends:
    """A sender and a receiver at the two ends of one connection."""

    def __init__(self, wire: Wire, sampler: Sampler, batches: int = 1, delay: int = 0) -> None:
        terms = LinkTerms(b"thisrun!", 0, 0, 1, 3, sampler, torch.float32, (4, 64, 64), Requests([], 0))
        link = Watched(wire, terms, delay)
        self.unpacked = link.unpacked
        self.sender = Sender(Link(wire, terms, now=time.time, report=lambda handoff: None), time.time, bound=2)
        self.receiver = Receiver(link, [[0]] * batches, bound=1)


def tensors(batch: Batch) -> list[Tensor]:
    return [batch.latents, *batch.scheduler.ets]


def test_a_batch_is_packed_sent_received_and_unpacked_while_evaluations_are_queued(
    wire: Wire, sampler: Sampler
) -> None:
    ends = Ends(wire, sampler, batches=2)
    ends.sender.put(stepped(sampler))  # the first use of a kernel and the first memory of a stream may wait for the GPU
    ends.receiver.take()
    torch.cuda.synchronize()
    batch = stepped(sampler)
    expected = [tensor.cpu() for tensor in tensors(batch)]
    ends.sender.put(batch)
    evaluations = queue_evaluations()
    arrived = ends.receiver.take()
    ends.unpacked[1].synchronize()
    assert not evaluations.query()
    assert all(torch.equal(*pair) for pair in zip(map(Tensor.cpu, tensors(arrived)), expected, strict=True))


def test_what_uses_a_batch_waits_until_it_is_unpacked(wire: Wire, sampler: Sampler) -> None:
    ends = Ends(wire, sampler, delay=SECOND)
    ends.sender.put(stepped(sampler))
    ends.receiver.take()
    use = torch.cuda.current_stream().record_event()
    assert not use.query()
    use.synchronize()
    assert ends.unpacked[0].query()


def test_the_memory_of_a_batch_is_not_used_again_before_its_evaluations_are_done(wire: Wire, sampler: Sampler) -> None:
    ends = Ends(wire, sampler, batches=2)
    ends.sender.put(stepped(sampler))
    second = stepped(sampler)
    first = ends.receiver.take()
    evaluations = queue_evaluations()
    used = {tensor.data_ptr() for tensor in tensors(first)}
    del first
    with beside_evaluations(DEVICE):  # or the sender would wait for the evaluations, as those of this batch
        ends.sender.put(second)
    arrived = ends.receiver.take()
    assert not evaluations.query()
    assert not used & {tensor.data_ptr() for tensor in tensors(arrived)}


def test_streams_beside_the_evaluations_have_a_higher_priority() -> None:
    with beside_evaluations(DEVICE):
        assert torch.cuda.current_stream().priority < torch.cuda.default_stream().priority
    assert CudaClock(DEVICE)._read_stream.priority < torch.cuda.default_stream().priority
