"""Computes the metrics and the summary of a pipeline from its repeats."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import msgspec

from gpubench import units
from gpubench.events import Handoff
from gpubench.kinds.pipeline.bottleneck import bottleneck
from gpubench.kinds.pipeline.repeats import Completed, PipeRepeat, completed
from gpubench.kinds.pipeline.split import Split
from gpubench.kinds.pipeline.warnings import find_warnings
from gpubench.metrics import Metric
from gpubench.runs.stages import OF_KIND, Digest, HandoffSize, Pipeline, StageSummary, Verification, mean
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import Estimate, Metrics, Summary, energy_each, largest, throttled_shares
from gpubench.runs.warnings import NONE, Settings, more_repeats
from gpubench.telemetry import TelemetrySample


def verdict(assignment: Split, metrics: Sequence[Metric], micro_batches: int, settings: Settings = NONE) -> str | None:
    """A sentence that compares the pipeline with replicas, which have the whole model on every rank.

    Only measured replicas are compared, because their speed depends on what the ranks share, which the pipeline's own
    numbers do not show. None for a single rank, and without a completed repeat.
    """
    known, ranks = {metric.name: metric for metric in metrics}, len(assignment.ranges)
    if ranks == 1 or "makespan" not in known:
        return None
    if micro_batches == 1:
        return "splitting the steps gained nothing: a single micro-batch is on one rank at a time, and the others wait"
    if "replicas_speedup" not in known:
        return "replicas, each with the whole model, were not measured: --baseline replicas compares them"
    replicas, pipeline = (units.seconds(known[name].estimate) for name in ("replicas_makespan", "makespan"))
    made = f"{ranks} replicas, each with the whole model, made the same samples in {replicas}"
    both = f"{made}, and the pipeline took {pipeline}"
    interval = known["replicas_speedup"].interval
    if interval is None:
        return f"{both}; one repeat does not tell whether that is a difference: {more_repeats(settings)}"
    low, high = interval
    sure = f"95 % interval of the ratio {units.digits(low)} to {units.digits(high)}"
    if high < 1:
        return (
            f"plain data parallelism is faster: {both} ({sure}); splitting the steps pays only if a rank cannot hold "
            "every part of the model, or if samples must arrive one by one"
        )
    if low > 1:
        return f"splitting the steps was worth it here: {both} ({sure})"
    return f"neither is measurably faster: {both} ({sure})"


def summarise(
    repeats: Sequence[PipeRepeat],
    samples: int,
    telemetry: Sequence[TelemetrySample] = (),
    gpus: Sequence[int] = (),
    settings: Settings = NONE,
) -> Summary:
    """Returns the summary of the repeats. Metrics whose value is unknown are absent.

    `samples` is the number of samples to make. `gpus` are the indices of the run's GPUs in `telemetry`.
    """
    found = completed(repeats)
    windows = [SteadyWindow(one.repeat.number, 0, len(one.evaluations), True, one.start, one.end) for one in found]
    slowed = throttled_shares(telemetry, windows)

    metrics = Metrics(found, sum(len(one.evaluations) for one in found), None)
    for name, estimate in ESTIMATES.items():
        metrics.add(name, estimate, SINGLE.get(name))
    metrics.add("energy_per_sample", lambda one: energy_each(telemetry, one.start, one.end, gpus, len(one.made)))
    made = list(_agreeing(metrics.made))
    return Summary(
        metrics=made,
        steady=windows,
        ranks=[],
        flops=None,
        peak=None,
        measured_peak=None,
        throttled=slowed,
        warnings=find_warnings(repeats, found, samples, slowed, settings),
        pipeline=_pipeline(repeats, found, made, settings),
    )


SPEEDUPS = {"pipeline_speedup": "sequential_makespan", "replicas_speedup": "replicas_makespan"}
"""The makespan that is divided by the pipeline's own, of the same repeat."""


def _agreeing(metrics: Sequence[Metric]) -> Iterable[Metric]:
    """Replaces each speed-up by the ratio of the mean makespans, so that the printed numbers agree."""
    known = {metric.name: metric.estimate for metric in metrics}
    for metric in metrics:
        if other := SPEEDUPS.get(metric.name):
            yield msgspec.structs.replace(metric, estimate=known[other] / known["makespan"])
        else:
            yield metric


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _latencies(one: Completed) -> list[float]:
    return [sample.finished - sample.started for sample in one.made]


