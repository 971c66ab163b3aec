"""Whether the runs of a patch agree with the search that it was made of, on made-up programs of known speed."""

from collections.abc import Iterator

import numpy as np
import pytest
from planted import Planted, drawn, solve

from gpubench.compare.intervals import MetricSample, ratio
from gpubench.gain import Gain
from gpubench.patches.result import ProvedPatch
from gpubench.proof import ROUNDS
from gpubench.tuning.combination import Combination

TRIALS = [4, pytest.param(100, marks=pytest.mark.stress)]


def measured(planted: Planted, *versions: Combination) -> list[Gain]:
    """The gain of each version by runs beside the program as it was, interleaved as `proof.prove` makes them."""
    sides = [(0,) * len(planted.effects), *versions]
    rates: list[list[float]] = [[] for _ in sides]
    for number in range(ROUNDS):
        for side in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
            rates[side].append(np.exp(planted.run(sides[side]).rate or 0.0))
    before, *after = (MetricSample(np.array(each)) for each in rates)
    found = [ratio(before, one, paired=True) for one in after]
    return [Gain(one.estimate, *one.interval) for one in found if one and one.interval]


def proved(trials: int) -> Iterator[tuple[Planted, Combination, Gain]]:
    """Programs with a gain that a search has proved, and the settings of it."""
    number = 0
    while trials:
        planted = drawn(np.random.default_rng([11, number]), 0.02, drift=0.03)
        found = solve(planted).conclusion
        number += 1
        if found.proved and found.gain:
            trials -= 1
            yield planted, found.best, found.gain


@pytest.mark.parametrize("trials", TRIALS)
def test_a_patch_that_does_what_the_settings_do_has_their_gain(trials: int) -> None:
    found = [measured(planted, best, best) for planted, best, _ in proved(trials)]
    patches = [ProvedPatch(changed={"train.py": 1}, gain=ours, settings_gain=theirs) for ours, theirs in found]
    assert not any(one.differs for one in patches)
    # The difference of two versions is as uncertain as the gain of one, so that 95 of 100 are expected within.
    assert sum(theirs.low <= ours.ratio <= theirs.high for ours, theirs in found) >= 0.89 * trials - 1


@pytest.mark.parametrize("trials", TRIALS)
def test_a_patch_that_does_nothing_is_said_to_differ(trials: int) -> None:
    for planted, best, gain in proved(trials):
        if gain.low > 1.1:
            (idle,) = measured(planted, (0,) * len(best))
            assert ProvedPatch(changed={"train.py": 1}, gain=idle, settings_gain=gain).differs
