"""Warnings that the figures of a side, or the whole comparison, are less reliable than their intervals suggest."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gpubench import units
from gpubench.compare.comparability import differences
from gpubench.compare.evidence import ENDS, RUNS_READ, RunEvidence, Series, Side
from gpubench.compare.verdicts import interleaved, is_speed, one_after_the_other, sample_of
from gpubench.runs import stats, warnings
from gpubench.runs.directory import COMPLETED
from gpubench.runs.other_load import OtherLoad, together
from gpubench.telemetry import TelemetrySample, within

RUNS_WATCHED = 10  # runs of a group whose telemetry is read
REFERENCE_TIME = "yardstick_time"  # the persisted name of the metric


def steady_telemetry(run: RunEvidence) -> list[TelemetrySample]:
    """Returns the telemetry samples within the run's steady windows."""
    return within(run.telemetry, [(window.start, window.end) for window in run.windows])


def other_load(side: Side) -> OtherLoad | None:
    """Returns the load of other processes during the steady windows, as a mean over the runs; None if unknown."""
    return together([found for run in side.runs if (found := run.summary.others)])


def disturbance(side: Side) -> float | None:
    """Returns the possible slowdown of a step on the CPU by other processes: `OtherLoad.slowdown`."""
    found = other_load(side)
    return found.slowdown if found else None


def machine_speed(baseline: Side, candidate: Side) -> float | None:
    """Returns the drift of the machine: the ratio of the reference workload's times; None if they are unknown."""
    times = [run.metrics.get(REFERENCE_TIME) for side in (baseline, candidate) for run in side.runs[:1]]
    if not (times[0] and times[1]) or min(times[0].estimate, times[1].estimate) <= 0:
        return None
    return times[1].estimate / times[0].estimate


def accountable(baseline: Side, candidate: Side) -> float:
    """Returns the relative change of a step's time that the machine alone may cause: the larger of two bounds.

    The bounds are the slowdown by other processes, and the square of the reference workload's change: under other load
    a step of small operations slows down by up to twice as much in the logarithm (docs/statistics.md). Returns 0 if
    neither is known.
    """
    taken = max(disturbance(side) or 0.0 for side in (baseline, candidate))
    moved = machine_speed(baseline, candidate)
    return max(taken, math.expm1(min(2 * abs(math.log(moved)), stats.LARGEST_LOGARITHM))) if moved else taken


ENOUGH_REPEATS = 3
ENOUGH_STEPS = 10  # independent steps; with fewer, the error of their mean is not known well
FEWEST_STEPS = 10  # steps that a comparison of losses needs
BF16_STEP = 2**-7  # largest relative distance between neighbouring bf16 numbers
MACHINE_MOVED = 0.01  # fraction of the reference workload's time; a smaller change is not reported
DIVERGED = "NonFiniteLoss"
FAR, FAR_AMONG = 0.1, 5.0  # from the median, as a fraction, and in the median distance of all: an outlier
SPIKE = 2.0  # times the median: a step that took longer is a spike
LEAST_REPORTED = 0.005  # fraction of the time; smaller effects are not reported
TENTHS, STRAIGHT, DRIFT = 10, 0.8, 0.01  # parts of a repeat, share of their variation on a line, relative change

Check = Callable[[Side], str | None]


