"""The settings of `gpubench pipe-infer`."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Never, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpubench.settings.field import Conflict, Open, Section, protocol, scale, treatment, workload
from gpubench.settings.options import MEASUREMENT, MODEL, PIPELINE, SAMPLING, Option
from gpubench.settings.schema import RunSettings, experiment_named
from gpubench.settings.sections import (
    FolderName,
    Natural,
    Positive,
    ProcessSettings,
    RankSettings,
    RepeatSettings,
    Seconds,
    Threads,
)
from gpubench.settings.seeds import seeds_of, shortest

Pixels = Annotated[int, Field(ge=8, le=2**16)]
Scale = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]


Somewhere = Annotated[Path, AfterValidator(Path.absolute)]  # so that a run can be gone on with from anywhere


class PipePrecision(StrEnum):
    """The type that weights, activations and latents are held in."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class DenoiserSettings(Section):
    name: Somewhere | None = workload(
        None,
        "folder of a local diffusers pipeline; default: random weights, see model.unet",
        alias="model",
        option=Option(MODEL, "DIR"),
    )
    unet: Literal["dummy", "tiny", "unet2d", "sd15", "sdxl"] | None = workload(
        None,
        "architecture to build with random weights; default: tiny on a CPU, sd15 on a GPU",
        alias="unet",
        option=Option(MODEL, help="Architecture with random weights, instead of --model."),
    )
    step_ms: Annotated[float, Field(ge=0, le=1e6)] = workload(
        20.0,
        "duration of one evaluation of the dummy model, in milliseconds",
        alias="step_ms",
        option=Option(MODEL, "MS", "Duration of one evaluation of the dummy, in milliseconds."),
        idle_with={"model.unet": ("tiny", "unet2d", "sd15", "sdxl")},
    )
    height: Pixels | None = workload(None, "image height in pixels; default: the model's own")
    width: Pixels | None = workload(None, "image width in pixels; default: the model's own")


class SamplingSettings(Section, Generic[Open]):
    scheduler: str | None = workload(
        None,
        "class name of the diffusers scheduler; default: the model's own",
        alias="scheduler",
        option=Option(SAMPLING, "CLASS", "Class name of a diffusers scheduler; the model's own by default."),
    )
    options: str = workload("", "settings of the scheduler as key=value,key=value")
    steps: Positive | Open = workload(
        None,
        "denoising steps (num_inference_steps); default: 20 on a CPU, 50 on a GPU",
        alias="steps",
        option=Option(SAMPLING, "N", "Denoising steps of each sample."),
    )
    guidance_scale: Scale | None = workload(
        None,
        "scale of classifier-free guidance; 1 or less turns it off; default: 7.5, off for unconditional models",
        alias="guidance_scale",
        option=Option(SAMPLING, "X"),
    )
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = workload(
        0.0, "share in which guidance is rescaled, against overexposure; of Stable Diffusion and SDXL"
    )
    eta: Scale = workload(0.0, "eta of the DDIM and TCD schedulers, the amount of noise added per step")


class WorkSettings(Section, Generic[Open]):
    samples: Positive | Open = workload(
        None,
        "images to generate; default: one for each prompt and each of work.seeds, or 8 if neither is given",
        alias="samples",
        option=Option(SAMPLING, "N"),
    )
    seeds: Annotated[str | None, BeforeValidator(shortest)] = workload(
        None,
        "seeds with each of which every prompt is made, such as 1,2,3 or 0-7; default: prompts are used in turn, and "
        "sample i has seed + i",
        alias="seeds",
        option=Option(SAMPLING, "S,S,...", "Seeds with each of which every prompt is made: 1,2,3 or 0-7."),
    )
    micro_batch: Positive = scale(
        1,
        "images that are evaluated and handed over together",
        alias="micro_batch",
        option=Option(SAMPLING, "N"),
    )
    prompts: Somewhere | None = workload(
        None, "text file with one prompt per line", alias="prompts", option=Option(MODEL, "FILE")
    )
    negative_prompt: str = workload("", "negative prompt")

    @property
    def seed_list(self) -> list[int]:
        """The seeds with each of which every prompt is made; none if each sample has its own."""
        return seeds_of(self.seeds)


