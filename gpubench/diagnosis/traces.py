"""From trace files to a diagnosis."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from gpubench.diagnosis.case import Case
from gpubench.diagnosis.diagnose import diagnose
from gpubench.findings import Findings
from gpubench.metrics import Metric
from gpubench.trace.analysis import analyse
from gpubench.trace.profile import Profile
from gpubench.trace.reading import read

EAGER = (
    "the clean repeats ran compiled, and the recorded one did not, to tell the operators apart; "
    "profiling.keep_compile=true records what ran"
)


@dataclass(frozen=True)
class Diagnosis:
    """What the traces of one program show, and what that means."""

    profile: Profile
    findings: Findings
    traces: list[Path]
    """One a rank."""


def of_files(paths: Sequence[Path]) -> Diagnosis:
    """Of any program's traces, one a rank. Raises DataError for what is no trace, or ranks that are of two programs."""
    profile = analyse([read(path) for path in paths])
    return Diagnosis(profile, diagnose(Case(profile)), list(paths))


def of_run(
    paths: Sequence[Path],
    settings: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    environment: Mapping[str, Any],
    unit_time: float | None,
) -> Diagnosis:
    """Of a run of our own, by dot-keys, beside its clean repeats.

    `paths` are all its traces; of the cycles of a rank the last is looked at. `unit_time` is what a clean step takes,
    in seconds. Raises DataError as `of_files` does.
    """
    latest = list(_latest(paths))
    profile = analyse([read(path) for path in latest])
    if settings.get("performance.compile") and not settings.get("profiling.keep_compile"):
        profile = _noted(profile, EAGER)
    case = Case(profile, settings, metrics, environment, _overhead(profile, unit_time))
    return Diagnosis(profile, msgspec.structs.replace(diagnose(case), overhead=case.overhead), latest)


def _latest(paths: Sequence[Path]) -> Iterator[Path]:
    """The last cycle of each rank, by the name that the recorder gave it: rank0.1763748910.pt.trace.json.gz."""
    by_rank = {path.name.partition(".")[0]: path for path in sorted(paths, key=lambda path: path.name)}
    return iter(by_rank[rank] for rank in sorted(by_rank, key=lambda rank: (len(rank), rank)))


def _noted(profile: Profile, note: str) -> Profile:
    ranks = [msgspec.structs.replace(rank, notes=[*rank.notes, note]) for rank in profile.ranks]
    return msgspec.structs.replace(profile, ranks=ranks)


def _overhead(profile: Profile, unit_time: float | None) -> float | None:
    steps = profile.ranks[0].steps
    if not steps or not unit_time:
        return None
    return median(step.wall for step in steps) / 1e9 / unit_time - 1
