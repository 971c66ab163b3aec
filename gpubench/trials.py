"""Tries proposed fixes and batch sizes: runs them interleaved with the unchanged run, and judges the difference."""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpubench import proof, units
from gpubench.bench import Bench, stop_if_interrupted
from gpubench.diagnosis.lines import lines_of
from gpubench.errors import GpubenchError, OutOfMemory, WorkerLost
from gpubench.findings import OUTCOMES, Combination, Cost, Finding, Findings, Judged, Saving, Trial
from gpubench.findings import Outcome as TrialOutcome
from gpubench.foreign_files import TRIALS
from gpubench.host.schedule import Outcome
from gpubench.kinds.memory.recorder import FootprintRecorder
from gpubench.logs import MODIFIABLE
from gpubench.memory.batch_sizes import BatchSizes, Confirmed, Speed, Trade, Trades, overrides, weigh, worth_timing
from gpubench.patches.result import FILE as PATCH_FILE
from gpubench.patches.result import ProvedPatch
from gpubench.report.findings import options
from gpubench.settings.commands import COMMANDS
from gpubench.settings.keys import FIX, PATCH, THE_RUN, TRIAL, flatten
from gpubench.settings.loading import Configuration

log = logging.getLogger("gpubench.trials")


def trial_of(run: Configuration[Any], changes: Mapping[str, Any]) -> Configuration[Any]:
    """The complete configuration of the run with `changes`, in the experiment for trials."""
    settings = run.settings
    base = Configuration(settings, dict.fromkeys(flatten(settings.model_dump()), THE_RUN))
    return base.with_overrides({"experiment": settings.experiment + TRIALS} | dict(changes), TRIAL)


def candidates(
    base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench
) -> tuple[dict[int, Configuration[Any]], dict[int, GpubenchError]]:
    """The configurations with the fixes, and the errors of fixes that cannot be run, by index of the fix."""
    runs: dict[int, Configuration[Any]] = {}
    refused: dict[int, GpubenchError] = {}
    for number, fix in enumerate(fixes):
        log.log(MODIFIABLE, "trying %s (%d of %d)", options(fix), number + 1, len(fixes))
        try:
            runs[number] = bench.complete(base.with_overrides(fix, FIX)).called(variant=options(fix))
        except GpubenchError as error:
            refused[number] = error
    return runs, refused


def directory(outcome: Outcome) -> str:
    return str(outcome.recorder.writer.path)


def proposed(findings: Findings) -> list[dict[str, Any]]:
    return [finding.fix for finding in findings.findings if finding.fix]


def with_trials(findings: Findings, trials: Iterable[Trial]) -> Findings:
    """Adds to the findings the trials of their fixes, which are in the order of `proposed`."""
    remaining = iter(trials)
    with_measured = [
        msgspec.structs.replace(finding, measured=next(remaining)) if finding.fix else finding
        for finding in findings.findings
    ]
    return msgspec.structs.replace(findings, findings=with_measured)


def confirmed(findings: Findings) -> list[Finding]:
    """The findings whose fix is confirmed, the largest saving first."""
    found = [finding for finding in findings.findings if finding.measured and finding.measured.outcome == "confirmed"]
    return sorted(found, key=lambda finding: saved(finding.measured), reverse=True)


def together(found: Sequence[Finding]) -> dict[str, Any]:
    """The fixes of all findings as one set of overrides. If two change the same setting, the first applies."""
    merged: dict[str, Any] = {}
    for finding in found:
        merged = finding.fix | merged
    return merged


def saved(trial: Trial | None) -> float:
    """The estimated saving of a trial, as a fraction; 0 if there is none."""
    return trial.saving.estimate if trial and trial.saving else 0.0


UNCHANGED = "without a fix"
"""What the run is called that the runs with fixes are compared with."""
LEAST_REPEATS = 3  # one repeat has no interval, and Student's t is 12.7 for two repeats and 4.3 for three


