"""Sentences and table cells that the terminal, Markdown and pages share.

The functions return plain text without colours, columns or escapes, in which names and reasons from a run are as they
were recorded.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpubench import units
from gpubench.compare.intervals import CONFIDENCE
from gpubench.compare.result import (
    Comparability,
    Comparison,
    Difference,
    GateResult,
    PhaseChange,
    Refusal,
    Verdict,
    Waterfall,
)
from gpubench.compare.verdicts import leading, of_machine
from gpubench.text import words

ASIDE = ("treatment", "protocol", "code")
FAR = 10.0  # the end of a ratio's interval beyond which percents, such as +2511 %, are hard to read
DECIDES = f"below {1 - CONFIDENCE:.2g} decides"  # of an adjusted p-value
WITHOUT_NEWS = {
    "skipped_steps": 0.0,
    "phase_worker_start": 0.0,
    "phase_graph_capture": 0.0,
}  # metrics of a run that are hidden while they have this value
ASIDE_ROWS = 15  # differences that do not prevent a comparison: the list ends there, and the rest are counted


def omission(line: str) -> str:
    """Returns what a comparison left out, and why."""
    return line if line.startswith("skipped ") else f"left out: {line}"


def change(verdict: Verdict, interval: bool = True) -> str:
    """Returns the ratio as a cell: "+3.1 % [+2.6, +3.7]", or from a factor of 2 on "3.40 x [3.10, 3.70]"."""
    estimate, edges, unit = figures(verdict)
    text = f"{estimate} {unit}".rstrip()
    return f"{text} [{', '.join(edges)}]" if interval and edges else text


def notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns notes on the verdicts, one line per note with the metrics that share it."""
    return _by_text((note(verdict), words(verdict.metric)) for verdict in verdicts)


def reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns the reasons of the verdicts, one line per reason with the metrics that share it."""
    return _by_text((verdict.reason or "", words(verdict.metric)) for verdict in verdicts)


def _by_text(notes: Iterable[tuple[str, str]]) -> list[str]:
    said: dict[str, list[str]] = {}
    for text, name in notes:
        if text:
            said.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]


def shown(verdicts: Sequence[Verdict], everything: bool) -> list[Verdict]:
    """Returns the verdicts to list: without `everything`, phases (see the waterfall) and zeros are left out."""
    news = [one for one in verdicts if not one.metric.startswith("phase_") and (one.baseline or one.candidate)]
    return list(verdicts) if everything or not news else news


def values(verdict: Verdict) -> tuple[str, str]:
    """Returns the figures of both sides; of one that is too noisy the median of its repeats, as reports of it have."""
    ours, theirs = verdict.medians
    return _value(verdict.baseline, ours, verdict.unit), _value(verdict.candidate, theirs, verdict.unit)


def _value(estimate: float, median: float | None, unit: str) -> str:
    return units.quantity(estimate, unit) if median is None else f"median {units.quantity(median, unit)}"


def method(verdict: Verdict) -> str:
    """Returns how a verdict was made, and the smallest change that it could have found."""
    parts = [verdict.method, _evidence(verdict), f"margin {units.percent(verdict.margin)}"]
    if verdict.noise_floor is not None:
        parts.append(f"noise floor {units.difference(verdict.noise_floor)}")
    if verdict.resolvable is not None:
        parts.append(f"resolvable change {units.difference(verdict.resolvable)}")
    return f"{words(verdict.metric)}: {'; '.join(part for part in parts if part)}"


def moment(started: str) -> str:
    """Returns an ISO time, cut to the minute."""
    return f"{started[:16].replace('T', ' ')} UTC"


def listed(differences: Sequence[Difference]) -> tuple[list[Difference], str]:
    """Returns the differences to list, those that prevent a comparison first, and a line that counts the rest."""
    in_the_way = [difference for difference in differences if difference.kind not in ASIDE]
    aside = [difference for difference in differences if difference.kind in ASIDE and not difference.follows]
    rest = aside[ASIDE_ROWS:]
    counts = ", ".join(f"{n} {kind}" for kind in ASIDE if (n := sum(one.kind == kind for one in rest)))
    return in_the_way + aside[:ASIDE_ROWS], f"and {len(rest)} more ({counts}): --json lists them" if rest else ""


def consequences(differences: Sequence[Difference]) -> list[str]:
    """Returns lines about differences that follow from a setting, one per setting."""
    said: dict[str, list[str]] = {}
    for one in differences:
        if one.follows:
            said.setdefault(one.follows, []).append(f"{one.key} {cell(one.baseline)} -> {cell(one.candidate)}")
    return [f"follows from {cause}: {', '.join(changes)}" for cause, changes in said.items()]


@dataclass(frozen=True)
class WaterfallRow:
    """One row of the waterfall, as text."""

    phase: str
    change: str
    share: str
    """The change as a share of the baseline's whole."""
    interval: str


