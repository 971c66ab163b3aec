"""The part of a summary that only a pipeline has: its stages, and how the time of each rank divides."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from gpubench.events import Divergence, Span, SpanKind

Part = Literal["compute", "recv_wait", "send_wait", "idle"]
PARTS: tuple[Part, ...] = ("compute", "recv_wait", "send_wait", "idle")
OF_KIND: dict[SpanKind, Part] = {
    "prepare": "compute",
    "evaluate": "compute",
    "decode": "compute",
    "recv_wait": "recv_wait",
    "send_wait": "send_wait",
}


class Times(Struct, frozen=True):
    """The time of one rank in seconds, in four disjoint parts that sum to the makespan."""

    makespan: float
    compute: float
    """The rank prepared, evaluated or decoded, whether or not it also waited."""
    recv_wait: float
    """The rank had no work: the hand-off from the rank before had not arrived."""
    send_wait: float
    """The rank had work but could not go on: the rank after had not taken its hand-offs."""
    idle: float
    """The remaining time: before the first micro-batch, after the last, and the overhead of the loop."""

    def share(self, part: Part) -> float:
        """Returns the part as a fraction of the makespan."""
        seconds: float = getattr(self, part)
        return seconds / self.makespan if self.makespan else 0.0


def rank_times(spans: Iterable[Span], start: float, end: float) -> Times:
    """Divides [start, end] into the parts of `Times` by the spans of one rank. Time outside does not count.

    A wait counts only while the rank computes nothing. Time in both waits counts as `recv_wait`.
    """
    opened: dict[float, Counter[Part]] = {}
    closed: dict[float, Counter[Part]] = {}
    for span in spans:
        first, last = max(start, span.time), min(end, span.time + span.total)
        if first < last:
            opened.setdefault(first, Counter())[OF_KIND[span.kind]] += 1
            closed.setdefault(last, Counter())[OF_KIND[span.kind]] += 1
    seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    under_way: Counter[Part] = Counter()
    for border, following in pairwise(sorted({start, end, *opened, *closed})):
        under_way += opened.get(border, Counter())
        under_way -= closed.get(border, Counter())
        part: Part = next((part for part in PARTS if under_way[part]), "idle")
        seconds[part] += following - border
    return Times(
        makespan=end - start,
        compute=seconds["compute"],
        recv_wait=seconds["recv_wait"],
        send_wait=seconds["send_wait"],
        idle=seconds["idle"],
    )


def mean(found: Iterable[Times]) -> Times:
    """Returns the mean of each part, so that the parts sum to the mean makespan. Needs at least one."""
    every = list(found)
    return Times(*(sum(getattr(one, name) for one in every) / len(every) for name in Times.__struct_fields__))


class StageSummary(Struct, frozen=True):
    """One rank and its share of the work."""

    rank: int
    start: int
    end: int
    """The rank makes the evaluations in [start, end) of each sample."""
    times: Times | None
    """The mean over the completed repeats; None if there is none."""
    evaluation_time: float | None
    """The mean time of one evaluation over all repeats, in seconds."""
    peak_allocated: int | None
    """The peak of the memory that tensors held on its device, in bytes; None on a CPU."""
    peak_rss: int | None
    sent: int
    """The number of hand-offs that it sent, over all repeats. `received` counts the same way."""
    received: int

    @property
    def peak_memory(self) -> int | None:
        """The peak memory in bytes: of the GPU, or of the process on a CPU."""
        return self.peak_rss if self.peak_allocated is None else self.peak_allocated


class HandoffSize(Struct, frozen=True):
    """The mean size of each part of what a rank sends to the next, in bytes."""

    header: float
    latent: float
    state: float
    """The state of the scheduler, and of the caller on its behalf."""
    generator: float


class Digest(Struct, frozen=True):
    """One sample from the first repeat that finished it."""

    sample: int
    seed: int
    sha256: str
    """The hash of its final latent."""
    identical: bool | None
    """Whether it is bit-identical to the reference; None if it was not compared."""
    reproduced: bool | None
    """Whether every other repeat that finished it made the same latent; None if there is no other."""


class Verification(Struct, frozen=True):
    """The comparison of samples with those that diffusers makes in one process."""

    reference: str
    """The program that made the reference samples, in words."""
    samples: int
    identical: int
    divergence: Divergence | None


class Pipeline(Struct, frozen=True):
    model: str
    parameters: int
    """The number of parameters of the denoiser. Every rank holds all of them."""
    scheduler: str
    evaluations: int
    """Of one sample."""
    latent_shape: list[int]
    """Of one sample."""
    carried: list[str]
    """The attributes of the scheduler, and the other values, that a hand-off contains."""
    assignment: str
    """A sentence with the number of evaluations of each rank."""
    stages: list[StageSummary]
    handover: HandoffSize | None
    steady: tuple[float, float] | None
    """The first and last finish of a sample in the first completed repeat, in seconds from the makespan's start."""
    samples: list[Digest]
    verification: Verification | None
    verdict: str | None
    """A sentence that compares the pipeline with replicas; None for one rank, or if no repeat was completed."""
    threads: int | None = None
    """The number of threads in each rank's process, also that of the reference; None on a GPU.

    The last bits of a CPU's results depend on it.
    """
    bottleneck: str | None = None
    """A sentence with the rank or the hand-off that limits the throughput; None for one rank, or if it is unknown."""
