"""Records the events and results of a memory run, and shows its progress."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from gpubench import events, units
from gpubench.findings import Findings
from gpubench.host.live import hardware, head
from gpubench.host.recorder import Progress, Recorder
from gpubench.kinds.memory.settings import CompletedMemorySettings
from gpubench.kinds.training.recorder import LIGHTER
from gpubench.memory.batch_sizes import BatchSizes, Trades
from gpubench.memory.footprint import Footprint, Footprints, peaks, scalars
from gpubench.runs.directory import BATCH_SIZES, FINDINGS, MEMORY, TRADES
from gpubench.runs.summary import Summary, metric_of, write_summary
from gpubench.settings.loading import Configuration
from gpubench.settings.schema import CompletedSettings

S = TypeVar("S", bound=CompletedSettings)


@dataclass
class MemoryProgress(Progress):
    step: int | None = None
    steps: int = 1


def describe(progress: MemoryProgress) -> str:
    doing = units.words(progress.doing)
    place = doing if progress.step is None else f"step {progress.step + 1}/{progress.steps}  {doing}"
    return f"{progress.variant}, {place}" if progress.variant else place


def draw(experiment: str, progress: MemoryProgress) -> RenderableType:
    table = head(describe(progress))
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table)


class FootprintRecorder(Recorder[S]):
    progress: MemoryProgress

    def __init__(self, configuration: Configuration[S], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self.progress = self.at_start()
        self._found: dict[tuple[int, int], Footprint] = {}
        """The footprints by (repeat, rank)."""
        self.advice: Findings | None = None
        self.trades: Trades | None = None

    @property
    def footprints(self) -> list[Footprint]:
        """The footprints of the last repeat, in order of rank."""
        last = max((repeat for repeat, _ in self._found), default=0)
        return [found for (repeat, _), found in sorted(self._found.items()) if repeat == last]

    def at_start(self) -> MemoryProgress:
        return MemoryProgress(ranks=self.processes, steps=self._values["memory.steps"])

    def completed(self) -> int:
        return len({repeat for repeat, _ in self._found})

    def sum_up(self) -> Summary:
        """Summarises the peaks, each of which is the maximum over the ranks."""
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
        """Writes the advice on how to save memory. Called again, it replaces the advice, for example by results."""
        self.advice = findings
        self.writer.replace(FINDINGS, findings)

    def keep_footprint(self, repeat: int, rank: int, found: Footprint) -> None:
        """Keeps the footprint of a rank. Called again, it replaces it."""
        if rank == 0 and (repeat, rank) not in self._found:
            self.metrics.scalars(repeat, 0, time.time(), scalars(found))
        self._found[repeat, rank] = found
        self.writer.replace(MEMORY, Footprints(self.footprints))

    def keep_trades(self, trades: Trades) -> None:
        """Writes the savings of the fixes with their costs in speed."""
        self.trades = trades
        self.writer.replace(TRADES, trades)


class MemoryRecorder(FootprintRecorder[CompletedMemorySettings]):
    lighter = LIGHTER

    def __init__(self, configuration: Configuration[CompletedMemorySettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self.batch_sizes: BatchSizes | None = None

    @property
    def processes(self) -> int:
        return 1 if self.settings.memory.predict else super().processes

    def keep(self, event: events.Message) -> bool:
        match event:
            case events.Heartbeat(rank=0):
                self.progress.doing, self.progress.step = event.doing, event.step
            case events.MemoryFollowed():
                self.keep_footprint(event.repeat, event.rank, self.content(event.rank, event.footprint, Footprint))
                if event.findings:
                    self.conclude(self.content(event.rank, event.findings, Findings))
            case events.BatchSizesFound():
                self.keep_batch_sizes(self.content(event.rank, event.found, BatchSizes))
            case _:
                return False
        return True

    def adopt(self, other: "MemoryRecorder") -> None:
        """Adds the footprints of another run that measured the same settings."""
        self._found |= other._found
        self.writer.replace(MEMORY, Footprints(self.footprints))
        self.writer.update(repeats=self.completed())
        write_summary(self.summary(), self.writer)

    def keep_batch_sizes(self, found: BatchSizes) -> None:
        """Writes the batch sizes that fit. Called again, it replaces them, for example by measured ones."""
        self.batch_sizes = found
        self.writer.replace(BATCH_SIZES, found)
