"""The settings of each command, as one frozen model with every field described.

A field of type `X | Open` is chosen for the model and the device before anything runs (see `defaults.py`). It can be
None in `TrainSettings`, but not in `CompletedTrainSettings`, which everything that runs takes.
"""

import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Never, Self

from pydantic import BeforeValidator, Field, model_validator

from gpubench.registry import PROGRAM, PROGRAM_MEMORY, PROGRAM_PROFILE
from gpubench.settings.field import (
    AS_THE_PROGRAM,
    Conflict,
    FromOutside,
    Open,
    Section,
    fields,
    of_program,
    protocol,
    scale,
    setting,
    treatment,
    uncompared,
    untaken,
    workload,
)
from gpubench.settings.options import MEASUREMENT, MODEL, OUTPUT, YOUR_PROGRAM, Option
from gpubench.settings.sections import (
    CompileMode,
    DataSettings,
    DeviceMemory,
    DistributedSettings,
    FolderName,
    FollowSettings,
    HasWarmup,
    LoggingSettings,
    MatmulPrecision,
    MeasurementSettings,
    Mebibytes,
    ModelSettings,
    Natural,
    PerformanceSettings,
    Positive,
    ProcessSettings,
    ProfilingSettings,
    RankSettings,
    RepeatSettings,
    Seconds,
    Threads,
    TrainingSettings,
    device_memory,
    repeats,
    warmup_steps,
)


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def _refuse_mps(device: Any) -> Any:
    if device == "mps":
        raise ValueError("no timing events exist for MPS, and PyTorch's profiler does not record it; use cpu")
    return device


def experiment_named(default: str) -> Any:
    """Returns the field of the folder that groups runs, which a command names."""
    option = Option(OUTPUT, "NAME", found_by="experiments")
    return uncompared(default, "subdirectory of results that groups runs", option=option)


class RunSettings(Section, Generic[Open]):
    """What every command that starts workers can be asked."""

    command: ClassVar[str]
    FIXED: ClassVar[Mapping[str, Any]] = {}
    """The settings that the command has from a similar one, and the only value that it acts by."""
    experiment: FolderName
    results: Path = uncompared(Path("results"), "directory for run directories", option=Option(OUTPUT, "DIR"))
    seed: Natural
    device: Annotated[Device, BeforeValidator(_refuse_mps)] | Open = treatment(
        None,
        "device to run on; default: cuda if there is a GPU, else cpu",
        environment=("variables.CUDA_VISIBLE_DEVICES",),
        option=Option(MEASUREMENT, help="Device to run on; by default cuda if there is a GPU."),
    )
    performance: ProcessSettings[Open] = ProcessSettings()
    distributed: RankSettings = RankSettings()
    measurement: RepeatSettings = RepeatSettings()
    profiling: ProfilingSettings = ProfilingSettings()
    logging: LoggingSettings = LoggingSettings()


class Precision(StrEnum):
    """Arithmetic of the forward and backward pass; parameters and optimizer state stay fp32."""

    fp32 = "fp32"
    tf32 = "tf32"
    amp = "amp"
    bf16 = "bf16"


def _inference() -> Any:
    """Returns the field that turns a run of training into one of inference, which is other work."""
    sentence = "Measure inference instead of training: latency and throughput of forward passes."
    return workload(
        False,
        "measure inference instead of training: forward passes without gradients",
        option=Option(MEASUREMENT, help=sentence),
    )


class TrainSettings(RunSettings[Open], Generic[Open]):
    """Settings of `gpubench train-bench`."""

    command: ClassVar[str] = "train-bench"
    experiment: FolderName = experiment_named("train-bench")
    seed: Natural = treatment(
        0,
        "random seed of weights and data; each rank adds its rank number for data",
        from_outside=FromOutside(
            "torch.manual_seed({0}), random.seed({0}), numpy.random.seed({0})",
            "start",
            "type",
            "random seed of torch, random and NumPy, set before the program's own code; a seed that it sets itself "
            "remains",
        ),
    )
    precision: Precision | Open = treatment(
        None,
        "arithmetic of the forward and backward pass; default: bf16 on a GPU that supports it, amp on an "
        "older GPU, fp32 on a CPU",
        depends_on=("device",),
        option=Option(MODEL),
        from_outside=FromOutside(
            {
                "bf16": "with torch.autocast(device.type, torch.bfloat16): around the forward pass and the loss, and "
                "no GradScaler",
                "fp32": "no torch.autocast, and no GradScaler",
            },
            "model",
            "type",
            "bf16: autocast around the outermost modules, whose outputs stay fp32, and no gradient scaler; fp32: no "
            "autocast",
        ),
    )
    inference: bool = _inference()
    model: ModelSettings[Open] = ModelSettings()
    data: DataSettings[Open] = DataSettings()
    training: TrainingSettings[Open] = TrainingSettings()
    performance: PerformanceSettings[Open] = PerformanceSettings()
    distributed: DistributedSettings = DistributedSettings()
    measurement: MeasurementSettings = MeasurementSettings()

    @model_validator(mode="after")
    def _long_enough_to_profile(self) -> Self:
        training, profiling = self.training, self.profiling
        if not profiling.enabled:
            return self
        limits: tuple[str, ...] = ("training.epochs",)
        if profiling.unit == "epoch":
            if training.epochs is None:
                message = "profiling.unit=epoch counts training.epochs, which are not set: --epochs N"
                raise Conflict(message, "profiling.unit", *limits)
            units, source = training.epochs, "training.epochs"
        elif training.steps is not None:
            limits = ("training.warmup_steps", "training.steps")
            units = training.warmup + training.steps
            source = f"training.warmup_steps {training.warmup} + training.steps {training.steps}"
        else:
            return self
        if short := profiling.shortfall(units, source):
            raise Conflict(short, *limits, *profiling.SCHEDULE)
        return self


