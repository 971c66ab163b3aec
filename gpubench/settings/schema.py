"""What each command can be asked to do: one frozen model per command, every field with its meaning and unit.

A field that is None is filled in from the model and the device before anything runs (see `defaults.py`), so that the
config.yaml of a finished run holds no None that mattered. Durations are seconds, sizes bytes, unless a name says other.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

Positive = Annotated[int, Field(ge=1, lt=2**63)]  # what msgspec can send and torch can seed with
DEFAULT_STEPS = 50
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
MOST_OF_A_NAME = 120
"""Bytes of a folder's name: every file system takes as many."""


def _short(name: str) -> str:
    if (size := len(name.encode())) > MOST_OF_A_NAME:
        raise ValueError(f"{name!r} takes {size} bytes, and a folder's name at most {MOST_OF_A_NAME} here")
    return name


FolderName = Annotated[str, StringConstraints(pattern=r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$"), AfterValidator(_short)]


class Precision(StrEnum):
    """Arithmetic of the forward and backward pass; parameters and optimizer state stay fp32."""

    fp32 = "fp32"
    tf32 = "tf32"
    amp = "amp"
    bf16 = "bf16"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def _refuse_mps(device: Any) -> Any:
    if device == "mps":
        raise ValueError("torch has no events to time mps by, and its profiler records no work of it; use cpu")
    return device


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40
}  # fmt: skip


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].casefold() not in UNITS:
        raise ValueError(f"{value!r} is no size: write 80GiB, 80GB or bytes")
    return int(float(match[1]) * UNITS[match[2].casefold()])


def _fraction(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value.removesuffix("%"))
    except ValueError:
        raise ValueError(f"{value!r} is no fraction: write 0.05 or 5%") from None
    if value.endswith("%"):
        return number / 100
    if number >= 1:
        raise ValueError(f"{value!r} is a fraction: did you mean {value}%?")
    return number


_WORDS = dict.fromkeys(("true", "yes", "on", "y", "t"), True) | dict.fromkeys(("false", "no", "off", "n", "f"), False)
_NAMES = re.compile(r"[\w*?\[\]!.-]+(\s*,\s*[\w*?\[\]!.-]+)*")


def _blocks(value: Any) -> Any:
    """Which modules to checkpoint: all or none, the k of every k-th block, or patterns of names between commas."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value.strip())
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,20}", value):
        value = int(value)
    if isinstance(value, int) and 0 <= value < 2**63:
        return value if value > 1 else bool(value)
    if isinstance(value, str) and _NAMES.fullmatch(value):
        return value
    raise ValueError(f"{value!r} is not true, false, a number k for every k-th block, or names such as layers.*.mlp")


class Section(BaseModel):
    """Immutable, and strict about names: a misspelt key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    name: str | None = Field(
        None,
        description="built-in name, module:callable, or folder with config.json; default: a ResNet sized for the "
        "device",
    )
    activation_checkpointing: Annotated[bool | Positive | str, BeforeValidator(_blocks)] = Field(
        False,
        description="recompute activations in the backward pass instead of storing them: true for all blocks, k for "
        "every k-th block, or module names (layers.*.mlp,layers.0)",
    )


class DataSettings(Section):
    source: str = Field("synthetic", description="synthetic | synthetic-host | image-folder | text | module:callable")
    path: Path | None = Field(None, description="file or folder to read, for image-folder and text")
    samples: Positive = Field(10_000, description="samples in one epoch of synthetic data")
    image_size: Positive | None = Field(None, description="image height and width in pixels; default: the model's own")
    sequence_length: Positive | None = Field(None, description="tokens in a sequence; default: the model's own")
    tokenizer: Path | None = Field(
        None, description="folder of a local tokenizer, for text; default: one token per byte"
    )
    workers: Natural | None = Field(
        None, description="DataLoader worker processes per rank; default: 0 on CPU, up to 8 on a GPU"
    )
    pin_memory: bool | None = Field(
        None, description="copy batches to page-locked memory first; default: true on a GPU"
    )
    prefetch: Positive = Field(2, description="batches that each DataLoader worker loads ahead")


