"""Searches for the batch sizes that fit, and judges trades of memory for speed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct


class Trade(Struct, frozen=True):
    """One set of settings, as it was measured."""

    fix: dict[str, Any]
    """The overrides of the run's own settings; empty for the run itself."""
    peak: int | None
    """The bytes at the peak of the rank with the largest peak; None if the run failed."""
    throughput: float | None
    """The throughput of all ranks in samples/s; None if the run failed or was not timed."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of the throughput over repeats."""
    efficient: bool = False
    """Whether no other trade is known to take no more memory and be faster, or less memory and be as fast."""
    reason: str | None = None
    """The reason why the run failed."""


class Trades(Struct, frozen=True):
    """The content of trades.json."""

    trades: list[Trade]
    """The trades ordered by memory; failed runs come last."""


def weigh(trades: Sequence[Trade]) -> Trades:
    """Marks the efficient trades (the Pareto frontier) and sorts them."""
    measured = [trade for trade in trades if trade.peak is not None and trade.throughput is not None]
    marked = [
        msgspec.structs.replace(
            trade, efficient=trade in measured and not any(_beats(other, trade) for other in measured)
        )
        for trade in trades
    ]
    return Trades(sorted(marked, key=lambda trade: (trade.peak is None, trade.peak or 0, -(trade.throughput or 0))))


def _beats(one: Trade, other: Trade) -> bool:
    """Whether `one` takes no more memory and is certainly no slower, and is better in one of the two."""
    assert one.peak is not None
    assert other.peak is not None
    low, high = _bounds(one)[0], _bounds(other)[1]
    return one.peak <= other.peak and low >= high and (one.peak < other.peak or low > high)


def _bounds(trade: Trade) -> tuple[float, float]:
    assert trade.throughput is not None
    return trade.interval or (trade.throughput, trade.throughput)


FIRST = (1, 2, 4)
"""The batch sizes that are predicted first, to fit a line."""
MOST = 1 << 20
"""The largest batch size that is tried: with so little memory per sample, memory is not the limit."""
FINE = 0.01
"""The resolution of the search, as a fraction of the batch size."""


class PeakPoint(Struct, frozen=True):
    batch_size: int
    total: int
    """The bytes of the device in use at the peak."""


class LinearFit(Struct, frozen=True):
    """The line total = constant + per_sample x batch_size, by least squares."""

    constant: float
    """The bytes that do not depend on the batch: parameters, gradients, optimizer state, context."""
    per_sample: float
    error: float
    """The largest deviation of a point from the line, as a fraction of the point."""


class Confirmed(Struct, frozen=True):
    """A batch size that was run on the device, in a fresh process."""

    batch_size: int
    total: int | None
    """The bytes at the measured peak; None if the run failed."""
    reason: str | None = None
    """The reason why the run failed."""


class Speed(Struct, frozen=True):
    batch_size: int
    throughput: float
    """The throughput of all ranks in samples/s."""


class BatchSizes(Struct, frozen=True, kw_only=True):
    """The content of batch_sizes.json. Batch sizes are per rank and forward pass; sizes are bytes."""

    capacity: int
    spare: float
    limit: int
    """The bytes that may be used: capacity x (1 - spare)."""
    points: list[PeakPoint]
    """The predicted points in order of batch size."""
    line: LinearFit
    largest: int | None
    """The largest batch size that fits, from a run if there is a device, else predicted; None if not even 1 fits."""
    confirmed: list[Confirmed] = []
    speeds: list[Speed] = []


def search(limit: int, total: Callable[[int], int], most: int = MOST) -> list[PeakPoint]:
    """Predicts batch sizes around the largest one that fits, and returns these points, ordered by batch size.

    They include the largest batch that fits and a larger one. `total` predicts the bytes at the peak. It should grow
    with the batch; where the allocator's segments make it fall, the largest size that was found to fit counts. No batch
    beyond `most` is tried.
    """
    seen: dict[int, int] = {}

    def look(batch_size: int) -> bool:
        if batch_size not in seen:
            seen[batch_size] = total(batch_size)
        return seen[batch_size] <= limit

    first = [one for one in FIRST if one <= most]
    low = max((one for one in first if look(one)), default=0)
    high = min((one for one in first if not look(one)), default=None)
    while high != 1 and (low < most if high is None else high - low > max(1, FINE * low)):
        # Alternate between the line's intersection and the middle, so that the search also ends soon for other curves.
        guess = _intersection(limit, _points(seen)) if len(seen) % 2 else _between(low, high or most + 1)
        batch_size = min(max(guess, low + 1), (high or most + 1) - 1)
        if look(batch_size):
            low = batch_size
        else:
            high = batch_size
    return _points(seen)


def _intersection(limit: int, points: Sequence[PeakPoint]) -> int:
    """The batch size at which the line through the points around the limit reaches the limit."""
    near = sorted(points, key=lambda point: abs(point.total - limit))[:3]
    line = fit(near) if len(near) > 1 else None
    return round((limit - line.constant) / line.per_sample) if line and line.per_sample > 0 else MOST


def _between(low: int, high: int) -> int:
    """The middle of two sizes, by ratio if they are far apart."""
    return round(math.sqrt(max(low, 1) * high)) if high > 2 * low else (low + high) // 2


def _points(seen: dict[int, int]) -> list[PeakPoint]:
    return [PeakPoint(batch_size, total) for batch_size, total in sorted(seen.items())]


def fit(points: Sequence[PeakPoint]) -> LinearFit:
    """Fits a line by least squares; through a single point, the line from the origin."""
    if len(points) == 1:
        return LinearFit(0.0, float(points[0].total) / points[0].batch_size, 0.0)
    x = np.array([point.batch_size for point in points], float)
    y = np.array([point.total for point in points], float)
    per_sample, constant = np.polyfit(x, y, 1)
    error = float(np.max(np.abs(constant + per_sample * x - y) / y))
    return LinearFit(float(constant), float(per_sample), error)


def overrides(batch_size: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """The overrides for this batch size; `settings` are flat. Synthetic data gets as many samples as needed."""
    changes = {"training.batch_size": batch_size}
    needed = 2 * batch_size * settings["distributed.world_size"] * settings["training.grad_accumulation"]
    if str(settings["data.source"]).startswith("synthetic") and settings["data.samples"] < needed:
        changes["data.samples"] = needed
    return changes


def largest(points: Sequence[PeakPoint], limit: int) -> int | None:
    return max((point.batch_size for point in points if point.total <= limit), default=None)


def worth_timing(largest_fitting: int) -> Iterator[int]:
    """Yields the largest batch size and halves of it, among which the fastest often is."""
    batch_size = largest_fitting
    for _ in range(3):
        yield batch_size
        if batch_size == 1:
            return
        batch_size //= 2