def moves(waterfall: Waterfall) -> list[WaterfallRow]:
    return [_move(phase, waterfall.baseline) for phase in waterfall.phases]


def total(waterfall: Waterfall) -> WaterfallRow:
    """Returns the last row of the waterfall, the total change."""
    moved = waterfall.candidate - waterfall.baseline
    share = units.signed_percent(moved / waterfall.baseline) if waterfall.baseline else ""
    return WaterfallRow(f"time of a {waterfall.per}", units.signed_seconds(moved), share, interval="")


def span(waterfall: Waterfall) -> str:
    return f"{units.seconds(waterfall.baseline)} before, {units.seconds(waterfall.candidate)} after"


def gate(result: GateResult) -> str:
    """Returns a gate's condition, candidate, measured change and limit, without the outcome."""
    line = f"{result.condition}: {result.candidate}: {worsening(result)}"
    if result.p_value is None:
        return line
    decides = f" ({DECIDES})" if result.outcome == "inconclusive" else ""
    return f"{line}, adjusted p {result.p_value:.2g}{decides}"


def worsening(result: GateResult, interval: bool = True) -> str:
    """Returns measured change and limit, as "step_time worse by 3.1 % [2.6, 3.7] > 2 %", with the reason if open."""
    said, limit = f"{result.metric} {worse(result, interval)}", units.difference(result.limit)
    if result.worsening is None or result.worsening <= 0:
        said += f", limit {limit}"
    else:
        said += f" {'>' if result.worsening > result.limit else '<='} {limit}"
    return f"{said} ({result.reason})" if result.reason else said


def worse(result: GateResult, interval: bool = True) -> str:
    """Returns the direction in words, as "worse by 3.1 % [2.6, 3.7]" or "better by 12 % [1, 23]"."""
    if result.worsening is None:
        return "unknown"
    low, high = result.interval or (0.0, 0.0)
    ends = None if _invisible(high - low) else (low, high)
    if ends is None and _invisible(result.worsening):
        return "unchanged"
    places, sign = decimals(result.worsening, ends), -1 if result.worsening < 0 else 1
    edges = ", ".join(_signed(edge, places, "-") for edge in sorted(sign * end for end in ends or ()))
    measured = f"{'better' if sign < 0 else 'worse'} by {_signed(abs(result.worsening), places, '-')} %"
    return f"{measured} [{edges}]" if edges and interval else measured


def cell(value: Any) -> str:
    """Returns a setting's value, or a dash if the side has none."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def figures(verdict: Verdict) -> tuple[str, list[str], str]:
    """Returns the estimate, the ends of its interval if that has a width, and their unit."""
    ratio, ends = verdict.ratio, width(verdict)
    if verdict.verdict == "withheld":
        return "-", [], ""
    if verdict.too_noisy:
        return "too noisy", [], ""
    if not ratio:
        return (
            ("+0", [], "%")
            if verdict.baseline == verdict.candidate
            else ("to 0" if verdict.baseline else "from 0", [], "")
        )
    if large(ratio, ends):
        return *units.factors(ratio, ends or ()), "x"
    if ends is None and _invisible(ratio - 1):
        return "+0", [], "%"
    places = decimals(ratio - 1, ends)
    return _signed(ratio - 1, places), [_signed(end - 1, places) for end in ends or ()], "%"


def width(verdict: Verdict) -> tuple[float, float] | None:
    """Returns the ratio's interval; None if all repeats agree except for rounding."""
    ends = verdict.interval
    return None if ends is None or math.isclose(*ends, rel_tol=units.SMALLEST_PERCENT / 100) else ends


def large(ratio: float, ends: tuple[float, float] | None) -> bool:
    """Tells whether to show a factor instead of percents, because the ratio or its interval is large."""
    return not 0.5 < ratio < 2 or any(not 1 / FAR < end < FAR for end in ends or ())


def decimals(estimate: float, interval: tuple[float, float] | None) -> int:
    """Returns the decimals of a percentage: up to the first digit of half the interval, and at least 1 below 10 %.

    A whole number without an interval has none.
    """
    half = abs(interval[1] - interval[0]) * 50 if interval else 0.0
    if not half and _invisible(estimate - round(estimate, 2)):
        return 0
    doubtful = half or abs(estimate) * 10
    if not doubtful:
        return 1
    return min(4, max(0 if half >= 10 else 1, math.ceil(-math.log10(doubtful))))


