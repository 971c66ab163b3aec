"""From the events of all ranks of a pipeline to the numbers of a run.

A repeat counts once every rank is done with all samples; its makespan is from rank 0's start to the last rank's end,
fill and drain included. Of one that ended early there is still what its samples and hand-overs said of themselves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import msgspec

from gpubench.diffusion import timeline
from gpubench.diffusion.repeat import Completed, PipeRepeat, completed
from gpubench.diffusion.split import Assignment
from gpubench.diffusion.stages import Digest, Handover, Pipeline, Stage, Verification
from gpubench.estimates import Estimate, Metrics, energy_each, largest
from gpubench.events import Handoff
from gpubench.metrics import Metric
from gpubench.pipe_doubts import verdict, warnings
from gpubench.steady import SteadyWindow
from gpubench.summary import Summary, held_down
from gpubench.telemetry import TelemetrySample


def summarise(
    repeats: Sequence[PipeRepeat],
    samples: int,
    telemetry: Sequence[TelemetrySample] = (),
    gpus: Sequence[int] = (),
    crowding: float = 1.0,
) -> Summary:
    """Everything that can be said of the repeats; a metric that cannot be known is absent, never guessed.

    `samples` is how many the run was to make, `gpus` are the indices that `telemetry` knows the run's GPUs by,
    and `crowding` is how many ranks share what one would have for itself.
    """
    found = completed(repeats)
    windows = [SteadyWindow(one.repeat.number, 0, len(one.evaluations), True, one.start, one.end) for one in found]
    slowed = held_down(telemetry, windows)

    metrics = Metrics(found, sum(len(one.evaluations) for one in found), None)
    for name, estimate in ESTIMATES.items():
        metrics.add(name, estimate, SINGLE.get(name))
    metrics.add("replicas_bound", lambda one: _replicas_bound(one, crowding))
    metrics.add("energy_per_sample", lambda one: energy_each(telemetry, one.start, one.end, gpus, len(one.made)))
    return Summary(
        metrics=list(_agreeing(metrics.made)),
        steady=windows,
        ranks=[],
        flops=None,
        peak=None,
        measured_peak=None,
        throttled=slowed,
        warnings=warnings(repeats, found, samples, slowed),
        pipeline=_pipeline(repeats, found, metrics.made),
    )


def _agreeing(metrics: Sequence[Metric]) -> Iterable[Metric]:
    """The speed-up as that of the mean makespans which stand beside it."""
    known = {metric.name: metric.estimate for metric in metrics}
    for metric in metrics:
        if metric.name == "pipeline_speedup":
            yield msgspec.structs.replace(metric, estimate=known["sequential_makespan"] / known["makespan"])
        else:
            yield metric


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _latencies(one: Completed) -> list[float]:
    return [sample.finished - sample.started for sample in one.made]


def _send_times(one: Completed) -> list[float]:
    return [handoff.total - handoff.waited for handoff in one.sends]


def _steady_throughput(one: Completed) -> float | None:
    """None where all finished at once, or there was but one."""
    first, last = one.made[0].finished, one.made[-1].finished
    return sum(sample.finished > first for sample in one.made) / (last - first) if last > first else None


def _efficiency(one: Completed) -> float:
    """Never above 1: micro-batches keep their order, so that no hand-over, however quick, could make it shorter."""
    work: dict[tuple[int, int], float] = defaultdict(float)
    for span in one.repeat.spans:
        if timeline.OF_KIND[span.kind] == "compute":
            work[span.sample, span.rank] += span.total
    free = [0.0] * len(one.assignment.ranges)  # when each rank is done with what came before
    for sample in sorted({sample for sample, _ in work}):
        arrived = 0.0
        for rank, since in enumerate(free):
            free[rank] = arrived = max(arrived, since) + work[sample, rank]
    return min(1.0, free[-1] / one.makespan)  # times since the epoch are rounded to a quarter of a microsecond


def _sequential(one: Completed) -> float | None:
    """None where one rank alone did not make the very same samples."""
    for baseline in one.baselines("sequential"):
        if sorted(baseline.samples) == sorted(sample.sample for sample in one.made):
            return baseline.wall
    return None


def _speedup(one: Completed) -> float | None:
    sequential = _sequential(one)
    return None if sequential is None else sequential / one.makespan


def _replicas_bound(one: Completed, crowding: float) -> float:
    """A rank alone was not crowded; the pipeline's own evaluations were."""
    alone = [seconds for baseline in one.baselines("sequential") for seconds in baseline.seconds]
    each = fmean(alone) * crowding if alone else one.assignment.total * fmean(one.evaluations)
    return one.assignment.turns(one.micro_batches) * each


