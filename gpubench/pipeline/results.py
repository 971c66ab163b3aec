"""Computes the results, warnings and timeline of a pipeline from the events of all ranks.

A repeat counts once every rank has finished all samples. Its makespan is the time from rank 0's start to the last
rank's end, fill and drain included. A repeat that ended early contributes only its samples and hand-offs.

The timeline is a Chrome trace for https://ui.perfetto.dev and chrome://tracing, in the JSON object form of the Chromium
project's "Trace Event Format". A process is a rank. Its threads are the loop, and one lane for each hand-off that is
in progress at the same time. Times are microseconds since the first event.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import msgspec

from gpubench import units
from gpubench.events import (
    BaselineKind,
    BaselineMeasured,
    Handoff,
    PipelineBuilt,
    Sample,
    Span,
    SpanKind,
    StageDone,
    Verified,
)
from gpubench.metrics import Metric
from gpubench.pipeline.bottleneck import MicroBatch, Place, better_split, limiting, sentence
from gpubench.pipeline.split import Assignment
from gpubench.runs import warnings
from gpubench.runs.stages import OF_KIND, Digest, HandoffSize, Pipeline, Stage, Times, Verification, mean, rank_times
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import Estimate, Metrics, Summary, energy_each, largest, throttled_shares
from gpubench.telemetry import TelemetrySample

Record = dict[str, Any]

LOOP = 0
LANES = {"recv": 100, "send": 200}
"""The thread number of the first lane of each direction."""


def chrome_trace(spans: Sequence[Span], handoffs: Sequence[Handoff]) -> str:
    """Returns the trace as JSON. Arrows lead from the send of a hand-off to its receive if both were recorded."""
    began = min([*(span.time for span in spans), *(handoff.time for handoff in handoffs)], default=0.0)
    events = [_slice(span.rank, LOOP, _name(span), span.time - began, span.total, _about(span)) for span in spans]
    threads = {(span.rank, LOOP): "loop" for span in spans}
    placed = list(_lanes(handoffs))
    for handoff, thread in placed:
        name = f"{handoff.direction} sample {handoff.sample}"
        events.append(_slice(handoff.rank, thread, name, handoff.time - began, handoff.total, _about_handoff(handoff)))
        lane = thread - LANES[handoff.direction]
        threads[handoff.rank, thread] = handoff.direction + (f" {lane + 1}" if lane else "")
    events += _arrows(placed, began)
    document = {"traceEvents": [*_names(threads), *events], "displayTimeUnit": "ms"}
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _slice(rank: int, thread: int, name: str, start: float, seconds: float, about: Record) -> Record:
    times = {"ts": _microseconds(start), "dur": _microseconds(seconds)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, "args": about}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(span: Span) -> str:
    return span.kind if span.step is None else f"{span.kind} {span.step}"


def _about(span: Span) -> Record:
    return {"repeat": span.repeat, "sample": span.sample} | ({} if span.step is None else {"step": span.step})


def _about_handoff(handoff: Handoff) -> Record:
    names = (
        "repeat", "peer", "sample", "step", "sequence", "waited", "header_bytes", "latent_bytes", "state_bytes",
        "generator_bytes",
    )  # fmt: skip
    return {name: getattr(handoff, name) for name in names}


def _names(threads: dict[tuple[int, int], str]) -> Iterator[Record]:
    for rank in sorted({rank for rank, _ in threads}):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for (rank, thread), name in sorted(threads.items()):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _lanes(handoffs: Iterable[Handoff]) -> Iterator[tuple[Handoff, int]]:
    """Yields each hand-off with a thread of its rank that is free, because slices of a thread must not overlap."""
    busy: dict[tuple[int, str], list[float]] = {}
    for handoff in sorted(handoffs, key=lambda handoff: handoff.time):
        ends = busy.setdefault((handoff.rank, handoff.direction), [])
        lane = next((lane for lane, end in enumerate(ends) if end <= handoff.time), len(ends))
        ends[lane : lane + 1] = [handoff.time + handoff.total]
        yield handoff, LANES[handoff.direction] + lane


def _arrows(placed: Sequence[tuple[Handoff, int]], began: float) -> Iterator[Record]:
    """Yields a pair of flow events for each hand-off. They belong to the slices that enclose them."""
    taken = {
        (one.repeat, one.peer, one.rank, one.sequence): (one, thread)
        for one, thread in placed
        if one.direction == "recv"
    }
    for number, (sent, thread) in enumerate(placed):
        received = taken.get((sent.repeat, sent.rank, sent.peer, sent.sequence))
        if sent.direction == "recv" or received is None:
            continue
        end, end_thread = received
        arrow = {"name": "hand-off", "cat": "hand-off", "id": number}
        start_ts, end_ts = _microseconds(sent.time - began), _microseconds(end.time + end.total - began)
        yield {"ph": "s", "pid": sent.rank, "tid": thread, "ts": start_ts, **arrow}
        yield {"ph": "f", "bp": "e", "pid": end.rank, "tid": end_thread, "ts": end_ts, **arrow}


@dataclass
class PipeRepeat:
    """The events of one repeat: `built` and `stages` by rank, `samples` by their number in the run."""

    number: int
    built: dict[int, PipelineBuilt] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    handoffs: list[Handoff] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    stages: dict[int, StageDone] = field(default_factory=dict)
    baselines: list[BaselineMeasured] = field(default_factory=list)
    verified: Verified | None = None
    reference_time: float | None = None
    """The time of the reference workload on rank 0, in seconds. Its metric is persisted as `yardstick_time`."""

    @property
    def assignment(self) -> Assignment | None:
        """The assignment of evaluations to ranks; None until a rank has reported it."""
        for built in self.built.values():
            return Assignment(tuple(built.ranges))
        return None

    @property
    def made(self) -> list[Sample]:
        """The samples finished in this repeat, not taken over from another run, in order of time."""
        own = [sample for sample in self.samples.values() if not sample.resumed]
        return sorted(own, key=lambda sample: (sample.finished, sample.sample))

    def seconds(self, kind: SpanKind, rank: int | None = None) -> list[float]:
        """Returns the times of all spans of one kind, of one rank or of all."""
        return [span.total for span in self.spans if span.kind == kind and rank in (None, span.rank)]

    def comparisons(self) -> dict[int, bool]:
        """Whether each compared sample is bit-identical to its reference."""
        if self.verified is None:
            return {}
        references = dict(zip(self.verified.samples, self.verified.sha256, strict=True))
        return {
            number: self.samples[number].sha256 == reference
            for number, reference in sorted(references.items())
            if number in self.samples
        }


@dataclass(frozen=True)
class Completed:
    """A repeat in which every rank has finished all samples."""

    repeat: PipeRepeat
    assignment: Assignment
    start: float
    """Seconds since the epoch; so is `end`."""
    end: float

    @property
    def makespan(self) -> float:
        return self.end - self.start

    @cached_property
    def made(self) -> list[Sample]:
        return self.repeat.made

    @cached_property
    def evaluations(self) -> list[float]:
        """The time of each evaluation in seconds."""
        return self.repeat.seconds("evaluate")

    @cached_property
    def micro_batches(self) -> int:
        return len({span.sample for span in self.repeat.spans if span.kind == "evaluate"})

    @cached_property
    def times(self) -> list[Times]:
        """The times of each rank within the makespan."""
        own: list[list[Span]] = [[] for _ in self.assignment.ranges]
        for span in self.repeat.spans:
            own[span.rank].append(span)
        return [rank_times(spans, self.start, self.end) for spans in own]

    @property
    def sends(self) -> list[Handoff]:
        return [handoff for handoff in self.repeat.handoffs if handoff.direction == "send"]

    def baselines(self, kind: BaselineKind) -> list[BaselineMeasured]:
        return [baseline for baseline in self.repeat.baselines if baseline.kind == kind]


def completed(repeats: Sequence[PipeRepeat]) -> list[Completed]:
    """Returns the completed repeats, in order."""
    found = []
    for repeat in repeats:
        assignment, stages = repeat.assignment, repeat.stages
        if assignment is None or len(stages) < len(assignment.ranges) or not repeat.made:
            continue
        one = Completed(repeat, assignment, stages[0].started, max(stage.ended for stage in stages.values()))
        if one.evaluations and one.makespan > 0:
            found.append(one)
    return found


def find_warnings(
    repeats: Sequence[PipeRepeat], found: Sequence[Completed], samples: int, slowed: Mapping[str, float]
) -> list[str]:
    """Returns the warnings. `found` are the completed repeats, `samples` the number of samples to make in each, and
    `slowed` the shares of time in which clocks were throttled, by reason.
    """
    unlike = [
        warnings.unlike_reference(repeat.number, [n for n, identical in repeat.comparisons().items() if not identical])
        for repeat in repeats
    ]
    other = [warnings.not_reproduced(repeat, numbers) for repeat, numbers in _not_reproduced(repeats)]
    unpaired = [
        warnings.unpaired(repeat.number, rank, stage.sent, repeat.stages[rank + 1].received)
        for repeat in repeats
        for rank, stage in sorted(repeat.stages.items())
        if rank + 1 in repeat.stages
    ]
    missing = [warnings.missing_samples(repeat.number, repeat.samples, samples) for repeat in repeats]
    return warnings.collected(
        *unlike,
        *other,
        *unpaired,
        *missing,
        _uneven_split(found) if found else None,
        warnings.lone_repeat(len(found)),
        warnings.held_down(slowed),
    )


def _not_reproduced(repeats: Sequence[PipeRepeat]) -> Iterator[tuple[int, list[int]]]:
    """Yields for each repeat its number and the samples that differ from those of an earlier repeat."""
    first: dict[int, str] = {}
    for repeat in repeats:
        samples = sorted(repeat.samples.items())
        yield repeat.number, [n for n, sample in samples if first.setdefault(n, sample.sha256) != sample.sha256]


def _places(found: Sequence[Completed]) -> list[Place]:
    """Returns all ranks and hand-offs of the completed repeats, with the time that each micro-batch occupied them."""
    works: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    evaluating: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    links: dict[int, dict[MicroBatch, float]] = defaultdict(lambda: defaultdict(float))
    for one in found:
        for span in one.repeat.spans:
            if OF_KIND[span.kind] == "compute":
                works[span.rank][span.repeat, span.sample] += span.total
            if span.kind == "evaluate":
                evaluating[span.rank][span.repeat, span.sample] += span.total
        for handoff in one.repeat.handoffs:
            sends = handoff.direction == "send"
            taken = handoff.total - handoff.waited if sends else handoff.total
            link, batch = links[handoff.rank if sends else handoff.peer], (handoff.repeat, handoff.sample)
            link[batch] = max(link[batch], taken)  # sender and receiver work at the same time
    ranks = [
        Place(rank, works[rank], count, evaluating[rank])
        for rank, count in enumerate(found[0].assignment.counts)
        if rank in evaluating
    ]
    return ranks + [Place(sender, seconds) for sender, seconds in sorted(links.items())]


def _uneven_split(found: Sequence[Completed]) -> str | None:
    ranks = [place for place in _places(found) if place.evaluations]
    limit = limiting(ranks) if len(ranks) > 1 else []
    better = better_split(ranks) if len(limit) == 1 else None
    return warnings.uneven_split(limit[0].rank, limit[0].mean, *better) if better else None


def bottleneck(found: Sequence[Completed]) -> str | None:
    """Returns a sentence with the rank or the hand-off that limits the throughput; None if it is unknown."""
    if not found:
        return None
    batches, samples = found[0].micro_batches, len(found[0].made)
    what = "sample" if batches == samples else "micro-batch"
    return sentence(_places(found), fmean(one.makespan for one in found), what)


def verdict(assignment: Assignment, metrics: Sequence[Metric], micro_batches: int) -> str | None:
    """Returns a sentence that compares the pipeline with replicas, which have the whole model on every rank.

    Only measured replicas are compared: how fast they are depends on what the ranks share, which no figure of the
    pipeline tells. Returns None for a single rank, and without a completed repeat.
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
        return f"{both}; one repeat does not tell whether that is a difference: raise --repeats"
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
        warnings=find_warnings(repeats, found, samples, slowed),
        pipeline=_pipeline(repeats, found, made),
    )


