"""Unconditional diffusion of images: what DDPMPipeline of diffusers runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpubench.diffusion.scheduler_names import OwnScheduler
from gpubench.diffusion.settings import PipeSettings
from gpubench.pipeline import reference
from gpubench.pipeline.base import DenoiserBase, Scale, image_size
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.quiet import quiet

if TYPE_CHECKING:
    from PIL.Image import Image

_RUN_BY_PIPELINE = ("DDPMScheduler", "DDIMScheduler")
"""The ones that need nothing that DDPMPipeline does not do: no scaling of noise or input."""


class Unconditional(DenoiserBase):
    """Made of a DDPMPipeline. Its latents are images; a scheduler that scales noise and input is let do so."""

    def __init__(
        self,
        pipe: Any,
        name: str,
        settings: PipeSettings,
        device: torch.device,
        dtype: torch.dtype,
        scheduler: OwnScheduler,
    ) -> None:
        self.pipe = pipe
        config = pipe.unet.config
        halvings = len(config.block_out_channels) - 1
        size = image_size(settings, config.sample_size, scale=1, multiple=2**halvings)
        super().__init__(
            name,
            pipe.unet,
            settings,
            device=device,
            dtype=dtype,
            latent_shape=(config.in_channels, *size),
            scheduler=scheduler,
        )
        own = config.sample_size
        own_size = size == (tuple(own) if isinstance(own, list | tuple) else (own, own))
        if own_size and type(self.scheduler()).__name__ in _RUN_BY_PIPELINE and not self.sampling.eta:
            self.reference_name = "diffusers DDPMPipeline.__call__"

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        output: Tensor = self.model(scale(latents), timestep).sample
        return output

    def run_pipeline(self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator]) -> Tensor:
        """The pipeline gives back images of clipped pixels, so the last latents are those of its last step."""
        latents: list[Tensor] = []
        reference.watch(scheduler, lambda step, made: latents.append(made))
        self.pipe.scheduler = scheduler
        self.pipe.set_progress_bar_config(disable=True)
        with quiet():
            self.pipe(batch_size=len(samples), generator=generators, num_inference_steps=self.steps, output_type="pt")
        return latents[-1]

    @torch.no_grad()
    def decode(self, batch: Batch) -> "list[Image]":
        pixels = (batch.latents / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
        images: list[Image] = self.pipe.numpy_to_pil(pixels)
        return images
