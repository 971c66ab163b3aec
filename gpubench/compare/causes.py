"""Compares the profiles of two sides: which findings went and came, and which work takes more or less time."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gpubench.compare.comparability import same_step
from gpubench.compare.evidence import Side
from gpubench.compare.result import (
    Bottleneck,
    Causes,
    Comparability,
    Fate,
    FindingChange,
    Work,
    WorkChange,
)
from gpubench.findings import Finding, Findings
from gpubench.trace.profile import KernelChange, RankProfile, kernel_changes

MOST = 20  # number of changes of work that are listed
EVALUATED = "work.micro_batch"  # samples in a step of a pipeline


@dataclass(frozen=True)
class RunDiagnosis:
    run: str
    rank: RankProfile
    """The lowest of the recorded ranks."""
    findings: Findings


def diagnosis(side: Side) -> RunDiagnosis | None:
    """Returns the diagnosis of the side's first run that has one, or None."""
    for run in side.runs:
        if run.findings and run.profile and run.profile.ranks:
            return RunDiagnosis(run.label, run.profile.ranks[0], run.findings)
    return None


def find_causes(baseline: Side, candidate: Side, comparability: Comparability) -> Causes | None:
    """Compares the profiles and findings of both sides; None if neither was profiled."""
    ours, theirs = diagnosis(baseline), diagnosis(candidate)
    if ours is None and theirs is None:
        return None
    obstacle: str | None = None
    kind: Work | None = None
    changes: list[WorkChange] = []
    if ours and theirs:
        obstacle = _obstacle(baseline, candidate, comparability) or _unlike(ours.rank, theirs.rank)
        if obstacle is None:
            kind, changes = _work(ours.rank, theirs.rank)
    return Causes(
        baseline=_bottleneck(ours),
        candidate=_bottleneck(theirs),
        findings=finding_changes(ours.findings if ours else None, theirs.findings if theirs else None),
        of=kind,
        work=changes[:MOST],
        others=len(changes[MOST:]),
        obstacle=obstacle,
    )


def finding_changes(before: Findings | None, after: Findings | None) -> list[FindingChange]:
    """Returns every finding of either side, the fixed ones first. A side that was not profiled is None."""
    was, now = _by_id(before), _by_id(after)
    return [
        FindingChange(
            id=name,
            title=(now.get(name) or was[name]).title,
            fate=_fate(name, before, after),
            baseline=was[name].severity if name in was else None,
            candidate=now[name].severity if name in now else None,
            baseline_saving=_saving(was.get(name)),
            candidate_saving=_saving(now.get(name)),
        )
        for name in [*(name for name in was if name not in now), *now]
    ]


def in_seconds(change: KernelChange) -> WorkChange:
    return WorkChange(change.name, change.before / 1e9, change.after / 1e9, change.calls_before, change.calls_after)


def _obstacle(baseline: Side, candidate: Side, comparability: Comparability) -> str | None:
    """Returns why a step is not the same work on both sides, or None."""
    if not (comparability.comparable or comparability.forced):
        return "the sides did not do the same work"
    alike = same_step(baseline, candidate) and not any(one.key == EVALUATED for one in comparability.differences)
    return None if alike else "a step is not as much work on both sides"


def _unlike(ours: RankProfile, theirs: RankProfile) -> str | None:
    """Returns why two traces are not comparable, or None."""
    if not (ours.step_numbers and theirs.step_numbers):
        return "a trace marks no steps"
    return "only one side's trace has work of a device" if ours.host_only != theirs.host_only else None


def _work(ours: RankProfile, theirs: RankProfile) -> tuple[Work, list[WorkChange]]:
    """Returns the kind of work that is compared, and its changes, the largest first."""
    if ours.host_only:
        return "operator", _moved(_operator_changes(ours, theirs))
    return "kernel", _moved(map(in_seconds, kernel_changes(ours, theirs)))


def _moved(changes: Iterable[WorkChange]) -> list[WorkChange]:
    return [change for change in changes if change.before != change.after]


def _operator_changes(before: RankProfile, after: RankProfile) -> list[WorkChange]:
    """Returns the changes of operators by name, for all shapes together, in their own time on the CPU."""
    (old, old_calls), (new, new_calls) = _operators(before), _operators(after)
    steps_before, steps_after = len(before.step_numbers), len(after.step_numbers)
    changes = [
        WorkChange(
            name=name,
            before=old[name] / steps_before / 1e9,
            after=new[name] / steps_after / 1e9,
            calls_before=old_calls[name] / steps_before,
            calls_after=new_calls[name] / steps_after,
        )
        for name in old | new
    ]
    return sorted(changes, key=lambda change: (-abs(change.after - change.before), change.name))


def _operators(rank: RankProfile) -> tuple[Counter[str], Counter[str]]:
    """Returns (nanoseconds, calls) in the window by operator name."""
    time: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for operator in rank.operators:
        time[operator.name] += operator.host
        calls[operator.name] += operator.calls
    return time, calls


def _bottleneck(found: RunDiagnosis | None) -> Bottleneck | None:
    if found is None:
        return None
    return Bottleneck(found.findings.headline, found.run, len(found.rank.step_numbers), found.findings.overhead)


def _fate(name: str, before: Findings | None, after: Findings | None) -> Fate | None:
    was, now = _judged(name, before), _judged(name, after)
    if was is None or now is None:
        return None
    return "gone" if not now else "still there" if was else "new"


def _judged(name: str, findings: Findings | None) -> bool | None:
    """Tells whether a side has the finding; None if the rule could not be applied."""
    if name in _by_id(findings):
        return True
    unknown = findings is None or any(one.id == name for one in findings.unanswered)
    return None if unknown else False


def _by_id(findings: Findings | None) -> dict[str, Finding]:
    return {one.id: one for one in findings.findings} if findings else {}


def _saving(finding: Finding | None) -> float | None:
    return finding.expected.estimate if finding and finding.expected else None
