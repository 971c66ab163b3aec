"""Records the events of a program of the user: what all of its runs have in common, and its steps."""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from gpubench import devices, events, git, machine, probe
from gpubench.diagnosis.case import ReadyData
from gpubench.errors import GpubenchError, ProgramFailed, RunFailed
from gpubench.findings import Findings
from gpubench.host.launch import Workers
from gpubench.host.recorder import Recorder
from gpubench.host.step_recorder import StepRecorder
from gpubench.kinds.program import beside, endings, patched
from gpubench.kinds.program.ceilings import newest_ceiling
from gpubench.kinds.program.checkout import check_out
from gpubench.kinds.program.code_of_fixes import addressed, in_code
from gpubench.kinds.program.machines import started_together
from gpubench.kinds.program.processes import ProgramProcesses, step_name
from gpubench.kinds.program.source_names import Names, names_of
from gpubench.kinds.program.watched import WatchedOutput
from gpubench.runs import warnings
from gpubench.runs.directory import OUTPUT
from gpubench.runs.summary import Summary, summarise
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import CompletedProgramSettings, from_outside
from gpubench.settings.sections import ProfilingSettings
from gpubench.temporary import OwnedFolder

SAMPLED_SECONDS = 2.0
"""The time of the steps in which the code of a program is sampled, up to 1000 times."""
LEAST_SAMPLED, MOST_SAMPLED = 2, 200
"""The limits of the number of these steps."""

P = TypeVar("P", bound=CompletedProgramSettings)