class RecordedSettings(ProfilingSettings):
    enabled: bool = uncompared(True, "record an additional repeat with torch.profiler; profile needs this")


class ProfileSettings(TrainSettings[Open], Generic[Open]):
    """Settings of `gpubench profile`: the run that train-bench would do, and one more repeat that is recorded."""

    command: ClassVar[str] = "profile"
    experiment: FolderName = experiment_named("profile")
    profiling: RecordedSettings = RecordedSettings()


class OnceSettings(MeasurementSettings):
    repeats: Positive = repeats(1)


class MemorySettings(TrainSettings[Open], Generic[Open]):
    """Settings of `gpubench memory`: the run that train-bench would do, of which a few steps are followed."""

    command: ClassVar[str] = "memory"
    FIXED: ClassVar[Mapping[str, Any]] = {
        "measurement.count_flops": False,
        "measurement.measure_peak": False,
        "logging.graph": False,
    }
    experiment: FolderName = experiment_named("memory")
    measurement: OnceSettings = OnceSettings()
    profiling: ProfilingSettings = untaken(ProfilingSettings())
    """Never: what is followed is not profiled, and no setting of it is taken."""
    memory: FollowSettings = FollowSettings()


def _words(command: Any) -> Any:
    """Accepts a command line as text or as a list of words, and returns it as text."""
    if isinstance(command, list):
        return shlex.join(map(str, command))
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{command!r} is not a command line: {error}") from None
        if not words:
            raise ValueError(
                "names no program to run: write its command after --, as in: gpubench train-bench -- python train.py"
            )
    return command


class CommandSettings(Section):
    command: Annotated[str, BeforeValidator(_words)] = treatment("", "command line of the program; no shell reads it")
    directory: Path | None = uncompared(None, "directory to run the program in; default: the current one")
    ref: str | None = treatment(None, "git commit to run the program of; default: the directory as it is")
    patience: Seconds = protocol(600.0, "seconds that the program may take until its first step")
    grace: Seconds = protocol(30.0, "seconds that the program may take to end after the last measured step")

    @property
    def words(self) -> list[str]:
        """The program and its arguments."""
        return shlex.split(self.command)


class ProgramOptimizer(Section):
    optimizer_impl: Literal["loop", "foreach", "fused"] | None = of_program(TrainingSettings, "optimizer_impl")


