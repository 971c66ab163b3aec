"""What the machine was doing while a run's steady steps ran, beside the run."""

import math
from statistics import fmean
from typing import Any

from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.telemetry import TelemetrySample

RUNS_WATCHED = 10  # of a group whose telemetry is read: they stand for all
IDLE_CORES = 0.25  # what a quiet machine's own housekeeping takes
STEAL = 0.02  # of all CPU time
YARDSTICK = "yardstick_time"


def steady_telemetry(run: RunEvidence) -> list[TelemetrySample]:
    """Samples within the run's steady windows."""
    return [
        sample for sample in run.telemetry if any(window.start <= sample.time <= window.end for window in run.windows)
    ]


def cores_of_others(side: Side) -> float | None:
    """Mean number of cores that neither idled nor worked for the runs; None where nothing tells.

    Data loaders are not counted as the run's own, so that a run that has any cannot tell.
    """
    cores = [
        cpu.load * count - cpu.worker_cpu
        for run in side.runs[:RUNS_WATCHED]
        if (count := _logical_cores(run)) and run.settings.get("data.workers") == 0
        for sample in steady_telemetry(run)
        if (cpu := sample.cpu) and cpu.load is not None and cpu.worker_cpu is not None
    ]
    return fmean(cores) if cores else None


def stolen(side: Side) -> float | None:
    """Mean fraction of all CPU time that the hypervisor gave to other guests; None where nothing tells."""
    shares = [
        sample.cpu.steal
        for run in side.runs[:RUNS_WATCHED]
        for sample in steady_telemetry(run)
        if sample.cpu and sample.cpu.steal is not None
    ]
    return fmean(shares) if shares else None


def disturbance(side: Side) -> float | None:
    """How much longer a step on the CPU may have taken for what others took of it, as a fraction.

    The cores that others kept busy or stole, over those the workers used: what both would share if they fought for the
    same ones. None for a run on a GPU and for a machine as quiet as can be asked.
    """
    first = side.runs[0]
    count = _logical_cores(first)
    if first.settings.get("device") != "cpu" or not count:
        return None
    others, steal = cores_of_others(side) or 0.0, stolen(side) or 0.0
    own = [
        sample.cpu.worker_cpu
        for run in side.runs[:RUNS_WATCHED]
        for sample in steady_telemetry(run)
        if sample.cpu and sample.cpu.worker_cpu
    ]
    if not own or (others <= IDLE_CORES and steal <= STEAL):
        return None
    return (max(0.0, others) + steal * count) / fmean(own)


def weather(baseline: Side, candidate: Side) -> float | None:
    """By how much the machine's own speed changed, as the ratio of the yardstick's times; None where nothing tells."""
    times = [run.metrics.get(YARDSTICK) for side in (baseline, candidate) for run in side.runs[:1]]
    if not (times[0] and times[1]) or min(times[0].estimate, times[1].estimate) <= 0:
        return None
    return times[1].estimate / times[0].estimate


def accountable(baseline: Side, candidate: Side) -> float:
    """The change of a step's time that the machine alone may account for, beside the run: the larger of two bounds.

    What others took of the CPU, and the square of what the yardstick moved: a step of small operations was seen to feel
    a neighbour up to twice as much, in the logarithm (docs/statistics.md). 0 where neither tells anything.
    """
    taken = max(disturbance(side) or 0.0 for side in (baseline, candidate))
    moved = weather(baseline, candidate)
    return max(taken, math.expm1(2 * abs(math.log(moved)))) if moved else taken


def _logical_cores(run: RunEvidence) -> int | None:
    count: Any = run.environment.get("cpu.logical_cores")
    return count if isinstance(count, int) else None