def _send_times(one: Completed) -> list[float]:
    return [handoff.total - handoff.waited for handoff in one.sends]


def _steady_throughput(one: Completed) -> float | None:
    """Samples per second after the first sample; None if there is one sample or all finished at once."""
    first, last = one.made[0].finished, one.made[-1].finished
    return sum(sample.finished > first for sample in one.made) / (last - first) if last > first else None


def _ideal(one: Completed) -> tuple[float, float]:
    """Returns the makespan and the bubble of the same work in the same order with hand-offs that take no time.

    Each micro-batch passes the ranks in order, and each rank takes the micro-batches in order, so no pipeline with real
    hand-offs is shorter.
    """
    work: dict[tuple[int, int], float] = defaultdict(float)
    for span in one.repeat.spans:
        if OF_KIND[span.kind] == "compute":
            work[span.sample, span.rank] += span.total
    free = [0.0] * len(one.assignment.ranges)  # time at which each rank has finished its earlier work
    for sample in sorted({sample for sample, _ in work}):
        arrived = 0.0
        for rank, since in enumerate(free):
            free[rank] = arrived = max(arrived, since) + work[sample, rank]
    makespan = min(free[-1], one.makespan)  # times since the epoch are rounded to a quarter of a microsecond
    return makespan, max(0.0, 1 - sum(work.values()) / (len(free) * makespan))


def _sequential(one: Completed) -> float | None:
    """None if one rank alone did not make the same samples."""
    for baseline in one.baselines("sequential"):
        if sorted(baseline.samples) == sorted(sample.sample for sample in one.made):
            return baseline.wall
    return None


def _speedup(one: Completed, other: float | None) -> float | None:
    return None if other is None else other / one.makespan


def _replicas(one: Completed) -> float | None:
    """None unless the replicas made all samples."""
    walls = one.baselines("replicas")
    made = sorted(sample for baseline in walls for sample in baseline.samples)
    whole = made == sorted(sample.sample for sample in one.made)
    return max(baseline.wall for baseline in walls) if whole else None


def _encoding(one: Completed) -> float | None:
    taken = [built.encode_seconds for built in one.repeat.built.values() if built.encode_seconds is not None]
    return max(taken, default=None)


def _verified(one: Completed) -> float | None:
    compared = one.repeat.comparisons()
    return fmean(compared.values()) if compared else None


SINGLE: dict[str, Callable[[Completed], list[float]]] = {
    "sample_latency": _latencies,
    "evaluation_time": lambda one: one.evaluations,
    "handover_time": _send_times,
}
"""The single values behind an estimate, for metrics with a distribution."""

ESTIMATES: dict[str, Estimate[Completed]] = {
    "throughput": lambda one: len(one.made) / one.makespan,
    "steady_throughput": _steady_throughput,
    "makespan": lambda one: one.makespan,
    "time_to_first_sample": lambda one: one.made[0].finished - one.start,
    "sample_latency": lambda one: fmean(_latencies(one)),
    "evaluation_time": lambda one: fmean(one.evaluations),
    "pipeline_efficiency": lambda one: _ideal(one)[0] / one.makespan,
    "bubble": lambda one: 1 - fmean(times.share("compute") for times in one.times),
    "ideal_bubble": lambda one: _ideal(one)[1],
    "remainder_cost": lambda one: one.assignment.remainder_cost,
    "handover_bytes": lambda one: _mean([handoff.size for handoff in one.sends]),
    "handover_time": lambda one: _mean(_send_times(one)),
    "sequential_makespan": _sequential,
    "pipeline_speedup": lambda one: _speedup(one, _sequential(one)),
    "replicas_makespan": _replicas,
    "replicas_speedup": lambda one: _speedup(one, _replicas(one)),
    "encode_time": _encoding,
    "decode_time": lambda one: _mean(one.repeat.seconds("decode")),
    "model_build_time": lambda one: max(built.seconds for built in one.repeat.built.values()),
    "peak_memory_allocated": lambda one: largest(one.repeat.stages.values(), "peak_allocated"),
    "peak_memory_reserved": lambda one: largest(one.repeat.stages.values(), "peak_reserved"),
    "peak_memory_rss": lambda one: largest(one.repeat.stages.values(), "peak_rss"),
    "verified_samples": _verified,
    "yardstick_time": lambda one: one.repeat.reference_time,
}
"""The estimate of each metric in one completed repeat; None if it is unknown."""


