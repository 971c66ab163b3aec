"""Keeps the events of a pipeline's ranks and the results of the run, and shows its progress."""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench import devices, events, units
from gpubench.errors import GpubenchError, InvalidEvent, RunFailed
from gpubench.events import Heartbeat, Message, PipelineBuilt, SampleFinished, Span, SpansMeasured
from gpubench.host.live import hardware, head
from gpubench.host.recorder import Progress, Recorder
from gpubench.pipeline.chrome_trace import chrome_trace
from gpubench.pipeline.folders import read_prompts
from gpubench.pipeline.repeats import PipeRepeat
from gpubench.pipeline.results import summarise
from gpubench.pipeline.resuming import ANEW, DIGITS, PROMPT_LIST, Finished, change, files_of, made_with
from gpubench.pipeline.split import Range
from gpubench.pipeline.warnings import made_again, other_threads, unused_prompts
from gpubench.runs import stages, warnings
from gpubench.runs.directory import FAILED, HANDOFFS, IMAGE, LATENT, SAMPLES, TIMELINE, TRACE, is_sample_file
from gpubench.runs.stages import PARTS, Times
from gpubench.runs.summary import Summary
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration
from gpubench.settings.schema import CompletedPipeSettings, Device
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
        """How the time of the recent spans divides into parts, or None if there are no spans yet."""
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
    """Returns the state of a run as one line of plain text."""
    parts = [progress.place]
    if not any(state.spans for state in progress.states):
        return "  ".join([*parts, units.words(progress.doing)])
    parts.append(f"samples {progress.finished}/{progress.total or '?'}")
    if progress.finished == progress.total:  # the baselines or the verification run
        busy = [state.doing for state in progress.states if not state.doing.startswith("waiting")]
        return "  ".join([*parts, units.words(busy[0] if busy else progress.doing)])
    parts += [f"rank {rank} {_where(state)}" for rank, state in enumerate(progress.states)]
    return "  ".join(parts)


def draw(experiment: str, progress: PipeProgress) -> RenderableType:
    """Returns the state of a run as a table with a row for each rank."""
    table = head(progress.place)
    table.add_row("samples", f"{progress.finished} of {progress.total or '?'}")
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table, Fitting(_ranks(progress, *layout) for layout in LAYOUTS))


def _ranks(progress: PipeProgress, columns: Sequence[str], words: int | None) -> Table:
    """Builds the table of the ranks. `words` is the largest width of the column "doing", in characters."""
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
    """Returns "sample 3 evaluation 17", or what the rank does if it works on no sample."""
    if state.sample is None:
        return units.words(state.doing)
    return f"sample {state.sample}" + (f" evaluation {state.step}" if state.step is not None else "")


def _repeats(event: events.Message) -> set[int]:
    """Returns the repeats that an event is of."""
    match event:
        case SpansMeasured(spans=spans):
            return {span.repeat for span in spans}
        case events.HandoffMeasured(handoff=part) | SampleFinished(sample=part):
            return {part.repeat}
        case _:
            return {event.repeat} if hasattr(event, "repeat") else set()


