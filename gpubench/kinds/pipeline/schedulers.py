"""What is known about diffusers' schedulers without torch.

This is their names, which of them cannot be split over ranks, their options and arguments, and their number of
evaluations. Options and arguments come from the source of diffusers, because importing diffusers takes seconds.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from gpubench import errors, units
from gpubench.errors import SettingsError
from gpubench.settings.keys import about

EXAMPLE = "for example DDIMScheduler or EulerDiscreteScheduler"

_TOKENS = "it samples discrete tokens, and only continuous latents can be sent"
_CORRECTOR = "it has no step(): its predictor and corrector evaluate the model several times in one step"

REFUSED: Mapping[str, str] = {
    "AmusedScheduler": _TOKENS,
    "BlockRefinementScheduler": _TOKENS,
    "DiscreteDDIMScheduler": _TOKENS,
    "EntropyBoundScheduler": _TOKENS,
    "VQDiffusionScheduler": _TOKENS,
    "HeliosDMDScheduler": "its step() needs the noisy video and the whole schedule, which the caller holds",
    "KarrasVeScheduler": "it is deprecated, and evaluates the model at a noise level that the caller draws",
    "PiflowScheduler": "its model predicts a policy of many channels for one step, not an output of the latents' shape",
    "RePaintScheduler": "its step() needs the original image and mask, and the caller undoes steps in between",
    "RFD4ProteinaScheduler": "its step() needs the mask of a protein's atoms, which the caller holds",
    "ScoreSdeVeScheduler": _CORRECTOR,
    "ScoreSdeVpScheduler": _CORRECTOR,
}
"""The unsupported classes, with the reasons."""

TORCHSDE = frozenset({"CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler"})
"""The classes whose noise comes from torchsde's Brownian tree."""

SEEDED = "DPMSolverSDEScheduler"
"""The class that has no generator, but one seed for all samples of its batch."""

OwnScheduler = tuple[str, Mapping[str, Any]]
"""The class name and the configuration of a model's own scheduler."""

_LATENT_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_SD15 = ("PNDMScheduler", {**_LATENT_NOISE, "skip_prk_steps": True, "set_alpha_to_one": False})
RANDOM_WEIGHTS: Mapping[str, OwnScheduler] = {
    "dummy": ("DDIMScheduler", {}),
    "tiny": _SD15,
    "unet2d": ("DDPMScheduler", {}),
    "sd15": _SD15,
    "sdxl": ("EulerDiscreteScheduler", {**_LATENT_NOISE, "timestep_spacing": "leading"}),
}
"""The schedulers of the models with random weights, configured as in the published pipelines of these models."""

_TWICE_A_STEP = frozenset(
    {
        "DPMSolverSDEScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
    }
)
"""The classes that evaluate the model twice in each step except the last."""
_BY_CONFIGURATION = frozenset({"DPMSolverMultistepInverseScheduler", "HeliosScheduler"})
"""The classes whose number of evaluations depends on more than the number of steps."""
AT_MOST_STEPS = frozenset({"DPMSolverMultistepInverseScheduler"})
"""The classes with at most one evaluation per step, because they drop timesteps that are equal after rounding."""
_RUNGE_KUTTA = 9
"""The additional evaluations of PNDM for its first three steps (Liu et al. 2022, arXiv:2202.09778)."""


class Default(Enum):
    """Stands for the default of a parameter that has none, or one that is not a literal."""

    required = "it has none"
    unread = "its source is not a literal"


Parameters = Mapping[str, Any]
"""The parameters of a method by name, without `self`, *args and **kwargs; and the default of each, or a `Default`."""

Keywords = Callable[[Mapping[str, Any]], Collection[str]]
"""A function of a scheduler's configuration that returns the keywords of the pipeline's `set_timesteps` call."""


@cache
def scheduler_names() -> list[str]:
    """The class names in alphabetical order. Raises SettingsError if diffusers is not installed."""
    names = re.findall(r'"(\w+Scheduler)"', (_sources() / "__init__.py").read_text(encoding="utf-8"))
    return sorted({name for name in names if not name.startswith("Flax")})


