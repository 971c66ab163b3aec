"""From the steps of all repeats and ranks to the numbers of a run.

The run's step is its slowest rank's, and every rank's phases are kept apart until one rank speaks for the run: the one
whose steady window took longest. Throughput is defined once: samples of all ranks over the wall of the steady window.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median_low

import msgspec

from gpubench import cautions, hardware, stats
from gpubench.diffusion.stages import Pipeline
from gpubench.estimates import Estimate, Metrics, energy_each, largest
from gpubench.events import FlopsCounted, PeakMeasured, Step
from gpubench.metrics import Metric
from gpubench.steady import Measured, Repeat, SteadyWindow, measure
from gpubench.telemetry import Others, TelemetrySample, throttled

EXPOSED = "exposed_communication"


class Rank(msgspec.Struct, frozen=True):
    """One rank beside the others, over the steady steps of all repeats. Times are seconds a step."""

    rank: int
    step_time: float
    busy_time: float
    """Step time less what it waited in exposed communication."""
    slowest: float
    """Fraction of the steps in which no other rank was busier."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The main facts of environment.json and run.json; None where one is not known."""

    host: str | None
    device: str | None
    """Name of the GPU, or of the CPU where the run was on none."""
    torch: str | None
    cuda: str | None
    """Of the PyTorch build."""
    driver: str | None
    python: str | None
    gpubench: str | None
    commit: str | None
    """Of the working directory; `dirty` says whether tracked files differed from it."""
    dirty: bool | None


class Summary(msgspec.Struct, frozen=True):
    metrics: list[Metric]
    steady: list[SteadyWindow]
    ranks: list[Rank]
    flops: FlopsCounted | None
    peak: hardware.Peak | None
    measured_peak: PeakMeasured | None
    throttled: dict[str, float]
    """Fraction of the steady time in which each reason held the GPU's clocks down."""
    warnings: list[str]
    pipeline: Pipeline | None = None
    """What only a pipeline has."""
    others: Others | None = None
    """What other processes took of the machine meanwhile."""
    environment: Environment | None = None

    def __getitem__(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)

    def get(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)


def summarise(
    repeats: Sequence[Repeat],
    warmup_steps: int,
    device_name: str | None,
    precision: str,
    flops: FlopsCounted | None = None,
    measured_peak: PeakMeasured | None = None,
    telemetry: Sequence[TelemetrySample] = (),
    gpus: Sequence[int] = (),
    matmul_precision: str | None = None,
) -> Summary:
    """Everything that can be said of the repeats; a metric that cannot be known is absent, never guessed.

    `device_name` is None on a CPU. `gpus` are the indices that `telemetry` knows the run's GPUs by. `matmul_precision`
    is how float32 products were computed, where the settings say; else it follows from `precision`.
    """
    found = [measured for repeat in repeats if (measured := measure(repeat, warmup_steps))]
    peak = hardware.peak_flops(device_name, precision, matmul_precision) if device_name else None
    metrics = Metrics(
        found,
        sum(measured.window.steps for measured in found),
        sum(stats.effective_size(measured.totals) for measured in found),
    )
    if found:
        _times(metrics)
        _efficiency(metrics, flops, peak, measured_peak, telemetry, gpus)
        _costs(metrics)
    windows = [measured.window for measured in found]
    slowed = held_down(telemetry, windows)
    return Summary(
        metrics=metrics.made,
        steady=windows,
        ranks=_ranks(found),
        flops=flops,
        peak=peak,
        measured_peak=measured_peak,
        throttled=slowed,
        warnings=_warnings(metrics, slowed, peak, flops, device_name, precision),
    )


def held_down(telemetry: Sequence[TelemetrySample], windows: Sequence[SteadyWindow]) -> dict[str, float]:
    """Fraction of the windows' time in which each reason held the GPU's clocks down."""
    slowed: dict[str, float] = {}
    for window in windows:
        for reason, share in throttled(telemetry, window.start, window.end).items():
            slowed[reason] = slowed.get(reason, 0.0) + share / len(windows)
    return slowed


def shared_warnings(repeats: int, slowed: dict[str, float]) -> list[str]:
    """What may be wrong with the measurement of any command."""
    said = [f"{cautions.LONE}: {cautions.MORE}"] * (repeats == 1)
    return said + list(filter(None, [cautions.held_down(slowed)]))


def _times(metrics: Metrics[Measured]) -> None:
    found = metrics.found
    built = found[0].repeat.built
    metrics.add("throughput", lambda m: m.throughput)
    if built and (tokens := built.tokens_per_sample):
        metrics.add("token_throughput", lambda m: m.throughput * tokens)
    metrics.add("step_time", lambda m: m.wall / m.window.steps, lambda m: m.totals)
    for phase in dict.fromkeys(name for m in found for name in m.steps.phases):
        metrics.add(f"phase_{phase}", *_of_phase(phase))
    metrics.add("mean_of_rates", _mean_of_rates)
    if len(found[0].ranks) > 1:
        metrics.add("straggler_skew", _skew)
    metrics.add("starved_steps", _starved)
    metrics.add("closure_error", _closure_error)


