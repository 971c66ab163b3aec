"""Chooses the settings of `pipe-infer` that the user did not set, and rejects settings that cannot work."""

import math
from collections.abc import Sequence
from functools import partial

from gpubench import devices, units
from gpubench.errors import SettingsError
from gpubench.kinds.pipeline import split
from gpubench.kinds.pipeline.faults import parse_fault
from gpubench.kinds.pipeline.folders import (
    PipelineFolder,
    check,
    check_negative_prompt,
    read_prompts,
    schedule_keywords,
)
from gpubench.kinds.pipeline.schedulers import (
    AT_MOST_STEPS,
    RANDOM_WEIGHTS,
    check_class,
    check_configured,
    check_micro_batch,
    check_scheduler_name,
    evaluations,
    parse_options,
)
from gpubench.kinds.pipeline.settings import CompletedPipeSettings, PipePrecision, PipeSettings
from gpubench.settings.defaults import Gaps, check_wandb, find_device, has_gpu_each, local_ranks, refuse_ranks
from gpubench.settings.keys import about
from gpubench.settings.schema import Device

UNCONDITIONAL = ("dummy", "unet2d", "DDPMPipeline")
GUIDANCE = {
    "sdxl": 5.0,
    "StableDiffusionXLPipeline": 5.0,
    "StableDiffusion3Pipeline": 7.0,
    "PixArtAlphaPipeline": 4.5,
    "PixArtSigmaPipeline": 4.5,
    "FluxPipeline": 3.5,
}
"""The defaults of the pipelines' `__call__` that differ from the usual one."""
USUAL_GUIDANCE = 7.5
RESCALED = ("tiny", "sd15", "sdxl", "StableDiffusionPipeline", "StableDiffusionXLPipeline")
"""The models whose pipelines have `guidance_rescale`."""
SMALL = ("dummy", "tiny")
SAMPLES = 8  # the default without prompts


