"""What a comparison says, in the order in which it says it. Ratios are candidate / baseline; times are seconds."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gpubench.findings import Severity
from gpubench.memory import footprint
from gpubench.memory.history import Phase
from gpubench.metrics import Better

Outcome = Literal["faster", "slower", "more", "less", "equivalent", "inconclusive", "rejected", "withheld"]
Kind = Literal["workload", "scale", "treatment", "protocol", "code"]
Level = Literal["run", "repeat", "step"]
Fate = Literal["gone", "still there", "new"]
Work = Literal["kernel", "operator"]


class SideSummary(Struct, frozen=True):
    """One side in short."""

    label: str
    paths: list[str]
    command: str | None
    """None for another tool's log."""
    headline: str
    """The workload in one line, such as "resnet18, fp32, batch 16 on cpu"."""
    started: str | None
    """Of its first run; UTC, ISO 8601."""
    runs: int
    repeats: int
    """Of all runs together."""


class Difference(Struct, frozen=True):
    """A setting, a fact of the environment or of the code that the sides do not share; None where one has none."""

    key: str
    kind: Kind
    baseline: Any
    candidate: Any
    follows: str | None = None
    """The setting whose difference this one is a consequence of, where nobody chose it by itself."""


class Comparability(Struct, frozen=True):
    """Whether the sides did the same work, and what else sets them apart."""

    comparable: bool
    forced: bool
    """The work differs, and the user wants the verdicts all the same."""
    reasons: list[str]
    """Why verdicts are withheld or metrics normalised, a sentence each."""
    differences: list[Difference]


class Verdict(Struct, frozen=True, kw_only=True):
    """One metric of both sides, and what can be said of it."""

    metric: str
    unit: str
    better: Better | None
    verdict: Outcome
    leaning: Outcome | None = None
    """Of an inconclusive verdict: where the whole interval lies on one side of no change."""
    baseline: float
    candidate: float
    ratio: float | None
    """None where the baseline is 0."""
    interval: tuple[float, float] | None = None
    """95 % interval of the ratio, of this metric alone."""
    p_value: float | None = None
    """Of the verdict, or of a change beyond the limit where it is inconclusive: two-sided, and adjusted after Holm for
    all the metrics that were judged together. Below 0.05 the verdict is given."""
    margin: float
    """Half-width of the band around 1 within which a change does not matter, as a fraction."""
    noise_floor: float | None = None
    """Relative difference that noise alone can make between such sides: of as many repeats from their own spread, of
    single runs from that of equal runs on record."""
    limit: float
    """What a change has to exceed: the margin, or what the machine itself may account for where that is larger."""
    resolvable: float | None = None
    """Smallest relative change that this many repeats would find with 80 % power."""
    level: Level | None = None
    """Whose variation the interval rests on."""
    units: tuple[int, int] = (0, 0)
    """How many runs or repeats there are on each side."""
    effective_n: tuple[float | None, float | None] = (None, None)
    """Independent steps' worth on each side."""
    paired: bool = False
    more_repeats: int | None = None
    """Of an inconclusive verdict: how many more on each side should settle it; None if that cannot be told."""
    method: str
    reason: str | None = None
    """Why a verdict is withheld, rejected or not possible."""


class PhaseChange(Struct, frozen=True):
    phase: str
    baseline: float
    candidate: float
    change: float
    """Seconds; all changes sum to the change of the whole."""
    interval: tuple[float, float] | None
    """95 % interval of the change, of this phase alone."""
    p_value: float | None = None
    """Of there being a change: two-sided, adjusted after Holm for all phases. None where nothing tells."""


class Waterfall(Struct, frozen=True):
    """Where the change of the step time comes from."""

    per: Literal["step", "sample"]
    baseline: float
    candidate: float
    phases: list[PhaseChange]


class RankChange(Struct, frozen=True):
    """Seconds a step that a rank was busy, communication it waited for left out."""

    rank: int
    baseline: float
    candidate: float
    change: float


class ClockEffect(Struct, frozen=True):
    """The change of the step time, split as if all of it scaled with the GPU's SM clock: the most clocks can explain.

    ln(time ratio) = ln(clock ratio)'s negative + the rest; both parts as fractions of the baseline's time.
    """

    baseline_mhz: float
    candidate_mhz: float
    by_clock: float
    by_work: float


class Explanation(Struct, frozen=True):
    waterfall: Waterfall | None
    ranks: list[RankChange]
    """Those that moved most; empty unless both sides have several."""
    clock: ClockEffect | None
    notes: list[str]
    """A sentence each, largest cause first."""


class Bottleneck(Struct, frozen=True):
    """What one side's profile came to."""

    headline: str
    run: str
    """Which of the side's runs was profiled."""
    steps: int
    """That were recorded; 0 where the trace marks none."""
    overhead: float | None
    """Time of a profiled step over that of a clean one, less 1."""


