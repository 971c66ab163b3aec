"""What may be wrong with a measurement, in the same words for a run and for what compares it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gpubench import units
from gpubench.metrics import Metric
from gpubench.telemetry import STEAL, Others

CLOSURE_LIMIT = 0.005
LEAST_SAID = 0.05  # cores: less is 0.0 to one digit
LONGER = "raise training.warmup_steps or --steps"
MORE = "raise --repeats"
LONE = "one repeat only, which tells nothing of how processes differ"


def held_down(shares: Mapping[str, float]) -> str | None:
    """shares: of the steady time, by reason."""
    reasons = [f"{reason} for {units.percent(share)}" for reason, share in Counter(shares).most_common() if share]
    return f"clocks were held down by {', '.join(reasons)} of the steady time" if reasons else None


def noise(others: Others | None, throughput: Metric | None) -> list[str]:
    """How far the figures of one run can be relied on, most telling first; nothing of a quiet and precise one."""
    return [said for said in (too_noisy(throughput), contended(others), on_its_gpus(others)) if said]


def contended(others: Others | None) -> str | None:
    """What other processes took of the CPU, which of them, and how far the times can be relied on for that."""
    if others is None:
        return None
    if others.busy:
        named = ", ".join(f"{name} {cores:.1f}" for name, cores in others.processes.items() if cores >= LEAST_SAID)
        said = f"other processes kept {others.cores:.1f} cores busy while it ran{f' ({named})' if named else ''}"
    elif others.steal and others.steal > STEAL:
        said = f"the hypervisor gave {units.percent(others.steal)} of the CPU to other guests while it ran"
    else:
        return None
    if others.slowdown is None:
        return said
    reliable = units.percent(others.slowdown) if others.slowdown < 1 else f"a factor of {1 + others.slowdown:.1f}"
    return f"{said}: its times are not to be relied on beyond {reliable}"


def on_its_gpus(others: Others | None) -> str | None:
    if others is None or not others.gpu_share:
        return None
    return f"other processes were on its GPUs for {units.percent(others.gpu_share)} of the steady time"


def too_noisy(metric: Metric | None) -> str | None:
    """Says that a figure's interval is wider than a factor of two, and what to do about it; None where it is not."""
    if metric is None or metric.interval is None or not metric.too_noisy:
        return None
    lies = f"{units.words(metric.name)} is too noisy to quote: {units.span(*metric.interval, metric.unit)}"
    return f"{lies}, at 95 %, over {units.counted(len(metric.repeats), 'repeat')}: {MORE}, or use a quieter machine"


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
