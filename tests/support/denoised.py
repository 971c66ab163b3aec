"""Taking a batch through all evaluations in this process, and beside it the reference."""

import torch
from torch import Tensor

from gpubench.kinds.pipeline.worker import denoiser
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build

SCHEDULERS = (
    "PNDMScheduler",
    "DDIMScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
)
"""Each with another kind of history or noise."""


def sampler_of(loaded: Denoiser, steps: int = 4, eta: float = 0.0) -> Sampler:
    return build(loaded.scheduler(), steps, loaded.device, eta=eta, **loaded.set_timesteps_kwargs(steps))


def run(loaded: Denoiser, sampler: Sampler, samples: list[int]) -> tuple[Batch, list[Tensor]]:
    """The finished batch, and its latents after each evaluation."""
    batch = loaded.prepare(sampler, samples, [100 + sample for sample in samples])
    trajectory = []
    while batch.done < sampler.total:
        sampler.step(batch, loaded.predict(batch, sampler))
        trajectory.append(batch.latents.clone())
    return batch, trajectory


def assert_as_reference(
    loaded: Denoiser, samples: list[int], eta: float = 0.0, reference: Denoiser | None = None
) -> None:
    """`reference` is what makes the samples again; the same object by default."""
    sampler = sampler_of(loaded, eta=eta)
    batch, ours = run(loaded, sampler, samples)
    theirs: list[Tensor] = []
    final = (reference or loaded).reference(
        sampler, samples, [100 + sample for sample in samples], lambda step, latents: theirs.append(latents.clone())
    )
    assert denoiser.compare(ours, theirs) is None
    assert [denoiser.sha256(one) for one in batch.latents] == [denoiser.sha256(one) for one in final]
    assert torch.isfinite(final).all()
