"""One rank's stage of the pipeline: it receives micro-batches, evaluates them, sends them on, and records the times."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from gpubench import events
from gpubench.channel import EVERYONE, Activity
from gpubench.errors import NonFiniteLatent
from gpubench.events import Span, SpanKind
from gpubench.kinds.pipeline.faults import Fault, before_evaluations
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.worker.background import Finisher, Receiver, Sender, Sink
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.kinds.pipeline.worker.link import Link, LinkTerms, Transport, sending_link
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler
from gpubench.ranks import Ranks
from gpubench.worker import distributed
from gpubench.worker.timing import Clock, Mark


@dataclass(frozen=True)
class _Open(Generic[Mark]):
    """Work that the device may not have finished yet."""

    kind: SpanKind
    sample: int
    step: int | None
    begin: Mark
    end: Mark


class SpanTimer(Generic[Mark]):
    """Turns the marks of a loop into spans once the device has passed them, without synchronising."""

    def __init__(self, clock: Clock[Mark], now: Callable[[], float], repeat: int, rank: int) -> None:
        """`now` gives seconds since the epoch."""
        self._clock = clock
        self._now = now
        self._repeat = repeat
        self._rank = rank
        self._work: deque[_Open[Mark]] = deque()
        self._waits: list[Span] = []
        self._origin: tuple[Mark, float] | None = None
        self._border: Mark | None = None

    def start(self) -> float:
        """Relates the device's timeline to wall time, and returns the time. The device must be idle."""
        self._clock.synchronize()
        now = self._now()
        self._origin = (self._clock.mark(), now)
        return now

    def begin(self) -> None:
        self._border = self._clock.mark()

    def worked(self, kind: SpanKind, sample: int, step: int | None = None) -> None:
        """Records the work issued since the last call as a span of this kind."""
        assert self._border is not None
        end = self._clock.mark()
        self._work.append(_Open(kind, sample, step, self._border, end))
        self._border = end

    @contextmanager
    def waiting(self, kind: SpanKind, sample: int) -> Iterator[None]:
        """Records the time in this context, in which the rank waits, as a span."""
        began = time.perf_counter()
        start = self._now()
        yield
        total = time.perf_counter() - began
        self._waits.append(Span(self._repeat, self._rank, kind, sample, start, total))

    def synchronize(self) -> float:
        """Waits for the device, and returns the time."""
        self._clock.synchronize()
        return self._now()

    def collect(self) -> list[Span]:
        """Returns the spans that have ended since the last call."""
        ended, self._waits = self._waits, []
        while self._work and self._clock.passed(self._work[0].end):
            ended.append(self._span(self._work.popleft()))
        return ended

    def _span(self, work: _Open[Mark]) -> Span:
        """Dates the work from the end of the one before, because GPU events measure short times better."""
        assert self._origin is not None
        mark, known = self._origin
        began, total = known + self._clock.seconds(mark, work.begin), self._clock.seconds(work.begin, work.end)
        self._origin = (work.end, began + total)
        return Span(
            repeat=self._repeat,
            rank=self._rank,
            kind=work.kind,
            sample=work.sample,
            time=began,
            total=total,
            step=work.step,
        )


AfterEach = Callable[[Batch, int], None]
"""A function that is called with a batch and the number of the evaluation that it has just finished."""

SLOWER = 3
"""The factor on the warm-up's evaluation time that an evaluation may take on a busy machine, besides the deadline."""


class Source(Protocol):
    """The source of a rank's micro-batches."""

    def take(self) -> Batch: ...

    def close(self) -> None:
        """Waits for the end of the stream. Raises an error if there are more micro-batches."""


