"""Where a pipeline stands, rank by rank, for whoever draws it."""

from collections import deque
from dataclasses import dataclass, field

from gpubench.diffusion import timeline
from gpubench.diffusion.split import Range
from gpubench.diffusion.timeline import Times
from gpubench.events import Heartbeat, Message, PipelineBuilt, SampleFinished, Span, SpansMeasured
from gpubench.host.recording import Progress

RECENT = 256  # spans of a rank behind its shares: a few samples' worth


@dataclass
class RankProgress:
    doing: str = "starting"
    evaluations: Range | None = None
    """[start, end) of each sample's."""
    sample: int | None = None
    """The first of the micro-batch in hand."""
    step: int | None = None
    evaluation: float | None = None
    """Seconds of the latest."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def times(self) -> Times | None:
        """Where the time of the recent spans went."""
        if not self.spans:
            return None
        began = min(span.time for span in self.spans)
        return timeline.times(self.spans, began, max(span.time + span.total for span in self.spans))


@dataclass
class PipeProgress(Progress):
    """`states` has one entry a rank, `total` is how many samples are to be made, `finished` how many are."""

    total: int = 0
    finished: int = 0
    states: list[RankProgress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [RankProgress() for _ in range(self.ranks)]

    def take(self, event: Message) -> None:
        """Notes what an event says of the state of its rank; most say nothing."""
        state = self.states[event.rank]
        match event:
            case Heartbeat():
                state.doing = event.doing
                state.step = state.step if event.step is None else event.step
                if event.rank == 0:
                    self.doing = event.doing
            case PipelineBuilt():
                state.evaluations = event.ranges[event.rank]
            case SpansMeasured():
                _take_spans(state, event.spans)
            case SampleFinished(sample=sample):
                late = self.recorded or sample.repeat != self.repeat  # each rank has a connection of its own
                self.finished += not late


def _take_spans(state: RankProgress, spans: list[Span]) -> None:
    """Waits may be told before the work that preceded them: a device's times are read late."""
    state.spans.extend(spans)
    for span in sorted(spans, key=lambda span: span.time):
        state.sample = span.sample
        if span.kind == "evaluate":
            state.evaluation, state.step = span.total, span.step
