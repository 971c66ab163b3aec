"""What findings propose, how it did, and what of it goes together."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpubench.findings import Finding, Findings, Trial


def proposed(findings: Findings) -> list[dict[str, Any]]:
    return [finding.fix for finding in findings.findings if finding.fix]


def with_trials(findings: Findings, trials: Iterable[Trial]) -> Findings:
    """Each fix with its trial, in the order of `proposed`."""
    tried = iter(trials)
    judged = [
        msgspec.structs.replace(finding, measured=next(tried)) if finding.fix else finding
        for finding in findings.findings
    ]
    return msgspec.structs.replace(findings, findings=judged)


def confirmed(findings: Findings) -> list[Finding]:
    """The one that saved most first."""
    found = [finding for finding in findings.findings if finding.measured and finding.measured.outcome == "confirmed"]
    return sorted(found, key=lambda finding: saved(finding.measured), reverse=True)


def together(found: Sequence[Finding]) -> dict[str, Any]:
    """The fixes at once, as they may save less than the sum; of two for one setting the first has it."""
    merged: dict[str, Any] = {}
    for finding in found:
        merged = finding.fix | merged
    return merged


def saved(trial: Trial | None) -> float:
    return trial.saving.estimate if trial and trial.saving else 0.0
