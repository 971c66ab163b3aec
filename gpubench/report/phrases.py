"""A comparison in plain text: the sentences and cells that the terminal and Markdown share.

Nothing here knows colours, columns or escapes. Whatever came from a run (labels, reasons, values) has its control
characters made visible, so that no file can move a reader's cursor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpubench import units
from gpubench.comparison.result import (
    Difference,
    GateResult,
    PhaseChange,
    SideSummary,
    Verdict,
    Waterfall,
)
from gpubench.metrics import Metric
from gpubench.report.plain import clean, words

ASIDE = ("treatment", "protocol", "code")
EVEN = 0.1  # of an estimate: up to here the ends of an interval on the log scale lie within a point of each other
FAR = 10.0  # end of an interval of a ratio from which on percents, such as +2511 %, are hard to read
TOO_NOISY = "too noisy to quote"
WITHOUT_NEWS = {"skipped_steps": 0.0}  # metrics of a run that are shown only when they are something else
ASIDE_ROWS = 15  # differences that do not stand in the way: more than these are counted, not listed


def figure(metric: Metric) -> str:
    """A metric of one run in a clause: "1,096 samples/s +- 3.4 %", "96.2 samples/s (80.1 to 116 samples/s)" or, where
    the interval is wider than a factor of two, "13.4 to 331 samples/s, too noisy to quote"."""
    doubt = uncertainty(metric)
    if metric.too_noisy:
        return f"{doubt}, {TOO_NOISY}"
    estimate = units.quantity(metric.estimate, metric.unit)
    return f"{estimate} ({doubt})" if doubt and not doubt.startswith("+-") else f"{estimate} {doubt}".rstrip()


def uncertainty(metric: Metric) -> str:
    """The 95 % interval over repeats: "+- 3.4 %" while both of its ends are about as far away, else as a range.

    Nothing where there is no interval.
    """
    if metric.interval is None or not metric.estimate:
        return ""
    reach = metric.reach or 0.0
    if reach > EVEN or metric.too_noisy:
        return units.span(*metric.interval, metric.unit)
    return f"+- {units.percent(reach)}"


def omission(line: str) -> str:
    """What a comparison did without, and why."""
    return line if line.startswith("skipped ") else f"left out: {line}"


def change(verdict: Verdict, interval: bool = True) -> str:
    """The ratio as a cell: "+3.1 % [+2.6, +3.7]", or "3.40 x [3.10, 3.70]" from twice or half on."""
    estimate, edges, unit = figures(verdict)
    text = f"{estimate} {unit}".rstrip()
    return f"{text} [{', '.join(edges)}]" if interval and edges else text


def notes(verdicts: Sequence[Verdict]) -> list[str]:
    """What a verdict's word leaves open, a line for each reason with the metrics that share it."""
    said: dict[str, list[str]] = {}
    for verdict in verdicts:
        if text := note(verdict):
            said.setdefault(text, []).append(words(verdict.metric))
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]


def shown(verdicts: Sequence[Verdict], everything: bool) -> list[Verdict]:
    """Those of the table; unless all are asked for, without the phases, which the waterfall has, and without zeros."""
    news = [one for one in verdicts if not one.metric.startswith("phase_") and (one.baseline or one.candidate)]
    return list(verdicts) if everything or not news else news


def values(verdict: Verdict) -> tuple[str, str]:
    unit = clean(verdict.unit)
    return units.quantity(verdict.baseline, unit), units.quantity(verdict.candidate, unit)


def method(verdict: Verdict) -> str:
    """How a verdict came about, and what it could have found."""
    parts = [clean(verdict.method), _evidence(verdict), f"margin {units.percent(verdict.margin)}"]
    if verdict.noise_floor is not None:
        parts.append(f"noise floor {units.difference(verdict.noise_floor)}")
    if verdict.resolvable is not None:
        parts.append(f"resolvable change {units.difference(verdict.resolvable)}")
    return f"{words(verdict.metric)}: {'; '.join(part for part in parts if part)}"


def side(summary: SideSummary) -> str:
    """One side in a line: its name, what ran, how often, and when."""
    parts = [clean(summary.headline), units.counted(summary.runs, "run"), units.counted(summary.repeats, "repeat")]
    if summary.started:
        parts.append(clean(moment(summary.started)))
    label, paths = clean(summary.label), [clean(path) for path in summary.paths]
    name = label if len(paths) != 1 or paths[0] == label else f"{label} ({paths[0]})"
    return f"{name}: {'; '.join(part for part in parts if part)}"


def moment(started: str) -> str:
    """An ISO time to the minute."""
    return f"{started[:16].replace('T', ' ')} UTC"


def listed(differences: Sequence[Difference]) -> tuple[list[Difference], str]:
    """The differences to list, those that stand in the way first, and a line that counts the rest."""
    in_the_way = [difference for difference in differences if difference.kind not in ASIDE]
    aside = [difference for difference in differences if difference.kind in ASIDE and not difference.follows]
    rest = aside[ASIDE_ROWS:]
    counts = ", ".join(f"{n} {kind}" for kind in ASIDE if (n := sum(one.kind == kind for one in rest)))
    return in_the_way + aside[:ASIDE_ROWS], f"and {len(rest)} more ({counts}): --json lists them" if rest else ""


def consequences(differences: Sequence[Difference]) -> list[str]:
    """Lines on the differences that are no changes of their own, by the setting that they follow from."""
    said: dict[str, list[str]] = {}
    for one in differences:
        if one.follows:
            said.setdefault(one.follows, []).append(f"{clean(one.key)} {cell(one.baseline)} -> {cell(one.candidate)}")
    return [f"follows from {clean(cause)}: {', '.join(changes)}" for cause, changes in said.items()]