class PipeRecorder(Recorder[CompletedPipeSettings]):
    """One run of `gpubench pipe-infer`."""

    command = "pipe-infer"
    lighter = "try --precision fp16 or bf16, a smaller --micro-batch, or --model.height and --model.width"
    progress: PipeProgress

    def __init__(
        self, configuration: Configuration[CompletedPipeSettings], argv: Sequence[str], finished: Finished | None = None
    ) -> None:
        """Takes over the samples in `finished`; the run makes the others. Raises the same errors as `Recorder`."""
        self._files = files_of(configuration.settings)
        self._prompts = len(read_prompts(configuration.settings.work.prompts))
        super().__init__(configuration, argv)
        self._repeats: dict[int, PipeRepeat] = {}
        self._evaluations: Counter[tuple[int, int]] = Counter()
        self.samples = finished.missing(self.settings.work.samples) if finished else None
        self._finished = finished
        self.progress = self.at_start()
        if finished:
            try:
                self._take_over(finished)
            except RunFailed as error:
                try:
                    self.close(FAILED, self.summary(), error)
                except RunFailed:  # the summary cannot be written either
                    self.writer.finish(FAILED, error.record())
                raise

    @property
    def patience(self) -> float:
        return min(super().patience, self.settings.pipeline.deadline)

    def at_start(self) -> PipeProgress:
        total = self.settings.work.samples if self.samples is None else len(self.samples)
        return PipeProgress(ranks=self.processes, total=total)

    def begin_repeat(self, number: int, repeats: int) -> None:
        super().begin_repeat(number, repeats)
        self._repeats.setdefault(number, PipeRepeat(number))

    def unit_time(self, summary: Summary) -> float | None:
        evaluation = summary.get("evaluation_time")
        return evaluation.estimate if evaluation else None

    def keep(self, event: events.Message) -> bool:
        self._open_repeats(event)
        self._follow(event)
        if self.profiled is not None and getattr(event, "repeat", None) == self.profiled:
            return True  # the profiler slows this repeat down, so its times are not kept
        match event:
            case events.PipelineBuilt():
                self._take_built(event)
            case events.SpansMeasured():
                self._take_spans(event)
            case events.HandoffMeasured(handoff=handoff):
                self._take_handoff(handoff)
            case events.SampleFinished():
                self._take_sample(event)
            case events.StageDone():
                self._repeats[event.repeat].stages[event.rank] = event
            case events.ReferenceWorkloadTimed(rank=0):
                self._repeats[event.repeat].reference_time = event.seconds
            case events.BaselineMeasured():
                self._repeats[event.repeat].baselines.append(event)
            case events.Verified():
                self._repeats[event.repeat].verified = event
            case _:
                return isinstance(event, events.Heartbeat)
        return True

    def _open_repeats(self, event: events.Message) -> None:
        """Begins the repeats that an event is of. Raises InvalidEvent if the run does not have them."""
        for number in _repeats(event) or {self.progress.repeat}:
            self.refuse_unknown(event.rank, number)
            if number != self.profiled:
                self._repeats.setdefault(number, PipeRepeat(number))

    def completed(self) -> int:
        return sum(len(repeat.stages) == self.settings.distributed.world_size for repeat in self._repeats.values())

    def end_repeat(self) -> None:
        super().end_repeat()
        spans = [span for repeat in self._repeats.values() for span in repeat.spans]
        handoffs = [handoff for repeat in self._repeats.values() for handoff in repeat.handoffs]
        self.writer.replace(TRACE, chrome_trace(spans, handoffs))

    def refutation(self, summary: Summary) -> GpubenchError | None:
        """Returns an error if the verification found samples that differ from the reference."""
        pipeline = summary.pipeline
        if pipeline is None or pipeline.verification is None:
            return None
        found = pipeline.verification
        if found.identical == found.samples:
            return None
        return RunFailed(
            f"{found.samples - found.identical} of {found.samples} samples differ from {found.reference}",
            "summary.json lists the samples, and where the first of them begins to differ",
        )

    def sum_up(self) -> Summary:
        repeats = [repeat for _, repeat in sorted(self._repeats.items())]
        found = summarise(repeats, self.settings.work.samples, self.own_telemetry, self.metered_gpus, self._values)
        settings = self.settings
        threads = settings.performance.cpu_threads if settings.device is Device.cpu else None
        remarks = warnings.collected(
            made_again(self._finished.damaged if self._finished else []),
            unused_prompts(self._prompts, len(settings.work.seed_list), settings.work.samples),
            other_threads(threads, devices.physical_cores()),
        )
        return msgspec.structs.replace(found, warnings=found.warnings + remarks)

    def _follow(self, event: events.Message) -> None:
        if isinstance(event, events.PipelineBuilt):
            self.turn_to(event.repeat)
        self.progress.take(event)

    def _take_over(self, finished: Finished) -> None:
        self._repeats[0] = PipeRepeat(0)
        self.writer.update(resumed_from=str(finished.path))
        for number, sample in sorted(finished.samples.items()):
            taken = msgspec.structs.replace(sample, repeat=0, resumed=True)
            self._keep_sample(taken, finished.files(number))

    def _take_built(self, event: events.PipelineBuilt) -> None:
        self._repeats[event.repeat].built[event.rank] = event
        if event.rank == 0:
            workload = {
                "model": event.model,
                "parameters": event.parameters,
                "weights": event.weights[:DIGITS],
                "scheduler": event.scheduler,
                **({"files": self._files} if self._files else {}),
                "evaluations": len(event.timesteps),
                "samples": self.progress.total,
                "sample_shape": " x ".join(map(str, event.latent_shape)),
            }
            self._refuse_others(workload)
            self.writer.update(workload=workload)

    def _refuse_others(self, workload: dict[str, Any]) -> None:
        """Raises RunFailed if the samples taken over were made with another workload or environment."""
        then = dict(self._finished.made_with) if self._finished else {}
        then.pop(PROMPT_LIST, None)  # checked before the start; it also depends on the number of samples
        if changed := change(then, made_with(workload, flatten(self.environment))):
            raise RunFailed(changed, ANEW)

    def _take_spans(self, event: events.SpansMeasured) -> None:
        for span in event.spans:
            self._repeats[span.repeat].spans.append(span)
            self.writer.append(TIMELINE, span)
            if span.step is not None:
                place = (span.repeat, span.rank)
                values = {f"rank{span.rank}/evaluation_time": span.total}
                self.metrics.scalars(span.repeat, self._evaluations[place], span.time, values)
                self._evaluations[place] += 1

    def _take_handoff(self, handoff: events.Handoff) -> None:
        self._repeats[handoff.repeat].handoffs.append(handoff)
        self.writer.append(HANDOFFS, handoff)
        sent = handoff.direction == "send"
        ends = (handoff.rank, handoff.peer) if sent else (handoff.peer, handoff.rank)
        fields = {
            "from": ends[0],
            "to": ends[1],
            "sample": handoff.sample,
            "step": handoff.step,
            "bytes": handoff.size,
            "waited": handoff.waited,
            "took": handoff.total,
        }
        self._take_log(
            events.Log(
                rank=handoff.rank,
                time=handoff.time,
                level=logging.DEBUG,
                logger="gpubench.pipeline",
                message="sent a hand-off" if sent else "received a hand-off",
                fields=fields,
            )
        )

    def _take_sample(self, event: events.SampleFinished) -> None:
        sample = event.sample
        if sample.sample >= self.settings.work.samples:
            raise InvalidEvent.of(event.rank, f"there is no sample {sample.sample}")
        contents = {}
        for name, content, suffix in ((sample.latent, event.latent, LATENT), (sample.image, event.image, IMAGE)):
            if name is not None and not is_sample_file(name, sample.sample, suffix):
                raise InvalidEvent.of(event.rank, f"sample {sample.sample} has the file {name}")
            if name and content:
                contents[name] = content
        self._keep_sample(sample, contents)
        latency = {"sample_latency": sample.finished - sample.started}
        self.metrics.scalars(sample.repeat, sample.sample, sample.finished, latency)

    def _keep_sample(self, sample: events.Sample, files: Mapping[str, bytes]) -> None:
        """Writes the sample and its files at once, so that a run that fails later need not make it again."""
        for name, content in files.items():
            self.writer.replace(name, content)
        sample = msgspec.structs.replace(
            sample, digests={name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        )
        self._repeats[sample.repeat].samples[sample.sample] = sample
        self.writer.append(SAMPLES, sample)
        self.writer.flush()
