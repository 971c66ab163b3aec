"""Text-to-image models: UNets (Stable Diffusion 1.x, 2.x and XL) and transformers (Stable Diffusion 3, PixArt, Flux).

The operations on a latent follow the `__call__` of each model's pipeline in diffusers line by line.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gpubench.kinds.pipeline.folders import check_negative_prompt, schedule_keywords
from gpubench.kinds.pipeline.schedulers import OwnScheduler
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.worker import denoiser
from gpubench.kinds.pipeline.worker.denoiser import PipelineDenoiser, Scale
from gpubench.kinds.pipeline.worker.sampler import Batch, quiet

if TYPE_CHECKING:
    from PIL.Image import Image


class TextToImage(PipelineDenoiser):
    """The model of a diffusers pipeline, of which only the denoiser must be loaded. Safety checkers never are."""

    embeddings: ClassVar[tuple[str, ...]]
    """The names of what `encode_prompt` returns, as arguments of the pipeline's `__call__`."""

    def __init__(
        self,
        pipe: Any,
        name: str,
        settings: CompletedPipeSettings,
        device: torch.device,
        dtype: torch.dtype,
        scheduler: OwnScheduler,
    ) -> None:
        super().__init__(pipe, name, settings, device, dtype, scheduler)
        self.negative_prompt = settings.work.negative_prompt or None
        self.guidance_scale = settings.sampling.guidance_scale or 0.0
        self.guided = self.uses_guidance()
        self.prompts: list[str] = []
        """The prompts that `encode` was given; empty on ranks that encode none, and with random embeddings."""

    def uses_guidance(self) -> bool:
        """Whether each evaluation runs the model with both the prompt and the negative prompt."""
        return self.guidance_scale > 1

    def encode_prompt(self, prompt: str) -> Sequence[Tensor | None]:
        """The `embeddings` of one prompt."""
        encoded: tuple[Tensor | None, ...] = self.pipe.encode_prompt(
            prompt=prompt,
            device=self.device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=self.guided,
            negative_prompt=self.negative_prompt,
        )
        return encoded

    def call_arguments(self) -> dict[str, Any]:
        """The arguments of the pipeline's `__call__` that not all pipelines take."""
        return {"eta": self.sampling.eta}

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], before_each: Callable[[int], None] = lambda index: None
    ) -> list[dict[str, Tensor]]:
        """Encodes one prompt at a time: in a batch, its embedding would depend on the others in the last bits."""
        self.prompts = list(prompts)
        encoded = []
        for index, prompt in enumerate(prompts):
            before_each(index)
            with quiet(transformers=True):
                encoded.append(self._named(self.encode_prompt(prompt)))
        return encoded

    def _named(self, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        named = zip(self.embeddings, tensors, strict=True)
        return {key: tensor.cpu() for key, tensor in named if tensor is not None}

    def run_pipeline(self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator]) -> Tensor:
        self.pipe.scheduler = scheduler
        self.pipe.set_progress_bar_config(disable=True)
        with quiet(transformers=True):
            final: Tensor = self.pipe(
                **self.call_arguments() | self.prompt_arguments(samples),
                height=self.height,
                width=self.width,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance_scale,
                generator=generators,
                output_type="latent",
                return_dict=False,
            )[0]
        return final

    def prompt_arguments(self, samples: Sequence[int]) -> dict[str, Any]:
        """The arguments of the pipeline's `__call__` that describe the samples' prompts.

        This is the prompt itself for one sample on a rank with text encoders, and otherwise embeddings: the pipeline
        would encode several prompts in one batch, and the embeddings would differ in the last bits.
        """
        if self.prompts and len(samples) == 1:
            return {"prompt": self.prompts[self.index(samples[0])], "negative_prompt": self.negative_prompt}
        return {key: self.condition(key, samples) for key in self.embeddings if key in self.conditioning[0]}

    @torch.no_grad()
    def decode(self, batch: Batch) -> "list[Image]":
        vae = self.pipe.vae
        pixels = vae.decode(self.unscaled(batch.latents.to(vae.dtype)), return_dict=False)[0]
        images: list[Image] = self.pipe.image_processor.postprocess(pixels, output_type="pil")
        return images

    def unscaled(self, latents: Tensor) -> Tensor:
        """The denoiser's normalised latents at the scale of the VAE."""
        unscaled: Tensor = latents / self.pipe.vae.config.scaling_factor
        return unscaled

    def doubled(self, latents: Tensor) -> Tensor:
        """With guidance the latents twice in one batch, for the negative prompt and for the prompt."""
        return torch.cat([latents] * 2) if self.guided else latents

    def text(self, key: str, samples: Sequence[int]) -> Tensor:
        """An embedding of the samples' prompts, with guidance after that of their negative prompts."""
        if not self.guided:
            return self.condition(key, samples)
        return torch.cat([self.condition(f"negative_{key}", samples), self.condition(key, samples)])

    def guide(self, prediction: Tensor) -> Tensor:
        """Applies classifier-free guidance (Ho and Salimans, 2022), in diffusers' order of operations."""
        if not self.guided:
            return prediction
        unconditional, conditional = prediction.chunk(2)
        return self.rescaled(unconditional + self.guidance_scale * (conditional - unconditional), conditional)

    def rescaled(self, guided: Tensor, conditional: Tensor) -> Tensor:
        """The guided prediction as the scheduler takes it; `conditional` is the one for the prompt alone."""
        return guided


