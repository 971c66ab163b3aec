"""What is kept of a training benchmark."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpubench import events
from gpubench.configuration import Configuration
from gpubench.host.recording import Progress, Recorder
from gpubench.runs import STEPS
from gpubench.settings import TrainSettings
from gpubench.steady import Repeat
from gpubench.summary import Summary, summarise

LIGHTER = (
    "try a smaller --batch-size with training.grad_accumulation, --precision bf16, or "
    "--model.activation_checkpointing=true"
)
RECENT = 20  # steps behind the figures on display


@dataclass
class TrainProgress(Progress):
    planned: int = 0
    step: events.Step | None = None
    """Rank 0's latest."""
    steps: deque[events.Step] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Rank 0's last ones, of the repeat in hand."""

    def take(self, steps: Sequence[events.Step]) -> None:
        """Rank 0's next steps."""
        self.step = steps[-1]
        self.steps += steps


class TrainRecorder(Recorder[TrainSettings]):
    """One run of `gpubench train-bench`."""

    command = "train-bench"
    worker = "gpubench.train_worker"
    lighter = LIGHTER
    progress: TrainProgress

    def __init__(self, configuration: Configuration[TrainSettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self.progress = self.at_start()
        self._repeats: dict[int, Repeat] = {}
        self._flops: events.FlopsCounted | None = None
        self._peak: events.PeakMeasured | None = None

    def at_start(self) -> TrainProgress:
        return TrainProgress(ranks=self.processes)

    def begin_repeat(self, number: int, repeats: int) -> None:
        super().begin_repeat(number, repeats)
        self._repeats.setdefault(number, Repeat(number))

    def unit_time(self, summary: Summary) -> float | None:
        step_time, settings = summary.get("step_time"), self.settings
        alike = settings.profiling.keep_compile or not settings.performance.compile
        return step_time.estimate if step_time and alike and settings.profiling.unit == "step" else None

    def keep(self, event: events.Message) -> bool:
        if self.profiled is not None and getattr(event, "repeat", None) == self.profiled:
            return self._keep_profiled(event)
        match event:
            case events.StepsMeasured():
                self._take_steps(event)
            case events.Heartbeat(rank=0):
                self.progress.doing = event.doing
            case events.ModelBuilt(rank=0):
                self._start_repeat(event)
            case events.Planned(rank=0):
                self.progress.planned = event.steps
            case events.RepeatDone():
                self._repeats[event.repeat].done[event.rank] = event
            case events.YardstickRead(rank=0):
                self._repeats[event.repeat].yardstick = event.seconds
            case _:
                return self._keep_finding(event)
        return True

    def completed(self) -> int:
        return sum(bool(repeat.done) for repeat in self._repeats.values())

    def sum_up(self) -> Summary:
        assert self.settings.precision
        return summarise(
            [repeat for _, repeat in sorted(self._repeats.items())],
            self.settings.training.warmup_steps,
            self.gpu_name,
            self.settings.precision,
            self._flops,
            self._peak,
            self.telemetry,
            self.gpus,
            matmul_precision=self.settings.performance.matmul_precision,
        )

    def _keep_finding(self, event: events.Message) -> bool:
        """What is said once a run."""
        match event:
            case events.FlopsCounted():
                self._flops = event
            case events.PeakMeasured():
                self._peak = event
            case events.GraphTraced():
                self.metrics.graph(event.graph)
            case _:
                return False
        return True

    def _start_repeat(self, built: events.ModelBuilt) -> None:
        self.turn_to(built.repeat)
        self._repeats[built.repeat].built = built
        self.writer.update(
            workload={
                "parameters": built.parameters,
                "trainable_parameters": built.trainable_parameters,
                "sample_shape": built.sample_shape,
                "tokens_per_sample": built.tokens_per_sample,
            }
        )

    def _keep_profiled(self, event: events.Message) -> bool:
        """Of the recorded repeat only where it stands: its times are not those of the program alone."""
        if isinstance(event, events.Planned) and event.rank == 0:
            self.turn_to(event.repeat)
            self.progress.planned = event.steps
        return True

    def _take_steps(self, event: events.StepsMeasured) -> None:
        if event.steps and event.steps[0].repeat == self.profiled:
            if event.rank == 0:
                self.progress.take(event.steps)
            return
        for step in event.steps:
            self._repeats[step.repeat].steps[step.rank].append(step)
            self.writer.append(STEPS, step)
        if event.rank == 0 and event.steps:
            self.progress.take(event.steps)
            self.metrics.steps(event.steps)