class OfProgram(Recorder[P]):
    """What all runs of a program of the user have in common."""

    lighter = "give the program a smaller batch"
    _ranks = 1
    _device: str | None = None
    _observed: Mapping[str, Any] | None = None
    """How the program runs, by the settings that change it; None until the probe has found it out."""
    _places: Mapping[str, str] = {}
    _optimizers: Mapping[str, Sequence[str]] = {}

    def __init__(self, configuration: Configuration[P], argv: Sequence[str]) -> None:
        """Makes a copy of the program if a commit of it, or the program with a patch, is to be measured.

        Raises UsageError if that fails.
        """
        self._missed: list[events.TreatmentsMissed] = []
        self._left: list[events.RankLeft] = []
        self._unmeasured: list[events.Unmeasured] = []
        self._compiled: defaultdict[int, set[int]] = defaultdict(set)
        """The steps by repeat in which torch.compile compiled code on one rank or more."""
        self._program = self._given = program = configuration.settings.program
        self._directory = program.directory or Path()
        self._watched = WatchedOutput(program.watch) if program.watch else None
        self._copy = OwnedFolder() if program.ref or program.patch else None
        if self._copy and program.ref:
            self._program, self._directory = check_out(program.ref, program, str(self._copy.path / "clone"))
        elif self._copy and program.patch:
            results, folder = configuration.settings.results, self._copy.path / "copy"
            self._program, self._directory = patched.copy(program.patch, program, results, folder)
        super().__init__(configuration, argv)

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        if self._copy:
            self._copy.cleanup()
        if self.elsewhere:  # there are no steps that could make it unreliable
            summary = msgspec.structs.replace(summary, warnings=[])
        super().close(status, summary, error)
        if self.elsewhere and not isinstance(error, RunFailed):
            self.writer.discard()  # the directory has no measurements

    def _code(self) -> dict[str, Any] | None:
        """The state of the code and, of a commit that was checked out, what has `changes` since.

        A patched copy is the code of its directory with a change.
        """
        if self._given.patch:
            found = git.state(self._given.directory or Path())
            return found and found | {"dirty": True}
        found = super()._code()
        ref = self._given.ref
        if found is None or ref is None:
            return found
        return found | {"changes": git.changes_since(ref, self._given.directory or Path())}

    @property
    def processes(self) -> int:
        """The number of ranks; 1 until the first rank has reported it."""
        return self._ranks

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def on_gpu(self) -> bool:
        return self._device == "cuda"

    @property
    def has_loaders(self) -> bool:
        return bool((self._observed or {}).get("data.workers", True))

    @property
    def source(self) -> Mapping[str, Any]:
        return {"places": self._places, "optimizers": self._optimizers, "device_type": self._device}

    def in_code(self, changes: Mapping[str, Any]) -> str:
        return in_code(changes, self._places, self._optimizers, self._names)

    @property
    def diagnosed_settings(self) -> Mapping[str, Any] | None:
        """How the program runs, by the settings that change it, so that a fix is one of them; None if unknown."""
        return self.diagnosis.settings if self.diagnosis else self._observed

    @property
    def _names(self) -> Names:
        """What the program calls its model, its batch and its device."""
        return names_of(self._places, self._directory, self._device)

    def addressed(self, findings: Findings) -> Findings:
        """Adds the code for each fix to the findings; the probe can try a fix without it."""
        known = (self.settings, self._places, self._optimizers, self._names)
        found = [addressed(finding, *known) for finding in findings.findings]
        return msgspec.structs.replace(findings, findings=found)

    def _observe(self, built: events.ModelBuilt) -> None:
        """Keeps what the probe has found out about the program."""
        self._device, self._places, self._optimizers = built.device, built.places, built.optimizers
        self._observed = built.settings

    def _treatments(self) -> dict[str, Any]:
        """The values that are given of the settings that the probe changes in the program."""
        return {key: value for key in from_outside() if (value := self._values.get(key)) is not None}

    @property
    @abstractmethod
    def step(self) -> str:
        """What a step of the program is called."""

    def _endings(self) -> list[str]:
        """The warnings on ranks that left a measured repeat without reporting their end, one for each way."""
        first: dict[tuple[int, str], events.RankLeft] = {}
        for one in self._left:
            if one.repeat != self.profiled:
                known = first.setdefault((one.rank, one.how), one)
                first[one.rank, one.how] = min(known, one, key=lambda each: each.steps)
        return [endings.warning(one, self.step, self._ranks) for one in first.values()]

    def _beside(self) -> str | None:
        return beside.warning(self._unmeasured, self._ranks, inference=bool(self._values.get("inference")))

    def _cut_short(self, repeat: int | None = None) -> ProgramFailed | None:
        """The error of a run that has no result because a rank left without reporting its end; None if none did.

        `repeat` is the one without a result; None for any.
        """
        found = next((one for one in self._left if repeat in (None, one.repeat)), None)
        if found is None:
            return None
        return ProgramFailed(endings.in_words(found, self.step, self._ranks), endings.hint(found, self.step))

    def _with_missed(self, summary: Summary, ranks: int) -> Summary:
        """Adds to the summary the settings that none of the `ranks` of all repeats had a use for."""
        measured = [one for one in self._missed if one.repeat != self.profiled]
        reasons = {key: reason for one in measured for key, reason in one.missed.items()}
        missed = {
            key: reason for key, reason in reasons.items() if sum(key in one.missed for one in measured) >= ranks > 0
        }
        said = warnings.collected(warnings.not_applied(missed), self._beside(), *summary.warnings)
        return msgspec.structs.replace(summary, warnings=said, missed=missed)

    @cached_property
    def watched_gpus(self) -> list[devices.Gpu]:
        """All visible GPUs, because it is not known in advance which ones the program uses.

        If other hosts on this machine may each see other GPUs, they are all GPUs of the machine.
        """
        return (devices.machine_gpus() if started_together() > 1 else []) or devices.visible_gpus()

    @property
    @abstractmethod
    def wanted(self) -> int | None:
        """The number of steps after which the probe ends the program; None if the program ends by itself."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that the program gets besides those of every run."""
        return {}

    def start(self, job: events.Job) -> Workers:
        if self._watched:
            self._watched.begin(job.repeats[0])
        return ProgramProcesses(
            job,
            self._program,
            self._directory,
            self._treatments(),
            self.wanted,
            self.settings.measurement.stall_timeout,
            self._keep_output,
            self.variables,
        )

    def take(self, event: events.Message) -> None:
        if isinstance(event, events.TreatmentsMissed):
            self._missed.append(event)
        elif isinstance(event, events.GraphsCompiled):
            self._compiled[event.repeat].update(event.steps)
        elif isinstance(event, events.RankLeft):
            self._left.append(event)
            self.progress.doing = "running on, unmeasured"
        elif isinstance(event, events.Unmeasured):
            self._unmeasured.append(event)
        elif isinstance(event, events.Elsewhere):
            self.elsewhere = event.host
            self.progress.doing = f"training; {event.host} has the results"
        elif not isinstance(event, events.Hello):
            super().take(event)
        else:
            self.elsewhere, self.is_spread = None, event.ranks_here is not None
            if event.world_size != self._ranks:
                self._ranks = self.progress.ranks = event.world_size
                self.writer.update(world_size=event.world_size)

    def _keep_output(self, data: bytes) -> None:
        self.writer.append_bytes(OUTPUT, data)
        if self._watched:
            self._watched.add(data)

    def _take_environment(self, event: events.EnvironmentCaptured) -> None:
        super()._take_environment(msgspec.structs.replace(event, environment=machine.facts() | event.environment))