class StableDiffusion(TextToImage):
    """The model of a StableDiffusionPipeline."""

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

    def call_arguments(self) -> dict[str, Any]:
        return super().call_arguments() | {"guidance_rescale": self.sampling.guidance_rescale}

    def rescaled(self, guided: Tensor, conditional: Tensor) -> Tensor:
        """Applies section 3.4 of "Common Diffusion Noise Schedules and Sample Steps are Flawed" (Lin et al., 2024)."""
        if self.sampling.guidance_rescale == 0:
            return guided
        from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

        rescaled: Tensor = rescale_noise_cfg(guided, conditional, guidance_rescale=self.sampling.guidance_rescale)
        return rescaled

    def added_conditions(self, samples: Sequence[int]) -> dict[str, Tensor] | None:
        """The inputs of the UNet besides the text."""
        return None

    def _guidance_embedding(self, samples: int, dtype: torch.dtype) -> Tensor | None:
        """The input that replaces guidance in a UNet distilled from a guided one, such as that of LCM."""
        width = self.config.time_cond_proj_dim
        if width is None:
            return None
        scales = torch.tensor(self.guidance_scale - 1).repeat(samples)
        embedding: Tensor = self.pipe.get_guidance_scale_embedding(scales, embedding_dim=width)
        return embedding.to(self.device, dtype)


class StableDiffusionXL(StableDiffusion):
    """The model of a StableDiffusionXLPipeline, whose UNet also takes the pooled text and the image's size."""

    embeddings = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

    def added_conditions(self, samples: Sequence[int]) -> dict[str, Tensor]:
        size = (self.height, self.width)
        pooled = self.text("pooled_prompt_embeds", samples)
        row: Tensor = self.pipe._get_add_time_ids(
            size, (0, 0), size, dtype=pooled.dtype, text_encoder_projection_dim=pooled.shape[-1]
        )
        return {"text_embeds": pooled, "time_ids": row.to(self.device).repeat(len(pooled), 1)}

    def decode(self, batch: Batch) -> "list[Image]":
        """Decodes in fp32 if the configuration of the VAE asks for it, because this VAE overflows in fp16."""
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


class _Patched(TextToImage):
    """A model with a transformer, which takes patches of the latents."""

    component = "transformer"

    @property
    def multiple(self) -> int:
        return int(self.pipe.vae_scale_factor * self.config.patch_size)


class PixArt(_Patched):
    """The model of a PixArtSigmaPipeline. Images have the requested size, not the nearest one of its training."""

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
        """The inputs of the transformer besides the text, for each row of its batch."""
        return {"resolution": None, "aspect_ratio": None}


class PixArtAlpha(PixArt):
    """The model of a PixArtAlphaPipeline, whose largest transformer also takes the image's size."""

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        """False for a single step, after which the pipeline takes the scheduler's prediction of the end."""
        return super().is_run_by_pipeline(scheduler) and self.steps > 1

    def added_conditions(self, rows: int) -> dict[str, Tensor | None]:
        if self.config.sample_size != 128:
            return super().added_conditions(rows)
        sizes = torch.tensor([self.height, self.width]).repeat(rows, 1)
        ratios = torch.tensor([float(self.height / self.width)]).repeat(rows, 1)
        return {"resolution": sizes.to(self.device, self.dtype), "aspect_ratio": ratios.to(self.device, self.dtype)}


class _FlowMatching(_Patched):
    """A model whose pipeline scales neither noise nor input, and passes no generator to a step."""

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        own = type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
        return own and not scheduler.config.stochastic_sampling

    def call_arguments(self) -> dict[str, Any]:
        return {}

    def unscaled(self, latents: Tensor) -> Tensor:
        shift: float = self.pipe.vae.config.shift_factor
        return super().unscaled(latents) + shift

    def shift(self, patches: int, longest_shift: float) -> float:
        """The `mu` of `set_timesteps`: how far the timesteps of so many patches move towards noise."""
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
    """The model of a StableDiffusion3Pipeline. If its T5 encoder is missing, that embedding is zeros."""

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
        if not schedule_keywords("StableDiffusion3Pipeline", self.scheduler().config):
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
    """The model of a FluxPipeline. Its latents are a sequence of patches, and the guidance scale is an input."""

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
        check_negative_prompt("FluxPipeline", self.negative_prompt)
        return False

    def encode_prompt(self, prompt: str) -> Sequence[Tensor | None]:
        embeds, pooled, _ = self.pipe.encode_prompt(prompt, prompt_2=None, device=self.device)
        return (embeds, pooled)

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        given = {"mu": self.shift(self.latent_shape[0], 1.15), "sigmas": np.linspace(1.0, 1 / steps, steps)}
        return {key: given[key] for key in schedule_keywords("FluxPipeline", self.scheduler().config)}

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        rows, columns = 2 * (self.height // self.multiple), 2 * (self.width // self.multiple)
        channels, count = self.config.in_channels // 4, len(generators)
        noise = denoiser.noise((count, channels, rows, columns), generators, self.device, self.dtype)
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
