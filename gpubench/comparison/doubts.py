"""Reasons to trust the figures of a side, or the whole comparison, less than their intervals suggest."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gpubench import cautions, units
from gpubench.comparison import conditions
from gpubench.comparison.comparability import differences
from gpubench.comparison.evidence import ENDS, RUNS_READ, RunEvidence, Series, Side
from gpubench.comparison.sampling import one_after_the_other, sample_of
from gpubench.comparison.verdicts import is_speed
from gpubench.runs import COMPLETED

ENOUGH_REPEATS = 3
ENOUGH_STEPS = 10  # independent ones: with fewer, intervals from steps alone cover less than they say
FEWEST_STEPS = 10  # of a loss that can be said to fall
BF16_STEP = 2**-7  # relative distance between neighbouring bf16 numbers, at the most
MACHINE_MOVED = 0.01  # of the yardstick's time: a smaller change is not reported
DIVERGED = "NonFiniteLoss"
FAR, FAR_AMONG = 0.1, 5.0  # from the median, as a fraction, and in the median distance of all: an outlier
SPIKE = 2.0  # times the median: a step that something else held up
WORTH_A_WORD = 0.005  # of the time
TENTHS, STRAIGHT, DRIFT = 10, 0.8, 0.01  # parts of a repeat, share of their variation on a line, relative change

Check = Callable[[Side], str | None]


def doubts(baseline: Side, candidate: Side) -> list[str]:
    """Sentences, most serious first, beside what `rejection` says; those about one side begin with its label."""
    sides = (baseline, candidate)
    said = _about(sides, _unfinished)
    if not any(map(rejection, sides)) and (apart := loss_apart(baseline, candidate)):
        said.append(apart)
    timed = not any(run.untimed for side in sides for run in side.runs)
    checks = (
        _throttled,
        _others_on_gpus,
        _contended,
        _unsettled,
        _unclosed,
        _odd,
        _spikes,
        _drift,
        _scattered,
        _few,
        _short,
        _unread,
    )
    for check in checks:
        said += _about(sides, check) if timed or check not in OF_TIMES else []
    return list(dict.fromkeys(said))


def changed_machine(baseline: Side, candidate: Side) -> str | None:
    """Says that the CPU was not equally fast for both runs, by a yardstick that does not depend on the model."""
    moved = conditions.machine_speed(baseline, candidate)
    if moved is None or abs(moved - 1) < MACHINE_MOVED or not one_after_the_other(baseline, candidate):
        return None
    word = "slower" if moved > 1 else "faster"
    return f"the machine itself was {units.percent(abs(moved - 1))} {word} for {candidate.label}, by its yardstick"


def out_of_turn(baseline: Side, candidate: Side) -> str | None:
    """Says that two runs were measured one after the other, so that changes of the machine are in the difference."""
    recorded = baseline.runs[0].record and candidate.runs[0].record
    counted = baseline.runs[0].untimed or candidate.runs[0].untimed
    if not recorded or counted or not one_after_the_other(baseline, candidate):
        return None
    return (
        "one run each, not measured in turn: how runs of this machine differ is not in the interval; "
        "--vs measures in turn, and four runs or more a side show it"
    )


def rejection(side: Side) -> str | None:
    """Why this side must not be called faster, or smaller: it left work undone or computed nonsense. None if it did
    its work."""
    for run in side.runs:
        if run.untimed and run.status != COMPLETED:
            return f"{_of_run(side, run)}, so that its true peak is not known"
        error = run.record.error if run.record else None
        if error and error.get("kind") == DIVERGED:
            return f"{_of_run(side, run)}: {error.get('message')}"
    skipped = [metric for run in side.runs if run.record and (metric := run.metrics.get("skipped_steps"))]
    if number := sum(sum(metric.repeats) for metric in skipped):
        return f"the gradient scaler skipped {number:.0f} steady steps: time spent, no work done"
    losses = side.losses
    if losses is not None and not np.isfinite(losses).all():
        return f"the loss is not finite at step {np.argmin(np.isfinite(losses))} (counting from 0)"
    return None


def loss_apart(baseline: Side, candidate: Side) -> str | None:
    """Says so if one side learned and the other did not, or they went opposite ways; None where that is unknown.

    Compared is how far each side's loss fell by the second half of their common steps: from the first step, when
    nothing was learned, and from the first tenth, whose mean is steadier; either is enough. Seeds shift the level and
    rounding the last digits, but neither what is learned. The falls are apart when they differ by more than half of
    the larger one, by more than the steps' scatter allows (6 standard errors of independent steps, since these may be
    correlated), and by more than bf16 resolves. A loss that is not finite is apart from any other.
    """
    found = differences(baseline.runs[0], candidate.runs[0])
    ours, theirs = baseline.losses, candidate.losses
    if ours is None or theirs is None or any(each.kind in ("workload", "scale") for each in found):
        return None
    n = min(len(ours), len(theirs))
    ours, theirs = ours[:n], theirs[:n]
    for side, losses in ((baseline, ours), (candidate, theirs)):
        if not np.isfinite(losses).all():
            return f"the loss of {side.label} is not finite at step {np.argmin(np.isfinite(losses))} (counting from 0)"
    if n < FEWEST_STEPS:
        return None
    if not any(_falls_apart(ours, theirs, start) for start in (1, n // 10)):
        return None
    ways = [
        f"from {losses[0]:.3g} to {_late(losses):.3g} in {side.label}"
        for side, losses in ((baseline, ours), (candidate, theirs))
    ]
    return f"the losses went apart over {n} steps: {' and '.join(ways)}"


def _about(sides: Sequence[Side], check: Check) -> list[str]:
    return [f"{side.label}: {said}" for side in sides if (said := check(side))]


def _of_run(side: Side, run: RunEvidence) -> str:
    return f"{run.label if side.runs[1:] else 'the run'} {ENDS.get(run.status, run.status)}"


def _unfinished(side: Side) -> str | None:
    """Names runs that ended early, except those that `rejection` covers."""
    found = [run for run in side.runs if run.record and run.status != COMPLETED and not _diverged(run)]
    if not found:
        return None
    error = found[0].record.error if found[0].record else None
    said = f"{_of_run(side, found[0])}: {(error or {}).get('message') or 'it left no reason'}"
    return said if len(side.runs) == 1 else f"{len(found)} of {len(side.runs)} runs were not completed; {said}"


def _diverged(run: RunEvidence) -> bool:
    return bool(run.record and run.record.error and run.record.error.get("kind") == DIVERGED)


def _throttled(side: Side) -> str | None:
    shares: Counter[str] = Counter()
    for run in side.runs:
        shares.update({reason: share / len(side.runs) for reason, share in run.throttled.items()})
    return cautions.held_down(shares)


def _others_on_gpus(side: Side) -> str | None:
    return cautions.on_its_gpus(conditions.others(side))


def _contended(side: Side) -> str | None:
    return cautions.contended(conditions.others(side))


def _unsettled(side: Side) -> str | None:
    said = cautions.unsettled([window.settled for run in side.runs for window in run.windows])
    return f"{said}: {cautions.LONGER}" if said and side.runs[0].record else said


def _unclosed(side: Side) -> str | None:
    known = [metric for run in side.runs if (metric := run.metrics.get("closure_error"))]
    return cautions.unclosed([error for metric in known for error in metric.repeats])


def _odd(side: Side) -> str | None:
    """Names repeats, or runs of a group, that lie far from all others."""
    metric = _step_metric(side)
    sample = sample_of(side, metric) if metric else None
    if sample is None or sample.n < ENOUGH_REPEATS or sample.mean <= 0:
        return None
    away = sample.units / np.median(sample.units) - 1
    odd = np.flatnonzero(np.abs(away) > max(FAR, FAR_AMONG * float(np.median(np.abs(away)))))
    if not len(odd):
        return None
    most = float(away[odd][np.argmax(np.abs(away[odd]))])
    grouped = len(side.runs) > 1
    noun = "run" if grouped else "repeat"
    who, median = f"{len(odd)} of its {sample.n} {noun}s", "their median"
    if grouped and len(odd) == 1:
        who, median = side.runs[odd[0]].label, f"the median of the {sample.n} {noun}s"
    size = f"{'up to ' * (len(odd) > 1)}{units.percent(abs(most))} {'more' if most > 0 else 'less'} time"
    return f"{who} took {size} than {median}: an outlier, which is part of the mean"


def _spikes(side: Side) -> str | None:
    """Names single steps that took so long that they move the mean."""
    repeats = _step_times(side)
    relative = np.concatenate([steps / np.median(steps) for steps in repeats]) if repeats else np.empty(0)
    long = relative > SPIKE
    if not long.any() or (added := float((relative[long] - 1).sum() / relative.sum())) < WORTH_A_WORD:
        return None
    return (
        f"{long.sum()} of its {len(relative)} steady steps took more than twice the median, up to"
        f" {units.digits(float(relative.max()))} x: such spikes account for {units.percent(added)} of its time"
    )


def _drift(side: Side) -> str | None:
    """Says that steps became slower or faster all the way through a repeat."""
    repeats = _step_times(side)
    changes = [change for steps in repeats if (change := _trend(steps))]
    if not changes or 2 * len(changes) < len(repeats) or min(changes) < 0 < max(changes):
        return None
    most = max(changes, key=abs)
    where = f" in {len(changes)} of {len(repeats)} repeats" if len(repeats) > 1 else ""
    size = f"{'up to ' * (len(changes) > 1)}{units.percent(abs(most))} {'slower' if most > 0 else 'faster'}"
    return f"its steps drift: they became {size} from beginning to end{where}, and the mean depends on how long it ran"


def _trend(steps: Series) -> float | None:
    """The change of a step from the first to the last tenth of a repeat, as a fraction of its mean.

    None unless a straight line accounts for most of how the tenths' medians vary and changes enough to be reported.
    """
    if len(steps) < 2 * TENTHS:
        return None
    medians = np.array([np.median(tenth) for tenth in np.array_split(steps, TENTHS)])
    places = np.arange(TENTHS) - (TENTHS - 1) / 2
    slope = float(places @ medians / (places @ places))
    total, told = float(((medians - medians.mean()) ** 2).sum()), slope**2 * float(places @ places)
    change = slope * (TENTHS - 1) / float(medians.mean())
    return change if told > STRAIGHT * total and abs(change) >= DRIFT else None


def _step_metric(side: Side) -> str | None:
    """The metric that tells how long a step of the side took; None where there is none."""
    first = side.runs[0]
    names = ("step_time", "throughput") if first.record else tuple(first.metrics)
    return next(
        (
            name
            for name in names
            if (known := first.metrics.get(name)) and (is_speed(known.unit) or first.is_rate(name))
        ),
        None,
    )


def _step_times(side: Side) -> list[Series]:
    """The steady steps of each repeat, of a group of those of the first few runs."""
    metric = _step_metric(side)
    found = [run.series(metric) or [] for run in side.runs[:RUNS_READ] if metric in run.metrics] if metric else []
    return [steps for repeats in found for steps in repeats if np.median(steps) > 0]


def _scattered(side: Side) -> str | None:
    hosts = sorted({run.record.host for run in side.runs if run.record})
    return f"its runs come from {len(hosts)} machines, {', '.join(hosts)}, and vary as those do" if hosts[1:] else None


def _few(side: Side) -> str | None:
    number = sum(run.repeats for run in side.runs)
    if number >= ENOUGH_REPEATS:
        return None
    more = cautions.MORE if side.runs[0].record else "give a folder of logs"
    if number < 2:
        return f"{cautions.LONE}: {more}"
    return f"{number} repeats only, whose interval is wide: {more}"


def _short(side: Side) -> str | None:
    """Says that the steps of a lone repeat are too few, for their correlation, to tell how sure their mean is."""
    metric = _step_metric(side)
    if metric is None or len(side.runs) > 1 or side.runs[0].repeats > 1:
        return None
    steps, worth = side.runs[0].metrics[metric].n, side.runs[0].metrics[metric].effective_n
    if worth is None or worth >= ENOUGH_STEPS:
        return None
    more = "raise --steps" if side.runs[0].record else "give a longer log"
    independent = units.counted(round(worth), "independent one")
    return f"its {steps} steady steps are worth {independent}: an interval from steps alone is too narrow: {more}"


def _unread(side: Side) -> str | None:
    problems = [
        f"{run.label}: {problem}" if len(side.runs) > 1 and run.record is None else problem
        for run in side.runs
        for problem in run.problems
    ]
    if not problems:
        return None
    return problems[0] if len(problems) == 1 else f"{len(problems)} problems in reading it, the first: {problems[0]}"


def _late(losses: Series) -> float:
    return float(losses[len(losses) // 2 :].mean())


def _falls_apart(ours: Series, theirs: Series, start: int) -> bool:
    """Whether the losses fell differently from the mean of the first `start` steps on."""
    falls = [losses[:start].mean() - _late(losses) for losses in (ours, theirs)]
    error = np.hypot(_scatter(ours), _scatter(theirs)) * np.sqrt(1 / start + 2 / len(ours))
    resolution = BF16_STEP * max(abs(ours[0]), abs(theirs[0]))
    return bool(abs(falls[0] - falls[1]) > max(0.5 * max(map(abs, falls)), 6 * error, resolution))


def _scatter(losses: Series) -> float:
    """Standard deviation of a step, from the differences of successive ones, which a steady descent hardly touches."""
    return float(1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(losses))))


OF_TIMES: Sequence[Check] = (_throttled, _contended, _unsettled, _unclosed, _odd, _spikes, _drift, _few, _short)
"""Doubts of times, which are none of what is counted."""
