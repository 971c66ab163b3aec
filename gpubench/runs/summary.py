"""Computes the metrics and warnings of a run from the steps of all repeats and ranks, and writes them.

The time of a step is that of the rank which is slowest in it. The phases of a run are those of its slowest rank: the
one whose steady window took the most time. Throughput is the samples of all ranks over the time of the steady window.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpubench import hardware
from gpubench.events import SHORTEST, FlopsCounted, PeakMeasured, RepeatDone, StageDone, WorkCounted
from gpubench.metrics import LATENCIES, Distribution, Metric, definition_of
from gpubench.runs import stats, warnings
from gpubench.runs.clocks import ClockRates
from gpubench.runs.directory import SCHEMA_VERSION, SUMMARY, SUMMARY_TABLE, RunWriter
from gpubench.runs.gpu_state import energy_between, throttled
from gpubench.runs.other_load import OtherLoad
from gpubench.runs.stages import Pipeline
from gpubench.runs.steps import Floats, Measured, Repeat, SteadyWindow, StepSamples, StepTable, measure, steady_from
from gpubench.telemetry import Sampling, TelemetrySample

EXPOSED = "exposed_communication"
LATENCY = ("host_to_device", "forward")
"""The phases between a batch in the memory of the CPU and its result."""

M = TypeVar("M")
Estimate = Callable[[M], float | None]
"""Returns the estimate of one repeat; None if it is unknown."""


class Metrics(Generic[M]):
    """Collects metrics, each with one estimate per repeat."""

    def __init__(self, found: Sequence[M], steps: int, effective_steps: float | None) -> None:
        """`steps` is the number of steps behind every metric, and `effective_steps` their effective sample size."""
        self.found = found
        self.made: list[Metric] = []
        self._behind = steps, effective_steps

    def add(self, name: str, estimate: Estimate[M], single: Callable[[M], ArrayLike] | None = None) -> None:
        """Adds a metric if every repeat has an estimate. `single` returns the values that an estimate is made of."""
        estimates = [estimate(one) for one in self.found]
        known = [value for value in estimates if value is not None]
        if known and len(known) == len(estimates):
            distribution = stats.describe([single(one) for one in self.found]) if single else None
            self.add_estimates(name, known, distribution)

    def add_estimates(self, name: str, repeats: list[float], distribution: Distribution | None = None) -> None:
        """Adds a metric from the estimate of each repeat."""
        self.made.append(metric_of(name, repeats, *self._behind, distribution))


def largest(reports: Iterable[RepeatDone | StageDone], name: str) -> float | None:
    """Returns the largest value of the field `name`, such as peak_rss, among the ranks; None if no rank knows it."""
    return max((size for report in reports if (size := getattr(report, name))), default=None)


def energy_each(
    telemetry: Sequence[TelemetrySample], start: float, end: float, gpus: Sequence[int], samples: int
) -> float | None:
    """Returns the energy per sample in joules; None without an energy counter or without samples."""
    joules = energy_between(telemetry, start, end, gpus) if gpus and samples else None
    return None if joules is None else joules / samples


def metric_of(
    name: str, repeats: list[float], steps: int, effective_steps: float | None, distribution: Distribution | None
) -> Metric:
    """Returns the metric `name` from its estimate in each repeat; `steps` is the number of steps behind them."""
    definition = definition_of(name)
    estimate, interval = stats.mean_and_interval(name, repeats)
    return Metric(
        name=name,
        unit=definition.unit,
        better=definition.better,
        estimate=estimate,
        interval=interval,
        n=steps,
        effective_n=effective_steps,
        repeats=repeats,
        distribution=distribution,
    )


def relative_half_width(name: str, repeats: Sequence[float]) -> float | None:
    """Returns the relative half-width of a metric's 95 % interval, as defined by `Metric.reach`."""
    return metric_of(name, list(repeats), 0, None, None).reach if repeats else None


