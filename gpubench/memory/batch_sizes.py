"""The largest batch that fits: a line through a few predictions, then predictions around where it meets the limit."""

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
    margin: float
    limit: int
    """What may be filled: capacity x (1 - margin)."""
    points: list[Point]
    """Predicted, in order of batch size."""
    line: Line
    largest: int | None
    """That fits: by prediction, or by a run where there is a device. None where not even one sample does."""
    confirmed: list[Confirmed] = []
    speeds: list[Speed] = []


def search(limit: int, total: Callable[[int], int]) -> list[Point]:
    """The points that were looked at, in order of batch size, among them the largest that fits and a larger one.

    `total` predicts the bytes at the peak. It should grow with the batch; where an allocator's segments make it fall
    here and there, the largest that was seen to fit counts.
    """
    seen: dict[int, int] = {}

    def look(batch_size: int) -> bool:
        if batch_size not in seen:
            seen[batch_size] = total(batch_size)
        return seen[batch_size] <= limit

    for batch_size in FIRST:
        look(batch_size)
    low = max((one for one in FIRST if look(one)), default=0)
    high = min((one for one in FIRST if not look(one)), default=None)
    while high is None or high - low > max(1, FINE * low):
        if low >= MOST or high == FIRST[0]:
            break
        guess = _meeting(limit, _points(seen), low, high)
        if look(guess):
            low = guess
        else:
            high = guess
    return _points(seen)


def _meeting(limit: int, points: Sequence[Point], low: int, high: int | None) -> int:
    """Where the line meets the limit, kept strictly between what is known to fit and what is known not to."""
    line = fit(points[-3:])
    guess = round((limit - line.constant) / line.per_sample) if line.per_sample > 0 else MOST
    if high is None:
        return min(MOST, max(low + 1, guess))
    near = max(1, int(FINE * low))  # a step aside of a point that is known, so that both sides close in
    return min(max(guess, low + near), high - near) if high - low > 2 * near else (low + high) // 2


def _points(seen: dict[int, int]) -> list[Point]:
    return [Point(batch_size, total) for batch_size, total in sorted(seen.items())]


def fit(points: Sequence[Point]) -> Line:
    """The least-squares line through two points or more."""
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
