"""The last rank's sink: what a finished sample leaves behind."""

import io
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from gpubench import events
from gpubench.channel import Doing
from gpubench.diffusion.prompts import prompt_of
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.links import computing_on
from gpubench.pipeline.reference import sha256
from gpubench.runs import IMAGE, LATENT, sample_file

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo


class Finisher:
    """Copies finished latents to the host and tells of them, beside the next evaluations.

    At most `bound` batches are under way, and nothing of a sample stays here that was told of, unless `retain` is set.
    `deadline` is the seconds that telling of a batch may take before this rank counts as stuck, and `evaluating` those
    that it may wait for the evaluations of its GPU.
    """

    def __init__(
        self,
        tell: Callable[[events.Message], None],
        now: Callable[[], float],
        repeat: int,
        rank: int,
        seed: int,
        prompts: Sequence[str],
        *,
        bound: int,
        keep_latents: bool,
        retain: bool,
        inspect: Callable[[Batch], None],
        deadline: float | None = None,
        evaluating: float | None = None,
    ) -> None:
        self.latents: dict[int, Tensor] = {}
        """Every sample's final latent, on the CPU, without the batch dimension; empty unless they are retained."""
        self._tell = tell
        self._now = now
        self._repeat = repeat
        self._rank = rank
        self._seed = seed
        self._prompts = prompts
        self._keep_latents = keep_latents
        self._retain = retain
        self._inspect = inspect
        self._deadline = deadline
        self._evaluating = evaluating
        self._doing = Doing("preparing to keep what is finished")
        self._room = threading.Semaphore(bound)
        self._finished: SimpleQueue[tuple[Batch, float, torch.cuda.Event | None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpubench-finisher")
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Takes over a finished batch; waits while `bound` are under way. Raises what went wrong with one before."""
        at, issued = self._now(), None
        if batch.latents.is_cuda:
            issued = torch.cuda.current_stream(batch.latents.device).record_event()
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
            while self._finish_next():
                self._room.release()
        except BaseException as error:
            self._failure = error
            self._room.release()

    def _finish_next(self) -> bool:
        """False when there is nothing left to finish."""
        finished = self._finished.get()
        if finished is None:
            return False
        batch, at, issued = finished
        if issued:
            self._doing = Doing(f"the GPU's evaluations of sample {batch.samples[0]}", within=self._evaluating)
            issued.synchronize()
            at = self._now()
        self._doing = Doing(f"the handing over of finished sample {batch.samples[0]}", within=self._deadline)
        with computing_on(batch.latents.device), self._aside(batch.latents.device):
            self._inspect(batch)
            self._finish(batch, at)
        return True

    def _aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Not behind the next samples' evaluations, which the GPU's default stream has in its queue."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

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
        """What an image needs to be made again, in the image itself."""
        from PIL.PngImagePlugin import PngInfo

        about = PngInfo()
        about.add_text("seed", str(self._seed + sample))
        if prompt := prompt_of(sample, self._prompts):
            about.add_itxt("prompt", prompt)
        return about
