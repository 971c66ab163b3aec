"""The runs of one side of a comparison, checked for plausibility."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpubench import data_cost, units
from gpubench.data_cost import DataCost
from gpubench.errors import NothingMeasured, RunDirectoryError, StillRunning, UsageError
from gpubench.events import Span
from gpubench.findings import Findings
from gpubench.memory.batch_sizes import BatchSizes, Trades
from gpubench.memory.footprint import Footprints
from gpubench.metrics import RATES, Metric
from gpubench.registry import RunKind, kind_of
from gpubench.runs.directory import (
    BATCH_SIZES,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    LOADER,
    MEMORY,
    RUNNING,
    STEPS,
    SUMMARY,
    TRADES,
    RunRecord,
)
from gpubench.runs.reader import DAMAGED, Run
from gpubench.runs.stats import common_warmup
from gpubench.runs.steps import SteadyWindow, StepTable, slowest_rank
from gpubench.runs.summary import NO_MEASUREMENTS, Summary
from gpubench.runs.summary import since as summary_since
from gpubench.telemetry import TelemetrySample
from gpubench.trace.profile import Profile

OF_STEP_TIMES = ("step_time", "throughput", "token_throughput")
MOST = 2**31 - 1  # steps, or repeats, that a StepTable can count
MOST_BYTES = 2**63
MOST_RATE = 1e18  # samples/s
MOST_OF_A_METRIC = 1e70  # in any unit, as the largest loss: the fourth power of an error is still finite


def contradictions(summary: Summary) -> Iterator[str]:
    """Yields contradictions in a summary that no run can produce."""
    for window in summary.steady:
        if min(window.repeat, window.first, window.steps - 1) < 0 or window.repeat + window.first + window.steps > MOST:
            yield f"repeat {window.repeat + 1} has {window.steps} steady steps from step {window.first}"
    repeats, whose = len(summary.steady), f"there are {len(summary.steady)} steady windows"
    if summary.metrics and not summary.steady:
        first = summary.metrics[0]
        repeats, whose = len(first.repeats), f"{first.name} has {len(first.repeats)}"
    for metric in summary.metrics:
        if not metric.repeats or len(metric.repeats) != repeats:
            yield f"{metric.name} has {len(metric.repeats)} repeats, and {whose}"
        if most := [value for value in (metric.estimate, *metric.repeats) if abs(value) > MOST_OF_A_METRIC]:
            yield f"{metric.name} is {most[0]:.3g}"
        if metric.name in OF_STEP_TIMES and min(metric.estimate, *metric.repeats) <= 0:
            yield f"{metric.name} is not positive"


def in_footprints(found: Footprints) -> Iterator[str]:
    """Yields the impossible values in footprints."""
    if not found.ranks:
        yield "it has no rank"
    for rank in found.ranks:
        moments = [(rank.peak.level, rank.peak.amounts), *((one.level, one.peak) for one in rank.phases)]
        if max(abs(size) for level, amounts in moments for size in (level.total, *amounts.values())) > MOST_BYTES:
            yield f"rank {rank.rank} has an impossible number of bytes"


def in_batch_sizes(found: BatchSizes) -> Iterator[str]:
    """Yields the impossible values in the result of a search for batch sizes."""
    totals = [*(one.total for one in found.points), *(one.total for one in found.confirmed if one.total is not None)]
    if any(not 0 <= size <= MOST_BYTES for size in (found.capacity, found.limit, *totals)):
        yield "it has an impossible number of bytes"
    sizes = [*(one.batch_size for one in found.points), *(one.batch_size for one in found.confirmed)]
    if any(not 1 <= size <= MOST for size in (*sizes, *(one.batch_size for one in found.speeds))):
        yield "it has an impossible batch size"
    if any(not 0 <= one.throughput <= MOST_RATE for one in found.speeds):
        yield "it has an impossible throughput"
    if found.largest is not None and not found.points:
        yield "it has a largest batch, but no batch was tried"
    if max(abs(found.line.constant), abs(found.line.per_sample)) > MOST_BYTES:
        yield "its line has an impossible number of bytes"


def in_trades(found: Trades) -> Iterator[str]:
    """Yields the impossible values in the results of fixes."""
    if any(trade.peak is not None and not 0 <= trade.peak <= MOST_BYTES for trade in found.trades):
        yield "it has an impossible number of bytes"
    rates = [trade.throughput for trade in found.trades if trade.throughput is not None]
    ends = [end for trade in found.trades for end in trade.interval or ()]
    if any(not 0 <= rate <= MOST_RATE for rate in rates) or any(abs(end) > MOST_RATE for end in ends):
        yield "it has an impossible throughput"


Series = NDArray[np.float64]

PHASE = "phase_"
RUNS_READ = 3  # runs of a group whose losses are read
ENDS = {COMPLETED: "completed", FAILED: "failed", INTERRUPTED: "was interrupted", RUNNING: "is running"}
NOTHING = "run it again with more steps, or with fewer training.warmup_steps"


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """One run directory, or one log of another tool, whose `record` is None."""

    label: str
    """Short and unique among the sides' runs: the run id, or the file's name."""
    path: Path
    record: RunRecord | None
    status: str
    settings: dict[str, Any]
    """The settings by dot-key, those that a program decided itself with its values; empty for another tool's log."""
    environment: dict[str, Any]
    """environment.json by dot-key."""
    workload: dict[str, Any]
    """Facts of the model that ran (parameters, sample_shape, tokens_per_sample); empty where not recorded."""
    summary: Summary
    """The summary of the run, or what is known of it from the log of another tool."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, by file and line. The list grows as more files are read."""
    kind_of_log: str = "another tool's log"
    """What the log of another tool is, such as "a log of torchtitan"; only logs of one kind are compared."""
    files: Run | None = None
    """The run directory, which the other parts are read from on first use; None for the log of another tool."""

    @property
    def kind(self) -> RunKind:
        return kind_of(self.record.command if self.record else "")

    @property
    def ranks(self) -> int:
        """The number of ranks; 1 if it is not recorded."""
        return self.record.world_size if self.record else 1

    @property
    def untimed(self) -> bool:
        """Whether the run followed its memory: its figures are counts of bytes, and it timed no step."""
        return not self.kind.timed

    @property
    def takes_steps(self) -> bool:
        """Whether it is known which steps of a repeat were measured."""
        return self.kind.steps and bool(self.windows)

    def is_rate(self, metric: str) -> bool:
        """Tells whether the metric is work over time, so that its inverse, a time, is averaged."""
        return metric in RATES

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by name."""
        return {metric.name: metric for metric in self.summary.metrics}

    @property
    def windows(self) -> Sequence[SteadyWindow]:
        """One window per measured repeat, in the order of every metric's `repeats`."""
        return self.summary.steady

    @property
    def device(self) -> str | None:
        """The name of the device; None if it is unknown."""
        return self.summary.environment.device if self.summary.environment else None

    @property
    def given(self) -> Mapping[str, Any]:
        """The settings without those that a program decided itself, which are None."""
        return self.files.given if self.files else self.settings

    @property
    def chosen(self) -> frozenset[str]:
        """The dot-keys of the settings that gpubench chose."""
        return self.files.chosen if self.files else frozenset()

    @property
    def repeats(self) -> int:
        if self.untimed:
            return max((len(metric.repeats) for metric in self.metrics.values()), default=0)
        return len(self.windows)

    def since(self, first: int) -> "RunEvidence":
        """Returns the run with the first `first` steps of each repeat as its warm-up; itself if they already are."""
        if all(window.first == first for window in self.windows):
            return self
        return replace(self, summary=summary_since(first, self.summary, self.steps))

    def series(self, metric: str) -> list[Series] | None:
        """Returns the steady times behind each repeat's estimate of `metric`, in seconds; None if there are none.

        step_time, throughput and token_throughput give the step times of the slowest rank, the one whose steady window
        took the most time, so that their mean is the estimate. phase_* give the times of that phase.
        """
        phase = metric.removeprefix(PHASE) if metric.startswith(PHASE) else None
        if metric not in self.metrics or (phase is None and metric not in OF_STEP_TIMES) or not self.kind.steps:
            return None
        if phase is not None and phase not in self.steps.phases:
            return None
        columns = [rows.total if phase is None else rows.phases[phase] for rows in self._slowest_rank]
        return columns if columns and all(len(column) for column in columns) else None

    def rounding(self, metric: str) -> float:
        """Returns by which fraction the mean of a metric may be off, as its values were rounded; see LogSeries."""
        return 0.0

    @cached_property
    def steps(self) -> StepTable:
        """All recorded steps, warm-up included; none in a run of a kind that records no steps."""
        return self.files.steps if self.files and self.kind.steps else StepTable.of_totals(np.empty(0))

    @property
    def telemetry(self) -> list[TelemetrySample]:
        """The telemetry samples in order of time; empty if there are none."""
        return self.files.telemetry if self.files else []

    @property
    def spans(self) -> list[Span]:
        """The spans of a pipeline's ranks in order of time; empty if there are none."""
        return self.files.spans if self.files else []

    @property
    def findings(self) -> Findings | None:
        """The findings of the run; None if it was not diagnosed."""
        return self.files.findings if self.files else None

    @property
    def profile(self) -> Profile | None:
        """The profile from the run's traces; None if there are none."""
        return self.files.profile if self.files else None

    @cached_property
    def footprints(self) -> Footprints | None:
        """The memory footprints; None if the run did not follow its memory."""
        path = self.path / MEMORY
        if self.untimed and self.metrics and not path.is_file():
            self.problems.append(f"{path} is missing")
        return self.files.optional(MEMORY, Footprints, in_footprints) if self.files else None

    @cached_property
    def batch_sizes(self) -> BatchSizes | None:
        """The batch sizes that fit; None if the run did not search for them."""
        return self.files.optional(BATCH_SIZES, BatchSizes, in_batch_sizes) if self.files else None

    @cached_property
    def trades(self) -> Trades | None:
        """The costs and savings of the run's fixes; None if none was tried."""
        return self.files.optional(TRADES, Trades, in_trades) if self.files else None

    @cached_property
    def data_cost(self) -> DataCost | None:
        """What the data of a program costs; None if that was not measured."""
        return self.files.optional(LOADER, DataCost, data_cost.impossible) if self.files else None

    @cached_property
    def _slowest_rank(self) -> list[StepTable]:
        """The steady steps of the slowest rank in each repeat."""
        found = []
        for window in self.windows:
            ranks = self.steps.steady(window)
            found.append(ranks[slowest_rank(ranks)] if ranks else self.steps[:0])
            fewest = min((len(rows) for rows in ranks.values()), default=0)
            if fewest < window.steps:
                lost = f"{window.steps - fewest} of the {window.steps} steady steps of repeat {window.repeat + 1}"
                self.problems.append(f"{self.path / STEPS} lacks {lost}")
        return found


