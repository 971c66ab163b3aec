"""A profile as a section of a run's page, and as a page of its own."""

from typing import Any

from markupsafe import Markup

from gpubench.comparison.causes import finding_changes
from gpubench.findings import Finding, Findings
from gpubench.report import finding_phrases, lanes, likeness, profile_against, profile_phrases, profile_tables, wording
from gpubench.report.figures import Figure
from gpubench.report.plain import clean
from gpubench.report.profile_against import Against
from gpubench.report.templating import environment
from gpubench.trace.profile import Profile, Rank

MEASURES = ("expected", "measured")  # lines of figures alone: a minus in any other may be part of code to be pasted


def section(
    profile: Profile, findings: Findings, trace: str | None = None, unit: str = "step", own: bool = False
) -> dict[str, Any]:
    """What templates/profile.html shows. trace: where the lowest rank's file is, if not under its own name. unit: what
    a step of the profiler is. own: it is of a run of this program, which can be told to record more."""
    first = profile.ranks[0]
    bars = lanes.partition(profile.ranks)
    caveat = wording.opening(profile_phrases.caveat(first, findings.overhead, unit))
    is_loud = profile_phrases.is_distorted(findings.overhead)
    return {
        "headline": _sentence(findings.headline),
        "about": wording.typeset(profile_phrases.about(profile, unit)),
        "caveat": "" if is_loud else caveat,
        "partition": Figure("Where the time went", bars) if bars else None,
        "per": profile_phrases.per(first, unit),
        "parts": [_part(first, part) for part in profile_phrases.parts(first)],
        "ranks": profile_tables.ranks(profile, unit) if len(profile.ranks) > 1 else None,
        "stragglers": [wording.opening(profile_phrases.straggler(one)) for one in profile.stragglers],
        "timeline": _timeline(first, unit),
        "sheets": profile_tables.tables(first),
        "sentences": [wording.opening(sentence) for sentence in profile_phrases.sentences(first, unit)],
        "missing": [wording.opening(sentence) for sentence in profile_phrases.missing(profile, own)],
        "doubts": [caveat] * is_loud + profile_phrases.doubts(profile),
        "trace": clean(trace or first.label),
        "viewer": profile_phrases.VIEWER,
        **cards(findings, profile_phrases.whole(first, unit)),
    }


def cards(findings: Findings, whole: str = "step") -> dict[str, Any]:
    """What its macro `cards` shows. whole: what a saving is of."""
    return {
        "findings": [_card(finding, whole) for finding in findings.findings],
        "interrupted": wording.opening(finding_phrases.INTERRUPTED) if findings.interrupted else "",
        "together": _together(findings, whole),
        "keep": finding_phrases.options(findings.keep),
        "unanswered": finding_phrases.unanswered(findings),
    }


def trace_page(profile: Profile, findings: Findings, against: Against | None = None) -> str:
    """A whole page of traces from anywhere, beside what they are set against if anything."""
    template = environment().get_template("trace.html")
    changed = _against(profile, findings, against) if against else None
    return template.render(found=section(profile, findings), against=changed)


def _part(rank: Rank, part: profile_phrases.Part) -> tuple[str, str, str, str]:
    time, share = profile_phrases.duration(rank, part.time), profile_phrases.share(rank, part.time)
    return part.name, lanes.hue(part.style), wording.typeset(time), wording.typeset(share)


def _timeline(rank: Rank, unit: str) -> dict[str, Any] | None:
    found = rank.timeline
    drawing: Markup | None = lanes.timeline(found, profile_phrases.whole(rank, unit)) if found else None
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
    """Of a text from elsewhere; the template ends it."""
    return wording.opening(clean(text).rstrip("."))


def _together(findings: Findings, whole: str) -> tuple[str, str] | None:
    """All confirmed fixes, and what they came to."""
    found = findings.combination
    if found is None:
        return None
    return finding_phrases.options(found.fix), wording.typeset(finding_phrases.measured(found.measured, whole))


def _against(profile: Profile, findings: Findings, against: Against) -> dict[str, Any]:
    before, after = against.profile.ranks[0], profile.ranks[0]
    unlike = likeness.differences(against.profile, profile)
    return {
        "speed": wording.opening(profile_against.speed(before, after, not unlike)),
        "unlike": wording.opening(profile_against.reservation(unlike)) if unlike else "",
        "headline": _sentence(against.findings.headline),
        "about": profile_phrases.about(against.profile),
        "sheets": profile_against.tables(before, after, against.changes, not unlike),
        "fates": [
            (profile_against.fate(change, not unlike), wording.typeset(profile_against.about(change)))
            for change in finding_changes(against.findings, findings)
        ],
    }
