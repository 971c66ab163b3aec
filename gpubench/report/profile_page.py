"""A profile as a section of a run's page, and as a page of its own."""

from typing import Any

from markupsafe import Markup

from gpubench.comparison.causes import finding_changes
from gpubench.findings import Finding, Findings
from gpubench.report import finding_phrases, lanes, profile_against, profile_phrases, profile_tables, sheets, wording
from gpubench.report.figures import Figure
from gpubench.report.phrases import clean
from gpubench.report.profile_against import Against
from gpubench.report.templating import environment
from gpubench.trace.profile import Profile, Rank, Timeline

MEASURES = ("expected", "measured")  # lines of figures alone: a minus in any other may be part of code to be pasted


def section(profile: Profile, findings: Findings, trace: str | None = None) -> dict[str, Any]:
    """What templates/profile.html shows. trace: where the lowest rank's file is, if not under its own name."""
    first = profile.ranks[0]
    bars = lanes.partition(profile.ranks)
    return {
        "headline": _sentence(findings.headline),
        "about": wording.typeset(profile_phrases.about(profile)),
        "caveat": wording.opening(profile_phrases.caveat(first, findings.overhead)),
        "partition": Figure("Where the time went", bars) if bars else None,
        "per": profile_phrases.per(first),
        "parts": [_part(first, part) for part in profile_phrases.parts(first)],
        "ranks": profile_tables.ranks(profile) if len(profile.ranks) > 1 else None,
        "stragglers": [wording.opening(profile_phrases.straggler(one)) for one in profile.stragglers],
        "timeline": _timeline(first.timeline) if first.timeline else None,
        "sheets": profile_tables.tables(first),
        "sentences": [wording.opening(sentence) for sentence in profile_phrases.sentences(first)],
        "missing": wording.opening(profile_phrases.missing(profile)),
        "doubts": profile_phrases.doubts(profile),
        "trace": clean(trace or first.label),
        "viewer": profile_phrases.VIEWER,
        **cards(findings),
    }


def cards(findings: Findings) -> dict[str, Any]:
    """What its macro `cards` shows."""
    return {
        "findings": [_card(finding) for finding in findings.findings],
        "together": _together(findings),
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


def _timeline(found: Timeline) -> dict[str, Any] | None:
    drawing: Markup | None = lanes.timeline(found)
    if drawing is None:
        return None
    note = f"Left out as too short to be drawn: {found.left_out:,}." if found.left_out else ""
    styles = [box.style for lane in found.lanes for box in lane.boxes]
    return {"figure": Figure(f"Step {found.step}", drawing, note), "legend": lanes.legend(styles)}


def _card(finding: Finding) -> dict[str, Any]:
    lines = finding_phrases.lines(finding)
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


def _together(findings: Findings) -> tuple[str, str] | None:
    """All confirmed fixes, and what they came to."""
    found = findings.combination
    if found is None:
        return None
    return finding_phrases.options(found.fix), wording.typeset(finding_phrases.measured(found.measured))


def _against(profile: Profile, findings: Findings, against: Against) -> dict[str, Any]:
    before, after = against.profile.ranks[0], profile.ranks[0]
    tables: list[sheets.Sheet] = [
        profile_against.part_changes(before, after), profile_against.kernel_changes(against.changes)
    ]  # fmt: skip
    return {
        "speed": wording.opening(profile_against.speed(before, after)),
        "headline": _sentence(against.findings.headline),
        "about": profile_phrases.about(against.profile),
        "sheets": [one for one in tables if one],
        "fates": [
            (profile_against.fate(change), wording.typeset(profile_against.about(change)))
            for change in finding_changes(against.findings, findings)
        ],
    }