def complete(settings: PipeSettings) -> tuple[CompletedPipeSettings, dict[str, str]]:
    """Returns complete settings, and the reasons for those that were chosen, by dot-key.

    Raises DeviceError, ModelError, DataError or SettingsError for settings that cannot work on this machine.
    """
    gaps = Gaps(settings)
    prompts = read_prompts(settings.work.prompts)
    samples = gaps.fill("work.samples", *fill_samples(prompts, len(settings.work.seed_list)))
    check_request(settings, samples)
    refuse_repeated(samples, prompts, len(settings.work.seed_list))
    with about("model.name"):
        folder = check(settings.model.name) if settings.model.name else None
    device, gpus = find_device(gaps)
    on_gpu = device is Device.cuda
    where = "on a GPU" if on_gpu else "on a CPU"
    model = fill_model(gaps, folder, on_gpu)
    check_negative_prompt(model, settings.work.negative_prompt)
    check_guidance_rescale(model, settings.sampling.guidance_rescale)
    steps = gaps.fill("sampling.steps", 50 if on_gpu else 20, where)
    check_schedule(settings, folder, model, steps, samples)
    ranks, cores = local_ranks(settings), devices.physical_cores()
    shared, decided = on_gpu and ranks > len(gpus), not on_gpu or not has_gpu_each(settings, gpus)
    backend = settings.distributed.backend
    if decided:
        why = f"{ranks} ranks share {units.counted(len(gpus), 'GPU')}" if shared else where
        backend = gaps.fill("distributed.backend", "nccl" if on_gpu and not shared else "gloo", why)
    if not shared or backend == "nccl":
        refuse_ranks(settings, device, gpus, backend)
    gaps.fill("precision", PipePrecision.fp16 if on_gpu else PipePrecision.fp32, where)
    if model not in UNCONDITIONAL:
        gaps.fill("sampling.guidance_scale", GUIDANCE.get(model, USUAL_GUIDANCE), "the default of its pipeline")
    verify = gaps.fill("verify", model in SMALL, f"{model} is {'' if model in SMALL else 'not '}small")
    gaps.fill("performance.deterministic", verify, "verify needs it" if verify else "nothing is verified")
    if on_gpu:
        share = f"{units.counted(cores, 'core')} for {units.counted(ranks, 'rank')}"
        gaps.fill("performance.cpu_threads", max(1, cores // ranks), share)
    else:  # the last bits of a CPU's results depend on it, and must not depend on the number of ranks
        gaps.fill("performance.cpu_threads", cores, f"{units.counted(cores, 'core')}, for any number of ranks")
    return gaps.filled(), gaps.reasons


def fill_samples(prompts: Sequence[str], seeds: int) -> tuple[int, str]:
    """How many samples to make by default, and why. `seeds` is the number of work.seeds, or 0."""
    if not prompts and not seeds:
        return SAMPLES, "no file of prompts"
    return max(1, len(prompts)) * max(1, seeds), f"one for each of {_prompts_and_seeds(prompts, seeds)}"


def _prompts_and_seeds(prompts: Sequence[str], seeds: int) -> str:
    given = ((len(prompts), "prompt"), (seeds, "seed"))
    return " and ".join(units.counted(number, name) for number, name in given if number)


def refuse_repeated(samples: int, prompts: Sequence[str], seeds: int) -> None:
    """Raises SettingsError if prompts and seeds make fewer different samples than are wanted."""
    different = max(1, len(prompts)) * seeds
    if seeds and samples > different:
        made_of = _prompts_and_seeds(prompts, seeds)
        raise SettingsError(
            f"work.samples={samples} is more than the {units.counted(different, 'sample')} of {made_of}",
            "leave --samples out, or give more --seeds",
            keys=["work.samples", "work.seeds"],
        )


def check_request(settings: PipeSettings, samples: int) -> None:
    """Raises SettingsError or DataError for settings that are invalid on any machine."""
    check_wandb(settings)
    if settings.sampling.scheduler is not None:
        with about("sampling.scheduler"):
            check_scheduler_name(settings.sampling.scheduler)
    with about("sampling.options"):
        parse_options(settings.sampling.options)
    if settings.inject is not None:
        parse_fault(settings.inject, settings.distributed.world_size, samples)
    split.check(settings.pipeline.split, settings.distributed.world_size)
    if settings.work.micro_batch > samples:
        raise SettingsError(
            f"work.micro_batch={settings.work.micro_batch} is more than the {samples} samples to make",
            f"use --micro-batch {samples} or less, or more --samples",
            keys=["work.micro_batch"],
        )
    if settings.model.name and settings.model.unet:
        message = "model.name and model.unet both select the model"
        raise SettingsError(message, "leave one of them out", keys=["model.name", "model.unet"])
    if settings.output.images and not settings.model.name:
        message = "output.images: random weights have no decoder"
        raise SettingsError(message, "give --model PIPELINE_FOLDER", keys=["output.images"])


def check_guidance_rescale(model: str, rescale: float) -> None:
    """Raises SettingsError if the model's pipeline does not rescale its guidance."""
    if rescale and model not in RESCALED:
        message = f"sampling.guidance_rescale={rescale:g} is given, and the pipeline of {model} has none"
        raise SettingsError(message, "leave it out", keys=["sampling.guidance_rescale"])


def check_schedule(settings: PipeSettings, folder: PipelineFolder | None, model: str, steps: int, samples: int) -> None:
    """Raises SettingsError if the scheduler does not support the settings, or its evaluations cannot be split so.

    If only diffusers can determine the scheduler's number of evaluations, the workers check it.
    """
    own, config = folder.scheduler if folder else RANDOM_WEIGHTS[model]
    name = settings.sampling.scheduler or own
    check_class(name)
    check_micro_batch(name, settings.work.micro_batch)
    options = parse_options(settings.sampling.options)
    check_configured(name, options, config, partial(schedule_keywords, model), settings.sampling.eta)
    total = evaluations(name, steps, {**config, **options})
    if total is None:
        if name in AT_MOST_STEPS:
            split.assign(steps, settings.distributed.world_size, split.BALANCED)  # refuses more ranks than evaluations
        return
    ranges = split.assign(total, settings.distributed.world_size, settings.pipeline.split)
    split.refuse_short(settings.profiling, ranges, math.ceil(samples / settings.work.micro_batch))


def fill_model(gaps: Gaps, folder: PipelineFolder | None, on_gpu: bool) -> str:
    """Chooses the model. Returns the name of its kind."""
    if folder:
        return folder.pipeline
    reason = "random weights in a size that suits the device"
    return str(gaps.fill("model.unet", "sd15" if on_gpu else "tiny", reason))
