"""The groups of settings that commands share, and the types of their values.

Durations are seconds and sizes bytes, unless a name says otherwise.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from gpubench.probe.length import MOST_WARMUP
from gpubench.settings.field import (
    Conflict,
    FromOutside,
    Open,
    Section,
    protocol,
    scale,
    treatment,
    uncompared,
    workload,
)
from gpubench.settings.keys import COMMAND, PATCH, REF
from gpubench.settings.options import MEASUREMENT, MODEL, Option

Positive = Annotated[int, Field(ge=1, lt=2**63)]  # what msgspec can send and torch can seed with
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Mebibytes = Annotated[float, Field(gt=0, le=1e6)]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MatmulPrecision = Literal["highest", "high", "medium"]
TUNED = ("treatment", "scale")
"""The roles of the settings that a search can try."""
NOT_TUNED = ("seed", "device", "distributed.world_size", COMMAND, REF, PATCH)
"""Settings of these roles that are part of what is tuned."""
MOST_OF_A_NAME = 120
"""Bytes of a folder's name: every file system takes as many."""


def _short(name: str) -> str:
    if (size := len(name.encode())) > MOST_OF_A_NAME:
        raise ValueError(f"{name!r} takes {size} bytes, and a folder's name at most {MOST_OF_A_NAME} here")
    return name


FolderName = Annotated[str, StringConstraints(pattern=r"^[^./\\\x00-\x1f][^/\\\x00-\x1f]*$"), AfterValidator(_short)]


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40
}  # fmt: skip


LEAST_OF_A_SIZE = 2**20
"""Bytes below which a number without a unit is not what was meant."""