def verify_speed(profiled: Configuration[Any], findings: Findings, bench: Bench) -> Iterator[Findings]:
    """Runs each proposed fix, then all confirmed ones together.

    Yields `findings` with the measured savings and the settings to keep, once after each of the two. `profiled` is a
    complete configuration. Raises Interrupted if the user interrupts; the results yielded before are valid.
    """
    base = unrecorded(profiled)
    findings = with_trials(findings, _try(base, proposed(findings), bench))
    found = confirmed(findings)
    all_fixes, best = together(found), found[0] if found else None
    findings = msgspec.structs.replace(findings, keep=best.fix if best else {})
    yield findings
    if best and all_fixes != best.fix:
        (trial,) = _try(base, [all_fixes], bench)
        better = trial.outcome == "confirmed" and saved(trial) >= saved(best.measured)
        keep = all_fixes if better else best.fix
        yield msgspec.structs.replace(findings, combination=Combination(all_fixes, trial), keep=keep)


def try_patch(profiled: Configuration[Any], outcome: Outcome, bench: Bench) -> Iterator[Findings]:
    """Makes a patch of the program with the fixes to keep and with the edits that are faster, and runs it.

    The patch is in the run directory of the profile. Yields the findings once the edits have been tried, and with the
    patch, if there is one. Raises Interrupted if the user interrupts.
    """
    findings, program = outcome.recorder.findings, profiled.settings.program
    if findings is None or outcome.error or program.ref or program.patch:
        return
    kept = [one for one in confirmed(findings) if one.fix and one.fix.items() <= findings.keep.items()]
    parts = [proof.ProvedSettings(one.fix, _contribution(one.measured)) for one in kept]
    folder, base = outcome.recorder.writer.path, unrecorded(profiled)
    known = proof.PatchedProgram(program, outcome.recorder.source, program.command)
    profile = outcome.recorder.diagnosis.profile if outcome.recorder.diagnosis else None
    about = {
        name: lines_of(name, profile.ranks if profile else ())
        for name in proof.editable([one.id for one in findings.findings if not one.fix])
    }
    made = {
        name: proof.make([], known, folder, [proof.EditedFinding(name, lines)], _own_file(name))
        for name, lines in about.items()
    }
    tried = _try_edits({name: patch for name, patch in made.items() if patch.changed}, base, folder, bench)
    measured = {one.id: tried[one.id][1] for one in findings.findings if one.id in tried}
    findings = msgspec.structs.replace(
        findings,
        findings=[
            msgspec.structs.replace(one, measured=measured.get(one.id, one.measured)) for one in findings.findings
        ],
    )
    yield findings
    proved = {name: patch for name, (patch, _) in tried.items() if patch.is_proved}
    edits = [proof.EditedFinding(name, about[name], f"{patch.gain} alone") for name, patch in proved.items()]
    patch = proof.make(parts, known, folder, edits)
    left = {name: f"{one.where}; {one.found}" for name, (one, _) in tried.items() if name not in proved}
    left |= {name: one.left[name] for name, one in made.items() if name not in tried and name in one.left}
    patch = msgspec.structs.replace(patch, left=patch.left | left)
    if patch.changed:
        sides = [base, _patched(base, folder / PATCH_FILE, "patched", bench)]
        patch = proof.prove(patch, sides, bench, math.inf, None)
        proof.describe(patch, known, folder)
    if patch.changed or patch.left:
        yield msgspec.structs.replace(findings, patch=patch)


def _own_file(finding: str) -> str:
    """The name of the patch with the edit for one finding alone."""
    return f"{finding}.patch"


def _patched(base: Configuration[Any], file: Path, variant: str, bench: Bench) -> Configuration[Any]:
    return bench.complete(base.with_overrides({PATCH: os.path.relpath(file)}, FIX)).called(variant=variant)


def _try_edits(
    patches: Mapping[str, ProvedPatch], base: Configuration[Any], folder: Path, bench: Bench
) -> dict[str, tuple[ProvedPatch, Trial]]:
    """Runs the program with each patch, interleaved with runs without: what was found of each, by finding."""
    if not patches:
        return {}
    sides = [_patched(base, folder / _own_file(name), f"with the edit for {name}", bench) for name in patches]
    without, *outcomes = bench.run([base, *sides], independent=True)
    stop_if_interrupted([without, *outcomes])
    found = {}
    for (name, patch), outcome in zip(patches.items(), outcomes, strict=True):
        judged, trial = proof.judged(patch, [without, outcome], bench, None), _speed_trial({}, without, outcome, bench)
        if trial.outcome == "confirmed" and not judged.is_proved:
            trial = msgspec.structs.replace(trial, outcome="inconclusive", reason=judged.found)
        found[name] = judged, trial
    return found