def parameters_of(name: str, method: str) -> Parameters | None:
    """The parameters of a method of the scheduler class `name`; None if its source has no such method."""
    methods = [node for node in _body(name) if isinstance(node, ast.FunctionDef) and node.name == method]
    if not methods:
        return None
    given = methods[0].args
    named = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(named) - len(given.defaults)) + list(given.defaults) + given.kw_defaults
    found = {one.arg: _default(node) for one, node in zip([*named, *given.kwonlyargs], defaults, strict=True)}
    return {name: default for name, default in found.items() if name != "self"}


def _sources() -> Path:
    found = importlib.util.find_spec("diffusers")
    if found is None or not found.submodule_search_locations:
        raise SettingsError("diffusers is not installed", "pip install diffusers")
    return Path(found.submodule_search_locations[0], "schedulers")


@cache
def _body(name: str) -> list[ast.stmt]:
    for file in _sources().rglob("scheduling_*.py"):
        text = file.read_text(encoding="utf-8")
        if f"\nclass {name}(" in text:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
            return classes[0].body if classes else []
    return []


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return Default.required
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Default.unread


def check_scheduler_name(name: str) -> None:
    """Raises SettingsError for a name that diffusers does not have. The hint is the nearest existing name."""
    names = scheduler_names()
    if name in names:
        return
    near = [known for known in names if known.lower() in (name.lower(), f"{name}scheduler".lower())]
    within = [known for known in names if name and name.lower() in known.lower()][:3]
    hint = errors.offer(near) or errors.offer(within) or errors.did_you_mean(name, names) or EXAMPLE
    raise SettingsError(f"diffusers has no scheduler {name!r}", hint)


def parse_options(text: str) -> dict[str, str]:
    """Parses `"a=1,b=x"` to `{"a": "1", "b": "x"}`. Raises SettingsError for a missing or repeated key."""
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and key.isidentifier()):
            raise SettingsError(f"scheduler option {part!r} is not key=value", "for example solver_order=3")
        if key in options:
            raise SettingsError(f"scheduler option {key} is given twice", f"{options[key]!r} and {value!r}; keep one")
        options[key] = value
    return options


