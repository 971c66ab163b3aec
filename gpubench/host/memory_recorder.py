"""Keeps the events and results of a memory run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpubench import events
from gpubench.findings import Findings
from gpubench.host.recorder import LIGHTER, Progress, Recorder
from gpubench.memory.batch_sizes import BatchSizes, Trades
from gpubench.memory.footprint import Footprint, Footprints, peaks, scalars
from gpubench.runs.directory import BATCH_SIZES, FINDINGS, MEMORY, TRADES
from gpubench.runs.summary import Summary, metric_of
from gpubench.settings.loading import Configuration
from gpubench.settings.schema import CompletedMemorySettings


@dataclass
class MemoryProgress(Progress):
    step: int | None = None
    steps: int = 1


class MemoryRecorder(Recorder[CompletedMemorySettings]):
    """One run of `gpubench memory`."""

    command = "memory"
    worker = "gpubench.memory.worker"
    lighter = LIGHTER
    progress: MemoryProgress

    def __init__(self, configuration: Configuration[CompletedMemorySettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self.progress = self.at_start()
        self._found: dict[tuple[int, int], Footprint] = {}
        """The footprints by (repeat, rank)."""
        self.advice: Findings | None = None
        self.batch_sizes: BatchSizes | None = None
        self.trades: Trades | None = None

    @property
    def processes(self) -> int:
        return 1 if self.settings.memory.predict else super().processes

    @property
    def footprints(self) -> list[Footprint]:
        """The footprints of the last repeat, in order of rank."""
        last = max((repeat for repeat, _ in self._found), default=0)
        return [found for (repeat, _), found in sorted(self._found.items()) if repeat == last]

    def at_start(self) -> MemoryProgress:
        return MemoryProgress(ranks=self.processes, steps=self.settings.memory.steps)

    def keep(self, event: events.Message) -> bool:
        match event:
            case events.Heartbeat(rank=0):
                self.progress.doing, self.progress.step = event.doing, event.step
            case events.MemoryFollowed():
                self._take(event)
            case events.BatchSizesFound():
                self.keep_batch_sizes(msgspec.json.decode(event.found, type=BatchSizes))
            case _:
                return False
        return True

    def documents(self) -> dict[str, Any]:
        found = {"findings": self.advice, "batch_sizes": self.batch_sizes, "trades": self.trades}
        return {"memory": Footprints(self.footprints)} | {name: value for name, value in found.items() if value}

    def completed(self) -> int:
        return len({repeat for repeat, _ in self._found})

    def sum_up(self) -> Summary:
        """Returns the peaks, each as the maximum over the ranks."""
        by_repeat = [
            [found for (repeat, _), found in self._found.items() if repeat == number]
            for number in sorted({repeat for repeat, _ in self._found})
        ]
        values = [peaks(found) for found in by_repeat]
        metrics = [
            metric_of(name, [value[name] for value in values], len(values), None, None)
            for name in (values[0] if values else {})
        ]
        return Summary(metrics, [], [], None, None, None, {}, [])

    @property
    def findings(self) -> Findings | None:
        return self.advice

    def conclude(self, findings: Findings) -> None:
        """Keeps the advice on how to save memory, and replaces it once the advice has been tried."""
        self.advice = findings
        self.writer.replace(FINDINGS, findings)

    def adopt(self, other: "MemoryRecorder") -> None:
        """Takes over the footprints of another run that measured the same settings."""
        self._found |= other._found
        self.writer.replace(MEMORY, Footprints(self.footprints))
        self.writer.update(repeats=self.completed())
        self.metrics.summary(self.summary())

    def keep_batch_sizes(self, found: BatchSizes) -> None:
        """Keeps the predicted batch sizes, and replaces them once they have been tried."""
        self.batch_sizes = found
        self.writer.replace(BATCH_SIZES, found)

    def keep_trades(self, trades: Trades) -> None:
        self.trades = trades
        self.writer.replace(TRADES, trades)

    def _take(self, event: events.MemoryFollowed) -> None:
        found = msgspec.json.decode(event.footprint, type=Footprint)
        if event.rank == 0 and (event.repeat, event.rank) not in self._found:
            self.metrics.scalars(event.repeat, 0, time.time(), scalars(found))
        self._found[event.repeat, event.rank] = found
        self.writer.replace(MEMORY, Footprints(self.footprints))
        if event.findings:
            self.conclude(msgspec.json.decode(event.findings, type=Findings))
