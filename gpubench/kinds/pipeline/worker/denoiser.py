"""The base class of all denoisers, and the single-process reference that the pipeline is compared with."""

import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.requests import prompt_index
from gpubench.kinds.pipeline.schedulers import SEEDED, OwnScheduler, parse_options
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.worker.sampler import TERMINAL, Batch, Sampler, create, quiet, schedule_arguments, step_of

if TYPE_CHECKING:
    from PIL.Image import Image

LOOP = "a single-process loop over diffusers' scheduler and model"
"""The reference if diffusers has no pipeline for the model and the scheduler."""

Output = Callable[[Tensor, Tensor], Tensor]
"""A function of (latents, timestep) that returns the model's output for the scheduler's step."""
OnStep = Callable[[int, Tensor], None]
"""A function that is called with the number of an evaluation, from 0, and its resulting latents."""


def generators_of(seeds: Sequence[int]) -> list[torch.Generator]:
    """One generator per sample, always on the CPU, so that the noise does not depend on the device."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def noise(shape: Sequence[int], generators: list[torch.Generator], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Standard normal noise (len(generators), ...), each row drawn from its generator as in diffusers."""
    from diffusers.utils.torch_utils import randn_tensor

    drawn: Tensor = randn_tensor(tuple(shape), generator=generators, device=device, dtype=dtype)
    return drawn


def fits_pipelines(scheduler: Any) -> bool:
    """Whether diffusers' Stable Diffusion pipelines run the scheduler as its own pipelines do."""
    name = type(scheduler).__name__
    plain = step_of(name) is step_of("DDIMScheduler") and name not in TERMINAL
    return plain and hasattr(scheduler, "init_noise_sigma") and hasattr(scheduler, "scale_model_input")