def size_in_bytes(value: Any) -> Any:
    """Converts a size such as "80GiB" to bytes, and returns what is neither a text nor a number as it is.

    Raises ValueError, also for a number without a unit that is so small that another unit was meant.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
    number, unit = match.groups() if match else ("", "")
    if number and not unit and 0 < float(number) < LEAST_OF_A_SIZE:
        raise ValueError(f"{value!r} has no unit: did you mean {number}GiB?")
    if number and unit.casefold() in UNITS:
        return int(float(number) * UNITS[unit.casefold()])
    if number and (prefix := unit[:1].upper()) in ("K", "M", "G", "T"):
        raise ValueError(f"{value!r} is not a size: did you mean {number}{prefix}iB?")
    raise ValueError(f"{value!r} is not a size: write 80GiB, 80GB or bytes")


def fraction(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value.removesuffix("%"))
    except ValueError:
        raise ValueError(f"{value!r} is not a fraction: write 0.05 or 5%") from None
    if value.endswith("%"):
        return number / 100
    if number >= 1:
        raise ValueError(f"{value!r} is a fraction: did you mean {value}%?")
    return number


_WORDS = dict.fromkeys(("true", "yes", "on", "y", "t"), True) | dict.fromkeys(("false", "no", "off", "n", "f"), False)
_NAMES = re.compile(r"[\w*?\[\]!.-]+(\s*,\s*[\w*?\[\]!.-]+)*")


def _blocks(value: Any) -> Any:
    """The modules to checkpoint: all, none, the k of every k-th block, or patterns separated by commas."""
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


def _scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number, and the JSON in which workers get it has no other")
    if isinstance(value, bool | int | float | str | None) and not (isinstance(value, int) and abs(value) >= 2**63):
        return value
    raise ValueError(f"{value!r} is not a number, true, false, null or a text")


class ModelSettings(Section, Generic[Open]):
    name: str | Open = workload(
        None,
        "built-in model, module:callable, or folder with config.json; default: a ResNet sized for the device",
        depends_on=("device",),
        alias="model",
        option=Option(MODEL, "NAME", found_by="built_in_models"),
    )
    arguments: dict[str, Annotated[Any, AfterValidator(_scalar)]] = workload(
        {}, "arguments of module:callable, by name: numbers, true, false, null or texts (model.arguments.NAME=VALUE)"
    )
    activation_checkpointing: Annotated[bool | Positive | str, BeforeValidator(_blocks)] = treatment(
        False,
        "recompute activations in the backward pass instead of storing them: true for all blocks, k for "
        "every k-th block, or module names (layers.*.mlp,layers.0)",
        training_only=True,
    )


class DataSettings(Section, Generic[Open]):
    source: str = workload(
        "synthetic",
        "source: synthetic, synthetic-host, image-folder, text or module:callable",
        alias="data",
        option=Option(MODEL, "SOURCE"),
    )
    path: Path | None = workload(None, "file or folder to read, for image-folder and text")
    samples: Positive = protocol(10_000, "samples in one epoch of synthetic data")
    image_size: Positive | None = workload(
        None,
        "image height and width in pixels; default: the model's own",
        depends_on=("device",),
        superseded_by="sample_shape",
    )
    sequence_length: Positive | None = workload(
        None, "tokens in a sequence; default: the model's own", superseded_by="sample_shape"
    )
    tokenizer: Path | None = workload(None, "folder of a local tokenizer, for text; default: one token per byte")
    workers: Natural | Open = treatment(
        None,
        "DataLoader worker processes per rank; default: 0 on CPU, up to 8 on a GPU",
        depends_on=("device", "data.source", "distributed.world_size"),
        from_outside=FromOutside(
            "DataLoader(..., num_workers={})",
            "loader",
            "same",
            "worker processes of every DataLoader of a map-style dataset, per rank",
        ),
    )
    pin_memory: bool | Open = treatment(
        None,
        "copy batches to page-locked memory first; default: true on a GPU",
        depends_on=("device",),
        from_outside=FromOutside(
            "DataLoader(..., pin_memory={})", "loader", "same", "copy batches to page-locked memory first, with a GPU"
        ),
    )
    prefetch: Positive = treatment(
        2,
        "batches that each DataLoader worker loads ahead",
        idle_with={"data.workers": (0,)},
        from_outside=FromOutside("DataLoader(..., prefetch_factor={})", "loader", "same"),
    )


def warmup_steps() -> Any:
    return protocol(
        None,
        "minimum number of steps excluded at the start of each repeat; the steady window may begin later; default: 10, "
        "or fewer if steps are slow and their number is not set",
    )


class HasWarmup(Section):
    """Settings of steps of which the first ones are a warm-up."""

    @property
    def warmup(self) -> int:
        """The number of warm-up steps if the number of steps is set."""
        given: int | None = self.warmup_steps  # type: ignore[attr-defined]
        return MOST_WARMUP if given is None else given


class TrainingSettings(HasWarmup, Generic[Open]):
    batch_size: Positive | Open = scale(
        None,
        "samples per rank and forward pass; default: the model's own",
        depends_on=("model.name", "device"),
        alias="batch_size",
        option=Option(MODEL, "N", several="; several sizes are measured in one table"),
    )
    grad_accumulation: Positive = scale(1, "forward and backward passes per optimizer step", training_only=True)
    steps: Positive | None = protocol(
        None,
        "optimizer steps, or forward passes of inference, measured in each repeat; default: as many as fit in about a "
        "minute for all repeats, unless epochs or seconds is set",
        alias="steps",
        option=Option(MEASUREMENT, "N", "Steps measured in each repeat."),
    )
    epochs: Positive | None = protocol(
        None, "measure this many passes over the data instead of a number of steps", alias="epochs"
    )
    seconds: Seconds | None = protocol(
        None, "measure for about this many seconds instead of a number of steps", alias="seconds"
    )
    warmup_steps: Natural | None = warmup_steps()
    optimizer: Literal["sgd", "adam", "adamw"] = workload("adamw", "torch.optim optimizer", training_only=True)
    optimizer_impl: Literal["auto", "loop", "foreach", "fused"] = treatment(
        "auto",
        "optimizer implementation; auto: fused on a GPU, PyTorch's default on a CPU",
        training_only=True,
        from_outside=FromOutside(
            {impl: f"torch.optim.<Optimizer>(..., {impl}=True)" for impl in ("fused", "foreach")}
            | {"loop": "torch.optim.<Optimizer>(..., foreach=False)"},
            "optimizer",
            "rounding",
            "implementation of PyTorch's Adam, AdamW, SGD and Adagrad",
        ),
    )
    read_loss: bool = treatment(
        False,
        "read the loss after every step, as a loop that logs it does; makes the CPU wait for the device",
        training_only=True,
    )
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = treatment(
        1e-3, "learning rate", training_only=True
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = treatment(
        0.9, "momentum, for sgd", training_only=True, idle_with={"training.optimizer": ("adam", "adamw")}
    )
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = treatment(
        0.0, "weight decay", training_only=True
    )
    clip_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = treatment(
        None,
        "largest norm of all gradients together; larger ones are scaled down to it before the update",
        training_only=True,
    )

    @model_validator(mode="after")
    def _one_stop(self) -> Self:
        given = [name for name in ("steps", "epochs", "seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            keys = [f"training.{name}" for name in given]
            raise Conflict(f"{' and '.join(keys)} both say when to stop; set one of them to null", *keys)
        return self

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is not set, and follows from the time that they take."""
        return self.steps is self.epochs is self.seconds is None


