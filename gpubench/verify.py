"""Tries fixes: interleaves runs with a proposed change and runs without it, and judges the difference."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpubench.compare.result import Comparisons, Verdict
from gpubench.errors import GpubenchError, Interrupted, OutOfMemory, WorkerLost
from gpubench.findings import Combination, Cost, Finding, Findings, Judged, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.foreign_files import TRIALS
from gpubench.host.memory_recorder import MemoryRecorder
from gpubench.host.schedule import Outcome
from gpubench.logs import MODIFIABLE
from gpubench.memory.batch_sizes import BatchSizes, Confirmed, Speed, Trade, Trades, overrides, weigh, worth_timing
from gpubench.report.finding_phrases import options
from gpubench.settings.loading import FIX, THE_RUN, TRIAL, Configuration, flatten
from gpubench.settings.schema import CompletedTrainSettings

log = logging.getLogger("gpubench.verify")


@dataclass(frozen=True)
class Bench:
    complete: Callable[[Configuration[Any]], Configuration[Any]]
    """Checks a configuration. Raises GpubenchError for one that cannot be run."""
    time: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Runs configurations interleaved and times them. A run that fails does not end the others."""
    judge: Callable[[Outcome, Outcome], Comparisons | None]
    """Compares the second with the first; None if one of them has no measurements."""

    def throughput(self, without: Outcome, with_fix: Outcome) -> Verdict | None:
        """Returns the verdict on the throughput, because a fix may change the work of a step; None if there is none."""
        judged = self.judge(without, with_fix)
        found = judged.comparisons[0].verdicts if judged else []
        return next((verdict for verdict in found if verdict.metric == "throughput" and verdict.ratio), None)


def as_it_was(run: Configuration[Any], changes: Mapping[str, Any]) -> Configuration[Any]:
    """Returns the complete configuration of the run with `changes`, in the experiment of its trials."""
    settings = run.settings
    given = Configuration(settings, dict.fromkeys(flatten(settings.model_dump()), THE_RUN))
    return given.with_overrides({"experiment": settings.experiment + TRIALS} | dict(changes), TRIAL)


def candidates(
    base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench
) -> tuple[dict[int, Configuration[Any]], dict[int, GpubenchError]]:
    """Returns the configurations to run by the index of their fix, and the errors of fixes that cannot run."""
    runs: dict[int, Configuration[Any]] = {}
    refused: dict[int, GpubenchError] = {}
    for number, fix in enumerate(fixes):
        log.log(MODIFIABLE, "trying %s (%d of %d)", options(fix), number + 1, len(fixes))
        try:
            runs[number] = bench.complete(base.with_overrides(fix, FIX))
        except GpubenchError as error:
            refused[number] = error
    return runs, refused


def stop_if_interrupted(outcomes: Iterable[Outcome]) -> None:
    """Raises Interrupted if the user interrupted one of the runs."""
    for outcome in outcomes:
        if isinstance(outcome.error, Interrupted):
            raise outcome.error


def directory(outcome: Outcome) -> str:
    return str(outcome.recorder.writer.path)


def proposed(findings: Findings) -> list[dict[str, Any]]:
    return [finding.fix for finding in findings.findings if finding.fix]


def with_trials(findings: Findings, trials: Iterable[Trial]) -> Findings:
    """Returns the findings with a trial for each fix, in the order of `proposed`."""
    tried = iter(trials)
    judged = [
        msgspec.structs.replace(finding, measured=next(tried)) if finding.fix else finding
        for finding in findings.findings
    ]
    return msgspec.structs.replace(findings, findings=judged)


def confirmed(findings: Findings) -> list[Finding]:
    """Returns the findings with confirmed fixes, the largest saving first."""
    found = [finding for finding in findings.findings if finding.measured and finding.measured.outcome == "confirmed"]
    return sorted(found, key=lambda finding: saved(finding.measured), reverse=True)


def together(found: Sequence[Finding]) -> dict[str, Any]:
    """Returns all fixes as one set of overrides. If two change the same setting, the first one applies."""
    merged: dict[str, Any] = {}
    for finding in found:
        merged = finding.fix | merged
    return merged