def watch(scheduler: Any, on_step: OnStep) -> None:
    """Calls `on_step` after each step of the scheduler, for any caller and any form of result.

    The callbacks of diffusers' pipelines are not enough: some run after each evaluation, some after a few, some never.
    """
    step = scheduler.step
    count = itertools.count()

    @functools.wraps(step)  # pipelines inspect the signature
    def watched(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        on_step(next(count), made[0])
        return made

    scheduler.step = watched


def loop(batch: Batch, timesteps: Tensor, output: Output, eta: float, on_step: OnStep | None) -> Tensor:
    """Evaluates `batch` at each of `timesteps`, to which its scheduler is set. Returns the final latents."""
    accepted = inspect.signature(batch.scheduler.step).parameters
    extra = {name: value for name, value in (("eta", eta), ("generator", batch.generators)) if name in accepted}
    step = step_of(type(batch.scheduler).__name__)
    for index, timestep in enumerate(timesteps):
        batch.latents = step(batch, output(batch.latents, timestep), timesteps, extra)
        batch.done += 1
        if on_step is not None:
            on_step(index, batch.latents)
    return batch.latents


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order, for any memory format and device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()


def sha256(latents: Tensor) -> str:
    """The sha256 of one sample's latent in its own data type."""
    return hashlib.sha256(raw_bytes(latents)).hexdigest()


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference between elements of two tensors of the same shape; infinite if it is NaN."""
    difference = (ours.cpu().double() - theirs.cpu().double()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[int, float] | None:
    """Returns the first evaluation after which two trajectories differ in a bit, and the largest difference there.

    A trajectory is the latents after each evaluation. None if they are equal. Raises ValueError if they differ in
    length.
    """
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if raw_bytes(one) != raw_bytes(other):
            return step, largest_difference(one, other)
    return None


Scale = Callable[[Tensor], Tensor]
"""A function that scales the model's input as the scheduler requires."""


class Denoiser:
    """A model with all its weights on one device, and the other parts of its pipeline. A subclass adds `output`.

    One evaluation, on any rank, is `sampler.step(batch, denoiser.predict(batch, sampler))`.
    """

    reference_name = LOOP
    """A description of the program that `reference` runs."""
    pipe: Any = None
    """The model's pipeline in diffusers; None for the dummy."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        settings: CompletedPipeSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        latent_shape: tuple[int, ...],
        scheduler: OwnScheduler,
    ) -> None:
        """`model` must be on `device` and in `dtype`.

        `latent_shape` is the shape of one sample's latent, without the batch dimension. `scheduler` is the class name
        and the configuration of the model's own scheduler; another class uses the options that it knows.
        """
        self.name = name
        self.model: Any = model.eval().requires_grad_(False)
        self.device = device
        self.dtype = dtype
        self.latent_shape = latent_shape
        self.default_scheduler, self.scheduler_config = scheduler
        self.sampling = settings.sampling
        self.steps = settings.sampling.steps
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        """The number of parameters of the denoiser, without text encoders and VAE."""
        self.seeds = len(settings.work.seed_list)
        """The number of seeds that every prompt is made with; 0 without a list of them."""
        self.conditioning: list[dict[str, Tensor]] = []

    def move(self, device: torch.device) -> None:
        """Moves the denoiser, and the text encoders and VAE that were loaded with it, without a change of their bits.

        Latents and conditioning stay on the denoiser's own device.
        """
        parts = self.pipe.components.values() if self.pipe is not None else [self.model]
        for part in parts:
            if isinstance(part, nn.Module):
                part.to(device)

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        """The model's output for latents at a timestep with guidance: the body of its pipeline's loop."""
        raise NotImplementedError

    def scheduler(self) -> Any:
        """A new diffusers scheduler: the model's own or the requested one, with the model's configuration.

        Raises SettingsError for a name or an option that does not exist.
        """
        name = self.sampling.scheduler or self.default_scheduler
        with quiet():
            return create(name, parse_options(self.sampling.options), self.scheduler_config)

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        """The arguments of the model's pipeline to `set_timesteps` besides number of steps and device."""
        return {}

    def weights_digest(self) -> str:
        """The sha256 of all parameters and buffers of the denoiser with their names, in order."""
        digest = hashlib.sha256()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()

    def encode(
        self, prompts: Sequence[str], before_each: Callable[[int], None] = lambda index: None
    ) -> list[dict[str, Tensor]]:
        """Returns the conditioning of each prompt: tensors on the CPU with a batch dimension of 1. Only for rank 0.

        `before_each` is called with the number of each prompt, from 0. A model without conditioning returns an empty
        list, and one with random weights random tensors.
        """
        return []

    def set_conditioning(self, conditioning: Sequence[Mapping[str, Tensor]]) -> None:
        """Keeps the result of `encode` on this rank's device."""
        self.conditioning = [{key: value.to(self.device) for key, value in entry.items()} for entry in conditioning]

    def condition(self, key: str, samples: Sequence[int]) -> Tensor:
        """One tensor of the conditioning for some samples, (len(samples), ...)."""
        return torch.cat([self.conditioning[self.index(sample)][key] for sample in samples])

    def index(self, sample: int) -> int:
        """The index of a sample's prompt among those that `encode` was given."""
        return prompt_index(sample, len(self.conditioning), self.seeds)

    def noise(self, generators: list[torch.Generator]) -> Tensor:
        """Noise (len(generators), *latent_shape) before the scheduler's scaling."""
        return noise((len(generators), *self.latent_shape), generators, self.device, self.dtype)

    def prepare(self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """A batch before its first evaluation: noise from a generator per sample, at the scheduler's scale."""
        generators = generators_of(seeds)
        latents = self.noise(generators) * sampler.noise_scale
        return Batch(list(samples), latents, sampler.fresh(seeds[0]), generators)

    @torch.no_grad()
    def predict(self, batch: Batch, sampler: Sampler) -> Tensor:
        """The model's output for the next evaluation with guidance, as input of the scheduler's step."""
        scale = functools.partial(sampler.scale, batch)
        return self.output(batch.latents, sampler.timesteps[batch.done], batch.samples, scale)

    def decode(self, batch: Batch) -> "list[Image]":
        """The images of a finished batch, on a rank that was loaded with `images`."""
        raise SettingsError(f"{self.name} makes latents for which there is no decoder", "leave output.images at false")

    @torch.no_grad()
    def reference(
        self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int], on_step: OnStep | None = None
    ) -> Tensor:
        """Returns the final latents of the samples on the CPU, made together in this process by diffusers.

        It takes only the number of evaluations and the arguments of `set_timesteps` from `sampler`, and uses a new
        scheduler.
        """
        scheduler = self.scheduler()
        if type(scheduler).__name__ == SEEDED:
            scheduler.noise_sampler_seed = seeds[0]
        generators = generators_of(seeds)
        if self.reference_name == LOOP:
            return self._loop(scheduler, samples, generators, on_step).cpu()
        if on_step is not None:
            watch(scheduler, on_step)
        return self.run_pipeline(scheduler, samples, generators).cpu()

    def run_pipeline(self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator]) -> Tensor:
        """The final latents by the model's diffusers pipeline, if `reference_name` names it."""
        raise NotImplementedError

    def _loop(
        self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator], on_step: OnStep | None
    ) -> Tensor:
        name = type(scheduler).__name__
        arguments = schedule_arguments(name, self.steps, self.set_timesteps_kwargs(self.steps))
        scheduler.set_timesteps(device=self.device, **arguments)
        timesteps = scheduler.timesteps

        def output(latents: Tensor, timestep: Tensor) -> Tensor:
            def scale(latents: Tensor) -> Tensor:
                has_scale = hasattr(scheduler, "scale_model_input")
                return scheduler.scale_model_input(latents, timestep) if has_scale else latents

            return self.output(latents, timestep, samples, scale)

        latents = self.noise(generators) * getattr(scheduler, "init_noise_sigma", 1.0)
        batch = Batch(list(samples), latents, scheduler, generators)
        evaluated = timesteps[:-1] if name in TERMINAL else timesteps
        return loop(batch, evaluated, output, self.sampling.eta, on_step)