class ProcessSettings(Section, Generic[Open]):
    cpu_threads: Threads | Open = treatment(
        None,
        "CPU threads of each rank; default: physical cores / ranks",
        depends_on=("distributed.world_size",),
        environment=("threads.intra_op", "variables.OMP_NUM_THREADS", "variables.MKL_NUM_THREADS"),
        from_outside=FromOutside("torch.set_num_threads({})", "start", "rounding"),
    )
    omp_wait_policy: Literal["PASSIVE", "ACTIVE"] = treatment(
        "PASSIVE",
        "what idle OpenMP threads do: PASSIVE sleeps, ACTIVE spins and takes CPU time from other threads",
        environment=("variables.OMP_WAIT_POLICY",),
    )
    expandable_segments: bool = treatment(
        False,
        "use expandable segments in the CUDA caching allocator, which reduces fragmentation",
        environment=("variables.PYTORCH_ALLOC_CONF", "variables.PYTORCH_CUDA_ALLOC_CONF"),
        from_outside=FromOutside("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{} in the environment", "start", "same"),
    )


class PerformanceSettings(ProcessSettings[Open], Generic[Open]):
    channels_last: bool | Open = treatment(
        None,
        "NHWC memory format for convolutional models; default: true on a GPU",
        depends_on=("device", "model.name", "distributed.strategy"),
        from_outside=FromOutside(
            {
                True: "model.to(memory_format=torch.channels_last), batch.to(memory_format=torch.channels_last)",
                False: "model.to(memory_format=torch.contiguous_format), batch.contiguous()",
            },
            "model",
            "rounding",
            "NHWC memory format of the 4-D weights, and of the 4-D inputs of the outermost modules",
        ),
    )
    compile: bool = treatment(
        False,
        "torch.compile the model",
        from_outside=FromOutside(
            {True: "model = torch.compile(model)", False: "no torch.compile"},
            "model",
            "rounding",
            "torch.compile the outermost modules, or with false nothing",
        ),
    )
    compile_mode: CompileMode = treatment(
        "default",
        "torch.compile mode",
        idle_with={"performance.compile": (False,)},
        from_outside=FromOutside("model = torch.compile(model, mode={!r})", "model", "rounding"),
    )
    cudnn_benchmark: bool = treatment(
        True,
        "let cuDNN time its algorithms and use the fastest",
        environment=("math.cudnn_benchmark",),
        from_outside=FromOutside("torch.backends.cudnn.benchmark = {}", "start", "rounding"),
    )
    matmul_precision: MatmulPrecision | None = treatment(
        None,
        "value for torch.set_float32_matmul_precision; default: highest for fp32, else high",
        depends_on=("precision",),
        environment=("math.float32_matmul_precision", "math.matmul_allow_tf32", "math.cudnn_allow_tf32"),
        from_outside=FromOutside("torch.set_float32_matmul_precision({!r})", "start", "type"),
    )