@dataclass(frozen=True)
class Move:
    """One line of the waterfall, in words."""

    phase: str
    change: str
    share: str
    """Of the baseline's whole."""
    interval: str


def moves(waterfall: Waterfall) -> list[Move]:
    return [_move(phase, waterfall.baseline) for phase in waterfall.phases]


def total(waterfall: Waterfall) -> Move:
    """The line below: all changes are its change."""
    moved = waterfall.candidate - waterfall.baseline
    share = units.signed_percent(moved / waterfall.baseline) if waterfall.baseline else ""
    return Move(f"time of a {waterfall.per}", units.signed_seconds(moved), share, interval="")


def span(waterfall: Waterfall) -> str:
    return f"{units.seconds(waterfall.baseline)} -> {units.seconds(waterfall.candidate)}"


def gate(result: GateResult) -> str:
    """What a condition came upon, without its outcome: the condition, the candidate, the measured and the tolerated."""
    line = f"{clean(result.condition)}: {clean(result.candidate)}: {worsening(result)}"
    return f"{line}, adjusted p {result.p_value:.2g}" if result.p_value is not None else line


def worsening(result: GateResult, interval: bool = True) -> str:
    """What was measured beside what is tolerated: "step_time worse by 3.1 % [2.6, 3.7] > 2 %", and why that is open."""
    said, limit = f"{clean(result.metric)} {worse(result, interval)}", units.difference(result.limit)
    if result.worsening is None or result.worsening <= 0:
        said += f", limit {limit}"
    else:
        said += f" {'>' if result.worsening > result.limit else '<='} {limit}"
    return f"{said} ({clean(result.reason)})" if result.reason else said


def worse(result: GateResult, interval: bool = True) -> str:
    """In words, as more of a metric may be better or worse: "worse by 3.1 % [2.6, 3.7]", "better by 12 % [1, 23]"."""
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
    """A setting's value; a dash where a side has none."""
    if value is None:
        return "-"
    return clean(str(value).lower() if isinstance(value, bool) else str(value))


def figures(verdict: Verdict) -> tuple[str, list[str], str]:
    """The estimate, the edges of its interval where it has a width, and their unit."""
    ratio, ends = verdict.ratio, width(verdict)
    if verdict.verdict == "withheld":
        return "-", [], ""
    if not ratio:
        return (
            ("+0", [], "%")
            if verdict.baseline == verdict.candidate
            else ("to 0" if verdict.baseline else "from 0", [], "")
        )
    if large(ratio, ends):
        return units.digits(ratio), [units.digits(end) for end in ends or ()], "x"
    if ends is None and _invisible(ratio - 1):
        return "+0", [], "%"
    places = decimals(ratio - 1, ends)
    return _signed(ratio - 1, places), [_signed(end - 1, places) for end in ends or ()], "%"


def width(verdict: Verdict) -> tuple[float, float] | None:
    """The interval of the ratio, unless all repeats agreed and it is a point but for rounding."""
    ends = verdict.interval
    return None if ends is None or math.isclose(*ends, rel_tol=units.SMALLEST_PERCENT / 100) else ends


def large(ratio: float, ends: tuple[float, float] | None) -> bool:
    """Whether a multiple says more than percents, of a ratio or of an interval that spans orders of magnitude."""
    return not 0.5 < ratio < 2 or any(not 1 / FAR < end < FAR for end in ends or ())


def decimals(estimate: float, interval: tuple[float, float] | None) -> int:
    """Decimals of a percentage: down to the first digit of half the interval, and below 10 % one at least.

    None of a whole number that has no interval.
    """
    half = abs(interval[1] - interval[0]) * 50 if interval else 0.0
    if not half and _invisible(estimate - round(estimate, 2)):
        return 0
    doubtful = half or abs(estimate) * 10
    if not doubtful:
        return 1
    return min(4, max(0 if half >= 10 else 1, math.ceil(-math.log10(doubtful))))


def _invisible(fraction: float) -> bool:
    """Whether it is too small for any digit that is ever shown."""
    return abs(fraction) * 100 < units.SMALLEST_PERCENT


def _signed(fraction: float, places: int, sign: str = "+") -> str:
    return f"{round(fraction * 100, places) + 0.0:{sign}.{places}f}"  # + 0.0: no negative zero


def note(verdict: Verdict) -> str:
    """Why a verdict is withheld, or where an inconclusive one leans and what should settle it."""
    reason = clean(verdict.reason or "")
    if verdict.verdict != "inconclusive":
        return reason
    leans = f"leans {verdict.leaning}" if verdict.leaning else ""
    settles = to_settle(verdict) if verdict.more_repeats else ""
    return "; ".join(part for part in (reason, leans, settles) if part)


def to_settle(verdict: Verdict) -> str:
    more = units.counted(verdict.more_repeats or 0, "more run" if verdict.level == "run" else "more repeat")
    return f"about {more} a side should settle it"


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


def _move(phase: PhaseChange, whole: float) -> Move:
    varied = phase.interval and phase.interval[0] < phase.interval[1]
    edges = ", ".join(units.signed_seconds(edge) for edge in phase.interval or ()) if varied else ""
    share = units.signed_percent(phase.change / whole) if whole else ""
    return Move(words(phase.phase), units.signed_seconds(phase.change), share, f"[{edges}]" if edges else "")