@dataclass(frozen=True)
class Stage:
    """The evaluations [start, end) of every sample, on one rank."""

    rank: int
    denoiser: Denoiser
    sampler: Sampler
    start: int
    end: int
    decodes: bool
    activity: Activity
    deadline: float
    """The time without progress after which a rank counts as stuck, besides the time of evaluations, in seconds."""
    send_heartbeat: Callable[[], None]
    """Sends a heartbeat at once."""
    fault: Fault | None = None
    evaluation: float = 0.0
    """The time of the last evaluation of the warm-up, in seconds."""
    annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Annotates the parts of an evaluation in a trace."""

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.sampler.total

    def time_limit(self, evaluations: int) -> float:
        """The time without progress after which a rank with so many evaluations counts as stuck, in seconds."""
        return self.deadline + SLOWER * self.evaluation * evaluations

    def evaluate(self, batch: Batch, after_each: AfterEach) -> None:
        for step in range(self.start, self.end):
            what = f"evaluation {step + 1} of {self.sampler.total} of sample {batch.samples[0]}"
            self.activity.enter(what, within=self.time_limit(1))
            if step == self.start:
                self.send_heartbeat()  # so that an error message names the sample of this rank
                before_evaluations(self.fault, self.rank, batch.samples)
            with self.annotate("forward"):
                output = self.denoiser.predict(batch, self.sampler)
            with self.annotate("scheduler"):
                self.sampler.step(batch, output)
            after_each(batch, step)

    def run(
        self,
        batches: Sequence[Sequence[int]],
        source: Source,
        sink: Sink,
        timer: SpanTimer[Any],
        after_each: AfterEach,
    ) -> Iterator[events.SpansMeasured]:
        """Evaluates the samples of `batches` in order, then closes source and sink.

        There are no batches where an earlier run made all samples, which are only to be verified.
        """

        def evaluated(batch: Batch, step: int) -> None:
            timer.worked("evaluate", batch.samples[0], step)
            after_each(batch, step)

        for samples in batches:
            batch = self._take(samples[0], source, timer)
            self.evaluate(batch, evaluated)
            if self.decodes:
                self.activity.enter(f"decoding sample {samples[0]}")
                batch.images = self.denoiser.decode(batch)
                timer.worked("decode", samples[0])
            self._put(batch, sink, timer)
            yield events.SpansMeasured(rank=self.rank, spans=timer.collect())
        if not self.is_first:
            self._wait_for(f"rank {self.rank - 1} to end the stream")
        source.close()
        self.activity.watch(sink.doing)
        with timer.waiting("send_wait", batches[-1][0]) if batches else nullcontext():
            sink.close()

    def _take(self, sample: int, source: Source, timer: SpanTimer[Any]) -> Batch:
        if self.is_first:
            # a GPU may have the evaluations of other samples in its queue, and copies noise behind them
            self.activity.enter(f"preparing sample {sample}", within=self.time_limit(self.sampler.total))
            timer.begin()
            batch = source.take()
            timer.worked("prepare", sample)
            return batch
        self._wait_for(f"sample {sample} from rank {self.rank - 1}")
        with timer.waiting("recv_wait", sample):
            batch = source.take()
        timer.begin()
        return batch

    def _put(self, batch: Batch, sink: Sink, timer: SpanTimer[Any]) -> None:
        self.activity.watch(sink.doing)
        with timer.waiting("send_wait", batch.samples[0]):
            sink.put(batch)

    def _wait_for(self, what: str) -> None:
        within = self.time_limit(self.sampler.total)  # evaluations on either rank may be ahead of the hand-off
        self.activity.enter(f"waiting for {what}", waits_for=self.rank - 1, within=within)


class NoiseSource:
    """The source of the first rank: noise that is drawn when a micro-batch begins."""

    def __init__(
        self,
        batches: Sequence[Sequence[int]],
        prepare: Callable[[Sequence[int]], Batch],
        now: Callable[[], float],
    ) -> None:
        self._due = iter(batches)
        self._prepare = prepare
        self._now = now

    def take(self) -> Batch:
        started = self._now()
        batch = self._prepare(next(self._due))
        batch.started = started
        return batch

    def close(self) -> None:
        assert next(self._due, None) is None


class Finiteness:
    """Records whether every evaluation gave finite latents. The loop writes it; the next stage of the batch reads it.

    It checks the sum of each sample, which NaN and infinity propagate to, at a tenth of the cost of checking elements.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._noted: dict[int, list[tuple[int, Tensor]]] = {}

    def note(self, batch: Batch, step: int) -> None:
        self._noted.setdefault(batch.samples[0], []).append((step, batch.latents))

    def check(self, batch: Batch) -> None:
        """Waits for the device. Raises NonFiniteLatent naming the first sample and evaluation."""
        noted = self._noted.pop(batch.samples[0])
        sums = [latents.flatten(1).sum(dim=1, dtype=torch.float32) for _, latents in noted]
        table = torch.stack(sums).isfinite().tolist()
        for (step, _), finite in zip(noted, table, strict=True):
            if not all(finite):
                sample = batch.samples[finite.index(False)]
                raise NonFiniteLatent(
                    f"rank {self._rank} found sample {sample} NaN or infinite after evaluation {step + 1}",
                    "try --precision bf16 or fp32, another --scheduler, or a smaller --guidance-scale",
                )