def find_warnings(baseline: Side, candidate: Side, *, harmed: bool = False) -> list[str]:
    """Returns the warnings besides `rejection`, the most serious first.

    `harmed` means that the losses are known to differ, and need no warning of their own.

    One about a single side begins with its label.
    """
    sides = (baseline, candidate)
    said = _about(sides, _unfinished)
    if not harmed and not any(map(rejection, sides)) and (apart := loss_apart(baseline, candidate)):
        said.append(apart)
    timed = not any(run.untimed for side in sides for run in side.runs)
    checks = (
        _not_applied,
        _compiled,
        _throttled,
        _others_on_gpus,
        _contended,
        _unsettled,
        _unclosed,
        _odd,
        _spikes,
        _levels,
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
    """Returns a warning if the reference workload, which does not depend on the model, changed its time, or None."""
    moved = machine_speed(baseline, candidate)
    if moved is None or abs(moved - 1) < MACHINE_MOVED or not one_after_the_other(baseline, candidate):
        return None
    word = "slower" if moved > 1 else "faster"
    changed = units.percent(abs(moved - 1))
    return f"the machine itself was {changed} {word} for {candidate.label}, by its reference workload"


def out_of_turn(baseline: Side, candidate: Side) -> str | None:
    """Returns a warning if all runs of one side were made before the other's, or None.

    A drift of the machine is then part of the difference.
    """
    recorded = [[run.record.started for run in side.runs if run.record] for side in (baseline, candidate)]
    counted = baseline.runs[0].untimed or candidate.runs[0].untimed
    if not all(recorded) or counted or interleaved(baseline, candidate):
        return None
    if not one_after_the_other(baseline, candidate):
        first, last = sorted(
            (baseline, candidate), key=lambda side: min(run.record.started for run in side.runs if run.record)
        )
        ours, theirs = sorted(recorded, key=min)
        if max(ours) >= min(theirs):
            return None
        return (
            f"all runs of {first.label} were made before those of {last.label}, so that a drift of the machine between "
            "them looks like a change: make the runs of both sides in turns"
        )
    return (
        "one run each, not interleaved: the interval does not cover differences between runs on this machine; "
        "use --vs, which interleaves them, or compare four runs or more per side"
    )


def rejection(side: Side) -> str | None:
    """Returns why this side must not be called faster or smaller; None if it may be.

    The reasons are skipped steps, a loss that is not finite, and an unknown peak.
    """
    for run in side.runs:
        if run.untimed and run.status != COMPLETED:
            return f"{_of_run(side, run)}, so its true peak is unknown"
        error = run.record.error if run.record else None
        if error and error.get("kind") == DIVERGED:
            return f"{_of_run(side, run)}: {error.get('message') or 'its loss is not finite'}"
    skipped = [metric for run in side.runs if run.record and (metric := run.metrics.get("skipped_steps"))]
    if number := sum(sum(metric.repeats) for metric in skipped):
        return f"the gradient scaler skipped {number:.0f} steady steps, which took time but did no work"
    losses = side.losses
    if losses is not None and np.isinf(losses).any():
        return f"the loss is not finite at step {np.argmax(np.isinf(losses))} (counting from 0)"
    return None


def delay(side: Side) -> str | None:
    """Returns why this side must not be called slower: some of its steady steps compiled code; None if it may be.

    If most of them did, that is how the program runs.
    """
    compiled, steps = (sum(counts) for counts in zip(*map(_compiled_steps, side.runs), strict=True))
    return warnings.compiled_within(compiled, steps, side.runs[0].settings) if 2 * compiled < steps else None


def _compiled_steps(run: RunEvidence) -> tuple[int, int]:
    """Returns the number of steady steps in which torch.compile compiled code, and that of all."""
    return run.summary.compiled, sum(window.steps for window in run.windows)


def loss_apart(baseline: Side, candidate: Side) -> str | None:
    """Returns a warning if one side learned and the other did not, or the losses diverged; None otherwise.

    The test is that of `fell_apart`, over the steps whose loss is known on both sides. A loss that is not finite
    differs from any other.
    """
    found = differences(baseline.runs[0], candidate.runs[0])
    ours, theirs = baseline.losses, candidate.losses
    if ours is None or theirs is None or any(each.kind in ("workload", "scale") for each in found):
        return None
    n = min(len(ours), len(theirs))
    ours, theirs = ours[:n], theirs[:n]
    for side, losses in ((baseline, ours), (candidate, theirs)):
        if np.isinf(losses).any():
            return f"the loss of {side.label} is not finite at step {np.argmax(np.isinf(losses))} (counting from 0)"
    known = np.isfinite(ours) & np.isfinite(theirs)
    n, ours, theirs = int(np.count_nonzero(known)), ours[known], theirs[known]
    if n < FEWEST_STEPS or not fell_apart(ours, theirs):
        return None
    ways = [
        f"from {losses[0]:.3g} to {_late(losses):.3g} in {side.label}"
        for side, losses in ((baseline, ours), (candidate, theirs))
    ]
    return f"the losses developed differently over {n} steps: {' and '.join(ways)}"


def _about(sides: Sequence[Side], check: Check) -> list[str]:
    return [f"{side.label}: {said}" for side in sides if (said := check(side))]


def _of_run(side: Side, run: RunEvidence) -> str:
    return f"{run.label if side.runs[1:] else 'the run'} {ENDS.get(run.status, run.status)}"


def _unfinished(side: Side) -> str | None:
    """Returns a warning on runs that ended early, except those that `rejection` covers, or None."""
    found = [run for run in side.runs if run.record and run.status != COMPLETED and not _diverged(run)]
    if not found:
        return None
    first, record = found[0], found[0].record
    reason = (record.error or {}).get("message") if record else None
    why = "" if reason == first.status else f": {reason or 'no reason was recorded'}"  # "interrupted: interrupted"
    said = f"{_of_run(side, first)}{why}"
    return said if len(side.runs) == 1 else f"{len(found)} of {len(side.runs)} runs were not completed; {said}"


def _diverged(run: RunEvidence) -> bool:
    return bool(run.record and run.record.error and run.record.error.get("kind") == DIVERGED)


def _compiled(side: Side) -> str | None:
    compiled, steps = (sum(counts) for counts in zip(*map(_compiled_steps, side.runs), strict=True))
    return warnings.compiled_within(compiled, steps, side.runs[0].settings)


def _throttled(side: Side) -> str | None:
    shares: Counter[str] = Counter()
    for run in side.runs:
        shares.update({reason: share / len(side.runs) for reason, share in run.summary.throttled.items()})
    return warnings.held_down(shares)


def _others_on_gpus(side: Side) -> str | None:
    return warnings.others_on_gpus(other_load(side))


def _contended(side: Side) -> str | None:
    return warnings.contended(other_load(side))


def _unsettled(side: Side) -> str | None:
    longer = warnings.longer(side.runs[0].settings) if side.runs[0].record else None
    return warnings.not_settled([window.settled for run in side.runs for window in run.windows], longer)


def _unclosed(side: Side) -> str | None:
    known = [metric for run in side.runs if (metric := run.metrics.get("closure_error"))]
    return warnings.not_closed([error for metric in known for error in metric.repeats])


def _odd(side: Side) -> str | None:
    """Returns a warning on repeats, or runs of a group, that are outliers, or None."""
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
    """Returns a warning on single steps that are long enough to change the mean, or None."""
    repeats = _step_times(side)
    relative = np.concatenate([steps / np.median(steps) for steps in repeats]) if repeats else np.empty(0)
    long = relative > SPIKE
    if not long.any() or (added := float((relative[long] - 1).sum() / relative.sum())) < LEAST_REPORTED:
        return None
    return (
        f"{long.sum()} of its {len(relative)} steady steps took more than twice the median, up to"
        f" {units.digits(float(relative.max()))} x: such spikes account for {units.percent(added)} of its time"
    )


def _levels(side: Side) -> str | None:
    return warnings.level_changed([window for run in side.runs for window in run.windows])


def _drift(side: Side) -> str | None:
    """Returns a warning if steps became steadily slower or faster through a repeat, or None."""
    if _levels(side):
        return None
    repeats = _step_times(side)
    changes = [change for steps in repeats if (change := _trend(steps))]
    if not changes or 2 * len(changes) < len(repeats) or min(changes) < 0 < max(changes):
        return None
    most = max(changes, key=abs)
    where = f" in {len(changes)} of {len(repeats)} repeats" if len(repeats) > 1 else ""
    size = f"{'up to ' * (len(changes) > 1)}{units.percent(abs(most))} {'slower' if most > 0 else 'faster'}"
    return f"its steps drift: they became {size} from beginning to end{where}, and the mean depends on how long it ran"


def _trend(steps: Series) -> float | None:
    """Returns the change of the step time from the first to the last tenth of a repeat, as a fraction of its mean.

    Returns None if the change is small, or if no straight line explains most of the variation of the tenths' medians.
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
    """Returns the metric of the side's step time; None if there is none."""
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
    """Returns the times of the steady steps of each repeat, without evaluation, which is a phase of its own in a few.

    Of a group it reads the first few runs.
    """
    metric = _step_metric(side)
    if metric is None:
        return []
    found = []
    for run in side.runs[:RUNS_READ]:
        steps = run.series(metric) or [] if metric in run.metrics else []
        apart = run.series("phase_evaluation") or [np.zeros(len(times)) for times in steps]
        found += [times - evaluating for times, evaluating in zip(steps, apart, strict=True)]
    return [times for times in found if np.median(times) > 0]


def _scattered(side: Side) -> str | None:
    hosts = sorted({run.record.host for run in side.runs if run.record})
    return f"its runs come from {len(hosts)} machines, {', '.join(hosts)}, and vary as those do" if hosts[1:] else None


def few_repeats(sides: Sequence[Side]) -> list[str]:
    """Returns the warnings on sides with few repeats, which mean nothing where a sequential test chooses them."""
    return _about(sides, _few)


def _few(side: Side) -> str | None:
    number = sum(run.repeats for run in side.runs)
    if number >= ENOUGH_REPEATS:
        return None
    more = warnings.more_repeats(side.runs[0].settings) if side.runs[0].record else "give a folder of logs"
    return warnings.lone_repeat(number, more) or f"{number} repeats only, whose interval is wide: {more}"


def _short(side: Side) -> str | None:
    """Returns a warning if a single repeat has too few independent steps for a valid interval, or None."""
    metric = _step_metric(side)
    if metric is None or len(side.runs) > 1 or side.runs[0].repeats > 1:
        return None
    steps, worth = side.runs[0].metrics[metric].n, side.runs[0].metrics[metric].effective_n
    if worth is None or worth >= ENOUGH_STEPS:
        return None
    more = warnings.more_steps(side.runs[0].settings) if side.runs[0].record else "give a longer log"
    independent = units.counted(round(worth), "independent one")
    said = f"its {steps} steady steps have the information of {independent}"
    return f"{said}, which are too few to tell how precise their mean is: {more}"


def _not_applied(side: Side) -> str | None:
    return warnings.not_applied({key: reason for run in side.runs for key, reason in run.summary.missed.items()})


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


def fell_apart(ours: Series, theirs: Series) -> bool:
    """Tells whether one loss fell and the other did not, from single runs that may have different seeds.

    The test compares how far each loss fell until the second half of the steps, from the first step or from the first
    tenth, whose mean is less noisy. One difference is enough. Seeds shift the level of a loss and rounding its last
    digits, but not how far it falls. The falls differ if their difference is more than half of the larger fall, more
    than the scatter of the steps allows (6 standard errors of independent steps, because steps may be correlated), and
    more than bf16 resolves.
    """
    return any(_falls_apart(ours, theirs, start) for start in (1, len(ours) // 10))


def _falls_apart(ours: Series, theirs: Series, start: int) -> bool:
    falls = [losses[:start].mean() - _late(losses) for losses in (ours, theirs)]
    error = np.hypot(scatter(ours), scatter(theirs)) * np.sqrt(1 / start + 2 / len(ours))
    resolution = BF16_STEP * max(abs(ours[0]), abs(theirs[0]))
    return bool(abs(falls[0] - falls[1]) > max(0.5 * max(map(abs, falls)), 6 * error, resolution))


def scatter(losses: Series) -> float:
    """Returns the standard deviation of a step's loss, from successive differences, which ignore a steady fall."""
    return float(1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(losses))))


OF_TIMES: Sequence[Check] = (
    _throttled,
    _contended,
    _unsettled,
    _unclosed,
    _odd,
    _spikes,
    _levels,
    _drift,
    _few,
    _short,
)
"""The checks of times, which do not apply to counts."""
