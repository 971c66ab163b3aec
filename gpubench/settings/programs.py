"""The settings of the commands that run a program of the user; those that change it are what the probe can set."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Never, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpubench.registry import LOADER, PROGRAM, PROGRAM_MEMORY, PROGRAM_PROFILE
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
)
from gpubench.settings.keys import PATCH, REF
from gpubench.settings.options import MEASUREMENT, YOUR_PROGRAM, Option
from gpubench.settings.schema import (
    Device,
    RecordedSettings,
    RunSettings,
    TrainSettings,
    experiment_named,
    inference_instead,
)
from gpubench.settings.sections import (
    CompileMode,
    DataSettings,
    DeviceMemory,
    DistributedSettings,
    FolderName,
    HasWarmup,
    MatmulPrecision,
    Mebibytes,
    Natural,
    PerformanceSettings,
    Positive,
    ProfilingSettings,
    RepeatSettings,
    Seconds,
    Threads,
    TrainingSettings,
    device_memory,
    repeats,
    warmup_steps,
)

LONGEST_PATTERN = 1000


def _words(command: Any) -> Any:
    """Accepts a command line as text or as a list of words, and makes it text."""
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


def _pattern(text: str | None) -> str | None:
    """Returns a regular expression with a group. Raises ValueError for any other text."""
    if text is None:
        return None
    try:
        groups = re.compile(text).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if not groups:
        raise ValueError(f"{text!r} has no group: put the number in parentheses, as in 'val_loss=([0-9.]+)'")
    return text


class CommandSettings(Section):
    command: Annotated[str, BeforeValidator(_words)] = treatment("", "command line of the program; no shell reads it")
    directory: Path | None = uncompared(None, "directory to run the program in; default: the current one")
    ref: str | None = treatment(
        None, "git commit to run the program of; default: the directory as it is", stays_inside=True
    )
    patch: Path | None = treatment(
        None, "patch made by gpubench, to run a temporary copy of the program with; default: the directory as it is"
    )
    watch: Annotated[str | None, Field(max_length=LONGEST_PATTERN), AfterValidator(_pattern)] = uncompared(
        None,
        "regular expression with a group, a number in what the program prints, which comparisons judge as a loss",
        alias="watch",
        stays_inside=True,
        option=Option(
            YOUR_PROGRAM, "REGEX", "Judge a number too that the program prints, such as 'val_loss=([0-9.]+)'."
        ),
    )
    patience: Seconds = protocol(600.0, "seconds that the program may take until its first step")
    grace: Seconds = protocol(30.0, "seconds that the program may take to end after the last measured step")

    @model_validator(mode="after")
    def _is_one_version(self) -> Self:
        if self.ref is not None and self.patch is not None:
            raise Conflict("program.ref and program.patch are different versions: give one of them", PATCH, REF)
        return self

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


class CachedData(ProgramData):
    cached: bool | None = treatment(
        None,
        "keep the first batches of training and give them again, so that data is always ready; the losses mean nothing",
        training_only=True,
        from_outside=FromOutside("batches that are kept in memory", "loader", "data"),
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
    inference: bool = inference_instead()
    training: ProgramTraining = ProgramTraining()
    data: CachedData = CachedData()
    precision: Literal["fp32", "bf16"] | None = of_program(TrainSettings, "precision")
    performance: ProgramPerformance = ProgramPerformance()  # type: ignore[assignment]  # no setting is filled in
    distributed: ProgramDistributed = ProgramDistributed()  # type: ignore[assignment]
    seed: Natural | None = of_program(TrainSettings, "seed")  # type: ignore[assignment]  # no setting is filled in
    device: Device | Open = untaken(None)

    @model_validator(mode="after")
    def _counts_steps(self) -> Self:
        if self.profiling.enabled and getattr(self.profiling, "unit", None) == "epoch":  # that of a loader has none
            raise Conflict("profiling.unit=epoch: the epochs of a program are not known", "profiling.unit")
        return self


class ProgramProfileSettings(ProgramSettings[Open], Generic[Open]):
    """Settings of `gpubench profile -- PROGRAM`: the run that train-bench would do, and one more that is recorded."""

    command: ClassVar[str] = PROGRAM_PROFILE
    experiment: FolderName = experiment_named("profile")
    profiling: RecordedSettings = RecordedSettings()


def from_outside() -> dict[str, FromOutside]:
    """How the probe changes each setting that it can change in a program, by dot-key."""
    declared = {key: setting(field).from_outside for key, field in fields(ProgramSettings).items()}
    return {key: outside for key, outside in declared.items() if outside}


class ProgramFollowSettings(Section):
    """What `gpubench memory -- PROGRAM` records."""

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


class LoaderBatches(HasWarmup):
    steps: Positive | None = protocol(
        None,
        "batches that are drawn in each repeat; default: as many as fit in about a minute for all repeats",
        alias="steps",
        option=Option(MEASUREMENT, "N", "Batches drawn in each repeat."),
    )
    warmup_steps: Natural | None = warmup_steps()

    @property
    def is_open(self) -> bool:
        """Whether the number of batches is not set, and follows from the time that they take."""
        return self.steps is None


class LoaderRecording(Section):
    enabled: bool = uncompared(True, "sample the code in an additional repeat, and make slow samples again")


class LoaderSettings(ProgramSettings[Open], Generic[Open]):
    """Settings of `gpubench loader -- PROGRAM`, which draws the batches of a program without its training."""

    command: ClassVar[str] = LOADER
    FIXED: ClassVar[Mapping[str, Any]] = {"logging.graph": False}
    experiment: FolderName = experiment_named("loader")
    training: LoaderBatches = LoaderBatches()  # type: ignore[assignment]  # nothing is trained
    data: ProgramData = ProgramData()  # type: ignore[assignment]  # nothing is cached
    profiling: LoaderRecording = LoaderRecording()  # type: ignore[assignment]  # torch.profiler records nothing
    inference: bool = untaken(False)
    precision: Literal["fp32", "bf16"] | None = untaken(None)


CompletedProgramSettings = ProgramSettings[Never]
CompletedLoaderSettings = LoaderSettings[Never]
CompletedProgramMemorySettings = ProgramMemorySettings[Never]
