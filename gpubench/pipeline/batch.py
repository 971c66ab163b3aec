"""What travels through the pipeline: the samples of one micro-batch, and all that their next evaluation depends on."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class Batch:
    """Samples that are evaluated together, somewhere between noise and image."""

    samples: list[int]
    """Their numbers in the run; consecutive."""
    latents: Tensor
    """(len(samples), channels, height, width), or as the model has it behind the first dimension."""
    scheduler: Any
    """A diffusers scheduler of its own: one shared by samples in flight mixes up their histories."""
    generators: list[torch.Generator]
    """One a sample, so that each is reproducible alone."""
    done: int = 0
    """Evaluations so far, and so the index of the next timestep."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What the caller of the scheduler holds for it between evaluations."""
    started: float = 0.0
    """Seconds since the epoch."""
    images: "list[Image]" = field(default_factory=list)
    """Of a finished batch, where they are asked for."""