def _contribution(trial: Trial | None) -> str:
    """What a confirmed trial has measured, in words."""
    if trial is None or trial.saving is None:
        return ""
    low, high = trial.saving.low, trial.saving.high
    interval = f" [{units.percent(low)}, {units.percent(high)}]" if low is not None and high is not None else ""
    return f"saves {units.percent(trial.saving.estimate)}{interval} of a step"


def unrecorded(profiled: Configuration[Any]) -> Configuration[Any]:
    """The configuration of the profiled run without profiling, as the baseline of fixes."""
    changes = {
        "profiling.enabled": False,
        "measurement.repeats": max(LEAST_REPEATS, profiled.settings.measurement.repeats),
        "logging.graph": False,
        "measurement.count_flops": False,
        "measurement.measure_peak": False,
    }
    return trial_of(profiled, profiled.takes(changes)).called(variant=UNCHANGED)


def _try(base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench) -> list[Trial]:
    runs, refused = candidates(base, fixes, bench)
    trials = {number: Trial("failed", None, None, None, error.message) for number, error in refused.items()}
    if runs:
        without, *outcomes = bench.run([base, *runs.values()], independent=True)
        stop_if_interrupted([without, *outcomes])
        for number, outcome in zip(runs, outcomes, strict=True):
            trials[number] = _speed_trial(fixes[number], without, outcome, bench)
    return [trials[number] for number in range(len(fixes))]


def _speed_trial(fix: Mapping[str, Any], without: Outcome, with_fix: Outcome, bench: Bench) -> Trial:
    run, baseline = directory(with_fix), directory(without)
    if error := with_fix.error or without.error:
        return Trial("failed", None, run, baseline, error.message)
    if missed := _missed(fix, with_fix):
        return Trial("not applied", None, run, baseline, missed)
    verdict = bench.throughput(without, with_fix)
    if verdict is None or verdict.ratio == 0:
        return Trial("failed", None, run, baseline, "no step was measured")
    if verdict.ratio is None:
        return Trial("inconclusive", None, run, baseline, verdict.reason)
    saving = Saving.of_throughput(verdict.ratio, verdict.interval)
    return Trial(OUTCOMES.get(verdict.verdict, "inconclusive"), saving, run, baseline, verdict.reason)


def _missed(fix: Mapping[str, Any], outcome: Outcome) -> str:
    """The reason why no setting of the fix changed anything in the run of a program; empty if one did."""
    missed = outcome.summary.missed
    return "; ".join(dict.fromkeys(missed[key] for key in fix)) if fix.keys() <= missed.keys() else ""


NOTABLE = 0.005
"""The smallest change of the peak that counts as an effect, as a fraction of the peak."""
TIMED_STEPS = 10
REPEATS = 3
JUDGED: dict[str, Judged] = {"faster": "faster", "slower": "slower", "equivalent": "equivalent"}
"""The judgement of a cost by the verdict on the throughput. With any other verdict it is inconclusive."""


@dataclass(frozen=True)
class TriedFixes:
    """The results of trying memory fixes: their savings, and what they cost in speed."""

    findings: Findings
    trades: Trades


@dataclass(frozen=True)
class _Attempt:
    """A fix that was tried, with its runs; an empty fix stands for the baseline."""

    fix: dict[str, Any]
    run: Configuration[Any] | None = None
    followed: Outcome | None = None
    """The run that recorded the memory."""
    timed: Outcome | None = None
    """The run that measured the speed."""
    refused: GpubenchError | None = None
    """The error if the fix cannot be run."""

    @property
    def missed(self) -> str:
        """Why no setting of the fix changed anything in the program; empty if one did."""
        return _missed(self.fix, self.followed) if self.fix and self.followed else ""

    @property
    def error(self) -> GpubenchError | None:
        return self.refused or next((run.error for run in (self.followed, self.timed) if run and run.error), None)


