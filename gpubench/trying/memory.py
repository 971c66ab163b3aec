"""Tries the advice of a memory run: what each fix saves on the device itself, and what it does to the speed."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpubench.configuration import Configuration
from gpubench.errors import GpubenchError
from gpubench.findings import Combination, Cost, Findings, Judged, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.host.benchmark import Outcome
from gpubench.host.memory_recording import MemoryRecorder
from gpubench.memory.trades import Trade, Trades, weigh
from gpubench.settings import TrainSettings
from gpubench.trying import fixes
from gpubench.trying.bench import Bench, as_it_was, candidates, directory, stop_if_interrupted

NOTABLE = 0.005
"""Of the peak: what changes less is no effect."""
TIMED_STEPS = 10
REPEATS = 3
JUDGED: dict[str, Judged] = {"faster": "faster", "slower": "slower", "equivalent": "equivalent"}
"""Of a cost, by the verdict on the throughput; any other settles nothing."""

log = logging.getLogger("gpubench.trying")


@dataclass(frozen=True)
class MemoryBench(Bench):
    follow: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Memory runs; one that fails leaves the others alone."""


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


def verify(followed: Outcome, run: Configuration[Any], findings: Findings, bench: MemoryBench) -> Iterator[Tried]:
    """What each fix saves beside the run that was followed, what all that helped do together, and what that costs.

    Yields what is known before anything is timed, and after. Raises Interrupted where the user has had enough.
    """
    base = untold(run)
    without, tried = _Attempt({}, base, followed), _follow(base, fixes.proposed(findings), bench)
    found = _judged(findings, without, tried, bench)
    yield found
    both = fixes.together(fixes.confirmed(found.findings))
    if both and both not in [one.fix for one in tried]:
        tried += _follow(base, [both], bench)
        yield _judged(findings, without, tried, bench)
    if tried:
        without, *tried = _time([without, *tried], bench)
        yield _judged(findings, without, tried, bench)


def untold(run: Configuration[Any]) -> Configuration[Any]:
    """The run as it was, without what it is to say of others."""
    return as_it_was(run, {"memory.find_batch_size": False, "memory.explain": False, "memory.advise": False})


def timed(run: Configuration[Any], changes: dict[str, Any], repeats: int) -> Configuration[TrainSettings]:
    """The same as a run of train-bench, to be timed."""
    own = {key: value for key, value in run.settings.model_dump().items() if key != "memory"}
    origins = {key: origin for key, origin in run.origins.items() if not key.startswith("memory.")}
    length = {"training.steps": TIMED_STEPS, "training.epochs": None, "training.seconds": None}
    quick = length | {"measurement.count_flops": False, "logging.graph": False}
    found = Configuration(TrainSettings.model_validate(own), origins)
    return found.with_overrides(quick | {"measurement.repeats": repeats} | changes, "--verify")


def peak_of(outcome: Outcome | None) -> int | None:
    """Bytes that the fullest rank's device must have."""
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
    """What did not run is not timed."""
    ready = [number for number, one in enumerate(attempts) if one.run and not one.error]
    outcomes = bench.time([timed(run, {}, REPEATS) for number in ready if (run := attempts[number].run)])
    stop_if_interrupted(outcomes)
    found = dict(zip(ready, outcomes, strict=True))
    return [replace(one, timed=found.get(number)) for number, one in enumerate(attempts)]


def _judged(findings: Findings, without: _Attempt, tried: Sequence[_Attempt], bench: MemoryBench) -> Tried:
    """`tried` are the fixes in the order of the findings, and behind them all that helped at once if there is more."""
    trials = [_trial(without, one, bench) for one in tried]
    both = trials[len(fixes.proposed(findings)) :]
    found = msgspec.structs.replace(
        fixes.with_trials(findings, trials),
        combination=Combination(tried[-1].fix, both[0]) if both else None,
        keep=_keep(tried, trials),
    )
    return Tried(found, weigh([_trade(one) for one in (without, *tried)]))


def _keep(tried: Sequence[_Attempt], trials: Sequence[Trial]) -> dict[str, Any]:
    """What saves most and was not found to be slower. What only speed can buy is a trade, and the user's to make."""
    free = [
        (fixes.saved(trial), attempt.fix)
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


def _trial(without: _Attempt, attempt: _Attempt, bench: MemoryBench) -> Trial:
    run, baseline = (directory(one.followed) if one.followed else None for one in (attempt, without))
    before, after = peak_of(without.followed), peak_of(attempt.followed)
    if before is None or after is None:
        return Trial("failed", None, run, baseline, attempt.error.message if attempt.error else "nothing was followed")
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
