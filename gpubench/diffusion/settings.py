"""What `gpubench pipe-infer` can be asked to do; see `gpubench.settings` for the rules of the house."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gpubench.settings import (
    FolderName,
    Natural,
    Positive,
    ProcessSettings,
    RankSettings,
    RepeatSettings,
    RunSettings,
    Seconds,
    Section,
    Threads,
)

Pixels = Annotated[int, Field(ge=8, le=2**16)]
Scale = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]


Somewhere = Annotated[Path, AfterValidator(Path.absolute)]  # so that a run can be gone on with from anywhere


class Arithmetic(StrEnum):
    """The type that weights, activations and latents are held in."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class DenoiserSettings(Section):
    name: Somewhere | None = Field(
        None, description="folder of a local diffusers pipeline; default: random weights, see model.unet"
    )
    unet: Literal["dummy", "tiny", "unet2d", "sd15", "sdxl"] | None = Field(
        None, description="dummy | tiny | unet2d | sd15 | sdxl: random weights; default: tiny on a CPU, sd15 on a GPU"
    )
    step_ms: Annotated[float, Field(ge=0, le=1e6)] = Field(
        20.0, description="milliseconds that one evaluation of the dummy takes"
    )
    height: Pixels | None = Field(None, description="of an image in pixels; default: the model's own")
    width: Pixels | None = Field(None, description="of an image in pixels; default: the model's own")


class SamplingSettings(Section):
    scheduler: str | None = Field(None, description="diffusers scheduler class; default: the model's own")
    options: str = Field("", description="scheduler settings as key=value,key=value")
    steps: Positive | None = Field(
        None, description="num_inference_steps of the scheduler; default: 20 on a CPU, 50 on a GPU"
    )
    guidance_scale: Scale | None = Field(
        None, description="classifier-free guidance; 1 or less is none; default: 7.5, none for unconditional models"
    )
    eta: Scale = Field(0.0, description="noise of DDIM and TCD steps")


class WorkSettings(Section):
    samples: Positive | None = Field(
        None, description="images to make; default: one for each prompt, or 8 without a file of prompts"
    )
    micro_batch: Positive = Field(1, description="images that travel and are evaluated together")
    prompts: Somewhere | None = Field(None, description="text file with one prompt a line, used in turn")
    negative_prompt: str = Field("", description="what to guide away from")

    @property
    def total(self) -> int:
        """`samples`, once they have been filled in."""
        if self.samples is None:
            raise ValueError("work.samples has not been filled in")
        return self.samples


class PipelineSettings(Section):
    split: str = Field(
        "even", description="evaluations of each rank: even (remainder to the last), balanced, or 13,13,12,12"
    )
    in_flight: Annotated[int, Field(ge=1, le=64)] = Field(
        2, description="hand-overs a rank may have under way at each end: received ahead, or not yet taken"
    )
    deadline: Seconds = Field(
        60.0,
        description="seconds without progress, beyond what evaluations took in the warm-up, until a rank is blamed",
    )


class InferencePerformance(ProcessSettings):
    cpu_threads: Threads | None = Field(
        None,
        description="threads of each CPU worker; default: physical cores whatever the number of ranks, as a sample's "
        "last bits depend on it; with a GPU, physical cores / ranks",
    )
    deterministic: bool | None = Field(
        None, description="deterministic algorithms only, as bit-identity on a GPU needs; default: with verify"
    )


class InferenceMeasurement(RepeatSettings):
    baseline: Literal["off", "sequential", "replicas"] = Field(
        "sequential", description="measured beside the pipeline: one rank alone, and with replicas every rank alone"
    )


class OutputSettings(Section):
    latents: bool = Field(True, description="keep every sample's final latent, as safetensors")
    images: bool = Field(False, description="decode on the last rank and keep every image, as PNG")


class PipeSettings(RunSettings):
    """Settings of `gpubench pipe-infer`. Its profiling counts the evaluations of a rank."""

    aliases: ClassVar[dict[str, str]] = RunSettings.aliases | {
        "unet": "model.unet",
        "step_ms": "model.step_ms",
        "scheduler": "sampling.scheduler",
        "steps": "sampling.steps",
        "guidance_scale": "sampling.guidance_scale",
        "samples": "work.samples",
        "micro_batch": "work.micro_batch",
        "prompts": "work.prompts",
        "split": "pipeline.split",
        "in_flight": "pipeline.in_flight",
        "baseline": "measurement.baseline",
    }

    experiment: FolderName = Field("pipe-infer", description="folder under results that groups the runs")
    seed: Natural = Field(0, description="seed of the weights; sample i starts from noise of seed + i")
    precision: Arithmetic | None = Field(None, description="fp32 | fp16 | bf16; default: fp16 on a GPU, else fp32")
    verify: bool | None = Field(
        None, description="compare every sample with single-process diffusers, bit by bit; default: for small models"
    )
    inject: str | None = Field(
        None, description="a fault to provoke, for tests of the pipeline: KIND,rank=R,sample=S[,seconds=T]"
    )
    model: DenoiserSettings = DenoiserSettings()
    sampling: SamplingSettings = SamplingSettings()
    work: WorkSettings = WorkSettings()
    pipeline: PipelineSettings = PipelineSettings()
    performance: InferencePerformance = InferencePerformance()
    distributed: RankSettings = RankSettings()
    measurement: InferenceMeasurement = InferenceMeasurement()
    output: OutputSettings = OutputSettings()

    @model_validator(mode="after")
    def _no_epochs(self) -> Self:
        if self.profiling.enabled and self.profiling.unit == "epoch":
            raise ValueError("profiling.unit=epoch: a pipeline has none, its steps are evaluations")
        return self
