"""What may be wrong with a measurement, in the same words for a run and for what compares it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gpubench import units

CLOSURE_LIMIT = 0.005
LONGER = "raise training.warmup_steps or --steps"
MORE = "raise --repeats"
LONE = "one repeat only, which tells nothing of how processes differ"


def held_down(shares: Mapping[str, float]) -> str | None:
    """shares: of the steady time, by reason."""
    reasons = [f"{reason} for {units.percent(share)}" for reason, share in Counter(shares).most_common() if share]
    return f"clocks were held down by {', '.join(reasons)} of the steady time" if reasons else None


def unsettled(settled: Sequence[bool]) -> str | None:
    """settled: of each repeat, whether its steps had settled when measuring began."""
    number = settled.count(False)
    return f"{number} of {len(settled)} repeats may not have reached the end of the warm-up" if number else None


def unclosed(errors: Sequence[float]) -> str | None:
    """errors: of each repeat, between the sum of its steps and the wall, as fractions."""
    worst = max(errors, default=0.0)
    return (
        f"closure is off by {units.percent(worst)}: phases, steps and wall disagree" if worst > CLOSURE_LIMIT else None
    )


def imprecise(reached: float | None, wanted: float) -> str | None:
    """reached: half the interval of the throughput after the most repeats, as a fraction of it, if it has one."""
    if reached is not None and reached <= wanted:
        return None
    known = "has no interval" if reached is None else f"is known to {units.percent(reached)}"
    return f"the throughput {known}, and {units.percent(wanted)} was asked for: raise measurement.max_repeats"
