"""Keeps the events of a pipeline's ranks, and the results of the run."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpubench import devices, events
from gpubench.errors import GpubenchError, InvalidEvent, RunFailed
from gpubench.events import SampleFinished, SpansMeasured
from gpubench.host.recorder import Recorder
from gpubench.kinds.pipeline.chrome_trace import chrome_trace
from gpubench.kinds.pipeline.folders import read_prompts
from gpubench.kinds.pipeline.progress import PipeProgress
from gpubench.kinds.pipeline.repeats import PipeRepeat
from gpubench.kinds.pipeline.results import summarise
from gpubench.kinds.pipeline.resuming import ANEW, DIGITS, PROMPT_LIST, Finished, change, files_of, made_with
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.warnings import made_again, other_threads, unused_prompts
from gpubench.runs import warnings
from gpubench.runs.directory import FAILED, HANDOFFS, IMAGE, LATENT, SAMPLES, TIMELINE, TRACE, is_sample_file
from gpubench.runs.summary import Summary
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration
from gpubench.settings.schema import Device


def _repeats(event: events.Message) -> set[int]:
    match event:
        case SpansMeasured(spans=spans):
            return {span.repeat for span in spans}
        case events.HandoffMeasured(handoff=part) | SampleFinished(sample=part):
            return {part.repeat}
        case _:
            return {event.repeat} if hasattr(event, "repeat") else set()


class PipeRecorder(Recorder[CompletedPipeSettings]):
    lighter = "try --precision fp16 or bf16, a smaller --micro-batch, or --model.height and --model.width"
    progress: PipeProgress

    def __init__(
        self, configuration: Configuration[CompletedPipeSettings], argv: Sequence[str], finished: Finished | None = None
    ) -> None:
        """Takes over the samples in `finished`, so that the run makes the others. Raises what `Recorder` raises."""
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
        """Begins the repeats that an event belongs to. Raises InvalidEvent if the run does not have them."""
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
                logger="gpubench.kinds.pipeline",
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
