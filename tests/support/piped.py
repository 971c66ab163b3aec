"""A pipeline that never ran: the events of one whose every time is known."""

import random
from dataclasses import dataclass
from hashlib import sha256

from gpubench.events import BaselineMeasured, Handoff, PipelineBuilt, Sample, Span, SpanKind, StageDone, Verified
from gpubench.kinds.pipeline.repeats import PipeRepeat

BEGAN = 1_795_260_000.0
PAUSE = 100.0  # from the beginning of one repeat to that of the next


@dataclass(frozen=True)
class Line:
    """Ranks in a row, each with `counts[rank]` evaluations of every micro-batch. Times are seconds."""

    counts: tuple[int, ...]
    micro_batches: int = 8
    micro_batch: int = 1
    evaluation: float = 0.1
    slow: dict[int, float] | None = None
    """How many times as long an evaluation takes on some ranks."""
    jitter: float = 0.0
    """Standard deviation of an evaluation's time, as a fraction."""
    dear: dict[int, float] | None = None
    """How many times as long some evaluations take, by their number, on any rank."""
    delays: dict[tuple[int, int], float] | None = None
    """What is added to the work of a rank on a micro-batch, once."""
    late: dict[tuple[int, int], float] | None = None
    """What is added to the hand-off of a micro-batch by a rank, once."""
    transfer: float = 0.0
    slow_transfer: dict[int, float] | None = None
    """The time of a hand-off of some ranks, in place of `transfer`."""
    in_flight: int = 2
    decode: float = 0.0

    @property
    def samples(self) -> int:
        return self.micro_batches * self.micro_batch

    @property
    def ranges(self) -> list[tuple[int, int]]:
        ends = [sum(self.counts[: rank + 1]) for rank in range(len(self.counts))]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def repeat(self, number: int = 0) -> PipeRepeat:
        """All that the ranks would have said, the baselines and the verification aside."""
        return _Simulation(self, number).run()


