"""Tunes a program: profiles it once, runs the blocks of a search in fresh processes, and keeps what follows from
them."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpubench import devices, proof, units
from gpubench.bench import Bench
from gpubench.compare import losses
from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.compare.work import less_work, work_of
from gpubench.errors import GpubenchError, Interrupted, RunDirectoryError, RunFailed
from gpubench.host.schedule import Outcome
from gpubench.metrics import PEAKS
from gpubench.patches.result import FILE as PATCH_FILE
from gpubench.permission import permit
from gpubench.proof import PatchedProgram, ProvedSettings
from gpubench.registry import TUNE
from gpubench.runs import clocks
from gpubench.runs.directory import timestamp
from gpubench.settings.defaults import local_ranks
from gpubench.settings.field import fields, setting
from gpubench.settings.keys import PATCH, THE_RUN, flatten
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import ProgramSettings, from_outside
from gpubench.settings.schema import RunSettings
from gpubench.tuning.claims import claim_of
from gpubench.tuning.combination import Combination
from gpubench.tuning.conclusion import Conclusion, Contribution, Factor, NextRuns, Plan, Spread, Standing
from gpubench.tuning.durations import Limit
from gpubench.tuning.knowledge import Result
from gpubench.tuning.progress import said
from gpubench.tuning.result import Loss, RunBlock, SearchRun, Tuning, named
from gpubench.tuning.search import Search
from gpubench.tuning.treatments import Subject, choose

LATE = 0.1
"""How far a search may exceed its time limit, as a fraction of it, if runs take longer than the ones before them."""
MOST_LOOKS = 10
"""How many times its time limit is proposed to a search whose limit is too short for the first look."""
MOST_STEPS = 50
"""The measured steps of a run where the user sets no number: a search gains more by more runs than by longer ones."""
UNCHANGED, PATCHED, SET = "unchanged", "patched", "with the settings"
"""What the baseline is called among the combinations that run with it, the program with the best settings in it, and
the program with these settings from outside."""
PATCH_SHARE = 0.15
"""The share of the time limit that is kept to run the patch of a program."""
OTHER_BATCH = "another batch size is other work: train to the same loss to judge it"
LENGTH = ("training.steps", "training.warmup_steps")
"""The settings that every run of a search has from its first look."""
TRIED: Mapping[str, Any] = {
    "profiling.enabled": False,
    "logging.graph": False,
    "measurement.measure_peak": False,
    "measurement.target_precision": None,
}
"""Settings of every run of a search, as far as its command has them."""


@dataclass(frozen=True)
class Wishes:
    """What the user asks of a search."""

    most_peak: float | None = None
    """The memory limit in bytes."""
    budget: float | None = None
    """The time limit in seconds."""
    most_runs: int | None = None
    only: frozenset[str] = frozenset()
    asked: Mapping[str, Sequence[Any]] | None = None
    """Values to try, by dot-key."""
    keep_arithmetic: bool = False
    loss_margin: losses.Margin = losses.DEFAULT


@dataclass(frozen=True)
class SearchFolder:
    """The folder that has the run directories of a search, and the tags of each run."""

    path: Path
    tags: tuple[str, ...] = ()

    def variant(self, base: Configuration[Any], changes: Mapping[str, Any], bench: Bench) -> Configuration[Any]:
        """The complete configuration of a run in this folder. Raises GpubenchError if it cannot be run."""
        whole = self.path.absolute()
        here = {"results": os.path.relpath(whole.parent), "experiment": whole.name}
        return bench.complete(base.with_overrides({**changes, **here}, TUNE)).called(tags=self.tags)


def look(base: Configuration[Any], bench: Bench, folder: SearchFolder, wishes: Wishes, argv: Sequence[str]) -> Tuning:
    """Profiles the program once, and chooses the treatments to try.

    Raises the error of the run if it fails, and RunFailed if it takes longer than the whole search may.
    """
    began = time.monotonic()
    until = began + (1 + LATE) * wishes.budget if wishes.budget else math.inf
    outcome = _profiled(base, bench, folder, until)
    if isinstance(outcome.error, Interrupted) and time.monotonic() >= until:
        raise RunFailed(
            f"the first look alone takes longer than the time limit of {units.about(wishes.budget or 0.0)}",
            f"give more time, such as --budget {math.ceil(MOST_LOOKS * (wishes.budget or 0.0) / 60)}m, or make the "
            "program shorter; the search itself begins after that look",
        )
    if outcome.error:
        raise outcome.error
    recorder = outcome.recorder
    run = open_run(recorder.writer.path)
    subject = _subject(run, recorder.diagnosed_settings or {}, recorder.on_gpu, outcome, wishes.most_peak)
    settings, of_program = flatten(base.settings.model_dump()), isinstance(base.settings, ProgramSettings)
    treatments, untried = choose(
        subject, changeable(base.settings), only=wishes.only, asked=wishes.asked, keep_arithmetic=wishes.keep_arithmetic
    )
    codes = {
        f"{treatment.name} {level}": code
        for treatment in treatments
        for level, changes in enumerate(treatment.levels, 1)
        if (code := recorder.in_code(changes))
    }
    return Tuning(
        status="running",
        command=base.settings.command,
        argv=list(argv),
        started=timestamp(),
        seconds=(took := time.monotonic() - began),
        look_seconds=took,
        settings=msgspec.to_builtins(flatten(base.settings.model_dump(mode="json")) | _steps(outcome)),
        workload=dict(run.workload),
        world_size=_ranks(run),
        device=run.summary.environment.device if run.summary.environment else None,
        ready_data=recorder.ready_data,
        precision=None if of_program and subject.on_gpu else str(settings.get("precision") or "fp32"),
        treatments=treatments,
        untried=untried,
        most_peak=wishes.most_peak,
        budget=wishes.budget,
        most_runs=wishes.most_runs,
        loss_margin=wishes.loss_margin,
        look=recorder.writer.path.name,
        codes=codes,
        **recorder.source,
    )


def changeable(settings: RunSettings) -> frozenset[str]:
    """The settings that a search can change: of inference not those of training, of a program not its own."""
    infers, cls = getattr(settings, "inference", False), type(settings)
    known = frozenset(key for key, field in fields(cls).items() if not (infers and setting(field).training_only))
    return known & from_outside().keys() if issubclass(cls, ProgramSettings) else known


def _steps(outcome: Outcome) -> dict[str, int]:
    """The steps of each run of the search, if the user has set no number and the first run has found it."""
    found = outcome.recorder.length if outcome.recorder.is_open else None
    if found is None:
        return {}
    measured = min(found.steps - found.warmup, MOST_STEPS)
    return {"training.steps": measured, "training.warmup_steps": found.warmup}


def _profiled(base: Configuration[Any], bench: Bench, folder: SearchFolder, until: float) -> Outcome:
    """Runs the program once, and once more with the profiler, unless it has too few steps for that.

    What still runs at the time `until`, in seconds of `time.monotonic()`, is interrupted.
    """
    changes = base.takes(TRIED) | {"measurement.repeats": 1}
    try:
        run = folder.variant(base, changes | {"profiling.enabled": True}, bench)
    except GpubenchError:
        run = folder.variant(base, changes, bench)
    (outcome,) = bench.run([run], order=[0], until=until)
    return outcome


def _subject(
    run: RunEvidence, settings: Mapping[str, Any], on_gpu: bool, outcome: Outcome, most_peak: float | None
) -> Subject:
    peak = next((run.metrics[name].estimate for name in PEAKS if name in run.metrics), None)
    findings = outcome.recorder.findings
    step, wait = (run.metrics.get(name) for name in ("step_time", "phase_data_wait"))
    return Subject(
        settings=settings,
        on_gpu=on_gpu,
        cores=devices.physical_cores(),
        ranks=local_ranks(outcome.recorder.settings) if "program.command" not in run.settings else _ranks(run),
        sample_shape=str(run.workload.get("sample_shape") or ""),
        waits=wait.estimate / step.estimate if step and wait else 0.0 if step else None,
        is_too_large=most_peak is not None and peak is not None and peak > most_peak,
        reduced_types=run.environment.get("cpu.reduced_types"),
        fixes=[finding.fix for finding in findings.findings if finding.fix] if findings else [],
    )


def _ranks(run: RunEvidence) -> int:
    return run.record.world_size if run.record else 1


class Tuner:
    """A search that goes on from its recorded state, block by block."""

    def __init__(
        self,
        folder: SearchFolder,
        tuning: Tuning,
        base: Configuration[Any],
        bench: Bench,
        save: Callable[[Tuning], None],
    ) -> None:
        """`base` is the complete configuration of the baseline; `save` writes the state after each block.

        Raises RunDirectoryError if the search cannot be continued from its state.
        """
        self.tuning = tuning
        self._folder = folder
        given = Configuration(base.settings, dict.fromkeys(flatten(base.settings.model_dump()), THE_RUN))
        self._base = given.with_overrides({key: tuning.settings[key] for key in LENGTH if key in tuning.settings}, TUNE)
        self._bench = bench
        self._save = save
        self._began = time.monotonic() - tuning.seconds
        self._search = Search(
            [Factor(treatment.name, 1 + len(treatment.levels)) for treatment in tuning.treatments],
            most_peak=tuning.most_peak,
        )
        self._limit = Limit()
        """What the search could still use when the current block was planned."""
        self._evidence: dict[str, RunEvidence] = {}
        for block in tuning.blocks:
            self._repeat(block)

    def plan(self) -> Plan:
        """The runs of each stage, as far as they are known."""
        self._search.limit(self._left())
        return self._search.planned()

    def standing(self) -> Sequence[Standing]:
        """What is known of each treatment so far."""
        return self._search.standing()

    def noise(self) -> Spread | None:
        """How much equal runs differ; None before any run was made twice."""
        return self._search.noise()

    def next(self) -> NextRuns | None:
        """The block to run next; None at the end of the search, or of its budget."""
        self._limit = self._left()
        self._search.limit(self._limit)
        return self._search.next()

    def seconds_a_run(self) -> float | None:
        return self.tuning.seconds_a_run or None

    def advance(self, block: NextRuns) -> None:
        """Runs a block and keeps its results, as far as it gets. Raises Interrupted if the user interrupts it.

        At the end of the time limit, with LATE for runs that take longer than expected, it is interrupted as well.
        """
        began = time.monotonic()
        runs, interrupted = self._run(block)
        runs = self._judged(block, runs)
        if runs:
            between = (time.monotonic() - began - sum(run.seconds for run in runs)) / len(runs)
            runs = [msgspec.structs.replace(run, seconds=run.seconds + max(0.0, between)) for run in runs]
        self._search.record([_result(run) for run in runs])
        if runs:
            recorded = RunBlock(stage=block.stage, why=block.why, limit=self._limit, runs=runs)
            self._keep(blocks=[*self.tuning.blocks, recorded])
        if interrupted and time.monotonic() < self._end:
            raise interrupted

    @property
    def _end(self) -> float:
        """When the search has to have ended, in seconds of `time.monotonic()`."""
        return self._began + (1 + LATE) * self.tuning.budget if self.tuning.budget else math.inf

    def conclude(self, error: GpubenchError | None = None) -> Tuning:
        """Concludes and saves what follows from the results; `error` has ended the search early."""
        found = self._search.conclude()
        status = "interrupted" if isinstance(error, Interrupted) else "failed" if error else "completed"
        self._keep(
            status=status,
            conclusion=found,
            keep=self.tuning.changes(found.best) if found.proved else {},
            error=error.record() if error else None,
        )
        return self.tuning

    def patch(self) -> None:
        """Makes a patch of the program with the settings whose part of the gain is established, and runs it.

        Does nothing for a model of gpubench, and without such settings. The time that is left decides how often it is
        run, and whether the program with the settings from outside runs beside it. Raises Interrupted if the user
        interrupts the runs; the patch is written before.
        """
        found, program = self.tuning.conclusion, self._program()
        if program is None or found is None or not self.tuning.keep:
            return
        parts = [self._proved(one, found) for one in found.established]
        unproved = [one for one in found.contributions if one not in found.established]
        others = [key for one in unproved for key in self.tuning.of_level(one.factor, one.level)]
        patch = proof.make(parts, program, self._folder.path, unproved=others)
        if not patch.changed:
            self._keep(patch=patch if patch.left else None)
            return
        patch = msgspec.structs.replace(patch, settings_gain=None if patch.left else found.gain)
        budget = self.tuning.budget
        left = None if budget is None else budget - (time.monotonic() - self._began)
        each = self.seconds_a_run() or 1.0
        beside = proof.rounds_in(left, each, versions=3)
        rounds = beside or proof.rounds_in(left, each)
        patch = msgspec.structs.replace(patch, reason="the time limit left none for it" if not rounds else "")
        self._keep(patch=patch)
        proof.describe(patch, program, self._folder.path)
        changes = self._base.takes(TRIED) | {"measurement.repeats": max(1, rounds)}
        file = os.path.relpath(self._folder.path / PATCH_FILE)
        versions: dict[str, dict[str, Any]] = {UNCHANGED: {}, PATCHED: {PATCH: file}}
        if beside:
            versions[SET] = {one.key: one.value for one in patch.edits}
        sides = [
            self._folder.variant(self._base, changes | more, self._bench).called(variant=label)
            for label, more in versions.items()
        ]
        if not rounds:
            permit(sides[1:], self._bench.terminal)  # so that --apply knows it
            return
        patch = proof.prove(patch, sides, self._bench, self._end, self.tuning.loss_margin)
        self._keep(patch=patch)
        proof.describe(patch, program, self._folder.path)

    def _program(self) -> PatchedProgram | None:
        """The program of the user that is tuned; None for a model of gpubench."""
        settings = self._base.settings
        if not isinstance(settings, ProgramSettings) or settings.program.ref or settings.program.patch:
            return None
        source = {name: getattr(self.tuning, name) for name in ("places", "optimizers", "device_type")}
        return PatchedProgram(settings.program, source, settings.program.command)

    def _proved(self, one: Contribution, found: Conclusion) -> ProvedSettings:
        """A kept level with its contribution in words."""
        alone = len(found.contributions) == 1
        with_others = found.gain if alone else one.with_others
        said = f"{with_others}{'' if alone else ' with the others'}" if with_others else ""
        return ProvedSettings(self.tuning.of_level(one.factor, one.level), said)

    def configuration(self, combination: Combination) -> Configuration[Any]:
        """The complete configuration of the baseline with a combination of the treatments' levels."""
        return self._base.with_overrides(self.tuning.changes(combination), TUNE)

    def _repeat(self, block: RunBlock) -> None:
        """Gives the search a recorded block. Raises RunDirectoryError if the search would not have made it."""
        self._search.limit(block.limit)
        planned = self._search.next()
        made = [run.combination for run in block.runs]
        if planned is None or planned.stage != block.stage or list(planned.runs[: len(made)]) != made:
            raise RunDirectoryError(
                f"the runs in {self._folder.path} are not those that this version of gpubench would have made",
                "start a new search",
            )
        self._search.record([_result(run) for run in block.runs])

    def _keep(self, **changes: Any) -> None:
        seconds = time.monotonic() - self._began
        self.tuning = msgspec.structs.replace(self.tuning, seconds=seconds, **changes)
        self._save(self.tuning)

    def _left(self) -> Limit:
        """What the search may still use."""
        budget = self.tuning.budget
        if budget is not None and self._program():
            budget *= 1 - PATCH_SHARE
        left = None if budget is None else max(0.0, budget - (time.monotonic() - self._began))
        return Limit(self.tuning.most_runs, left, self.seconds_a_run() or 1.0)

    def _run(self, block: NextRuns) -> tuple[list[SearchRun], Interrupted | None]:
        """Runs a block. Returns its runs as far as they were made, and the interruption that ended them."""
        wanted = [(combination, self._seed(block, place)) for place, combination in enumerate(block.runs)]
        refused: dict[Combination, GpubenchError] = {}
        groups: dict[tuple[Combination, int | None], Configuration[Any]] = {}
        for group in dict.fromkeys(wanted):
            combination, seed = group
            changes = self._base.takes(TRIED) | self.tuning.changes(combination)
            changes["measurement.repeats"] = wanted.count(group)
            if seed is not None:
                changes["seed"] = seed
            try:
                variant = self._folder.variant(self._base, changes, self._bench)
                groups[group] = variant.called(variant=said(self.tuning.changes(combination)) or UNCHANGED)
            except GpubenchError as error:
                refused[combination] = error
        numbers = {group: number for number, group in enumerate(groups)}
        order = [numbers[group] for group in wanted if group in numbers]
        outcomes = self._bench.run(list(groups.values()), order=order, until=self._end) if groups else []
        made = dict.fromkeys(groups, 0)
        runs: list[SearchRun] = []
        for group in wanted:
            if group not in numbers:
                runs.append(
                    SearchRun(combination=group[0], path=None, throughput=None, error=refused[group[0]].message)
                )
                continue
            run, interrupted = self._as_run(group[0], outcomes[numbers[group]], made[group])
            if interrupted:
                return runs, interrupted
            runs.append(run)
            made[group] += 1
        return runs, None

    def _seed(self, block: NextRuns, place: int) -> int | None:
        """The seed of a run, if gpubench sets it.

        The baseline's first runs have several, and so have the rounds of the confirmation, to show how the loss varies.
        """
        seed = self.tuning.settings.get("seed")
        if seed is None:
            return None
        rounds = sum(done.stage == "confirming" for done in self.tuning.blocks)
        varied = {"noise": max(0, place - 1), "confirming": rounds}
        return int(seed) + varied.get(block.stage, 0)

    def _as_run(self, combination: Combination, outcome: Outcome, repeat: int) -> tuple[SearchRun, Interrupted | None]:
        path = outcome.recorder.writer.path.name
        throughput, times = outcome.summary.get("throughput"), outcome.recorder.seconds
        seconds = times[repeat] if repeat < len(times) else 0.0
        if throughput and repeat < len(throughput.repeats):
            metrics = {metric.name: metric for metric in outcome.summary.metrics}
            peak = next((metrics[name].repeats for name in PEAKS if name in metrics), [])
            most = peak[repeat] if repeat < len(peak) else None
            rate = throughput.repeats[repeat]
            return SearchRun(combination=combination, path=path, throughput=rate, peak=most, seconds=seconds), None
        interrupted = outcome.error if isinstance(outcome.error, Interrupted) else None
        why = outcome.error.message if outcome.error else "no step was measured"
        return SearchRun(combination=combination, path=path, throughput=None, error=why, seconds=seconds), interrupted

    def _judged(self, block: NextRuns, runs: Sequence[SearchRun]) -> list[SearchRun]:
        """Adds to each run the reason why it must not be kept, if there is one."""
        reasons = {combination: self._rejection(block, combination, runs) for combination in {*block.runs}}
        return [
            msgspec.structs.replace(run, rejected=reasons[run.combination]) if run.throughput else run for run in runs
        ]

    def _rejection(self, block: NextRuns, combination: Combination, runs: Sequence[SearchRun]) -> str:
        """The reason why a combination must not be kept: it changes nothing, does less work, or harms the loss."""
        found = self._evidence_of(combination, runs)
        if not any(combination) or not found:
            return ""
        if reason := self._without_effect(combination, found):
            return reason
        baseline = self._evidence_of((0,) * len(combination), runs)
        before, after = ([work_of(run) for run in side] for side in (baseline, found))
        scaled = "training.batch_size" in self.tuning.changes(combination)
        if less := next(filter(None, (less_work(before, work, scaled=scaled) for work in after)), ""):
            return less
        if wrong := clocks.contradiction([one for run in found for one in run.summary.clock_rates]):
            return f"it has a clock of its own: {wrong}"
        if block.stage not in ("alone", "confirming"):
            return ""
        judged = self._judge_losses(combination, baseline, found)
        self.tuning = msgspec.structs.replace(self.tuning, losses=self.tuning.losses | {named(combination): judged})
        return judged.reason if judged.outcome == "harmed" else ""

    def _judge_losses(
        self, combination: Combination, baseline: Sequence[RunEvidence], found: Sequence[RunEvidence]
    ) -> Loss:
        changes = self.tuning.changes(combination)
        if "training.batch_size" in changes:
            return Loss("unknown", OTHER_BATCH)
        ours, theirs = ([curve for run in side for curve in losses.curves_of(run)] for side in (baseline, found))
        claim, margin = claim_of(changes), self.tuning.loss_margin
        judged = losses.judge(ours, theirs, claim, precision=self.tuning.precision, margin=margin)
        return Loss(judged.outcome, judged.reason)

    @staticmethod
    def _without_effect(combination: Combination, found: Sequence[RunEvidence]) -> str:
        """The reason why a single treatment found nothing to change; "" if it did, or several were tried together."""
        if sum(map(bool, combination)) > 1:
            return ""
        missed = found[0].summary.missed
        return f"not applied: {'; '.join(dict.fromkeys(missed.values()))}" if missed else ""

    def _evidence_of(self, combination: Combination, runs: Sequence[SearchRun]) -> list[RunEvidence]:
        """The run directories of a combination so far, with those of the current block, `runs`."""
        made = [run for block in self.tuning.blocks for run in block.runs] + list(runs)
        paths = dict.fromkeys(run.path for run in made if run.combination == combination and run.throughput)
        return [found for path in paths if path and (found := self._open(path))]

    def _open(self, path: str) -> RunEvidence | None:
        """Opens a run; None if its directory has been removed."""
        if path not in self._evidence:
            try:
                self._evidence[path] = open_run(self._folder.path / path)
            except RunDirectoryError:
                return None
        return self._evidence[path]


def _result(run: SearchRun) -> Result:
    rate = math.log(run.throughput) if run.throughput else None
    return Result(rate, run.peak, run.rejected, run.seconds, refused=run.path is None)
