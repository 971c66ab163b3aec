"""What is kept of a pipeline's run."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gpubench import devices, events
from gpubench.configuration import Configuration
from gpubench.defaults import local_ranks
from gpubench.diffusion.chrome_trace import chrome_trace
from gpubench.diffusion.prompts import read_prompts
from gpubench.diffusion.repeat import PipeRepeat
from gpubench.diffusion.resuming import ANEW, DIGITS, Finished, change, files_of, made_with
from gpubench.diffusion.settings import PipeSettings
from gpubench.errors import GpubenchError, RunFailed
from gpubench.host.pipe_progress import PipeProgress
from gpubench.host.recording import Recorder
from gpubench.pipe_doubts import of_threads, unused_prompts
from gpubench.pipe_summary import summarise
from gpubench.runs import FAILED, HANDOFFS, SAMPLES, TIMELINE, TRACE
from gpubench.settings import Device
from gpubench.summary import Summary


class PipeRecorder(Recorder[PipeSettings]):
    """One run of `gpubench pipe-infer`."""

    command = "pipe-infer"
    worker = "gpubench.pipeline.worker"
    lighter = "try --precision fp16 or bf16, a smaller --micro-batch, or --model.height and --model.width"
    progress: PipeProgress

    def __init__(
        self, configuration: Configuration[PipeSettings], argv: Sequence[str], finished: Finished | None = None
    ) -> None:
        """`finished` samples are taken over, and the others made. Raises what `Recorder` does."""
        self._files = files_of(configuration.settings)
        self._prompts = len(read_prompts(configuration.settings.work.prompts))
        super().__init__(configuration, argv)
        self._repeats: dict[int, PipeRepeat] = {}
        self._evaluations: Counter[tuple[int, int]] = Counter()
        self.samples = finished.missing(self.settings.work.total) if finished else None
        self._finished = finished
        self.progress = self.at_start()
        if finished:
            try:
                self._take_over(finished)
            except RunFailed as error:
                try:
                    self.close(FAILED, self.summary(), error)
                except RunFailed:  # the summary is lost as well
                    self.writer.finish(FAILED, error.record())
                raise

    @property
    def patience(self) -> float:
        return min(super().patience, self.settings.pipeline.deadline)

    def at_start(self) -> PipeProgress:
        total = self.settings.work.total if self.samples is None else len(self.samples)
        return PipeProgress(ranks=self.processes, total=total)

    def begin_repeat(self, number: int, repeats: int) -> None:
        super().begin_repeat(number, repeats)
        self._repeats.setdefault(number, PipeRepeat(number))

    def unit_time(self, summary: Summary) -> float | None:
        evaluation = summary.get("evaluation_time")
        return evaluation.estimate if evaluation else None

    def keep(self, event: events.Message) -> bool:
        self._follow(event)
        if self.profiled is not None and getattr(event, "repeat", None) == self.profiled:
            return True  # its times are not those of the program alone
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
            case events.YardstickRead(rank=0):
                self._repeats[event.repeat].yardstick = event.seconds
            case events.BaselineMeasured():
                self._repeats[event.repeat].baselines.append(event)
            case events.Verified():
                self._repeats[event.repeat].verified = event
            case _:
                return isinstance(event, events.Heartbeat)
        return True

    def completed(self) -> int:
        return sum(len(repeat.stages) == self.settings.distributed.world_size for repeat in self._repeats.values())

    def end_repeat(self) -> None:
        super().end_repeat()
        spans = [span for repeat in self._repeats.values() for span in repeat.spans]
        handoffs = [handoff for repeat in self._repeats.values() for handoff in repeat.handoffs]
        self.writer.replace(TRACE, chrome_trace(spans, handoffs))

    def refutation(self, summary: Summary) -> GpubenchError | None:
        """Samples that are not what diffusers makes."""
        pipeline = summary.pipeline
        if pipeline is None or pipeline.verification is None:
            return None
        found = pipeline.verification
        if found.identical == found.samples:
            return None
        return RunFailed(
            f"{found.samples - found.identical} of {found.samples} samples differ from {found.reference}",
            "summary.json says which, and where the first one parts",
        )

    def sum_up(self) -> Summary:
        repeats = [repeat for _, repeat in sorted(self._repeats.items())]
        found = summarise(repeats, self.settings.work.total, self.telemetry, self.gpus, self._crowding())
        return msgspec.structs.replace(found, warnings=[*found.warnings, *self._remarks()])

    def _remarks(self) -> Iterator[str]:
        """What follows from the settings alone."""
        yield from unused_prompts(self._prompts, self.settings.work.total)
        threads = self.settings.performance.cpu_threads
        if self.settings.device is Device.cpu and threads:
            yield from of_threads(threads, devices.physical_cores())

    def _crowding(self) -> float:
        """How many ranks share what one would have for itself: a GPU, or the threads of a CPU."""
        ranks = local_ranks(self.settings)
        if self.settings.device is Device.cuda:
            return max(1.0, ranks / max(1, len(devices.visible_gpus())))
        return max(1.0, ranks * (self.settings.performance.cpu_threads or 1) / devices.physical_cores())

    def _follow(self, event: events.Message) -> None:
        if isinstance(event, events.PipelineBuilt):
            self.turn_to(event.repeat)
        self.progress.take(event)

    def _take_over(self, finished: Finished) -> None:
        self._repeats[0] = PipeRepeat(0)
        self.writer.update(resumed_from=str(finished.path))
        for number, sample in sorted(finished.samples.items()):
            for name, content in finished.files(number).items():
                self.writer.replace(name, content)
            self._keep_sample(msgspec.structs.replace(sample, repeat=0, resumed=True))

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
        """Raises RunFailed if the samples that were taken over rest on something else than those to come."""
        then = self._finished.made_with if self._finished else {}
        if changed := change(then, made_with(workload, self.environment)):
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
                message="sent a hand-over" if sent else "received a hand-over",
                fields=fields,
            )
        )

    def _take_sample(self, event: events.SampleFinished) -> None:
        sample = event.sample
        for name, content in ((sample.latent, event.latent), (sample.image, event.image)):
            if name and content:
                self.writer.replace(name, content)
        self._keep_sample(sample)
        latency = {"sample_latency": sample.finished - sample.started}
        self.metrics.scalars(sample.repeat, sample.sample, sample.finished, latency)

    def _keep_sample(self, sample: events.Sample) -> None:
        """At once: whatever happens next, this one need not be made again."""
        self._repeats[sample.repeat].samples[sample.sample] = sample
        self.writer.append(SAMPLES, sample)
        self.writer.flush()