class TrainingSettings(Section):
    batch_size: Positive | None = Field(None, description="samples per rank and forward pass; default: the model's own")
    grad_accumulation: Positive = Field(1, description="forward and backward passes per optimizer step")
    steps: Positive | None = Field(
        None, description="optimizer steps measured in each repeat; default: 50, unless epochs or seconds is set"
    )
    epochs: Positive | None = Field(
        None, description="measure this many passes over the data instead of a number of steps"
    )
    seconds: Seconds | None = Field(
        None, description="measure for about this many seconds instead of a number of steps"
    )
    warmup_steps: Natural = Field(
        10,
        description="minimum number of steps excluded at the start of each repeat; the steady window may begin later",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("adamw", description="torch.optim optimizer")
    optimizer_impl: Literal["auto", "loop", "foreach", "fused"] = Field(
        "auto", description="optimizer implementation; auto: fused on a GPU, PyTorch's default on a CPU"
    )
    read_loss: bool = Field(
        False,
        description="read the loss after every step, as a loop that logs it does; makes the host wait for the device",
    )
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(1e-3, description="learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum, for sgd")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(0.0, description="weight decay")

    @model_validator(mode="after")
    def _one_stop(self) -> Self:
        given = [name for name in ("steps", "epochs", "seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"training.{' and training.'.join(given)} both say when to stop; set one of them to null")
        return self


class ProcessSettings(Section):
    cpu_threads: Threads | None = Field(None, description="CPU threads of each rank; default: physical cores / ranks")
    omp_wait_policy: Literal["PASSIVE", "ACTIVE"] = Field(
        "PASSIVE",
        description="what idle OpenMP threads do: PASSIVE sleeps, ACTIVE spins and takes CPU time from other threads",
    )
    expandable_segments: bool = Field(
        False, description="use expandable segments in the CUDA caching allocator, which reduces fragmentation"
    )


class PerformanceSettings(ProcessSettings):
    channels_last: bool | None = Field(
        None, description="NHWC memory format for convolutional models; default: true on a GPU"
    )
    compile: bool = Field(False, description="torch.compile the model")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="torch.compile mode"
    )
    cudnn_benchmark: bool = Field(True, description="let cuDNN time its algorithms and use the fastest")
    matmul_precision: Literal["highest", "high", "medium"] | None = Field(
        None, description="value for torch.set_float32_matmul_precision; default: highest for fp32, else high"
    )


class RankSettings(Section):
    world_size: Positive = Field(1, description="number of ranks; each is one process")
    backend: Literal["nccl", "gloo"] | None = Field(
        None, description="communication library; default: nccl on GPUs, gloo on CPUs"
    )


class DistributedSettings(RankSettings):
    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="how several ranks train together: DistributedDataParallel or FSDP2"
    )
    sync_gradients: Literal["last", "each"] = Field(
        "last",
        description="reduce gradients after the last accumulated pass, or after each one (which saves memory with "
        "fsdp2)",
    )
    bucket_mb: Annotated[float, Field(gt=0, le=1e6)] = Field(25.0, description="size of a DDP gradient bucket in MiB")
    separate_reduce_scatter: bool = Field(
        False,
        description="fsdp2: use a separate communicator for the reduce-scatter of gradients, so that it can overlap "
        "with the all-gather of parameters; needs PyTorch 2.13",
    )
    timeout: Seconds = Field(300.0, description="timeout of a collective after the warm-up, in seconds")


class RepeatSettings(Section):
    repeats: Positive = Field(3, description="number of times to repeat the measurement, each in new processes")
    target_precision: Annotated[Fraction, BeforeValidator(_fraction)] | None = Field(
        None, description="repeat until the 95 % interval of the throughput is within this fraction of it (0.01 or 1%)"
    )
    max_repeats: Positive = Field(20, description="maximum number of repeats with target_precision")
    telemetry_interval: Annotated[float, Field(ge=0.02, le=60)] = Field(
        0.2, description="seconds between two samples of hardware telemetry"
    )
    stall_timeout: Seconds = Field(
        600.0, description="seconds without progress of a rank after which the run fails and names that rank"
    )


class MeasurementSettings(RepeatSettings):
    count_flops: bool = Field(True, description="count the floating-point operations of a step, after the timed steps")
    measure_peak: bool = Field(
        False, description="time a large matrix product, as an upper limit of the attainable FLOP/s"
    )


class ProfilingSettings(Section):
    """A repeat of its own, after those that are measured: recording slows the program down."""

    enabled: bool = Field(
        False, description="record an additional repeat with torch.profiler and diagnose the bottleneck"
    )
    unit: Literal["step", "epoch"] = Field("step", description="unit of wait, warmup and active")
    wait: Natural = Field(3, description="units before the first cycle")
    warmup: Natural = Field(1, description="units at the start of each cycle that are profiled and discarded")
    active: Positive = Field(3, description="units of each cycle that are recorded")
    repeat: Natural = Field(1, description="additional cycles after the first; each cycle writes its own trace file")
    record_shapes: bool = Field(True, description="record shapes, types and strides of the inputs of every operator")
    profile_memory: bool = Field(False, description="record every allocation")
    with_stack: bool = Field(
        False, description="record Python stacks, which give file and line; slows the host further"
    )
    modules: bool = Field(True, description="record the path of each module of the model")
    all_ranks: bool = Field(False, description="record every rank instead of rank 0 only")
    keep_compile: bool = Field(
        False, description="profile the compiled model, in which single operators are not visible"
    )
    compress: bool = Field(True, description="write traces as .json.gz, about a tenth of the size of .json")

    @property
    def units(self) -> int:
        """Steps or epochs that the schedule takes."""
        return self.wait + (self.warmup + self.active) * (self.repeat + 1)

    def shortfall(self, units: int, source: str) -> str | None:
        """What is wrong with a run of `units`, which are from `source`; None where it lasts as long as the schedule."""
        if units >= self.units:
            return None
        needed = f"wait {self.wait} + (warmup {self.warmup} + active {self.active}) x (repeat {self.repeat} + 1)"
        return (
            f"profiling takes {needed} = {self.units} {self.unit}s, and the run has {units} ({source}): "
            f"{self.units - units} more are needed, or less of profiling.wait, profiling.warmup, profiling.active and "
            "profiling.repeat"
        )


class FollowSettings(Section):
    """What `gpubench memory` looks at."""

    steps: Annotated[int, Field(ge=1, le=1000)] = Field(
        3,
        description="optimizer steps to record; the first one allocates the optimizer state, the last one is "
        "reported as the steady step",
    )
    predict: bool = Field(False, description="predict the memory on a GPU instead of measuring; needs no GPU")
    device_model: str | None = Field(
        None, description="GPU to predict for, such as h200; default: the GPU of this machine"
    )
    device_memory: Annotated[int, Field(ge=2**20, le=2**60), BeforeValidator(_bytes)] | None = Field(
        None,
        description="memory that the model has to fit into, in bytes or as 80GiB; default: the memory of the device",
    )
    spare: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_fraction)] = Field(
        0.05, description="fraction of the memory that the largest batch must leave free (0.05 or 5%)"
    )
    find_batch_size: bool = Field(False, description="find the largest batch size that fits")
    advise: bool = Field(True, description="propose settings that save memory and predict how much each saves")
    explain: bool = Field(
        False, description="repeat the prediction without each correction, to report what each one adds"
    )


