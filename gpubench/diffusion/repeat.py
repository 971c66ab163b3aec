"""What one repeat of a pipeline said, and what follows from it once all ranks are done."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpubench.diffusion import timeline
from gpubench.diffusion.split import Assignment
from gpubench.diffusion.timeline import Times
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


@dataclass
class PipeRepeat:
    """`built` and `stages` are by rank, `samples` by their number in the run."""

    number: int
    built: dict[int, PipelineBuilt] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    handoffs: list[Handoff] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    stages: dict[int, StageDone] = field(default_factory=dict)
    baselines: list[BaselineMeasured] = field(default_factory=list)
    verified: Verified | None = None
    yardstick: float | None = None
    """Seconds of a fixed piece of work beside the pass, on rank 0."""

    @property
    def assignment(self) -> Assignment | None:
        """None before any rank has said who does what."""
        for built in self.built.values():
            return Assignment(tuple(built.ranges))
        return None

    @property
    def made(self) -> list[Sample]:
        """Finished in this repeat, not taken over from another run; in the order in which they were."""
        own = [sample for sample in self.samples.values() if not sample.resumed]
        return sorted(own, key=lambda sample: (sample.finished, sample.sample))

    def seconds(self, kind: SpanKind, rank: int | None = None) -> list[float]:
        """Of every span of one kind: of one rank, or of all."""
        return [span.total for span in self.spans if span.kind == kind and rank in (None, span.rank)]

    def comparisons(self) -> dict[int, bool]:
        """By sample, whether it equals its reference bit for bit; those that were not compared are left out."""
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
    """A repeat that counts: every rank has worked through all samples."""

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
        """Seconds of each."""
        return self.repeat.seconds("evaluate")

    @cached_property
    def micro_batches(self) -> int:
        return len({span.sample for span in self.repeat.spans if span.kind == "evaluate"})

    @cached_property
    def times(self) -> list[Times]:
        """By rank, of the one makespan."""
        own: list[list[Span]] = [[] for _ in self.assignment.ranges]
        for span in self.repeat.spans:
            own[span.rank].append(span)
        return [timeline.times(spans, self.start, self.end) for spans in own]

    @property
    def sends(self) -> list[Handoff]:
        return [handoff for handoff in self.repeat.handoffs if handoff.direction == "send"]

    def baselines(self, kind: BaselineKind) -> list[BaselineMeasured]:
        return [baseline for baseline in self.repeat.baselines if baseline.kind == kind]


def completed(repeats: Sequence[PipeRepeat]) -> list[Completed]:
    """Those that count, in order."""
    found = []
    for repeat in repeats:
        assignment, stages = repeat.assignment, repeat.stages
        if assignment is None or len(stages) < len(assignment.ranges) or not repeat.made:
            continue
        one = Completed(repeat, assignment, stages[0].started, max(stage.ended for stage in stages.values()))
        if one.evaluations and one.makespan > 0:
            found.append(one)
    return found
