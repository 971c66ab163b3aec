"""Is it faster, by how much, is that real, and what explains it: runs against runs, without torch."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec

from gpubench import inference, runs
from gpubench.comparison import comparability, gate, noise, verdicts
from gpubench.comparison.causes import find_causes
from gpubench.comparison.conditions import accountable
from gpubench.comparison.doubts import changed_machine, doubts, out_of_turn, rejection
from gpubench.comparison.evidence import Side
from gpubench.comparison.explanation import explain
from gpubench.comparison.gate import Condition
from gpubench.comparison.memory import find_memory
from gpubench.comparison.result import Comparison, Comparisons, Noise, Outcome, Verdict
from gpubench.comparison.sampling import one_after_the_other
from gpubench.comparison.verdicts import DEFAULT_MARGIN, Circumstances, Judged
from gpubench.errors import UsageError
from gpubench.metrics import Metric

T = TypeVar("T")


def compare(
    sides: Sequence[Side],
    *,
    margin: float = DEFAULT_MARGIN,
    metrics: Sequence[str] = (),
    force: bool = False,
    conditions: Sequence[Condition] = (),
    left_out: Sequence[str] = (),
) -> Comparisons:
    """Every side after the first against the first, the baseline.

    `metrics` are names or patterns, all that have a better direction if there are none; `margin` is the fraction by
    which a change begins to matter; `force` asks for verdicts although the workloads differ. Raises UsageError where a
    metric or condition names nothing that both sides have.
    """
    baseline, *candidates = sides
    comparisons: list[Comparison] = []
    judged: list[tuple[str, Sequence[Judged]]] = []
    for candidate in candidates:
        comparison, own = _compare(baseline, candidate, margin, metrics, force, conditions)
        comparisons.append(comparison)
        judged.append((candidate.label, own))
    return Comparisons(
        schema_version=runs.SCHEMA_VERSION,
        confidence=inference.CONFIDENCE,
        margin=margin,
        comparisons=comparisons,
        gate=gate.judge(conditions, judged) if conditions else [],
        left_out=list(left_out),
    )


def null(side: Side, *, margin: float = DEFAULT_MARGIN) -> Noise:
    """What the runs of one side say of its noise. Raises UsageError for several configurations, or one repeat."""
    if misfit := comparability.misfit(side):
        raise UsageError(f"nothing to learn noise from: {misfit}", "--null takes runs of one configuration")
    if sum(run.repeats for run in side.runs) < 2:
        raise UsageError(
            f"{side.label} has one repeat: nothing to learn noise from", "measure with --repeats 4 or more"
        )
    return noise.learn(side, _directed(side.runs[0].metrics), margin)


def only(learned: Noise, patterns: Sequence[str]) -> Noise:
    """What was learned of some metrics. Raises UsageError where a pattern names none."""
    known = {metric.metric: metric for metric in learned.metrics}
    return msgspec.structs.replace(learned, metrics=_wanted(known, patterns)) if patterns else learned


def _compare(
    baseline: Side,
    candidate: Side,
    margin: float,
    metrics: Sequence[str],
    force: bool,
    conditions: Sequence[Condition],
) -> tuple[Comparison, list[Judged]]:
    """The comparison to show, and everything that was judged for it or for the gate."""
    comparable = comparability.judge(baseline, candidate, force=force)
    withheld = None if comparable.comparable or force else comparable.reasons[0]
    rejected, record = _rejections(baseline, candidate), noise.on_record(baseline, candidate)
    machine = accountable(baseline, candidate) if one_after_the_other(baseline, candidate) else 0.0
    circumstances = Circumstances(margin, withheld, rejected, record, machine)
    # Before the doubts, which tell of documents that do not read.
    causes, memory = find_causes(baseline, candidate, comparable), find_memory(baseline, candidate, comparable)
    warnings = [*dict.fromkeys(rejected.values()), *doubts(baseline, candidate)]
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
    rest = [metric for metric in gated if metric.name not in listed]  # for the gate alone, which corrects too
    comparison = Comparison(
        baseline=comparability.summarise_side(baseline),
        candidate=comparability.summarise_side(candidate),
        comparability=comparable,
        verdicts=found,
        explanation=explain(baseline, candidate, comparable, record, settled=_settled(found)),
        warnings=warnings,
        causes=causes,
        memory=memory,
    )
    return comparison, [*judged, *(verdicts.judge(metric, baseline, candidate, circumstances) for metric in rest)]


def _settled(found: Sequence[Verdict]) -> bool:
    """Whether there is a change, or none, to explain."""
    lead = verdicts.leading(found)
    return lead is None or lead.verdict != "inconclusive"


def _rejections(baseline: Side, candidate: Side) -> dict[Outcome, str]:
    """A side that left work undone is not the faster one; one whose peak is not known is neither smaller nor equal."""
    found: dict[Outcome, str] = {}
    timed: tuple[Outcome, Outcome] = ("faster", "slower")
    counted: tuple[Outcome, Outcome] = ("less", "more")
    for place, side in enumerate((candidate, baseline)):
        if reason := rejection(side):
            words: list[Outcome] = [counted[place], "equivalent"] if side.runs[0].untimed else [timed[place]]
            found |= dict.fromkeys(words, f"{side.label}: {reason}")
    return found


def _shared(baseline: Side, candidate: Side) -> dict[str, Metric]:
    """The baseline's metrics that every run of both sides has, in its order. Raises UsageError if there are none."""
    runs_ = [*baseline.runs, *candidate.runs]
    shared = {
        name: metric for name, metric in baseline.runs[0].metrics.items() if all(name in r.metrics for r in runs_)
    }
    if not shared:
        ours, theirs = (", ".join(side.runs[0].metrics) for side in (baseline, candidate))
        raise UsageError(
            f"{baseline.label} and {candidate.label} have no metric in common",
            f"the first has {ours}; the second {theirs}",
        )
    return shared


def _directed(known: Mapping[str, Metric]) -> list[Metric]:
    """Those of which more or less is better."""
    return [metric for metric in known.values() if metric.better]


def _wanted(known: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    """Those that match a pattern. Raises UsageError where one matches nothing."""
    for pattern in patterns:
        if not any(_names(pattern, name) for name in known):
            hint = gate.nearest(pattern, list(known))
            raise UsageError(f"--metric {pattern!r} names nothing that every run has", hint)
    return [metric for name, metric in known.items() if any(_names(pattern, name) for pattern in patterns)]


def _names(pattern: str, metric: str) -> bool:
    """A metric of the whole job goes by its name per device too, which it has beside another number of ranks."""
    names = (metric, metric + comparability.PER_DEVICE)
    return pattern in names or any(fnmatchcase(name, pattern) for name in names)
