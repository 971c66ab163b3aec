"""Stable Diffusion 1.x, 2.x and XL: a UNet guided by text.

What happens to a latent follows `StableDiffusionPipeline.__call__` and `StableDiffusionXLPipeline.__call__` of
diffusers line by line.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gpubench.pipeline.base import Scale
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.text_to_image import TextToImage

if TYPE_CHECKING:
    from PIL.Image import Image


class StableDiffusion(TextToImage):
    """Made of a StableDiffusionPipeline."""

    component = "unet"
    embeddings: ClassVar[tuple[str, ...]] = ("prompt_embeds", "negative_prompt_embeds")

    def uses_guidance(self) -> bool:
        return self.guidance_scale > 1 and self.config.time_cond_proj_dim is None

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        prediction: Tensor = self.model(
            scale(self.doubled(latents)),
            timestep,
            encoder_hidden_states=self.text("prompt_embeds", samples),
            timestep_cond=self._guidance_embedding(len(samples), latents.dtype),
            added_cond_kwargs=self.added_conditions(samples),
            return_dict=False,
        )[0]
        return self.guide(prediction)

    def added_conditions(self, samples: Sequence[int]) -> dict[str, Tensor] | None:
        """What the UNet takes besides the text."""
        return None

    def _guidance_embedding(self, samples: int, dtype: torch.dtype) -> Tensor | None:
        """What a UNet distilled from a guided one (as that of LCM is) takes in place of guidance."""
        width = self.config.time_cond_proj_dim
        if width is None:
            return None
        scales = torch.tensor(self.guidance_scale - 1).repeat(samples)
        embedding: Tensor = self.pipe.get_guidance_scale_embedding(scales, embedding_dim=width)
        return embedding.to(self.device, dtype)


class StableDiffusionXL(StableDiffusion):
    """Made of a StableDiffusionXLPipeline; its UNet is also told the pooled text and the image's size."""

    embeddings = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

    def added_conditions(self, samples: Sequence[int]) -> dict[str, Tensor]:
        size = (self.height, self.width)
        pooled = self.text("pooled_prompt_embeds", samples)
        row: Tensor = self.pipe._get_add_time_ids(
            size, (0, 0), size, dtype=pooled.dtype, text_encoder_projection_dim=pooled.shape[-1]
        )
        return {"text_embeds": pooled, "time_ids": row.to(self.device).repeat(len(pooled), 1)}

    def decode(self, batch: Batch) -> "list[Image]":
        """The VAE overflows in fp16, and from then on works in fp32 where its configuration says so."""
        vae = self.pipe.vae
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            vae.to(dtype=torch.float32)
        return super().decode(batch)

    def unscaled(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            return super().unscaled(latents)
        mean, std = (torch.tensor(values).view(1, 4, 1, 1).to(latents) for values in (mean, std))
        unscaled: Tensor = latents * std / config.scaling_factor + mean
        return unscaled