class ProgramTraining(ProgramOptimizer, HasWarmup):
    steps: Positive | Literal["all"] | None = protocol(
        None,
        "optimizer steps, or calls of the model in inference, measured in each repeat; all: until the program ends by "
        "itself; default: as many as fit in about a minute for all repeats",
        alias="steps",
    )
    warmup_steps: Natural | None = warmup_steps()
    samples_per_step: Positive | None = scale(
        None,
        "samples of one rank in each step; default: as many as the batches have that the program draws or gives to "
        "the model",
        alias="samples_per_step",
        option=Option(
            YOUR_PROGRAM, "N", "Samples of one rank in each step of the program, where they are counted otherwise."
        ),
        superseded_by="samples_per_step",
    )

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is not set, and follows from the time that they take."""
        return self.steps is None


class ProgramData(Section):
    workers: Natural | None = of_program(DataSettings, "workers")
    pin_memory: bool | None = of_program(DataSettings, "pin_memory")
    prefetch: Positive | None = of_program(DataSettings, "prefetch")
    persistent_workers: bool | None = treatment(
        None,
        f"keep the DataLoader workers from one epoch to the next{AS_THE_PROGRAM}",
        from_outside=FromOutside("DataLoader(..., persistent_workers={})", "loader", "same"),
    )


class ProgramArithmetic(Section):
    channels_last: bool | None = of_program(PerformanceSettings, "channels_last")
    cudnn_benchmark: bool | None = of_program(PerformanceSettings, "cudnn_benchmark")
    matmul_precision: MatmulPrecision | None = of_program(PerformanceSettings, "matmul_precision")
    sdpa: Literal["fused", "flash", "efficient", "cudnn", "math"] | None = treatment(
        None,
        "kernels that scaled_dot_product_attention may use: one of them, or math where it does not fit; fused: all"
        f"{AS_THE_PROGRAM}",
        environment=("math.sdp_flash", "math.sdp_mem_efficient", "math.sdp_cudnn", "math.sdp_math"),
        from_outside=FromOutside(
            {
                "fused": "no restriction by torch.nn.attention.sdpa_kernel or torch.backends.cuda.enable_*_sdp",
                "flash": "with torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):",
                "efficient": "with torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):",
                "cudnn": "with torch.nn.attention.sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):",
                "math": "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):",
            },
            "model",
            "rounding",
        ),
    )
    expandable_segments: bool | None = of_program(PerformanceSettings, "expandable_segments")
    cpu_threads: Threads | None = of_program(PerformanceSettings, "cpu_threads")


class ProgramPerformance(ProgramArithmetic):
    compile: bool | None = of_program(PerformanceSettings, "compile")
    compile_mode: CompileMode | None = of_program(PerformanceSettings, "compile_mode")


class ProgramDistributed(Section):
    bucket_mb: Mebibytes | None = of_program(DistributedSettings, "bucket_mb")
    gradient_as_bucket_view: bool | None = treatment(
        None,
        "let the gradients of DDP be views of its buckets, which saves a copy and its memory" + AS_THE_PROGRAM,
        training_only=True,
        from_outside=FromOutside("DistributedDataParallel(..., gradient_as_bucket_view={})", "ddp", "same"),
    )


class ProgramSettings(RunSettings[Open], Generic[Open]):
    """Settings of `gpubench train-bench -- PROGRAM`, which measures a program of the user.

    The program itself decides on its device and ranks.
    """

    command: ClassVar[str] = PROGRAM
    FIXED: ClassVar[Mapping[str, Any]] = {"logging.graph": False, "profiling.keep_compile": True}
    """Whatever a program compiles is recorded as it runs."""
    experiment: FolderName = experiment_named("program")
    program: CommandSettings = CommandSettings()
    inference: bool = _inference()
    training: ProgramTraining = ProgramTraining()
    data: ProgramData = ProgramData()
    precision: Literal["fp32", "bf16"] | None = of_program(TrainSettings, "precision")
    performance: ProgramPerformance = ProgramPerformance()  # type: ignore[assignment]  # no setting is filled in
    distributed: ProgramDistributed = ProgramDistributed()  # type: ignore[assignment]
    seed: Natural | None = of_program(TrainSettings, "seed")  # type: ignore[assignment]  # no setting is filled in
    device: Device | Open = untaken(None)

    @model_validator(mode="after")
    def _counts_steps(self) -> Self:
        if self.profiling.enabled and self.profiling.unit == "epoch":
            raise Conflict("profiling.unit=epoch: the epochs of a program are not known", "profiling.unit")
        return self


class ProgramProfileSettings(ProgramSettings[Open], Generic[Open]):
    """Settings of `gpubench profile -- PROGRAM`: the run that train-bench would do, and one more that is recorded."""

    command: ClassVar[str] = PROGRAM_PROFILE
    experiment: FolderName = experiment_named("profile")
    profiling: RecordedSettings = RecordedSettings()


def from_outside() -> dict[str, FromOutside]:
    """Returns how each setting that the probe changes in a program does it, by dot-key."""
    declared = {key: setting(field).from_outside for key, field in fields(ProgramSettings).items()}
    return {key: outside for key, outside in declared.items() if outside}


class ProgramFollowSettings(Section):
    """What `gpubench memory -- PROGRAM` looks at."""

    steps: Annotated[int, Field(ge=1, le=1000)] = protocol(
        5,
        "optimizer steps to record; the first one allocates the optimizer state, the last one is reported as the "
        "steady step, and what grows from step to step is seen from five on",
        alias="steps",
    )
    device_memory: DeviceMemory | None = device_memory()


class OnceMeasured(RepeatSettings):
    repeats: Positive = repeats(1)


class ProgramMemorySettings(ProgramSettings[Open], Generic[Open]):
    """Settings of `gpubench memory -- PROGRAM`, which follows the memory of a program of the user."""

    command: ClassVar[str] = PROGRAM_MEMORY
    FIXED: ClassVar[Mapping[str, Any]] = {"logging.graph": False}
    experiment: FolderName = experiment_named("memory")
    training: ProgramOptimizer = ProgramOptimizer()  # type: ignore[assignment]  # no step is timed
    performance: ProgramArithmetic = ProgramArithmetic()  # type: ignore[assignment]  # nothing is compiled
    measurement: OnceMeasured = OnceMeasured()
    memory: ProgramFollowSettings = ProgramFollowSettings()
    inference: bool = untaken(False)
    profiling: ProfilingSettings = untaken(ProfilingSettings())


CompletedSettings = RunSettings[Never]
CompletedTrainSettings = TrainSettings[Never]
CompletedMemorySettings = MemorySettings[Never]
CompletedProgramSettings = ProgramSettings[Never]
CompletedProgramMemorySettings = ProgramMemorySettings[Never]
