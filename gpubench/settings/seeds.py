"""Lists of seeds as text, such as 1,2,3 or 0-7."""

import itertools
import re
from typing import Any

LARGEST = 2**63 - 1  # what msgspec can send and torch can seed with
MOST = 100_000
"""Seeds of a list."""


def shortest(value: Any) -> Any:
    """Writes a list of seeds in its shortest form, with ranges; takes such text, a number or a list of either.

    Raises ValueError if it is not a list of different seeds.
    """
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    if not parts:
        raise ValueError("[] has no seed")
    ranges = [_range(str(part).strip()) for part in parts]
    if sum(map(len, ranges)) > MOST:
        raise ValueError(f"{value!r} has more than {MOST:,} seeds")
    seeds = [*itertools.chain.from_iterable(ranges)]
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise ValueError(f"{value!r} has the seed {twice} twice, which would make the same sample again")
    return _as_text(seeds)


def seeds_of(text: str | None) -> list[int]:
    """The seeds in a list as `shortest` writes it; empty without a list."""
    return [*itertools.chain.from_iterable(map(_range, text.split(",")))] if text else []


def _range(text: str) -> range:
    if not (found := re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text, re.ASCII)):
        raise ValueError(f"{text!r} is not a seed: give numbers from 0, such as 1,2,3, or a range, such as 0-7")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"{text!r} is not a range of seeds: {last} is less than {first}")
    if last > LARGEST:
        raise ValueError(f"{last} is too large for a seed: the largest is {LARGEST}")
    return range(first, last + 1)


def _as_text(seeds: list[int]) -> str:
    """The seeds in their order, three or more consecutive ones as a range."""
    runs = [[*run] for _, run in itertools.groupby(enumerate(seeds), lambda pair: pair[1] - pair[0])]
    shown = []
    for run in runs:
        of_run = [seed for _, seed in run]
        shown += [f"{of_run[0]}-{of_run[-1]}"] if len(of_run) > 2 else [str(seed) for seed in of_run]
    return ",".join(shown)
