"""Decides whether an edit is kept or discarded, by the gains of its rounds and by what both sides were seen to do."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gpubench import units
from gpubench.compare.comparability import OF_LENGTH
from gpubench.compare.evidence import MOST_OF_A_METRIC, Side
from gpubench.compare.losses import DEFAULT, Margin
from gpubench.compare.result import Comparison, LossOutcome, WorkFound
from gpubench.compare.sequential import LARGEST, MOST_FORESEEN, Look
from gpubench.errors import GpubenchError
from gpubench.events import Time
from gpubench.metrics import LATENCIES, PEAKS, TOO_WIDE, Metric
from gpubench.runs import directory

Answer = Literal["keep", "discard", "undecided", "refused"]
Aim = Literal["throughput", "latency", "peak_memory", "energy"]
Ending = Literal["decided", "rounds", "hopeless", "budget", "interrupted", "failed"]
"""Why no more rounds were made: they decide, they are as many as may be made, more would hardly decide, the time is up,
Ctrl-C, or a failure."""

Factor = Annotated[float, Meta(ge=1 / LARGEST, le=LARGEST)]
Interval = tuple[Factor, Factor]
Fraction = Annotated[float, Meta(ge=0, le=1000)]
Rounds = Annotated[int, Meta(ge=0, le=MOST_FORESEEN)]
Value = Annotated[float, Meta(gt=0, lt=MOST_OF_A_METRIC)]
Bytes = Annotated[float, Meta(ge=0, le=1 << 63)]
"""The ranges of the numbers in decision.json and in a ledger."""

EXIT_CODES: Mapping[Answer, int] = {"keep": 0, "discard": 3, "undecided": 4, "refused": 5}
METRICS: Mapping[Aim, Sequence[str]] = {
    "throughput": ("throughput",),
    "latency": (next(iter(LATENCIES)), "step_time"),
    "peak_memory": PEAKS,
    "energy": ("energy_per_sample",),
}
"""The metrics of a run that each aim is judged by: the first one that was measured."""


OTHER_LENGTH = (
    "its sequences have another length, so that a sample is not the same work: train-bench --vs-args compares tokens"
)


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

    rounds: Rounds
    """The rounds in all; before three rounds these three, as the least that can decide."""
    seconds: Time
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
    aim: Aim
    """What had to be better."""
    metric: str
    """The metric that it was judged by."""
    unit: str
    margin: Fraction
    """The gain that has to be exceeded, as a fraction."""
    gain: Factor | None
    interval: Interval | None
    """The repeated 95 % confidence interval of the gain, which holds at all looks at once; None before three rounds."""
    rounds: Rounds
    """The repeats of each side."""
    spread: Fraction | None
    """The standard deviation of the gain of a round, as a fraction."""
    baseline: Value | None
    """The mean of the metric over the rounds, as `candidate`."""
    candidate: Value | None
    ending: Ending
    reasons: list[str] = []
    """Why it is refused or undecided, one plain sentence each, the most serious one first."""
    needed: Needed | None = None
    """For an undecided one; None if it is unknown, or if more rounds do not help."""
    work: WorkFound = "unknown"
    """What the edited version does, compared with the base."""
    loss: LossOutcome = "unknown"
    loss_reason: str = ""
    peak_memory: Bytes | None = None
    """The largest peak of the candidate in bytes; None if it is unknown."""
    max_memory: Bytes | None = None
    """The limit of the peak in bytes; None without one."""
    loss_margin: Margin = DEFAULT
    """The largest change of the loss that does not matter."""
    warnings: list[str] = []
    base: Version
    edited: Version
    runs: Annotated[list[tuple[str, str]], Meta(min_length=1)]
    """The run directories of both sides, by their paths; several pairs if the judgement was resumed."""
    values: list[tuple[Value, Value]]
    """The metric of both sides in each round."""
    order_seeds: list[int | None] = []
    """The seed of the order in which the runs of each pair in `runs` took turns, as in their run.json."""
    started: str
    """UTC, ISO 8601."""
    seconds: Time
    """The time that all rounds have taken."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]


class Observed(Struct, frozen=True, kw_only=True):
    """What was found about both versions besides the gains of their rounds."""

    refusals: Sequence[str] = ()
    """Why the figures decide nothing, or the edit must not be kept, the most serious reason first."""
    work: WorkFound = "unknown"
    loss: LossOutcome = "unknown"
    loss_reason: str = ""
    peak_memory: float | None = None


def observed_of(comparison: Comparison, candidate: Side, failure: GpubenchError | None = None) -> Observed:
    """Returns what a comparison of the edited version with the base found; `failure` has ended the former early."""
    comparable, found = comparison.comparability, comparison.sameness
    refusals = failure_in_words(failure)
    refusals += [("the base " if one.side == "baseline" else "") + one.reason for one in found.refusals]
    if not comparable.comparable and not found.refusals:
        refusals.append(comparable.reasons[0])
    if any(one.kind == "scale" and one.key in OF_LENGTH for one in comparable.differences):
        refusals.append(OTHER_LENGTH)
    worst = {one.outcome: one for one in reversed(found.losses)}
    loss = worst.get("harmed") or worst.get("unclear") or worst.get("unharmed") or found.loss
    name = f"{loss.name}: " if loss and loss.name != "loss" else ""
    peaks = [peak for run in candidate.runs if (peak := largest_peak(run.summary.metrics)) is not None]
    return Observed(
        refusals=refusals,
        work=found.work,
        loss=loss.outcome if loss else "unknown",
        loss_reason=name + loss.reason if loss else "",
        peak_memory=max(peaks, default=None),
    )


