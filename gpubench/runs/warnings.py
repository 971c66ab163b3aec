"""All warnings that a run's figures are incomplete or less reliable than they look, with the conditions for each.

Each function below `collected` returns the sentence of one warning, or None if its condition does not hold.
`compare.warnings` has those that only a comparison makes, and repeats some of these with the name of a side.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from gpubench import units
from gpubench.events import MOST_PHASES, OTHER, FlopsCounted, PeakMeasured
from gpubench.metrics import Metric
from gpubench.runs.other_load import STEAL, OtherLoad
from gpubench.runs.steps import SteadyWindow, StepSamples, common_level

CLOSURE_LIMIT = 0.005  # largest closure error, as a fraction of the wall time
LEAST_SAID = 0.05  # cores; processes that use less are not named
OFTEN = 5  # evaluations in a repeat whose share of the time is known well
LARGE = 1.5  # factor between two levels of the steps that is told even if it is in a minority of the repeats
OWN_SHARE = 0.01  # of a step; a smaller share of gpubench itself is not said
SHORT = 1.0  # seconds; a shorter repeat is longer with more steps before more repeats are worth their start
MORE = "raise --repeats"


Settings = Mapping[str, object]
"""The settings of a run by dot-key. What a warning advises is possible beside them."""
NONE: Settings = {}


def more_steps(settings: Settings) -> str:
    """Returns how to measure more steps; `--steps all` measures all that a program has."""
    return "let the program run longer" if settings.get("training.steps") == "all" else "raise --steps"


def longer(settings: Settings) -> str:
    """Returns how to measure steps after the warm-up."""
    return f"raise training.warmup_steps or {more_steps(settings).removeprefix('raise ')}"


def more_repeats(settings: Settings) -> str:
    """Returns how to measure more repeats; a target precision decides their number, up to a limit."""
    return "raise measurement.max_repeats" if settings.get("measurement.target_precision") else MORE


def of_training(
    windows: Sequence[SteadyWindow],
    metrics: Mapping[str, Metric],
    throttled: Mapping[str, float],
    *,
    unknown_peak: tuple[str, str] | None,
    flops: FlopsCounted | None,
    measured_peak: PeakMeasured | None,
    diverged: int | None,
    samples: StepSamples | None = None,
    settings: Settings = NONE,
) -> list[str]:
    """Returns the warnings on training, in the order of summary.json.

    `diverged` is the first step from which on no known loss of a repeat is finite; None if there is none.
    `unknown_peak` is the GPU and the precision whose published peak is unknown; None if it is known or not needed.
    `settings` are those of the run.
    """
    return collected(
        lone_repeat(len(windows), more_repeats(settings)),
        held_down(throttled),
        not_settled([window.settled for window in windows], longer(settings)),
        level_changed(windows),
        not_closed(metrics["closure_error"].repeats if "closure_error" in metrics else ()),
        contradictory(metrics.get("throughput"), metrics.get("step_time"), samples),
        not_finite(diverged),
        skipped_steps(metrics["skipped_steps"].repeats if "skipped_steps" in metrics else ()),
        no_mfu(unknown_peak),
        no_flop_count(flops),
        no_measured_peak(measured_peak),
    )


def on_noise(
    load: OtherLoad | None, throughput: Metric | None, windows: Sequence[SteadyWindow], settings: Settings = NONE
) -> list[str]:
    """Returns the warnings on noise, the most important first. Reports show them beside the figures.

    `settings` are those of the run.
    """
    return collected(too_noisy(throughput, windows, settings), contended(load), others_on_gpus(load))


def collected(*warnings: str | None) -> list[str]:
    """Returns the warnings whose condition holds."""
    return [warning for warning in warnings if warning]


# Of any command


def lone_repeat(repeats: int, more: str = MORE) -> str | None:
    return f"one repeat only, so the variation between processes is unknown: {more}" if repeats == 1 else None


def held_down(shares: Mapping[str, float]) -> str | None:
    """Warns of any time with throttled clocks. `shares` maps each reason to its share of the steady time."""
    reasons = [f"{reason} for {units.percent(share)}" for reason, share in Counter(shares).most_common() if share]
    return f"clocks were throttled by {', '.join(reasons)} of the steady time" if reasons else None


def too_noisy(metric: Metric | None, windows: Sequence[SteadyWindow], settings: Settings = NONE) -> str | None:
    """Warns of an interval that is wider than a factor of two.

    `windows` are the steady steps of each repeat, and `settings` are those of the run.
    """
    if metric is None or metric.interval is None or not metric.too_noisy:
        return None
    repeats = units.counted(len(metric.repeats), "repeat")
    said = f"{units.words(metric.name)} varies too much over {repeats} to quote it"
    shortest = min((window.end - window.start for window in windows), default=SHORT)
    if shortest < SHORT:
        return f"{said}: the shortest one measured {units.seconds(shortest)}; {more_steps(settings)}"
    return f"{said}: {more_repeats(settings)}, or use a quieter machine"


def contended(load: OtherLoad | None) -> str | None:
    """Warns of other processes that kept cores busy, or of a hypervisor that ran other guests, and of the effect.

    The limits are `OtherLoad.busy` and `other_load.STEAL`.
    """
    if load is None:
        return None
    if load.busy:
        named = ", ".join(name for name, cores in load.processes.items() if cores >= LEAST_SAID)
        said = f"other processes kept {load.cores:.1f} cores busy while it ran{f' ({named})' if named else ''}"
    elif load.steal and load.steal > STEAL:
        said = f"the hypervisor gave {units.percent(load.steal)} of the CPU to other guests while it ran"
    else:
        return None
    if load.slowdown is None:
        return said
    return f"{said}: its steps may have taken up to {units.times(load.slowdown)} as long as on an idle machine"


def others_on_gpus(load: OtherLoad | None) -> str | None:
    """Warns of any check that found other processes on the run's GPUs."""
    if load is None or not load.gpu_share:
        return None
    return f"other processes were on its GPUs in {units.percent(load.gpu_share)} of the checks around its repeats"


