"""Findings as blocks of a report: evidence, cause, fix, expected saving, and what the fix was measured to save."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.diagnosis.case import HIGH, MEDIUM
from gpubench.findings import Cost, Finding, Findings, Outcome, Saving, Trial
from gpubench.report import document
from gpubench.report.document import UNASKED, Block, Command, Folded, Heading, Line, Medium, Paragraph, Style
from gpubench.report.phrases import decimals

SWITCHES = ("record_shapes", "with_stack")  # arguments of torch.profiler.profile, and settings of a run
NUMBERS = ("active",)  # settings of the profiler that take numbers
NOTHING = "no rule found anything above its threshold"
OUTCOMES: dict[Outcome, Style] = {
    "confirmed": "better",
    "no effect": "inconclusive",
    "inconclusive": "inconclusive",
    "worse": "worse",
    "failed": "rejected",
    "not applied": "rejected",
}
SEVERITIES = f"severity: high from {units.whole_percent(HIGH)} of the {{}}, medium from {units.whole_percent(MEDIUM)}"
NOT_TRIED = "not tried: it takes a change of the code"
INTERRUPTED = "verification was interrupted: what was not tried by then is only expected"


def options(fix: Mapping[str, Any]) -> str:
    """Returns settings as command-line options: "--data.workers=4 --data.pin_memory=true"."""
    return " ".join(shlex.quote(f"--{key}={_value(value)}") for key, value in fix.items())


def blocks(findings: Findings, whole: str = "step") -> list[Block]:
    """Returns findings, settings to keep, and rules that lack data. `whole` is what a saving is a fraction of.

    Withheld findings are shown on request only: on a page unfolded, on a terminal with -v.
    """
    tried = any(one.measured for one in findings.findings)
    made = _blocks(findings, whole, tried=tried)
    if not findings.withheld or tried:
        return made
    return [
        Paragraph(f"{findings.withheld}; -v shows what would lower it", on=Medium.BRIEF),
        Paragraph(findings.withheld, on=UNASKED),
        Folded(f"What would lower the {whole}", made, on=UNASKED),
    ]


def _blocks(findings: Findings, whole: str, *, tried: bool) -> list[Block]:
    cards = [_finding(one, whole, tried=tried) for one in findings.findings]
    made: list[Block] = [Heading("Findings", 3), document.FindingList(cards, NOTHING)]
    if cards:
        made.append(Paragraph(SEVERITIES.format(whole), "quiet", on=UNASKED))
    if findings.interrupted:
        made.append(Paragraph(INTERRUPTED, "warning"))
    if found := findings.combination:
        made.append(Paragraph(f"together, {options(found.fix)}: {measured(found.measured, whole)}"))
    if findings.keep:
        made.append(Command("keep", options(findings.keep), "strong"))
    if unjudged := unanswered(findings):
        made.append(Folded("What could not be judged", [Paragraph(unjudged, "quiet", listed=True)], on=UNASKED))
    return made


def _finding(finding: Finding, whole: str, *, tried: bool) -> document.FindingBlock:
    """Returns a finding for a report; `tried` says whether the fixes were tried that gpubench can make."""
    lines = [Line("cause", finding.cause, brief=False), Line("fix", finding.advice, brief=not finding.fix)]
    lines.append(Line("in code", finding.code, code=True))
    lines.append(Line("set", options(finding.fix), code=True))
    if finding.expected:
        saving = f"saves up to {units.percent(finding.expected.estimate)} of the {whole}"
        lines.append(Line("expected", saving, figures=True, brief=_is_open(finding.measured)))
    if trial := finding.measured:
        lines.append(Line("measured", measured(trial, whole), OUTCOMES[trial.outcome], figures=True))
    elif tried and not finding.fix:
        lines.append(Line("measured", NOT_TRIED, "inconclusive"))
    return document.FindingBlock(
        title=finding.title,
        severity=finding.severity,
        evidence=[line for line in finding.evidence if line],
        lines=[line for line in lines if line.text],
        threshold=finding.threshold.rstrip("."),
    )


def _is_open(trial: Trial | None) -> bool:
    """Tells whether no trial shows what the fix saves."""
    return trial is None or trial.outcome == "inconclusive"


def measured(trial: Trial, whole: str = "step") -> str:
    """Returns the result of a trial, as "confirmed, -12.3 % [-14.1, -10.4] of the step's time"."""
    said = f"{trial.outcome}, {_change(trial.saving, whole)}" if trial.saving else trial.outcome
    reason = trial.reason if trial.reason else cost(trial.cost) if trial.cost else ""
    return f"{said}: {reason}" if reason else said


def cost(found: Cost) -> str:
    """Returns the cost in throughput, as "throughput -20.0 % [-21.4, -18.6]"."""
    if found.verdict == "equivalent":
        return "throughput unchanged"
    if found.verdict == "inconclusive" or found.change is None:
        return "throughput: no difference established"
    return f"throughput {_signed(found.change, found.interval)}"


def unanswered(findings: Findings) -> list[str]:
    """Returns lines that name what is missing, the rules that need it, and the option that records it."""
    rules: dict[tuple[str, str], list[str]] = {}
    for one in findings.unanswered:
        rules.setdefault((one.missing, one.needs), []).append(one.id.replace("-", " "))
    return [
        f"not judged without {missing}: {', '.join(ids)}{f'; needs {_asked(needs)}' if needs else ''}"
        for (missing, needs), ids in rules.items()
    ]


def _asked(needs: str) -> str:
    """Returns what to ask for: a setting by its full name, an option of the profiler by its own."""
    own = needs.startswith("profiling.")
    option = needs.removeprefix("profiling.")
    if option in SWITCHES:
        return recorded_with(option, own)
    if not own:
        return needs
    return f"--{needs}" if option in NUMBERS else f"--{needs}=true"


def recorded_with(option: str, own: bool) -> str:
    """Returns an option of the profiler as the user writes it."""
    if option in SWITCHES:
        return f"--profiling.{option}=true" if own else f"torch.profiler.profile({option}=True)"
    return "torch.profiler.profile(schedule=...) and step()" if option == "schedule" else option


def _change(saving: Saving, whole: str) -> str:
    ends = None if saving.low is None or saving.high is None else (-saving.low, -saving.high)
    of = "peak" if whole == "peak" else "step's time"
    return f"{_signed(-saving.estimate, ends)} of the {of}"


def _signed(change: float, ends: tuple[float, float] | None) -> str:
    places = decimals(change, ends)
    interval = f" [{', '.join(_percents(end, places) for end in sorted(ends))}]" if ends else ""
    return f"{_percents(change, places)} %{interval}"


def _percents(change: float, places: int) -> str:
    return f"{round(change * 100, places) + 0.0:+.{places}f}"  # + 0.0: no negative zero


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