class FindingChange(Struct, frozen=True):
    """A finding of either side."""

    id: str
    title: str
    """As the candidate words it, where it has it."""
    fate: Fate | None
    """None where the other side could not be judged: it was not profiled, or lacks what the rule needs."""
    baseline: Severity | None
    """None where the side does not have it."""
    candidate: Severity | None
    baseline_saving: float | None
    """What mending it saves at most, as a fraction of the step."""
    candidate_saving: float | None


class WorkChange(Struct, frozen=True):
    """A kernel or an operator of two profiles. Seconds and calls of one step; 0 where a side does not have it."""

    name: str
    before: float
    after: float
    calls_before: float
    calls_after: float


class Causes(Struct, frozen=True):
    """What two profiles name as causes. Times are of the profiled repeats: they tell shares, not speed."""

    baseline: Bottleneck | None
    """None where the side was not profiled."""
    candidate: Bottleneck | None
    findings: list[FindingChange]
    of: Work | None
    """What `work` lists: operators, by their own time on the host, where no device was at work."""
    work: list[WorkChange]
    """The largest changes first."""
    others: int
    """Changes that `work` leaves out."""
    obstacle: str | None
    """Why no work of two profiles is set side by side."""


class SizeChange(Struct, frozen=True):
    """Bytes of one category; 0 where a side does not have it."""

    category: str
    baseline: int
    candidate: int
    change: int


class PhaseMemory(Struct, frozen=True):
    """A phase at its own peak, in bytes."""

    stage: footprint.Stage
    phase: Phase
    baseline: int | None
    """None where the side does not come to the phase."""
    candidate: int | None
    change: int
    categories: list[SizeChange]
    """What is not held on either side is left out; so in the next."""


class MemoryPeak(Struct, frozen=True):
    """One side at its worst moment."""

    run: str
    """Which of the side's runs it is of."""
    rank: int
    """The one that holds most."""
    source: footprint.Source
    device: str | None
    stage: footprint.Stage
    phase: Phase
    level: footprint.Level


class Memory(Struct, frozen=True):
    """What fills the memory of two runs that were followed or predicted. The largest changes come first."""

    baseline: MemoryPeak
    candidate: MemoryPeak
    change: int
    """Of the peak's total, in bytes."""
    categories: list[SizeChange]
    """At each side's peak."""
    phases: list[PhaseMemory]


class Comparison(Struct, frozen=True):
    """One candidate against the baseline."""

    baseline: SideSummary
    candidate: SideSummary
    comparability: Comparability
    verdicts: list[Verdict]
    explanation: Explanation
    warnings: list[str]
    causes: Causes | None = None
    """None unless a side was profiled."""
    memory: Memory | None = None
    """None unless the memory of both sides was followed."""


class GateResult(Struct, frozen=True):
    """One `--fail-on` condition for one metric of one candidate."""

    condition: str
    """As the user wrote it."""
    metric: str
    candidate: str
    limit: float
    """The worsening that is tolerated, as a fraction: the condition's, or the noise floor where that is larger."""
    worsening: float | None
    """As measured; negative for an improvement."""
    interval: tuple[float, float] | None
    p_value: float | None
    """Chance of such data if the worsening were `limit` exactly, after Holm's correction over the whole gate."""
    outcome: Literal["regressed", "passed", "inconclusive"]
    reason: str | None = None
    """Why nothing is concluded, where the figures do not say: the candidate is rejected, or noise is too large."""


class Comparisons(Struct, frozen=True):
    """Everything that one `gpubench compare` found."""

    schema_version: int
    confidence: float
    margin: float
    comparisons: list[Comparison]
    gate: list[GateResult]
    left_out: list[str]
    """Damaged runs that --skip-invalid passed over, with the reason."""


class NullMetric(Struct, frozen=True, kw_only=True):
    """How much one metric varies where nothing was changed. Fractions of its mean."""

    metric: str
    unit: str
    level: Literal["run", "repeat"]
    """Whose spread this is: of runs from four on and where each has one repeat, else of the repeats of all runs."""
    units: Annotated[int, Meta(ge=2)]
    """How many of them it was learned from."""
    spread: Annotated[float, Meta(ge=0)]
    """Standard deviation between them."""
    within: float | None
    """Standard error that the steps inside one of them leave, autocorrelation counted; None where it has no steps."""
    noise_floor: Annotated[float, Meta(ge=0)]
    """Difference that noise alone can make between two of them: t x spread x sqrt(2)."""
    per_side: int
    """Of them on each side of a split."""
    splits: int
    false_verdicts: float | None
    """Fraction of the random A/A splits that were called a change; None where there are too few repeats to split."""
    resolvable: float | None
    """Smallest change found with 80 % power by `per_side` repeats on each side."""
    single_splits: int
    single_false_verdicts: float | None
    """The same for one repeat against one other, judged by the interval of their steps and the bare margin."""


class Noise(Struct, frozen=True):
    """The content of noise.json: what this workload's figures are worth on this machine."""

    schema_version: int
    workload: dict[str, Any]
    machine: dict[str, Any]
    runs: list[str]
    margin: float
    confidence: float
    metrics: list[NullMetric]
