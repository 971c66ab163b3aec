"""The batch of samples that ranks hand over, and the calls of diffusers' schedulers that differ from the usual one.

The usual call is that of StableDiffusionPipeline: `step(output, t, latents, ...)` at each timestep, with `generator`
and `eta` if the signature has them. This module lists the classes that need another call.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Batch:
    """Samples that are evaluated together, at any point between noise and image."""

    samples: list[int]
    """Their consecutive numbers in the run."""
    latents: Tensor
    """The latents (len(samples), channels, height, width), or with the model's own shape after the first dimension."""
    scheduler: Any
    """The batch's own diffusers scheduler. A shared one would mix the histories of several batches."""
    generators: list[torch.Generator]
    """One generator per sample, so that each sample is reproducible alone."""
    done: int = 0
    """The number of evaluations so far, which is the index of the next timestep."""
    extras: dict[str, Any] = field(default_factory=dict)
    """The values that the caller of the scheduler keeps for it between evaluations."""
    started: float = 0.0
    """The start in seconds since the epoch."""
    images: "list[Image]" = field(default_factory=list)
    """The images of a finished batch, if they are requested."""


REBUILT = frozenset({"noise_sampler", "noise_sampler_seed"})
"""Attributes that are never handed over: torchsde's Brownian tree is rebuilt identically from the sample's seed."""

TERMINAL = frozenset({"DDPMWuerstchenScheduler", "SCMScheduler"})
"""The classes whose last timestep is the end of the schedule, at which the model is not evaluated."""

HISTORY: Mapping[str, tuple[str, int]] = {"IPNDMScheduler": ("ets", 3)}
"""For each class with a list that grows without limit: the list, and how many of its last elements a step reads."""


def schedule_arguments(name: str, steps: int, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the class's `set_timesteps` besides the device.

    `of_model` are the arguments of the model's pipeline. Sigmas or timesteps among them define the schedule, as in
    `retrieve_timesteps` of diffusers.
    """
    arguments = dict(of_model)
    if not {"sigmas", "timesteps"} & arguments.keys():
        arguments["num_inference_steps"] = steps
    if name == "SCMScheduler" and steps != 2:
        arguments["intermediate_timesteps"] = None  # its default is valid for two steps only
    return arguments


Step = Callable[[Batch, Tensor, Tensor, dict[str, Any]], Tensor]
"""(batch, model output, all timesteps, generator and eta) -> the next latents."""


def _step(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    latents: Tensor = batch.scheduler.step(output, timesteps[batch.done], batch.latents, return_dict=False, **options)[
        0
    ]
    return latents


def _step_per_sample(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """Calls `step` as WuerstchenPriorPipeline does: with a timestep for each sample, in the latents' data type."""
    ratio = timesteps[batch.done].expand(batch.latents.size(0)).to(batch.latents.dtype)
    latents: Tensor = batch.scheduler.step(output, ratio, batch.latents, return_dict=False, **options)[0]
    return latents


def _step_to_next(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """Calls `step` as UnCLIPPipeline does: the caller passes the timestep at which the step ends."""
    following = timesteps[batch.done + 1] if batch.done + 1 < len(timesteps) else None
    return _step(batch, output, timesteps, options | {"prev_timestep": following})


def _step_with_memory(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """Calls `step` as CogVideoXPipeline does: the caller keeps the last step's prediction and its timestep."""
    before = timesteps[batch.done - 1] if batch.done > 0 else None
    held = batch.extras.get("old_pred_original_sample")
    latents, batch.extras["old_pred_original_sample"] = batch.scheduler.step(
        output, held, timesteps[batch.done], before, batch.latents, return_dict=False, **options
    )
    stepped: Tensor = latents.to(output.dtype)
    return stepped


_STEPS: Mapping[str, Step] = {
    "CogVideoXDPMScheduler": _step_with_memory,
    "DDPMWuerstchenScheduler": _step_per_sample,
    "UnCLIPScheduler": _step_to_next,
}


def step_of(name: str) -> Step:
    """Returns the function that calls `step` of the class `name`."""
    return _STEPS.get(name, _step)


@contextmanager
def quiet(*, transformers: bool = False) -> Iterator[None]:
    """Suppresses all messages of diffusers except errors, also those of imports and deprecations.

    `transformers` includes that library, which takes half a second to import and is not needed for schedulers alone.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in ("diffusers", "transformers") if transformers else ("diffusers",):
            stack.enter_context(_errors_only(import_module(f"{library}.utils.logging")))
        yield


@contextmanager
def _errors_only(library: Any) -> Iterator[None]:
    before = library.get_verbosity()
    bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(before)
        if bars:
            library.enable_progress_bar()
