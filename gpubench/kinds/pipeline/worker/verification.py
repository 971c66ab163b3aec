"""Checks that splitting the evaluations loses nothing, and times the same samples without a pipeline.

Before the run, `prove` splits a toy model's loop as the run is split: the same scheduler, steps, borders between ranks,
data type and micro-batch size, with latents of 8 x 8. It takes the time of two loops without a model on every rank.
After the run, `measure` times the baselines, and `verify` compares the samples with those of diffusers in one process.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from gpubench import events
from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.schedulers import check_micro_batch
from gpubench.kinds.pipeline.worker.collectives import broadcast_bytes, draw_run_id, gather_bytes, pass_to_rank_zero
from gpubench.kinds.pipeline.worker.denoiser import Denoiser, compare, largest_difference, sha256
from gpubench.kinds.pipeline.worker.models import load_reference
from gpubench.kinds.pipeline.worker.packing import changed, pack, unpack
from gpubench.kinds.pipeline.worker.sampler import ERRORS, Batch, Sampler
from gpubench.kinds.pipeline.worker.stage import Passage, Session

TOY_LATENT = (4, 8, 8)


def prove(sampler: Sampler, ranges: Sequence[tuple[int, int]], micro_batch: int, dtype: torch.dtype) -> None:
    """Compares a loop that is split at the borders of `ranges`, evaluations [start, end) per rank, with an unsplit one.

    Sets `sampler.carried` to the contents of the hand-offs besides the latents: the attributes of the scheduler and
    the values of its caller in alphabetical order, and "generator" if steps draw noise. Raises SettingsError with
    scheduler and border if a bit differs, or if the scheduler does not support splitting.
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
            packed, payload = pack(parts, sampler)
            parts = unpack(packed, payload, sampler, parts.samples)
        _advance(sampler, parts, end)
        _advance(sampler, whole, end)
        if not _same_bits(parts.latents, whole.latents):
            raise SettingsError(
                f"{sampler.name} cannot be split between evaluations {start - 1} and {start}: a hand-off "
                "there changes the result",
                "choose another --split or --scheduler",
            )
    drew = any(
        not torch.equal(generator.get_state(), state) for generator, state in zip(whole.generators, states, strict=True)
    )
    if drew and len(ranges) > 1:
        sampler.carried += ("generator",)


def toy_model(latents: Tensor, timestep: Tensor, sampler: Sampler) -> Tensor:
    """Depends non-linearly on every number of its input, and does not grow faster than it."""
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
    if not batch.latents.isfinite().all():  # with NaN everywhere, no difference could be found
        raise SettingsError(
            f"{sampler.name} so configured makes NaN or infinity of a toy model's output by evaluation {end - 1}",
            "change --sampling.options, or choose another --scheduler",
        )


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal as by `torch.equal`, but with 0 different from -0."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def measure(session: Session) -> Iterator[events.Message]:
    """Runs the baselines that the settings request. A collective."""
    wanted = session.settings.measurement.baseline
    if wanted == "off" or session.ranks.world_size == 1:  # a pipeline of one rank is the sequential run
        return
    yield from sequential(session)
    if wanted == "replicas":
        yield from replicas(session)


def sequential(session: Session) -> Iterator[events.Message]:
    """Makes all samples one after another on the last rank, which has the decoder, while the other ranks wait."""
    if session.ranks.rank == session.last:
        seconds = alone(session, session.batches)
        yield _measured(session, "sequential", session.batches, seconds)
    session.wait_for(f"rank {session.last} to work alone")


def replicas(session: Session) -> Iterator[events.Message]:
    """Makes whole samples on all ranks at once: rank r takes every world_size-th micro-batch from the r-th on."""
    own = session.batches[session.ranks.rank :: session.ranks.world_size]
    session.wait_for("the other replicas to begin")
    seconds = alone(session, own)
    yield _measured(session, "replicas", own, seconds)
    session.wait_for("the other replicas to finish")


def alone(session: Session, batches: Sequence[Sequence[int]]) -> list[float]:
    """The time of each micro-batch in seconds, from noise to latent, or to the image if there is one."""
    stage = replace(session.stage, start=0, end=session.stage.sampler.total, fault=None)
    seconds = []
    for samples in batches:
        began = session.timer.synchronize()
        batch = session.prepare(samples)
        stage.evaluate(batch, _nothing)
        if session.settings.output.images:  # every rank that comes here has the decoder
            stage.activity.enter(f"decoding sample {samples[0]}")
            stage.denoiser.decode(batch)
        seconds.append(session.timer.synchronize() - began)
    return seconds


def _nothing(batch: Batch, step: int) -> None:
    pass


def _measured(
    session: Session, kind: events.BaselineKind, batches: Sequence[Sequence[int]], seconds: list[float]
) -> events.BaselineMeasured:
    return events.BaselineMeasured(
        rank=session.ranks.rank,
        repeat=session.repeat,
        kind=kind,
        seconds=seconds,
        wall=sum(seconds),
        samples=[sample for samples in batches for sample in samples],
    )


