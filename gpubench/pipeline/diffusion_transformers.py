"""PixArt, Stable Diffusion 3 and Flux: a transformer guided by text.

What happens to a latent follows the `__call__` of their pipelines in diffusers line by line.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubench.errors import SettingsError
from gpubench.pipeline import reference
from gpubench.pipeline.base import Scale
from gpubench.pipeline.text_to_image import TextToImage


class _Patched(TextToImage):
    component = "transformer"

    @property
    def multiple(self) -> int:
        return int(self.pipe.vae_scale_factor * self.config.patch_size)


class PixArt(_Patched):
    """Made of a PixArtSigmaPipeline. Sizes are those asked for, not the nearest that it was trained on."""

    embeddings = (
        "prompt_embeds",
        "prompt_attention_mask",
        "negative_prompt_embeds",
        "negative_prompt_attention_mask",
    )

    def encode_prompt(self, prompt: str) -> Sequence[Tensor | None]:
        encoded: tuple[Tensor | None, ...] = self.pipe.encode_prompt(
            prompt,
            device=self.device,
            do_classifier_free_guidance=self.guided,
            negative_prompt=self.negative_prompt or "",
            clean_caption=True,
        )
        return encoded

    def call_arguments(self) -> dict[str, Any]:
        return {"eta": self.sampling.eta, "use_resolution_binning": False, "negative_prompt": None}

    def prompt_arguments(self, samples: Sequence[int]) -> dict[str, Any]:
        given = super().prompt_arguments(samples)
        return given | {"negative_prompt": self.negative_prompt or ""} if "prompt" in given else given

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        taken = scale(self.doubled(latents))
        prediction: Tensor = self.model(
            taken,
            encoder_hidden_states=self.text("prompt_embeds", samples),
            encoder_attention_mask=self.text("prompt_attention_mask", samples),
            timestep=timestep[None].to(self.device).expand(len(taken)),
            added_cond_kwargs=self.added_conditions(len(taken)),
            return_dict=False,
        )[0]
        guided = self.guide(prediction)
        predicts_variance = self.config.out_channels // 2 == self.config.in_channels
        return guided.chunk(2, dim=1)[0] if predicts_variance else guided

    def added_conditions(self, rows: int) -> dict[str, Tensor | None]:
        """What the transformer takes besides the text, for each row of its batch."""
        return {"resolution": None, "aspect_ratio": None}


class PixArtAlpha(PixArt):
    """Made of a PixArtAlphaPipeline, whose largest transformer is also told the image's size."""

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        """In a single step the pipeline takes what the scheduler predicts for the end, and not the scheduler's step."""
        return super().is_run_by_pipeline(scheduler) and self.steps > 1

    def added_conditions(self, rows: int) -> dict[str, Tensor | None]:
        if self.config.sample_size != 128:
            return super().added_conditions(rows)
        sizes = torch.tensor([self.height, self.width]).repeat(rows, 1)
        ratios = torch.tensor([float(self.height / self.width)]).repeat(rows, 1)
        return {"resolution": sizes.to(self.device, self.dtype), "aspect_ratio": ratios.to(self.device, self.dtype)}


class _FlowMatching(_Patched):
    """Stable Diffusion 3 and Flux, whose pipelines scale neither noise nor input, and give no generator to a step."""

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        own = type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
        return own and not scheduler.config.stochastic_sampling

    def call_arguments(self) -> dict[str, Any]:
        return {}

    def unscaled(self, latents: Tensor) -> Tensor:
        shift: float = self.pipe.vae.config.shift_factor
        return super().unscaled(latents) + shift

    def shift(self, patches: int, longest_shift: float) -> float:
        """How far the timesteps of an image of so many patches move towards noise: `mu` of `set_timesteps`."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = self.scheduler().config
        shift: float = calculate_shift(
            patches,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", longest_shift),
        )
        return shift


class StableDiffusion3(_FlowMatching):
    """Made of a StableDiffusion3Pipeline; its T5 encoder may be missing, and is zeros then."""

    embeddings = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

    def encode_prompt(self, prompt: str) -> Sequence[Tensor | None]:
        encoded: tuple[Tensor | None, ...] = self.pipe.encode_prompt(
            prompt,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=self.guided,
            negative_prompt=self.negative_prompt,
        )
        return encoded

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        if not self.scheduler().config.get("use_dynamic_shifting"):
            return {}
        _, rows, columns = self.latent_shape
        patches = (rows // self.config.patch_size) * (columns // self.config.patch_size)
        return {"mu": self.shift(patches, 1.16)}

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        taken = scale(self.doubled(latents))
        prediction: Tensor = self.model(
            hidden_states=taken,
            timestep=timestep.expand(len(taken)),
            encoder_hidden_states=self.text("prompt_embeds", samples),
            pooled_projections=self.text("pooled_prompt_embeds", samples),
            return_dict=False,
        )[0]
        return self.guide(prediction)


class Flux(_FlowMatching):
    """Made of a FluxPipeline; its latents are patches in a row, and guidance is a number that the model is told."""

    embeddings = ("prompt_embeds", "pooled_prompt_embeds")

    @property
    def multiple(self) -> int:
        return int(self.pipe.vae_scale_factor * 2)

    @property
    def own_size(self) -> int:
        return int(self.pipe.default_sample_size)

    def latent_shape_of(self, height: int, width: int) -> tuple[int, ...]:
        return (height // self.multiple * (width // self.multiple), self.config.in_channels)

    def uses_guidance(self) -> bool:
        if self.negative_prompt is not None:
            raise SettingsError("work.negative_prompt is given, and Flux is guided without one", "leave it out")
        return False

    def encode_prompt(self, prompt: str) -> Sequence[Tensor | None]:
        embeds, pooled, _ = self.pipe.encode_prompt(prompt, prompt_2=None, device=self.device)
        return (embeds, pooled)

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        shift = {"mu": self.shift(self.latent_shape[0], 1.15)}
        if self.scheduler().config.get("use_flow_sigmas"):
            return shift
        return shift | {"sigmas": np.linspace(1.0, 1 / steps, steps)}

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        rows, columns = 2 * (self.height // self.multiple), 2 * (self.width // self.multiple)
        channels, count = self.config.in_channels // 4, len(generators)
        noise = reference.noise((count, channels, rows, columns), generators, self.device, self.dtype)
        packed: Tensor = self.pipe._pack_latents(noise, count, channels, rows, columns)
        return packed

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        count = len(latents)
        embeds = self.condition("prompt_embeds", samples)
        guidance = torch.full([1], self.guidance_scale, device=self.device, dtype=torch.float32).expand(count)
        rows, columns = self.height // self.multiple, self.width // self.multiple
        prediction: Tensor = self.model(
            hidden_states=scale(latents),
            timestep=timestep.expand(count).to(latents.dtype) / 1000,
            guidance=guidance if self.config.guidance_embeds else None,
            pooled_projections=self.condition("pooled_prompt_embeds", samples),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=self.device, dtype=self.dtype),
            img_ids=self.pipe._prepare_latent_image_ids(count, rows, columns, self.device, self.dtype),
            return_dict=False,
        )[0]
        return prediction

    def unscaled(self, latents: Tensor) -> Tensor:
        spread = self.pipe._unpack_latents(latents, self.height, self.width, self.pipe.vae_scale_factor)
        return super().unscaled(spread)
