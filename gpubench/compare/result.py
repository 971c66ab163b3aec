"""The results of a comparison, in the order of the report. Ratios are candidate / baseline; times are in seconds.

--json prints these structures, so the names of their fields are part of the output format.
"""

import csv
import io
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gpubench import text as plain
from gpubench.findings import Severity
from gpubench.memory import footprint
from gpubench.memory.allocation_log import Phase
from gpubench.metrics import Better
from gpubench.runs import directory

Outcome = Literal["faster", "slower", "more", "less", "equivalent", "inconclusive", "rejected", "withheld"]
Kind = Literal["workload", "scale", "treatment", "protocol", "code"]
Level = Literal["run", "repeat", "step"]
Fate = Literal["gone", "still there", "new"]
Work = Literal["kernel", "operator"]
WorkFound = Literal["same", "scaled", "less", "more", "unknown"]
LossOutcome = Literal["unharmed", "harmed", "unclear", "unknown"]
RefusalKind = Literal["work", "loss", "clock"]
ClockFound = Literal["same", "different", "unknown"]


class SideSummary(Struct, frozen=True):
    """A summary of one side."""

    label: str
    paths: list[str]
    command: str | None
    """The command of the runs; None for another tool's log."""
    headline: str
    """The workload in one line, such as "resnet18, fp32, batch 16 on cpu"."""
    started: str | None
    """The start of its first run in UTC, ISO 8601."""
    runs: int
    repeats: int
    """The number of repeats of all runs."""


class Difference(Struct, frozen=True):
    """A setting, or a fact of the environment or code, in which the sides differ; None for a side without it."""

    key: str
    kind: Kind
    baseline: Any
    candidate: Any
    follows: str | None = None
    """The setting that this difference follows from; None if the user set it."""


class Comparability(Struct, frozen=True):
    """Whether the sides did the same work, and in what else they differ."""

    comparable: bool
    forced: bool
    """Whether the work differs and verdicts are given because of --force."""
    reasons: list[str]
    """The reasons why verdicts are withheld or metrics normalised, one sentence each."""
    differences: list[Difference]


class Verdict(Struct, frozen=True, kw_only=True):
    """The verdict on one metric, with its estimates."""

    metric: str
    unit: str
    better: Better | None
    verdict: Outcome
    leaning: Outcome | None = None
    """For an inconclusive verdict: the direction, if the whole interval is on one side of no change."""
    baseline: float
    candidate: float
    medians: tuple[float | None, float | None] = (None, None)
    """The median over repeats of a baseline or candidate that is a run too noisy for its estimate to be quoted."""
    ratio: float | None
    """The ratio candidate / baseline; None if the baseline is 0, or if the interval says nothing (`too_noisy`)."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of the ratio, without correction for other metrics; wider by `assumed` where that is given.

    None if there is none, or if it contains 1 and its ends differ by more than a factor of four.
    """
    p_value: float | None = None
    """The p-value of the verdict, or of a change beyond the limit if it is inconclusive.

    It is two-sided, and adjusted after Holm for all metrics that are judged together. Below 0.05 the verdict is given.
    """
    margin: float
    """The half-width of the band around 1 within which a change does not matter, as a fraction."""
    noise_floor: float | None = None
    """The relative difference that noise alone can make between such sides.

    It is computed from the spread of their repeats, or for single runs from that of equal runs on record. None if it
    is unknown, or above 100 %.
    """
    limit: float
    """The threshold for a change, as a fraction: the margin, or what the machine may account for if that is more."""
    assumed: float | None = None
    """By how much equal processes are assumed to differ, as a fraction, where both sides are single ones.

    The interval contains it. None if equal ones, of the other side or on record, show how they differ.
    """
    resolvable: float | None = None
    """The smallest relative change that as many new repeats find with 80 % power; None if unknown, or above 100 %."""
    level: Level | None = None
    """The variation that the interval rests on."""
    units: tuple[int, int] = (0, 0)
    """The number of runs or repeats on each side."""
    effective_n: tuple[float | None, float | None] = (None, None)
    """The effective number of independent steps on each side."""
    paired: bool = False
    more_repeats: int | None = None
    """For an inconclusive verdict: how many more repeats a side settle it with 80 % power if the change is as large as
    estimated; None if unknown, or more than 30."""
    method: str
    reason: str | None = None
    """Why the verdict is withheld, rejected or not possible."""

    @property
    def too_noisy(self) -> bool:
        """Whether the interval of the ratio says so little that neither is given."""
        return self.ratio is None and self.baseline > 0 and self.verdict in ("inconclusive", "rejected")