class LoggingSettings(Section):
    level: Literal["NOTIMPORTANT", "DEBUG", "INFO", "MODIFIABLE", "WARNING", "ERROR", "CRITICAL"] = Field(
        "DEBUG", description="lowest level that is written to run.log"
    )
    graph: bool = Field(True, description="write the model graph to TensorBoard if it can be traced")
    wandb: bool = Field(False, description="also log to Weights & Biases (needs pip install 'gpubench[wandb]')")
    wandb_project: str = Field("gpubench", description="Weights & Biases project")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="online uploads; offline writes to the run directory only"
    )


class RunSettings(Section):
    """What every command that starts workers can be asked."""

    aliases: ClassVar[dict[str, str]] = {
        "model": "model.name",
        "world_size": "distributed.world_size",
        "repeats": "measurement.repeats",
        "target_precision": "measurement.target_precision",
    }
    """Short words, the same as option, override and `--vs` key."""

    experiment: FolderName
    results: Path = Field(Path("results"), description="directory for run directories")
    seed: Natural
    device: Annotated[Device, BeforeValidator(_refuse_mps)] | None = Field(
        None, description="device to run on; default: cuda if there is a GPU, else cpu"
    )
    performance: ProcessSettings = ProcessSettings()
    distributed: RankSettings = RankSettings()
    measurement: RepeatSettings = RepeatSettings()
    profiling: ProfilingSettings = ProfilingSettings()
    logging: LoggingSettings = LoggingSettings()


