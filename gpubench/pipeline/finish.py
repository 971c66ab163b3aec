"""The sink of the last rank, which records finished samples."""

import io
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from gpubench import events
from gpubench.pipeline.base import sha256
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.folders import prompt_of
from gpubench.pipeline.wire import beside_evaluations, record_issued
from gpubench.runs.directory import IMAGE, LATENT, sample_file
from gpubench.worker.channel import Doing

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo


class Finisher:
    """Copies finished latents from `device` to the host and reports them, in parallel with the next evaluations.

    At most `bound` batches are in progress. Reported samples are kept only if `retain` is set. `deadline` is the time
    limit for reporting a batch in seconds, and `evaluating` that for waiting for the evaluations of the GPU.
    """

    def __init__(
        self,
        tell: Callable[[events.Message], None],
        now: Callable[[], float],
        repeat: int,
        rank: int,
        seed: int,
        prompts: Sequence[str],
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
        self._tell = tell
        self._now = now
        self._repeat = repeat
        self._rank = rank
        self._seed = seed
        self._prompts = prompts
        self._device = device
        self._keep_latents = keep_latents
        self._retain = retain
        self._inspect = inspect
        self._deadline = deadline
        self._evaluating = evaluating
        self._doing = Doing("preparing to keep what is finished")
        self._room = threading.Semaphore(bound)
        self._finished: SimpleQueue[tuple[Batch, float, torch.cuda.Event | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-finisher")
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Takes a finished batch; waits while `bound` are in progress. Raises the error of an earlier batch."""
        at, issued = self._now(), record_issued(self._device)
        self._room.acquire()
        if self._failure:
            self._room.release()  # for the next caller
            raise self._failure
        self._finished.put((batch, at, issued))

    def doing(self) -> Doing:
        return self._doing

    def close(self) -> None:
        self._finished.put(None)
        self._thread.join()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            with beside_evaluations(self._device):
                while self._finish_next():
                    self._room.release()
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _finish_next(self) -> bool:
        """Finishes the next batch. Returns False if there is none left."""
        finished = self._finished.get()
        if finished is None:
            return False
        batch, at, issued = finished
        if issued:
            self._doing = Doing(f"the GPU's evaluations of sample {batch.samples[0]}", within=self._evaluating)
            issued.synchronize()
            at = self._now()
        self._doing = Doing(f"the handing over of finished sample {batch.samples[0]}", within=self._deadline)
        self._inspect(batch)
        self._finish(batch, at)
        return True

    def _finish(self, batch: Batch, at: float) -> None:
        for place, sample in enumerate(batch.samples):
            latent = batch.latents[place].cpu().contiguous()
            image = batch.images[place] if batch.images else None
            if self._retain:
                self.latents[sample] = latent
            png = io.BytesIO()
            if image:
                image.save(png, "PNG", pnginfo=self._about(sample))
            self._tell(
                events.SampleFinished(
                    rank=self._rank,
                    sample=events.Sample(
                        repeat=self._repeat,
                        sample=sample,
                        seed=self._seed + sample,
                        prompt=prompt_of(sample, self._prompts),
                        started=batch.started,
                        finished=at,
                        sha256=sha256(latent),
                        latent=sample_file(sample, LATENT) if self._keep_latents else None,
                        image=sample_file(sample, IMAGE) if image else None,
                    ),
                    latent=save({"latent": latent}) if self._keep_latents else None,
                    image=png.getvalue() or None,
                )
            )

    def _about(self, sample: int) -> "PngInfo":
        """Returns the image's metadata, with all that is needed to make it again."""
        from PIL.PngImagePlugin import PngInfo

        about = PngInfo()
        about.add_text("seed", str(self._seed + sample))
        if prompt := prompt_of(sample, self._prompts):
            about.add_itxt("prompt", prompt)
        return about
