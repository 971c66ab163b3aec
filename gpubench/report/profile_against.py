"""Two profiles of one program: where its time went before and after, and which findings are gone."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench import units
from gpubench.comparison.causes import in_seconds
from gpubench.comparison.result import Fate, FindingChange, WorkChange
from gpubench.findings import Findings
from gpubench.report.plain import clean
from gpubench.report.profile_phrases import kernel_name, parts, per, steps
from gpubench.report.sheets import Sheet, sheet
from gpubench.trace.profile import KernelChange, Profile, Rank

CHANGES = 10  # of work that are shown
APART: dict[Fate, str] = {"gone": "only before", "new": "only after", "still there": "in both"}
NANOSECONDS = 9  # decimals of a second: traces have no more


@dataclass(frozen=True)
class Against:
    """What a profile is set against, and the kernels that changed from it, most first."""

    profile: Profile
    findings: Findings
    changes: Sequence[KernelChange]


def reservation(unlike: Sequence[str]) -> str:
    """Why no change is told."""
    return f"not set against each other: {'; '.join(unlike)}"


def speed(before: Rank, after: Rank, alike: bool = True) -> str:
    """Both lengths in a line; a ratio only of the same work, which without steps on both sides nobody knows."""
    ours, theirs = (units.seconds(rank.wall / 1e9 / steps(rank)) for rank in (before, after))
    if not (before.steps and after.steps):
        said = f"the windows are {ours} and {theirs}"
        return f"{said}; without marked steps they need not be the same work" if alike else said
    said = f"a profiled step took {ours} before and {theirs} after"
    return f"{said}: {_change(before.wall / steps(before), after.wall / steps(after))}" if alike else said


def tables(before: Rank, after: Rank, changes: Sequence[KernelChange], alike: bool = True) -> list[Sheet]:
    """Where the time went, and of the same work what changed in it."""
    found = [part_changes(before, after, alike)]
    if alike:
        found.append(work_changes("kernel", [in_seconds(change) for change in changes]))
    return [one for one in found if one]


def part_changes(before: Rank, after: Rank, alike: bool = True) -> Sheet:
    """Every part of the time, before and after, and at the end all of it."""
    ours, theirs = _times(before), _times(after)
    rows = [
        _row(name, ours.get(name, 0.0), theirs.get(name, 0.0))
        for name in sorted({*ours, *theirs}, key=[*ours, *theirs].index)
    ]
    rows.append(_row("all of it", before.wall / steps(before), after.wall / steps(after)))
    if not alike:
        rows = [{name: row[name] for name in ("part", "before", "after")} for row in rows]
    return sheet(f"Where the time {per(after)} went", rows)


def work_changes(of: str, changes: Sequence[WorkChange], others: int = 0) -> Sheet:
    """of: "kernel" or "operator"; others: changes that are not among these."""
    rows = [
        {
            of: kernel_name(change.name),
            **_times_of(change.before, change.after),
            "calls": f"{units.digits(change.calls_before)} -> {units.digits(change.calls_after)}",
        }
        for change in changes[:CHANGES]
    ]
    rest = len(changes[CHANGES:]) + others
    return sheet(f"{of.capitalize()}s that changed most, a step", rows, units.counted(rest, "other") if rest else "")


def fate(change: FindingChange, alike: bool = True) -> str:
    """What became of a finding, in a word or two. Only of the same work can one be gone."""
    if change.fate and not alike:
        return APART[change.fate]
    return change.fate or ("there, not judged before" if change.candidate else "was there, not judged now")


def about(change: FindingChange) -> str:
    """Which finding it is and how grave, before and after: "a title (high -> low), worth up to 12.3 % -> 2 %"."""
    said = f"{clean(change.title)} ({_pair(change.baseline, change.candidate)})"
    savings = _pair(_percent(change.baseline_saving), _percent(change.candidate_saving))
    return f"{said}, worth up to {savings} of the step" if savings else said


def _pair(before: str | None, after: str | None) -> str:
    """Both, or what there is."""
    return " -> ".join(dict.fromkeys(word for word in (before, after) if word))


def _percent(saving: float | None) -> str | None:
    return None if saving is None else units.percent(saving)


def _times(rank: Rank) -> dict[str, float]:
    return {part.name: part.time / steps(rank) for part in parts(rank)}


def _row(name: str, before: float, after: float) -> dict[str, str]:
    """Of nanoseconds."""
    return {"part": name, **_times_of(before / 1e9, after / 1e9)}


def _times_of(before: float, after: float) -> dict[str, str]:
    return {
        "before": units.seconds(before),
        "after": units.seconds(after),
        "change": units.signed_seconds(round(after - before, NANOSECONDS)),
        "of before": _change(before, after),
    }


def _change(before: float, after: float) -> str:
    return units.signed_percent(after / before - 1) if before else ""
