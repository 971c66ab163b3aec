"""One repeat of a pipeline, on one rank: what stays the same while micro-batches pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpubench import distributed, events
from gpubench.channel import EVERYONE
from gpubench.diffusion.settings import PipeSettings
from gpubench.errors import HandoverError
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.edges import Edge
from gpubench.pipeline.finish import Finisher
from gpubench.pipeline.handover import Manifest, pack, read_manifest, unpack
from gpubench.pipeline.inbox import Inbox
from gpubench.pipeline.injection import faulty_edge, faulty_pack
from gpubench.pipeline.manifest import DTYPE_NAMES
from gpubench.pipeline.outbox import Outbox
from gpubench.pipeline.spans import SpanTimer
from gpubench.pipeline.stage import AfterEach, Finiteness, Noise, Sink, Source, Stage
from gpubench.pipeline.wire import Route
from gpubench.ranks import Ranks


@dataclass(frozen=True)
class Session:
    """The pipeline as one rank has it, with its ends of the chain."""

    settings: PipeSettings
    ranks: Ranks
    repeat: int
    stage: Stage
    ranges: list[tuple[int, int]]
    """Evaluations [start, end) of each rank."""
    batches: list[list[int]]
    """The samples to make, by micro-batch."""
    every_batch: list[list[int]]
    """All of the run's, also those that another run has made."""
    prompts: list[str]
    before: Edge | None
    after: Edge | None
    tell: Callable[[events.Message], None]
    """Takes an event from any thread."""
    now: Callable[[], float]
    """Seconds since the epoch."""
    timer: SpanTimer[Any] = field(repr=False)

    @property
    def last(self) -> int:
        """The rank that finishes the samples."""
        return self.ranks.world_size - 1

    def seeds(self, samples: Sequence[int]) -> list[int]:
        return [self.settings.seed + sample for sample in samples]

    def prepare(self, samples: Sequence[int]) -> Batch:
        return self.stage.denoiser.prepare(self.stage.sampler, samples, self.seeds(samples))

    def wait_for(self, what: str) -> None:
        """Until all ranks have come here; whoever does not, `what` says what is expected of it."""
        self.stage.activity.enter(f"waiting for {what}", waits_for=EVERYONE)
        distributed.barrier()


@dataclass
class Passage:
    """One pass of micro-batches through the pipeline, on one rank."""

    session: Session
    batches: Sequence[Sequence[int]]
    run_id: bytes
    """Tells this pass's hand-overs from those of any other; the same on every rank."""
    announce: bool
    """Whether hand-overs and finished samples are told of."""
    source: Source = field(init=False)
    sink: Sink = field(init=False)

    def __post_init__(self) -> None:
        self._finiteness = Finiteness(self.session.stage.rank)
        self.source = self._inbox(self.session.before) if self.session.before else self._noise()
        self.sink = self._outbox(self.session.after) if self.session.after else self._finisher()

    def run(self, after_each: AfterEach = lambda batch, step: None) -> Iterator[events.SpansMeasured]:
        """Works through the batches."""

        def evaluated(batch: Batch, step: int) -> None:
            self._finiteness.note(batch, step)
            after_each(batch, step)

        session = self.session
        try:
            yield from session.stage.run(self.batches, self.source, self.sink, session.timer, evaluated)
        except Exception:
            if isinstance(self.sink, Finisher):
                with suppress(Exception):  # the first one explains it
                    self.sink.close()  # what is finished is kept
            raise

    @property
    def sent(self) -> int:
        return self.sink.sent if isinstance(self.sink, Outbox) else 0

    @property
    def received(self) -> int:
        return self.source.received if isinstance(self.source, Inbox) else 0

    @property
    def latents(self) -> dict[int, Tensor]:
        """On the last rank, and if they are to be verified: the final latent of each sample, on the CPU."""
        return self.sink.latents if isinstance(self.sink, Finisher) else {}

    def _noise(self) -> Noise:
        return Noise(self.batches, self.session.prepare, self.session.now)

    def _inbox(self, edge: Edge) -> Inbox:
        session = self.session
        rank, sampler = session.stage.rank, session.stage.sampler

        def opened(manifest: bytes, payload: Tensor) -> Batch:
            return unpack(manifest, payload, sampler, session.seeds(read_manifest(manifest).samples))

        return Inbox(
            edge,
            Route(self.run_id, session.repeat, rank - 1, rank),
            self.batches,
            session.stage.start,
            bound=session.settings.pipeline.in_flight,
            admit=self._admit,
            unpack=opened,
            tell=self._tell,
            now=session.now,
        )

    def _outbox(self, edge: Edge) -> Outbox:
        session = self.session
        stage = session.stage
        rank, sampler, fault = stage.rank, stage.sampler, stage.fault
        return Outbox(
            faulty_edge(edge, fault, rank),
            Route(self.run_id, session.repeat, rank, rank + 1),
            bound=session.settings.pipeline.in_flight,
            pack=faulty_pack(lambda batch: pack(batch, sampler), fault, rank),
            tell=self._tell,
            now=session.now,
            deadline=stage.deadline,
            evaluating=stage.patience(stage.sampler.total),
            inspect=self._finiteness.check,
        )

    def _finisher(self) -> Finisher:
        session = self.session
        return Finisher(
            session.tell if self.announce else lambda event: None,
            session.now,
            session.repeat,
            session.stage.rank,
            session.settings.seed,
            session.prompts,
            bound=session.settings.pipeline.in_flight,
            keep_latents=session.settings.output.latents,
            retain=self.announce and bool(session.settings.verify),
            inspect=self._finiteness.check,
            deadline=session.stage.deadline,
            evaluating=session.stage.patience(session.stage.sampler.total),
        )

    def _tell(self, handoff: events.Handoff) -> None:
        if self.announce:
            self.session.tell(events.HandoffMeasured(rank=handoff.rank, handoff=handoff))

    def _admit(self, manifest: bytes) -> Manifest:
        """What is announced, if it is what was agreed on."""
        contents = read_manifest(manifest)
        denoiser = self.session.stage.denoiser
        agreed = (DTYPE_NAMES[denoiser.dtype], (len(contents.samples), *denoiser.latent_shape))
        found = (contents.latent_dtype, tuple(contents.latent_shape))
        if found != agreed:
            raise HandoverError(f"its latent is {found[0]} {list(found[1])} instead of {agreed[0]} {list(agreed[1])}")
        return contents