SPEEDUPS = {"pipeline_speedup": "sequential_makespan", "replicas_speedup": "replicas_makespan"}
"""The makespan that is divided by the pipeline's own, of the same repeat."""


def _agreeing(metrics: Sequence[Metric]) -> Iterable[Metric]:
    """Returns the metrics with each speed-up replaced by the ratio of the mean makespans."""
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
    """Returns the samples per second after the first sample; None if there is one sample or all finished at once."""
    first, last = one.made[0].finished, one.made[-1].finished
    return sum(sample.finished > first for sample in one.made) / (last - first) if last > first else None


def _ideal(one: Completed) -> tuple[float, float]:
    """Returns the makespan of the same work in the same order with hand-offs that take no time, and its bubble.

    Each micro-batch passes the ranks in order, and each rank takes the micro-batches in order, so that nothing with
    hand-offs that take time is shorter.
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
    """Returns the sequential makespan; None if one rank alone did not make the same samples."""
    for baseline in one.baselines("sequential"):
        if sorted(baseline.samples) == sorted(sample.sample for sample in one.made):
            return baseline.wall
    return None


def _speedup(one: Completed, other: float | None) -> float | None:
    return None if other is None else other / one.makespan


def _replicas(one: Completed) -> float | None:
    """Returns the replicas' time; None unless they made all samples."""
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


def _pipeline(repeats: Sequence[PipeRepeat], found: Sequence[Completed], metrics: Sequence[Metric]) -> Pipeline | None:
    """Returns the pipeline's part of the summary; None until a rank has reported the pipeline's facts."""
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
        bottleneck=bottleneck(found),
        stages=[_stage(rank, assignment, repeats, found) for rank in range(len(assignment.ranges))],
        handover=_handoff_size([one for repeat in repeats for one in repeat.handoffs if one.direction == "send"]),
        steady=_steady(found[0]) if found else None,
        samples=digests,
        verification=_verification(repeats, digests),
        verdict=verdict(assignment, metrics, found[0].micro_batches if found else 0),
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
