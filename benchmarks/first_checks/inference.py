"""Is the median latency that `--inference` reports that of the program's own events?"""

from collections.abc import Iterator
from statistics import median

import bars
from bars import Bar

from first_checks.here import Failed, Here, within
from first_checks.stopwatch import TINY, deviation

LATENCY = 0.02
"""Between the event of the program and that of the probe the host runs Python, while the GPU is idle."""


def check(here: Here) -> Iterator[Bar]:
    try:
        size = (*TINY, "--layers=24") if here.tiny else ()
        run, own = here.measured("served.py", *size, options=("--inference",))
    except Failed as failed:
        yield bars.holds("inference: the run completes", str(failed), "it does", good=False)
        return
    yield bars.every("inference: calls that are counted", len(run.steps()), len(own["parts"]))
    p50, calls = run.metrics().get("latency_p50"), [part["forward"] for part in within(own["parts"], run.last())]
    if p50 is None:
        yield bars.holds("inference: latency p50", "none", "one", good=False)
    else:
        yield deviation("inference: latency p50", p50, median(calls), LATENCY)