def failure_in_words(failure: GpubenchError | None) -> list[str]:
    """Returns what a failure of the edited version says, and its hint."""
    return [said for said in (failure.message, failure.hint) if said] if failure else []


def largest_peak(metrics: Sequence[Metric]) -> float | None:
    """Returns the largest peak of the memory over all repeats, in bytes; None if it is unknown."""
    known = {metric.name: metric for metric in metrics}
    return next((max(known[name].repeats) for name in PEAKS if name in known), None)


class Ruling(Struct, frozen=True):
    answer: Answer
    reasons: list[str]
    """Why it is refused or undecided, the most serious reason first."""


def rule(look: Look, margin: float, found: Observed, max_memory: float | None, doubt: str) -> Ruling:
    """Returns the answer and its reasons; `doubt` is why the rounds may not have sufficed."""
    refusals = list(found.refusals)
    if max_memory is not None and found.peak_memory is not None and found.peak_memory > max_memory:
        refusals.append(
            f"its peak memory of {units.size(found.peak_memory)} exceeds --max-memory {units.size(max_memory)}"
        )
    if refusals:
        return Ruling("refused", refusals)
    exceeds = look.exceeds(margin)
    if exceeds is not True:
        return Ruling("undecided", [doubt]) if exceeds is None else Ruling("discard", [])
    if max_memory is not None and found.peak_memory is None:
        return Ruling("undecided", ["its peak memory is unknown, so that --max-memory cannot be checked"])
    if found.loss == "unclear":
        return Ruling("undecided", [f"its loss is unclear: {found.loss_reason}"])
    if found.work == "scaled" and found.loss == "unknown":
        return Ruling("undecided", [f"its loss is unknown: {found.loss_reason}"])
    return Ruling("keep", [])


WORK: Mapping[WorkFound, str] = {
    "same": "the same work",
    "scaled": "the same work for a sample",
    "unknown": "the work was not counted",
}
"""What is said of the work of an edit that is kept."""
WORDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(PEAKS, ("less peak memory", "more peak memory")),
    "energy_per_sample": ("less energy for a sample", "more energy for a sample"),
}
"""What a gain and a loss of a metric are called; faster and slower for all others."""


def sentence(ruling: Ruling, look: Look, margin: float, metric: str, found: Observed) -> str:
    """Returns the answer and its main reason in one sentence."""
    gain, reasons = in_words(look, metric), ruling.reasons[:1]
    if ruling.answer == "refused":
        return f"refused: {ruling.reasons[0]}"
    if ruling.answer == "undecided":
        said = "" if look.is_noise else gain
        return f"undecided: {'; '.join(filter(None, [said, *reasons]))}"
    if ruling.answer == "keep":
        loss = f"loss {found.loss}" if found.loss != "unknown" else ""
        return f"keep: {', '.join(filter(None, [gain, WORK.get(found.work, ''), loss]))}"
    surely_worse = look.interval is not None and look.interval[1] < 1
    return f"discard: {gain}" + ("" if surely_worse else f", which is not {units.percent(margin)} or more")


def in_words(look: Look, metric: str) -> str:
    """Returns the gain with its interval, such as "3.1 % faster [+2.2 %, +4.0 %]"; "" without rounds.

    Less memory or energy is given as the share that is saved. An interval whose ends differ by more than a factor of
    TOO_WIDE is a range in words, because its middle says little.
    """
    if look.gain is None:
        return ""
    saves = metric in WORDS
    better, worse = WORDS.get(metric, ("faster", "slower"))
    if look.interval and look.interval[1] > TOO_WIDE * look.interval[0]:
        low, high = (units.digits(end, 2) for end in sorted(1 / end if saves else end for end in look.interval))
        what = f"the {worse.removeprefix('more ')}" if saves else "as fast"
        return f"{low} to {high} times {what}"
    if look.gain >= 2 and not saves:
        ratio, factors = units.factors(look.gain, look.interval or ())
        return f"{ratio} times as fast" + (f" [{', '.join(factors)}]" if factors else "")

    def change(gain: float) -> float:
        return 1 - 1 / gain if saves else gain - 1

    size = f"{units.percent(abs(change(look.gain)))} {better if look.gain >= 1 else worse}"
    ends = ", ".join(units.signed_percent(change(end)) for end in look.interval or ())
    return size + (f" [{ends}]" if ends else "")


def from_json(content: bytes) -> Decision:
    """Returns a decision. Raises ValueError if it is not one, is of a newer version, or cannot be right."""
    found = msgspec.json.decode(content, type=Decision)
    if found.schema_version > directory.SCHEMA_VERSION:
        raise ValueError(f"schema version {found.schema_version} is newer than {directory.SCHEMA_VERSION}")
    if found.rounds != len(found.values):
        raise ValueError(f"it has {len(found.values)} values of {found.rounds} rounds")
    if found.metric not in METRICS[found.aim]:
        raise ValueError(f"{found.metric} is not a metric of {found.aim}")
    return found