def verify(session: Session, finished: Mapping[int, Tensor]) -> Iterator[events.Message]:
    """Makes every sample again on rank 0, and compares. A collective. `finished` are the last rank's latents.

    If a sample differs, its micro-batch goes through pipeline and reference once more, step by step. Samples of an
    earlier run are made again too, because the host has their digests.
    """
    activity = session.stage.activity
    activity.enter("waiting for rank 0 to make the references", waits_for=None if session.ranks.is_rank_zero else 0)
    data = pass_to_rank_zero(_as_safetensors(finished), session.last, session.ranks)
    if not session.ranks.is_rank_zero:
        different = msgspec.json.decode(broadcast_bytes(None, session.ranks), type=list[int])
        if different:
            _trace(session, different)
        return
    ours = _from_safetensors(data)
    began = time.perf_counter()
    with referee(session) as reference:
        theirs = _references(session, reference)
    seconds = time.perf_counter() - began
    wrong = [sample for sample in ours if sha256(ours[sample]) != sha256(theirs[sample])]
    different = next((samples for samples in session.batches if wrong and wrong[0] in samples), [])
    broadcast_bytes(msgspec.json.encode(different), session.ranks)
    divergence = None
    if wrong:
        apart = largest_difference(ours[wrong[0]], theirs[wrong[0]])
        divergence = _divergence(session, different, wrong[0], apart)
    yield events.Verified(
        rank=0,
        repeat=session.repeat,
        reference=reference.reference_name,
        samples=list(theirs),
        sha256=[sha256(latent) for latent in theirs.values()],
        seconds=seconds,
        divergence=divergence,
    )


@contextmanager
def referee(session: Session) -> Iterator[Denoiser]:
    """Loads the model once more, as a user of diffusers does, with its own encodings of the prompts.

    So an error in what this rank has loaded, or has done to it, is not in the reference too. Meanwhile this rank's own
    copy is in CPU memory, so that a GPU needs no space for two.
    """
    own, activity, prompts = session.stage.denoiser, session.stage.activity, session.requests.prompts or [""]
    activity.enter("loading the model of the reference")
    own.move(torch.device("cpu"))
    reference = load_reference(session.settings, own.device, own.dtype)
    encoded = reference.encode(
        prompts, lambda index: activity.enter(f"encoding prompt {index + 1} of {len(prompts)} for the reference")
    )
    reference.set_conditioning(encoded)
    yield reference
    reference.move(torch.device("cpu"))
    own.move(own.device)


def _references(session: Session, reference: Denoiser) -> dict[int, Tensor]:
    stage = session.stage
    found: dict[int, Tensor] = {}
    for samples in session.every_batch:

        def evaluated(step: int, latents: Tensor, sample: int = samples[0]) -> None:
            stage.activity.enter(f"making the reference of sample {sample}, evaluation {step + 1}")

        stage.activity.enter(f"making the reference of sample {samples[0]}")
        latents = reference.reference(stage.sampler, samples, session.seeds(samples), evaluated)
        found |= dict(zip(samples, latents, strict=True))
    return found


def _divergence(session: Session, samples: Sequence[int], sample: int, apart: float) -> events.Divergence:
    """Where `sample` begins to differ from its reference. `apart` is the difference of the final latents."""
    ours = _trace(session, samples)
    session.stage.activity.enter(f"making the reference of sample {sample}, step by step")
    theirs: list[Tensor] = []
    sampler = session.stage.sampler
    with referee(session) as reference:
        reference.reference(
            sampler, samples, session.seeds(samples), lambda step, latents: theirs.append(latents.cpu().clone())
        )
    place = samples.index(sample)
    found = compare([latents[place] for latents in ours], [latents[place] for latents in theirs])
    if found is None:
        return events.Divergence(sample, apart, None, None, None)
    step, difference = found
    rank = next(rank for rank, (start, end) in enumerate(session.ranges) if start <= step < end)
    return events.Divergence(sample, apart, step, rank, difference)


def _trace(session: Session, samples: Sequence[int]) -> list[Tensor]:
    """The latents of a micro-batch after each evaluation of the pipeline. A collective."""
    own: dict[int, Tensor] = {}

    def keep(batch: Batch, step: int) -> None:
        own[step] = batch.latents.cpu().clone()

    passage = Passage(session, [samples], draw_run_id(session.ranks), reports=False)
    for _ in passage.run(keep):
        pass  # what is traced is not timed
    session.stage.activity.enter("gathering the steps of all ranks")
    steps: dict[int, Tensor] = {}
    for data in gather_bytes(_as_safetensors(own), session.ranks):
        steps |= _from_safetensors(data)
    return [steps[step] for step in sorted(steps)]


def _as_safetensors(latents: Mapping[int, Tensor]) -> bytes:
    data: bytes = safetensors.torch.save({str(number): latent.contiguous() for number, latent in latents.items()})
    return data


def _from_safetensors(data: bytes) -> dict[int, Tensor]:
    return {int(number): latent for number, latent in safetensors.torch.load(data).items()}
