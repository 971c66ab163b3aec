"""A denoiser of fixed latency: the pipeline itself on the scales, without a model's noise."""

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpubench.diffusion.scheduler_names import RANDOM_WEIGHTS
from gpubench.diffusion.settings import PipeSettings
from gpubench.pipeline.base import DenoiserBase, Scale, image_size
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.schedulers import Sampler

_CHANNELS = 4
_SIDE = 64
_PIXELS = 8  # of an image, each way, that a latent pixel stands for
AWAKE = 5e-4  # seconds
_SPIN = 50_000_000  # cycles; tens of milliseconds, long beside the events that time them


class Dummy(DenoiserBase):
    """Each evaluation takes `model.step_ms`, whatever the number of samples, and does bounded arithmetic on them."""

    def __init__(self, settings: PipeSettings, device: torch.device, dtype: torch.dtype) -> None:
        height, width = image_size(settings, _SIDE, scale=_PIXELS, multiple=_PIXELS)
        super().__init__(
            "dummy",
            nn.Module(),
            settings,
            device=device,
            dtype=dtype,
            latent_shape=(_CHANNELS, height // _PIXELS, width // _PIXELS),
            scheduler=RANDOM_WEIGHTS["dummy"],
        )
        self._seconds = settings.model.step_ms / 1000
        self._cycles = round(self._seconds * _cycles_per_second(device)) if device.type == "cuda" else 0

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        latents = scale(latents)
        return latents / (1 + latents.abs()) * (0.5 + timestep.to(latents.dtype) / 2000)

    @torch.no_grad()
    def predict(self, batch: Batch, sampler: Sampler) -> Tensor:
        deadline = time.perf_counter() + self._seconds
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        output = super().predict(batch, sampler)
        if self.device.type == "cpu":
            _sleep_until(deadline)
        return output


def _sleep_until(deadline: float) -> None:
    """By `time.perf_counter`. The last of it is spent awake, as a sleeper is woken late."""
    time.sleep(max(0.0, deadline - AWAKE - time.perf_counter()))
    while time.perf_counter() < deadline:
        pass


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Of the clock that `torch.cuda._sleep` counts."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SPIN)  # wakes the device
    begin.record()
    torch.cuda._sleep(_SPIN)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return _SPIN / milliseconds * 1000
