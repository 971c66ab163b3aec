"""The settings of `gpubench memory` with a model of gpubench."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Never

from pydantic import BeforeValidator, Field

from gpubench.settings.field import Open, Section, protocol, treatment, uncompared, untaken
from gpubench.settings.options import MEASUREMENT, Option
from gpubench.settings.schema import TrainSettings, experiment_named
from gpubench.settings.sections import (
    DeviceMemory,
    FolderName,
    MeasurementSettings,
    Positive,
    ProfilingSettings,
    TrainingSettings,
    device_memory,
    fraction,
    repeats,
)


class FollowSettings(Section):
    """What `gpubench memory` records."""

    steps: Annotated[int, Field(ge=1, le=1000)] = protocol(
        3,
        "optimizer steps to record; the first one allocates the optimizer state, the last one is "
        "reported as the steady step",
        alias="steps",
        option=Option(
            MEASUREMENT, "N", "Optimizer steps to record, without timing them; 3 by default, 5 for a program."
        ),
    )
    predict: bool = treatment(
        False,
        "predict the memory on a GPU instead of measuring; needs no GPU",
        alias="predict",
        option=Option(MEASUREMENT, help="Predict the memory on a GPU; needs no GPU."),
    )
    device_model: str | None = treatment(
        None,
        "GPU to predict for, such as h200 or a100-80gb; default: the GPU of this machine",
        alias="device_model",
        option=Option(MEASUREMENT, "NAME", found_by="devices"),
    )
    device_memory: DeviceMemory | None = device_memory()
    spare: Annotated[float, Field(ge=0, lt=1), BeforeValidator(fraction)] = uncompared(
        0.05,
        "fraction of the memory that the largest batch must leave free (0.05 or 5%)",
        alias="spare",
        option=Option(MEASUREMENT, "P%", "Share of memory that this batch must leave free; 5% by default."),
    )
    find_batch_size: bool = uncompared(
        False, "find the largest batch size that fits", alias="find_batch_size", option=Option(MEASUREMENT)
    )
    advise: bool = uncompared(True, "propose settings that save memory and predict how much each saves")
    explain: bool = uncompared(
        False,
        "repeat the prediction without each correction, to report what each one adds",
        idle_with={"memory.predict": (False,)},
    )


class OnceSettings(MeasurementSettings):
    repeats: Positive = repeats(1)


class MemorySettings(TrainSettings[Open], Generic[Open]):
    """Settings of `gpubench memory`: the run that train-bench would do, of which a few steps are recorded."""

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

    @property
    def reading(self) -> TrainingSettings[Open] | None:
        """A few steps are recorded, whatever the length of an epoch; no batch of this size is read for a prediction."""
        if self.memory.predict or self.memory.find_batch_size:
            return None
        return self.training.model_copy(update={"epochs": None})


CompletedMemorySettings = MemorySettings[Never]
