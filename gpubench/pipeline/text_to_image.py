"""What the pipelines that make images of prompts have in common, whatever network denoises in them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gpubench.diffusion.prompts import prompt_of
from gpubench.diffusion.scheduler_names import OwnScheduler
from gpubench.diffusion.settings import PipeSettings
from gpubench.pipeline import reference
from gpubench.pipeline.base import DenoiserBase, image_size
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.quiet import quiet

if TYPE_CHECKING:
    from PIL.Image import Image


class TextToImage(DenoiserBase):
    """Made of a pipeline of diffusers, of which only the denoiser need be there. No safety checker is among it."""

    component: ClassVar[str]
    """The denoiser's name in the pipeline."""
    embeddings: ClassVar[tuple[str, ...]]
    """What `encode_prompt` returns, by the names under which the pipeline's `__call__` takes it."""

    def __init__(
        self,
        pipe: Any,
        name: str,
        settings: PipeSettings,
        device: torch.device,
        dtype: torch.dtype,
        scheduler: OwnScheduler,
    ) -> None:
        model = getattr(pipe, self.component)
        self.pipe = pipe
        self.config = model.config
        self.height, self.width = image_size(
            settings, self.own_size, scale=pipe.vae_scale_factor, multiple=self.multiple
        )
        super().__init__(
            name,
            model,
            settings,
            device=device,
            dtype=dtype,
            latent_shape=self.latent_shape_of(self.height, self.width),
            scheduler=scheduler,
        )
        self.negative_prompt = settings.work.negative_prompt or None
        self.guidance_scale = settings.sampling.guidance_scale or 0.0
        self.guided = self.uses_guidance()
        self.prompts: list[str] = []
        """As `encode` was given them; none where it never was, or where there is nothing to encode with."""
        if self.is_run_by_pipeline(self.scheduler()):
            self.reference_name = f"diffusers {type(pipe).__name__}.__call__"

    @property
    def multiple(self) -> int:
        """Of height and width, in pixels."""
        return 8

    @property
    def own_size(self) -> Any:
        """Latent pixels each way, or (height, width) of them, that the denoiser was trained on; None if not known."""
        return self.config.sample_size

    def latent_shape_of(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor
        return (self.config.in_channels, height // factor, width // factor)

    def uses_guidance(self) -> bool:
        """Whether each evaluation asks the model twice, with the prompt and with the negative one."""
        return self.guidance_scale > 1

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        """Whether the pipeline's `__call__` runs the scheduler, and with a generator where it draws noise."""
        return reference.fits_pipelines(scheduler)

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
        """Of the pipeline's `__call__`, besides what all have."""
        return {"eta": self.sampling.eta}

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], before_each: Callable[[int], None] = lambda index: None
    ) -> list[dict[str, Tensor]]:
        """One prompt at a time: in a batch its embedding would depend on its neighbours in the last bits."""
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
        """What the pipeline's `__call__` is told of the samples' prompts: themselves, where the encoders are here.

        Of several samples at once it would encode them in one batch, which differs in the last bits: it is then given
        embeddings, like a model of random weights.
        """
        if self.prompts and len(samples) == 1:
            return {"prompt": prompt_of(samples[0], self.prompts), "negative_prompt": self.negative_prompt}
        return {key: self.condition(key, samples) for key in self.embeddings if key in self.conditioning[0]}

    @torch.no_grad()
    def decode(self, batch: Batch) -> "list[Image]":
        vae = self.pipe.vae
        pixels = vae.decode(self.unscaled(batch.latents.to(vae.dtype)), return_dict=False)[0]
        images: list[Image] = self.pipe.image_processor.postprocess(pixels, output_type="pil")
        return images

    def unscaled(self, latents: Tensor) -> Tensor:
        """Latents as the VAE makes them; those of the denoiser are normalised."""
        unscaled: Tensor = latents / self.pipe.vae.config.scaling_factor
        return unscaled

    def doubled(self, latents: Tensor) -> Tensor:
        """Twice over where there is guidance, as the model is asked for both in one batch."""
        return torch.cat([latents] * 2) if self.guided else latents

    def text(self, key: str, samples: Sequence[int]) -> Tensor:
        """An embedding of the samples' prompts, behind that of their negative prompts where there is guidance."""
        if not self.guided:
            return self.condition(key, samples)
        return torch.cat([self.condition(f"negative_{key}", samples), self.condition(key, samples)])

    def guide(self, prediction: Tensor) -> Tensor:
        """Classifier-free guidance (Ho and Salimans, 2022), in diffusers' order of operations."""
        if not self.guided:
            return prediction
        unconditional, conditional = prediction.chunk(2)
        return unconditional + self.guidance_scale * (conditional - unconditional)
