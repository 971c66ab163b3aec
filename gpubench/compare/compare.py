"""Compares runs with a baseline: which is faster, by how much, how certain that is, and what explains it."""

import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec

from gpubench import units
from gpubench.compare import comparability, gate, intervals, losses, noise, sameness, verdicts
from gpubench.compare.causes import find_causes
from gpubench.compare.evidence import Side, steps_left_out
from gpubench.compare.explanation import explain
from gpubench.compare.footprints import find_memory
from gpubench.compare.gate import Condition
from gpubench.compare.result import Comparability, Comparison, Comparisons, Noise, Outcome, Refusal, Verdict
from gpubench.compare.verdicts import ASSUMED, DEFAULT_MARGIN, Circumstances, Judged, one_after_the_other
from gpubench.compare.warnings import accountable, changed_machine, delay, find_warnings, out_of_turn, rejection
from gpubench.errors import UsageError
from gpubench.metrics import Metric
from gpubench.runs import directory
from gpubench.runs.warnings import not_applied

T = TypeVar("T")
NAMED = 2  # metrics that an error names of each side


def compare(
    sides: Sequence[Side],
    *,
    margin: float = DEFAULT_MARGIN,
    assumed: float = ASSUMED,
    metrics: Sequence[str] = (),
    force: bool = False,
    conditions: Sequence[Condition] = (),
    left_out: Sequence[str] = (),
    loss_margin: losses.Margin = losses.DEFAULT,
) -> Comparisons:
    """Compares every side after the first with the first, the baseline. The sides are as `aligned` returns them.

    `metrics` are names or patterns; without any, all metrics with a better direction are compared. `margin` is the
    smallest change that matters, as a fraction. `assumed` is the fraction by which equal processes are taken to differ
    at most if too few of them show it. `force` gives verdicts although the work differs. `loss_margin` is the largest
    change of the loss that does not matter. Raises UsageError if a metric or condition names nothing that both sides
    have.
    """
    baseline, *candidates = sides
    comparisons: list[Comparison] = []
    judged: list[tuple[str, Sequence[Judged]]] = []
    refused: dict[str, str] = {}
    for candidate in candidates:
        comparison, own = _compare(baseline, candidate, margin, assumed, metrics, force, conditions, loss_margin)
        comparisons.append(comparison)
        judged.append((candidate.label, own))
        if comparison.sameness.refusals and not force:
            refused[candidate.label] = _said(comparison.sameness.refusals[0], baseline, candidate)
    try:
        results = gate.judge(conditions, judged, refused) if conditions else []
    except gate.Withheld as error:
        raise UsageError(error.message, error.hint if force else _forcing(sides, conditions)) from None
    return Comparisons(
        schema_version=directory.SCHEMA_VERSION,
        confidence=intervals.CONFIDENCE,
        margin=margin,
        comparisons=comparisons,
        gate=results,
        left_out=list(left_out),
        warmup=steps_left_out(sides),
    )


def _forcing(sides: Sequence[Side], conditions: Sequence[Condition]) -> str:
    """Returns the command that judges the conditions although the work of the sides differs, if --force suffices."""
    try:
        compare(sides, force=True, conditions=conditions)
    except UsageError:
        return "judge a metric that both sides have for the same work, such as --fail-on 'throughput>2%'"
    if any(len(side.runs) != 1 for side in sides):
        return "if the work may differ, add --force"
    runs = [str(side.runs[0].path) for side in sides]
    texts = [word for condition in conditions for word in ("--fail-on", condition.text)]
    return f"if the work may differ: gpubench compare {shlex.join([*runs, '--force', *texts])}"


def null(side: Side, *, margin: float = DEFAULT_MARGIN) -> Noise:
    """Measures the noise of one side's runs, which have one warm-up as `aligned` returns them.

    Raises UsageError for several configurations, or a single repeat.
    """
    if misfit := comparability.misfit(side):
        raise UsageError(f"no noise can be measured: {misfit}", "--null takes runs of one configuration")
    if sum(run.repeats for run in side.runs) < 2:
        more = "measure with --repeats 4 or more" if side.runs[0].record else "give a folder of four logs or more"
        raise UsageError(f"{side.label} has one repeat: no noise can be measured", more)
    return noise.learn(side, _directed(side.runs[0].metrics), margin)


def only(learned: Noise, patterns: Sequence[str]) -> Noise:
    """Returns the noise of the metrics that match the patterns. Raises UsageError if a pattern matches none."""
    known = {metric.metric: metric for metric in learned.metrics}
    return msgspec.structs.replace(learned, metrics=_wanted(known, patterns)) if patterns else learned