def verify_memory(followed: Outcome, run: Configuration[Any], findings: Findings, bench: Bench) -> Iterator[TriedFixes]:
    """Runs each memory fix and all confirmed ones together, and times all of them.

    The savings are relative to the `followed` run. Yields the results after each fix has run, after the combination has
    run, and after the timing. Raises Interrupted if the user interrupts.
    """
    base = memory_baseline(run)
    without, tried = _Attempt({}, base, followed), _follow(base, proposed(findings), bench)
    found = _judged(findings, without, tried, bench)
    yield found
    all_fixes = together(confirmed(found.findings))
    if all_fixes and all_fixes not in [attempt.fix for attempt in tried]:
        tried += _follow(base, [all_fixes], bench)
        yield _judged(findings, without, tried, bench)
    if any(not attempt.missed for attempt in tried):
        without, *tried = _time([without, *tried], bench.timing)
        yield _judged(findings, without, tried, bench)


def memory_baseline(run: Configuration[Any]) -> Configuration[Any]:
    """The configuration of the run without batch size search, explanation and advice."""
    unneeded = ("memory.find_batch_size", "memory.explain", "memory.advise")
    return trial_of(run, run.takes(dict.fromkeys(unneeded, False))).called(variant=UNCHANGED)


def timed(run: Configuration[Any], changes: dict[str, Any], repeats: int, bench: Bench) -> Configuration[Any]:
    """The configuration of a short run with the same settings and `changes` that `bench` times."""
    own = {key: value for key, value in run.settings.model_dump().items() if key != "memory"}
    origins = {key: origin for key, origin in run.origins.items() if not key.startswith("memory.")}
    length = {"training.steps": TIMED_STEPS, "training.epochs": None, "training.seconds": None}
    quick = length | {"measurement.count_flops": False, "logging.graph": False}
    found = Configuration(COMMANDS[bench.kind.command].model_validate(own), origins)
    changes = found.takes(quick) | {"measurement.repeats": repeats} | changes
    return bench.complete(found.with_overrides(changes, "--verify")).called(variant=run.labels.variant)


def peak_of(outcome: Outcome | None) -> int | None:
    """The peak in bytes, the largest of the ranks; None if the run failed or was not made."""
    recorder = outcome.recorder if outcome and not outcome.error else None
    if not isinstance(recorder, FootprintRecorder) or not recorder.footprints:
        return None
    return max(found.most for found in recorder.footprints)


def _follow(base: Configuration[Any], fixes: Sequence[dict[str, Any]], bench: Bench) -> list[_Attempt]:
    runs, refused = candidates(base, fixes, bench)
    outcomes = dict(zip(runs, bench.run_alone(list(runs.values())), strict=True))
    return [
        _Attempt(fix, runs.get(number), outcomes.get(number), refused=refused.get(number))
        for number, fix in enumerate(fixes)
    ]


def _time(attempts: Sequence[_Attempt], bench: Bench) -> list[_Attempt]:
    """Times the attempts that did not fail, and returns all attempts."""
    ready = [number for number, one in enumerate(attempts) if one.run and not one.error and not one.missed]
    runs = [timed(run, {}, REPEATS, bench) for number in ready if (run := attempts[number].run)]
    outcomes = bench.run(runs, independent=True)
    stop_if_interrupted(outcomes)
    found = dict(zip(ready, outcomes, strict=True))
    return [replace(attempt, timed=found.get(number)) for number, attempt in enumerate(attempts)]


def _judged(findings: Findings, without: _Attempt, tried: Sequence[_Attempt], bench: Bench) -> TriedFixes:
    """Combines the results of the attempts.

    `tried` has the fixes in the order of the findings, then the combination if there is one.
    """
    trials = [_memory_trial(without, attempt, bench) for attempt in tried]
    combined = trials[len(proposed(findings)) :]
    found = msgspec.structs.replace(
        with_trials(findings, trials),
        combination=Combination(tried[-1].fix, combined[0]) if combined else None,
        keep=_keep(tried, trials),
    )
    return TriedFixes(found, weigh([_trade(attempt) for attempt in (without, *tried)]))


def _keep(tried: Sequence[_Attempt], trials: Sequence[Trial]) -> dict[str, Any]:
    """The settings with the largest saving that is not slower. Others are left to the user."""
    free = [
        (saved(trial), attempt.fix)
        for attempt, trial in zip(tried, trials, strict=True)
        if trial.outcome == "confirmed" and trial.cost and trial.cost.verdict != "slower"
    ]
    return max(free, key=lambda pair: pair[0], default=(0.0, {}))[1]


