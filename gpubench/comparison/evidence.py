"""What one side of a comparison brings: the runs behind it, read once, and the steps behind their repeats."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpubench import foreign_files, yaml_text
from gpubench.comparison import plausible
from gpubench.comparison.plausible import OF_STEP_TIMES
from gpubench.comparison.steps import StepTable, read_steps
from gpubench.diffusion.stages import Pipeline
from gpubench.dotkeys import flatten
from gpubench.errors import NothingMeasured, RunDirectoryError, StillRunning
from gpubench.events import FlopsCounted, PeakMeasured, Span
from gpubench.findings import Findings
from gpubench.hardware import Peak
from gpubench.memory.batch_sizes import BatchSizes
from gpubench.memory.footprint import Footprints
from gpubench.memory.trades import Trades
from gpubench.metrics import RATES, Metric
from gpubench.origins import FILLED_IN
from gpubench.runs import (
    BATCH_SIZES,
    COMPLETED,
    CONFIG,
    ENVIRONMENT,
    FAILED,
    FINDINGS,
    INTERRUPTED,
    MEMORY,
    PROFILE,
    RUNNING,
    STEPS,
    SUMMARY,
    TELEMETRY,
    TIMELINE,
    TRADES,
    Run,
    RunRecord,
)
from gpubench.steady import SteadyWindow
from gpubench.summary import Rank, Summary
from gpubench.telemetry import TelemetrySample
from gpubench.trace.profile import Profile

Series = NDArray[np.float64]
T = TypeVar("T")

PHASE = "phase_"
UNTIMED = "memory"  # the command that counts and times nothing
RUNS_READ = 3  # of a group whose losses are read
ENDS = {COMPLETED: "completed", FAILED: "failed", INTERRUPTED: "was interrupted"}
NOTHING = "run it again, with --steps beyond the warm-up"
DAMAGED = "restore it from a copy, or measure again"


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """One run directory, or one log of another tool (whose `record` is None)."""

    label: str
    """Short and unique among the sides' runs: the run id, or the file's name."""
    path: Path
    record: RunRecord | None
    status: str
    settings: dict[str, Any]
    """config.yaml by dot-key; empty for another tool's log."""
    environment: dict[str, Any]
    """environment.json by dot-key."""
    workload: dict[str, Any]
    """Facts of the model that ran (parameters, sample_shape, tokens_per_sample); empty where not recorded."""
    metrics: dict[str, Metric]
    windows: Sequence[SteadyWindow] = ()
    """One per measured repeat, in the order of every metric's `repeats`."""
    ranks: Sequence[Rank] = ()
    throttled: dict[str, float] = field(default_factory=dict)
    flops: FlopsCounted | None = None
    peak: Peak | None = None
    measured_peak: PeakMeasured | None = None
    pipeline: Pipeline | None = None
    warnings: Sequence[str] = ()
    """What the run said of itself."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, by file and line; grows as more is read."""

    @property
    def untimed(self) -> bool:
        """Whether it followed its memory: its figures are counts of bytes, and no step was timed."""
        return self.record is not None and self.record.command == UNTIMED

    def is_rate(self, metric: str) -> bool:
        """Whether it is work over time, and so averaged as the time of one."""
        return metric in RATES

    @cached_property
    def chosen(self) -> frozenset[str]:
        """The settings that were filled in for the user, by dot-key, as the comments in config.yaml tell."""
        found, section = set(), ""
        try:
            lines = foreign_files.content(self.path / CONFIG).decode(errors="replace").splitlines()
        except OSError:
            return frozenset()
        for line in lines:
            key, _, rest = line.partition(":")
            section = section if key.startswith(" ") else key
            if f"# {FILLED_IN}" in rest:
                found.add(f"{section}.{key.strip()}" if key.startswith(" ") else key)
        return frozenset(found)

    @property
    def repeats(self) -> int:
        if self.untimed:
            return max((len(metric.repeats) for metric in self.metrics.values()), default=0)
        return len(self.windows)

    def series(self, metric: str) -> list[Series] | None:
        """The steady steps behind each repeat's estimate of `metric`, in seconds; None if it has no steps behind it.

        step_time, throughput and token_throughput give the step times of the rank that speaks for the run (the one
        whose steady window took longest), so that their mean is the estimate; phase_* give that phase's.
        """
        phase = metric.removeprefix(PHASE) if metric.startswith(PHASE) else None
        if metric not in self.metrics or (phase is None and metric not in OF_STEP_TIMES) or self.pipeline:
            return None
        if phase is not None and phase not in self.steps.phases:
            return None
        columns = [rows.total if phase is None else rows.phases[phase] for rows in self._spoken]
        return columns if columns and all(len(column) for column in columns) else None

    @cached_property
    def steps(self) -> StepTable:
        """Every step that was recorded, warm-up included; read when first asked for. A pipeline has spans instead."""
        return StepTable.of_totals(np.empty(0)) if self.pipeline else read_steps(self.path / STEPS, self.problems)

    @cached_property
    def telemetry(self) -> list[TelemetrySample]:
        """In order of time; empty where none was taken."""
        return sorted(self._lines(TELEMETRY, TelemetrySample), key=lambda sample: sample.time)

    @cached_property
    def spans(self) -> list[Span]:
        """What the ranks of a pipeline did, in order of time; empty where nothing was recorded."""
        return sorted(self._lines(TIMELINE, Span), key=lambda span: span.time)

    @cached_property
    def findings(self) -> Findings | None:
        """What was wrong with it; None where nothing was diagnosed."""
        return self._optional(FINDINGS, Findings)

    @cached_property
    def profile(self) -> Profile | None:
        """What its traces show; None where none were recorded."""
        return self._optional(PROFILE, Profile)

    @cached_property
    def footprints(self) -> Footprints | None:
        """What filled its memory; None where that was not followed."""
        path = self.path / MEMORY
        if self.untimed and self.metrics and not path.is_file():
            self.problems.append(f"{path} is missing")
        return self._possible(MEMORY, Footprints, plausible.in_footprints)

    @cached_property
    def batch_sizes(self) -> BatchSizes | None:
        """Which batches would fit; None where that was not asked."""
        return self._possible(BATCH_SIZES, BatchSizes, plausible.in_batch_sizes)

    @cached_property
    def trades(self) -> Trades | None:
        """What its fixes cost and save; None where none was tried."""
        return self._possible(TRADES, Trades, plausible.in_trades)

    def _possible(self, name: str, type_: type[T], impossible: Callable[[T], Iterator[str]]) -> T | None:
        """An optional document; one that says what cannot be is a problem too."""
        found = self._optional(name, type_)
        problem = next(impossible(found), None) if found is not None else None
        if problem:
            self.problems.append(f"{self.path / name} is damaged: {problem}")
        return None if problem else found

    def _optional(self, name: str, type_: type[T]) -> T | None:
        """A document that only some runs have; one that cannot be read is a problem."""
        path = self.path / name
        if self.record is None or not path.is_file():
            return None
        try:
            return msgspec.json.decode(foreign_files.content(path), type=type_)
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{path} cannot be read: {' '.join(str(error).split())}")
            return None

    def _lines(self, name: str, type_: type[T]) -> Iterator[T]:
        """Of a run directory's line file."""
        return Run(self.path, self.record, self.problems).lines(name, type_) if self.record else iter(())

    @cached_property
    def _spoken(self) -> list[StepTable]:
        """The steady steps of the rank that speaks in each repeat."""
        for window in self.windows:
            ranks = self.steps.steady(window)
            fewest = min((len(rows) for rows in ranks.values()), default=0)
            if fewest < window.steps:
                lost = f"{window.steps - fewest} of the {window.steps} steady steps of repeat {window.repeat}"
                self.problems.append(f"{self.path / STEPS} lacks {lost}")
        return [self.steps.speaker(window) for window in self.windows]


