"""Decides whether an edit is kept or discarded, by the gains of its rounds and by what both sides were seen to do."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from gpubench import units
from gpubench.compare.sequential import Look
from gpubench.errors import GpubenchError
from gpubench.metrics import LATENCIES
from gpubench.runs import directory

Answer = Literal["keep", "discard", "undecided", "refused"]
Ending = Literal["decided", "rounds", "budget", "interrupted", "failed"]
"""Why no more rounds were made: they decide, they are as many as may be made, the time is up, Ctrl-C, or a failure."""
LossOutcome = Literal["unharmed", "harmed", "unclear", "unknown"]

EXIT_CODES: Mapping[Answer, int] = {"keep": 0, "discard": 3, "undecided": 4, "refused": 5}
PEAKS = ("peak_memory_reserved", "peak_memory_rss")
"""The metrics of the peak memory on a GPU and on a CPU."""
METRICS: Mapping[str, Sequence[str]] = {
    "throughput": ("throughput",),
    "latency": (next(iter(LATENCIES)), "step_time"),
    "peak_memory": PEAKS,
    "energy": ("energy_per_sample",),
}
"""The metrics of a run that each aim is judged by: the first one that was measured."""


class Version(Struct, frozen=True, kw_only=True):
    """What one side ran."""

    label: str
    command: str
    """The command line of the program."""
    ref: str | None
    """The git reference that the user named; None for the working tree."""
    commit: str | None
    """The hash of the commit that was checked out; None if it is unknown."""
    subject: str | None
    """The first line of its message."""
    edit: str | None
    """The digest of what the tracked files have beyond the commit; "" for nothing, None if it is unknown."""


class Needed(Struct, frozen=True):
    """What it would take to decide, if the gain is as large as measured, with a probability of about 80 %."""

    rounds: int
    """The rounds in all."""
    seconds: float
    """The time of those still to make."""


class Decision(Struct, frozen=True, kw_only=True):
    """The content of decision.json, which --json prints: whether an edit is kept, how sure that is, and why.

    Gains are factors, above 1 if the candidate is better: 1.03 is 3 % more throughput, or 3 % less of a time, of
    memory or of energy by the same factor.
    """

    schema_version: int = directory.SCHEMA_VERSION
    decision: Answer
    answer: str
    """The decision and its reason in one sentence."""
    metric: str
    unit: str
    margin: float
    """The gain that has to be exceeded, as a fraction."""
    gain: float | None
    interval: tuple[float, float] | None
    """The repeated 95 % confidence interval of the gain, which holds at all looks at once; None before three rounds."""
    rounds: int
    """The repeats of each side."""
    spread: float | None
    """The standard deviation of the gain of a round, as a fraction."""
    baseline: float | None
    """The mean of the metric over the rounds, as `candidate`."""
    candidate: float | None
    ending: Ending
    reasons: list[str] = []
    """Why it is refused or undecided, one plain sentence each, the most serious one first."""
    needed: Needed | None = None
    """For an undecided one; None if it is unknown, or if more rounds do not help."""
    loss: LossOutcome = "unknown"
    loss_reason: str = ""
    peak_memory: float | None = None
    """The largest peak of the candidate in bytes; None if it is unknown."""
    max_memory: float | None = None
    """The limit of the peak in bytes; None without one."""
    warnings: list[str] = []
    base: Version
    edited: Version
    runs: list[tuple[str, str]]
    """The run directories of both sides, by their paths; several pairs if the judgement was resumed."""
    values: list[tuple[float, float]]
    """The metric of both sides in each round."""
    started: str
    """UTC, ISO 8601."""
    seconds: float
    """The time that all rounds have taken."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]


class Findings(Struct, frozen=True, kw_only=True):
    """What was found about the sides besides the gains of their rounds."""

    refusals: Sequence[str] = ()
    """Why the figures decide nothing, or the edit must not be kept, the most serious reason first."""
    loss: LossOutcome = "unknown"
    loss_reason: str = ""
    peak_memory: float | None = None
    failure: GpubenchError | None = None
    """What ended the candidate early."""


def decide(look: Look, margin: float, found: Findings, max_memory: float | None, doubts: Sequence[str]) -> "Ruling":
    """Returns the answer and its reasons. `doubts` are why the rounds may not have sufficed."""
    refusals = list(found.refusals)
    if found.failure:
        refusals.insert(0, found.failure.message)
    if max_memory is not None and found.peak_memory is not None and found.peak_memory > max_memory:
        refusals.append(too_large(found.peak_memory, max_memory))
    if refusals:
        return Ruling("refused", refusals)
    exceeds = look.exceeds(margin)
    if exceeds is False:
        return Ruling("discard", [])
    if exceeds is None:
        return Ruling("undecided", list(doubts))
    if max_memory is not None and found.peak_memory is None:
        return Ruling("undecided", ["its peak memory is unknown, so that --max-memory cannot be checked"])
    if found.loss == "unclear":
        return Ruling("undecided", [f"it is proved to gain, but its loss is unclear: {found.loss_reason}"])
    return Ruling("keep", [])


class Ruling(Struct, frozen=True):
    answer: Answer
    reasons: list[str]


def too_large(peak: float, most: float) -> str:
    return f"its peak memory of {units.size(peak)} exceeds --max-memory {units.size(most)}"


def from_json(content: bytes) -> Decision:
    """Returns a decision. Raises msgspec.DecodeError if it is none, and ValueError for one of a newer version."""
    found = msgspec.json.decode(content, type=Decision)
    if found.schema_version > directory.SCHEMA_VERSION:
        raise ValueError(f"schema version {found.schema_version} is newer than {directory.SCHEMA_VERSION}")
    return found