def _invisible(fraction: float) -> bool:
    """Tells whether a fraction is too small to show in any digit."""
    return abs(fraction) * 100 < units.SMALLEST_PERCENT


def _signed(fraction: float, places: int, sign: str = "+") -> str:
    return f"{round(fraction * 100, places) + 0.0:{sign}.{places}f}"  # + 0.0: no negative zero


def note(verdict: Verdict) -> str:
    """Returns why a verdict is withheld, or where an inconclusive one leans and what would settle it."""
    reason = verdict.reason or ""
    if verdict.verdict != "inconclusive":
        return reason
    leans = f"leans {verdict.leaning}" if verdict.leaning else ""
    settles = to_settle(verdict) if verdict.more_repeats else ""
    return "; ".join(part for part in (reason, leans, settles) if part)


def to_settle(verdict: Verdict) -> str:
    more = units.counted(verdict.more_repeats or 0, "more run" if verdict.level == "run" else "more repeat")
    return f"about {more} a side should settle a change of this size"


def _evidence(verdict: Verdict) -> str:
    ours, theirs = verdict.units
    if verdict.level is None:
        return ""
    if verdict.level == "step":
        worth, worth_theirs = verdict.effective_n
        effective = f", worth {worth:.0f} and {worth_theirs:.0f} independent ones" if worth and worth_theirs else ""
        return f"steps alone{effective}"
    return (
        f"{ours} interleaved pairs of {verdict.level}s" if verdict.paired else f"{ours} and {theirs} {verdict.level}s"
    )


def _move(phase: PhaseChange, whole: float) -> WaterfallRow:
    varied = phase.interval and phase.interval[0] < phase.interval[1]
    edges = ", ".join(units.signed_seconds(edge) for edge in phase.interval or ()) if varied else ""
    share = units.signed_percent(phase.change / whole) if whole else ""
    return WaterfallRow(words(phase.phase), units.signed_seconds(phase.change), share, f"[{edges}]" if edges else "")


PLURAL = frozenset({"parameters"})
"""The facts of a workload whose names are plural."""
SPEEDS = ("faster", "slower")


def headline(comparison: Comparison) -> str:
    """Returns the comparison in one sentence.

    For example "new is 3.1 % slower than base in step time (95 % interval 2.6 to 3.7 %), beyond the 0.5 % margin".
    """
    comparability, verdict = comparison.comparability, leading(comparison.verdicts)
    undecidable = comparison.sameness.undecidable
    if undecidable and not (verdict and verdict.verdict != "rejected"):
        return refusal(undecidable, comparison)
    if not (comparability.comparable or comparability.forced):
        return f"withheld: {_obstacle(comparability)}"
    if verdict is None:
        return "nothing to compare: no metric is known of both sides"
    if verdict.verdict == "withheld":
        return f"withheld: {verdict.reason or words(verdict.metric)}"
    if verdict.verdict == "rejected":  # the reason begins with the side that it concerns
        return f"rejected, {verdict.reason or words(verdict.metric)}"
    sentence = _sentence(verdict, comparison)
    if not comparability.comparable:
        sentence += f", although {_obstacle(comparability)}"
    if verdict.verdict == "inconclusive" and verdict.more_repeats:
        sentence += f"; {to_settle(verdict)}"
    return sentence


def refusal(refused: Refusal, comparison: Comparison) -> str:
    """Returns why one side must not be preferred, with the name of the side that it concerns."""
    side = comparison.candidate if refused.side == "candidate" else comparison.baseline
    return f"{side.label} {refused.reason}"


def _obstacle(comparability: Comparability) -> str:
    """Returns a clause that says why the sides cannot be compared."""
    workload = [difference for difference in comparability.differences if difference.kind == "workload"]
    if not workload:
        return comparability.reasons[0] if comparability.reasons else "the sides did not do the same work"
    first = workload[0]
    more = f", and {len(workload) - 1} more" if len(workload) > 1 else ""
    verb = "differ" if first.key in PLURAL else "differs"
    return f"{first.key} {verb} ({cell(first.baseline)} against {cell(first.candidate)}{more})"


