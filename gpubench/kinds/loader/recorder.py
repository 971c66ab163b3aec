"""Records a run that draws the batches of a program without its training: each batch is a step."""

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from gpubench import events, probe
from gpubench.data_cost import DataCost, delay_of, scalars, stages_of
from gpubench.diagnosis.rules import of_data
from gpubench.errors import GpubenchError, ProgramFailed
from gpubench.findings import Findings
from gpubench.kinds.program.recorder import ProgramRecorder
from gpubench.loader_record import LoaderRecord
from gpubench.metrics import stage_metric
from gpubench.runs.directory import FINDINGS, LOADER
from gpubench.runs.summary import Summary, metric_of
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import CompletedLoaderSettings

MOST_SECONDS = 4.0
"""The longest time that the batches of a repeat take, where their number is open."""


class LoaderRecorder(ProgramRecorder):
    """One run of the loader alone; another repeat is recorded, in which the code is sampled."""

    lighter = "give the program smaller batches, or fewer workers"

    def __init__(self, configuration: Configuration[CompletedLoaderSettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)  # type: ignore[arg-type]  # they have what it reads
        self._records: dict[int, LoaderRecord] = {}
        self.advice: Findings | None = None

    @property
    def seconds_each(self) -> float | None:
        """The time that the batches of a repeat may take: they take alike, so that it is shorter than for training."""
        return self._seconds_each

    @seconds_each.setter
    def seconds_each(self, seconds: float | None) -> None:
        self._seconds_each = min(seconds, MOST_SECONDS) if seconds else seconds

    _seconds_each: float | None = None

    @property
    def command(self) -> str:
        return str(self.settings.command)

    @property
    def wanted(self) -> int | None:
        return None

    @property
    def variables(self) -> Mapping[str, str]:
        wanted = {probe.LOADER_VARIABLE: True, probe.SAMPLED_VARIABLE: self.profiled is not None}
        return {name: "1" for name, is_set in wanted.items() if is_set}

    @property
    def step(self) -> str:
        return "batch"

    @property
    def recorded(self) -> LoaderRecord | None:
        """What was seen in the repeat that was recorded; None if none was."""
        return self._records.get(self.profiled) if self.profiled is not None else None

    @property
    def records(self) -> list[LoaderRecord]:
        """What was seen in the repeats that were measured."""
        return [record for number, record in sorted(self._records.items()) if number != self.profiled]

    def take(self, event: events.Message) -> None:
        if isinstance(event, events.LoaderRefused):
            raise ProgramFailed(event.reason, event.hint)
        super().take(event)

    def keep(self, event: events.Message) -> bool:
        if isinstance(event, events.LoaderDrawn):
            self.refuse_unknown(event.rank, event.repeat)
            if event.rank == 0:
                self._records[event.repeat] = event.loader
            return True
        return super().keep(event)

    def facts_of(self, built: events.ModelBuilt) -> dict[str, Any]:
        found = super().facts_of(built)
        own = {"samples_per_step": self._samples_per_step(), "workers": built.settings.get("data.workers")}
        return found | {"workload": own}

    def sum_up(self) -> Summary:
        found = super().sum_up()
        numbers = [window.repeat for window in found.steady]
        records = [self._records[number] for number in numbers if number in self._records]
        if not records or len(records) < len(numbers):
            return found
        more = [
            metric_of(name, values, sum(window.steps for window in found.steady), None, None)
            for name, values in _figures(records).items()
        ]
        return msgspec.structs.replace(found, metrics=[*found.metrics, *more])

    def diagnose(self, *, failed: bool = False) -> None:
        """Writes what the data costs, unless no repeat has been measured."""
        if (found := self.cost) and not failed:
            self.keep_cost(found)
            self.metrics.scalars(self.progress.repeat, 0, time.time(), scalars(found))

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        if self.advice is None and (found := self.cost):  # of a run that was interrupted
            self.keep_cost(found)
        super().close(status, summary, error)

    @property
    def cost(self) -> DataCost | None:
        """What the data costs, as far as this run tells; None before the first repeat."""
        records, recorded = self.records, self.recorded
        last = recorded or (records[-1] if records else None)
        if last is None:
            return None
        stages = stages_of(records, recorded)
        return DataCost(
            record=last,
            stages=stages,
            sample=sum(stage.seconds for stage in stages),
            sample_cpu=sum(stage.cpu for stage in stages),
            times=last.times,
            delay=delay_of(records, recorded),
        )

    def keep_cost(self, found: DataCost) -> None:
        """Writes what the data costs, and the findings on it. Called again, it replaces them."""
        self.writer.replace(LOADER, found)
        self.conclude(self.addressed(of_data(found, self._sampled.get(0))))

    @property
    def findings(self) -> Findings | None:
        return self.advice

    def conclude(self, findings: Findings) -> None:
        self.advice = findings
        self.writer.replace(FINDINGS, findings)

    def refutation(self, summary: Summary) -> GpubenchError | None:
        if self.elsewhere or summary.metrics:
            return None
        return self._cut_short() or ProgramFailed(
            "the program ended before enough batches were drawn from its DataLoader",
            "run it for two updates or more, or lower --training.warmup_steps",
        )


def _figures(records: Sequence[LoaderRecord]) -> dict[str, list[float]]:
    """The metrics of the loader by name, each with a value for each record; those that one of them lacks are absent."""
    each = [_of_record(record) for record in records]
    return {name: [one[name] for one in each] for name in each[0] if all(name in one for one in each)}


def _of_record(record: LoaderRecord) -> dict[str, float]:
    found = {"first_batch_time": record.first_batch}
    if record.restarts:
        found["pass_start_time"] = fmean(record.restarts)
    if record.cpu is not None and record.samples:
        found["sample_cpu_time"] = record.cpu / record.samples
    if record.memory:
        found["worker_memory"] = fmean(one.pss for one in record.memory)
    if record.stage_samples:
        stages = {stage_metric(one.kind, one.name): one.seconds / record.stage_samples for one in record.stages}
        found |= {name: seconds for name, seconds in stages.items() if seconds > 0}
    return found