def _trade(attempt: _Attempt) -> Trade:
    throughput = attempt.timed.summary.get("throughput") if attempt.timed and not attempt.timed.error else None
    return Trade(
        attempt.fix,
        peak_of(attempt.followed),
        throughput.estimate if throughput else None,
        interval=throughput.interval if throughput else None,
        reason=attempt.error.message if attempt.error else None,
    )


def _memory_trial(without: _Attempt, attempt: _Attempt, bench: Bench) -> Trial:
    run, baseline = (directory(each.followed) if each.followed else None for each in (attempt, without))
    before, after = peak_of(without.followed), peak_of(attempt.followed)
    if before is None or after is None:
        return Trial(
            "failed", None, run, baseline, attempt.error.message if attempt.error else "no memory was recorded"
        )
    if attempt.missed:
        return Trial("not applied", None, run, baseline, attempt.missed)
    saving = 1 - after / before
    outcome: TrialOutcome = "confirmed" if saving > NOTABLE else "worse" if saving < -NOTABLE else "no effect"
    return Trial(outcome, Saving(saving), run, baseline, cost=_cost(without.timed, attempt.timed, bench))


def _cost(without: Outcome | None, timed: Outcome | None, bench: Bench) -> Cost | None:
    if without is None or timed is None or without.error or timed.error:
        return None
    verdict = bench.throughput(without, timed)
    if verdict is None:
        return None
    if verdict.ratio is None:
        return Cost("inconclusive", None)
    low, high = verdict.interval or (0.0, 0.0)
    interval = (low - 1, high - 1) if verdict.interval else None
    return Cost(JUDGED.get(verdict.verdict, "inconclusive"), verdict.ratio - 1, interval)


MOST_TRIES = 8
"""The largest number of batch sizes that are run, once one of them fits."""
SEARCH_PRECISION = 0.05
"""The relative precision of the search for the largest batch size."""
SPEED_REPEATS = 2
"""The number of repeats for each batch size. Two are enough, because half the batch size makes a large difference."""
ORIGIN = "a batch to confirm"


@dataclass(frozen=True)
class Searched:
    """The state of the search for the largest batch size."""

    found: BatchSizes
    best: Outcome | None
    """The run with the largest batch that fits so far; None if there is none."""


def confirm(found: BatchSizes, run: Configuration[Any], bench: Bench) -> Iterator[Searched]:
    """Searches for the largest batch size that fits, beginning with the predicted one, then times it and smaller ones.

    Yields the results after each run. Raises Interrupted if the user interrupts, and the error of a run that failed for
    another reason than its memory.
    """
    if found.largest is None:
        return
    base, flat = memory_baseline(run), flatten(run.settings.model_dump(mode="json"))
    best: Outcome | None = None
    good, bad, candidate = 0, found.largest + 1, found.largest
    while good < candidate < bad and (not good or len(found.confirmed) < MOST_TRIES):
        size = base.with_overrides(overrides(candidate, flat), ORIGIN).called(variant=f"batch {candidate}")
        (outcome,) = bench.run_alone([size])
        if outcome.error and not isinstance(outcome.error, OutOfMemory | WorkerLost):
            raise outcome.error
        total = peak_of(outcome)
        fits = total is not None and total <= found.limit
        reason = outcome.error.message if outcome.error else None if fits else "leaves too little memory free"
        good, bad, best = (candidate, bad, outcome) if fits else (good, candidate, best)
        confirmed = [*found.confirmed, Confirmed(candidate, total, reason)]
        found = msgspec.structs.replace(found, largest=good or None, confirmed=confirmed)
        yield Searched(found, best)
        if good and bad - good <= max(1, SEARCH_PRECISION * good):
            break
        candidate = (good + bad) // 2
    if not good:
        return
    sizes = sorted(worth_timing(good))
    each = {size: base.called(variant=f"batch {size}") for size in sizes}
    runs = [timed(run, overrides(size, flat), SPEED_REPEATS, bench.timing) for size, run in each.items()]
    outcomes = bench.timing.run(runs, independent=True)
    stop_if_interrupted(outcomes)
    speeds = [
        Speed(size, throughput.estimate)
        for size, outcome in zip(sizes, outcomes, strict=True)
        if (throughput := outcome.summary.get("throughput"))
    ]
    yield Searched(msgspec.structs.replace(found, speeds=speeds), best)
