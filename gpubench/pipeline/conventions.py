"""How single classes of diffusers' schedulers differ from the rest, and which configurations ranks cannot share.

A class that is not named here is called as StableDiffusionPipeline calls it: `step(output, t, latents, ...)` at each of
its timesteps, with `generator` and `eta` where its signature has them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gpubench.diffusion.scheduler_names import REFUSED, refusal
from gpubench.pipeline.batch import Batch

REBUILT = frozenset({"noise_sampler", "noise_sampler_seed"})
"""Attributes that never travel: torchsde's Brownian tree is rebuilt identically from the sample's seed."""

TERMINAL = frozenset({"DDPMWuerstchenScheduler", "SCMScheduler"})
"""The model is not evaluated at the last of their timesteps, which is where the schedule ends."""

HISTORY: Mapping[str, tuple[str, int]] = {"IPNDMScheduler": ("ets", 3)}
"""A list to which the class adds without limit, and how many of its last elements a step reads."""


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raises SettingsError with the reason why a scheduler so configured cannot be split over ranks."""
    if name == "HeliosScheduler" and config.get("stages") != 1:
        raise refusal(name, "between its stages the caller enlarges the latents; it can be had with stages=1")
    if name == "HeliosScheduler" and config.get("scheduler_type") == "dmd":
        raise refusal(f"{name} of type dmd", REFUSED["HeliosDMDScheduler"])
    if config.get("scale_factors"):
        raise refusal(f"{name} with scale_factors", "the latents grow between its steps")


def schedule_arguments(name: str, steps: int, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """What `set_timesteps` of the class takes besides the device; `of_model` is what the model's pipeline gives it.

    Sigmas or timesteps of the model are the schedule, as `retrieve_timesteps` of diffusers has it.
    """
    arguments = dict(of_model)
    if not {"sigmas", "timesteps"} & arguments.keys():
        arguments["num_inference_steps"] = steps
    if name == "SCMScheduler" and steps != 2:
        arguments["intermediate_timesteps"] = None  # its default is for two steps, and an error for any other number
    return arguments


Step = Callable[[Batch, Tensor, Tensor, dict[str, Any]], Tensor]
"""(batch, model output, all timesteps, generator and eta) -> the next latents."""


def _step(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    latents: Tensor = batch.scheduler.step(output, timesteps[batch.done], batch.latents, return_dict=False, **options)[
        0
    ]
    return latents


def _step_per_sample(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """As WuerstchenPriorPipeline: one timestep for each sample, in the latents' type."""
    ratio = timesteps[batch.done].expand(batch.latents.size(0)).to(batch.latents.dtype)
    latents: Tensor = batch.scheduler.step(output, ratio, batch.latents, return_dict=False, **options)[0]
    return latents


def _step_to_next(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """As UnCLIPPipeline: the timestep where the step ends is the caller's to say."""
    following = timesteps[batch.done + 1] if batch.done + 1 < len(timesteps) else None
    return _step(batch, output, timesteps, options | {"prev_timestep": following})


def _step_with_memory(batch: Batch, output: Tensor, timesteps: Tensor, options: dict[str, Any]) -> Tensor:
    """As CogVideoXPipeline: the caller holds the last step's prediction and its timestep for the scheduler."""
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
    """How the class `name` is stepped."""
    return _STEPS.get(name, _step)
