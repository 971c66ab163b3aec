"""Wording of the page only: signs beside verdicts, and the letters A and B for the sides."""

import re
from typing import Final, Literal

import msgspec

from gpubench import units
from gpubench.compare.result import Comparison, GateResult, Outcome, Verdict
from gpubench.report import phrases
from gpubench.report.phrases import headline
from gpubench.text import words

Standing = Literal["established", "equivalent", "inconclusive", "withheld", "rejected"]

MINUS: Final = "\u2212"
_STANDINGS: Final[dict[Outcome, Standing]] = {
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "withheld": "withheld",
    "rejected": "rejected",
}
_SIGNS: Final[dict[Outcome, str]] = {
    "faster": "▲",
    "slower": "▼",
    "more": "↑",
    "less": "↓",
    "equivalent": "=",
    "inconclusive": "?",
    "withheld": "\u2013",
    "rejected": "✕",
}


def standing(verdict: Verdict) -> Standing:
    """Return the strength of a verdict's evidence, which decides its shape on the page."""
    return _STANDINGS.get(verdict.verdict, "established")


def sign(outcome: Outcome) -> str:
    return _SIGNS[outcome]


def name(metric: str) -> str:
    """Return the display name of a metric or phase."""
    return words(metric.removeprefix("phase_"))


def change(verdict: Verdict) -> str:
    """Return the ratio as a change: "+3.1 %"."""
    return typeset(phrases.change(verdict, interval=False))


def interval(verdict: Verdict) -> str:
    """Return the interval of that change, in the same unit: "[+2.6, +3.7]"."""
    _, edges, _ = phrases.figures(verdict)
    return typeset(f"[{', '.join(edges)}]") if edges else ""


def duration(value: float) -> str:
    """Return a change of a time, with its sign."""
    return typeset(units.signed_seconds(value))


def worse(result: GateResult) -> str:
    """Return the result of a gate's condition: "worse by 3.1 % [2.6, 3.7]"."""
    return typeset(phrases.worse(result))


def sentence(comparison: Comparison, baseline: str, candidate: str) -> str:
    """Return the headline with other names for the sides."""
    named = msgspec.structs.replace(
        comparison,
        baseline=msgspec.structs.replace(comparison.baseline, label=baseline),
        candidate=msgspec.structs.replace(comparison.candidate, label=candidate),
    )
    return opening(headline(named))


def opening(said: str) -> str:
    """Return the text with a capital first letter."""
    return typeset(said[:1].upper() + said[1:])


def rests_on(verdict: Verdict) -> str:
    """Return what the interval is made of: "3 and 3 repeats, in pairs"."""
    if verdict.level is None:
        return "one figure a side"
    ours, theirs = verdict.units
    return f"{ours:,} and {theirs:,} {verdict.level}s{', in pairs' if verdict.paired else ''}"


def typeset(text: str) -> str:
    """Return the text with typographic minus signs, and with no line break between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|x\b|[mun]?s\b)", "\u00a0", re.sub(r"(?<!\w)-(?=\d)", MINUS, text))