@dataclass(frozen=True)
class Session:
    """The pipeline on one rank, with its connections to the neighbouring ranks."""

    settings: CompletedPipeSettings
    ranks: Ranks
    repeat: int
    stage: Stage
    ranges: list[tuple[int, int]]
    """Evaluations [start, end) of each rank."""
    batches: list[list[int]]
    """The samples to make, by micro-batch."""
    every_batch: list[list[int]]
    """All micro-batches of the run, including those that another run has made."""
    requests: Requests
    before: Transport | None
    """The connection with the rank before; None on the first rank."""
    after: Transport | None
    """The connection with the rank after; None on the last rank."""
    report: Callable[[events.Message], None]
    """Takes an event from any thread."""
    now: Callable[[], float]
    """Seconds since the epoch."""
    timer: SpanTimer[Any] = field(repr=False)

    @property
    def last(self) -> int:
        """The last rank, which finishes the samples."""
        return self.ranks.world_size - 1

    def seeds(self, samples: Sequence[int]) -> list[int]:
        return [self.requests.seed(sample) for sample in samples]

    def prepare(self, samples: Sequence[int]) -> Batch:
        return self.stage.denoiser.prepare(self.stage.sampler, samples, self.seeds(samples))

    def wait_for(self, what: str) -> None:
        """Waits until all ranks have called this. `what` names the awaited event in messages."""
        self.stage.activity.enter(f"waiting for {what}", waits_for=EVERYONE)
        distributed.barrier()


@dataclass
class Passage:
    """One pass of micro-batches through the pipeline, on one rank."""

    session: Session
    batches: Sequence[Sequence[int]]
    run_id: bytes
    """The identifier of this pass's hand-offs, equal on every rank."""
    reports: bool
    """Whether hand-offs and finished samples are reported."""
    source: Source = field(init=False)
    sink: Sink = field(init=False)

    def __post_init__(self) -> None:
        self._finiteness = Finiteness(self.session.stage.rank)
        session = self.session
        noise = NoiseSource(self.batches, session.prepare, session.now)
        self.source = self._receiver(session.before) if session.before else noise
        self.sink = self._sender(session.after) if session.after else self._finisher()

    def run(self, after_each: AfterEach = lambda batch, step: None) -> Iterator[events.SpansMeasured]:
        def evaluated(batch: Batch, step: int) -> None:
            self._finiteness.note(batch, step)
            after_each(batch, step)

        session = self.session
        try:
            yield from session.stage.run(self.batches, self.source, self.sink, session.timer, evaluated)
        except Exception:
            if isinstance(self.sink, Finisher):
                with suppress(Exception):  # the first one explains it
                    self.sink.close()  # keeps the finished samples
            raise

    @property
    def sent(self) -> int:
        return self.sink.sent if isinstance(self.sink, Sender) else 0

    @property
    def received(self) -> int:
        return self.source.received if isinstance(self.source, Receiver) else 0

    @property
    def latents(self) -> dict[int, Tensor]:
        """The final latent of each sample, on the CPU: on the last rank, and if they are to be verified."""
        return self.sink.latents if isinstance(self.sink, Finisher) else {}

    def _receiver(self, before: Transport) -> Receiver:
        session, rank = self.session, self.session.stage.rank
        terms = self._terms(source=rank - 1, done=session.stage.start)
        link = Link(before, terms, now=session.now, report=self._report)
        return Receiver(link, self.batches, bound=session.settings.pipeline.in_flight)

    def _sender(self, after: Transport) -> Sender:
        session, stage = self.session, self.session.stage
        terms = self._terms(source=stage.rank, done=stage.end)
        check = self._finiteness.check
        link = sending_link(after, terms, stage.fault, now=session.now, report=self._report, inspect=check)
        return Sender(
            link,
            session.now,
            bound=session.settings.pipeline.in_flight,
            deadline=stage.deadline,
            evaluating=stage.time_limit(stage.sampler.total),
        )

    def _terms(self, source: int, done: int) -> LinkTerms:
        session, denoiser = self.session, self.session.stage.denoiser
        return LinkTerms(
            run=self.run_id,
            repeat=session.repeat,
            source=source,
            destination=source + 1,
            done=done,
            sampler=session.stage.sampler,
            dtype=denoiser.dtype,
            latent_shape=denoiser.latent_shape,
            requests=session.requests,
        )

    def _finisher(self) -> Finisher:
        session, stage = self.session, self.session.stage
        return Finisher(
            session.report if self.reports else lambda event: None,
            session.now,
            session.repeat,
            stage.rank,
            session.requests,
            stage.denoiser.device,
            bound=session.settings.pipeline.in_flight,
            keep_latents=session.settings.output.latents,
            retain=self.reports and bool(session.settings.verify),
            inspect=self._finiteness.check,
            deadline=stage.deadline,
            evaluating=stage.time_limit(stage.sampler.total),
        )

    def _report(self, handoff: events.Handoff) -> None:
        if self.reports:
            self.session.report(events.HandoffMeasured(rank=handoff.rank, handoff=handoff))
