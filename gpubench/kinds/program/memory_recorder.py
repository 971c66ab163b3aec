"""Records the memory of a program of the user."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpubench import events, probe, units
from gpubench.diagnosis.rules import advise
from gpubench.errors import GpubenchError, InvalidEvent, ProgramFailed
from gpubench.kinds.memory.recorder import FootprintRecorder
from gpubench.kinds.program.processes import step_name
from gpubench.kinds.program.recorder import OfProgram
from gpubench.memory.allocation_log import DeviceLog, classify
from gpubench.memory.analysis import footprint
from gpubench.runs.summary import Summary
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import CompletedProgramMemorySettings


class ProgramMemoryRecorder(
    OfProgram[CompletedProgramMemorySettings], FootprintRecorder[CompletedProgramMemorySettings]
):
    def __init__(self, configuration: Configuration[CompletedProgramMemorySettings], argv: Sequence[str]) -> None:
        super().__init__(configuration, argv)
        self._parts: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        """The beginnings of allocation logs, by (repeat, rank)."""

    @property
    def wanted(self) -> int | None:
        return self.settings.memory.steps

    @property
    def variables(self) -> Mapping[str, str]:
        # Compiled functions hide their operators, and some refuse to run while they are recorded.
        return {probe.FOLLOW_VARIABLE: "1", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}

    @property
    def step(self) -> str:
        return step_name(inference=False)

    def keep(self, event: events.Message) -> bool:
        match event:
            case events.Heartbeat(rank=0):
                self.progress.doing, self.progress.step = "recording", max((event.step or 0) - 1, 0)
            case events.ModelBuilt(rank=0):
                self._observe(event)
                shown = {"parameters": event.parameters, "sample_shape": event.sample_shape, "device": event.device}
                self.writer.update(workload=shown, observed=event.settings)
            case events.MemoryRecorded():
                self._keep_part(event)
            case _:
                return False
        return True

    def sum_up(self) -> Summary:
        return self._with_missed(super().sum_up(), len(self._found))

    def refutation(self, summary: Summary) -> GpubenchError | None:
        if self.footprints:
            return None
        return self._cut_short() or ProgramFailed(
            "the program allocated no memory that PyTorch shows",
            "measure a program whose tensors are on the CPU or a GPU",
        )

    def _keep_part(self, event: events.MemoryRecorded) -> None:
        """Keeps a part of a rank's allocations; with the last one, the footprint, and the advice of the fullest
        rank."""
        rank, data = event.rank, self._parts[event.repeat, event.rank]
        self.refuse_unknown(rank, event.repeat)
        data += event.data
        if len(data) > events.LONGEST_LINE:
            raise InvalidEvent.of(rank, f"its history is larger than {units.size(events.LONGEST_LINE)}")
        if not event.last:
            return
        found = self.content(rank, self._parts.pop((event.repeat, rank)), DeviceLog)
        if not found.history.allocations:
            return
        classify(found.history)
        capacity = self.settings.memory.device_memory or found.capacity
        self.keep_footprint(
            event.repeat,
            rank,
            footprint(
                found.history,
                source="measured",
                device=found.name,
                capacity=capacity,
                rank=rank,
                other=found.other,
            ),
        )
        fullest = max(self.footprints, key=lambda each: each.peak.level.total)
        self.conclude(self.addressed(advise(fullest, self.diagnosed_settings)))
