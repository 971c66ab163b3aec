"""Single-process diffusion, written apart from the pipeline that it is there to check; and how results are compared."""

import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubench.pipeline import conventions
from gpubench.pipeline.batch import Batch

LOOP = "a single-process loop over diffusers' scheduler and model"
"""The reference where diffusers has no pipeline of its own for a model and a scheduler."""

Output = Callable[[Tensor, Tensor], Tensor]
"""(latents, timestep) -> what the scheduler's step takes."""
OnStep = Callable[[int, Tensor], None]
"""Takes the number of an evaluation, from 0, and the latents that it led to."""


def generators_of(seeds: Sequence[int]) -> list[torch.Generator]:
    """One a sample, on the CPU whatever the device, so that noise does not depend on it."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def noise(shape: Sequence[int], generators: list[torch.Generator], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Standard normal, (len(generators), ...), drawn as the pipelines of diffusers draw it: each row from its own."""
    from diffusers.utils.torch_utils import randn_tensor

    drawn: Tensor = randn_tensor(tuple(shape), generator=generators, device=device, dtype=dtype)
    return drawn


def fits_pipelines(scheduler: Any) -> bool:
    """Whether diffusers' Stable Diffusion pipelines run the scheduler as its own pipelines do."""
    name = type(scheduler).__name__
    plain = conventions.step_of(name) is conventions.step_of("DDIMScheduler") and name not in conventions.TERMINAL
    return plain and hasattr(scheduler, "init_noise_sigma") and hasattr(scheduler, "scale_model_input")


def watch(scheduler: Any, on_step: OnStep) -> None:
    """Has `on_step` called after each step of the scheduler, whoever makes it and however it gives its result.

    Some pipelines of diffusers call back after each evaluation, some after some of them, and some never.
    """
    step = scheduler.step
    count = itertools.count()

    @functools.wraps(step)  # pipelines look at the signature
    def watched(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        on_step(next(count), made[0])
        return made

    scheduler.step = watched


def loop(batch: Batch, timesteps: Tensor, output: Output, eta: float, on_step: OnStep | None) -> Tensor:
    """Takes `batch` through one evaluation at each of `timesteps`, which its scheduler is set to: the last latents."""
    accepted = inspect.signature(batch.scheduler.step).parameters
    extra = {name: value for name, value in (("eta", eta), ("generator", batch.generators)) if name in accepted}
    step = conventions.step_of(type(batch.scheduler).__name__)
    for index, timestep in enumerate(timesteps):
        batch.latents = step(batch, output(batch.latents, timestep), timesteps, extra)
        batch.done += 1
        if on_step is not None:
            on_step(index, batch.latents)
    return batch.latents


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order, whatever its memory format and device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().tobytes()


def sha256(latents: Tensor) -> str:
    """Of one sample's latent, in the type it is in."""
    return hashlib.sha256(raw_bytes(latents)).hexdigest()


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Between elements of two tensors of one shape; infinite where it is not a number."""
    difference = (ours.cpu().double() - theirs.cpu().double()).abs().max().item()
    return difference if math.isfinite(difference) else math.inf


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[int, float] | None:
    """The first evaluation after which two trajectories differ in a bit, and the largest difference there.

    A trajectory is the latents after each evaluation. None if they are the same.

    Raises ValueError if they differ in length.
    """
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if raw_bytes(one) != raw_bytes(other):
            return step, largest_difference(one, other)
    return None