class _Simulation:
    def __init__(self, line: Line, number: int) -> None:
        self.line = line
        self.random = random.Random(number)
        self.began = BEGAN + PAUSE * number
        self.repeat = PipeRepeat(number)
        self.free = [self.began] * len(line.counts)
        """When each rank's loop can go on."""
        self.sent = list(self.free)
        """When each rank has sent its last hand-off."""
        self.taken: list[list[float]] = [[] for _ in line.counts]
        """When each rank took up each micro-batch."""

    def run(self) -> PipeRepeat:
        line, repeat = self.line, self.repeat
        for rank in range(len(line.counts)):
            repeat.built[rank] = self.built(rank)
        for batch in range(line.micro_batches):
            started = self.free[0]
            arrival = started
            for rank in range(len(line.counts)):
                arrival = self.work(rank, batch, arrival)
            for sample in range(batch * line.micro_batch, (batch + 1) * line.micro_batch):
                repeat.samples[sample] = finished(sample, started, arrival, repeat.number)
        last = len(line.counts) - 1
        for rank, ended in enumerate(self.free):
            repeat.stages[rank] = StageDone(
                rank=rank,
                repeat=repeat.number,
                started=self.began,
                ended=ended,
                sent=0 if rank == last else line.micro_batches,
                received=line.micro_batches if rank else 0,
                peak_allocated=None,
                peak_reserved=None,
                peak_rss=(rank + 1) * 10**8,
            )
        return repeat

    def built(self, rank: int) -> PipelineBuilt:
        total = sum(self.line.counts)
        return PipelineBuilt(
            rank=rank,
            repeat=self.repeat.number,
            model="tiny",
            parameters=12_345,
            weights="ab" * 32,
            scheduler="DPMSolverMultistepScheduler",
            timesteps=[1000.0 - step for step in range(total)],
            threads=2,
            ranges=self.line.ranges,
            latent_shape=[4, 8, 8],
            carried=["_step_index", "lower_order_nums", "model_outputs", "generators"],
            seconds=0.5 + 0.1 * rank,
            encode_seconds=0.25 if rank == 0 else None,
        )

    def work(self, rank: int, batch: int, arrival: float) -> float:
        """When the micro-batch is at the next rank, or finished."""
        line, sample = self.line, batch * self.line.micro_batch
        if arrival > self.free[rank]:
            self.span(rank, "recv_wait", sample, arrival - self.free[rank])
        self.taken[rank].append(self.free[rank])
        start, end = line.ranges[rank]
        for step in range(start, end):
            usual = line.evaluation * (line.slow or {}).get(rank, 1.0) * (line.dear or {}).get(step, 1.0)
            once = (line.delays or {}).get((rank, batch), 0.0) if step == start else 0.0
            self.span(rank, "evaluate", sample, usual * max(0.1, self.random.gauss(1, line.jitter)) + once, step)
        if rank == len(line.counts) - 1:
            if line.decode:
                self.span(rank, "decode", sample, line.decode)
            return self.free[rank]
        return self.hand_off(rank, batch, end)

    def hand_off(self, rank: int, batch: int, step: int) -> float:
        line, sample, packed = self.line, batch * self.line.micro_batch, self.free[rank]
        before = batch - line.in_flight
        if before >= 0 and self.taken[rank + 1][before] > packed:
            self.span(rank, "send_wait", sample, self.taken[rank + 1][before] - packed)
        begun = max(self.free[rank], self.sent[rank])  # hand-offs of a rank follow one another
        transfer = (line.slow_transfer or {}).get(rank, line.transfer) + (line.late or {}).get((rank, batch), 0.0)
        self.sent[rank] = arrival = begun + transfer
        self.handoff(rank, rank + 1, "send", batch, step, packed, arrival - packed, begun - packed)
        self.handoff(rank + 1, rank, "recv", batch, step, begun, arrival - begun, 0.0)
        return arrival

    def span(self, rank: int, kind: SpanKind, sample: int, seconds: float, step: int | None = None) -> None:
        """The loop of `rank` goes on that much later."""
        self.repeat.spans.append(Span(self.repeat.number, rank, kind, sample, self.free[rank], seconds, step))
        self.free[rank] += seconds

    def handoff(
        self, rank: int, peer: int, direction: str, batch: int, step: int, time: float, total: float, waited: float
    ) -> None:
        b = self.line.micro_batch
        self.repeat.handoffs.append(
            Handoff(
                repeat=self.repeat.number,
                rank=rank,
                peer=peer,
                direction="send" if direction == "send" else "recv",
                sample=batch * b,
                step=step,
                sequence=batch,
                time=time,
                total=total,
                waited=waited,
                header_bytes=512,
                latent_bytes=1024 * b,
                state_bytes=2048 * b,
                generator_bytes=5056 * b,
            )
        )


def finished(sample: int, started: float, ended: float, repeat: int = 0) -> Sample:
    return Sample(repeat, sample, sample, None, started, ended, digest(sample))


def digest(sample: int) -> str:
    return sha256(b"%d" % sample).hexdigest()


def sequential(line: Line, repeat: int = 0) -> BaselineMeasured:
    """The same samples on one rank alone, as fast as its evaluations are."""
    each = sum(line.counts) * line.evaluation + line.decode
    return BaselineMeasured(
        rank=0,
        repeat=repeat,
        kind="sequential",
        seconds=[each] * line.micro_batches,
        wall=each * line.micro_batches,
        samples=list(range(line.samples)),
    )


def verified(line: Line, repeat: int = 0) -> Verified:
    """By references that are all the same."""
    return Verified(
        rank=len(line.counts) - 1,
        repeat=repeat,
        reference="a loop of single-process diffusers",
        samples=list(range(line.samples)),
        sha256=[digest(sample) for sample in range(line.samples)],
        seconds=1.0,
        divergence=None,
    )