def _sentence(verdict: Verdict, comparison: Comparison) -> str:
    baseline, candidate = comparison.baseline.label, comparison.candidate.label
    name, margin = words(verdict.metric), units.percent(verdict.margin)
    if verdict.verdict == "equivalent":
        within = f"within the {margin} margin"
        return f"{candidate} and {baseline} are equivalent in {name}: {_measured(verdict)}, {within}"
    if verdict.verdict == "inconclusive":
        leans = f", leaning {verdict.leaning}" if verdict.leaning else ""
        why = f", {verdict.reason}" if verdict.reason else ""
        if verdict.too_noisy:
            return f"inconclusive: {verdict.reason} whether {name} differs between {candidate} and {baseline}"
        return f"inconclusive: {name} of {candidate} {_compared(verdict, baseline)}{why}{leans}"
    if not verdict.ratio:
        return f"{candidate} is {verdict.verdict} than {baseline} in {name}, {change(verdict)}"
    beyond = f"beyond the {_limit(verdict)}"
    said = f"{candidate} {_established(verdict, verdict.ratio, baseline)}, {beyond}"
    return f"{said}, from one run each" if _says_nothing_of_runs(verdict, comparison) else said


def _limit(verdict: Verdict) -> str:
    """Returns the limit that the change exceeds."""
    if verdict.limit <= verdict.margin:
        return f"{units.percent(verdict.margin)} margin"
    return of_machine(verdict.limit).removeprefix("the ")


def _says_nothing_of_runs(verdict: Verdict, comparison: Comparison) -> bool:
    """Tells whether one run represents each side, although runs may differ by more than their repeats do.

    Verdicts at the level of steps do not count: their interval says what it assumes.
    """
    single = comparison.baseline.runs == comparison.candidate.runs == 1
    return single and not verdict.paired and verdict.level == "repeat" and verdict.verdict in SPEEDS


def _measured(verdict: Verdict) -> str:
    """Returns the signed change, as "+1.2 % (95 % interval -0.3 to +2.7 %)"."""
    estimate, edges, unit = figures(verdict)
    return f"{estimate} {unit}{_between(edges, unit, verdict)}".rstrip()


def _compared(verdict: Verdict, baseline: str) -> str:
    """Returns a change that is not established, as "differs from that of base by +1.2 % (95 % interval ...)"."""
    estimate, edges, unit = figures(verdict)
    between = _between(edges, unit, verdict)
    if unit == "%":
        return f"differs from that of {baseline} by {estimate} %{between}"
    return f"is {estimate} x that of {baseline}{between}" if unit else f"changes {estimate}"


def _established(verdict: Verdict, ratio: float, baseline: str) -> str:
    """Returns the unsigned change with its verb, as "is 3.1 % slower than base in step time (95 % ...)"."""
    name, word, ends = words(verdict.metric), verdict.verdict, width(verdict)
    if not large(ratio, ends):
        places = decimals(ratio - 1, ends)
        edges = [f"{edge * 100:.{places}f}" for edge in sorted(abs(end - 1) for end in ends or ())]
        size, between = f"{abs(ratio - 1) * 100:.{places}f} % {word}", _between(edges, "%", verdict)
        if word in SPEEDS:
            return f"is {size} than {baseline} in {name}{between}"
        return f"has {size} {name} than {baseline}{between}"
    inverse = word in SPEEDS and ratio < 1
    figure, edges = units.factors(
        1 / ratio if inverse else ratio, sorted(1 / end if inverse else end for end in ends or () if end > 0)
    )
    size, between = f"{figure} x", _between(edges, "x", verdict)
    if word in SPEEDS:
        return f"is {size} as {'fast' if word == 'faster' else 'slow'} as {baseline} in {name}{between}"
    return f"has {size} the {name} of {baseline}{between}"


def _between(edges: Sequence[str], unit: str, verdict: Verdict) -> str:
    """Returns the interval as text; between two single units it says what the interval is from."""
    if len(edges) != 2:
        return ""
    over = ""
    if verdict.assumed is not None:
        over = f", if equal processes differ by at most {units.difference(verdict.assumed)}"
    elif verdict.level and verdict.units == (1, 1):
        over = f", from equal {verdict.level}s on record"
    return f" (95 % interval {edges[0]} to {edges[1]} {unit}{over})"


def left_out_as_warmup(warmup: tuple[int, int] | None) -> str:
    """Returns how many steps are left out at the start of each repeat; "" where nothing is measured in steps."""
    if warmup is None:
        return ""
    least, most = warmup
    if not most:
        return "no steps are left out as warm-up; --skip N leaves out the first N of each repeat"
    if least < most:
        return f"warm-up: {least} to {most} steps, as repeats are of different length; --skip N sets it"
    return f"warm-up: the first {units.counted(most, 'step')} of each repeat; --skip N sets it"