def _compare(
    baseline: Side,
    candidate: Side,
    margin: float,
    assumed: float,
    metrics: Sequence[str],
    force: bool,
    conditions: Sequence[Condition],
    loss_margin: losses.Margin,
) -> tuple[Comparison, list[Judged]]:
    """Returns the comparison to show, and every judged metric, including those for the gate."""
    comparable = comparability.judge(baseline, candidate, force=force)
    withheld = None if comparable.comparable else comparable.reasons[0]
    withheld = None if force else withheld or _nothing_changed(baseline, candidate, comparable)
    same = sameness.judge(baseline, candidate, comparable, margin=loss_margin)
    undecidable = None if force else same.undecidable
    refused = _said(undecidable, baseline, candidate) if undecidable else None
    rejected, record = _rejections(baseline, candidate), noise.on_record(baseline, candidate)
    if same.work == "more":
        rejected.setdefault("slower", next(iter(same.remarks), f"{baseline.label} does less work"))
    harm = next((one for one in same.refusals if one.kind == "loss"), None)
    harmed = any(one.name == "loss" and one.outcome == "harmed" for one in same.losses)
    if not force and harm:
        rejected.setdefault("faster", _said(harm, baseline, candidate))
    machine = accountable(baseline, candidate) if one_after_the_other(baseline, candidate) else 0.0
    circumstances = Circumstances(margin, withheld, refused, rejected, record, machine, assumed)
    # Before the find_warnings, which tell of documents that do not read.
    causes, memory = find_causes(baseline, candidate, comparable), find_memory(baseline, candidate, comparable)
    warnings = [*(_said(one, baseline, candidate) for one in same.refusals), *same.remarks]
    warnings = list(dict.fromkeys([*warnings, *rejected.values(), *find_warnings(baseline, candidate, harmed=harmed)]))
    if moved := changed_machine(baseline, candidate):
        warnings.append(moved)
    if not any(entry.level == "run" for entry in record) and (unequal := out_of_turn(baseline, candidate)):
        warnings.append(unequal)
    shared = _shared(baseline, candidate)
    shown = _wanted(shared, metrics) if metrics else _directed(shared)
    gated = [metric for name, metric in shared.items() if any(_names(one.metric, name) for one in conditions)]
    judged = verdicts.judge_all(shown, baseline, candidate, circumstances)
    found = [one.verdict for one in judged]
    listed = {metric.name for metric in shown}
    rest = [metric for metric in gated if metric.name not in listed]  # only for the gate, which has its own correction
    comparison = Comparison(
        baseline=comparability.summarise_side(baseline),
        candidate=comparability.summarise_side(candidate),
        comparability=comparable,
        verdicts=found,
        explanation=explain(baseline, candidate, comparable, record, assumed=assumed, settled=_settled(found)),
        warnings=warnings,
        causes=causes,
        memory=memory,
        sameness=same,
    )
    return comparison, [*judged, *(verdicts.judge(metric, baseline, candidate, circumstances) for metric in rest)]


def _said(refusal: Refusal, baseline: Side, candidate: Side) -> str:
    """Returns a refusal with the name of the side that it concerns."""
    return f"{candidate.label if refusal.side == 'candidate' else baseline.label} {refusal.reason}"


def _nothing_changed(baseline: Side, candidate: Side, comparable: Comparability) -> str | None:
    """Returns why the sides are the same program although their settings differ; None if they are not.

    They are the same if every setting in which they differ found nothing to change.
    """
    missed = {
        key: reason for side in (baseline, candidate) for run in side.runs for key, reason in run.summary.missed.items()
    }
    chosen = [one.key for one in comparable.differences if one.kind == "treatment" and one.follows is None]
    if not chosen or not missed.keys() >= set(chosen):
        return None
    return not_applied({key: missed[key] for key in chosen})


def _settled(found: Sequence[Verdict]) -> bool:
    """Tells whether the verdict is a definite change, or equivalence."""
    lead = verdicts.leading(found)
    return lead is None or lead.verdict != "inconclusive"


def _rejections(baseline: Side, candidate: Side) -> dict[Outcome, str]:
    """Returns the outcomes to reject, with the reasons.

    These are "faster" for a side that left work undone, "slower" for one that did other work, and "less" and
    "equivalent" for a side whose peak is unknown.
    """
    found: dict[Outcome, str] = {}
    timed: tuple[Outcome, Outcome] = ("faster", "slower")
    counted: tuple[Outcome, Outcome] = ("less", "more")
    for place, side in enumerate((candidate, baseline)):
        if reason := rejection(side):
            words: list[Outcome] = [counted[place], "equivalent"] if side.runs[0].untimed else [timed[place]]
            found |= dict.fromkeys(words, f"{side.label}: {reason}")
    for place, side in enumerate((baseline, candidate)):
        if reason := delay(side):
            found.setdefault(timed[place], f"{side.label}: {reason}")
    return found


def _shared(baseline: Side, candidate: Side) -> dict[str, Metric]:
    """Returns the metrics that every run of both sides has, in the baseline's order. Raises UsageError for none."""
    runs_ = [*baseline.runs, *candidate.runs]
    shared = {
        name: metric for name, metric in baseline.runs[0].metrics.items() if all(name in r.metrics for r in runs_)
    }
    if not shared:
        ours, theirs = map(_kind, (baseline, candidate))
        raise UsageError(
            f"{baseline.label} and {candidate.label} have no metric in common: the first {ours}, the second {theirs}",
            "compare logs that have the same column, or results of the same benchmark"
            if all(run.record is None for run in runs_)
            else "compare two runs of the same command",
        )
    return shared


def _kind(side: Side) -> str:
    """Returns what the runs of a side have measured, as "was timed (throughput, step time and 12 more)"."""
    names = [units.words(name) for name in side.runs[0].metrics]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    listed = units.listed([*names[:NAMED], *more]) if names else "nothing"
    if side.runs[0].record is None:
        return f"has {listed}"
    return f"{'recorded its memory' if side.runs[0].untimed else 'was timed'} ({listed})"


def _directed(known: Mapping[str, Metric]) -> list[Metric]:
    """Returns the metrics that have a better direction."""
    return [metric for metric in known.values() if metric.better]


def _wanted(known: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    """Returns the metrics that match a pattern. Raises UsageError if a pattern matches none."""
    for pattern in patterns:
        if not any(_names(pattern, name) for name in known):
            raise gate.absent(f"--metric {pattern!r}", pattern, "that every run has", list(known))
    return [metric for name, metric in known.items() if any(_names(pattern, name) for pattern in patterns)]


def _names(pattern: str, metric: str) -> bool:
    """Tells whether the pattern matches the metric's name, or its name per device.

    A metric of the whole job has the latter if the sides have different numbers of ranks.
    """
    names = (metric, metric + comparability.PER_DEVICE)
    return pattern in names or any(fnmatchcase(name, pattern) for name in names)
