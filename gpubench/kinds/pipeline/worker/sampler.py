"""Batches of samples, and the sampler that takes them from one evaluation to the next with a scheduler of diffusers.

Every rank builds the same `Sampler`, once in a run. Each batch has a scheduler object of its own.

The usual call of a scheduler is that of StableDiffusionPipeline: `step(output, t, latents, ...)` at each timestep, with
`generator` and `eta` if the signature has them. This module also lists the classes that need another call.
"""

import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.schedulers import (
    SEEDED,
    Default,
    Parameters,
    check_calls,
    check_class,
    check_config,
    check_scheduler_name,
    read_options,
)

if TYPE_CHECKING:
    from diffusers.schedulers import SchedulerMixin
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
"""Attributes that are never sent: torchsde's Brownian tree is rebuilt identically from the sample's seed."""

TERMINAL = frozenset({"DDPMWuerstchenScheduler", "SCMScheduler"})
"""The classes whose last timestep is the end of the schedule, at which the model is not evaluated."""

HISTORY: Mapping[str, tuple[str, int]] = {"IPNDMScheduler": ("ets", 3)}
"""For each class with a list that grows without limit: the list, and how many of its last elements a step reads."""


def schedule_arguments(name: str, steps: int, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the class's `set_timesteps` besides the device.

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
"""A function of (batch, model output, all timesteps, generator and eta) that returns the next latents."""


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


ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)  # what diffusers raises for settings that it does not support


class Sampler:
    """The schedule that all ranks agree on.

    It holds a scheduler in its state after `set_timesteps`, which is never stepped. This is the template of each
    batch's own scheduler; the attributes of a batch's scheduler that differ from it are sent with the batch.
    """

    def __init__(self, template: "SchedulerMixin", device: torch.device, eta: float) -> None:
        self.name = type(template).__name__
        self.template = template
        self.device = device
        schedule = torch.as_tensor(template.timesteps)
        self.timesteps: Tensor = schedule[:-1] if self.name in TERMINAL else schedule
        """The timestep of each evaluation in order, (total,). Some classes evaluate twice in a step."""
        self.total = len(self.timesteps)
        self.carried: tuple[str, ...] = ()
        """The contents of a hand-off besides the latents, which `verification.prove` determines."""
        parameters = inspect.signature(template.step).parameters
        self._options = {"eta": eta} if "eta" in parameters else {}
        self._takes_generator = "generator" in parameters
        self._step = step_of(self.name)
        self.fingerprint = _fingerprint(template, eta)
        """The sha256 of class, configuration, timesteps and tables. It must be equal on all ranks."""

    @property
    def learns_variance(self) -> bool:
        """Whether the model also predicts the noise's variance, so that a step takes twice the latents' channels."""
        return str(self.template.config.get("variance_type")).startswith("learned")

    @property
    def noise_scale(self) -> float | Tensor:
        """The factor between standard normal noise and the first latents."""
        scale: float | Tensor = getattr(self.template, "init_noise_sigma", 1.0)
        return scale

    def fresh(self, seed: int) -> Any:
        """A scheduler for one batch, before its first step. `seed` is that of the batch's first sample.

        Tensors are the template's own, which no step writes to; containers, which steps do write to, are copies.
        """
        scheduler = copy.copy(self.template)
        for name, value in vars(self.template).items():
            setattr(scheduler, name, _copied(value))
        if self.name == SEEDED:
            scheduler.noise_sampler_seed = seed
        return scheduler

    def scale(self, batch: Batch, latents: Tensor) -> Tensor:
        """The model's input at the next evaluation. `latents` are the batch's, or these twice for guidance."""
        if not hasattr(batch.scheduler, "scale_model_input"):
            return latents
        scaled: Tensor = batch.scheduler.scale_model_input(latents, self.timesteps[batch.done])
        return scaled

    def step(self, batch: Batch, output: Tensor) -> None:
        """Advances `batch` by one evaluation, with the call that diffusers' own pipelines make.

        `output` is the model's output for the batch's latents at the timestep `timesteps[batch.done]`.
        """
        options = self._options | ({"generator": batch.generators} if self._takes_generator else {})
        batch.latents = self._step(batch, output, self.timesteps, options)
        batch.done += 1
        if self.name in HISTORY:
            attribute, read = HISTORY[self.name]
            del getattr(batch.scheduler, attribute)[:-read]


