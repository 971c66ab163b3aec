"""What the page adds to the words all reports share: signs beside verdicts, and sides called by the page's letters."""

import re
from typing import Final, Literal

import msgspec

from gpubench import units
from gpubench.comparison.result import Comparison, GateResult, Outcome, Verdict
from gpubench.report import phrases
from gpubench.report.headline import headline
from gpubench.report.plain import words

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
    """How much the verdict is worth; it gives the verdict its shape."""
    return _STANDINGS.get(verdict.verdict, "established")


def sign(outcome: Outcome) -> str:
    return _SIGNS[outcome]


def name(metric: str) -> str:
    """A metric or phase as people write it."""
    return words(metric.removeprefix("phase_"))


def change(verdict: Verdict) -> str:
    """The ratio as a change: "+3.1 %"."""
    return typeset(phrases.change(verdict, interval=False))


def interval(verdict: Verdict) -> str:
    """Of that change, in the same unit: "[+2.6, +3.7]"."""
    _, edges, _ = phrases.figures(verdict)
    return typeset(f"[{', '.join(edges)}]") if edges else ""


def duration(value: float) -> str:
    """A change of a time, with its sign."""
    return typeset(units.signed_seconds(value))


def worse(result: GateResult) -> str:
    """What a condition of the gate came upon: "worse by 3.1 % [2.6, 3.7]"."""
    return typeset(phrases.worse(result))


def sentence(comparison: Comparison, baseline: str, candidate: str) -> str:
    """The headline with other names for the sides."""
    named = msgspec.structs.replace(
        comparison,
        baseline=msgspec.structs.replace(comparison.baseline, label=baseline),
        candidate=msgspec.structs.replace(comparison.candidate, label=candidate),
    )
    return opening(headline(named))


def opening(said: str) -> str:
    """Words that begin a sentence."""
    return typeset(said[:1].upper() + said[1:])


def rests_on(verdict: Verdict) -> str:
    """Whose variation the interval is made of: "3 and 3 repeats, in pairs"."""
    if verdict.level is None:
        return "one figure a side"
    ours, theirs = verdict.units
    return f"{ours:,} and {theirs:,} {verdict.level}s{', in pairs' if verdict.paired else ''}"


def typeset(text: str) -> str:
    """With real minus signs, and no line break between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|x\b|[mun]?s\b)", "\u00a0", re.sub(r"(?<!\w)-(?=\d)", MINUS, text))
