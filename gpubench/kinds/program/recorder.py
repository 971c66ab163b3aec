"""Keeps the events of a program of the user: its steps, or its memory. Checks out the commit of it to measure."""

import logging
import os
import shlex
import shutil
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from gpubench import devices, events, git, machine, probe, units
from gpubench.diagnosis.rules import advise
from gpubench.errors import GpubenchError, InvalidEvent, ProgramFailed, RunFailed, SettingsError, UsageError
from gpubench.findings import Finding, Findings
from gpubench.host.launch import Workers
from gpubench.host.recorder import Recorder, StepRecorder
from gpubench.kinds.memory.recorder import FootprintRecorder
from gpubench.kinds.program import beside, endings
from gpubench.kinds.program.machines import started_together
from gpubench.kinds.program.processes import ProgramProcesses, step_name
from gpubench.memory.analysis import footprint
from gpubench.memory.history import DeviceHistory, classify
from gpubench.registry import PROGRAM, PROGRAM_MEMORY, PROGRAM_PROFILE
from gpubench.runs import warnings
from gpubench.runs.directory import OUTPUT
from gpubench.runs.summary import Summary, summarise
from gpubench.settings.defaults import Gaps
from gpubench.settings.field import Place
from gpubench.settings.loading import Configuration, apply_overrides
from gpubench.settings.schema import (
    CommandSettings,
    CompletedProgramMemorySettings,
    CompletedProgramSettings,
    ProgramMemorySettings,
    ProgramSettings,
    from_outside,
)
from gpubench.temporary import OwnedFolder

log = logging.getLogger("gpubench.program")


def complete_program(settings: ProgramSettings) -> tuple[CompletedProgramSettings, dict[str, str]]:
    """Returns complete settings. Raises SettingsError if the program cannot be started."""
    _refuse_unstartable(settings)
    gaps = Gaps(settings)
    return gaps.filled(), gaps.reasons


def complete_program_memory(
    settings: ProgramMemorySettings,
) -> tuple[CompletedProgramMemorySettings, dict[str, str]]:
    """Returns complete settings. Raises SettingsError if the program cannot be started."""
    _refuse_unstartable(settings)
    return CompletedProgramMemorySettings.model_validate(settings.model_dump()), {}


def _refuse_unstartable(settings: ProgramSettings) -> None:
    """Raises SettingsError if the program cannot be started."""
    program = settings.program
    directory = program.directory or Path()
    if not directory.is_dir():
        message = f"program.directory: there is no directory {directory}"
        raise SettingsError(message, "give the directory to run the program in", keys=["program.directory"])
    name = program.words[0]
    if not shutil.which(name if os.sep not in name else str(directory.absolute() / name)):
        raise SettingsError(
            f"cannot start the program: {_why_not(directory / name, name)}",
            "write the command after -- as in a shell, for example: gpubench train-bench -- python train.py",
            keys=["program.command"],
        )


def _why_not(path: Path, name: str) -> str:
    if path.is_file():
        return f"{name} is not executable" + (f"; start it with python {name}" if path.suffix == ".py" else "")
    return f"there is no command {name!r}"


def check_out(ref: str, program: CommandSettings, folder: str) -> tuple[CommandSettings, Path]:
    """Makes a copy of the repository of the program in `folder`, at the commit `ref`.

    Returns the program and its directory in the copy. Raises UsageError with git's reason, or for an absolute path to a
    file that the copy has too.
    """
    directory = program.directory or Path()
    top, there = git.check_out(ref, directory, Path(folder))
    for word in filter(os.path.isabs, program.words):
        path = Path(word).resolve()
        if path.is_relative_to(top.resolve()) and path.is_file() and git.is_tracked(top, path):
            raise UsageError(
                f"{word} names the file in your directory, not the one of commit {ref}",
                "give its path relative to the directory",
            )
    name, *arguments = program.words
    if os.sep in name and not (there / name).exists():  # such as .venv/bin/python, which git does not track
        name = str(directory.absolute() / name)
    return program.model_copy(update={"command": shlex.join([name, *arguments])}), there


AT: Mapping[Place, str] = {
    "loader": "at {}",
    "ddp": "at {}",
    "model": "for the model that is called at {}",
}
"""How the place of a fix in the program is called."""
NUMBERS = {
    "same": "",
    "rounding": "",
    "type": "; another type changes the losses: compare them",
}
"""What to say about the numbers that a fix changes."""