def create(name: str, options: Mapping[str, Any], base_config: Mapping[str, Any]) -> "SchedulerMixin":
    """Returns a scheduler of the class `name` with the model's own configuration, overridden by `options`.

    Entries of `base_config` that the class does not know are ignored, as by its `from_config`. Options that are text
    are parsed as the type of their default. Raises SettingsError for an invalid name, option or value.
    """
    check_scheduler_name(name)
    check_class(name)
    from diffusers import schedulers

    found = getattr(schedulers, name)
    parameters = {key: default for key, default in _signature(found.__init__).items() if key != "self"}
    known = {key: value for key, value in base_config.items() if key in parameters or key == "_use_default_values"}
    given = read_options(name, options, parameters)
    try:
        with quiet():
            return found.from_config(known, **given)
    except ERRORS as error:
        raise SettingsError(f"{name} does not take these options: {error}", "change --sampling.options") from error


def build(
    scheduler: "SchedulerMixin", steps: int, device: torch.device, *, eta: float = 0.0, **set_timesteps_kwargs: Any
) -> Sampler:
    """Returns the sampler of a run: a copy of `scheduler` that is set to `steps` inference steps.

    `sigmas` or `timesteps` among the keywords define the schedule. Raises SettingsError with the reason if the
    scheduler cannot be split over ranks, or does not support the number of steps.
    """
    name = type(scheduler).__name__
    check_class(name)
    check_config(name, scheduler.config)
    check_calls(name, _signature(scheduler.step), _signature(scheduler.set_timesteps), set_timesteps_kwargs, eta)
    _silence_warnings()
    template = copy.deepcopy(scheduler)
    try:
        with quiet():
            template.set_timesteps(device=device, **schedule_arguments(name, steps, set_timesteps_kwargs))
    except ERRORS as error:
        hint = "change --steps, or choose another --scheduler"
        raise SettingsError(f"{name} cannot be set to {steps} steps: {error}", hint) from error
    return Sampler(template, torch.device(device), eta)


def _silence_warnings() -> None:
    """Suppresses warnings of the libraries below diffusers that steps cause and no user can act on."""
    warnings.filterwarnings("ignore", message="__array", category=DeprecationWarning)  # numpy, of the use of tensors
    warnings.filterwarnings("ignore", message="Should have t", module="torchsde")  # ends of a schedule, rounded


def _signature(function: Any) -> Parameters:
    return {
        name: Default.required if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied(element) for element in value]
    if type(value) is dict:
        return {key: _copied(element) for key, element in value.items()}
    return value


def _fingerprint(template: "SchedulerMixin", eta: float) -> str:
    # Private keys of a configuration record its origin, some of them in no fixed order.
    config = {key: value for key, value in template.config.items() if not key.startswith("_")}
    digest = hashlib.sha256(type(template).__name__.encode())
    _update(digest, vars(template) | {"_internal_dict": config, "eta": eta})
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", value: Any) -> None:
    """Adds everything that a scheduler consists of, unambiguously. Of an object of an unknown class, adds its class."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.view(torch.uint8).numpy() if value.dtype is torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        keys = sorted(value, key=str)
        digest.update(f"{keys}".encode())
        for key in keys:
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for element in value:
            _update(digest, element)
    else:
        plain = value is None or isinstance(value, bool | int | float | str)
        digest.update(f"{value!r};".encode() if plain else f"{type(value).__name__};".encode())
