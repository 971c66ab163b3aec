"""Tries the fixes of a diagnosis: runs with them, interleaved with one without, then all that helped at once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpubench.benchmark import Outcome
from gpubench.comparison.result import Comparisons, Verdict
from gpubench.configuration import Configuration
from gpubench.dotkeys import flatten
from gpubench.errors import GpubenchError, Interrupted
from gpubench.findings import Combination, Finding, Findings, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.logs import MODIFIABLE
from gpubench.report.finding_phrases import options

OUTCOMES: dict[str, TrialOutcome] = {"faster": "confirmed", "slower": "worse", "equivalent": "no effect"}
"""Of a trial, by the verdict on the throughput; any other settles nothing."""

LEAST = 3  # repeats: one pair has no interval, and Student's t over two is 12.7, over three 4.3

log = logging.getLogger("gpubench.verifying")


@dataclass(frozen=True)
class Bench:
    """What trying takes."""

    complete: Callable[[Configuration[Any]], Configuration[Any]]
    """Checks a configuration. Raises GpubenchError for one that cannot be run."""
    measure: Callable[[Sequence[Configuration[Any]]], Sequence[Outcome]]
    """Runs configurations, interleaved; one that fails leaves the others alone."""
    judge: Callable[[Outcome, Outcome], Comparisons | None]
    """The second against the first; None where one measured nothing."""


@dataclass(frozen=True)
class Tried:
    findings: Findings
    stopped: Interrupted | None = None
    """The user has had enough; the findings hold what was tried until then."""


def verify(profiled: Configuration[Any], findings: Findings, bench: Bench) -> Tried:
    """`findings` with what each fix really saves, and which settings to keep. `profiled` has no gaps."""
    base = unrecorded(profiled)
    try:
        findings = _each(base, findings, bench)
        return Tried(_together(base, findings, bench))
    except (Interrupted, KeyboardInterrupt) as error:  # the second between two measurements
        stopped = error if isinstance(error, Interrupted) else Interrupted("interrupted", "what was measured is kept")
        return Tried(msgspec.structs.replace(findings, interrupted=True), stopped)


def unrecorded(profiled: Configuration[Any]) -> Configuration[Any]:
    """The run that was profiled, as what fixes are laid beside: without what needs no clock."""
    settings = profiled.settings
    given = Configuration(settings, dict.fromkeys(flatten(settings.model_dump()), "the profiled run"))
    changes = {
        "experiment": f"{settings.experiment}-verify",
        "profiling.enabled": False,
        "measurement.repeats": max(LEAST, settings.measurement.repeats),
        "logging.graph": False,
        "measurement.count_flops": False,
        "measurement.measure_peak": False,
    }
    return given.with_overrides(changes, "--verify")


def _each(base: Configuration[Any], findings: Findings, bench: Bench) -> Findings:
    fixes = [finding.fix for finding in findings.findings if finding.fix]
    trials = iter(_try(base, fixes, bench))
    tried = [
        msgspec.structs.replace(finding, measured=next(trials)) if finding.fix else finding
        for finding in findings.findings
    ]
    return msgspec.structs.replace(findings, findings=tried)


def _together(base: Configuration[Any], findings: Findings, bench: Bench) -> Findings:
    """Beside one another, fixes may save less than the sum, or get in each other's way."""
    confirmed = [one for one in findings.findings if one.measured and one.measured.outcome == "confirmed"]
    if not confirmed:
        return findings
    confirmed.sort(key=_saved, reverse=True)
    best = confirmed[0]
    together: dict[str, Any] = {}
    for finding in confirmed:  # where two set the same key, what saved more has it
        together = finding.fix | together
    if together == best.fix:
        return msgspec.structs.replace(findings, keep=best.fix)
    (trial,) = _try(base, [together], bench)
    better = trial.outcome == "confirmed" and trial.saving is not None and trial.saving.estimate >= _saved(best)
    return msgspec.structs.replace(
        findings, combination=Combination(together, trial), keep=together if better else best.fix
    )


def _saved(finding: Finding) -> float:
    trial = finding.measured
    return trial.saving.estimate if trial and trial.saving else 0.0


def _try(base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench) -> list[Trial]:
    """One for each fix, all beside the same runs without any."""
    candidates: dict[int, Configuration[Any]] = {}
    trials: dict[int, Trial] = {}
    for number, fix in enumerate(fixes):
        log.log(MODIFIABLE, "trying %s (%d of %d)", options(fix), number + 1, len(fixes))
        try:
            candidates[number] = bench.complete(base.with_overrides(fix, "the fix of a finding"))
        except GpubenchError as error:
            trials[number] = Trial("failed", None, None, None, error.message)
    if candidates:
        without, *outcomes = bench.measure([base, *candidates.values()])
        for number, outcome in zip(candidates, outcomes, strict=True):
            trials[number] = _trial(without, outcome, bench)
    return [trials[number] for number in range(len(fixes))]


def _trial(without: Outcome, with_fix: Outcome, bench: Bench) -> Trial:
    """Raises Interrupted where the user ended the runs."""
    run, baseline = (str(outcome.recorder.writer.path) for outcome in (with_fix, without))
    ended = with_fix.error or without.error
    if isinstance(ended, Interrupted):
        raise ended
    if ended:
        return Trial("failed", None, run, baseline, ended.message)
    verdict = _throughput(bench.judge(without, with_fix))
    if verdict is None or not verdict.ratio:
        return Trial("failed", None, run, baseline, "no step was measured")
    low, high = sorted(1 - 1 / ratio for ratio in verdict.interval) if verdict.interval else (None, None)
    saving = Saving(1 - 1 / verdict.ratio, low, high)
    return Trial(OUTCOMES.get(verdict.verdict, "inconclusive"), saving, run, baseline, verdict.reason)


def _throughput(comparisons: Comparisons | None) -> Verdict | None:
    """Of throughput, as a fix may change what is done in a step."""
    found = comparisons.comparisons[0].verdicts if comparisons else []
    return next((verdict for verdict in found if verdict.metric == "throughput"), None)
