"""The kinds of runs: a row for each command in a run.json, with what all readers of runs must know of it.

The modules in a row are named and not imported, so that reading a run loads the code of its kind alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

PROGRAM, PROGRAM_PROFILE, PROGRAM_MEMORY = "program", "program-profile", "program-memory"
"""The commands in the run.json of a program that was measured, of one that was diagnosed, and of one whose memory was
followed."""
LOADER = "loader"
"""The command that draws the batches of a program without its training."""
TUNE = "tune"
"""The command of a search, which is an entry of its own beside those of its runs."""
JUDGE = "judge"
"""The command that judges an edit. Its runs are those of train-bench."""
PROBE = "gpubench.probe"


@dataclass(frozen=True)
class RunKind:
    """What is common to the runs with the same command in run.json."""

    command: str
    run_by: str
    """The command of gpubench that makes them."""
    work: str
    """The command that times the same work. A run may be compared with runs of the same work."""
    settings: str = "gpubench.settings.schema:TrainSettings"
    """The module and the class of its settings."""
    worker: str = ""
    """The module that measures in each rank: its `work`, or the probe in a program of the user."""
    completed_by: str = "gpubench.settings.defaults:complete"
    """The function that completes its settings. It returns them with the reasons for what it chose, by dot-key."""
    recorded_by: str = "gpubench.kinds.training.recorder:TrainRecorder"
    """The class that opens its run directory and records its events."""
    drawn_by: str = "gpubench.host.live"
    """The module that draws its progress; see `gpubench.host.live.Drawing`."""
    described_by: str = "gpubench.runs.headlines"
    """The module whose `describe` says in one line what such a run does, and whose `model` names its model."""
    shown_by: str = "gpubench.report.steps"
    """The module with what only the reports of this work have; see `gpubench.report.kind_report.KindReport`."""
    swept_by: str = "gpubench.report.batch_sizes"
    """The module with what the report of several such runs has that differ in one number; see `report.sweep.Sweep`."""
    timed: bool = True
    """Whether its figures are times. The others are bytes."""
    diagnosed: bool = False
    """Whether it is made for its findings, which come before its metrics."""
    steps: bool = True
    """Whether it records the time of each step in steps.jsonl."""
    unit: str = "step"
    """What the profiler records one after the other, where no setting says it."""

    def is_measured(self, *, metrics: bool, steady: bool) -> bool:
        """Tells whether a run with any `metrics`, and any steps in the `steady` state, has results."""
        return metrics and (steady or not self.timed)

    def model(self, settings: Mapping[str, Any], workload: Mapping[str, Any]) -> str | None:
        """The name of the model that a run has, or the command line of its program; None if it is unknown."""
        named: Callable[..., str | None] = import_module(self.described_by).model
        return named(settings, workload)

    @property
    def complete(self) -> Callable[[Any], tuple[Any, dict[str, str]]]:
        """The function `completed_by`."""
        found: Callable[[Any], tuple[Any, dict[str, str]]] = _named(self.completed_by)
        return found

    @property
    def recorder(self) -> Callable[..., Any]:
        """The class `recorded_by`, which takes a complete configuration and the command line."""
        found: Callable[..., Any] = _named(self.recorded_by)
        return found

    def describe(self, settings: Mapping[str, Any], workload: Mapping[str, Any], **measured: Any) -> str:
        """Says what a run does in one line, such as "resnet18, fp32, batch 16 x 2 ranks on cpu".

        `settings` are by dot-key, `workload` is that of run.json. Of what is `measured`, `ranks` is the number of
        ranks, and `samples` are those of a step (`StepSamples`).
        """
        described: Callable[..., str] = import_module(self.described_by).describe
        return described(settings, workload, **measured)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _training(command: str, **more: Any) -> RunKind:
    return RunKind(command, command, "train-bench", worker="gpubench.kinds.training.worker.rank", **more)


def _program(command: str, run_by: str, settings: str, **more: Any) -> RunKind:
    found = {
        "settings": f"gpubench.settings.programs:{settings}",
        "completed_by": "gpubench.kinds.program.defaults:complete_program",
        "recorded_by": "gpubench.kinds.program.recorder:ProgramRecorder",
    }
    return RunKind(command, run_by, PROGRAM, worker=PROBE, **found | more)


def _rows() -> Iterable[RunKind]:
    yield _training("train-bench")
    yield RunKind(
        "pipe-infer",
        "pipe-infer",
        "pipe-infer",
        settings="gpubench.kinds.pipeline.settings:PipeSettings",
        worker="gpubench.kinds.pipeline.worker.rank",
        completed_by="gpubench.kinds.pipeline.defaults:complete",
        recorded_by="gpubench.kinds.pipeline.recorder:PipeRecorder",
        drawn_by="gpubench.kinds.pipeline.progress",
        described_by="gpubench.kinds.pipeline.headline",
        shown_by="gpubench.kinds.pipeline.report",
        swept_by="gpubench.kinds.pipeline.rank_counts",
        steps=False,
        unit="evaluation",
    )
    yield _training("profile", settings="gpubench.settings.schema:ProfileSettings", diagnosed=True)
    yield RunKind(
        "memory",
        "memory",
        "train-bench",
        settings="gpubench.kinds.memory.settings:MemorySettings",
        worker="gpubench.kinds.memory.worker.rank",
        completed_by="gpubench.kinds.memory.defaults:complete_memory",
        recorded_by="gpubench.kinds.memory.recorder:MemoryRecorder",
        drawn_by="gpubench.kinds.memory.recorder",
        shown_by="gpubench.kinds.memory.report",
        timed=False,
        steps=False,
    )
    yield _program(PROGRAM, "train-bench", "ProgramSettings")
    yield _program(PROGRAM_PROFILE, "profile", "ProgramProfileSettings", diagnosed=True)
    yield _program(
        PROGRAM_MEMORY,
        "memory",
        "ProgramMemorySettings",
        completed_by="gpubench.kinds.program.defaults:complete_program_memory",
        recorded_by="gpubench.kinds.program.memory_recorder:ProgramMemoryRecorder",
        drawn_by="gpubench.kinds.memory.recorder",
        shown_by="gpubench.kinds.memory.report",
        timed=False,
        steps=False,
    )
    yield RunKind(
        LOADER,
        LOADER,
        LOADER,
        settings="gpubench.settings.programs:LoaderSettings",
        worker=PROBE,
        completed_by="gpubench.kinds.program.defaults:complete_program",
        recorded_by="gpubench.kinds.loader.recorder:LoaderRecorder",
        described_by="gpubench.kinds.loader.headline",
        shown_by="gpubench.kinds.loader.report",
        unit="batch",
    )


RUN_KINDS: Mapping[str, RunKind] = {kind.command: kind for kind in _rows()}
"""The kinds by command."""
OF_PROGRAMS = frozenset(command for command, kind in RUN_KINDS.items() if kind.worker == PROBE)
"""The commands of the runs of a user's program."""
NOT_OF_PROGRAMS = "leave it out, or give the program an argument of its own after --"
"""The hint for a setting that a program has itself, if it has it."""
STARTERS = (
    *("python", "python3", "torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "uv", "poetry", "srun"),
    *("mpirun", "jupyter"),
)
"""Programs that start others, by which the command of a user's program is recognised."""
COMMANDS = (*dict.fromkeys(kind.run_by for kind in RUN_KINDS.values()), TUNE)
"""The commands of gpubench that make runs."""


def kind_of(command: str) -> RunKind:
    """The kind of the runs with a command in run.json, which may be of another version of gpubench."""
    return RUN_KINDS.get(command) or RunKind(command, command, command)