class PhaseChange(Struct, frozen=True):
    phase: str
    baseline: float
    candidate: float
    change: float
    """The change in seconds. All changes sum to the change of the whole."""
    interval: tuple[float, float] | None
    """The 95 % interval of the change, without correction for other phases."""
    p_value: float | None = None
    """The p-value of a change: two-sided, adjusted after Holm for all phases. None if it is unknown."""


class Waterfall(Struct, frozen=True):
    """The change of the step time, divided into phases."""

    per: Literal["step", "sample"]
    baseline: float
    candidate: float
    phases: list[PhaseChange]


class RankChange(Struct, frozen=True):
    """The busy time of a rank in seconds per step, without exposed communication."""

    rank: int
    baseline: float
    candidate: float
    change: float


class ClockEffect(Struct, frozen=True):
    """The change of the step time, split into the largest part that the GPU's SM clock can explain, and a rest.

    ln(time ratio) = -ln(clock ratio) + rest. Both parts are given as fractions of the baseline's time.
    """

    baseline_mhz: float
    candidate_mhz: float
    by_clock: float
    by_work: float


class Explanation(Struct, frozen=True):
    waterfall: Waterfall | None
    ranks: list[RankChange]
    """The ranks with the largest changes; empty unless both sides have several ranks."""
    clock: ClockEffect | None
    notes: list[str]
    """One sentence for each cause, the largest first."""


class Bottleneck(Struct, frozen=True):
    """The result of one side's profile."""

    headline: str
    run: str
    """The run of the side that was profiled."""
    steps: int
    """The number of recorded steps; 0 if the trace marks none."""
    overhead: float | None
    """The time of a profiled step divided by that of a clean one, minus 1."""


class FindingChange(Struct, frozen=True):
    """A finding of either side."""

    id: str
    title: str
    """The title in the candidate, or in the baseline if the candidate does not have the finding."""
    fate: Fate | None
    """None if one side could not be judged: it was not profiled, or lacks the data of the rule."""
    baseline: Severity | None
    """None if the side does not have the finding."""
    candidate: Severity | None
    baseline_saving: float | None
    """The largest possible saving by a fix, as a fraction of the step."""
    candidate_saving: float | None


class WorkChange(Struct, frozen=True):
    """A kernel or an operator in two profiles: seconds and calls per step, 0 for a side without it."""

    name: str
    before: float
    after: float
    calls_before: float
    calls_after: float


class Causes(Struct, frozen=True):
    """The causes of a change by two profiles. Times are those of profiled repeats: they show proportions, not speed."""

    baseline: Bottleneck | None
    """None if the side was not profiled."""
    candidate: Bottleneck | None
    findings: list[FindingChange]
    of: Work | None
    """The kind of entries in `work`: kernels, or operators by their own time on the host if no device worked."""
    work: list[WorkChange]
    """The largest changes first."""
    others: int
    """The number of changes that `work` leaves out."""
    obstacle: str | None
    """Why the work of the two profiles is not compared; None if it is."""


class SizeChange(Struct, frozen=True):
    """The bytes of one category; 0 for a side without it."""

    category: str
    baseline: int
    candidate: int
    change: int


class PhaseMemory(Struct, frozen=True):
    """The memory of a phase at its own peak, in bytes."""

    stage: footprint.Stage
    phase: Phase
    baseline: int | None
    """None if the side does not have the phase."""
    candidate: int | None
    change: int
    categories: list[SizeChange]
    """The categories that either side holds. `Memory.categories` has the same rule."""


class MemoryPeak(Struct, frozen=True):
    """The peak of one side's memory."""

    run: str
    """The run of the side that has the peak."""
    rank: int
    """The rank with the largest peak."""
    source: footprint.Source
    device: str | None
    stage: footprint.Stage
    phase: Phase
    level: footprint.Level


