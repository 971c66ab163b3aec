"""Runs that never ran: step times drawn from a model of how real ones vary, with everything about it known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from gpubench.compare.evidence import RunEvidence, Side
from gpubench.metrics import Metric
from gpubench.runs import stats
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import NO_MEASUREMENTS

Series = NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """How a machine's step times drift around 1 s: autocorrelated noise inside a repeat, an offset for each repeat, a
    trend, a schedule, and two states of the machine."""

    steps: int = 60
    noise: float = 0.005
    autocorrelation: float = 0.8
    offset: float = 0.01
    trend: float = 0.0
    """From the first step of a repeat to its last, the same in all of them."""
    growth: float = 1.0
    """How many times as long the last fifth of the steps takes as the first, in every repeat."""
    lengths: float = 0.0
    """Spread of the lengths of the steps, which come in another order in each repeat, as those of an epoch do."""
    states: float = 0.0
    """By how much a repeat is slower whose device runs at the lower of two clocks, as half of them do by chance."""
    heavy: bool = False
    """Student's t with 3 degrees of freedom for the noise and 4 for the offsets, at the same standard deviations."""
    pareto: float = 0.0
    """The scale of offsets with the tail of a Pareto distribution of 1.5, whose variance is infinite."""
    classes: float = 0.0
    """By how much steps are longer that are of the longer of two classes, as half of them are by chance."""
    uneven: bool = False
    """Whether repeats have between half and twice as many steps, by chance."""
    tick: float = 0.0
    """The tick of the clock, to which the times of steps are rounded."""

    def repeat(self, rng: np.random.Generator, slowdown: float = 1.0) -> Series:
        steps = int(rng.integers(self.steps // 2, 2 * self.steps)) if self.uneven else self.steps
        draws = rng.standard_t(3, steps + 100) / np.sqrt(3) if self.heavy else rng.standard_normal(steps + 100)
        r = self.autocorrelation
        noise = self.noise * np.sqrt(1 - r * r) * lfilter([1.0], [1.0, -r], draws)[100:]
        offset = self.offset * (rng.standard_t(4) / np.sqrt(2) if self.heavy else rng.standard_normal())
        offset += self.pareto * rng.pareto(1.5) if self.pareto else 0.0
        trend = self.trend * np.linspace(-0.5, 0.5, steps)
        schedule = np.linspace(1, self.growth, 5)[np.arange(steps) * 5 // steps]
        if self.lengths:
            schedule = schedule * rng.permutation(1 + self.lengths * np.sqrt(3) * np.linspace(-1, 1, steps))
        if self.classes:
            schedule = schedule * (1 + self.classes * rng.integers(2, size=steps))
        state = 1 + self.states * rng.integers(2) if self.states else 1.0
        times = np.asarray(slowdown * state * schedule * (1 + noise + offset + trend))
        return np.maximum(self.tick, np.round(times / self.tick) * self.tick) if self.tick else times

    def side(self, rng: np.random.Generator, repeats: int, slowdown: float = 1.0) -> Side:
        """One run with that many repeats."""
        return side_of([self.repeat(rng, slowdown) for _ in range(repeats)])


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(RunEvidence):
    totals: Sequence[Series] = field(default_factory=list)

    def series(self, metric: str) -> list[Series] | None:
        return list(self.totals) if metric in ("step_time", "throughput") else None


def run_of(totals: Sequence[Series], label: str = "simulated", better: str = "lower") -> SimulatedRun:
    """A run of one metric, step_time, with these steady steps in its repeats."""
    means = [float(one.mean()) for one in totals]
    metric = Metric(
        name="step_time",
        unit="s",
        better="lower" if better == "lower" else "higher",
        estimate=float(np.mean(means)),
        interval=stats.student_interval(means),
        n=sum(len(one) for one in totals),
        effective_n=None,
        repeats=means,
        distribution=None,
    )
    windows = [SteadyWindow(i, 0, len(one), True, 0.0, float(one.sum())) for i, one in enumerate(totals)]
    return SimulatedRun(
        label=label,
        path=Path(label),
        record=None,
        status="completed",
        settings={},
        environment={},
        workload={},
        summary=msgspec.structs.replace(NO_MEASUREMENTS, metrics=[metric], steady=windows),
        totals=totals,
    )


def side_of(totals: Sequence[Series], label: str = "simulated") -> Side:
    return Side(label, (run_of(totals, label),))
