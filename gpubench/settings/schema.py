"""The settings of all commands that make runs, and those of train-bench and profile, as frozen models.

A field of type `X | Open` is chosen for the model and the device before anything runs (see `defaults.py`). It can be
None in `TrainSettings`, but not in `CompletedTrainSettings`, which everything that runs takes.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Never, Self

from pydantic import BeforeValidator, model_validator

from gpubench.settings.field import Conflict, FromOutside, Open, Section, treatment, uncompared, workload
from gpubench.settings.options import MEASUREMENT, MODEL, OUTPUT, Option
from gpubench.settings.sections import (
    DataSettings,
    DistributedSettings,
    FolderName,
    LoggingSettings,
    MeasurementSettings,
    ModelSettings,
    Natural,
    PerformanceSettings,
    ProcessSettings,
    ProfilingSettings,
    RankSettings,
    RepeatSettings,
    TrainingSettings,
)


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def _refuse_mps(device: Any) -> Any:
    if device == "mps":
        raise ValueError("no timing events exist for MPS, and PyTorch's profiler does not record it; use cpu")
    return device


def experiment_named(default: str) -> Any:
    """Declares the folder that groups the runs of a command."""
    option = Option(OUTPUT, "NAME", found_by="experiments")
    return uncompared(default, "subdirectory of results that groups runs", option=option, stays_inside=True)


class RunSettings(Section, Generic[Open]):
    """The settings of every command that starts workers."""

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


def inference_instead() -> Any:
    """Declares the setting that turns a run of training into one of inference, which is other work."""
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
    inference: bool = inference_instead()
    model: ModelSettings[Open] = ModelSettings()
    data: DataSettings[Open] = DataSettings()
    training: TrainingSettings[Open] = TrainingSettings()
    performance: PerformanceSettings[Open] = PerformanceSettings()
    distributed: DistributedSettings = DistributedSettings()
    measurement: MeasurementSettings = MeasurementSettings()

    @property
    def reading(self) -> TrainingSettings[Open] | None:
        """The settings by which the steps read the data; None if they read no batches of the given size."""
        return self.training

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


CompletedSettings = RunSettings[Never]
CompletedTrainSettings = TrainSettings[Never]
