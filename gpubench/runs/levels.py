"""What is different before and after the step from which on the steps of a run take another time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpubench.runs.steps import LevelShift, Measured, StepTable, common_level
from gpubench.telemetry import TelemetrySample, within


@dataclass(frozen=True)
class BeforeAndAfter:
    """A quantity on both sides of a change of the level."""

    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class ChangedLevel:
    """A change of the level of the steps that most repeats share, and what changed with it. Times are in seconds."""

    level: LevelShift
    repeats: tuple[int, int]
    """The number of repeats with such a change, and of all."""
    step_time: BeforeAndAfter
    phases: dict[str, BeforeAndAfter]
    """The mean time of each phase of a step, that with the largest change first."""
    memory: BeforeAndAfter | None
    """The resident memory of the processes in bytes, as a mean; None if no sample has it on both sides."""
    clock: BeforeAndAfter | None
    """The SM clock of the GPUs in MHz, as a mean; None if no sample has it on both sides."""


def changed_level(found: Sequence[Measured], telemetry: Sequence[TelemetrySample]) -> ChangedLevel | None:
    """Returns the change of the level that at least half of the repeats have in one direction; None without one."""
    common = common_level([measured.window for measured in found])
    if common is None or 2 * common[1] < len(found):
        return None
    known = [(measured, measured.window.level) for measured in found if measured.window.level]
    alike = [(measured, level) for measured, level in known if (level.factor < 1) == (common[0].factor < 1)]
    halves = [_halves(measured, level) for measured, level in alike]
    phases = {
        name: BeforeAndAfter(*(fmean(float(half[side].phase(name).mean()) for half in halves) for side in (0, 1)))
        for name in dict.fromkeys(name for measured, _ in alike for name in measured.steps.phases)
    }
    samples = [within(telemetry, [_span(half[side]) for half in halves]) for side in (0, 1)]
    return ChangedLevel(
        level=common[0],
        repeats=(len(alike), len(found)),
        step_time=BeforeAndAfter(*(fmean(float(half[side].total.mean()) for half in halves) for side in (0, 1))),
        phases=dict(sorted(phases.items(), key=lambda one: -abs(one[1].change))),
        memory=_means(samples, lambda one: [one.cpu.memory_rss_bytes] if one.cpu else []),
        clock=_means(samples, lambda one: [gpu.sm_clock_mhz for gpu in one.gpus]),
    )


def _halves(measured: Measured, level: LevelShift) -> tuple[StepTable, StepTable]:
    place = level.step - measured.window.first
    return measured.steps[:place], measured.steps[place:]


def _span(steps: StepTable) -> tuple[float, float]:
    return float(steps.time[0]), float(steps.time[-1] + steps.total[-1])


def _means(
    samples: Sequence[Sequence[TelemetrySample]], values: Callable[[TelemetrySample], Iterable[float | None]]
) -> BeforeAndAfter | None:
    found = [[value for one in side for value in values(one) if value is not None] for side in samples]
    return BeforeAndAfter(fmean(found[0]), fmean(found[1])) if all(found) else None