@dataclass(frozen=True)
class Side:
    """One run, or a group of runs that repeat each other."""

    label: str
    """Its name in messages."""
    runs: tuple[RunEvidence, ...]

    @cached_property
    def losses(self) -> Series | None:
        """The loss of each step: the mean over ranks and median over repeats; None if no loss was recorded.

        A loss that is not finite is infinite, and one that is unknown is NaN. Of a group only the first few
        runs are read.
        """
        curves = []
        for run in self.runs[:RUNS_READ]:
            for window in run.windows:
                ranks = [rows.loss for rows in run.steps.of_repeat(window.repeat).values()]
                if ranks and not np.isnan(ranks[0]).all():
                    curves.append(averaged(ranks, np.mean))
        return averaged(curves, np.median) if curves else None


def aligned(sides: Sequence[Side], warmup: int | None = None) -> list[Side]:
    """Returns the sides with one warm-up for all repeats: `warmup` steps or, by default, `stats.common_warmup`.

    By default, a run keeps its own warm-up if a repeat of it would lose more than half of its steps. Raises UsageError
    if a repeat has no more steps than the `warmup` asked for, or no run has steps.
    """
    timed = [run for side in sides for run in side.runs if run.takes_steps]
    if warmup is not None and not timed:
        raise UsageError(f"--skip {warmup} has no effect, because nothing here was measured in steps", "leave it out")
    for run in timed if warmup is not None else ():
        if (fewest := min(window.first + window.steps for window in run.windows)) <= (warmup or 0):
            raise UsageError(
                f"--skip {warmup} leaves nothing of {run.label}: a repeat of it has {units.counted(fewest, 'step')}",
                f"skip fewer than {fewest} steps" if fewest > 1 else "leave --skip out",
            )
    needed = [[window.first for run in side.runs if run.takes_steps for window in run.windows] for side in sides]
    first = common_warmup(needed) if warmup is None else warmup

    def since(run: RunEvidence) -> RunEvidence:
        long = all(2 * first <= window.first + window.steps for window in run.windows)
        return run.since(first) if run.takes_steps and (long or warmup is not None) else run

    return [Side(side.label, tuple(map(since, side.runs))) for side in sides]


