"""What a pipeline rank asks of a model, whatever the model is; and the choice of one by the settings.

One evaluation, on any rank, is `sampler.step(batch, denoiser.predict(batch, sampler))`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gpubench.diffusion.settings import PipeSettings
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.reference import OnStep
from gpubench.pipeline.schedulers import Sampler

if TYPE_CHECKING:
    from PIL.Image import Image


class Denoiser(Protocol):
    """A model with all its weights on one device, and what surrounds it in the pipeline that it was made for."""

    name: str
    model: Any
    """The module that predicts."""
    latent_shape: tuple[int, ...]
    """Of one sample, without the batch dimension."""
    dtype: torch.dtype
    device: torch.device
    parameters: int
    """How many the denoiser has; text encoders and VAE do not count."""
    scheduler_config: Mapping[str, Any]
    """Of the model's own scheduler; another class takes from it what it knows."""
    default_scheduler: str
    """Class name of the model's own scheduler."""
    reference_name: str
    """What `reference` runs, in words."""

    def scheduler(self) -> Any:
        """A new diffusers scheduler: the model's own or the one asked for, on its configuration and the options.

        Raises SettingsError for a name or an option that does not exist.
        """

    def set_timesteps_kwargs(self, steps: int) -> dict[str, Any]:
        """What the model's pipeline gives to `set_timesteps` besides the number of steps and the device."""

    def weights_digest(self) -> str:
        """sha256 over all parameters and buffers of the denoiser, with their names, in their order."""

    def encode(self, prompts: Sequence[str], before_each: Callable[[int], None] = ...) -> list[dict[str, Tensor]]:
        """The conditioning of each prompt, each tensor on the CPU with a batch dimension of 1; rank 0 only.

        `before_each` is told which prompt is next, counting from 0.

        A model that is conditioned by nothing gives an empty list; one of random weights gives random tensors.
        """

    def admit(self, conditioning: Sequence[Mapping[str, Tensor]]) -> None:
        """Keeps what `encode` gave, on this rank's device: sample i uses entry i % len."""

    def prepare(self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """A batch before its first evaluation: noise from a generator per sample, at the scheduler's scale."""

    def predict(self, batch: Batch, sampler: Sampler) -> Tensor:
        """The model's output for the next evaluation, guidance applied: what the scheduler's step takes."""

    def decode(self, batch: Batch) -> "list[Image]":
        """The images of a finished batch, on a rank that was loaded with `images`."""

    def reference(
        self, sampler: Sampler, samples: Sequence[int], seeds: Sequence[int], on_step: OnStep | None = None
    ) -> Tensor:
        """Final latents of the samples, made together in this process by diffusers, on the CPU.

        Only the number of evaluations and the arguments of `set_timesteps` are taken from `sampler`: the scheduler
        is a new one.
        """


def load(
    settings: PipeSettings, device: torch.device, dtype: torch.dtype, *, first: bool, last: bool, images: bool
) -> Denoiser:
    """The denoiser that `settings.model` stands for, in evaluation mode, on `device`.

    Text encoders are loaded where `first`, the VAE where `last` and `images`. Random weights follow from
    `settings.seed` alone, so that they are the same on every rank.

    Raises ModelError if a pipeline folder cannot be loaded, SettingsError if the sizes do not suit the model.
    """
    if settings.model.name is not None:
        from gpubench.pipeline.directory import load as load_directory

        return load_directory(settings, device, dtype, encoders=first, vae=last and images)
    if settings.model.unet == "dummy":
        from gpubench.pipeline.dummy import Dummy

        return Dummy(settings, device, dtype)
    from gpubench.pipeline.unets import load as load_random

    return load_random(settings, device, dtype)
