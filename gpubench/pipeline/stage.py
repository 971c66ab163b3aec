"""One rank's part of the pipeline: take a micro-batch, evaluate it, hand it on. Knows neither wire nor model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gpubench import events
from gpubench.channel import Activity, Doing
from gpubench.diffusion.faults import Fault
from gpubench.errors import NonFiniteLatent
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.denoiser import Denoiser
from gpubench.pipeline.injection import before_evaluations
from gpubench.pipeline.schedulers import Sampler
from gpubench.pipeline.spans import SpanTimer

AfterEach = Callable[[Batch, int], None]
"""Is given the batch and the number of the evaluation that it has just been through."""

SLOWER = 3
"""How many times as long as in the warm-up an evaluation may take on a busy machine, over and above the deadline."""


class Source(Protocol):
    """Where a rank's micro-batches come from."""

    def take(self) -> Batch:
        """The next one; waits for it."""

    def close(self) -> None:
        """Makes sure that there are no more."""


class Sink(Protocol):
    """Where they go."""

    def put(self, batch: Batch) -> None:
        """Takes one over, to be sent after the work queued on the device so far; waits while too many are under way."""

    def doing(self) -> Doing:
        """What keeps those that are under way."""

    def close(self) -> None:
        """Waits until all are gone."""


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
    """Seconds without progress, beyond those that the evaluations take, after which a rank counts as stuck."""
    beat: Callable[[], None]
    """Tells at once what this rank is doing."""
    fault: Fault | None = None
    evaluation: float = 0.0
    """Seconds that the last evaluation of the warm-up took."""
    annotate: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Names what an evaluation is made of, for whoever records it."""

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.sampler.total

    def patience(self, evaluations: int) -> float:
        """Seconds without progress after which a rank counts as stuck that has as many evaluations to get through."""
        return self.deadline + SLOWER * self.evaluation * evaluations

    def evaluate(self, batch: Batch, after_each: AfterEach) -> None:
        """Takes `batch` through this stage's evaluations."""
        for step in range(self.start, self.end):
            what = f"evaluation {step + 1} of {self.sampler.total} of sample {batch.samples[0]}"
            self.activity.enter(what, within=self.patience(1))
            if step == self.start:
                self.beat()  # so that whoever looks for this rank knows which sample it was at
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
        """Works through the samples of `batches`, in order, and closes source and sink."""

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
            self._wait_for(f"rank {self.rank - 1} to say that all is sent")
        source.close()
        self.activity.watch(sink.doing)
        with timer.waiting("send_wait", batches[-1][0]):
            sink.close()

    def _take(self, sample: int, source: Source, timer: SpanTimer[Any]) -> Batch:
        if self.is_first:
            # a GPU may have the evaluations of other samples in its queue, and copies noise behind them
            self.activity.enter(f"preparing sample {sample}", within=self.patience(self.sampler.total))
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
        within = self.patience(self.sampler.total)  # the hand-over may be behind evaluations here and there
        self.activity.enter(f"waiting for {what}", waits_for=self.rank - 1, within=within)


class Noise:
    """The first rank's source: pure noise, drawn when a micro-batch is due."""

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
    """Whether every evaluation gave finite latents: kept by the loop, looked at by whoever takes the batch over.

    What is looked at is a sample's sum, in which NaN and infinity survive: a tenth of the cost of asking every element.
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
