"""A profile as a section of a run's page, and as a page of its own."""

from typing import Any

from markupsafe import Markup

from gpubench.compare.explanation import finding_changes
from gpubench.findings import Finding, Findings
from gpubench.report import finding_phrases, lanes, wording
from gpubench.report.figures import Figure
from gpubench.report.profile import (
    Against,
    about,
    change_tables,
    differences,
    outcome,
    ranks,
    reservation,
    speed,
    tables,
)
from gpubench.report.templating import environment
from gpubench.text import clean
from gpubench.trace.profile import Profile, Rank

MEASURES = ("expected", "measured")  # lines of figures only: in others a minus may be part of code to be copied


def section(
    profile: Profile, findings: Findings, trace: str | None = None, unit: str = "step", own: bool = False
) -> dict[str, Any]:
    """Return the variables of templates/profile.html.

    `trace` is the lowest rank's file, if it is not under its own name. `unit` is what a step of the profiler is. `own`
    says that the profile is of a run of this program, which can be told to record more.
    """
    first = profile.ranks[0]
    bars = lanes.partition(profile.ranks)
    caveat = wording.opening(finding_phrases.caveat(first, findings.overhead, unit))
    is_loud = finding_phrases.is_distorted(findings.overhead)
    return {
        "headline": _sentence(findings.headline),
        "about": wording.typeset(finding_phrases.about(profile, unit)),
        "caveat": "" if is_loud else caveat,
        "partition": Figure("Where the time went", bars) if bars else None,
        "per": finding_phrases.per(first, unit),
        "parts": [_part(first, part) for part in finding_phrases.time_parts(first)],
        "ranks": ranks(profile, unit) if len(profile.ranks) > 1 else None,
        "stragglers": [wording.opening(finding_phrases.straggler(one)) for one in profile.stragglers],
        "timeline": _timeline(first, unit),
        "sheets": tables(first),
        "sentences": [wording.opening(sentence) for sentence in finding_phrases.sentences(first, unit)],
        "missing": [wording.opening(sentence) for sentence in finding_phrases.missing(profile, own)],
        "doubts": [caveat] * is_loud + finding_phrases.doubts(profile),
        "trace": clean(trace or first.label),
        "viewer": finding_phrases.VIEWER,
        **cards(findings, finding_phrases.whole(first, unit)),
    }


def cards(findings: Findings, whole: str = "step") -> dict[str, Any]:
    """Return the variables of the macro `cards`. `whole` is what a saving is a fraction of."""
    return {
        "findings": [_card(finding, whole) for finding in findings.findings],
        "interrupted": wording.opening(finding_phrases.INTERRUPTED) if findings.interrupted else "",
        "together": _together(findings, whole),
        "keep": finding_phrases.options(findings.keep),
        "unanswered": finding_phrases.unanswered(findings),
    }


def trace_page(profile: Profile, findings: Findings, against: Against | None = None) -> str:
    """Return a whole page of traces from anywhere, compared with others if there are any."""
    template = environment().get_template("trace.html")
    changed = _against(profile, findings, against) if against else None
    return template.render(found=section(profile, findings), against=changed)


def _part(rank: Rank, part: finding_phrases.Part) -> tuple[str, str, str, str]:
    time, share = finding_phrases.duration(rank, part.time), finding_phrases.part_share(rank, part.time)
    return part.name, lanes.hue(part.style), wording.typeset(time), wording.typeset(share)


def _timeline(rank: Rank, unit: str) -> dict[str, Any] | None:
    found = rank.timeline
    drawing: Markup | None = lanes.timeline(found, finding_phrases.whole(rank, unit)) if found else None
    if found is None or drawing is None:
        return None
    note = f"Too short to be drawn: {found.left_out:,} more." if found.left_out else ""
    title = f"{unit.capitalize()} {found.step}" if rank.steps else "The whole trace"
    return {"figure": Figure(title, drawing, note), "legend": lanes.legend(found.lanes)}


def _card(finding: Finding, whole: str) -> dict[str, Any]:
    lines = finding_phrases.lines(finding, whole)
    return {
        "title": clean(finding.title),
        "severity": finding.severity,
        "evidence": [words for what, words in lines if what == "evidence"],
        "lines": [
            (what, wording.typeset(words) if what in MEASURES else words) for what, words in lines if what != "evidence"
        ],
        "threshold": _sentence(finding.threshold),
    }


def _sentence(text: str) -> str:
    """Return a sentence without its full stop, which the template adds."""
    return wording.opening(clean(text).rstrip("."))


def _together(findings: Findings, whole: str) -> tuple[str, str] | None:
    """Return all confirmed fixes and their effect together."""
    found = findings.combination
    if found is None:
        return None
    return finding_phrases.options(found.fix), wording.typeset(finding_phrases.measured(found.measured, whole))


def _against(profile: Profile, findings: Findings, against: Against) -> dict[str, Any]:
    before, after = against.profile.ranks[0], profile.ranks[0]
    unlike = differences(against.profile, profile)
    return {
        "speed": wording.opening(speed(before, after, not unlike)),
        "unlike": wording.opening(reservation(unlike)) if unlike else "",
        "headline": _sentence(against.findings.headline),
        "about": finding_phrases.about(against.profile),
        "sheets": change_tables(before, after, against.changes, not unlike),
        "finding_changes": [
            (outcome(change, not unlike), wording.typeset(about(change)))
            for change in finding_changes(against.findings, findings)
        ],
    }
