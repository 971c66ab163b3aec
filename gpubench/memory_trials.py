"""Runs that hold a memory run to its word: fixes and batch sizes on the device itself, in fresh processes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpubench.benchmark import Outcome
from gpubench.configuration import Configuration
from gpubench.dotkeys import flatten
from gpubench.errors import GpubenchError, Interrupted, OutOfMemory, WorkerLost
from gpubench.findings import Findings, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.logs import MODIFIABLE
from gpubench.memory.batch_sizes import BatchSizes, Confirmed, Speed, overrides, worth_timing
from gpubench.memory.trades import Trade, Trades, weigh
from gpubench.memory_recording import MemoryRecorder
from gpubench.report.finding_phrases import options
from gpubench.settings import TrainSettings

NOTABLE = 0.005
"""Of the peak: what changes less is no effect."""
MOST_TRIES = 8
"""Batch sizes that are run, once one fits, to come closer to the largest that does."""
FINE = 0.05
"""Of the batch: closer they do not come."""
TIMED_STEPS = 10
REPEATS = 3
ROUGHLY = 2
"""Repeats of each batch size: halves differ by more than what two tell."""

log = logging.getLogger("gpubench.memory")


@dataclass(frozen=True)
class Bench:
    """What trying takes."""

    complete: Callable[[Configuration[Any]], Configuration[Any]]
    """Checks a configuration. Raises GpubenchError for one that cannot be run."""
    follow: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Memory runs; one that fails leaves the others alone."""
    time: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Timed runs, interleaved; one that fails leaves the others alone."""


@dataclass(frozen=True)
class Verified:
    findings: Findings
    trades: Trades


def verify(
    followed: Outcome,
    run: Configuration[Any],
    findings: Findings,
    bench: Bench,
    keep: Callable[[Verified], None] = lambda found: None,
) -> Verified:
    """What each fix saves and costs beside the run that was followed, and all of them together.

    `keep` is given what is known before anything is timed. Raises Interrupted where the user has had enough.
    """
    base = _base(run)
    fixes = [finding.fix for finding in findings.findings if finding.fix]
    together = {key: value for fix in reversed(fixes) for key, value in fix.items()}
    tried = [*fixes, together] if len(fixes) > 1 and together not in fixes else fixes
    if not tried:
        return Verified(findings, weigh([_trade({}, followed, None)]))
    log.log(MODIFIABLE, "trying %s", "; ".join(options(fix) for fix in tried))
    candidates = {number: made for number, fix in enumerate(tried) if (made := _completed(base, fix, bench))}
    outcomes = dict(zip(candidates, bench.follow(list(candidates.values())), strict=True))
    _stop_if_interrupted(outcomes.values())
    keep(_judged(followed, findings, tried, outcomes, None, {}))
    ran = [number for number, outcome in outcomes.items() if not outcome.error]
    without, *timed = bench.time(
        [timed_of(one, {}, REPEATS) for one in (base, *(candidates[number] for number in ran))]
    )
    _stop_if_interrupted([without, *timed])
    return _judged(followed, findings, tried, outcomes, without, dict(zip(ran, timed, strict=True)))


def _judged(
    followed: Outcome,
    findings: Findings,
    tried: Sequence[dict[str, Any]],
    outcomes: Mapping[int, Outcome],
    without: Outcome | None,
    times: Mapping[int, Outcome],
) -> Verified:
    """`outcomes` and `times` are of the fixes that were tried, by their place; a fix without one could not be run."""
    trades = [_trade({}, followed, without)]
    trades += [_trade(fix, outcomes.get(number), times.get(number)) for number, fix in enumerate(tried)]
    trials = (_trial(followed, outcomes.get(number), without, times.get(number)) for number in range(len(tried)))
    judged = [
        msgspec.structs.replace(finding, measured=next(trials)) if finding.fix else finding
        for finding in findings.findings
    ]
    return Verified(msgspec.structs.replace(findings, findings=judged), weigh(trades))


def confirm(
    found: BatchSizes, run: Configuration[Any], bench: Bench, keep: Callable[[BatchSizes], None] = lambda found: None
) -> tuple[BatchSizes, Outcome | None]:
    """Runs the largest batch that should fit, and smaller ones until one does; then times it, and halves of it.

    Returns the run of the largest that fits as well. `keep` is given what is known after each run. Raises Interrupted
    where the user has had enough, and the error of a run that failed for another reason than its memory.
    """
    if found.largest is None:
        return found, None
    base, flat = _base(run), flatten(run.settings.model_dump(mode="json"))
    best: Outcome | None = None
    good, bad, candidate = 0, found.largest + 1, found.largest
    while good < candidate < bad and (not good or len(found.confirmed) < MOST_TRIES):
        (outcome,) = bench.follow([base.with_overrides(overrides(candidate, flat), "a batch to confirm")])
        _stop_if_interrupted([outcome])
        if outcome.error and not isinstance(outcome.error, OutOfMemory | WorkerLost):
            raise outcome.error
        total = peak_of(outcome)
        fits = total is not None and total <= found.limit
        reason = outcome.error.message if outcome.error else None if fits else "more than the margin leaves"
        good, bad, best = (candidate, bad, outcome) if fits else (good, candidate, best)
        confirmed = [*found.confirmed, Confirmed(candidate, total, reason)]
        found = msgspec.structs.replace(found, largest=good or None, confirmed=confirmed)
        keep(found)
        if good and bad - good <= max(1, FINE * good):
            break
        candidate = (good + bad) // 2
    if not good:
        return found, None
    sizes = sorted(worth_timing(good))
    outcomes = bench.time([timed_of(base, overrides(size, flat), ROUGHLY) for size in sizes])
    _stop_if_interrupted(outcomes)
    speeds = [
        Speed(size, throughput.estimate)
        for size, outcome in zip(sizes, outcomes, strict=True)
        if (throughput := outcome.summary.get("throughput"))
    ]
    return msgspec.structs.replace(found, speeds=speeds), best


def _base(run: Configuration[Any]) -> Configuration[Any]:
    """The run as it was, without gaps, to be changed."""
    settings = run.settings
    given = Configuration(settings, dict.fromkeys(flatten(settings.model_dump()), "the run"))
    changes = {
        "experiment": f"{settings.experiment}-trials",
        "memory.find_batch_size": False,
        "memory.explain": False,
        "memory.advise": False,
    }
    return given.with_overrides(changes, "a trial")


def timed_of(run: Configuration[Any], changes: dict[str, Any], repeats: int) -> Configuration[TrainSettings]:
    """The same as a run of train-bench, to be timed."""
    own = {key: value for key, value in run.settings.model_dump().items() if key != "memory"}
    origins = {key: origin for key, origin in run.origins.items() if not key.startswith("memory.")}
    quick = {"measurement.count_flops": False, "logging.graph": False, "training.steps": TIMED_STEPS}
    timed = Configuration(TrainSettings.model_validate(own), origins)
    return timed.with_overrides(quick | {"measurement.repeats": repeats} | changes, "a trial")


def _completed(base: Configuration[Any], fix: dict[str, Any], bench: Bench) -> Configuration[Any] | None:
    try:
        return bench.complete(base.with_overrides(fix, "the fix of a finding"))
    except GpubenchError as error:
        log.warning("%s cannot be run: %s", options(fix), error.message)
        return None


def peak_of(outcome: Outcome | None) -> int | None:
    """Bytes that the fullest rank's device must have."""
    recorder = outcome.recorder if outcome and not outcome.error else None
    if not isinstance(recorder, MemoryRecorder) or not recorder.footprints:
        return None
    return max(found.most for found in recorder.footprints)