def saved(trial: Trial | None) -> float:
    return trial.saving.estimate if trial and trial.saving else 0.0


OUTCOMES: dict[str, TrialOutcome] = {"faster": "confirmed", "slower": "worse", "equivalent": "no effect"}
"""The outcome of a trial by the verdict on the throughput. Any other verdict is inconclusive."""

LEAST = 3  # repeats; one pair has no interval, and Student's t is 12.7 for two pairs and 4.3 for three


def verify_speed(profiled: Configuration[Any], findings: Findings, bench: Bench) -> Iterator[Findings]:
    """Yields `findings` with the measured saving of each fix, then with that of all together and the settings to keep.

    `profiled` is complete. Raises Interrupted if the user interrupts; the results yielded until then are valid.
    """
    base = unrecorded(profiled)
    findings = with_trials(findings, _try(base, proposed(findings), bench))
    found = confirmed(findings)
    both, best = together(found), found[0] if found else None
    findings = msgspec.structs.replace(findings, keep=best.fix if best else {})
    yield findings
    if best and both != best.fix:
        (trial,) = _try(base, [both], bench)
        better = trial.outcome == "confirmed" and saved(trial) >= saved(best.measured)
        keep = both if better else best.fix
        yield msgspec.structs.replace(findings, combination=Combination(both, trial), keep=keep)


def unrecorded(profiled: Configuration[Any]) -> Configuration[Any]:
    """Returns the profiled run's configuration as a baseline for fixes, without profiling and untimed inspections."""
    changes = {
        "profiling.enabled": False,
        "measurement.repeats": max(LEAST, profiled.settings.measurement.repeats),
        "logging.graph": False,
        "measurement.count_flops": False,
        "measurement.measure_peak": False,
    }
    return as_it_was(profiled, changes)


def _try(base: Configuration[Any], tried: Sequence[dict[str, Any]], bench: Bench) -> list[Trial]:
    """Returns a trial for each fix, all compared with the same runs without fixes."""
    runs, refused = candidates(base, tried, bench)
    trials = {number: Trial("failed", None, None, None, error.message) for number, error in refused.items()}
    if runs:
        without, *outcomes = bench.time([base, *runs.values()])
        stop_if_interrupted([without, *outcomes])
        for number, outcome in zip(runs, outcomes, strict=True):
            trials[number] = _speed_trial(without, outcome, bench)
    return [trials[number] for number in range(len(tried))]


def _speed_trial(without: Outcome, with_fix: Outcome, bench: Bench) -> Trial:
    run, baseline = directory(with_fix), directory(without)
    if ended := with_fix.error or without.error:
        return Trial("failed", None, run, baseline, ended.message)
    verdict = bench.throughput(without, with_fix)
    if verdict is None or not verdict.ratio:
        return Trial("failed", None, run, baseline, "no step was measured")
    low, high = sorted(1 - 1 / ratio for ratio in verdict.interval) if verdict.interval else (None, None)
    saving = Saving(1 - 1 / verdict.ratio, low, high)
    return Trial(OUTCOMES.get(verdict.verdict, "inconclusive"), saving, run, baseline, verdict.reason)


NOTABLE = 0.005
"""The share of the peak below which a change counts as no effect."""
TIMED_STEPS = 10
REPEATS = 3
JUDGED: dict[str, Judged] = {"faster": "faster", "slower": "slower", "equivalent": "equivalent"}
"""The judgement of a cost by the verdict on the throughput. Any other verdict is inconclusive."""