class PipelineSettings(Section):
    split: str = treatment(
        "even",
        "evaluations per rank: even (the last rank takes the remainder), balanced, or a list such as 13,13,12,12",
        alias="split",
        option=Option(
            PIPELINE,
            "even|balanced|A,B,...",
            "Evaluations per rank; with even, the last rank takes the remainder.",
        ),
    )
    in_flight: Annotated[int, Field(ge=1, le=64)] = treatment(
        2,
        "maximum number of hand-offs in flight on each side of a rank: received ahead, or sent and not yet taken",
        alias="in_flight",
        option=Option(PIPELINE, "N", "Maximum number of hand-offs in flight on each side of a rank."),
        idle_with={"distributed.world_size": (1,)},
    )
    deadline: Seconds = protocol(
        60.0,
        "seconds without progress after which a rank counts as stuck, in addition to three times the "
        "duration of its evaluations in the warm-up",
    )


class InferencePerformance(ProcessSettings[Open], Generic[Open]):
    cpu_threads: Threads | Open = treatment(
        None,
        "CPU threads of each rank; default: on a CPU, the number of physical cores for any number of "
        "ranks, because the last bits of a sample depend on it; with a GPU, physical cores / ranks",
        depends_on=("distributed.world_size",),
        environment=("threads.intra_op", "variables.OMP_NUM_THREADS", "variables.MKL_NUM_THREADS"),
    )
    deterministic: bool | Open = treatment(
        None,
        "use deterministic algorithms only, which bit-identical samples on a GPU require; default: same as verify",
        environment=("math.cudnn_deterministic", "math.deterministic_algorithms"),
    )


class InferenceMeasurement(RepeatSettings):
    baseline: Literal["off", "sequential", "replicas"] = protocol(
        "sequential",
        "what else to measure, for comparison: one rank alone, or also one complete model on every rank (replicas)",
        alias="baseline",
        option=Option(MEASUREMENT, help="What to measure in addition, for comparison."),
    )


class OutputSettings(Section):
    latents: bool = treatment(True, "save the final latent of every sample, as safetensors")
    images: bool = workload(False, "decode every sample on the last rank and save it as PNG")


class PipeSettings(RunSettings[Open], Generic[Open]):
    """Settings of `gpubench pipe-infer`. Its profiling counts the evaluations of a rank."""

    command: ClassVar[str] = "pipe-infer"
    FIXED: ClassVar[Mapping[str, Any]] = {"logging.graph": False, "profiling.keep_compile": False}
    experiment: FolderName = experiment_named("pipe-infer")
    seed: Natural = treatment(
        0, "random seed of the weights; the noise of sample i has seed + i, or its seed in work.seeds"
    )
    precision: PipePrecision | Open = treatment(
        None,
        "type of weights and latents; default: fp16 on a GPU, else fp32",
        depends_on=("device",),
        option=Option(MODEL),
    )
    verify: bool | Open = protocol(
        None,
        "compare every sample bit by bit with single-process diffusers; default: true for small models",
        option=Option(
            PIPELINE, help="Compare each sample bit by bit with single-process diffusers; default for small models."
        ),
    )
    inject: str | None = treatment(
        None,
        "fault to inject, for tests of the pipeline: KIND,rank=R,sample=S[,seconds=T]",
        option=Option(PIPELINE, "FAULT", "Inject a fault, for tests: KIND,rank=R,sample=S[,seconds=T]."),
    )
    model: DenoiserSettings = DenoiserSettings()
    sampling: SamplingSettings[Open] = SamplingSettings()
    work: WorkSettings[Open] = WorkSettings()
    pipeline: PipelineSettings = PipelineSettings()
    performance: InferencePerformance[Open] = InferencePerformance()
    distributed: RankSettings = RankSettings()
    measurement: InferenceMeasurement = InferenceMeasurement()
    output: OutputSettings = OutputSettings()

    @model_validator(mode="after")
    def _no_epochs(self) -> Self:
        if self.profiling.enabled and self.profiling.unit == "epoch":
            raise Conflict("profiling.unit=epoch: a pipeline has none, its steps are evaluations", "profiling.unit")
        return self


CompletedPipeSettings = PipeSettings[Never]
