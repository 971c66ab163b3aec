"""What all denoisers do alike: noise, the next prediction, a digest of the weights, and a reference of last resort."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpubench.diffusion.scheduler_names import SEEDED, OwnScheduler, parse_options
from gpubench.diffusion.settings import PipeSettings
from gpubench.errors import SettingsError
from gpubench.pipeline import conventions, reference
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.quiet import quiet
from gpubench.pipeline.reference import OnStep
from gpubench.pipeline.schedulers import Sampler, create

if TYPE_CHECKING:
    from PIL.Image import Image

Scale = Callable[[Tensor], Tensor]
"""What a scheduler does to the model's input."""


class DenoiserBase:
    """See `gpubench.pipeline.denoiser.Denoiser`. A subclass gives `output`, and what else is its model's own.

    `model` comes on `device` and in `dtype`.
    """

    reference_name = reference.LOOP

    def __init__(
        self,
        name: str,
        model: nn.Module,
        settings: PipeSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        latent_shape: tuple[int, ...],
        scheduler: OwnScheduler,
    ) -> None:
        if settings.sampling.steps is None:
            raise ValueError("sampling.steps has not been filled in")
        self.name = name
        self.model: Any = model.eval().requires_grad_(False)
        self.device = device
        self.dtype = dtype
        self.latent_shape = latent_shape
        self.default_scheduler, self.scheduler_config = scheduler
        self.sampling = settings.sampling
        self.steps = settings.sampling.steps
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.conditioning: list[dict[str, Tensor]] = []

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        """What the model makes of latents at a timestep, guidance applied: the body of its pipeline's loop."""
        raise NotImplementedError

    def scheduler(self) -> Any:
        name = self.sampling.scheduler or self.default_scheduler
        with quiet():
            return create(name, parse_options(self.sampling.options), self.scheduler_config)

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        return {}

    def weights_digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(reference.raw_bytes(tensor))
        return digest.hexdigest()

    def encode(
        self, prompts: Sequence[str], before_each: Callable[[int], None] = lambda index: None
    ) -> list[dict[str, Tensor]]:
        return []

    def admit(self, conditioning: Sequence[Mapping[str, Tensor]]) -> None:
        self.conditioning = [{key: value.to(self.device) for key, value in entry.items()} for entry in conditioning]

    def condition(self, key: str, samples: Sequence[int]) -> Tensor:
        """One tensor of the conditioning, for some samples: (len(samples), ...)."""
        return torch.cat([self.conditioning[sample % len(self.conditioning)][key] for sample in samples])

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        """(len(generators), *latent_shape), before the scheduler scales it."""
        return reference.noise((len(generators), *self.latent_shape), generators, self.device, self.dtype)

    def prepare(self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        generators = reference.generators_of(seeds)
        latents = self.noise(generators) * sampler.noise_scale
        return Batch(list(samples), latents, sampler.fresh(seeds[0]), generators)

    @torch.no_grad()
    def predict(self, batch: Batch, sampler: Sampler) -> Tensor:
        scale = functools.partial(sampler.scale, batch)
        return self.output(batch.latents, sampler.timesteps[batch.done], batch.samples, scale)

    def decode(self, batch: Batch) -> "list[Image]":
        raise SettingsError(f"{self.name} makes latents that nothing decodes", "leave output.images at false")

    @torch.no_grad()
    def reference(
        self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int], on_step: OnStep | None = None
    ) -> Tensor:
        scheduler = self.scheduler()
        if type(scheduler).__name__ == SEEDED:
            scheduler.noise_sampler_seed = seeds[0]
        generators = reference.generators_of(seeds)
        if self.reference_name == reference.LOOP:
            return self._loop(scheduler, samples, generators, on_step).cpu()
        if on_step is not None:
            reference.watch(scheduler, on_step)
        return self.run_pipeline(scheduler, samples, generators).cpu()

    def run_pipeline(self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator]) -> Tensor:
        """Final latents by the model's pipeline of diffusers, where `reference_name` says so."""
        raise NotImplementedError

    def _loop(
        self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator], on_step: OnStep | None
    ) -> Tensor:
        name = type(scheduler).__name__
        arguments = conventions.schedule_arguments(name, self.steps, self.set_timesteps_kwargs(self.steps))
        scheduler.set_timesteps(device=self.device, **arguments)
        timesteps = scheduler.timesteps

        def output(latents: Tensor, timestep: Tensor) -> Tensor:
            def scale(latents: Tensor) -> Tensor:
                has_scale = hasattr(scheduler, "scale_model_input")
                return scheduler.scale_model_input(latents, timestep) if has_scale else latents

            return self.output(latents, timestep, samples, scale)

        latents = self.noise(generators) * getattr(scheduler, "init_noise_sigma", 1.0)
        batch = Batch(list(samples), latents, scheduler, generators)
        evaluated = timesteps[:-1] if name in conventions.TERMINAL else timesteps
        return reference.loop(batch, evaluated, output, self.sampling.eta, on_step)


def image_size(settings: PipeSettings, own: Any, *, scale: int, multiple: int) -> tuple[int, int]:
    """(height, width) in pixels: what is asked for, else what the model was trained on.

    `own` is that size as diffusers configures it: one number or (height, width), each of `scale` pixels, or None.

    Raises SettingsError for a side that is not known, or not a multiple of `multiple`.
    """
    rows, columns = own if isinstance(own, list | tuple) else (own, own)
    height = settings.model.height or (rows or 0) * scale
    width = settings.model.width or (columns or 0) * scale
    for side, pixels in (("height", height), ("width", width)):
        if not pixels:
            raise SettingsError(f"the model does not say which {side} its images have", f"set --model.{side}")
        if pixels % multiple:
            below = pixels // multiple * multiple
            nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise SettingsError(f"model.{side} {pixels} is not a multiple of {multiple}", f"use {nearest}")
    return height, width