@dataclass(frozen=True)
class Side:
    """One run, or a group of runs that repeat each other."""

    label: str
    """What it is called in sentences."""
    runs: tuple[RunEvidence, ...]

    @cached_property
    def losses(self) -> Series | None:
        """The loss by step, mean over ranks and median over repeats, NaN where not finite; None if none was recorded.

        A recorded loss that is missing at a step is one that was not finite: JSON has no word for it. Of a group the
        first few runs are read.
        """
        curves = []
        for run in self.runs[:RUNS_READ]:
            for window in run.windows:
                ranks = [rows.loss for rows in run.steps.of_repeat(window.repeat).values()]
                if ranks and not np.isnan(ranks[0]).all():
                    curves.append(_averaged(ranks, np.mean))
        return _averaged(curves, np.median) if curves else None


def _averaged(curves: Sequence[Series], average: Callable[..., Any]) -> Series:
    """Over the steps that all curves have; NaN where one of them is not finite."""
    n = min(map(len, curves))
    if len(curves) == 1:
        return np.where(np.isfinite(curves[0]), curves[0], np.nan)
    stacked = np.stack([curve[:n] for curve in curves])
    finite = np.isfinite(stacked).all(axis=0)
    result = np.full(n, np.nan)
    result[finite] = average(stacked[:, finite], axis=0)
    return result


