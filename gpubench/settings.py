"""What a run can be asked to do: one frozen model per command, every field with its meaning and unit.

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
        description="built-in name, module:callable, or folder with config.json; default: ResNet sized for the device",
    )
    activation_checkpointing: Annotated[bool | Positive | str, BeforeValidator(_blocks)] = Field(
        False,
        description="recompute activations in the backward pass instead of keeping them: of all blocks, of every k-th "
        "(2), or of modules by name (layers.*.mlp,layers.0)",
    )


class DataSettings(Section):
    source: str = Field("synthetic", description="synthetic | synthetic-host | image-folder | text | module:callable")
    path: Path | None = Field(None, description="file or folder that image-folder and text read")
    samples: Positive = Field(10_000, description="samples in one epoch of synthetic data")
    image_size: Positive | None = Field(
        None, description="height and width of an image in pixels; default: the model's own"
    )
    sequence_length: Positive | None = Field(None, description="tokens in a sequence; default: the model's own")
    tokenizer: Path | None = Field(
        None, description="folder of a local tokenizer for text; default: one token per byte"
    )
    workers: Natural | None = Field(
        None, description="DataLoader worker processes per rank; default: 0 on CPU, up to 8 on a GPU"
    )
    pin_memory: bool | None = Field(None, description="stage batches in page-locked memory; default: on a GPU")
    prefetch: Positive = Field(2, description="batches each DataLoader worker keeps ready")


class TrainingSettings(Section):
    batch_size: Positive | None = Field(None, description="samples per rank and forward pass; default: the model's own")
    grad_accumulation: Positive = Field(1, description="forward and backward passes per optimizer step")
    steps: Positive | None = Field(
        None, description="steps measured in each repeat; default 50 unless epochs or seconds is set"
    )
    epochs: Positive | None = Field(None, description="stop after this many passes over the data instead")
    seconds: Seconds | None = Field(None, description="stop after about this many measured seconds instead")
    warmup_steps: Natural = Field(
        10, description="steps left out at the start of each repeat, at the least; the steady window may begin later"
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("adamw", description="torch.optim optimizer")
    optimizer_impl: Literal["auto", "loop", "foreach", "fused"] = Field(
        "auto", description="how the optimizer visits parameters; auto: fused on a GPU, PyTorch's own choice on CPU"
    )
    read_loss: bool = Field(
        False, description="read the loss after every step, as loops do that log it; the host waits for the device"
    )
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(1e-3, description="step size")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of sgd")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(0.0, description="weight decay")

    @model_validator(mode="after")
    def _one_stop(self) -> Self:
        given = [name for name in ("steps", "epochs", "seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"training.{' and training.'.join(given)} both say when to stop; set one of them to null")
        return self


class ProcessSettings(Section):
    cpu_threads: Threads | None = Field(None, description="threads of each CPU worker; default: physical cores / ranks")
    omp_wait_policy: Literal["PASSIVE", "ACTIVE"] = Field(
        "PASSIVE", description="what idle OpenMP threads do; ACTIVE spins and can starve a small machine"
    )
    expandable_segments: bool = Field(
        False, description="let the CUDA allocator's segments grow instead of taking new ones: less fragmentation"
    )


class PerformanceSettings(ProcessSettings):
    channels_last: bool | None = Field(
        None, description="NHWC memory format for convolutional models; default: on a GPU"
    )
    compile: bool = Field(False, description="torch.compile the model")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="torch.compile mode"
    )
    cudnn_benchmark: bool = Field(True, description="let cuDNN time its algorithms and keep the fastest")
    matmul_precision: Literal["highest", "high", "medium"] | None = Field(
        None, description="torch.set_float32_matmul_precision; default: highest for fp32, high otherwise"
    )


class RankSettings(Section):
    world_size: Positive = Field(1, description="ranks, one process each")
    backend: Literal["nccl", "gloo"] | None = Field(
        None, description="communication library; default: nccl on GPUs, gloo on CPU"
    )


class DistributedSettings(RankSettings):
    strategy: Literal["ddp", "fsdp2"] = Field("ddp", description="how more than one rank shares the work")
    sync_gradients: Literal["last", "each"] = Field(
        "last", description="all-reduce after the last of the accumulated passes, or after each (fsdp2: less memory)"
    )
    bucket_mb: Annotated[float, Field(gt=0, le=1e6)] = Field(25.0, description="DDP gradient bucket in MiB")
    timeout: Seconds = Field(300.0, description="seconds a collective may take before the run fails")


class RepeatSettings(Section):
    repeats: Positive = Field(3, description="fresh processes that repeat the measurement")
    target_precision: Annotated[Fraction, BeforeValidator(_fraction)] | None = Field(
        None, description="repeat until the throughput's 95 % interval is within this fraction of it (0.01 or 1%)"
    )
    max_repeats: Positive = Field(20, description="cap for target_precision")
    telemetry_interval: Annotated[float, Field(ge=0.02, le=60)] = Field(
        0.2, description="seconds between hardware samples"
    )
    stall_timeout: Seconds = Field(
        600.0, description="seconds a rank may make no progress before it is named and the run ends"
    )


class MeasurementSettings(RepeatSettings):
    count_flops: bool = Field(True, description="count the model's floating-point operations after the timed steps")
    measure_peak: bool = Field(False, description="time a large matrix product as an attainable ceiling")


class ProfilingSettings(Section):
    """A repeat of its own, after those that are measured: recording slows the program down."""

    enabled: bool = Field(False, description="record one more repeat with torch.profiler, and name the bottleneck")
    unit: Literal["step", "epoch"] = Field("step", description="what wait, warmup and active count")
    wait: Natural = Field(3, description="units before the first cycle")
    warmup: Natural = Field(1, description="units of each cycle that the profiler runs and drops")
    active: Positive = Field(3, description="units of each cycle that are recorded")
    repeat: Natural = Field(1, description="cycles after the first, each with a trace file of its own")
    record_shapes: bool = Field(True, description="shapes, types and strides of every operator's inputs")
    profile_memory: bool = Field(False, description="every allocation")
    with_stack: bool = Field(False, description="the Python stack, for file:line; slows the host further")
    modules: bool = Field(True, description="call each module of the model by its path")
    all_ranks: bool = Field(False, description="record every rank, not only rank 0")
    keep_compile: bool = Field(False, description="record the compiled model, which hides its operators")
    compress: bool = Field(True, description="write traces as .json.gz, about a tenth of the size; false: as .json")

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
        3, description="optimizer steps to follow; the first makes the optimizer's state, the last stands for the rest"
    )
    predict: bool = Field(False, description="predict for a GPU, without one")
    device_model: str | None = Field(None, description="GPU to predict for, as h200; default: the one that is here")
    device_memory: Annotated[int, Field(ge=2**20, le=2**60), BeforeValidator(_bytes)] | None = Field(
        None, description="memory to fit into, in bytes or as 80GiB; default: the device's own"
    )
    spare: Annotated[float, Field(ge=0, lt=1), BeforeValidator(_fraction)] = Field(
        0.05, description="share of the memory that the largest batch leaves free (0.05 or 5%)"
    )
    find_batch_size: bool = Field(False, description="find the largest batch that fits")
    advise: bool = Field(True, description="propose what would save memory, and predict how much")
    explain: bool = Field(False, description="predict again without each correction, for what it adds")


class LoggingSettings(Section):
    level: Literal["NOTIMPORTANT", "DEBUG", "INFO", "MODIFIABLE", "WARNING", "ERROR", "CRITICAL"] = Field(
        "DEBUG", description="least level that reaches run.log"
    )
    graph: bool = Field(True, description="write the model graph to TensorBoard where it can be traced")
    wandb: bool = Field(False, description="also log to Weights & Biases (pip install 'gpubench[wandb]')")
    wandb_project: str = Field("gpubench", description="Weights & Biases project")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline keeps everything in the run directory"
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
    results: Path = Field(Path("results"), description="where run directories are written")
    seed: Natural
    device: Annotated[Device, BeforeValidator(_refuse_mps)] | None = Field(
        None, description="cpu or cuda; default: cuda where there is a GPU"
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

    experiment: FolderName = Field("train-bench", description="folder under results that groups the runs")
    seed: Natural = Field(0, description="seed of weights and data; each rank adds its rank for data")
    precision: Precision | None = Field(
        None, description="fp32 | tf32 | amp | bf16; default: bf16 on a GPU that has it, else fp32"
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
    enabled: bool = Field(True, description="what gpubench profile is for")


class ProfileSettings(TrainSettings):
    """Settings of `gpubench profile`: the run that train-bench would do, and one more repeat that is recorded."""

    experiment: FolderName = Field("profile", description="folder under results that groups the runs")
    profiling: RecordedSettings = RecordedSettings()


class OnceSettings(MeasurementSettings):
    repeats: Positive = Field(1, description="fresh processes that repeat the measurement")


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

    experiment: FolderName = Field("memory", description="folder under results that groups the runs")
    measurement: OnceSettings = OnceSettings()
    profiling: ProfilingSettings = Field(ProfilingSettings(), exclude=True)
    """Never: what is followed is not profiled, and no setting of it is taken."""
    memory: FollowSettings = FollowSettings()