class TrainSettings(RunSettings):
    """Settings of `gpubench train-bench`."""

    aliases: ClassVar[dict[str, str]] = RunSettings.aliases | {
        "data": "data.source",
        "batch_size": "training.batch_size",
        "steps": "training.steps",
        "epochs": "training.epochs",
        "seconds": "training.seconds",
        "measure_peak": "measurement.measure_peak",
    }

    experiment: FolderName = Field("train-bench", description="subdirectory of results that groups runs")
    seed: Natural = Field(0, description="random seed of weights and data; each rank adds its rank number for data")
    precision: Precision | None = Field(
        None,
        description="arithmetic of the forward and backward pass; default: bf16 on a GPU that supports it, amp on an "
        "older GPU, fp32 on a CPU",
    )
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    performance: PerformanceSettings = PerformanceSettings()
    distributed: DistributedSettings = DistributedSettings()
    measurement: MeasurementSettings = MeasurementSettings()

    @model_validator(mode="after")
    def _long_enough_to_profile(self) -> Self:
        training, profiling, short = self.training, self.profiling, None
        if not profiling.enabled:
            return self
        if profiling.unit == "epoch":
            if training.epochs is None:
                raise ValueError("profiling.unit=epoch counts training.epochs, which are not set: --epochs N")
            short = profiling.shortfall(training.epochs, "training.epochs")
        elif training.epochs is None and training.seconds is None:
            steps = training.steps or DEFAULT_STEPS
            source = f"training.warmup_steps {training.warmup_steps} + training.steps {steps}"
            short = profiling.shortfall(training.warmup_steps + steps, source)
        if short:
            raise ValueError(short)
        return self


class RecordedSettings(ProfilingSettings):
    enabled: bool = Field(True, description="record an additional repeat with torch.profiler; profile needs this")


class ProfileSettings(TrainSettings):
    """Settings of `gpubench profile`: the run that train-bench would do, and one more repeat that is recorded."""

    experiment: FolderName = Field("profile", description="subdirectory of results that groups runs")
    profiling: RecordedSettings = RecordedSettings()


class OnceSettings(MeasurementSettings):
    repeats: Positive = Field(1, description="number of times to repeat the measurement, each in new processes")


