"""Records the steps of a run, of a model of gpubench or of a program, in its directory and in memory."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gpubench import events, units
from gpubench.errors import InvalidEvent
from gpubench.host.recorder import Progress, Recorder
from gpubench.logs import MODIFIABLE
from gpubench.probe.length import Length
from gpubench.registry import kind_of
from gpubench.runs import warnings
from gpubench.runs.directory import STEPS, RepeatLength
from gpubench.runs.levels import ChangedLevel, changed_level
from gpubench.runs.steps import Repeat, measure
from gpubench.runs.summary import Summary
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import CompletedProgramSettings
from gpubench.settings.schema import CompletedTrainSettings

log = logging.getLogger("gpubench.run")

Looped = TypeVar("Looped", bound=CompletedTrainSettings | CompletedProgramSettings)
"""The settings of a run that measures the steps of a loop."""


def say_length(length: RepeatLength) -> None:
    """Logs how many steps gpubench chose for each repeat, and how."""
    line = "chosen for you: %s of warm-up and %s measured in each repeat, %s (change with --steps)"
    log.log(MODIFIABLE, line, units.counted(length.warmup, "step"), f"{length.steps - length.warmup:,}", length.reason)


RECENT = 20  # steps that the displayed figures are computed from


@dataclass
class TrainProgress(Progress):
    planned: int = 0
    step: events.Step | None = None
    """The latest step of rank 0."""
    steps: deque[events.Step] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The last steps of rank 0 in the current repeat."""

    def take(self, steps: Sequence[events.Step]) -> None:
        """Adds the next steps of rank 0."""
        self.step = steps[-1]
        self.steps += steps


class StepRecorder(Recorder[Looped]):
    """One run whose ranks report the steps of a training loop."""

    progress: TrainProgress

    def __init__(self, configuration: Configuration[Looped], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self.progress = self.at_start()
        self._repeats: dict[int, Repeat] = {}
        self._flops: events.FlopsCounted | None = None
        self._peak: events.PeakMeasured | None = None
        self._phases: set[str] = set()
        """The names of the phases of all steps so far, at most `events.MOST_PHASES`."""
        self._unnamed: set[str] = set()
        """Those of the phases beyond them, as many again."""

    @property
    def command(self) -> str:
        """Trials of `profile` are not recorded: they are runs of the command that times the same work."""
        kind = kind_of(self.settings.command)
        return kind.command if kind.diagnosed and self.settings.profiling.enabled else kind.work

    @property
    def is_open(self) -> bool:
        return bool(self.settings.training.is_open)

    def at_start(self) -> TrainProgress:
        return TrainProgress(ranks=self.processes)

    def begin_repeat(self, number: int, repeats: int) -> None:
        super().begin_repeat(number, repeats)
        self._repeats.setdefault(number, Repeat(number, self.settings.training.warmup_steps))

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
                self._take_length(event)
            case events.RepeatDone():
                self._unfinished(event.rank, event.repeat).done[event.rank] = event
            case events.ReferenceWorkloadTimed(rank=0):
                self._repeat(event.rank, event.repeat).reference_time = event.seconds
            case _:
                return self._keep_finding(event)
        return True

    def _repeat(self, rank: int, number: int) -> Repeat:
        """Raises InvalidEvent if the run does not have the repeat."""
        self.refuse_unknown(rank, number)
        return self._repeats.setdefault(number, Repeat(number, self.settings.training.warmup_steps))

    def _unfinished(self, rank: int, number: int) -> Repeat:
        """Raises InvalidEvent if `rank` measures no such repeat, or has ended it."""
        repeat = self._repeat(rank, number)
        if rank in repeat.done:
            raise InvalidEvent.of(rank, f"it comes after the end of repeat {number + 1}")
        return repeat

    def completed(self) -> int:
        return sum(bool(repeat.done) for repeat in self._repeats.values())

    def summary(self) -> Summary:
        found = super().summary()
        said = warnings.collected(*found.warnings, warnings.too_many_phases(len(self._unnamed)))
        return msgspec.structs.replace(found, warnings=said)

    def _keep_finding(self, event: events.Message) -> bool:
        """Keeps an event that is sent once a run. Returns False if the command has no use for it."""
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
        self.refuse_unknown(built.rank, built.repeat)
        self.turn_to(built.repeat)
        self._repeat(built.rank, built.repeat).built = built
        self.writer.update(**self.facts_of(built))

    def facts_of(self, built: events.ModelBuilt) -> dict[str, Any]:
        """The fields of run.json that describe the built model."""
        workload = {
            "parameters": built.parameters,
            "trainable_parameters": built.trainable_parameters,
            "sample_shape": built.sample_shape,
            "tokens_per_sample": built.tokens_per_sample,
        }
        return {"workload": workload}

    def _keep_profiled(self, event: events.Message) -> bool:
        """Keeps only the progress of the profiled repeat, because the profiler changes its times."""
        if isinstance(event, events.Planned) and event.rank == 0:
            self.turn_to(event.repeat)
            self.progress.planned = event.steps
        return True

    def _take_length(self, planned: events.Planned) -> None:
        """Keeps the length of a repeat, which is that of all following ones, and says how it was chosen.

        A repeat may be shortened while it runs, because its steps have become slower.
        """
        self.progress.planned = planned.steps
        if planned.warmup is None:
            return
        self._repeat(planned.rank, planned.repeat).warmup = planned.warmup
        if self.length is not None and planned.steps >= self.length.steps:
            return
        self.length = Length(planned.warmup, planned.steps, planned.each_update)
        chosen = RepeatLength(planned.warmup, planned.steps, seconds=self.seconds_each)
        self.writer.update(length=chosen)
        if chosen.reason:
            say_length(chosen)

    def _take_steps(self, event: events.StepsMeasured) -> None:
        if event.steps and event.steps[0].repeat == self.profiled:
            if event.rank == 0:
                self.progress.take(event.steps)
            return
        if event.steps:
            self._repeat(event.rank, event.steps[0].repeat).exchanges[event.rank].add(event)
        steps = [self._with_known_phases(step) for step in event.steps]
        for step in steps:
            known = self._unfinished(event.rank, step.repeat).steps[event.rank]
            if step.step != len(known):
                raise InvalidEvent.of(event.rank, f"step {step.step} after {units.counted(len(known), 'step')}")
            known.append(step)
            self.writer.append(STEPS, step)
        if event.rank == 0 and steps:
            self.progress.take(steps)
            self.metrics.steps(steps)

    def _with_known_phases(self, step: events.Step) -> events.Step:
        """Limits the phases of a step to as many as a run can have, and adds the time of all others to `other`."""
        room = events.MOST_PHASES - 1 - len(self._phases)  # one is for `other`
        new = [name for name in step.phases if name not in self._phases and name != events.OTHER]
        self._phases.update(new[:room])
        if not (beyond := new[room:]):
            return step
        self._unnamed.update(beyond[: events.MOST_PHASES])
        phases = {name: seconds for name, seconds in step.phases.items() if name in self._phases}
        rest = sum(step.phases[name] for name in step.phases.keys() - phases.keys())
        return msgspec.structs.replace(step, phases=phases | {events.OTHER: rest})

    @property
    def changed_level(self) -> ChangedLevel | None:
        return changed_level(measure(self._in_order), self.own_telemetry)

    @property
    def _in_order(self) -> list[Repeat]:
        return [repeat for _, repeat in sorted(self._repeats.items())]
