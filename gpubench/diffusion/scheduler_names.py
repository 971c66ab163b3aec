"""The schedulers of diffusers, as far as they are known without torch.

Which there are, which of them ranks cannot share, how options are written, and how often each asks the model.
"""

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpubench import errors
from gpubench.errors import SettingsError

EXAMPLE = "for example DDIMScheduler or EulerDiscreteScheduler"

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

SEEDED = "DPMSolverSDEScheduler"
"""Has no generator, but one seed for all that is in its batch."""

OwnScheduler = tuple[str, Mapping[str, Any]]
"""Class name and configuration of the scheduler that a model comes with."""

_LATENT_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_SD15 = ("PNDMScheduler", {**_LATENT_NOISE, "skip_prk_steps": True, "set_alpha_to_one": False})
RANDOM_WEIGHTS: Mapping[str, OwnScheduler] = {
    "dummy": ("DDIMScheduler", {}),
    "tiny": _SD15,
    "unet2d": ("DDPMScheduler", {}),
    "sd15": _SD15,
    "sdxl": ("EulerDiscreteScheduler", {**_LATENT_NOISE, "timestep_spacing": "leading"}),
}
"""The schedulers of the models with random weights, configured as the published pipelines of these models do it."""

_TWICE_A_STEP = frozenset(
    {
        "DPMSolverSDEScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
    }
)
"""They ask the model twice in each step but the last."""
_BY_CONFIGURATION = frozenset({"DPMSolverMultistepInverseScheduler", "HeliosScheduler"})
"""Their number of evaluations depends on more than the number of steps."""
AT_MOST_STEPS = frozenset({"DPMSolverMultistepInverseScheduler"})
"""They ask the model once in each step or less often, as they drop timesteps that are equal once rounded."""
_RUNGE_KUTTA = 9
"""Evaluations that PNDM spends beyond the number of steps on its first three (Liu et al. 2022, arXiv:2202.09778)."""


@cache
def scheduler_names() -> list[str]:
    """Class names, in alphabetical order; read from the file that lists them, as importing diffusers takes seconds."""
    found = importlib.util.find_spec("diffusers")
    if found is None or not found.submodule_search_locations:
        raise SettingsError("diffusers is not installed", "pip install diffusers")
    listing = Path(found.submodule_search_locations[0], "schedulers", "__init__.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+Scheduler)"', listing)
    return sorted({name for name in names if not name.startswith("Flax")})


def check_scheduler_name(name: str) -> None:
    """Raises SettingsError for a name that diffusers does not have, with the nearest that it has."""
    names = scheduler_names()
    if name in names:
        return
    near = [known for known in names if known.lower() in (name.lower(), f"{name}scheduler".lower())]
    within = [known for known in names if name.lower() in known.lower()][:3]
    hint = errors.offer(near) or errors.did_you_mean(name, names) or errors.offer(within) or EXAMPLE
    raise SettingsError(f"diffusers has no scheduler {name!r}", hint)


def parse_options(text: str) -> dict[str, str]:
    """`"a=1,b=x"` as `{"a": "1", "b": "x"}`. Raises SettingsError for a part without a key, or a key given twice."""
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and key.isidentifier()):
            raise SettingsError(f"scheduler option {part!r} is not key=value", "for example solver_order=3")
        if key in options:
            raise SettingsError(f"scheduler option {key} is given twice", f"{options[key]!r} and {value!r}; keep one")
        options[key] = value
    return options


def check_class(name: str) -> None:
    """Raises SettingsError with the reason why no scheduler of the class `name` can be split over ranks."""
    if name in REFUSED:
        raise refusal(name, REFUSED[name])
    if name in TORCHSDE and importlib.util.find_spec("torchsde") is None:
        raise SettingsError(f"{name} needs torchsde, which is not installed", "pip install 'gpubench[torchsde]'")


def check_micro_batch(name: str, size: int) -> None:
    """Raises SettingsError where samples of one micro-batch would not be reproducible alone."""
    if name == SEEDED and size > 1:
        raise SettingsError(
            f"{name} draws the noise of a whole micro-batch from one seed, so that no sample of it is reproducible "
            "alone",
            "set work.micro_batch to 1",
        )


def refusal(what: str, reason: str) -> SettingsError:
    return SettingsError(f"{what} cannot be split over ranks: {reason}", "docs/schedulers.md lists what can")


def evaluations(name: str, steps: int, config: Mapping[str, Any]) -> int | None:
    """How often the scheduler `name` asks the model in so many steps, without asking diffusers.

    `config` holds what is not as the class has it by default; values may be text. None where diffusers alone can tell:
    for a class that is not known here, and for numbers of steps that a class refuses.
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
