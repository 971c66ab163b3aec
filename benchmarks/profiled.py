"""A summary of a profiled run, and whether its figures are consistent."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpubench.findings import Finding, Findings
from gpubench.runs.directory import FINDINGS, PROFILE, TRACES
from gpubench.trace.profile import Profile, ProfiledStep, RankProfile

PATIENCE = 120.0  # seconds for one trace to be read again


@dataclass(frozen=True)
class Profiled:
    headline: str
    overhead: float | None
    """The time of a step with the profiler divided by that without it, minus 1."""
    trace_bytes: int
    """The size of all trace files in bytes, compressed."""
    read_seconds: float
    """The time of `gpubench profile --trace` for the same files."""
    device: dict[str, int] | None
    """The breakdown of the lowest rank, in nanoseconds, like the next two fields."""
    idle: dict[str, int]
    host: dict[str, int]
    launches: int
    unlinked: int
    """The number of device operations without a launch in the trace."""
    findings: list[str]
    """The findings with their largest saving and, if the fix was tried, its result."""
    keep: dict[str, object]
    broken: list[str] = field(default_factory=list)
    """Descriptions of the conditions that are violated."""


def examine(run: Path) -> Profiled | None:
    """Summarise a run directory; None if nothing was recorded."""
    if not (run / PROFILE).is_file() or not (run / FINDINGS).is_file():
        return None
    profile = msgspec.json.decode((run / PROFILE).read_bytes(), type=Profile)
    findings = msgspec.json.decode((run / FINDINGS).read_bytes(), type=Findings)
    again, seconds = _read_again([run / TRACES / rank.label for rank in profile.ranks])
    rank = profile.ranks[0]
    return Profiled(
        headline=findings.headline,
        overhead=findings.overhead,
        trace_bytes=sum(path.stat().st_size for path in (run / TRACES).iterdir()),
        read_seconds=seconds,
        device=msgspec.structs.asdict(rank.device) if rank.device else None,
        idle={str(cause): nanoseconds for cause, nanoseconds in rank.idle.items() if nanoseconds},
        host={str(part): nanoseconds for part, nanoseconds in rank.host.items() if nanoseconds},
        launches=rank.launches.calls if rank.launches else 0,
        unlinked=rank.launches.unlinked if rank.launches else 0,
        findings=[_said(finding) for finding in findings.findings],
        keep=findings.keep,
        broken=[*_broken(profile), *(["--trace tells something else than profile.json"] if again != profile else [])],
    )


def _read_again(traces: Sequence[Path]) -> tuple[Profile | None, float]:
    command = [sys.executable, "-m", "gpubench", "profile", "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *(part for path in traces for part in ("--trace", str(path)))], capture_output=True, timeout=PATIENCE
    )
    took = time.monotonic() - began
    return (_Document.profile_of(done.stdout) if done.returncode == 0 else None), took


class _Document(msgspec.Struct):
    """Return the output of `gpubench profile --json` for trace files."""

    profile: Profile

    @classmethod
    def profile_of(cls, printed: bytes) -> Profile:
        return msgspec.json.decode(printed, type=cls).profile


def _broken(profile: Profile) -> Iterator[str]:
    for rank in profile.ranks:
        for what, sums in _sums(rank).items():
            if any(total != sum(parts) or min(parts, default=0) < 0 for total, parts in sums):
                yield f"{rank.label}: {what}"
        if rank.launches and not rank.launches.calls:
            yield f"{rank.label}: no device operation has a launch in the trace"


def _sums(rank: RankProfile) -> dict[str, list[tuple[int, Sequence[int]]]]:
    """Return each total with its parts, which should sum to it."""
    places: list[RankProfile | ProfiledStep] = [rank, *rank.steps]
    devices = [one.device for one in places if one.device]
    return {
        "the steps do not make up the window": [(rank.wall, [step.wall for step in rank.steps])] if rank.steps else [],
        "the device's parts do not make up the wall": [
            (one.wall, (one.compute, one.exposed_communication, one.exposed_copies, one.idle)) for one in devices
        ],
        "the causes do not make up the idle time": [
            (one.device.idle, list(one.idle.values())) for one in places if one.device
        ],
        "the host's parts do not make up the wall": [(one.wall, list(one.host.values())) for one in places if one.host],
        "the critical path does not make up the wall": [(rank.wall, list(rank.critical_path.values()))]
        if rank.critical_path
        else [],
    }


def _said(finding: Finding) -> str:
    """Return a text such as "too-few-workers (up to 62.0 %): confirmed 58.1 %"."""
    said = finding.id + (f" (up to {100 * finding.expected.estimate:.1f} %)" if finding.expected else "")
    trial = finding.measured
    if trial is None:
        return said
    return f"{said}: {trial.outcome}" + (f" {100 * trial.saving.estimate:.1f} %" if trial.saving else "")


HEAD = ("profiled", "overhead", "traces", "read in", "launches", "unlinked", "shows", "findings")


def row(name: str, found: Profiled) -> list[str]:
    """Return a row of a table with the columns HEAD."""
    return [
        name,
        "" if found.overhead is None else f"{100 * found.overhead:+.0f} %",
        f"{found.trace_bytes / 1e6:.1f} MB",
        f"{found.read_seconds:.1f} s",
        f"{found.launches:,}",
        f"{found.unlinked:,}",
        found.headline,
        "; ".join(found.findings),
    ]
