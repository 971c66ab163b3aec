"""What the GPUs did between two points of time: their energy, and what held their clocks down."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from gpubench.telemetry import TelemetrySample


def energy_between(samples: Sequence[TelemetrySample], start: float, end: float, gpus: Sequence[int]) -> float | None:
    """Returns the energy of `gpus` in joules over [start, end], in seconds since the epoch; `samples` in order of time.

    The energy counter of each GPU is interpolated linearly at both ends. Returns None if a GPU has no reading at or
    before `start` or at or after `end`, or fewer than two in between, because interpolation would dominate the result.
    """
    joules = [_energy_of(samples, start, end, gpu) for gpu in gpus]
    known = [energy for energy in joules if energy is not None]
    return sum(known) if known and len(known) == len(joules) else None


def _energy_of(samples: Sequence[TelemetrySample], start: float, end: float, index: int) -> float | None:
    readings = [
        (sample.time, gpu.energy_j)
        for sample in samples
        for gpu in sample.gpus
        if gpu.index == index and gpu.energy_j is not None
    ]
    within = sum(start <= moment <= end for moment, _ in readings)
    if within < 2 or readings[0][0] > start or readings[-1][0] < end:
        return None
    return _interpolate(readings, end) - _interpolate(readings, start)


def _interpolate(readings: Sequence[tuple[float, float]], moment: float) -> float:
    """Returns the counter at `moment`, which must be within the readings, by linear interpolation."""
    after = bisect_left(readings, moment, key=lambda reading: reading[0])
    later, energy_later = readings[after]
    if later == moment:
        return energy_later
    earlier, energy_earlier = readings[after - 1]
    return energy_earlier + (energy_later - energy_earlier) * (moment - earlier) / (later - earlier)


def throttled(samples: Iterable[TelemetrySample], start: float, end: float) -> dict[str, float]:
    """Returns for each reason the fraction of samples in [start, end] in which it held some GPU's clocks down.

    Idle GPUs and clocks set by the user do not count as throttling. Reasons that never occurred are left out.
    """
    known = [
        {reason for gpu in sample.gpus for reason in gpu.throttle_reasons or ()}
        for sample in samples
        if start <= sample.time <= end and any(gpu.throttle_reasons is not None for gpu in sample.gpus)
    ]
    counts = Counter(reason for reasons in known for reason in reasons if reason != "ApplicationsClocksSetting")
    return {reason: count / len(known) for reason, count in counts.most_common()}
