"""The content of findings.json: each problem with its evidence, cause and fix, and the measured saving of the fix."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gpubench.patches.result import ProvedPatch

DISTORTED = 0.3
"""The overhead of recording beyond which shares are distorted, because not all of the program slows down equally."""

Share = Annotated[float, Meta(ge=-1e12, le=1e12)]
Severity = Literal["high", "medium", "low"]
Outcome = Literal["confirmed", "no effect", "inconclusive", "worse", "failed", "not applied"]
Place = Literal["loader", "optimizer", "model"]
Judged = Literal["faster", "slower", "equivalent", "inconclusive"]


OUTCOMES: dict[str, Outcome] = {"faster": "confirmed", "slower": "worse", "equivalent": "no effect"}
"""The outcome of a trial by the verdict on the throughput. With any other verdict it is inconclusive."""


class Saving(Struct, frozen=True):
    """A saving as a fraction of the step time or of the memory's peak; negative if the fix takes more."""

    estimate: Share
    low: Share | None = None
    high: Share | None = None

    @classmethod
    def of_throughput(cls, ratio: float, interval: tuple[float, float] | None) -> "Saving":
        """Returns the saving of time by the ratio of the throughput with a fix to that without, and its interval."""
        low, high = sorted(1 - 1 / end for end in interval) if interval else (None, None)
        return cls(1 - 1 / ratio, low, high)


class Cost(Struct, frozen=True):
    """The effect of a memory fix on the throughput, judged by `compare` over interleaved repeats."""

    verdict: Judged
    change: Share | None
    """The change of the throughput as a fraction; negative if the fix is slower. None if the repeats do not show it."""
    interval: tuple[Share, Share] | None = None
    """The 95 % interval of the change."""


class Trial(Struct, frozen=True):
    """The result of a tried fix: runs with it compared with runs without, interleaved if time is measured."""

    outcome: Outcome
    saving: Saving | None
    """The measured saving. One of time has a 95 % interval; one of memory has none. None if nothing was measured, or if
    the repeats do not show it."""
    run: str | None
    """The run directory with the fix."""
    baseline: str | None
    reason: str | None = None
    """Why the trial failed or is inconclusive, or why the fix was not applied."""
    cost: Cost | None = None
    """For a memory fix, its cost in time; None if it was not timed."""


class Finding(Struct, frozen=True, kw_only=True):
    id: str
    """The stable name of the rule, such as "data-loading"."""
    title: str
    severity: Severity
    evidence: list[str]
    """Sentences with the figures: names of events, counts, times, file:line."""
    cause: str
    """The cause of the problem, as opposed to its symptom."""
    advice: str
    """The recommended action, in words."""
    fix: dict[str, Any] = {}
    """The advice as overrides of the user's configuration; empty if only a change of code helps."""
    place: Place | None = None
    """What of a program the advice is about."""
    code: str = ""
    """For a program of the user, the code that does the same as `fix`, with its file and line if they are known.

    Without a fix, it is the call in the program that the advice is about.
    """
    expected: Saving | None = None
    """The largest saving according to the trace; None if it is unknown."""
    threshold: str
    """The threshold of the rule, and the reason for it."""
    measured: Trial | None = None


class Unanswered(Struct, frozen=True):
    """A rule that could not be applied for lack of data."""

    id: str
    missing: str
    needs: str
    """The option that provides the data."""


class Combination(Struct, frozen=True):
    """The trial of all confirmed fixes together."""

    fix: dict[str, Any]
    measured: Trial


class Findings(Struct, frozen=True):
    headline: str
    """The bottleneck in one sentence; empty for memory, where the footprint gives it."""
    findings: list[Finding]
    """The findings, the most severe first, and of these the one with the largest saving."""
    unanswered: list[Unanswered]
    overhead: Share | None = None
    """The time of a profiled step divided by that of a clean one, minus 1."""
    combination: Combination | None = None
    keep: dict[str, Any] = {}
    """The recommended settings: the fastest ones, or for memory those that save most and are not slower."""
    withheld: str = ""
    """Why none of the findings is advice unless its fix was measured; empty if they are."""
    patch: ProvedPatch | None = None
    """The patch of a program with the settings to keep and the edits that were proved; None if none was made."""
    interrupted: bool = False
    """Whether the user ended the trials before all fixes were tried."""

    @property
    def untried(self) -> list[dict[str, Any]]:
        """The fixes that were not tried."""
        return [one.fix for one in self.findings if one.fix and not one.measured]