def imprecise(throughput: Metric | None, target: float | None, repeats: int, most: int) -> str | None:
    """Warns that the target precision was not reached, once all of the `most` repeats that were allowed are made.

    `target` is the wanted relative half-width of the throughput's interval; None if none was wanted.
    """
    if throughput is None or target is None or repeats < most:
        return None
    reached = throughput.reach
    if reached is not None and reached <= target:
        return None
    known = "has no interval" if reached is None else f"is known to {units.percent(reached)}"
    return f"the throughput {known}, and the target is {units.percent(target)}: raise measurement.max_repeats"


# Of training


def evaluated_rarely(steps: int, of: int, settings: Settings = NONE) -> str | None:
    """Warns of an evaluation in a few of the steady steps of a repeat: one more or less changes its time notably."""
    if not 0 < steps < OFTEN:
        return None
    return f"evaluation is in {steps} of {of} steady steps of a repeat, so its time is rough: {more_steps(settings)}"


def not_applied(missed: Mapping[str, str]) -> str | None:
    """Warns of settings that found nothing to change in a program. `missed` has the reason for each."""
    if not missed:
        return None
    return "; ".join(f"{key} was not applied: {reason}" for key, reason in missed.items())


def compiled_within(compiled: int, steps: int, settings: Settings = NONE) -> str | None:
    """Warns of steady steps in which torch.compile compiled code of a program; `steps` is the number of all."""
    if not compiled:
        return None
    said = f"torch.compile compiled code in {compiled} of {steps} steady steps, which their times include"
    return f"{said}: {longer(settings)}"


def own_share(time: Metric | None, share: Metric | None) -> str | None:
    """Warns of a program in whose steps gpubench itself takes more than OWN_SHARE, by its CPU time in a step."""
    if time is None or share is None or share.estimate <= OWN_SHARE:
        return None
    return (
        f"gpubench itself took {units.percent(share.estimate)} of a step ({units.seconds(time.estimate)} of CPU time), "
        "by which the program is faster without it: put more work into a step, such as a larger batch, to make the "
        "share small"
    )


def not_settled(settled: Sequence[bool], advice: str | None) -> str | None:
    """Warns of repeats that have steps of the warm-up left. `settled` has one entry per repeat."""
    number = settled.count(False)
    said = f"{number} of {units.counted(len(settled), 'repeat')} may not be past the warm-up"
    return (f"{said}: {advice}" if advice else said) if number else None


