"""The causes behind a comparison, in plain text: the sentences and the table that terminal, Markdown and page share."""

from gpubench import units
from gpubench.comparison.result import Bottleneck, Causes
from gpubench.report import profile_against
from gpubench.report.finding_phrases import NOTHING
from gpubench.report.plain import clean
from gpubench.report.sheets import Sheet

CAVEAT = "times of a profile are those of a step of the profiled repeat: they tell shares, not speed"


def bottlenecks(causes: Causes) -> list[str]:
    """A sentence for each side."""
    sides = (("baseline", causes.baseline), ("candidate", causes.candidate))
    return [f"profile of the {name}: {bottleneck(found)}" for name, found in sides]


def bottleneck(found: Bottleneck | None) -> str:
    """Such as "GPU idle 43.5 % (run 1; 6 steps, 1.34 x as long as clean ones)"."""
    if found is None:
        return "not recorded"
    return f"{clean(found.headline).rstrip('.')} ({clean(found.run)}; {_recorded(found)})"


def fates(causes: Causes) -> list[tuple[str, str]]:
    """(what became of it, which finding)"""
    return [
        (profile_against.fate(change, not causes.obstacle), profile_against.about(change)) for change in causes.findings
    ]


def work(causes: Causes) -> Sheet | None:
    """What changed most; None where nothing is set side by side."""
    return profile_against.work_changes(causes.of, causes.work, causes.others) if causes.of and causes.work else None


def notes(causes: Causes) -> list[str]:
    """What a reader must know of the figures, and why some are not there."""
    found = [] if causes.findings else [NOTHING]
    found.append(CAVEAT)
    if causes.obstacle:
        found.append(f"kernels and operators are not set side by side: {clean(causes.obstacle)}")
    return found


def _recorded(found: Bottleneck) -> str:
    steps = units.counted(found.steps, "step") if found.steps else "no steps marked"
    if found.overhead is None or found.overhead <= 0:
        return steps
    return f"{steps}, {units.digits(1 + found.overhead)} x as long as clean ones"
