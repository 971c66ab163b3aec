"""The same samples without a pipeline: what splitting the steps has to be compared with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpubench import events
from gpubench.pipeline.batch import Batch
from gpubench.pipeline.session import Session


def measure(session: Session) -> Iterator[events.Message]:
    """The baselines that the settings ask for, on all ranks together."""
    wanted = session.settings.measurement.baseline
    if wanted == "off" or session.ranks.world_size == 1:  # a pipeline of one rank is the sequential run
        return
    yield from sequential(session)
    if wanted == "replicas":
        yield from replicas(session)


def sequential(session: Session) -> Iterator[events.Message]:
    """All samples one after another on the last rank, which has the decoder, while the others rest."""
    if session.ranks.rank == session.last:
        seconds = alone(session, session.batches)
        yield _measured(session, "sequential", session.batches, seconds)
    session.wait_for(f"rank {session.last} to work alone")


def replicas(session: Session) -> Iterator[events.Message]:
    """Whole samples on every rank at once: rank r takes every world_size-th micro-batch, beginning with the r-th."""
    own = session.batches[session.ranks.rank :: session.ranks.world_size]
    session.wait_for("the other replicas to begin")
    seconds = alone(session, own)
    yield _measured(session, "replicas", own, seconds)
    session.wait_for("the other replicas to finish")


def alone(session: Session, batches: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of each micro-batch, from noise to latent, and to image where one is made."""
    stage = replace(session.stage, start=0, end=session.stage.sampler.total, fault=None)
    seconds = []
    for samples in batches:
        began = session.timer.synchronize()
        batch = session.prepare(samples)
        stage.evaluate(batch, _nothing)
        if session.settings.output.images:  # every rank that comes here has the decoder
            stage.activity.enter(f"decoding sample {samples[0]}")
            stage.denoiser.decode(batch)
        seconds.append(session.timer.synchronize() - began)
    return seconds


def _nothing(batch: Batch, step: int) -> None:
    pass


def _measured(
    session: Session, kind: events.BaselineKind, batches: Sequence[Sequence[int]], seconds: list[float]
) -> events.BaselineMeasured:
    return events.BaselineMeasured(
        rank=session.ranks.rank,
        repeat=session.repeat,
        kind=kind,
        seconds=seconds,
        wall=sum(seconds),
        samples=[sample for samples in batches for sample in samples],
    )