class Memory(Struct, frozen=True):
    """The memory of two runs that were followed or predicted. The largest changes come first."""

    baseline: MemoryPeak
    candidate: MemoryPeak
    change: int
    """The change of the peak's total, in bytes."""
    categories: list[SizeChange]
    """The changes of the categories between the sides' peaks."""
    phases: list[PhaseMemory]


class WorkCount(Struct, frozen=True, kw_only=True):
    """One kind of work, as both sides have counted it."""

    kind: str
    """The name of the count; see `gpubench.compare.work.KINDS`."""
    unit: str
    """What is counted, in words, such as "samples that the model is given for each sample of a step"."""
    baseline: float
    candidate: float
    less: bool
    """Whether the candidate does so much less of it that it is other work."""
    more: bool
    """The same for the baseline."""


class LossFound(Struct, frozen=True, kw_only=True):
    """Whether the candidate reaches the losses, or the values of a printed metric, of the baseline."""

    name: str
    """"loss", or the name of the metric that the program prints."""
    outcome: LossOutcome
    reason: str
    """A plain sentence with the figures, without a capital letter and a full stop."""
    change: float | None = None
    """The candidate's mean over the second half of the steps minus that of the baseline; None if unknown."""
    interval: tuple[float, float] | None = None
    """The 95 % interval of `change`."""
    margin: float | None = None
    """The largest change that does not matter, in the unit of the loss; None if it is unknown."""


class Refusal(Struct, frozen=True):
    """Why the time of the sides cannot decide which one is faster."""

    kind: RefusalKind
    side: Literal["baseline", "candidate"]
    """The side that does less work, is harmed, or has the wrong clock."""
    reason: str
    """A plain sentence about that side, such as "does less work: 64 times fewer samples reach the model"."""


class Sameness(Struct, frozen=True, kw_only=True):
    """What was found about the work, the losses and the clocks of both sides, on which a verdict on time depends."""

    work: WorkFound = "unknown"
    """What the candidate does, compared with the baseline.

    "scaled" means other samples or elements in a step by a declared setting, so that figures are per sample. "unknown"
    means that nothing was counted on both sides: the verdicts are those without counters.
    """
    counts: list[WorkCount] = []
    """What both sides have counted, with the figures."""
    losses: list[LossFound] = []
    """The judgement of the loss, and of each metric that the program prints and the user watches."""
    clock: ClockFound | None = None
    """Whether the clocks of both programs agree with that of the host; None where no side is a program."""
    refusals: list[Refusal] = []
    """Why neither side must be preferred by its time, the most serious reason first; empty if one may be."""
    remarks: list[str] = []
    """What differs and is legitimate, one plain sentence each, such as an evaluation that one side leaves out."""

    @property
    def undecidable(self) -> Refusal | None:
        """The first refusal that leaves no verdict on time at all; None if there may be one.

        A harmed loss leaves one: the harmed side may be slower too, but it is not called faster.
        """
        return next((one for one in self.refusals if one.kind != "loss"), None)

    @property
    def loss(self) -> LossFound | None:
        """The judgement of the loss that the program trains on; None if it was not judged."""
        return next((one for one in self.losses if one.name == "loss"), None)


class Comparison(Struct, frozen=True):
    """One candidate against the baseline."""

    baseline: SideSummary
    candidate: SideSummary
    comparability: Comparability
    verdicts: list[Verdict]
    explanation: Explanation
    warnings: list[str]
    causes: Causes | None = None
    """The causes by profile; None unless a side was profiled."""
    memory: Memory | None = None
    """The change of memory; None unless the memory of both sides was followed."""
    sameness: Sameness = Sameness()
    """What was found about the work, the losses and the clocks of both sides."""


class GateResult(Struct, frozen=True):
    """One `--fail-on` condition for one metric of one candidate."""

    condition: str
    """The condition as the user wrote it."""
    metric: str
    candidate: str
    limit: float
    """The tolerated worsening as a fraction: that of the condition, or the noise floor if it is larger."""
    worsening: float | None
    """The measured worsening; negative for an improvement."""
    interval: tuple[float, float] | None
    p_value: float | None
    """The two-sided p-value at the limit, after Holm's correction over the whole gate; below 0.05 it decides."""
    outcome: Literal["refused", "regressed", "passed", "inconclusive"]
    """"refused" means that the sides did not do the same work, so that no figure can pass."""
    reason: str | None = None
    """Why there is no conclusion: the sides are refused or rejected, or the noise is too large. None otherwise."""