def _trade(fix: dict[str, Any], followed: Outcome | None, timed: Outcome | None) -> Trade:
    throughput = timed.summary.get("throughput") if timed and not timed.error else None
    error = next((one.error for one in (followed, timed) if one and one.error), None)
    reason = error.message if error else None if followed else "these settings do not go together"
    return Trade(
        fix,
        peak_of(followed),
        throughput.estimate if throughput else None,
        interval=throughput.interval if throughput else None,
        reason=reason,
    )


def _trial(before: Outcome, after: Outcome | None, without: Outcome | None, timed: Outcome | None) -> Trial:
    baseline, run = str(before.recorder.writer.path), str(after.recorder.writer.path) if after else None
    peaks = peak_of(before), peak_of(after)
    if peaks[0] is None or peaks[1] is None:
        reason = after.error.message if after and after.error else "these settings do not go together"
        return Trial("failed", None, run, baseline, reason)
    saved = 1 - peaks[1] / peaks[0]
    outcome: TrialOutcome = "confirmed" if saved > NOTABLE else "worse" if saved < -NOTABLE else "no effect"
    return Trial(outcome, Saving(saved), run, baseline, _paid(without, timed))


def _paid(without: Outcome | None, timed: Outcome | None) -> str | None:
    """What the fix costs in time, in words; a change within the repeats' own spread is none."""
    before, after = (one.summary.get("throughput") if one else None for one in (without, timed))
    if before is None or after is None:
        return None
    if (
        before.interval
        and after.interval
        and max(before.interval[0], after.interval[0]) <= min(before.interval[1], after.interval[1])
    ):
        return "throughput not told apart"
    return f"throughput {100 * (after.estimate / before.estimate - 1):+.1f} %"


def _stop_if_interrupted(outcomes: Any) -> None:
    for outcome in outcomes:
        if isinstance(outcome.error, Interrupted):
            raise outcome.error
