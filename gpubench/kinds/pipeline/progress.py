"""The progress of a pipeline run: what each rank does, as plain text and as a table."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.events import Heartbeat, Message, PipelineBuilt, SampleFinished, Span, SpansMeasured
from gpubench.host.live import hardware, head, left
from gpubench.host.recorder import Progress
from gpubench.kinds.pipeline.split import Range
from gpubench.runs import stages
from gpubench.runs.stages import PARTS, Times
from gpubench.text import Fitting, plain_table

RECENT = 256  # spans of a rank that its displayed shares of time are computed from: a few samples


@dataclass
class RankProgress:
    doing: str = "starting"
    evaluations: Range | None = None
    """The range [start, end) of each sample's evaluations that this rank makes."""
    sample: int | None = None
    """The first sample of the micro-batch that the rank works on."""
    step: int | None = None
    evaluation: float | None = None
    """The time of the latest evaluation, in seconds."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def times(self) -> Times | None:
        """How the time of the recent spans divides into parts; None if there are no spans yet."""
        if not self.spans:
            return None
        began = min(span.time for span in self.spans)
        return stages.rank_times(self.spans, began, max(span.time + span.total for span in self.spans))


@dataclass
class PipeProgress(Progress):
    """The progress of a pipeline run.

    `states` has one entry for each rank. `total` counts the samples to make, and `finished` those that are made.
    """

    total: int = 0
    finished: int = 0
    states: list[RankProgress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [RankProgress() for _ in range(self.ranks)]

    def take(self, event: Message) -> None:
        """Updates the state of the event's rank. Most kinds of event change nothing."""
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
                late = self.recorded or sample.repeat != self.repeat  # events of different ranks arrive in any order
                self.finished += not late


def _take_spans(state: RankProgress, spans: list[Span]) -> None:
    """Adds spans to a rank's state, in order of time.

    A wait may arrive before the work that preceded it, because the times of a device are read late.
    """
    state.spans.extend(spans)
    for span in sorted(spans, key=lambda span: span.time):
        state.sample = span.sample
        if span.kind == "evaluate":
            state.evaluation, state.step = span.total, span.step


EVERYTHING = ("rank", "sample", "evaluation", "evaluation time", *map(units.words, PARTS), "doing")
LAYOUTS = (  # from the widest table to the narrowest
    (EVERYTHING, None),
    (EVERYTHING, 12),
    (("rank", "sample", "evaluation", "doing"), 15),
)


def describe(progress: PipeProgress) -> str:
    parts = [progress.place]
    if not any(state.spans for state in progress.states):
        return "  ".join([*parts, units.words(progress.doing), *left(progress)])
    parts.append(f"samples {progress.finished}/{progress.total or '?'}")
    if progress.finished == progress.total:  # the baselines or the verification run
        busy = [state.doing for state in progress.states if not state.doing.startswith("waiting")]
        return "  ".join([*parts, units.words(busy[0] if busy else progress.doing)])
    parts += [f"rank {rank} {_where(state)}" for rank, state in enumerate(progress.states)]
    return "  ".join([*parts, *left(progress)])


def draw(experiment: str, progress: PipeProgress) -> RenderableType:
    table = head(progress.place)
    table.add_row("samples", f"{progress.finished} of {progress.total or '?'}")
    for line in left(progress):
        table.add_row("left", line.removesuffix(" left"))
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table, Fitting(_ranks(progress, *layout) for layout in LAYOUTS))


def _ranks(progress: PipeProgress, columns: Sequence[str], words: int | None) -> Table:
    """`words` is the largest width of the column "doing", in characters."""
    table = plain_table()
    for name in columns:
        is_words = name == "doing"
        justify: JustifyMethod = "left" if is_words else "right"
        heading = name.replace(" ", "\n")
        table.add_column(heading, justify=justify, no_wrap=not is_words, max_width=words if is_words else None)
    for rank, state in enumerate(progress.states):
        cells = _cells(state) | {"rank": str(rank), "doing": units.words(state.doing)}
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(state: RankProgress) -> dict[str, str]:
    own = f"{state.evaluations[0]}-{state.evaluations[1] - 1}" if state.evaluations else ""
    sample, step = ("" if number is None else str(number) for number in (state.sample, state.step))
    taken = "" if state.evaluation is None else units.seconds(state.evaluation)
    times = state.times
    shares = {units.words(part): units.whole_percent(times.share(part)) if times else "" for part in PARTS}
    return {"sample": sample, "evaluation": " of ".join(filter(None, (step, own))), "evaluation time": taken} | shares


def _where(state: RankProgress) -> str:
    """Such as "sample 3 evaluation 17", or what the rank does if it works on no sample."""
    if state.sample is None:
        return units.words(state.doing)
    return f"sample {state.sample}" + (f" evaluation {state.step}" if state.step is not None else "")