@dataclass(frozen=True)
class MemoryBench(Bench):
    follow: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Follows the memory of configurations. A run that fails does not end the others."""


@dataclass(frozen=True)
class Tried:
    findings: Findings
    trades: Trades


@dataclass(frozen=True)
class _Attempt:
    """Settings that were tried, and the runs with them."""

    fix: dict[str, Any]
    run: Configuration[Any] | None = None
    followed: Outcome | None = None
    timed: Outcome | None = None
    refused: GpubenchError | None = None

    @property
    def error(self) -> GpubenchError | None:
        return self.refused or next((one.error for one in (self.followed, self.timed) if one and one.error), None)


def verify_memory(
    followed: Outcome, run: Configuration[Any], findings: Findings, bench: MemoryBench
) -> Iterator[Tried]:
    """Yields the saving of each fix compared with the followed run, that of all helpful fixes together, and the costs.

    Yields once before the timing and once after. Raises Interrupted if the user interrupts.
    """
    base = untold(run)
    without, tried = _Attempt({}, base, followed), _follow(base, proposed(findings), bench)
    found = _judged(findings, without, tried, bench)
    yield found
    both = together(confirmed(found.findings))
    if both and both not in [one.fix for one in tried]:
        tried += _follow(base, [both], bench)
        yield _judged(findings, without, tried, bench)
    if tried:
        without, *tried = _time([without, *tried], bench)
        yield _judged(findings, without, tried, bench)


def untold(run: Configuration[Any]) -> Configuration[Any]:
    """Returns the run's configuration without search for batch sizes, explanation and advice."""
    return as_it_was(run, {"memory.find_batch_size": False, "memory.explain": False, "memory.advise": False})


def timed(run: Configuration[Any], changes: dict[str, Any], repeats: int) -> Configuration[CompletedTrainSettings]:
    """Returns the configuration as a run of train-bench, for timing."""
    own = {key: value for key, value in run.settings.model_dump().items() if key != "memory"}
    origins = {key: origin for key, origin in run.origins.items() if not key.startswith("memory.")}
    length = {"training.steps": TIMED_STEPS, "training.epochs": None, "training.seconds": None}
    quick = length | {"measurement.count_flops": False, "logging.graph": False}
    found = Configuration(CompletedTrainSettings.model_validate(own), origins)
    return found.with_overrides(quick | {"measurement.repeats": repeats} | changes, "--verify")


def peak_of(outcome: Outcome | None) -> int | None:
    """Returns the largest peak of the ranks in bytes; None if it is unknown."""
    recorder = outcome.recorder if outcome and not outcome.error else None
    if not isinstance(recorder, MemoryRecorder) or not recorder.footprints:
        return None
    return max(found.most for found in recorder.footprints)


def _follow(base: Configuration[Any], tried: Sequence[dict[str, Any]], bench: MemoryBench) -> list[_Attempt]:
    runs, refused = candidates(base, tried, bench)
    outcomes = dict(zip(runs, bench.follow(list(runs.values())), strict=True))
    stop_if_interrupted(outcomes.values())
    return [
        _Attempt(fix, runs.get(number), outcomes.get(number), refused=refused.get(number))
        for number, fix in enumerate(tried)
    ]


def _time(attempts: Sequence[_Attempt], bench: MemoryBench) -> list[_Attempt]:
    """Times the attempts that ran, and returns all attempts."""
    ready = [number for number, one in enumerate(attempts) if one.run and not one.error]
    outcomes = bench.time([timed(run, {}, REPEATS) for number in ready if (run := attempts[number].run)])
    stop_if_interrupted(outcomes)
    found = dict(zip(ready, outcomes, strict=True))
    return [replace(one, timed=found.get(number)) for number, one in enumerate(attempts)]


def _judged(findings: Findings, without: _Attempt, tried: Sequence[_Attempt], bench: MemoryBench) -> Tried:
    """Judges the attempts.

    `tried` holds the fixes in the order of the findings, then the combination if there is one.
    """
    trials = [_memory_trial(without, one, bench) for one in tried]
    both = trials[len(proposed(findings)) :]
    found = msgspec.structs.replace(
        with_trials(findings, trials),
        combination=Combination(tried[-1].fix, both[0]) if both else None,
        keep=_keep(tried, trials),
    )
    return Tried(found, weigh([_trade(one) for one in (without, *tried)]))


