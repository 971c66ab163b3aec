"""How often is a decision of `judge` wrong, and how many rounds does it take?

    .venv/bin/python benchmarks/judge_power.py [--trials 2000]

Simulated programs: a round is one repeat of each side, in the order A B B A, and each repeat has its own noise. After
each round the test of gpubench/compare/sequential.py looks at all rounds so far, until it decides, is hopeless or has
made all that it may. *Fixed* is Student's t with the same level over a number of rounds that is chosen before: the
smallest number with which it finds the gain as often. It is counted on the same trials.

Equal programs are judged with a margin of 0, which makes a false `keep` most likely, and gains with a margin of 0 and
of 0.5 %. The noise of equal programs is normal, heavy-tailed (Student's t with two degrees of freedom), lognormal, has
spikes in a tenth of the repeats, or two clocks; or the machine drifts: it gets slower by five times the noise, wanders
as a random walk, slows the second repeat of each round, or changes between two speeds. The seed is fixed.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import bars
import numpy as np
from numpy.typing import NDArray
from tables import table

from gpubench.compare.intervals import SIGNIFICANT
from gpubench.compare.sequential import FEWEST, MOST, look
from gpubench.distributions import student_t_quantile

Draws = NDArray[np.float64]
SEED = 20_261_124
LONGEST = 2 * MOST
"""The rounds of a trial, so that a fixed number may be larger than that of the sequential test."""
GAINS = (0.0, 0.01, 0.03, 0.10)
NOISES = (0.01, 0.05)
MARGINS = (0.0, 0.005)
FALSE_KEEPS = 0.05
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


def _second(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return 0.3 * rng.standard_normal(shape) + np.arange(shape[1]) % 2


def _speeds(rng: np.random.Generator, shape: tuple[int, int]) -> Draws:
    return rng.normal(0, 0.02, shape) + np.cumsum(rng.random(shape) < 0.1, axis=1) % 2


NOISE: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], Draws]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(2, shape),
    "lognormal": lambda rng, shape: rng.lognormal(0, 1, shape),
    "spikes": _spikes,
    "two clocks": _clocks,
    "a machine that gets slower": _slower,
    "a machine that wanders": _wandering,
    "the second repeat is slower": _second,
    "a machine with two speeds": _speeds,
}
"""The logarithms of the times of repeats, in the order in which they are made, in a row for each trial."""


def gains_of(times: Draws) -> Draws:
    """Return the gain of each round, from the times of its repeats in the order A B B A."""
    first, second = times[:, 0::2], times[:, 1::2]
    swapped = np.arange(first.shape[1]) % 2 == 1
    return np.where(swapped, second - first, first - second)


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


def judged(gains: Draws, margin: float) -> Outcomes:
    """Return how the trials end, one in each row."""
    kept = discarded = rounds = lost = 0
    for trial in gains.tolist():
        ended = False
        for made in range(FEWEST, MOST + 1):
            found = look(trial[:made])
            exceeds = found.exceeds(margin)
            if not ended and (exceeds is not None or made == MOST or found.is_hopeless(margin)):
                kept, discarded, rounds = kept + (exceeds is True), discarded + (exceeds is False), rounds + made
                ended = True
                if exceeds is not None:
                    break
            elif exceeds is not None:
                lost += exceeds
                break
    power, trials = kept / len(gains), len(gains)
    return Outcomes(power, discarded / trials, rounds / trials, lost / trials, _fixed(gains, margin, power))


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
        out = judged(gains_of(noise(rng, (trials, 2 * MOST))), 0.0)
        rows.append([name, f"{out.keep:.1%}", f"{out.discard:.1%}", f"{out.rounds:.1f}"])
        found.append(bars.at_most(f"false keeps, {name}", 100 * out.keep, 100 * FALSE_KEEPS, "{:.1f} %"))
    print(table(rows), end="\n\n")

    rows = [["margin", "noise", "gain", "keep", "discard", "mean rounds", "power lost", "fixed, same power"]]
    for margin in MARGINS:
        for noise_size in NOISES:
            times = noise_size * rng.standard_normal((trials, 2 * LONGEST))
            for gain in GAINS:
                out = judged(gains_of(times) + math.log1p(gain), margin)
                cells = [f"{margin:.1%}", f"{noise_size:.0%}", f"{gain:.0%}", f"{out.keep:.1%}", f"{out.discard:.1%}"]
                rows.append([*cells, f"{out.rounds:.1f}", f"{out.power_lost:.1%}", str(out.fixed or "-")])
                what = f"power lost, gain {gain:.0%}, noise {noise_size:.0%}, margin {margin:.1%}"
                found.append(bars.at_most(what, 100 * out.power_lost, 100 * POWER_LOST, "{:.1f} %"))
                if out.fixed and out.keep >= POWER:
                    what = (
                        f"mean rounds of a fixed number, gain {gain:.0%}, noise {noise_size:.0%}, margin {margin:.1%}"
                    )
                    found.append(bars.at_most(what, out.rounds / out.fixed, COST, "{:.2f}"))
    print(table(rows))
    return bars.conclude(found)


if __name__ == "__main__":
    sys.exit(main())