class MemorySettings(TrainSettings):
    """Settings of `gpubench memory`: the run that train-bench would do, of which a few steps are followed."""

    aliases: ClassVar[dict[str, str]] = TrainSettings.aliases | {
        "steps": "memory.steps",
        "predict": "memory.predict",
        "device_model": "memory.device_model",
        "device_memory": "memory.device_memory",
        "spare": "memory.spare",
        "find_batch_size": "memory.find_batch_size",
    }

    experiment: FolderName = Field("memory", description="subdirectory of results that groups runs")
    measurement: OnceSettings = OnceSettings()
    profiling: ProfilingSettings = Field(ProfilingSettings(), exclude=True)
    """Never: what is followed is not profiled, and no setting of it is taken."""
    memory: FollowSettings = FollowSettings()


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
        None, description="architecture to build with random weights; default: tiny on a CPU, sd15 on a GPU"
    )
    step_ms: Annotated[float, Field(ge=0, le=1e6)] = Field(
        20.0, description="duration of one evaluation of the dummy model, in milliseconds"
    )
    height: Pixels | None = Field(None, description="image height in pixels; default: the model's own")
    width: Pixels | None = Field(None, description="image width in pixels; default: the model's own")


class SamplingSettings(Section):
    scheduler: str | None = Field(None, description="class name of the diffusers scheduler; default: the model's own")
    options: str = Field("", description="settings of the scheduler as key=value,key=value")
    steps: Positive | None = Field(
        None, description="denoising steps (num_inference_steps); default: 20 on a CPU, 50 on a GPU"
    )
    guidance_scale: Scale | None = Field(
        None,
        description="scale of classifier-free guidance; 1 or less turns it off; default: 7.5, off for unconditional "
        "models",
    )
    eta: Scale = Field(0.0, description="eta of the DDIM and TCD schedulers, the amount of noise added per step")


class WorkSettings(Section):
    samples: Positive | None = Field(
        None, description="images to generate; default: one for each prompt, or 8 without work.prompts"
    )
    micro_batch: Positive = Field(1, description="images that are evaluated and handed over together")
    prompts: Somewhere | None = Field(None, description="text file with one prompt per line; used cyclically")
    negative_prompt: str = Field("", description="negative prompt")

    @property
    def total(self) -> int:
        """`samples`, once they have been filled in."""
        if self.samples is None:
            raise ValueError("work.samples has not been filled in")
        return self.samples


class PipelineSettings(Section):
    split: str = Field(
        "even",
        description="evaluations per rank: even (the last rank takes the remainder), balanced, or a list such as "
        "13,13,12,12",
    )
    in_flight: Annotated[int, Field(ge=1, le=64)] = Field(
        2,
        description="maximum number of hand-overs in flight on each side of a rank: received ahead, or sent and not "
        "yet taken",
    )
    deadline: Seconds = Field(
        60.0,
        description="seconds without progress after which a rank counts as stuck, in addition to three times the "
        "duration of its evaluations in the warm-up",
    )


class InferencePerformance(ProcessSettings):
    cpu_threads: Threads | None = Field(
        None,
        description="CPU threads of each rank; default: on a CPU, the number of physical cores for any number of "
        "ranks, because the last bits of a sample depend on it; with a GPU, physical cores / ranks",
    )
    deterministic: bool | None = Field(
        None,
        description="use deterministic algorithms only, which bit-identical samples on a GPU require; default: same "
        "as verify",
    )


class InferenceMeasurement(RepeatSettings):
    baseline: Literal["off", "sequential", "replicas"] = Field(
        "sequential",
        description="what else to measure, for comparison: one rank alone, or also one complete model on every rank "
        "(replicas)",
    )


class OutputSettings(Section):
    latents: bool = Field(True, description="save the final latent of every sample, as safetensors")
    images: bool = Field(False, description="decode every sample on the last rank and save it as PNG")


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

    experiment: FolderName = Field("pipe-infer", description="subdirectory of results that groups runs")
    seed: Natural = Field(0, description="random seed of the weights; the noise of sample i has seed + i")
    precision: Arithmetic | None = Field(
        None, description="type of weights and latents; default: fp16 on a GPU, else fp32"
    )
    verify: bool | None = Field(
        None,
        description="compare every sample bit by bit with single-process diffusers; default: true for small models",
    )
    inject: str | None = Field(
        None, description="fault to inject, for tests of the pipeline: KIND,rank=R,sample=S[,seconds=T]"
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