def open_run(path: Path, *, measured: bool = True) -> RunEvidence:
    """The evidence in a run directory, whatever became of the run, as long as it measured something.

    Without `measured` also of one that looked for batch sizes and has no metric to be compared by.

    Raises StillRunning while the run goes on, NothingMeasured if it ended before anything was measured, and
    RunDirectoryError if `path` is no run directory or one from a newer gpubench, or its summary is damaged or at odds
    with itself. Settings and environment that cannot be read are problems, not errors.
    """
    run = Run.open(path)
    record, status = run.record, run.status
    if status == RUNNING:
        raise StillRunning(
            f"{path} is still running (process {record.pid} on {record.host})", "compare it when it has ended"
        )
    summary = _summary(run, measured)
    problems: list[str] = []
    return RunEvidence(
        label=path.resolve().name,
        path=path,
        record=record,
        status=status,
        settings=_document(path / CONFIG, _settings, problems),
        environment=_document(path / ENVIRONMENT, _environment, problems),
        workload=flatten(record.workload or {}),
        metrics={metric.name: metric for metric in summary.metrics},
        windows=summary.steady,
        ranks=summary.ranks,
        throttled=summary.throttled,
        flops=summary.flops,
        peak=summary.peak,
        measured_peak=summary.measured_peak,
        pipeline=summary.pipeline,
        warnings=summary.warnings,
        problems=problems,
    )


def _summary(run: Run, measured: bool) -> Summary:
    """Raises RunDirectoryError unless there is something to compare."""
    path = run.path / SUMMARY
    error = (run.record.error or {}).get("message")
    end = f"it {ENDS[run.status]}{f': {error}' if error and error != run.status else ''}"
    try:
        summary = msgspec.json.decode(foreign_files.content(path), type=Summary)
    except FileNotFoundError:
        kind = RunDirectoryError if run.status == COMPLETED else NothingMeasured
        raise kind(f"{run.path} holds no measurements, no {SUMMARY}: {end}", NOTHING) from None
    except OSError as problem:
        raise RunDirectoryError(f"{path} cannot be read: {problem.strerror}", DAMAGED) from None
    except (ValueError, RecursionError) as problem:
        raise RunDirectoryError(f"{path} is damaged: {problem}", DAMAGED) from None
    only_looked = not measured and not summary.metrics and (run.path / BATCH_SIZES).is_file()
    if not only_looked and not (summary.metrics and (summary.steady or run.record.command == UNTIMED)):
        raise NothingMeasured(f"{path} holds no metrics, nothing was measured: {end}", NOTHING)
    for contradiction in plausible.contradictions(summary):
        raise RunDirectoryError(f"{path} is damaged: {contradiction}", DAMAGED)
    return summary


def _document(path: Path, parse: Callable[[bytes], dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """A mapping by dot-key; empty, and a problem, if it cannot be read."""
    try:
        return dict(parse(foreign_files.content(path)))
    except FileNotFoundError:
        problems.append(f"{path} is missing")
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    except (ValueError, TypeError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {' '.join(str(error).split())}")
    return {}


# The runs of a group mostly share their settings and their machine, and YAML takes longer than all else.


@lru_cache(maxsize=256)
def _settings(text: bytes) -> dict[str, Any]:
    found = yaml_text.parse(text)
    plain = msgspec.json.encode(found)  # YAML also knows dates, sets and NaN, which no report could show
    return flatten(msgspec.json.decode(plain, type=dict[str, Any]))


@lru_cache(maxsize=256)
def _environment(text: bytes) -> dict[str, Any]:
    return flatten(msgspec.json.decode(text, type=dict[str, Any]))
