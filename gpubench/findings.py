"""What is wrong, how that is known, what would mend it, and what mending it saved: the content of findings.json."""

from typing import Any, Literal

from msgspec import Struct

Severity = Literal["high", "medium", "low"]
Outcome = Literal["confirmed", "no effect", "inconclusive", "worse", "failed"]


class Saving(Struct, frozen=True):
    """A part of the step's time, as a fraction of it."""

    estimate: float
    low: float | None = None
    high: float | None = None


class Trial(Struct, frozen=True):
    """A fix that was tried: runs with it, interleaved with runs without."""

    outcome: Outcome
    saving: Saving | None
    """With its 95 % interval; None where it failed."""
    run: str | None
    """The run directory with the fix."""
    baseline: str | None
    reason: str | None = None
    """Why it failed."""


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
    """The bottleneck in one sentence."""
    findings: list[Finding]
    """The most costly first."""
    unanswered: list[Unanswered]
    overhead: float | None = None
    """Time of a profiled step over that of a clean one, less 1."""
    combination: Combination | None = None
    keep: dict[str, Any] = {}
    """Settings worth keeping."""
    interrupted: bool = False
    """The user ended the trials before all fixes were tried."""