class RankTimes(msgspec.Struct, frozen=True):
    """The means of one rank over the steady steps of all repeats, in seconds per step."""

    rank: int
    step_time: float
    busy_time: float
    """The step time without the exposed communication."""
    slowest: float
    """The fraction of the steps in which no other rank had a longer busy time."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The main facts of environment.json and run.json; None for an unknown fact."""

    host: str | None
    device: str | None
    """The name of the GPU, or of the CPU if the run used no GPU."""
    torch: str | None
    cuda: str | None
    """The CUDA version of the PyTorch build."""
    driver: str | None
    python: str | None
    gpubench: str | None
    commit: str | None
    """The commit of the working directory. `dirty` tells whether tracked files differed from it."""
    dirty: bool | None


class Summary(msgspec.Struct, frozen=True):
    metrics: list[Metric]
    steady: list[SteadyWindow]
    ranks: list[RankTimes]
    flops: FlopsCounted | None
    peak: hardware.Peak | None
    measured_peak: PeakMeasured | None
    throttled: dict[str, float]
    """For each reason, the fraction of the steady time in which it held the GPU's clocks down."""
    warnings: list[str]
    pipeline: Pipeline | None = None
    """The part that only a pipeline has."""
    others: OtherLoad | None = None
    """The load of other processes during the steady windows. `others` is the field's name in summary.json."""
    sampling: Sampling | None = None
    """The cost of the hardware samples."""
    environment: Environment | None = None
    missed: dict[str, str] = {}
    """The settings that found nothing to change in a program of the user, by dot-key, each with the reason."""
    work: list[WorkCounted | None] = []
    """The counted work of each repeat, in the order of `steady`; None for a repeat that has not counted it."""
    clock_rates: list[ClockRates | None] = []
    """The bounds of the rate of a program's clock in each repeat, in the order of `steady`; None where none are known.

    It is empty if none are known at all, as for models of gpubench, and for inference, whose pauses belong to no step.
    """
    watched: dict[str, list[list[float]]] = {}
    """The numbers that the user watches in the output of a program: by name, those of each repeat of `steady`."""
    samples: StepSamples | None = None
    """None if the samples are unknown."""
    timed_by: str = ""
    """What the times of a program of the user are from; empty if it uses no GPU."""
    compiled: int = 0
    """The number of steady steps of all repeats in which torch.compile compiled code of a program of the user."""

    def __getitem__(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)

    def get(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)


NO_MEASUREMENTS = Summary([], [], [], None, None, None, {}, [])


def write_summary(summary: Summary, writer: RunWriter) -> None:
    """Writes summary.json and summary.csv, which replace those of earlier repeats."""
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(summary)})
    writer.replace(SUMMARY_TABLE, to_csv(summary.metrics))


