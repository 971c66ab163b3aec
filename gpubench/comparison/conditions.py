"""What the machine was doing while a run's steady steps ran, beside the run."""

import math
from typing import Any

from gpubench import telemetry
from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.telemetry import Others, TelemetrySample

RUNS_WATCHED = 10  # of a group whose telemetry is read: they stand for all
YARDSTICK = "yardstick_time"


def steady_telemetry(run: RunEvidence) -> list[TelemetrySample]:
    """Samples within the run's steady windows."""
    return telemetry.within(run.telemetry, [(window.start, window.end) for window in run.windows])


def others(side: Side) -> Others | None:
    """What other processes took of the machine meanwhile, on average over the runs; None where nothing tells."""
    return telemetry.together([found for run in side.runs[:RUNS_WATCHED] if (found := _others(run))])


def disturbance(side: Side) -> float | None:
    """How much longer a step on the CPU may have taken for what others took of it: see `telemetry.Others`."""
    found = others(side)
    return found.slowdown if found else None


def machine_speed(baseline: Side, candidate: Side) -> float | None:
    """By how much the machine's own speed changed, as the ratio of the yardstick's times; None where nothing tells."""
    times = [run.metrics.get(YARDSTICK) for side in (baseline, candidate) for run in side.runs[:1]]
    if not (times[0] and times[1]) or min(times[0].estimate, times[1].estimate) <= 0:
        return None
    return times[1].estimate / times[0].estimate


def accountable(baseline: Side, candidate: Side) -> float:
    """The change of a step's time that the machine alone may account for, beside the run: the larger of two bounds.

    What others took of the CPU, and the square of what the yardstick moved: beside other load a step of small
    operations was seen to slow down up to twice as much as the yardstick, in the logarithm (docs/statistics.md). 0
    where neither is known.
    """
    taken = max(disturbance(side) or 0.0 for side in (baseline, candidate))
    moved = machine_speed(baseline, candidate)
    return max(taken, math.expm1(2 * abs(math.log(moved)))) if moved else taken


def _others(run: RunEvidence) -> Others | None:
    count: Any = run.environment.get("cpu.logical_cores")
    return telemetry.others(
        run.telemetry,
        [(window.start, window.end) for window in run.windows],
        count if isinstance(count, int) else None,
        loaders=run.settings.get("data.workers", 0 if run.pipeline else None) != 0,
        on_cpu=run.settings.get("device") == "cpu",
    )