class Comparisons(Struct, frozen=True):
    """The complete result of `gpubench compare`."""

    schema_version: int
    confidence: float
    margin: float
    comparisons: list[Comparison]
    gate: list[GateResult]
    left_out: list[str]
    """The damaged runs that --skip-invalid left out, with the reason."""
    warmup: tuple[int, int] | None = None
    """The smallest and the largest number of steps that are left out at the start of a repeat; None without steps.

    They are equal, unless some repeats are too short for the warm-up of others.
    """


class PairComparison(Struct, frozen=True, kw_only=True):
    """The content of comparison.json: the comparison of two runs whose repeats were interleaved."""

    schema_version: int
    baseline: str
    """The id of the baseline's run; the candidate's run has the file."""
    labels: tuple[str, str]
    """The variants of the baseline and of the candidate."""
    answer: str
    """The comparison in one sentence."""
    metric: str | None
    """The metric that decides; None without one."""
    verdict: Outcome
    ratio: float | None
    """The candidate's value divided by that of the baseline."""
    interval: tuple[float, float] | None
    """The 95 % interval of the ratio."""
    result: Comparisons


class NullMetric(Struct, frozen=True, kw_only=True):
    """The variation of one metric without changes, in fractions of its mean."""

    metric: str
    unit: str
    level: Literal["run", "repeat"]
    """The level of the spread: runs if there are four or more, or if each has one repeat; otherwise all repeats."""
    units: Annotated[int, Meta(ge=2)]
    """The number of runs or repeats that it was estimated from."""
    spread: Annotated[float, Meta(ge=0)]
    """The standard deviation between them."""
    within: float | None
    """The standard error from the steps inside one of them, with autocorrelation; None if there are no steps."""
    noise_floor: Annotated[float, Meta(ge=0)] | None
    """The difference that noise alone can make between two of them: t x spread x sqrt(2).

    None above 100 %, which says nothing.
    """
    per_side: int
    """Half of them, and at least two: the number on each side that `resolvable` is for."""
    resolvable: float | None
    """The smallest change that `per_side` further repeats on each side find with 80 % power; None above 100 %."""
    resolvable_range: tuple[float, float] | None = None
    """The same for the ends of the 95 % interval of the spread, which is estimated from few repeats."""


class Noise(Struct, frozen=True):
    """The content of noise.json: the variation of this workload's figures on this machine."""

    schema_version: int
    workload: dict[str, Any]
    machine: dict[str, Any]
    runs: list[str]
    margin: float
    confidence: float
    metrics: list[NullMetric]
    warmup: tuple[int, int] | None = None
    """The least and the most steps that were left out at the start of a repeat; None if no run has steps."""


PARTS = {  # columns of the fields of Verdict that are pairs
    "interval": ("low", "high"),
    "units": ("baseline", "candidate"),
    "effective_n": ("baseline", "candidate"),
}


def to_json(document: msgspec.Struct) -> str:
    """Returns the document as JSON; a NaN or infinity, which JSON does not have, becomes a string."""
    return directory.to_json(_finite(msgspec.to_builtins(document, str_keys=True)))


def to_csv(comparisons: Comparisons) -> str:
    """Returns one row per metric and candidate; an apostrophe precedes text that a spreadsheet would evaluate."""
    text = io.StringIO()
    columns = ["baseline_label", "candidate_label"]
    for name in Verdict.__struct_fields__:
        columns += [f"{name}_{part}" for part in PARTS.get(name, ())] or [name]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for comparison in comparisons.comparisons:
        labels = [plain.cell(side.label) for side in (comparison.baseline, comparison.candidate)]
        writer.writerows([*labels, *_fields(verdict)] for verdict in comparison.verdicts)
    return text.getvalue()


def _fields(verdict: Verdict) -> list[Any]:
    cells: list[Any] = []
    for name in Verdict.__struct_fields__:
        value = getattr(verdict, name)
        cells += list(value or [None] * len(PARTS[name])) if name in PARTS else [value]
    return [plain.cell(cell) if isinstance(cell, str) else cell for cell in cells]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