def steps_left_out(sides: Sequence[Side]) -> tuple[int, int] | None:
    """Returns the least and the most steps that are left out at the start of a repeat; None if no run has steps."""
    found = [window.first for side in sides for run in side.runs if run.takes_steps for window in run.windows]
    return (min(found), max(found)) if found else None


def averaged(curves: Sequence[Series], average: Callable[..., Any]) -> Series:
    """Averages the curves over the steps that all of them have.

    The average is infinite where a curve is infinite, and otherwise NaN where a curve is NaN.
    """
    n = min(map(len, curves))
    if len(curves) == 1:
        return curves[0]
    stacked = np.stack([curve[:n] for curve in curves])
    finite = np.isfinite(stacked).all(axis=0)
    result = np.where(np.isinf(stacked).any(axis=0), np.inf, np.nan)
    result[finite] = average(stacked[:, finite], axis=0)
    return result


def open_run(path: Path, *, measured: bool = True, running: bool = False) -> RunEvidence:
    """Opens a run directory that has measurements, whatever the run's status.

    Without `measured` it also opens a run that measured nothing, whose summary is empty if it is missing, and with
    `running` one that goes on, with the repeats that have ended.

    Raises StillRunning if the run has not ended, NothingMeasured if it ended before anything was measured, and
    RunDirectoryError if `path` is not a run directory, is from a newer gpubench, or has a damaged or contradictory
    summary. Settings and environment that cannot be read become problems.
    """
    run = Run.open(path)
    record, status = run.record, run.status
    if status == RUNNING and not running:
        raise StillRunning(
            f"{path} is still running (process {record.pid} on {record.host})", "compare it when it has ended"
        )
    return RunEvidence(
        label=path.resolve().name,
        path=path,
        record=record,
        status=status,
        settings=run.settings,
        environment=run.environment,
        workload=run.workload,
        summary=_summary(run, measured),
        problems=run.problems,
        files=run,
    )


def _summary(run: Run, measured: bool) -> Summary:
    """Returns the summary. Raises RunDirectoryError if it is missing, damaged or has nothing to compare."""
    path = run.path / SUMMARY
    error = (run.record.error or {}).get("message")
    end = f"it {ENDS[run.status]}{f': {error}' if error and error != run.status else ''}"
    summary = run.summary
    if summary is None and not measured:
        return NO_MEASUREMENTS
    if summary is None:
        kind = RunDirectoryError if run.status == COMPLETED else NothingMeasured
        raise kind(f"{run.path} has no measurements, because {SUMMARY} is missing: {end}", NOTHING)
    if measured and not (summary.metrics and (summary.steady or not kind_of(run.record.command).timed)):
        raise NothingMeasured(f"{path} has no metrics, because nothing was measured: {end}", NOTHING)
    for contradiction in contradictions(summary):
        raise RunDirectoryError(f"{path} is damaged: {contradiction}", DAMAGED)
    return summary
