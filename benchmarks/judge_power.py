"""How often is a decision of `judge` wrong, and how many rounds does it take?

    .venv/bin/python benchmarks/judge_power.py [--trials 2000]

Simulated programs: a round is one repeat of each side, in an order that gpubench/host/order.py has drawn, and each
repeat has its own noise. After each round the test of gpubench/compare/sequential.py looks at all rounds so far, until
it decides, is hopeless or has made all that it may. *Fixed* is Student's t with the same level over a number of rounds
that is chosen before: the smallest number with which it finds the gain as often. It is counted on the same trials.

Equal programs are judged with a margin of 0, which makes a false `keep` most likely, and gains with a margin of 0 and
of 0.5 %. The noise of equal programs is normal, heavy-tailed (Student's t with two degrees of freedom), lognormal, has
spikes in a tenth of the repeats, or two clocks; or the machine drifts: it gets slower by five times the noise, wanders
as a random walk, or changes between two speeds. Or it has a rhythm, beside a noise of 0.5 %: it is slower by 20 % in
one or in half of so many repeats, by 10 % more and less as a sine, by 2 % in the second repeat of each round,
or by 3 % in all as it heats up. Where a rhythm begins is random. Beside the order that is drawn, these are judged in
the order A B B A, and with each round in a random order of its own. The seed is fixed.

With a budget, the rounds that there is time for are fewer, and a trial that will hardly be decided in them ends early.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import bars
import numpy as np
from numpy.typing import NDArray
from tables import table

from gpubench.compare.intervals import SIGNIFICANT
from gpubench.compare.sequential import FEWEST, MOST, look
from gpubench.distributions import student_t_quantile
from gpubench.host.order import ROUNDS, drawn

Draws = NDArray[np.float64]
SEED = 20_261_124
LONGEST = 2 * MOST
"""The rounds of a trial, so that a fixed number may be larger than that of the sequential test."""
GAINS = (0.0, 0.01, 0.03, 0.10)
NOISES = (0.01, 0.05)
MARGINS = (0.0, 0.005)
FITTING = (5, 8, 12)
"""The rounds that a budget has time for."""
FALSE_KEEPS = 0.05
FALSE = 0.055
"""The bar of false decisions of both kinds where the machine has a rhythm. Without one they are 4.9 %."""
POWER_LOST = 0.02
"""The bar of the power that is lost because hopeless trials end early."""
POWER, COST = 0.8, 1.3
"""The bar of the mean number of rounds, in those of a fixed number with the same power, where that is at least POWER.