def level_changed(windows: Sequence[SteadyWindow]) -> str | None:
    """Warns of steps that take another time from some step on: in half of the repeats, or by a factor of LARGE."""
    found = common_level(windows)
    if found is None:
        return None
    level, alike = found
    if 2 * alike < len(windows) and max(level.factor, 1 / level.factor) < LARGE:
        return None
    place = f" in {alike} of {len(windows)} repeats" if len(windows) > 1 else ""
    if level.factor >= 1:
        said = f"from step {level.step} on a step takes {units.digits(level.factor)} times as long"
    else:
        said = f"up to step {level.step} a step takes {units.digits(1 / level.factor)} times as long as from there on"
    return f"{said}{place}, so that the mean depends on how long the program ran"


def not_closed(errors: Sequence[float]) -> str | None:
    """Warns of a closure error above CLOSURE_LIMIT.

    `errors` holds for each repeat the difference between the sum of its steps and the wall time, as a fraction.
    """
    worst = max(errors, default=0.0)
    if worst <= CLOSURE_LIMIT:
        return None
    return f"phases, steps and wall time disagree by {units.percent(worst)}"


def contradictory(throughput: Metric | None, step_time: Metric | None, samples: StepSamples | None) -> str | None:
    """Warns of a throughput that is not that of the mean samples of a step over the mean step time.

    They are means over repeats, so that they may differ by as much as the repeats do.
    """
    if throughput is None or step_time is None or samples is None or not throughput.estimate:
        return None
    spread = max(throughput.repeats) / min(throughput.repeats) - 1 if min(throughput.repeats) > 0 else math.inf
    error = abs(samples.mean / step_time.estimate / throughput.estimate - 1)
    if error <= CLOSURE_LIMIT + spread:
        return None
    return (
        f"{samples.mean:.4g} samples in a mean step of {units.seconds(step_time.estimate)} are not the throughput: "
        f"they differ by {units.percent(error)}"
    )


def not_finite(step: int | None) -> str | None:
    """Warns of losses that are not finite from `step` on; None if there are none."""
    if step is None:
        return None
    return f"the loss is not finite from step {step} on (counting from 0)"


def unanswered(errors: Mapping[str, str]) -> list[str]:
    """Warns of each query of a device that failed in a program of the user, with its error."""
    return [
        f"unreliable: PyTorch could not tell {query} ({error}); what depends on it is unknown, or by the CPU's clock"
        for query, error in errors.items()
    ]


def skipped_steps(skipped: Sequence[float]) -> str | None:
    """Warns of any steady step whose update the gradient scaler skipped. `skipped` has one count per repeat."""
    number = sum(skipped)
    said = f"the gradient scaler skipped {number:.0f} steady steps: they take time but count no samples"
    return said if number else None


def too_few_latencies(fewest: int, needed: Mapping[str, int], settings: Settings = NONE) -> str | None:
    """Warns of quantiles that a repeat with `fewest` steps does not tell. `needed` has the steps that each takes."""
    if not needed:
        return None
    named = " and ".join(f"{units.words(name)} ({steps} steps)" for name, steps in needed.items())
    return f"no {named}: the shortest repeat has {units.counted(fewest, 'steady step')}: {more_steps(settings)}"


def no_mfu(unknown_peak: tuple[str, str] | None) -> str | None:
    if unknown_peak is None:
        return None
    gpu, precision = unknown_peak
    return f"no MFU: the dense {precision} peak of {gpu!r} is unknown"


def no_flop_count(flops: FlopsCounted | None) -> str | None:
    return f"no FLOP count: {flops.reason}" if flops and flops.reason else None


def no_measured_peak(peak: PeakMeasured | None) -> str | None:
    return f"no measured peak: {peak.reason}" if peak and peak.reason else None


def too_many_phases(unnamed: int) -> str | None:
    """Warns of phases beyond the largest number that is kept by name."""
    if not unnamed:
        return None
    number = f"{unnamed} or more" if unnamed >= MOST_PHASES else str(unnamed)
    return (
        f"the steps have {MOST_PHASES} phases and {number} more, whose time is in {OTHER!r}: give regions that recur "
        "the same name"
    )
