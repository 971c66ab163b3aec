"""Made-up series of runs for change points: a workload measured again and again on a machine that is not steady."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEED = 20_261_124
REPEATS = 3
AFTER = 8  # runs after a planted step, and before it, at least


@dataclass(frozen=True)
class Made:
    """A series of runs in the order of their dates."""

    values: Floats
    """The logarithms of the runs' estimates, shape (runs,)."""
    errors: Floats
    """The standard errors of these from the repeats of each run, shape (runs,)."""
    days: Sequence[str]
    """The day of each run."""
    reference: Floats
    """The logarithms of the times of the reference workload, shape (runs,)."""
    step: int | None
    """The first run after the planted step; None if there is none."""
    noise: float


def made(
    rng: np.random.Generator,
    *,
    step: float = 0.03,
    noise: tuple[float, float] = (0.005, 0.01),
    runs: tuple[int, int] = (20, 60),
    trouble: float = 1.0,
    after: int | None = None,
    of_machine: bool = False,
) -> Made:
    """Makes a series of `runs` runs with a step of that size, up or down; without one if `step` is 0.

    `noise` is the range of the standard deviation between runs. Of it, a half of the variance is correlated with the
    run before (0.5) or is that of the day, in a third of the series each. 2 % of the runs are slower by 5 to 20 %.
    The machine drifts by up to `trouble` times 2 %, in one direction or there and back. The reference workload follows
    the drift, and the step too if it is `of_machine`. `after` is the number of runs after the step; by default it is
    anywhere with AFTER runs on both sides.
    """
    n = int(rng.integers(runs[0], runs[1] + 1))
    sigma = float(rng.uniform(*noise))
    of_day = np.repeat(np.arange(n), rng.integers(1, 6, n))[:n]
    own, kind = rng.standard_normal(n), rng.integers(3)
    if kind == 0:
        own = (own + _correlated(rng, n)) / np.sqrt(2)
    elif kind == 1:
        own = (own + rng.standard_normal(n)[of_day]) / np.sqrt(2)
    size, start = rng.uniform(-0.02, 0.02) * trouble, rng.uniform(0, np.pi)
    along = np.linspace(0, 1, n)
    drift = size * (along if rng.integers(2) else np.sin(start + np.pi * along))
    outliers = np.where(rng.uniform(size=n) < 0.02, rng.uniform(0.05, 0.2, n), 0.0)
    at = None
    jump = np.zeros(n)
    if step:
        least = min(AFTER, n // 2 - 1)
        at = n - after if after is not None else int(rng.integers(least, n - least + 1))
        jump[at:] = step * rng.choice([-1, 1])
    within = sigma * rng.uniform(0.3, 1.0)
    repeats = rng.standard_normal((n, REPEATS)) * within
    errors = repeats.std(axis=1, ddof=1) / np.sqrt(REPEATS)
    reference = drift + 0.5 * sigma * rng.standard_normal(n) + (jump if of_machine else 0)
    days = [f"day {day}" for day in of_day]
    return Made(drift + jump + sigma * own + outliers, errors, days, reference, at, sigma)


Disturbance = Literal["2 runs", "3 runs", "4 runs", "cycles", "correlated"]
DISTURBANCES: tuple[Disturbance, ...] = get_args(Disturbance)
CYCLE = 15  # runs
CORRELATION = 0.8


def disturbed(rng: np.random.Generator, kind: Disturbance, *, noise: float, runs: tuple[int, int] = (20, 60)) -> Made:
    """Makes a series without a step: so many runs that are 3 % off, cycles of 1 % up and down, or correlated runs."""
    n = int(rng.integers(runs[0], runs[1] + 1))
    values = noise * rng.standard_normal(n)
    if kind == "correlated":
        values = noise * _correlated(rng, n, CORRELATION)
    elif kind == "cycles":
        values += 0.01 * np.sin(rng.uniform(0, 2 * np.pi) + 2 * np.pi / CYCLE * np.arange(n))
    else:
        length = int(kind[0])
        first = int(rng.integers(AFTER, n - AFTER - length + 1))
        values[first : first + length] += 0.03 * rng.choice([-1, 1])
    of_day = np.repeat(np.arange(n), rng.integers(1, 6, n))[:n]
    errors = (rng.standard_normal((n, REPEATS)) * noise / 2).std(axis=1, ddof=1) / np.sqrt(REPEATS)
    reference = 0.5 * noise * rng.standard_normal(n)
    return Made(values, errors, [f"day {day}" for day in of_day], reference, None, noise)


def false_when_disturbed(find: "Finder", kind: Disturbance, count: int, noise: float) -> float:
    """Measures the share of series with a disturbance in which a change point is found."""
    seed = 10 + DISTURBANCES.index(kind)
    made = (disturbed(np.random.default_rng([SEED, seed, number]), kind, noise=noise) for number in range(count))
    return float(np.mean([bool(len(find(one))) for one in made]))


def _correlated(rng: np.random.Generator, n: int, correlation: float = 0.5) -> Floats:
    values = rng.standard_normal(n)
    for place in range(1, n):
        values[place] = correlation * values[place - 1] + np.sqrt(1 - correlation**2) * values[place]
    return values


Finder = Callable[[Made], Sequence[int]]
"""Returns the first runs after the change points that it finds in a series."""
CLOSE = 2  # runs by which a change point may be placed wrongly


@dataclass(frozen=True)
class Rates:
    """Shares of series."""

    found: float
    """With a step, which was found, and placed within CLOSE runs."""
    elsewhere: float
    """With a step, and a change point anywhere else."""
    false: float
    """Without a step or drift, and a change point."""
    false_in_drift: float
    """Without a step, but with drift, and a change point."""


def rates(find: Finder, count: int, noise: float, **options: Any) -> Rates:
    """Measures a finder on `count` series of each kind. The options are those of series with a step."""

    def series(seed: int, **more: Any) -> Iterator[tuple[Made, Sequence[int]]]:
        for number in range(count):
            one = made(np.random.default_rng([SEED, seed, number]), noise=(noise, noise), **more)
            yield one, find(one)

    stepped = [[abs(index - (one.step or 0)) <= CLOSE for index in found] for one, found in series(1, **options)]
    still, drifting = (
        [bool(len(found)) for _, found in series(seed, step=0.0, runs=(10, 60), trouble=trouble)]
        for seed, trouble in ((2, 0.0), (3, 1.0))
    )
    shares = [[any(one) for one in stepped], [not all(one) for one in stepped], still, drifting]
    return Rates(*(float(np.mean(share)) for share in shares))
