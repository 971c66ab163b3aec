"""Tries the fixes of a profile: runs with them, interleaved with one without, then all that helped at once."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gpubench.configuration import Configuration
from gpubench.findings import Combination, Findings, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.host.benchmark import Outcome
from gpubench.trying import fixes
from gpubench.trying.bench import Bench, as_it_was, candidates, directory, stop_if_interrupted

OUTCOMES: dict[str, TrialOutcome] = {"faster": "confirmed", "slower": "worse", "equivalent": "no effect"}
"""Of a trial, by the verdict on the throughput; any other settles nothing."""

LEAST = 3  # repeats: one pair has no interval, and Student's t over two is 12.7, over three 4.3


def verify(profiled: Configuration[Any], findings: Findings, bench: Bench) -> Iterator[Findings]:
    """`findings` with what each fix really saves, then with what all do and which settings to keep.

    `profiled` has no gaps. Raises Interrupted where the user has had enough: what was yielded until then stands.
    """
    base = unrecorded(profiled)
    findings = fixes.with_trials(findings, _try(base, fixes.proposed(findings), bench))
    found = fixes.confirmed(findings)
    both, best = fixes.together(found), found[0] if found else None
    findings = msgspec.structs.replace(findings, keep=best.fix if best else {})
    yield findings
    if best and both != best.fix:
        (trial,) = _try(base, [both], bench)
        better = trial.outcome == "confirmed" and fixes.saved(trial) >= fixes.saved(best.measured)
        keep = both if better else best.fix
        yield msgspec.structs.replace(findings, combination=Combination(both, trial), keep=keep)


def unrecorded(profiled: Configuration[Any]) -> Configuration[Any]:
    """The run that was profiled, as what fixes are laid beside: without what needs no clock."""
    changes = {
        "profiling.enabled": False,
        "measurement.repeats": max(LEAST, profiled.settings.measurement.repeats),
        "logging.graph": False,
        "measurement.count_flops": False,
        "measurement.measure_peak": False,
    }
    return as_it_was(profiled, changes)


def _try(base: Configuration[Any], tried: Sequence[dict[str, Any]], bench: Bench) -> list[Trial]:
    """One for each fix, all beside the same runs without any."""
    runs, refused = candidates(base, tried, bench)
    trials = {number: Trial("failed", None, None, None, error.message) for number, error in refused.items()}
    if runs:
        without, *outcomes = bench.time([base, *runs.values()])
        stop_if_interrupted([without, *outcomes])
        for number, outcome in zip(runs, outcomes, strict=True):
            trials[number] = _trial(without, outcome, bench)
    return [trials[number] for number in range(len(tried))]


def _trial(without: Outcome, with_fix: Outcome, bench: Bench) -> Trial:
    run, baseline = directory(with_fix), directory(without)
    if ended := with_fix.error or without.error:
        return Trial("failed", None, run, baseline, ended.message)
    verdict = bench.throughput(without, with_fix)
    if verdict is None or not verdict.ratio:
        return Trial("failed", None, run, baseline, "no step was measured")
    low, high = sorted(1 - 1 / ratio for ratio in verdict.interval) if verdict.interval else (None, None)
    saving = Saving(1 - 1 / verdict.ratio, low, high)
    return Trial(OUTCOMES.get(verdict.verdict, "inconclusive"), saving, run, baseline, verdict.reason)