def in_code(fix: Mapping[str, Any], places: Mapping[str, str], optimizers: Mapping[str, Sequence[str]]) -> str:
    """Returns the code that does the same as a fix, with its place in the program as far as it is known.

    `places` and `optimizers` are those of `events.ModelBuilt`. Arguments of the same call are put together.
    """
    known = from_outside()
    calls: dict[tuple[str, Place], list[str]] = {}
    for key, value in fix.items():
        code = known[key].in_code(value)
        call, _, arguments = code.partition("(") if code.endswith(")") else (code, "", "")
        found = calls.setdefault((call, known[key].place), [])
        found += [each for each in arguments.removesuffix(")").split(", ") if each and each not in found]
    return "; ".join(
        one
        for (call, place), given in calls.items()
        for one in _located(call, f"({', '.join(given)})" if given else "", place, places, optimizers)
    )


def _located(
    call: str, arguments: str, place: Place, places: Mapping[str, str], optimizers: Mapping[str, Sequence[str]]
) -> list[str]:
    """Returns the call with its place in the program if it is known, or that of every class of optimizers."""
    if place == "optimizer" and optimizers:
        return [
            f"{name}{arguments}" + (f" at {units.listed(lines)}" if lines else "") for name, lines in optimizers.items()
        ]
    where = f" {AT[place].format(places[place])}" if place in AT and place in places else ""
    return [f"{call}{arguments}{where}"]


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
        """Checks the program out if a commit of it is to be measured. Raises UsageError if that fails."""
        self._missed: list[events.TreatmentsMissed] = []
        self._left: list[events.RankLeft] = []
        self._unmeasured: list[events.Unmeasured] = []
        self._compiled: defaultdict[int, set[int]] = defaultdict(set)
        """The steps by repeat in which torch.compile compiled code on one rank or more."""
        self._program = program = configuration.settings.program
        self._directory = program.directory or Path()
        self._clone = OwnedFolder() if program.ref else None
        if self._clone and program.ref:
            self._program, self._directory = check_out(program.ref, program, str(self._clone.path / "clone"))
        super().__init__(configuration, argv)

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        if self._clone:
            self._clone.cleanup()
        if self.elsewhere:  # there are no steps that could make it unreliable
            summary = msgspec.structs.replace(summary, warnings=[])
        super().close(status, summary, error)
        if self.elsewhere and not isinstance(error, RunFailed):
            self.writer.discard()  # the directory has no measurements

    @property
    def processes(self) -> int:
        """The number of ranks; 1 until the first rank has told it."""
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

    def in_code(self, changes: Mapping[str, Any]) -> str:
        return in_code(changes, self._places, self._optimizers)

    @property
    def diagnosed_settings(self) -> Mapping[str, Any] | None:
        """How the program runs, by the settings that change it, so that a fix is one of them; None if unknown."""
        return self.diagnosis.settings if self.diagnosis else self._observed

    def addressed(self, findings: Findings) -> Findings:
        """Returns the findings with the code for each fix, which the probe can try without it."""
        return msgspec.structs.replace(findings, findings=[self._addressed(finding) for finding in findings.findings])

    def _addressed(self, finding: Finding) -> Finding:
        """Returns the finding with the code for its fix; without a fix if the probe cannot make the change."""
        known, by_hand = from_outside(), msgspec.structs.replace(finding, fix={}, code=self._concerned(finding.place))
        try:
            apply_overrides(self.settings, finding.fix)
        except SettingsError:
            return by_hand
        if not finding.fix or not finding.fix.keys() <= known.keys():
            return by_hand
        numbers = "".join(dict.fromkeys(NUMBERS[known[key].numbers] for key in finding.fix))
        code = in_code(finding.fix, self._places, self._optimizers)
        return msgspec.structs.replace(finding, advice=finding.advice + numbers, code=code)

    def _concerned(self, place: Place | None) -> str:
        """Returns the calls of the program that advice without a fix is about; an empty string if they are unknown."""
        if place is None or not (self._optimizers if place == "optimizer" else place in self._places):
            return ""
        if place == "model":
            return f"the model that is called at {self._places[place]}"
        return "; ".join(_located("DataLoader", "(...)", place, self._places, self._optimizers))

    def _observe(self, built: events.ModelBuilt) -> None:
        """Keeps what the probe has found out about the program."""
        self._device, self._places, self._optimizers = built.device, built.places, built.optimizers
        self._observed = built.settings

    def _treatments(self) -> dict[str, Any]:
        """Returns the values that are given of the settings that the probe changes in the program."""
        return {key: value for key in from_outside() if (value := self._values.get(key)) is not None}

    @property
    @abstractmethod
    def step(self) -> str:
        """What a step of the program is called."""

    def _endings(self) -> list[str]:
        """Returns the warnings on ranks that have left a measured repeat without a word, one for each way."""
        first: dict[tuple[int, str], events.RankLeft] = {}
        for one in self._left:
            if one.repeat != self.profiled:
                known = first.setdefault((one.rank, one.how), one)
                first[one.rank, one.how] = min(known, one, key=lambda each: each.steps)
        return [endings.warning(one, self.step, self._ranks) for one in first.values()]

    def _beside(self) -> str | None:
        """Returns the warning of processes that trained or inferred, and are not measured."""
        return beside.warning(self._unmeasured, self._ranks, inference=bool(self._values.get("inference")))

    def _cut_short(self, repeat: int | None = None) -> ProgramFailed | None:
        """Returns the error of a run that has no result because a rank left without a word; None if none did.

        `repeat` is the one without a result; None for any.
        """
        found = next((one for one in self._left if repeat in (None, one.repeat)), None)
        if found is None:
            return None
        return ProgramFailed(endings.in_words(found, self.step, self._ranks), endings.hint(found, self.step))

    def _with_missed(self, summary: Summary, ranks: int) -> Summary:
        """Returns the summary with the settings that none of the `ranks` of all repeats had a use for."""
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

    def _take_environment(self, event: events.EnvironmentCaptured) -> None:
        super()._take_environment(msgspec.structs.replace(event, environment=machine.facts() | event.environment))


