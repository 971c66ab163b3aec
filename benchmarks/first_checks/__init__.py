"""What has to be right on a GPU on which gpubench was never run, each held to what the program itself measured.

A check yields bars. Its programs are those of first_programs/, which know nothing of gpubench.
"""

from collections.abc import Callable, Iterator, Mapping

from bars import Bar

from first_checks import energy, faults, graphs, inference, ranks, stopwatch, tuned
from first_checks.here import Here

CHECKS: Mapping[str, Callable[[Here], Iterator[Bar]]] = {
    "stopwatch": stopwatch.check,
    "graphs": graphs.check,
    "energy": energy.check,
    "inference": inference.check,
    "ranks": ranks.check,
    "tuned": tuned.check,
    "faults": faults.check,
}
