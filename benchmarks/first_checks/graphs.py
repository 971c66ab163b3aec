"""Are the steps of a program counted and timed right that replays CUDA graphs?"""

from collections.abc import Iterator

import bars
from bars import Bar

from first_checks.here import Failed, Here
from first_checks.stopwatch import TINY, agreement, blamed

WAYS = {
    "graph": "CUDA graph of the whole step",
    "graphed": "make_graphed_callables",
    "compiled": "torch.compile, reduce-overhead",
}


def check(here: Here) -> Iterator[Bar]:
    for by, what in WAYS.items():
        if here.wants(by):
            yield from issued(here, by, what)


def issued(here: Here, by: str, what: str) -> Iterator[Bar]:
    arguments = (f"--by={by}", *(TINY if here.tiny else ()))
    try:
        run, own = here.measured("trained.py", *arguments)
    except Failed as failed:
        yield blamed(here, arguments, what, failed)
        return
    if own["compiled"] == 0:
        yield bars.skipped(what, "torch.compile compiled nothing")
    else:
        yield from agreement(what, run, own)
