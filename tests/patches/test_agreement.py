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


def measured(planted: Planted, patched: Combination) -> Gain:
    """The gain by runs of the program as it was and as patched, interleaved as `proof.prove` makes them."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS):
        for is_patched in (False, True) if number % 2 == 0 else (True, False):
            combination = patched if is_patched else (0,) * len(planted.effects)
            rates[is_patched].append(np.exp(planted.run(combination).rate or 0.0))
    found = ratio(*(MetricSample(np.array(rates[side])) for side in (False, True)), paired=True)
    assert found
    assert found.interval
    return Gain(found.estimate, *found.interval)


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
    differs = [
        ProvedPatch(changed={"train.py": 1}, gain=measured(planted, best), settings_gain=gain).differs
        for planted, best, gain in proved(trials)
    ]
    assert differs.count(False) >= 0.95 * trials


@pytest.mark.parametrize("trials", TRIALS)
def test_a_patch_that_does_nothing_is_said_to_differ(trials: int) -> None:
    for planted, best, gain in proved(trials):
        if gain.low > 1.1:
            idle = measured(planted, (0,) * len(best))
            assert ProvedPatch(changed={"train.py": 1}, gain=idle, settings_gain=gain).differs
