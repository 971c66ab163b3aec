"""The proof, before any real work, that a hand-over loses nothing that the run's own scheduler and split depend on.

A toy model stands in for the denoiser and 8 x 8 latents for its own; scheduler, steps, borders between ranks, type of
the latents and size of a micro-batch are the run's. It takes the time of two loops without a model, on every rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpubench.diffusion.scheduler_names import check_micro_batch
from gpubench.errors import SettingsError
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.handover import changed, pack, unpack
from gpubench.pipeline.schedulers import ERRORS, Sampler

TOY_LATENT = (4, 8, 8)


def prove(sampler: Sampler, ranges: Sequence[tuple[int, int]], micro_batch: int, dtype: torch.dtype) -> None:
    """Compares a loop cut at the borders of `ranges`, evaluations [start, end) of each rank, with one in one piece.

    Sets `sampler.carried` to what travels at these borders besides the latents: the scheduler's attributes and
    whatever its caller holds, in alphabetical order, and "generator" where steps draw noise. Raises SettingsError
    naming scheduler and border if not every bit agrees, or if the scheduler cannot do what a pipeline of ranks needs.
    """
    check_micro_batch(sampler.name, micro_batch)
    whole = _start(sampler, micro_batch, dtype)
    states = [generator.get_state() for generator in whole.generators]
    parts = _start(sampler, micro_batch, dtype)
    sampler.carried = ()
    for start, end in ranges:
        if start > 0:
            travels = changed(parts.scheduler, sampler.template).keys() | parts.extras.keys()
            sampler.carried = tuple(sorted(travels.union(sampler.carried)))
            parcel = pack(parts, sampler)
            parts = unpack(parcel.manifest, parcel.payload, sampler, parts.samples)
        _advance(sampler, parts, end)
        _advance(sampler, whole, end)
        if not _same_bits(parts.latents, whole.latents):
            raise SettingsError(
                f"{sampler.name} cannot be split between evaluations {start - 1} and {start}: latents handed over "
                "there do not become what they become in one piece",
                "choose another --split or --scheduler",
            )
    drew = any(
        not torch.equal(generator.get_state(), state) for generator, state in zip(whole.generators, states, strict=True)
    )
    if drew and len(ranges) > 1:
        sampler.carried += ("generator",)


def toy_model(latents: Tensor, timestep: Tensor, sampler: Sampler) -> Tensor:
    """An output that depends on every number of its input in a non-linear way, and grows no faster than it."""
    neighbours = latents.roll(1, dims=1)
    output = torch.tanh(0.7 * neighbours + 0.001 * timestep.to(latents.dtype)) + 0.1 * latents.clamp(-1, 1)
    return torch.cat([output, output], dim=1) if sampler.learns_variance else output


def _start(sampler: Sampler, micro_batch: int, dtype: torch.dtype) -> Batch:
    samples = list(range(micro_batch))
    generators = [torch.Generator().manual_seed(sample) for sample in samples]
    noise = [torch.randn((1, *TOY_LATENT), generator=generator, dtype=dtype) for generator in generators]
    latents = torch.cat(noise).to(sampler.device) * sampler.noise_scale
    return Batch(samples, latents, sampler.fresh(samples[0]), generators)


def _advance(sampler: Sampler, batch: Batch, end: int) -> None:
    shape, dtype = batch.latents.shape, batch.latents.dtype
    while batch.done < end:
        try:
            scaled = sampler.scale(batch, batch.latents)
            sampler.step(batch, toy_model(scaled, sampler.timesteps[batch.done], sampler))
        except torch.OutOfMemoryError:
            raise
        except ERRORS as error:
            raise SettingsError(
                f"{sampler.name} so configured fails in its evaluation {batch.done}: {' '.join(str(error).split())}",
                "change --sampling.options, or choose another --scheduler",
            ) from error
        if batch.latents.shape != shape or batch.latents.dtype != dtype:
            raise SettingsError(
                f"{sampler.name} turns latents of {list(shape)} {dtype} into {list(batch.latents.shape)} "
                f"{batch.latents.dtype} at evaluation {batch.done - 1}",
                "choose another --scheduler, or --precision fp32",
            )
    if not batch.latents.isfinite().all():  # where everything is NaN, nothing can be told apart
        raise SettingsError(
            f"{sampler.name} so configured makes NaN or infinity of a toy model's output by evaluation {end - 1}",
            "change --sampling.options, or choose another --scheduler",
        )


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """As `torch.equal`, except that 0 is not -0."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