def to_csv(metrics: Sequence[Metric]) -> str:
    """Returns the metrics as CSV, one a line."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["name", "unit", "better", "estimate", "low", "high", "repeats", "n", "effective_n"])
    for metric in metrics:
        low, high = metric.interval or ("", "")
        row = [metric.name, metric.unit, metric.better or "", metric.estimate, low, high, len(metric.repeats)]
        rows.writerow([*row, metric.n, metric.effective_n or ""])
    return table.getvalue()


def summarise(
    repeats: Sequence[Repeat],
    device_name: str | None,
    precision: str,
    flops: FlopsCounted | None = None,
    measured_peak: PeakMeasured | None = None,
    telemetry: Sequence[TelemetrySample] = (),
    gpus: Sequence[int] = (),
    matmul_precision: str | None = None,
    device_memory: int | None = None,
    inference: bool = False,
    settings: warnings.Settings = warnings.NONE,
) -> Summary:
    """Returns the summary of the repeats. Metrics whose value is unknown are absent.

    `device_name` is None on a CPU. `device_memory` is in bytes; None if unknown. `gpus` are the indices of the run's
    GPUs in `telemetry`. `matmul_precision` is how float32 products were computed; None if it follows from `precision`.
    The steps of `inference` have a latency, and those of different ranks do not belong together. `settings` are those
    of the run.
    """
    found = measure(repeats)
    peak = hardware.peak_flops(device_name, precision, matmul_precision, device_memory) if device_name else None
    metrics = _metrics(found)
    if found:
        if inference:
            _latencies(metrics)
        _times(metrics, inference=inference)
        _efficiency(metrics, flops, peak, measured_peak, telemetry, gpus)
        _costs(metrics)
    windows, samples = [measured.window for measured in found], _samples(found)
    rates = [] if inference else [measured.repeat.clock_rates for measured in found]
    slowed = throttled_shares(telemetry, windows)
    return Summary(
        metrics=metrics.made,
        steady=windows,
        ranks=_ranks(found),
        flops=flops,
        peak=peak,
        measured_peak=measured_peak if measured_peak and measured_peak.flops_per_s else None,
        throttled=slowed,
        warnings=warnings.of_training(
            windows,
            {metric.name: metric for metric in metrics.made},
            slowed,
            unknown_peak=(device_name, precision) if device_name and not peak else None,
            flops=flops,
            measured_peak=measured_peak,
            diverged=min((since for one in found if (since := _diverged(one)) is not None), default=None),
            samples=None if inference else samples,
            settings=settings,
        )
        + warnings.collected((_unknown_quantiles if inference else _rare_evaluation)(found, settings))
        + warnings.unanswered({query: error for repeat in repeats for query, error in repeat.unanswered.items()}),
        work=[] if inference else [measured.repeat.work for measured in found],
        clock_rates=rates if any(rates) else [],
        samples=samples,
        timed_by=next((said for measured in found if (said := measured.repeat.timed_by)), ""),
    )


def _metrics(found: Sequence[Measured]) -> Metrics[Measured]:
    return Metrics(
        found,
        sum(measured.window.steps for measured in found),
        sum(stats.effective_size(measured.totals) for measured in found),
    )


OF_THROUGHPUT = ("token_throughput", "mfu", "hfu", "mfu_of_measured_peak")
"""The metrics that are the throughput times a number that does not depend on the steps."""


def since(first: int, summary: Summary, table: StepTable) -> Summary:
    """Returns the summary with the steps before step `first` as the warm-up of each repeat.

    `table` has all steps of the run. What follows from the steps is computed anew; memory, energy, the costs of set-up
    and what telemetry has shown stay as they are. Returns `summary` itself if a repeat has no steps from there on.
    """
    found: list[Measured] = []
    for window in summary.steady:
        recorded = table.of_repeat(window.repeat)
        if not recorded or min(map(len, recorded.values())) <= first:
            return summary
        again = steady_from(first, Repeat(window.repeat), recorded, settled=window.settled)
        kept = msgspec.structs.replace(again.window, partial_first=window.partial_first)
        found.append(replace(again, window=kept))
    known = {metric.name: metric for metric in summary.metrics}
    inference = any(name in known for name in LATENCIES)
    metrics = _metrics(found)
    if inference:
        _latencies(metrics)
    _times(metrics, inference=inference)
    metrics.add("skipped_steps", _skipped)
    metrics.add("warmup_time", _warmup_time)
    new = {metric.name: metric for metric in metrics.made}
    if "throughput" in known and "throughput" in new:
        before, after = known["throughput"].repeats, new["throughput"].repeats
        for name in OF_THROUGHPUT:
            if name in known:
                repeats = zip(known[name].repeats, before, after, strict=True)
                metrics.add_estimates(name, [value * now / then for value, then, now in repeats])
        new = {metric.name: metric for metric in metrics.made}
    return msgspec.structs.replace(
        summary,
        metrics=[new.get(one.name, one) for one in summary.metrics if one.name in new or one.name not in LATENCIES],
        steady=[one.window for one in found],
        ranks=_ranks(found),
    )


def _samples(found: Sequence[Measured]) -> StepSamples | None:
    if not any(measured.counts_samples for measured in found):
        return None
    each = np.concatenate([measured.by_step(lambda steps: steps.counted_samples).sum(axis=0) for measured in found])
    numbers, times = np.unique(each, return_counts=True)
    usual = int(numbers[len(numbers) - 1 - int(np.argmax(times[::-1]))])
    said = next((said for measured in found if (said := measured.repeat.samples_from)), "")
    return StepSamples(_mean(each), usual, said)


def throttled_shares(telemetry: Sequence[TelemetrySample], windows: Sequence[SteadyWindow]) -> dict[str, float]:
    """Returns for each reason the fraction of the windows' time in which it held the GPU's clocks down."""
    slowed: dict[str, float] = {}
    for window in windows:
        for reason, share in throttled(telemetry, window.start, window.end).items():
            slowed[reason] = slowed.get(reason, 0.0) + share / len(windows)
    return slowed


def _latencies(metrics: Metrics[Measured]) -> None:
    for name, share in LATENCIES.items():
        metrics.add(name, lambda m, share=share: stats.quantile(_latency(m), share))  # type: ignore[misc]


def _latency(measured: Measured) -> Floats:
    """Returns the latency of each step of all ranks, which answer independently of each other."""
    return np.concatenate([sum(steps.phase(name) for name in LATENCY) for steps in measured.ranks.values()])


def _rare_evaluation(found: Sequence[Measured], settings: warnings.Settings) -> str | None:
    """Warns of evaluation in a few steps, for the repeat in which it is in the fewest."""
    counts = [(int(np.count_nonzero(one.steps.phase("evaluation"))), one.window.steps) for one in found]
    return warnings.evaluated_rarely(*min(counts), settings) if counts else None


def _unknown_quantiles(found: Sequence[Measured], settings: warnings.Settings) -> str | None:
    """Warns of the quantiles that the repeat with the fewest latencies has too few for."""
    fewest = min((len(_latency(measured)) for measured in found), default=0)
    unknown = {
        name: stats.least_values(share) for name, share in LATENCIES.items() if stats.least_values(share) > fewest
    }
    return warnings.too_few_latencies(fewest, unknown, settings) if found else None


def _times(metrics: Metrics[Measured], *, inference: bool) -> None:
    found = metrics.found
    built = found[0].repeat.built
    metrics.add("throughput", lambda m: m.throughput if m.counts_samples else None)
    if built and (tokens := built.tokens_per_sample):
        metrics.add("token_throughput", lambda m: m.throughput * tokens)
    metrics.add("step_time", lambda m: m.wall / m.window.steps, None if inference else lambda m: m.totals)
    for phase in dict.fromkeys(name for m in found for name in m.steps.phases):
        metrics.add(f"phase_{phase}", *_of_phase(phase))
    metrics.add("mean_of_rates", _mean_of_rates)
    if not inference:
        if len(found[0].ranks) > 1:
            metrics.add("straggler_skew", _skew)
        metrics.add("starved_steps", _idle_at_start)
    metrics.add("closure_error", _closure_error)


def _of_phase(phase: str) -> tuple[Estimate[Measured], Callable[[Measured], Floats]]:
    return lambda m: m.phase(phase), lambda m: m.steps.phase(phase)


def _mean_of_rates(measured: Measured) -> float | None:
    if not measured.counts_samples:
        return None
    made = measured.by_step(lambda steps: steps.counted_samples).sum(axis=0)
    return _mean(made / measured.totals)


def _busy(steps: StepTable) -> Floats:
    return steps.total - steps.phase(EXPOSED)


def _skew(measured: Measured) -> float:
    """Returns the mean excess of the busiest rank over the lower median of all, as a fraction of the step."""
    busy = np.sort(measured.by_step(_busy), axis=0)
    return _mean((busy[-1] - busy[(len(busy) - 1) // 2]) / measured.totals)


def _idle_at_start(measured: Measured) -> float | None:
    starved = measured.steps.starved
    known = starved[~np.isnan(starved)]
    return _mean(known) if len(known) else None


def _closure_error(measured: Measured) -> float | None:
    """Returns the relative difference between the sum of the steps and the wall time; None without a wall time."""
    done = measured.repeat.done.get(measured.slowest_rank)
    if done is None or done.wall < SHORTEST:
        return None
    steps = measured.recorded[measured.slowest_rank]
    phases = np.abs(sum(steps.phases.values()) / steps.total - 1).max()
    return max(float(phases), abs(steps.wall / done.wall - 1))


def _efficiency(
    metrics: Metrics[Measured],
    flops: FlopsCounted | None,
    peak: hardware.Peak | None,
    measured_peak: PeakMeasured | None,
    telemetry: Sequence[TelemetrySample],
    gpus: Sequence[int],
) -> None:
    ranks = len(metrics.found[0].ranks)

    def share(work: float | None, ceiling: float | None) -> Estimate[Measured]:
        return lambda m: m.throughput * work / ranks / ceiling if work and ceiling else None

    model = flops.model_flops_per_sample if flops else None
    recomputed = flops.hardware_flops_per_sample if flops else None
    ceiling = measured_peak.flops_per_s if measured_peak else None
    metrics.add("model_flops_per_sample", lambda _: model)
    metrics.add("mfu", share(model, peak.flops_per_s if peak else None))
    if recomputed != model:
        metrics.add("hfu", share(recomputed, peak.flops_per_s if peak else None))
    metrics.add("measured_peak", lambda _: ceiling)
    metrics.add("mfu_of_measured_peak", share(model, ceiling))

    metrics.add("energy_per_sample", lambda m: energy_each(telemetry, m.window.start, m.window.end, gpus, m.samples))


def _costs(metrics: Metrics[Measured]) -> None:
    metrics.add("peak_memory_allocated", lambda m: largest(m.repeat.done.values(), "peak_allocated"))
    metrics.add("peak_memory_reserved", lambda m: largest(m.repeat.done.values(), "peak_reserved"))
    metrics.add("setup_peak_memory_allocated", lambda m: largest(m.repeat.done.values(), "setup_peak_allocated"))
    metrics.add("setup_peak_memory_reserved", lambda m: largest(m.repeat.done.values(), "setup_peak_reserved"))
    metrics.add("peak_memory_rss", lambda m: largest(m.repeat.done.values(), "peak_rss"))
    metrics.add("first_step_time", lambda m: _first_steps(m, 1))
    metrics.add("warmup_time", _warmup_time)
    metrics.add("model_build_time", lambda m: m.repeat.built.seconds if m.repeat.built else None)
    metrics.add("yardstick_time", lambda m: m.repeat.reference_time)
    metrics.add("probe_time", lambda m: largest(m.repeat.done.values(), "probe_time"))
    metrics.add("probe_share", _probe_share)
    metrics.add("final_loss", _final_loss)
    metrics.add("skipped_steps", _skipped)


def _warmup_time(measured: Measured) -> float | None:
    return _first_steps(measured, measured.window.first)


def _first_steps(measured: Measured, count: int) -> float | None:
    if measured.window.partial_first and count:
        return None
    return max(steps[:count].wall for steps in measured.recorded.values())


def _skipped(measured: Measured) -> float:
    return float(np.count_nonzero(measured.steps.skipped))


def _probe_share(measured: Measured) -> float | None:
    """Returns the share of a step by which the probe makes it longer; None if it is unknown what a GPU hides of it."""
    took, idle = largest(measured.repeat.done.values(), "probe_time"), _idle_at_start(measured)
    if took is None or (idle is None and measured.repeat.timed_by):
        return None
    share = min(1.0, took * measured.window.steps / measured.wall)
    return share if idle is None else share * idle


def _final_loss(measured: Measured) -> float | None:
    losses = measured.by_step(lambda steps: steps.loss)[:, -1]
    return _mean(losses) if np.isfinite(losses).all() else None


def _diverged(measured: Measured) -> int | None:
    """Returns the first step of a rank from which on none of its known losses is finite; None if there is none.

    A step that the gradient scaler skipped has changed no parameter, whatever its loss is.
    """
    ends = []
    for steps in measured.recorded.values():
        last = max(np.flatnonzero(np.isfinite(steps.loss) | steps.skipped), default=-1)
        after = np.flatnonzero(np.isinf(steps.loss[last + 1 :]))
        if len(after):
            ends.append(int(steps.step[last + 1 + after[0]]))
    return min(ends, default=None)


def _ranks(found: Sequence[Measured]) -> list[RankTimes]:
    if not found or len(found[0].ranks) < 2:
        return []
    total = np.concatenate([measured.by_step(lambda steps: steps.total) for measured in found], axis=1)
    busy = np.concatenate([measured.by_step(_busy) for measured in found], axis=1)
    slowest = busy >= busy.max(axis=0)
    return [
        RankTimes(rank=rank, step_time=_mean(total[row]), busy_time=_mean(busy[row]), slowest=_mean(slowest[row]))
        for row, rank in enumerate(found[0].ranks)
    ]


def _mean(values: NDArray[Any]) -> float:
    """Returns the mean of a column, with the sum exactly rounded."""
    return fmean(values.tolist())