def image_size(settings: CompletedPipeSettings, own: Any, *, scale: int, multiple: int) -> tuple[int, int]:
    """(height, width) in pixels: the requested size, or else the size that the model was trained on.

    `own` is the latter in diffusers' configuration: one number or (height, width) in units of `scale` pixels, or None.
    Raises SettingsError for a side that is unknown or not a multiple of `multiple`.
    """
    rows, columns = own if isinstance(own, list | tuple) else (own, own)
    height = settings.model.height or (rows or 0) * scale
    width = settings.model.width or (columns or 0) * scale
    for side, pixels in (("height", height), ("width", width)):
        if not pixels:
            raise SettingsError(
                f"the model's configuration does not give the {side} of its images", f"set --model.{side}"
            )
        if pixels % multiple:
            below = pixels // multiple * multiple
            nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
            raise SettingsError(f"model.{side} {pixels} is not a multiple of {multiple}", f"use {nearest}")
    return height, width


class PipelineDenoiser(Denoiser):
    """The denoiser of a diffusers pipeline, which is built or loaded already."""

    component: ClassVar[str] = "unet"
    """The name of the denoiser in the pipeline."""

    def __init__(
        self,
        pipe: Any,
        name: str,
        settings: CompletedPipeSettings,
        device: torch.device,
        dtype: torch.dtype,
        scheduler: OwnScheduler,
    ) -> None:
        model = getattr(pipe, self.component)
        self.pipe = pipe
        self.config = model.config
        self.height, self.width = image_size(settings, self.own_size, scale=self.scale, multiple=self.multiple)
        super().__init__(
            name,
            model,
            settings,
            device=device,
            dtype=dtype,
            latent_shape=self.latent_shape_of(self.height, self.width),
            scheduler=scheduler,
        )
        if self.is_run_by_pipeline(self.scheduler()):
            self.reference_name = f"diffusers {type(pipe).__name__}.__call__"

    @property
    def scale(self) -> int:
        """How many pixels a side of a latent's element stands for."""
        return int(self.pipe.vae_scale_factor)

    @property
    def multiple(self) -> int:
        """Height and width in pixels must be multiples of this."""
        return 8

    @property
    def own_size(self) -> Any:
        """The size that the denoiser was trained on, in latent pixels: a number or (height, width); None if unknown."""
        return self.config.sample_size

    def latent_shape_of(self, height: int, width: int) -> tuple[int, ...]:
        return (self.config.in_channels, height // self.scale, width // self.scale)

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        """Whether the pipeline's `__call__` runs the scheduler, with a generator if it draws noise."""
        return fits_pipelines(scheduler)