def _replicas(one: Completed) -> float | None:
    """None unless all samples were made."""
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
"""The single values behind an estimate, where their distribution is of interest."""

ESTIMATES: dict[str, Estimate[Completed]] = {
    "throughput": lambda one: len(one.made) / one.makespan,
    "steady_throughput": _steady_throughput,
    "makespan": lambda one: one.makespan,
    "time_to_first_sample": lambda one: one.made[0].finished - one.start,
    "sample_latency": lambda one: fmean(_latencies(one)),
    "evaluation_time": lambda one: fmean(one.evaluations),
    "pipeline_efficiency": _efficiency,
    "bubble": lambda one: 1 - fmean(times.share("compute") for times in one.times),
    "ideal_bubble": lambda one: one.assignment.bubble(one.micro_batches),
    "remainder_cost": lambda one: one.assignment.remainder_cost,
    "handover_bytes": lambda one: _mean([handoff.size for handoff in one.sends]),
    "handover_time": lambda one: _mean(_send_times(one)),
    "sequential_makespan": _sequential,
    "pipeline_speedup": _speedup,
    "replicas_makespan": _replicas,
    "encode_time": _encoding,
    "decode_time": lambda one: _mean(one.repeat.seconds("decode")),
    "model_build_time": lambda one: max(built.seconds for built in one.repeat.built.values()),
    "peak_memory_allocated": lambda one: largest(one.repeat.stages.values(), "peak_allocated"),
    "peak_memory_reserved": lambda one: largest(one.repeat.stages.values(), "peak_reserved"),
    "peak_memory_rss": lambda one: largest(one.repeat.stages.values(), "peak_rss"),
    "verified_samples": _verified,
    "yardstick_time": lambda one: one.repeat.yardstick,
}
"""Of one repeat that counts, by the name of the metric; None where it cannot be known."""


def _pipeline(repeats: Sequence[PipeRepeat], found: Sequence[Completed], metrics: Sequence[Metric]) -> Pipeline | None:
    """None before any rank has said what the pipeline is made of."""
    built = next((built for repeat in repeats for built in repeat.built.values()), None)
    if built is None:
        return None
    assignment = Assignment(tuple(built.ranges))
    digests = list(_digests(repeats))
    return Pipeline(
        model=built.model,
        parameters=built.parameters,
        scheduler=built.scheduler,
        evaluations=assignment.total,
        latent_shape=built.latent_shape,
        carried=built.carried,
        assignment=assignment.sentence(),
        stages=[_stage(rank, assignment, repeats, found) for rank in range(len(assignment.ranges))],
        handover=_handover([one for repeat in repeats for one in repeat.handoffs if one.direction == "send"]),
        steady=_steady(found[0]) if found else None,
        samples=digests,
        verification=_verification(repeats, digests),
        verdict=verdict(assignment, {metric.name: metric.estimate for metric in metrics}),
        threads=built.threads,
    )


def _stage(rank: int, assignment: Assignment, repeats: Sequence[PipeRepeat], found: Sequence[Completed]) -> Stage:
    done = [repeat.stages[rank] for repeat in repeats if rank in repeat.stages]
    handoffs = [handoff for repeat in repeats for handoff in repeat.handoffs if handoff.rank == rank]
    start, end = assignment.ranges[rank]
    return Stage(
        rank=rank,
        start=start,
        end=end,
        times=timeline.mean([one.times[rank] for one in found]) if found else None,
        evaluation_time=_mean([total for repeat in repeats for total in repeat.seconds("evaluate", rank)]),
        peak_allocated=max((peak for stage in done if (peak := stage.peak_allocated) is not None), default=None),
        peak_rss=max((stage.peak_rss for stage in done), default=None),
        sent=sum(handoff.direction == "send" for handoff in handoffs),
        received=sum(handoff.direction == "recv" for handoff in handoffs),
    )


def _handover(sends: Sequence[Handoff]) -> Handover | None:
    if not sends:
        return None
    return Handover(
        header=fmean(handoff.header_bytes for handoff in sends),
        latent=fmean(handoff.latent_bytes for handoff in sends),
        state=fmean(handoff.state_bytes for handoff in sends),
        generator=fmean(handoff.generator_bytes for handoff in sends),
    )


def _steady(one: Completed) -> tuple[float, float]:
    return one.made[0].finished - one.start, one.made[-1].finished - one.start


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