class ProgramRecorder(OfProgram[CompletedProgramSettings], StepRecorder[CompletedProgramSettings]):
    """One run that measures the time of a program of the user; to diagnose it, another repeat is recorded."""

    @property
    def wanted(self) -> int | None:
        training = self.settings.training
        if training.steps is None and self.length:
            return self.length.steps
        return training.warmup + training.steps if isinstance(training.steps, int) else None

    @property
    def variables(self) -> Mapping[str, str]:
        wanted = {
            probe.INFERENCE_VARIABLE: self.settings.inference,
            probe.SAMPLED_VARIABLE: self.profiled is not None,
        }
        return {name: "1" for name, is_set in wanted.items() if is_set}

    def job(self, repeats: Sequence[int]) -> events.Job:
        job = super().job(repeats)
        if self.profiled is None:
            return job
        if isinstance(profiling := self.settings.profiling, ProfilingSettings):  # a loader has others
            job.settings["profiling"]["wait"] = self._steps_before_recording(profiling)
        return msgspec.structs.replace(job, sampled=self._steps_to_sample())

    def _steps_before_recording(self, profiling: ProfilingSettings) -> int:
        """The number of steps before the recorded ones: so many that these run at the level of most measured ones.

        A program may end with the last measured step, so that the recorded ones are not later than that.
        """
        changed, windows = self.changed_level, self.sum_up().steady
        if changed is None or not windows:
            return profiling.wait
        end = min(window.first + window.steps for window in windows)
        middle = (min(window.first for window in windows) + end) / 2
        later = changed.level.step if changed.level.step < middle else 0
        return max(profiling.wait, min(later, end - (profiling.units - profiling.wait)))

    def _steps_to_sample(self) -> int:
        """The number of steps that take about SAMPLED_SECONDS, estimated from the steps so far."""
        step = self.unit_time(self.sum_up())
        wanted = math.ceil(SAMPLED_SECONDS / step) if step else LEAST_SAMPLED
        return max(LEAST_SAMPLED, min(MOST_SAMPLED, wanted))

    @property
    def ready_data(self) -> ReadyData | None:
        return newest_ceiling(self.writer.path.parent.parent, self._given.command)

    @property
    def diagnosed_settings(self) -> Mapping[str, Any] | None:
        if self.diagnosis or self._observed is None:
            return super().diagnosed_settings
        return {
            **self._observed,
            "inference": self.settings.inference,
            **{key: value for key, value in self._values.items() if key.startswith("profiling.")},
            "profiling.keep_compile": True,  # a program is recorded as it runs
        }

    def facts_of(self, built: events.ModelBuilt) -> dict[str, Any]:
        self._observe(built)
        found = super().facts_of(built)
        own = {"device": built.device, "samples_per_step": self._samples_per_step()}
        return {"workload": found["workload"] | own, "observed": built.settings}

    def end_repeat(self) -> None:
        if (built := self._in_order[-1].built) is not None:
            self.writer.update(**self.facts_of(built))
        super().end_repeat()

    @property
    def step(self) -> str:
        return step_name(self.settings.inference)

    def completed(self) -> int:
        left = {one.repeat for one in self._left}
        return sum(bool(repeat.done) or repeat.number in left for repeat in self._repeats.values())

    def sum_up(self) -> Summary:
        found = summarise(
            self._in_order,
            None,
            "",
            telemetry=self.own_telemetry,
            gpus=self.metered_gpus,
            inference=self.settings.inference,
            settings=self._values,
        )
        compiled = sum(
            window.first <= step < window.first + window.steps
            for window in found.steady
            for step in self._compiled[window.repeat]
        )
        said = warnings.compiled_within(compiled, sum(window.steps for window in found.steady), self._values)
        own = warnings.own_share(found.get("probe_time"), found.get("probe_share"))
        watched = self._watched.of_repeats([window.repeat for window in found.steady]) if self._watched else {}
        slow = self._watched.warning if self._watched else None
        all_said = warnings.collected(*self._endings(), said, *found.warnings, own, slow)
        found = msgspec.structs.replace(found, compiled=compiled, warnings=all_said, watched=watched)
        return self._with_missed(found, sum(len(repeat.done) for repeat in self._in_order))

    def refutation(self, summary: Summary) -> GpubenchError | None:
        if self.elsewhere or (summary.metrics and (self.profiled is None or self.traces)):
            return None
        if summary.metrics:
            return self._cut_short(self.profiled) or ProgramFailed(
                "the program ended before its recording was complete",
                f"run the program for {self.settings.profiling.units + 4} steps or more, or lower profiling.wait, "
                "profiling.warmup, profiling.active or profiling.repeat",
            )
        if cut := self._cut_short():
            return cut
        steps = max((len(steps) for repeat in self._in_order for steps in repeat.steps.values()), default=0)
        warmup = max((repeat.warmup or 1 for repeat in self._in_order), default=1)
        return ProgramFailed(
            f"the program ended after {endings.taken(steps, self.wanted, self.step)}, and the warm-up takes {warmup}",
            "run the program for more steps, or lower --training.warmup_steps",
        )

    def unit_time(self, summary: Summary) -> float | None:
        step_time = summary.get("step_time")
        return step_time.estimate if step_time else None

    def _samples_per_step(self) -> int | None:
        """The usual number of samples of one rank in one step, or None before the first step."""
        samples = [table.samples for steps in self._in_order[-1].steps.values() if len(table := steps.table())]
        return int(median(samples[0].tolist())) if samples else None
