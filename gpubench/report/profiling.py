"""What a profile has to say, in the terminal and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench.comparison.causes import finding_changes
from gpubench.comparison.result import FindingChange
from gpubench.findings import Finding, Findings
from gpubench.report import finding_phrases, likeness, profile_against, profile_phrases, profile_tables, sheets
from gpubench.report.plain import clean
from gpubench.report.profile_against import Against
from gpubench.runs import SCHEMA_VERSION
from gpubench.screen import BAR, bar, plain_table, say, say_unbroken
from gpubench.trace.profile import KernelChange, Profile, Rank

SMALLEST_BAR = 8  # characters
SEVERITIES = {"high": "red", "medium": "yellow", "low": "cyan"}
OUTCOMES = {"confirmed": "green", "no effect": "yellow", "inconclusive": "yellow", "worse": "red", "failed": "magenta"}
FATES = {"gone": "green", "still there": "yellow", "new": "red"}


def show(
    profile: Profile,
    findings: Findings,
    console: Console,
    trace: str | None = None,
    unit: str = "step",
    own: bool = False,
    *,
    unfolded: bool = False,
) -> None:
    """From the sentence that matters to what to do about it.

    trace: where its file is, if not under its own name. unit: what a step of the profiler is. own: it is of a run of
    this program, which can be told to record more. unfolded: every module has a row, also where layers are equal.
    """
    first = profile.ranks[0]
    say(console, clean(findings.headline), "bold")
    say(console, profile_phrases.about(profile, unit), "dim")
    loudness = "bold yellow" if profile_phrases.is_distorted(findings.overhead) else "dim"
    say(console, profile_phrases.caveat(first, findings.overhead, unit), loudness)
    if len(profile.ranks) > 1:
        sheets.show([profile_tables.ranks(profile, unit)], console)
        _say_all(console, map(profile_phrases.straggler, profile.stragglers))
    console.print()
    console.print(_parts(first, console.width, unit))
    sheets.show(profile_tables.tables(first, unfolded=unfolded), console)
    if sentences := profile_phrases.sentences(first, unit):
        console.print()
        _say_all(console, sentences)
    show_findings(findings, console, profile_phrases.whole(first, unit))
    _show_unknown(console, profile, own)
    say_unbroken(console, profile_phrases.perfetto(trace or first.label))


def show_against(
    before: Profile,
    after: Profile,
    changes: Sequence[KernelChange],
    findings_before: Findings,
    findings_after: Findings,
    console: Console,
) -> None:
    """Two traces of one program: what became of its time and of its findings."""
    ours, theirs = before.ranks[0], after.ranks[0]
    unlike = likeness.differences(before, after)
    say(console, profile_against.speed(ours, theirs, not unlike), "bold")
    if unlike:
        say(console, profile_against.reservation(unlike), "bold yellow")
    for name, profile, findings in (("before", before, findings_before), ("after", after, findings_after)):
        say(console, f"{name}: {clean(findings.headline)}")
        say(console, f"  {profile_phrases.about(profile)}", "dim")
    sheets.show(profile_against.tables(ours, theirs, changes, not unlike), console)
    console.print()
    show_fates(finding_changes(findings_before, findings_after), console, alike=not unlike)
    show_findings(findings_after, console, profile_phrases.whole(theirs))
    _show_unknown(console, after)


def show_fates(changes: Iterable[FindingChange], console: Console, *, alike: bool = True) -> None:
    """What became of each finding, a line each. alike: of the same work, so that one can be gone."""
    for change in changes:
        style = FATES[change.fate] if change.fate and alike else ""
        say(console, f"{profile_against.fate(change, alike)}: {profile_against.about(change)}", style)


def to_document(profile: Profile, findings: Findings, against: Against | None = None) -> dict[str, Any]:
    """For --json: profile.json and findings.json as they are, beside what they are set against."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "profile": profile, "findings": findings}
    if against:
        document["against"] = {
            "profile": against.profile,
            "findings": against.findings,
            "kernels": list(against.changes),
            "unlike": likeness.differences(against.profile, profile),
        }
    return document


def _parts(rank: Rank, width: int, unit: str) -> Table:
    """A bar for each part of the window; where there is no room for bars, their figures."""
    parts = profile_phrases.parts(rank)
    cells = [
        (part.name, profile_phrases.share(rank, part.time), profile_phrases.duration(rank, part.time)) for part in parts
    ]
    room = width - sum(max(len(cell) for cell in column) + 2 for column in zip(*cells, strict=True))
    table = plain_table()
    table.add_column(profile_phrases.per(rank, unit), no_wrap=True)
    if room >= SMALLEST_BAR:
        table.add_column("", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for part, (name, share, time) in zip(parts, cells, strict=True):
        bars = [bar(part.time / rank.wall, part.style, min(BAR, room))] if room >= SMALLEST_BAR else []
        table.add_row(Text(name), *bars, Text(share), Text(time))
    return table


def show_findings(findings: Findings, console: Console, whole: str) -> None:
    """What is wrong, what to keep, and what could not be judged. whole: what a saving is of."""
    for number, finding in enumerate(findings.findings, 1):
        console.print()
        console.print(_title(number, finding))
        console.print(_lines(finding, whole))
    if not findings.findings:
        say(console, f"no finding: {finding_phrases.NOTHING}")
    console.print()
    if findings.interrupted:
        say(console, finding_phrases.INTERRUPTED, "yellow")
    if together := finding_phrases.combination(findings, whole):
        say(console, together)
    if findings.keep:
        say_unbroken(console, f"keep: {finding_phrases.options(findings.keep)}", "bold")
    for missing, rules in finding_phrases.unanswered(findings):
        say(console, f"not judged for want of {missing}: {rules}", "dim")


def _title(number: int, finding: Finding) -> Text:
    severity = (f"  {finding.severity}", SEVERITIES[finding.severity])
    return Text.assemble((f"{number}. {clean(finding.title)}", "bold"), severity)


def _lines(finding: Finding, whole: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    previous = ""
    for what, words in finding_phrases.lines(finding, whole):
        style = OUTCOMES[finding.measured.outcome] if finding.measured and what == "measured" else ""
        grid.add_row(Text(f"   {what if what != previous else ''}", "dim"), Text(words, style))
        previous = what
    return grid


def _show_unknown(console: Console, profile: Profile, own: bool = False) -> None:
    for sentence in profile_phrases.missing(profile, own):
        say(console, sentence, "dim")
    for note in profile_phrases.doubts(profile):
        say(console, f"note: {note}", "yellow")


def _say_all(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        say(console, line)
