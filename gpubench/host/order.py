"""Draws the order in which interleaved runs take turns, so that no rhythm of the machine favours one of them.

In a fixed order such as A B B A, a machine that is slow in every fourth repeat slows one side alone. A random order may
begin with A before B several times by chance, and then favours what comes first while the machine heats up. Therefore
the order is the best of some random ones. docs/decisions.md has the false decisions with each.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from random import Random, SystemRandom
from typing import Any

import numpy as np

from gpubench.host.recorder import Recorder

DRAWS = 64
"""The random orders of which the best one is taken."""
ROUNDS = 30
"""The rounds that are drawn; then they begin again."""
LONGEST = 4
"""The longest period of a disturbance that is looked at, in rounds."""
EARLIEST = 3
"""The fewest rounds that are looked at. In fewer, any order favours one side in some rhythm."""
SHARED = 0
"""The seed for a program on several machines, whose hosts have to draw the same order without knowing of each other."""


def rounds(recorders: Sequence[Recorder[Any]]) -> Iterator[Sequence[int]]:
    """Yields, for one round after the other, the numbers of the recorders in their order.

    The first round is in the order of the recorders, so that it shows at once if the first one does not run, which the
    others are compared with. The seed of all others is drawn after it, and recorded in each run.
    """
    yield range(len(recorders))
    is_spread = any(each.is_spread or each.elsewhere for each in recorders)
    seed = SHARED if is_spread else SystemRandom().getrandbits(32)
    for each in recorders if len(recorders) > 1 else ():
        each.order_seed = seed
        each.writer.update(order_seed=seed)
    yield from islice(cycle(drawn(len(recorders), seed)), 1, None)


def drawn(variants: int, seed: int) -> list[list[int]]:
    """Returns the order of so many variants in each of ROUNDS rounds.

    A disturbance is a wave over the repeats. If the gains of the rounds were nothing else, the square of their sum over
    the sum of their squares would tell how much it favours a variant over the first one, or the contrary. In the best
    order the largest such ratio of all periods, variants and numbers of rounds is the smallest.
    """
    random = Random(seed)
    keys = [random.random() for _ in range(DRAWS * ROUNDS * variants)]  # the same with every version of Python
    orders = np.array(keys).reshape(DRAWS, ROUNDS, variants).argsort(axis=2)
    orders[:, 0] = np.arange(variants)
    repeats = orders.argsort(axis=2) + variants * np.arange(ROUNDS)[:, None]
    worst = np.zeros(DRAWS)
    for period in range(2, LONGEST * variants + 1):
        wave = np.exp(2j * math.pi / period * repeats)
        gains = wave[:, :, 1:] - wave[:, :, :1]
        squares = np.maximum(np.cumsum(np.square(np.abs(gains)), axis=1), 1e-9)
        favour = np.square(np.abs(np.cumsum(gains, axis=1))) / squares
        worst = np.maximum(worst, favour[:, EARLIEST - 1 :].max(axis=(1, 2), initial=0.0))
    best: list[list[int]] = orders[worst.round(6).argmin()].tolist()  # rounding decides nothing on another machine
    return best