def read_options(name: str, options: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Returns the options of the scheduler class `name`, with text parsed as the type of the option's default.

    `parameters` are those of its `__init__`. Raises SettingsError for an invalid option or value.
    """
    return {key: _option(name, key, value, parameters) for key, value in options.items()}


def _option(name: str, key: str, value: Any, parameters: Parameters) -> Any:
    if key not in parameters:
        hint = errors.did_you_mean(key, list(parameters)) or f"it has {', '.join(parameters) or 'none'}"
        raise SettingsError(f"{name} has no option {key!r}", hint)
    default = parameters[key]
    if not isinstance(value, str) or isinstance(default, Default):
        return value
    try:
        return _read(value, default)
    except (ValueError, KeyError):
        raise SettingsError(f"option {key} of {name} cannot be {value!r}", f"its default is {default!r}") from None


_BOOLEANS = {"true": True, "false": False}


def _read(text: str, default: Any) -> Any:
    """Parses `text` as the type of `default`; if that is None, as the first type that fits.

    Raises ValueError or KeyError.
    """
    if text.lower() == "none":
        return None
    if isinstance(default, bool):
        return _BOOLEANS[text.lower()]
    if isinstance(default, int | float):
        return type(default)(text)
    if isinstance(default, str):
        return text
    if default is not None:
        raise ValueError("a list, or another type that cannot be given as text")
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_configured(
    name: str, options: Mapping[str, str], own: Mapping[str, Any], keywords: Keywords, eta: float
) -> None:
    """Raises SettingsError for what the source of the installed class `name` does not support.

    `own` is the configuration of the model's own scheduler. `keywords` returns the keywords of the pipeline's
    `set_timesteps` call. The workers check a class whose source cannot be found.
    """
    init, step, schedule = (parameters_of(name, method) for method in ("__init__", "step", "set_timesteps"))
    if init is None or step is None or schedule is None:
        return
    with about("sampling.options"):
        given = read_options(name, options, init)
    config = {**init, **{key: value for key, value in own.items() if key in init}, **given}
    config = {key: value for key, value in config.items() if not isinstance(value, Default)}
    check_config(name, config)
    check_calls(name, step, schedule, keywords(config), eta)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raises SettingsError with the reason if a scheduler with this configuration cannot be split over ranks."""
    if name == "HeliosScheduler" and config.get("stages") != 1:
        raise refusal(name, "between its stages the caller enlarges the latents; it works with stages=1")
    if name == "HeliosScheduler" and config.get("scheduler_type") == "dmd":
        raise refusal(f"{name} of type dmd", REFUSED["HeliosDMDScheduler"])
    if config.get("scale_factors"):
        raise refusal(f"{name} with scale_factors", "the latents grow between its steps")


def check_calls(name: str, step: Parameters, set_timesteps: Parameters, keywords: Collection[str], eta: float) -> None:
    """Raises SettingsError if methods with these parameters cannot be called as a pipeline calls them.

    `keywords` are those of the pipeline's `set_timesteps` call, and `eta` is an argument of `step`.
    """
    known = {"model_output", "timestep", "sample", "old_pred_original_sample", "timestep_back"}
    unknown = [key for key, default in step.items() if default is Default.required and key not in known]
    if unknown:
        raise SettingsError(
            f"{name}.step() needs {', '.join(unknown)}, which gpubench does not have", "choose another --scheduler"
        )
    if eta and "eta" not in step:
        message = f"sampling.eta is {eta}, and {name} takes none"
        raise SettingsError(message, "leave sampling.eta at 0", keys=["sampling.eta"])
    if unknown := [key for key in keywords if key not in set_timesteps]:
        raise SettingsError(
            f"{name} does not fit this model: its pipeline sets {units.listed(unknown)}, which "
            f"{name}.set_timesteps() does not take",
            "choose another --scheduler",
        )


def check_class(name: str) -> None:
    """Raises SettingsError with the reason if no scheduler of the class `name` can be split over ranks."""
    if name in REFUSED:
        raise refusal(name, REFUSED[name])
    if name in TORCHSDE and importlib.util.find_spec("torchsde") is None:
        hint = "pip install torchsde, in gpubench's environment"
        raise SettingsError(f"{name} needs torchsde, which is not installed", hint)


def check_micro_batch(name: str, size: int) -> None:
    """Raises SettingsError if samples of one micro-batch would not be reproducible alone."""
    if name == SEEDED and size > 1:
        raise SettingsError(
            f"{name} draws the noise of a whole micro-batch from one seed, so that no sample of it is reproducible "
            "alone",
            "set work.micro_batch to 1",
        )


def refusal(what: str, reason: str) -> SettingsError:
    return SettingsError(f"{what} cannot be split over ranks: {reason}", "docs/schedulers.md lists what can")


def evaluations(name: str, steps: int, config: Mapping[str, Any]) -> int | None:
    """How many evaluations the scheduler class `name` makes in so many steps, without importing diffusers.

    `config` has the options that differ from the defaults of the class; values may be text. None if only diffusers can
    determine it: for an unknown class, and for a number of steps that the class does not support.
    """
    if name not in scheduler_names() or name in REFUSED or name in _BY_CONFIGURATION:
        return None
    if name in _TWICE_A_STEP:
        return 2 * steps - 1
    if name == "MiniMaxH3Scheduler":
        return steps - 1 or None
    if name != "PNDMScheduler":
        return steps
    if str(config.get("skip_prk_steps")).lower() == "true":
        return steps + 1 if steps > 1 else 1
    return steps + _RUNGE_KUTTA if steps > 3 else None
