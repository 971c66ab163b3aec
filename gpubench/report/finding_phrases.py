"""What is wrong, in plain text: the lines of a finding that the terminal and the page share."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.findings import Cost, Finding, Findings, Saving, Trial
from gpubench.report.phrases import decimals
from gpubench.report.plain import clean
from gpubench.report.profile_phrases import SWITCHES, recorded_with

NUMBERS = ("active",)  # settings of the profiler that are no switches
WIDE = 2.0  # +-100 % of the step
NOTHING = "no rule found anything above its threshold"
INTERRUPTED = "verification was interrupted: what was not tried by then is only expected"


def options(fix: Mapping[str, Any]) -> str:
    """Settings as they are typed: "--data.workers=4 --data.pin_memory=true"."""
    return " ".join(shlex.quote(clean(f"--{key}={_value(value)}")) for key, value in fix.items())


def lines(finding: Finding, whole: str = "step") -> list[tuple[str, str]]:
    """(what it is, the words) below the title, in the order in which they are read. whole: what a saving is of."""
    said = [("evidence", line) for line in finding.evidence]
    said += [("cause", finding.cause), ("fix", finding.advice), ("set", options(finding.fix))]
    if finding.expected:
        said.append(("expected", f"saves up to {units.percent(finding.expected.estimate)} of the {whole}"))
    if finding.measured:
        said.append(("measured", measured(finding.measured, whole)))
    return [(what, clean(words)) for what, words in said if words]


def measured(trial: Trial, whole: str = "step") -> str:
    """How a fix did: "confirmed, -12.3 % [-14.1, -10.4] of the step's time"."""
    if trial.outcome == "inconclusive" and trial.saving and _is_wide(trial.saving):
        return f"{trial.outcome}: these repeats cannot tell; raise --repeats"
    said = f"{trial.outcome}, {_change(trial.saving, whole)}" if trial.saving else trial.outcome
    reason = clean(trial.reason) if trial.reason else cost(trial.cost) if trial.cost else ""
    return f"{said}: {reason}" if reason else said


def cost(found: Cost) -> str:
    """What it is paid with: "throughput -20.0 % [-21.4, -18.6]"."""
    if found.verdict == "equivalent":
        return "throughput unchanged"
    if found.verdict == "inconclusive":
        return "throughput not told apart"
    return f"throughput {_signed(found.change, found.interval)}"


def combination(findings: Findings, whole: str = "step") -> str:
    """What all confirmed fixes come to together; nothing where they were not tried so."""
    found = findings.combination
    return f"together, {options(found.fix)}: {measured(found.measured, whole)}" if found else ""


def unanswered(findings: Findings) -> list[tuple[str, str]]:
    """(what is missing and the option that brings it, the rules that lack it)."""
    rules: dict[tuple[str, str], list[str]] = {}
    for one in findings.unanswered:
        rules.setdefault((clean(one.missing), clean(one.needs)), []).append(clean(one.id).replace("-", " "))
    return [
        (f"{missing} ({_asked(needs)})" if needs else missing, ", ".join(ids))
        for (missing, needs), ids in rules.items()
    ]


def _asked(needs: str) -> str:
    """What would bring it, as one gives it: settings of a run are named in full, options of the profiler are not."""
    own = needs.startswith("profiling.")
    option = needs.removeprefix("profiling.")
    if option in SWITCHES:
        return recorded_with(option, own)
    if not own:
        return needs
    return f"--{needs}" if option in NUMBERS else f"--{needs}=true"


def _is_wide(saving: Saving) -> bool:
    """Whether its interval says nothing: it is wider than from no time at all to twice the time."""
    return saving.low is not None and saving.high is not None and saving.high - saving.low > WIDE


def _change(saving: Saving, whole: str) -> str:
    """A saving as the change of the whole that it is."""
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