class RankSettings(Section):
    world_size: Positive = scale(
        1,
        "number of ranks; each is one process",
        environment=("variables.GLOO_SOCKET_IFNAME", "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        alias="world_size",
        option=Option(MEASUREMENT, "N", several=". Several numbers are measured in one table"),
    )
    backend: Literal["nccl", "gloo"] | None = treatment(
        None,
        "communication library; default: nccl on GPUs, gloo on CPUs and where ranks share a GPU",
        depends_on=("device",),
    )
    """None in complete settings means that the ranks decide, as the command line does not see the GPUs of all."""


class DistributedSettings(RankSettings):
    strategy: Literal["ddp", "fsdp2"] = treatment(
        "ddp", "how several ranks train together: DistributedDataParallel or FSDP2", training_only=True
    )
    sync_gradients: Literal["last", "each"] = treatment(
        "last",
        "reduce gradients after the last accumulated pass, or after each one (which saves memory with fsdp2)",
        training_only=True,
        idle_with={"training.grad_accumulation": (1,), "distributed.world_size": (1,)},
    )
    bucket_mb: Mebibytes = treatment(
        25.0,
        "size of a DDP gradient bucket in MiB",
        training_only=True,
        idle_with={"distributed.world_size": (1,), "distributed.strategy": ("fsdp2",)},
        from_outside=FromOutside("DistributedDataParallel(..., bucket_cap_mb={})", "ddp", "rounding"),
    )
    separate_reduce_scatter: bool = treatment(
        False,
        "fsdp2: use a separate communicator for the reduce-scatter of gradients, so that it can overlap "
        "with the all-gather of parameters; needs PyTorch 2.13",
        training_only=True,
    )
    timeout: Seconds = protocol(300.0, "timeout of a collective after the warm-up, in seconds")


def repeats(default: int) -> Any:
    return protocol(
        default,
        "number of repeats of the measurement, each in fresh processes",
        alias="repeats",
        option=Option(MEASUREMENT, "N"),
    )


class RepeatSettings(Section):
    repeats: Positive = repeats(3)
    target_precision: Annotated[Fraction, BeforeValidator(fraction)] | None = protocol(
        None,
        "repeat until the 95 % interval of the throughput is within this fraction of it (0.01 or 1%)",
        alias="target_precision",
        option=Option(
            MEASUREMENT,
            "P%",
            "Repeat until the 95 % interval of the throughput is within P % of it, in place of --repeats.",
        ),
    )
    max_repeats: Positive = protocol(
        20, "maximum number of repeats with target_precision", idle_with={"measurement.target_precision": (None,)}
    )
    telemetry_interval: Annotated[float, Field(ge=0.02, le=60)] = protocol(
        0.2, "seconds between two samples of hardware telemetry"
    )
    stall_timeout: Seconds = protocol(
        600.0, "seconds without progress of a rank after which the run fails and names that rank"
    )


class MeasurementSettings(RepeatSettings):
    count_flops: bool = protocol(True, "count the floating-point operations of a step, after the timed steps")
    measure_peak: bool = protocol(
        False,
        "time a large matrix product, as an upper limit of the attainable FLOP/s",
        alias="measure_peak",
        option=Option(MEASUREMENT, help="Also measure the attainable FLOP/s, with a large matrix product."),
    )


class ProfilingSettings(Section):
    """The recording has a repeat of its own after those that are measured, because it slows the program down."""

    SCHEDULE: ClassVar[tuple[str, ...]] = ("profiling.wait", "profiling.warmup", "profiling.active", "profiling.repeat")
    """The settings that decide how long the schedule is."""

    enabled: bool = uncompared(False, "record an additional repeat with torch.profiler and diagnose the bottleneck")
    unit: Literal["step", "epoch"] = uncompared("step", "unit of wait, warmup and active")
    wait: Natural = uncompared(3, "units before the first cycle")
    warmup: Natural = uncompared(1, "units at the start of each cycle that are profiled and discarded")
    active: Positive = uncompared(3, "units of each cycle that are recorded")
    repeat: Natural = uncompared(1, "additional cycles after the first; each cycle writes its own trace file")
    record_shapes: bool = uncompared(True, "record shapes, types and strides of the inputs of every operator")
    profile_memory: bool = uncompared(False, "record every allocation")
    with_stack: bool = uncompared(False, "record Python stacks, which give file and line; slows the program further")
    modules: bool = uncompared(True, "record the path of each module of the model")
    all_ranks: bool = uncompared(False, "record every rank instead of rank 0 only")
    keep_compile: bool = uncompared(
        False,
        "profile the compiled model, in which single operators are not visible",
        idle_with={"performance.compile": (False,)},
    )
    compress: bool = uncompared(True, "write traces as .json.gz, about a tenth of the size of .json")

    @property
    def units(self) -> int:
        """Steps or epochs that the schedule takes."""
        return self.wait + (self.warmup + self.active) * (self.repeat + 1)

    def shortfall(self, units: int, source: str) -> str | None:
        """Why a run of `units`, which come from `source`, is too short for the schedule; None if it is long enough."""
        if units >= self.units:
            return None
        needed = f"wait {self.wait} + (warmup {self.warmup} + active {self.active}) x (repeat {self.repeat} + 1)"
        return (
            f"profiling takes {needed} = {self.units} {self.unit}s, and the run has {units} ({source}): "
            f"{self.units - units} more are needed, or less of profiling.wait, profiling.warmup, profiling.active and "
            "profiling.repeat"
        )


DeviceMemory = Annotated[int, Field(ge=2**20, le=2**60), BeforeValidator(size_in_bytes)]


def device_memory() -> Any:
    return treatment(
        None,
        "memory that the model has to fit into, in bytes or as 80GiB; default: the memory of the device",
        alias="device_memory",
        option=Option(MEASUREMENT, "SIZE", "Memory to fit into, such as 80GiB."),
    )


class LoggingSettings(Section):
    level: Literal["NOTIMPORTANT", "DEBUG", "INFO", "MODIFIABLE", "WARNING", "ERROR", "CRITICAL"] = uncompared(
        "DEBUG", "lowest level that is written to run.log, which has errors and what workers print in any case"
    )
    graph: bool = uncompared(True, "write the model graph to TensorBoard if it can be traced")
    wandb: bool = uncompared(False, "also log to Weights & Biases (needs the package wandb)", stays_inside=False)
    wandb_project: str = uncompared("gpubench", "Weights & Biases project", idle_with={"logging.wandb": (False,)})
    wandb_mode: Literal["online", "offline"] = uncompared(
        "online",
        "online uploads; offline writes to the run directory only",
        idle_with={"logging.wandb": (False,)},
        stays_inside=False,
    )
