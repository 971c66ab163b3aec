"""The repeats of a pipeline, put together from the events of all ranks.

A repeat counts once every rank has finished all samples. Its makespan is the time from rank 0's start to the last
rank's end, fill and drain included. A repeat that ended early contributes only its samples and hand-offs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
from gpubench.kinds.pipeline.split import Split
from gpubench.runs.stages import Times, rank_times


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
    def assignment(self) -> Split | None:
        """The assignment of evaluations to ranks; None until a rank has reported it."""
        for built in self.built.values():
            return Split(tuple(built.ranges))
        return None

    @property
    def made(self) -> list[Sample]:
        """The samples finished in this repeat, not taken over from another run, in order of time."""
        own = [sample for sample in self.samples.values() if not sample.resumed]
        return sorted(own, key=lambda sample: (sample.finished, sample.sample))

    def seconds(self, kind: SpanKind, rank: int | None = None) -> list[float]:
        """The times of all spans of one kind, of one rank or of all."""
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
    assignment: Split
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
    found = []
    for repeat in repeats:
        assignment, stages = repeat.assignment, repeat.stages
        if assignment is None or len(stages) < len(assignment.ranges) or not repeat.made:
            continue
        one = Completed(repeat, assignment, stages[0].started, max(stage.ended for stage in stages.values()))
        if one.evaluations and one.makespan > 0:
            found.append(one)
    return found
