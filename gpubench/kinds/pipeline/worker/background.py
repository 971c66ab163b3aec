"""The threads of a rank that send, receive and finish batches while its next evaluations run.

On a GPU, each thread has a stream of its own. Each thread holds a bounded number of batches, so that a slow rank makes
the ranks before it wait.
"""

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from gpubench import events
from gpubench.channel import Doing
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.worker.denoiser import sha256
from gpubench.kinds.pipeline.worker.link import Link
from gpubench.kinds.pipeline.worker.sampler import Batch
from gpubench.runs.directory import IMAGE, LATENT
from gpubench.worker.timing import HIGH

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo


@contextmanager
def beside_evaluations(device: torch.device) -> Iterator[None]:
    """On a GPU, gives the calling thread a new stream, so that it does not wait for queued evaluations.

    Kernels of the stream have high priority. The kernels of hand-offs are small, and at the same priority they would
    start only once every block of the evaluations' current kernel has been placed.
    """
    if device.type != "cuda":
        yield
        return
    # A new thread starts with GPU 0 as its current device, whatever the thread that started it had chosen.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=HIGH)):
        yield


def record_issued(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event after all work that the calling thread's stream has been given; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class Sink:
    """Handles batches in a thread, in the order in which they are put. A subclass implements `_handle` and `_end`.

    At most `bound` batches are in progress. `deadline` is the time in seconds that a batch may take on this rank before
    the rank counts as stuck, and `evaluating` the time that it may wait for evaluations, here or on the next rank.
    """

    def __init__(
        self,
        device: torch.device,
        now: Callable[[], float],
        *,
        bound: int,
        deadline: float | None = None,
        evaluating: float | None = None,
    ) -> None:
        self._device = device
        self._now = now
        self._deadline = deadline
        self._evaluating = evaluating
        self._doing = Doing("starting")
        self._room = threading.Semaphore(bound)
        self._queue: SimpleQueue[tuple[Batch, float, torch.cuda.Event | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"gpubench-{type(self).__name__.lower()}")
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Queues `batch`, which the caller must not use again, behind the work issued to the device so far.

        Waits while too many batches are in progress. Raises the error that an earlier batch has caused.
        """
        at, issued = self._now(), record_issued(self._device)
        self._room.acquire()
        if self._failure:
            self._room.release()  # for the next caller
            raise self._failure
        self._queue.put((batch, at, issued))

    def doing(self) -> Doing:
        """What the batches in progress are waiting for."""
        return self._doing

    def close(self) -> None:
        """Waits until all batches have been handled. Raises what `put` raises."""
        self._queue.put(None)
        self._thread.join()
        if self._failure:
            raise self._failure

    def _handle(self, batch: Batch, at: float) -> None:
        """Handles a batch whose evaluations ended at the time `at`, on the current stream."""
        raise NotImplementedError

    def _end(self) -> None:
        """Called after the last batch."""

    def _run(self) -> None:
        try:
            with beside_evaluations(self._device):
                while self._handle_next():
                    self._room.release()
                self._end()
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _handle_next(self) -> bool:
        """Handles the next batch. Returns False if there is none left."""
        queued = self._queue.get()
        if queued is None:
            return False
        batch, at, issued = queued
        if issued:
            self._doing = Doing(f"the GPU's evaluations of sample {batch.samples[0]}", within=self._evaluating)
            issued.synchronize()
            at = self._now()
        self._handle(batch, at)
        if issued:
            torch.cuda.current_stream().synchronize()  # before the caller's stream may have the batch's memory back
        return True


class Sender(Sink):
    def __init__(
        self,
        link: Link,
        now: Callable[[], float],
        *,
        bound: int,
        deadline: float | None = None,
        evaluating: float | None = None,
    ) -> None:
        self._link = link
        super().__init__(link.device, now, bound=bound, deadline=deadline, evaluating=evaluating)

    @property
    def sent(self) -> int:
        return self._link.transferred

    def _handle(self, batch: Batch, at: float) -> None:
        sample, peer = batch.samples[0], self._link.terms.destination
        self._doing = Doing(f"the packing of sample {sample} for rank {peer}", within=self._deadline)
        parcel = self._link.pack(batch)
        self._doing = Doing(f"waiting for rank {peer} to take sample {sample}", peer, self._evaluating)
        self._link.send(parcel)

    def _end(self) -> None:
        peer = self._link.terms.destination
        self._doing = Doing(f"waiting for rank {peer} to take the end of the stream", peer, self._evaluating)
        self._link.send_end()


class Receiver:
    """Receives the batches with the samples that `expected` lists, in that order, ahead of their use.

    At most `bound` batches are received, or being received, and not yet taken. On a GPU, a batch is received, checked
    and unpacked on the thread's stream while other evaluations are queued.
    """

    def __init__(self, link: Link, expected: Sequence[Sequence[int]], *, bound: int) -> None:
        self._link = link
        self._expected = expected
        self._room = threading.Semaphore(bound)
        self._arrived: SimpleQueue[tuple[Batch, torch.cuda.Event | None] | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-receiver")
        self._thread.start()

    @property
    def received(self) -> int:
        return self._link.transferred

    def take(self) -> Batch:
        """Waits for the next batch. The caller's stream waits until it is unpacked.

        Raises HandoffError if another batch than expected arrives, torch's error if the connection broke, and EOFError
        after the last batch.
        """
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            self._arrived.put(arrived)  # for the next caller
            raise arrived
        self._room.release()
        batch, unpacked = arrived
        if unpacked:
            torch.cuda.current_stream(self._link.device).wait_event(unpacked)
        return batch

    def close(self) -> None:
        """Waits for the end of the stream after the last batch was taken. Raises what `take` raises."""
        try:
            self.take()
        except EOFError:
            return
        raise RuntimeError("a receiver was closed with a batch left in it")

    def _run(self) -> None:
        try:
            with beside_evaluations(self._link.device):
                for samples in self._expected:
                    self._room.acquire()
                    batch = self._link.receive(samples)
                    self._arrived.put((batch, record_issued(self._link.device)))
                    del batch  # otherwise this name would hold it until the next batch has arrived
                self._link.receive_end()
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(EOFError("all batches have been taken"))


class Finisher(Sink):
    """Copies finished latents from `device` to CPU memory and reports them. Only the last rank has one.

    Reported samples are kept in memory only if `retain` is set. `inspect` is called with each batch first, and may
    raise an error to refuse it.
    """

    def __init__(
        self,
        report: Callable[[events.Message], None],
        now: Callable[[], float],
        repeat: int,
        rank: int,
        requests: Requests,
        device: torch.device,
        *,
        bound: int,
        keep_latents: bool,
        retain: bool,
        inspect: Callable[[Batch], None],
        deadline: float | None = None,
        evaluating: float | None = None,
    ) -> None:
        self.latents: dict[int, Tensor] = {}
        """The final latent of every sample on the CPU, without the batch dimension; empty unless retained."""
        self._report = report
        self._repeat = repeat
        self._rank = rank
        self._requests = requests
        self._keep_latents = keep_latents
        self._retain = retain
        self._inspect = inspect
        super().__init__(device, now, bound=bound, deadline=deadline, evaluating=evaluating)

    def _handle(self, batch: Batch, at: float) -> None:
        self._doing = Doing(f"the reporting of finished sample {batch.samples[0]}", within=self._deadline)
        self._inspect(batch)
        for place, sample in enumerate(batch.samples):
            latent = batch.latents[place].cpu().contiguous()
            image = batch.images[place] if batch.images else None
            if self._retain:
                self.latents[sample] = latent
            png = io.BytesIO()
            if image:
                image.save(png, "PNG", pnginfo=self._metadata(sample))
            self._report(
                events.SampleFinished(
                    rank=self._rank,
                    sample=events.Sample(
                        repeat=self._repeat,
                        sample=sample,
                        seed=self._requests.seed(sample),
                        prompt=self._requests.prompt(sample),
                        started=batch.started,
                        finished=at,
                        sha256=sha256(latent),
                        latent=self._requests.file(sample, LATENT) if self._keep_latents else None,
                        image=self._requests.file(sample, IMAGE) if image else None,
                    ),
                    latent=save({"latent": latent}) if self._keep_latents else None,
                    image=png.getvalue() or None,
                )
            )

    def _metadata(self, sample: int) -> "PngInfo":
        """The image's metadata, with all that is needed to make it again."""
        from PIL.PngImagePlugin import PngInfo

        about = PngInfo()
        about.add_text("seed", str(self._requests.seed(sample)))
        if prompt := self._requests.prompt(sample):
            about.add_itxt("prompt", prompt)
        return about