class ProgramRecorder(OfProgram[CompletedProgramSettings], StepRecorder[CompletedProgramSettings]):
    """One run that measures the time of a program of the user."""

    command = PROGRAM

    @property
    def wanted(self) -> int | None:
        training = self.settings.training
        if training.steps is None and self.length:
            return self.length.steps
        return training.warmup + training.steps if isinstance(training.steps, int) else None

    @property
    def variables(self) -> Mapping[str, str]:
        return {probe.INFERENCE_VARIABLE: "1"} if self.settings.inference else {}

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
        all_said = warnings.collected(*self._endings(), said, *found.warnings)
        found = msgspec.structs.replace(found, compiled=compiled, warnings=all_said)
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
        """Returns the usual number of samples of one rank in one step, or None before the first step."""
        samples = [table.samples for steps in self._in_order[-1].steps.values() if len(table := steps.table())]
        return int(median(samples[0].tolist())) if samples else None


class ProgramProfileRecorder(ProgramRecorder):
    """One run that measures a program of the user, and records it once more to diagnose it."""

    command = PROGRAM_PROFILE


class ProgramMemoryRecorder(
    OfProgram[CompletedProgramMemorySettings], FootprintRecorder[CompletedProgramMemorySettings]
):
    """One run that follows the memory of a program of the user."""

    command = PROGRAM_MEMORY

    def __init__(self, configuration: Configuration[CompletedProgramMemorySettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self._parts: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        """The beginnings of histories, by (repeat, rank)."""

    @property
    def wanted(self) -> int | None:
        return self.settings.memory.steps

    @property
    def variables(self) -> Mapping[str, str]:
        # Compiled functions hide their operators, and some refuse to run while they are recorded.
        return {probe.FOLLOW_VARIABLE: "1", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}

    @property
    def step(self) -> str:
        return step_name(inference=False)

    def keep(self, event: events.Message) -> bool:
        match event:
            case events.Heartbeat(rank=0):
                self.progress.doing, self.progress.step = "recording", max((event.step or 0) - 1, 0)
            case events.ModelBuilt(rank=0):
                self._observe(event)
                shown = {"parameters": event.parameters, "sample_shape": event.sample_shape, "device": event.device}
                self.writer.update(workload=shown, observed=event.settings)
            case events.MemoryRecorded():
                self._keep_part(event)
            case _:
                return False
        return True

    def sum_up(self) -> Summary:
        return self._with_missed(super().sum_up(), len(self._found))

    def refutation(self, summary: Summary) -> GpubenchError | None:
        if self.footprints:
            return None
        return self._cut_short() or ProgramFailed(
            "the program allocated no memory that PyTorch shows",
            "measure a program whose tensors are on the CPU or a GPU",
        )

    def _keep_part(self, event: events.MemoryRecorded) -> None:
        """Keeps a part of a rank's history; with the last one, the footprint, and the advice of the fullest rank."""
        rank, data = event.rank, self._parts[event.repeat, event.rank]
        self.refuse_unknown(rank, event.repeat)
        data += event.data
        if len(data) > events.LONGEST_LINE:
            raise InvalidEvent.of(rank, f"its history is larger than {units.size(events.LONGEST_LINE)}")
        if not event.last:
            return
        found = self.content(rank, self._parts.pop((event.repeat, rank)), DeviceHistory)
        if not found.history.allocations:
            return
        classify(found.history)
        capacity = self.settings.memory.device_memory or found.capacity
        self.keep_footprint(
            event.repeat,
            rank,
            footprint(
                found.history,
                source="measured",
                device=found.name,
                capacity=capacity,
                rank=rank,
                other=found.other,
            ),
        )
        fullest = max(self.footprints, key=lambda each: each.peak.level.total)
        self.conclude(self.addressed(advise(fullest, self.diagnosed_settings)))
