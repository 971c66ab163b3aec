"""What has to be right on a GPU on which gpubench was never run, each held to what the program itself measured.

A check yields bars. Its programs are those of first_programs/, which know nothing of gpubench.
"""

from collections.abc import Callable, Iterator, Mapping

from bars import Bar

from first_checks.energy import energy
from first_checks.faults import faults
from first_checks.graphs import graphs
from first_checks.here import Here
from first_checks.inference import inference
from first_checks.ranks import ranks
from first_checks.stopwatch import stopwatch
from first_checks.tuned import tuned

CHECKS: Mapping[str, Callable[[Here], Iterator[Bar]]] = {
    "stopwatch": stopwatch,
    "graphs": graphs,
    "energy": energy,
    "inference": inference,
    "ranks": ranks,
    "tuned": tuned,
    "faults": faults,
}