def _pipeline(
    repeats: Sequence[PipeRepeat], found: Sequence[Completed], metrics: Sequence[Metric], settings: Settings
) -> Pipeline | None:
    """None until a rank has reported the pipeline's facts."""
    built = next((built for repeat in repeats for built in repeat.built.values()), None)
    if built is None:
        return None
    assignment = Split(tuple(built.ranges))
    digests = list(_digests(repeats))
    first = found[0] if found else None
    return Pipeline(
        model=built.model,
        parameters=built.parameters,
        scheduler=built.scheduler,
        evaluations=assignment.total,
        latent_shape=built.latent_shape,
        carried=built.carried,
        assignment=assignment.sentence(),
        bottleneck=bottleneck(found),
        stages=[_stage(rank, assignment, repeats, found) for rank in range(len(assignment.ranges))],
        handover=_handoff_size([one for repeat in repeats for one in repeat.handoffs if one.direction == "send"]),
        steady=(first.made[0].finished - first.start, first.made[-1].finished - first.start) if first else None,
        samples=digests,
        verification=_verification(repeats, digests),
        verdict=verdict(assignment, metrics, first.micro_batches if first else 0, settings),
        threads=built.threads,
    )


def _stage(rank: int, assignment: Split, repeats: Sequence[PipeRepeat], found: Sequence[Completed]) -> StageSummary:
    done = [repeat.stages[rank] for repeat in repeats if rank in repeat.stages]
    handoffs = [handoff for repeat in repeats for handoff in repeat.handoffs if handoff.rank == rank]
    start, end = assignment.ranges[rank]
    return StageSummary(
        rank=rank,
        start=start,
        end=end,
        times=mean([one.times[rank] for one in found]) if found else None,
        evaluation_time=_mean([total for repeat in repeats for total in repeat.seconds("evaluate", rank)]),
        peak_allocated=max((peak for stage in done if (peak := stage.peak_allocated) is not None), default=None),
        peak_rss=max((stage.peak_rss for stage in done), default=None),
        sent=sum(handoff.direction == "send" for handoff in handoffs),
        received=sum(handoff.direction == "recv" for handoff in handoffs),
    )


def _handoff_size(sends: Sequence[Handoff]) -> HandoffSize | None:
    if not sends:
        return None
    return HandoffSize(
        header=fmean(handoff.header_bytes for handoff in sends),
        latent=fmean(handoff.latent_bytes for handoff in sends),
        state=fmean(handoff.state_bytes for handoff in sends),
        generator=fmean(handoff.generator_bytes for handoff in sends),
    )


def _digests(repeats: Sequence[PipeRepeat]) -> Iterable[Digest]:
    compared = [repeat.comparisons() for repeat in repeats]
    for number in sorted({number for repeat in repeats for number in repeat.samples}):
        first, *others = [repeat.samples[number] for repeat in repeats if number in repeat.samples]
        identical = [results[number] for results in compared if number in results]
        yield Digest(
            sample=number,
            seed=first.seed,
            sha256=first.sha256,
            identical=all(identical) if identical else None,
            reproduced=all(other.sha256 == first.sha256 for other in others) if others else None,
        )


def _verification(repeats: Sequence[PipeRepeat], digests: Sequence[Digest]) -> Verification | None:
    verified = [repeat.verified for repeat in repeats if repeat.verified]
    if not verified:
        return None
    return Verification(
        reference=verified[0].reference,
        samples=sum(digest.identical is not None for digest in digests),
        identical=sum(digest.identical is True for digest in digests),
        divergence=next((one.divergence for one in verified if one.divergence), None),
    )
