"""Does `tune` find and prove a gain that is known: TF32 in a program of fp32 matrix products?"""

from collections.abc import Iterator
from statistics import median

import bars
from bars import Bar

from first_checks.here import Failed, Here
from first_checks.stopwatch import TINY
from gpubench.tuning.result import Tuning

KEY = "performance.matmul_precision"
KNOWN = 1.05
"""The least gain, by the program's own events, that is one to find."""
GAIN = 0.1
"""By how much the proved gain may differ from that of the program's own events."""
BUDGET = "2m"


def check(here: Here) -> Iterator[Bar]:
    size = TINY if here.tiny else ("--seconds=1.5",)
    try:
        before, after = (median(here.alone("trained.py", *size, *more)["totals"]) for more in ((), ("--tf32",)))
    except Failed as failed:
        yield bars.skipped("tune", f"the program fails without gpubench: {failed}")
        return
    if before / after < KNOWN:
        yield bars.skipped("tune", f"TF32 is {before / after:.3f} times as fast here, which is no gain to find")
        return
    try:
        found = here.searched("trained.py", *size, options=("--budget", BUDGET, f"--only={KEY}"))
    except Failed as failed:
        yield bars.holds("tune: the search completes", str(failed), "it does", good=False)
        return
    yield from judged(found, before / after)


def judged(tuning: Tuning, known: float) -> Iterator[Bar]:
    """Judges a search by the gain that is known."""
    kept, conclusion = tuning.keep.get(KEY), tuning.conclusion
    yield bars.holds(f"tune: {KEY}", f"{kept} is kept" if kept else "not kept", "high is kept", good=kept == "high")
    proved = conclusion is not None and conclusion.proved
    yield bars.holds("tune: the gain", "proved" if proved else "not proved", "proved", good=proved)
    if conclusion and conclusion.gain:
        ratio = conclusion.gain.ratio
        detail = f"{ratio:.3f} x, the program's {known:.3f} x"
        yield bars.at_most("tune: gain, from the program's own events", abs(ratio / known - 1), GAIN, "{:.1%}", detail)
