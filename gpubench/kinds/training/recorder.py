"""Records the events of a run that trains a model of gpubench, or runs its inference."""

from gpubench.host.step_recorder import StepRecorder
from gpubench.runs.summary import Summary, summarise
from gpubench.settings.schema import CompletedTrainSettings

LIGHTER = (
    "try a smaller --batch-size with training.grad_accumulation, --precision bf16, or "
    "--model.activation_checkpointing=true"
)


class TrainRecorder(StepRecorder[CompletedTrainSettings]):
    """One run of `gpubench train-bench`, or of `gpubench profile`, whose last repeat is recorded."""

    lighter = LIGHTER

    def unit_time(self, summary: Summary) -> float | None:
        step_time, settings = summary.get("step_time"), self.settings
        alike = settings.profiling.keep_compile or not settings.performance.compile
        return step_time.estimate if step_time and alike and settings.profiling.unit == "step" else None

    def sum_up(self) -> Summary:
        return summarise(
            self._in_order,
            self.gpu_name,
            self.settings.precision,
            self._flops,
            self._peak,
            self.own_telemetry,
            self.metered_gpus,
            matmul_precision=self.settings.performance.matmul_precision,
            device_memory=self.device.memory_bytes if self.device else None,
            inference=self.settings.inference,
            settings=self._values,
        )