def _keep(tried: Sequence[_Attempt], trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the settings that save most and are not slower. A saving that costs speed is left to the user."""
    free = [
        (saved(trial), attempt.fix)
        for attempt, trial in zip(tried, trials, strict=True)
        if trial.outcome == "confirmed" and trial.cost and trial.cost.verdict != "slower"
    ]
    return max(free, key=lambda one: one[0], default=(0.0, {}))[1]


def _trade(attempt: _Attempt) -> Trade:
    throughput = attempt.timed.summary.get("throughput") if attempt.timed and not attempt.timed.error else None
    return Trade(
        attempt.fix,
        peak_of(attempt.followed),
        throughput.estimate if throughput else None,
        interval=throughput.interval if throughput else None,
        reason=attempt.error.message if attempt.error else None,
    )


def _memory_trial(without: _Attempt, attempt: _Attempt, bench: MemoryBench) -> Trial:
    run, baseline = (directory(one.followed) if one.followed else None for one in (attempt, without))
    before, after = peak_of(without.followed), peak_of(attempt.followed)
    if before is None or after is None:
        return Trial(
            "failed", None, run, baseline, attempt.error.message if attempt.error else "no memory was followed"
        )
    saving = 1 - after / before
    outcome: TrialOutcome = "confirmed" if saving > NOTABLE else "worse" if saving < -NOTABLE else "no effect"
    return Trial(outcome, Saving(saving), run, baseline, cost=_cost(without.timed, attempt.timed, bench))


def _cost(without: Outcome | None, timed: Outcome | None, bench: MemoryBench) -> Cost | None:
    if without is None or timed is None or without.error or timed.error:
        return None
    verdict = bench.throughput(without, timed)
    if verdict is None or verdict.ratio is None:
        return None
    low, high = verdict.interval or (0.0, 0.0)
    interval = (low - 1, high - 1) if verdict.interval else None
    return Cost(JUDGED.get(verdict.verdict, "inconclusive"), verdict.ratio - 1, interval)


MOST_TRIES = 8
"""How many further batch sizes are run, once one fits, to approach the largest that fits."""
FINE = 0.05
"""The relative precision of the search for the largest batch."""
ROUGHLY = 2
"""The repeats of each batch size. Two are enough, because half the batch size makes a large difference."""
ORIGIN = "a batch to confirm"


@dataclass(frozen=True)
class Searched:
    found: BatchSizes
    best: Outcome | None
    """The run of the largest batch that fits; None if there is none."""


def confirm(found: BatchSizes, run: Configuration[Any], bench: MemoryBench) -> Iterator[Searched]:
    """Runs the largest batch that should fit, and smaller ones until one fits; then times it, and fractions of it.

    Yields the results after each run. Raises Interrupted if the user interrupts, and the error of a run that failed for
    another reason than its memory.
    """
    if found.largest is None:
        return
    base, flat = untold(run), flatten(run.settings.model_dump(mode="json"))
    best: Outcome | None = None
    good, bad, candidate = 0, found.largest + 1, found.largest
    while good < candidate < bad and (not good or len(found.confirmed) < MOST_TRIES):
        (outcome,) = bench.follow([base.with_overrides(overrides(candidate, flat), ORIGIN)])
        if outcome.error and not isinstance(outcome.error, OutOfMemory | WorkerLost):
            raise outcome.error
        total = peak_of(outcome)
        fits = total is not None and total <= found.limit
        reason = outcome.error.message if outcome.error else None if fits else "leaves too little memory free"
        good, bad, best = (candidate, bad, outcome) if fits else (good, candidate, best)
        confirmed = [*found.confirmed, Confirmed(candidate, total, reason)]
        found = msgspec.structs.replace(found, largest=good or None, confirmed=confirmed)
        yield Searched(found, best)
        if good and bad - good <= max(1, FINE * good):
            break
        candidate = (good + bad) // 2
    if not good:
        return
    sizes = sorted(worth_timing(good))
    outcomes = bench.time([timed(base, overrides(size, flat), ROUGHLY) for size in sizes])
    stop_if_interrupted(outcomes)
    speeds = [
        Speed(size, throughput.estimate)
        for size, outcome in zip(sizes, outcomes, strict=True)
        if (throughput := outcome.summary.get("throughput"))
    ]
    yield Searched(msgspec.structs.replace(found, speeds=speeds), best)
