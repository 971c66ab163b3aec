"""How single classes of diffusers' schedulers differ from the rest, and which ones a pipeline of ranks cannot run.

A class that is not named here is called as StableDiffusionPipeline calls it: `step(output, t, latents, ...)` at each of
its timesteps, with `generator` and `eta` where its signature has them.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gpubench.errors import SettingsError
from gpubench.pipeline.batch import Batch

_TOKENS = "it samples discrete tokens, and only continuous latents travel"
_CORRECTOR = "it has no step(): its predictor and corrector ask the model several times in one step"

REFUSED: Mapping[str, str] = {
    "AmusedScheduler": _TOKENS,
    "BlockRefinementScheduler": _TOKENS,
    "DiscreteDDIMScheduler": _TOKENS,
    "EntropyBoundScheduler": _TOKENS,
    "VQDiffusionScheduler": _TOKENS,
    "HeliosDMDScheduler": "its step() needs the noisy video and the whole schedule, which the caller holds",
    "KarrasVeScheduler": "it is deprecated, and asks the model at a noise level that the caller draws",
    "PiflowScheduler": "its model predicts a policy of many channels for one step, not an output of the latents' shape",
    "RePaintScheduler": "its step() needs the original image and mask, and the caller undoes steps in between",
    "RFD4ProteinaScheduler": "its step() needs the mask of a protein's atoms, which the caller holds",
    "ScoreSdeVeScheduler": _CORRECTOR,
    "ScoreSdeVpScheduler": _CORRECTOR,
}
"""Why a class is refused."""

TORCHSDE = frozenset({"CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler"})
"""Their noise comes from torchsde's Brownian tree."""

REBUILT = frozenset({"noise_sampler", "noise_sampler_seed"})
"""Attributes of those that never travel: the same tree grows again from the sample's seed."""

SEEDED = "DPMSolverSDEScheduler"
"""Has no generator, but one seed for all that is in its batch."""

TERMINAL = frozenset({"DDPMWuerstchenScheduler", "SCMScheduler"})
"""The last of their timesteps is where the others arrive: there the model is not asked."""

HISTORY: Mapping[str, tuple[str, int]] = {"IPNDMScheduler": ("ets", 3)}
"""A list that the class lets grow for ever, and how many of its last elements a step reads."""


def check_class(name: str) -> None:
    """Raises SettingsError with the reason why no scheduler of the class `name` can be split over ranks."""
    if name in REFUSED:
        raise _refusal(name, REFUSED[name])
    if name in TORCHSDE and importlib.util.find_spec("torchsde") is None:
        raise SettingsError(f"{name} needs torchsde, which is not installed", "pip install 'gpubench[torchsde]'")


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raises SettingsError with the reason why a scheduler so configured cannot be split over ranks."""
    if name == "HeliosScheduler" and config.get("stages") != 1:
        raise _refusal(name, "between its stages the caller enlarges the latents; it can be had with stages=1")
    if name == "HeliosScheduler" and config.get("scheduler_type") == "dmd":
        raise _refusal(f"{name} of type dmd", REFUSED["HeliosDMDScheduler"])
    if config.get("scale_factors"):
        raise _refusal(f"{name} with scale_factors", "the latents grow between its steps")


def _refusal(what: str, reason: str) -> SettingsError:
    return SettingsError(f"{what} cannot be split over ranks: {reason}", "docs/schedulers.md lists what can")


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