def _of_phase(phase: str) -> tuple[Estimate[Measured], Callable[[Measured], Sequence[float]]]:
    return lambda m: m.phase(phase), lambda m: m.steps.phase(phase)


def _mean_of_rates(measured: Measured) -> float:
    columns = zip(*measured.ranks.values(), strict=True)
    samples = (sum(step.samples for step in steps if not step.skipped) for steps in columns)
    return fmean(made / total for made, total in zip(samples, measured.totals, strict=True))


def _busy(step: Step) -> float:
    return step.total - step.phases.get(EXPOSED, 0.0)


def _skew(measured: Measured) -> float:
    columns = zip(*measured.ranks.values(), strict=True)
    return fmean(
        (max(busy := [_busy(step) for step in steps]) - median_low(busy)) / max(step.total for step in steps)
        for steps in columns
    )


def _starved(measured: Measured) -> float | None:
    known = [step.starved for step in measured.steps if step.starved is not None]
    return fmean(known) if known else None


def _closure_error(measured: Measured) -> float | None:
    """None while the repeat has not said how long its loop took by the host clock."""
    done = measured.repeat.done.get(measured.speaker)
    if done is None:
        return None
    every = measured.repeat.steps[measured.speaker]
    phases = max(abs(sum(step.phases.values()) / step.total - 1) for step in every)
    return max(phases, abs(sum(every.totals) / done.wall - 1))


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
    def first_steps(measured: Measured, count: int) -> float:
        return max(sum(steps.totals[:count]) for steps in measured.repeat.steps.values())

    metrics.add("peak_memory_allocated", lambda m: largest(m.repeat.done.values(), "peak_allocated"))
    metrics.add("peak_memory_reserved", lambda m: largest(m.repeat.done.values(), "peak_reserved"))
    metrics.add("setup_peak_memory_allocated", lambda m: largest(m.repeat.done.values(), "setup_peak_allocated"))
    metrics.add("setup_peak_memory_reserved", lambda m: largest(m.repeat.done.values(), "setup_peak_reserved"))
    metrics.add("peak_memory_rss", lambda m: largest(m.repeat.done.values(), "peak_rss"))
    metrics.add("first_step_time", lambda m: first_steps(m, 1))
    metrics.add("warmup_time", lambda m: first_steps(m, m.window.first))
    metrics.add("model_build_time", lambda m: m.repeat.built.seconds if m.repeat.built else None)
    metrics.add("yardstick_time", lambda m: m.repeat.yardstick)
    metrics.add("final_loss", _final_loss)
    metrics.add("skipped_steps", lambda m: float(sum(step.skipped for step in m.steps)))


def _final_loss(measured: Measured) -> float | None:
    losses = [steps[-1].loss for steps in measured.ranks.values()]
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def _ranks(found: Sequence[Measured]) -> list[Rank]:
    if not found or len(found[0].ranks) < 2:
        return []
    steps = {rank: [step for m in found for step in m.ranks[rank]] for rank in found[0].ranks}
    busiest = [max(_busy(step) for step in column) for column in zip(*steps.values(), strict=True)]
    return [
        Rank(
            rank=rank,
            step_time=fmean(step.total for step in own),
            busy_time=fmean(_busy(step) for step in own),
            slowest=fmean(_busy(step) >= most for step, most in zip(own, busiest, strict=True)),
        )
        for rank, own in steps.items()
    ]


def _warnings(
    metrics: Metrics[Measured],
    slowed: dict[str, float],
    peak: hardware.Peak | None,
    flops: FlopsCounted | None,
    device_name: str | None,
    precision: str,
) -> list[str]:
    said = shared_warnings(len(metrics.found), slowed)
    if unsettled := cautions.unsettled([measured.window.settled for measured in metrics.found]):
        said.append(f"{unsettled}: {cautions.LONGER}")
    closure = metrics.get("closure_error")
    if closure and (unclosed := cautions.unclosed(closure.repeats)):
        said.append(unclosed)
    skipped = metrics.get("skipped_steps")
    if skipped and sum(skipped.repeats):
        said.append(
            f"the gradient scaler skipped {sum(skipped.repeats):.0f} steady steps: they count as time, not as work"
        )
    if device_name and not peak:
        said.append(f"no MFU: the dense {precision} peak of {device_name!r} is not known")
    if flops and flops.reason:
        said.append(f"no FLOP count: {flops.reason}")
    return said
