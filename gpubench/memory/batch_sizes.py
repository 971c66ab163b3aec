"""The largest batch that fits: a line through a few predictions, then predictions around where it meets the limit."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

FIRST = (1, 2, 4)
"""Batches that the line is first drawn through."""
MOST = 1 << 20
"""No larger batch is looked at: with so little memory a sample, it is not memory that limits."""
FINE = 0.01
"""Of the batch: closer the search does not go."""


class Point(Struct, frozen=True):
    batch_size: int
    total: int
    """Bytes of the device at the peak."""


class Line(Struct, frozen=True):
    """total = constant + per_sample x batch_size, by least squares."""

    constant: float
    """Bytes that no sample adds: parameters, gradients, optimizer state, context."""
    per_sample: float
    error: float
    """The largest deviation of a point from the line, as a fraction of the point."""


class Confirmed(Struct, frozen=True):
    """A batch size that was run on the device, in a fresh process."""

    batch_size: int
    total: int | None
    """Bytes at the measured peak; None where the run failed."""
    reason: str | None = None
    """Why it failed."""


class Speed(Struct, frozen=True):
    batch_size: int
    throughput: float
    """Samples/s of all ranks."""


class BatchSizes(Struct, frozen=True, kw_only=True):
    """The content of batch_sizes.json. Batch sizes are per rank and forward pass; sizes are bytes."""

    capacity: int
    spare: float
    limit: int
    """What may be filled: capacity x (1 - spare)."""
    points: list[Point]
    """Predicted, in order of batch size."""
    line: Line
    largest: int | None
    """That fits: by prediction, or by a run where there is a device. None where not even one sample does."""
    confirmed: list[Confirmed] = []
    speeds: list[Speed] = []


def search(limit: int, total: Callable[[int], int], most: int = MOST) -> list[Point]:
    """The points that were looked at, in order of batch size, among them the largest that fits and a larger one.

    `total` predicts the bytes at the peak. It should grow with the batch; where an allocator's segments make it fall
    here and there, the largest that was seen to fit counts. No batch beyond `most` is looked at.
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
        # By turns where the line meets the limit and half-way, so that a curve that is none ends soon as well.
        guess = _meeting(limit, _points(seen)) if len(seen) % 2 else _between(low, high or most + 1)
        batch_size = min(max(guess, low + 1), (high or most + 1) - 1)
        if look(batch_size):
            low = batch_size
        else:
            high = batch_size
    return _points(seen)


def _meeting(limit: int, points: Sequence[Point]) -> int:
    """Where the line through the points about the limit meets it."""
    near = sorted(points, key=lambda point: abs(point.total - limit))[:3]
    line = fit(near) if len(near) > 1 else None
    return round((limit - line.constant) / line.per_sample) if line and line.per_sample > 0 else MOST


def _between(low: int, high: int) -> int:
    """Half-way by ratio, where the two are far apart."""
    return round(math.sqrt(max(low, 1) * high)) if high > 2 * low else (low + high) // 2


def _points(seen: dict[int, int]) -> list[Point]:
    return [Point(batch_size, total) for batch_size, total in sorted(seen.items())]


def fit(points: Sequence[Point]) -> Line:
    """The least-squares line; through one point, from the origin."""
    if len(points) == 1:
        return Line(0.0, float(points[0].total) / points[0].batch_size, 0.0)
    x = np.array([point.batch_size for point in points], float)
    y = np.array([point.total for point in points], float)
    per_sample, constant = np.polyfit(x, y, 1)
    error = float(np.max(np.abs(constant + per_sample * x - y) / y))
    return Line(float(constant), float(per_sample), error)


def overrides(batch_size: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """What makes a run take this batch; `settings` are flat. Of synthetic data there is as much as it takes."""
    changes = {"training.batch_size": batch_size}
    needed = 2 * batch_size * settings["distributed.world_size"] * settings["training.grad_accumulation"]
    if str(settings["data.source"]).startswith("synthetic") and settings["data.samples"] < needed:
        changes["data.samples"] = needed
    return changes


def largest(points: Sequence[Point], limit: int) -> int | None:
    return max((point.batch_size for point in points if point.total <= limit), default=None)


def worth_timing(largest_fitting: int) -> Iterator[int]:
    """The largest, and halves of it: the fastest is often among those."""
    batch_size = largest_fitting
    for _ in range(3):
        yield batch_size
        if batch_size == 1:
            return
        batch_size //= 2