A test that mostly ends undecided makes all rounds that it may, so that it has no such number.
"""


def _spikes(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return rng.normal(0, 0.1, shape) + 3 * (rng.random(shape) < 0.1)


def _clocks(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return rng.normal(0, 0.001, shape) + (rng.random(shape) < 0.5)


def _slower(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return rng.standard_normal(shape) + np.linspace(0, 5, shape[1])


def _wandering(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return np.asarray(0.3 * rng.standard_normal(shape) + np.cumsum(rng.standard_normal(shape), axis=1))


def _speeds(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return rng.normal(0, 0.02, shape) + np.cumsum(rng.random(shape) < 0.1, axis=1) % 2


NOISE: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Draws]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: 0.01 * rng.standard_t(2, shape),
    "lognormal": lambda rng, shape: 0.01 * rng.lognormal(0, 1, shape),
    "spikes": _spikes,
    "two clocks": _clocks,
    "a machine that gets slower": _slower,
    "a machine that wanders": _wandering,
    "a machine with two speeds": _speeds,
}
"""The logarithms of the times of repeats, in the order in which they are made, in a row for each trial."""


def _rhythm(slowdown: Callable[[Any], Any]) -> Callable[[np.random.Generator, tuple[int, int]], Draws]:
    """Return noise with a slowdown by the number of the repeat, which begins at a random place."""

    def noise(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
        number = np.arange(shape[1]) + rng.integers(0, 10_000, (shape[0], 1))
        return np.asarray(0.005 * rng.standard_normal(shape) + slowdown(number))

    return noise


def _every(period: int) -> Callable[[np.random.Generator, tuple[int, int]], Draws]:
    return _rhythm(lambda number: 0.2 * (number % period == 0))


def _half_of(period: int) -> Callable[[np.random.Generator, tuple[int, int]], Draws]:
    return _rhythm(lambda number: 0.2 * (number % period < period // 2))


def _sine(period: int) -> Callable[[np.random.Generator, tuple[int, int]], Draws]:
    return _rhythm(lambda number: 0.1 * np.sin(2 * math.pi / period * number + number[:, :1]))


RHYTHMS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Draws]] = {
    "the second repeat of each round is slower": lambda rng, shape: (
        0.005 * rng.standard_normal(shape) + 0.02 * (np.arange(shape[1]) % 2)
    ),
    "it heats up": lambda rng, shape: 0.005 * rng.standard_normal(shape) + np.linspace(0, 0.03, shape[1]),
    **{f"one of {period} repeats is slow": _every(period) for period in range(3, 9)},
    **{f"{period // 2} of {period} repeats are slow": _half_of(period) for period in (4, 6, 8)},
    **{f"a sine of {period} repeats": _sine(period) for period in (3, 4, 5, 6, 8)},
}
LIMITS = ("a sine of 8 repeats",)
"""Those with more false decisions, which docs/decisions.md states."""

Signs = NDArray[np.int64]
"""1 where A comes first in a round and -1 where B does, with a row for each trial."""


def _as_drawn(rng: np.random.Generator, shape: tuple[int, int]) -> Signs:
    seeds = rng.integers(2**32, size=shape[0]).tolist()
    first = np.array([[order[0] for order in drawn(2, seed)] for seed in seeds])
    return np.tile(1 - 2 * first, -(-shape[1] // ROUNDS))[:, : shape[1]]


def _alternating(_: np.random.Generator, shape: tuple[int, int]) -> Signs:
    return np.tile(1 - 2 * (np.arange(shape[1]) % 2), (shape[0], 1))


def _coins(rng: np.random.Generator, shape: tuple[int, int]) -> Signs:
    return rng.choice([1, -1], shape)


ORDERS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Signs]] = {
    "as drawn": _as_drawn,
    "A B B A": _alternating,
    "each round at random": _coins,
}


def gains_of(times: Draws, signs: Signs) -> Draws:
    """Return the gain of B in each round, from the times of its repeats in the order in which they are made."""
    return signs * (times[:, 0::2] - times[:, 1::2])


@dataclass(frozen=True)
class Outcomes:
    keep: float
    """The share of the trials that end so, as `discard`."""
    discard: float
    rounds: float
    """The mean number of rounds."""
    power_lost: float
    """The share of trials that would have been kept had they not ended early as hopeless."""
    fixed: int | None
    """The rounds of a fixed number with as many `keep`; None if there are none or it would be above LONGEST."""


def judged(gains: Draws, margin: float, most: int = MOST) -> Outcomes:
    """Return how the trials end, one in each row, if there is time for so many rounds."""
    kept = discarded = rounds = lost = 0
    for trial in gains.tolist():
        ended = False
        for made in range(FEWEST, most + 1):
            found = look(trial[:made])
            exceeds = found.exceeds(margin)
            if not ended and (exceeds is not None or found.is_hopeless(margin, most)):
                kept, discarded, rounds = kept + (exceeds is True), discarded + (exceeds is False), rounds + made
                ended = True
                if exceeds is not None:
                    break
            elif exceeds is not None:
                lost += exceeds
                break
    power, trials = kept / len(gains), len(gains)
    return Outcomes(power, discarded / trials, rounds / trials, lost / trials, _fixed(gains, margin, power))


def _false(gains: Draws) -> float:
    """Return the share of the trials that are decided, though the programs are equal."""
    return float(np.mean([any(_decides(trial[:made]) for made in range(FEWEST, MOST + 1)) for trial in gains.tolist()]))


def _decides(gains: list[float]) -> bool:
    return look(gains).exceeds(0.0) is not None


def _fixed(gains: Draws, margin: float, power: float) -> int | None:
    for made in range(2, gains.shape[1] + 1):
        error = gains[:, :made].std(axis=1, ddof=1) / math.sqrt(made)
        low = gains[:, :made].mean(axis=1) + student_t_quantile(made - 1, SIGNIFICANT) * error
        if np.mean(low > math.log1p(margin)) >= power > 2 * SIGNIFICANT:
            return made
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    rng = np.random.default_rng(SEED)
    found: list[bars.Bar] = []

    rows = [["equal programs, margin 0", "keep", "discard", "mean rounds"]]
    for name, noise in NOISE.items():
        out = judged(gains_of(noise(rng, (trials, 2 * MOST)), _as_drawn(rng, (trials, MOST))), 0.0)
        rows.append([name, f"{out.keep:.1%}", f"{out.discard:.1%}", f"{out.rounds:.1f}"])
        found.append(bars.at_most(f"false keeps, {name}", 100 * out.keep, 100 * FALSE_KEEPS, "{:.1f} %"))
    print(table(rows), end="\n\n")

    rows = [["equal programs, margin 0: keep or discard", *ORDERS]]
    for name, noise in RHYTHMS.items():
        times = noise(rng, (trials, 2 * MOST))
        false = {order: _false(gains_of(times, signs(rng, (trials, MOST)))) for order, signs in ORDERS.items()}
        rows.append([name, *(f"{share:.1%}" for share in false.values())])
        if name not in LIMITS:
            found.append(bars.at_most(f"false decisions, {name}", 100 * false["as drawn"], 100 * FALSE, "{:.1f} %"))
    print(table(rows), end="\n\n")

    rows = [["margin", "noise", "gain", "keep", "discard", "mean rounds", "power lost", "fixed, same power"]]
    for margin in MARGINS:
        for noise_size in NOISES:
            times = noise_size * rng.standard_normal((trials, 2 * LONGEST))
            for gain in GAINS:
                out = judged(gains_of(times, _alternating(rng, (trials, LONGEST))) + math.log1p(gain), margin)
                cells = [f"{margin:.1%}", f"{noise_size:.0%}", f"{gain:.0%}", f"{out.keep:.1%}", f"{out.discard:.1%}"]
                rows.append([*cells, f"{out.rounds:.1f}", f"{out.power_lost:.1%}", str(out.fixed or "-")])
                what = f"power lost, gain {gain:.0%}, noise {noise_size:.0%}, margin {margin:.1%}"
                found.append(bars.at_most(what, 100 * out.power_lost, 100 * POWER_LOST, "{:.1f} %"))
                if out.fixed and out.keep >= POWER:
                    what = (
                        f"mean rounds of a fixed number, gain {gain:.0%}, noise {noise_size:.0%}, margin {margin:.1%}"
                    )
                    found.append(bars.at_most(what, out.rounds / out.fixed, COST, "{:.2f}"))
    print(table(rows), end="\n\n")

    rows = [["rounds that fit", "gain", "keep", "discard", "mean rounds", "power lost"]]
    gains = gains_of(0.01 * rng.standard_normal((trials, 2 * MOST)), _alternating(rng, (trials, MOST)))
    for most in FITTING:
        for gain in GAINS:
            out = judged(gains + math.log1p(gain), MARGINS[1], most)
            cells = [str(most), f"{gain:.0%}", f"{out.keep:.1%}", f"{out.discard:.1%}", f"{out.rounds:.1f}"]
            rows.append([*cells, f"{out.power_lost:.1%}"])
            what = f"power lost, gain {gain:.0%}, time for {most} rounds"
            found.append(bars.at_most(what, 100 * out.power_lost, 100 * POWER_LOST, "{:.1f} %"))
    print(table(rows))
    return bars.conclude(found)


if __name__ == "__main__":
    sys.exit(main())
