"""What is wrong, how that is known, what would mend it, and what mending it saved: the content of findings.json."""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

Severity = Literal["high", "medium", "low"]
Outcome = Literal["confirmed", "no effect", "inconclusive", "worse", "failed"]
Judged = Literal["faster", "slower", "equivalent", "inconclusive"]


SEVERE = 0.2
"""Of the step or of the peak: a fifth of it is worth stopping for."""
MARKED = 0.05


class Saving(Struct, frozen=True):
    """A part of the step's time, or of the peak of the memory, as a fraction of it; below 0 where it takes more."""

    estimate: float
    low: float | None = None
    high: float | None = None


class Cost(Struct, frozen=True):
    """What a fix of the memory does to the throughput, as `compare` judges it over interleaved repeats."""

    verdict: Judged
    change: float
    """Of the throughput, as a fraction of it; below 0 where it is slower."""
    interval: tuple[float, float] | None = None
    """95 %, of the change."""


class Trial(Struct, frozen=True):
    """A fix that was tried: runs with it beside runs without, interleaved where time is measured."""

    outcome: Outcome
    saving: Saving | None
    """Of time with its 95 % interval; a peak is counted and has none. None where it failed."""
    run: str | None
    """The run directory with the fix."""
    baseline: str | None
    reason: str | None = None
    """Why it failed, or why nothing is settled."""
    cost: Cost | None = None
    """Of memory: the time that the saving is paid with; None where it was not timed."""


class Finding(Struct, frozen=True, kw_only=True):
    id: str
    """A word for the rule, the same in every run, as "data-loading"."""
    title: str
    severity: Severity
    evidence: list[str]
    """Each a sentence with its figures: names of events, counts, times, file:line."""
    cause: str
    """What brings it about, not what it looks like."""
    advice: str
    """What to do, in words."""
    fix: dict[str, Any] = {}
    """The same as overrides in the user's own configuration; empty where only code can change it."""
    expected: Saving | None = None
    """At most, as far as the trace tells; None where it does not."""
    threshold: str
    """From where on the rule speaks, and why from there."""
    measured: Trial | None = None


class Unanswered(Struct, frozen=True):
    """A rule that lacks its inputs."""

    id: str
    missing: str
    needs: str
    """The option that would bring them."""


class Combination(Struct, frozen=True):
    """All fixes that were confirmed, tried at once."""

    fix: dict[str, Any]
    measured: Trial


class Findings(Struct, frozen=True):
    headline: str
    """The bottleneck in one sentence; of memory none, as the footprint says what fills it."""
    findings: list[Finding]
    """The most costly first."""
    unanswered: list[Unanswered]
    overhead: float | None = None
    """Time of a profiled step over that of a clean one, less 1."""
    combination: Combination | None = None
    keep: dict[str, Any] = {}
    """Settings worth keeping: what was fastest; of memory what saved most and was not found to be slower."""
    interrupted: bool = False
    """The user ended the trials before all fixes were tried."""


def severity(share: float | None) -> Severity:
    """Of what costs this fraction of the step, or of the peak; None where it is not known."""
    if share is None or share < MARKED:
        return "low"
    return "high" if share >= SEVERE else "medium"


def fix(settings: Mapping[str, Any] | None, **overrides: Any) -> dict[str, Any]:
    """Overrides by dot-key, written training__optimizer: all of them settings of the program, and some of them other
    than they are; else none."""
    known = settings or {}
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    changing = keys.keys() <= known.keys() and any(known[key] != value for key, value in keys.items())
    return keys if changing else {}
