"""Quantities that several rules use."""

from collections.abc import Iterable, Mapping
from typing import Any

from gpubench import units
from gpubench.diagnosis.case import Case
from gpubench.findings import Finding, Saving, Unanswered
from gpubench.trace.profile import Cause, HostPart, Phase

Answers = Iterable[Finding | Unanswered]

WORTH = 0.01
"""The part of the step worth a finding: a few repeats of a run rarely tell a smaller saving from noise."""
WORTH_REASON = f"at least {units.percent(WORTH)} of the step, as a few repeats rarely tell less from noise"

NOTABLE = 0.05
"""The threshold for what every program has, as an optimizer or casts: below it, there is more to gain elsewhere."""

HOST_WORTH = 0.1
"""The threshold for costs of the host: recording slows the host, so that a smaller part may exist only while
recording."""
UNCORRECTED = 0.25
"""The same where the overhead of recording is unknown: it was 22 % of the step of a 20-layer MLP on a CPU."""


def share(case: Case, part: int) -> float:
    """Return `part`, nanoseconds of the recorded window, as a fraction of the window."""
    return part / case.rank.wall if case.rank.wall > 0 else 0.0


def idle(case: Case, cause: Cause) -> float:
    """Return the fraction of the step in which the device is idle for this cause."""
    return share(case, case.rank.idle.get(cause, 0))


def host(case: Case, part: HostPart) -> float:
    """Return the fraction of the step that the main thread spends in this part; 0 for a trace with device work."""
    return share(case, case.rank.host.get(part, 0))


def unrecorded(case: Case, part: float) -> float:
    """Return a part of the recorded step as a fraction of a clean step, assuming that all overhead was in that part.

    Without a known overhead, `part` is returned as it is.
    """
    cost = max(0.0, case.overhead or 0.0)
    return min(1.0, max(0.0, part * (1 + cost) - cost))


def host_worth(case: Case) -> float:
    """Return the threshold, a part of the step, for rules about the main thread of a program on a CPU."""
    return UNCORRECTED if case.overhead is None else HOST_WORTH


def clean_share(case: Case, metric: str) -> float | None:
    """Return a time of the clean run as a fraction of its step; None without a clean run."""
    part, step = case.metrics.get(metric), case.metrics.get("step_time")
    if part is None or step is None or step.estimate <= 0:
        return None
    return part.estimate / step.estimate


def steps(case: Case) -> int:
    """Return the number of recorded steps, at least 1: a trace without steps counts as one step."""
    return max(1, len(case.rank.step_numbers))


def phase(case: Case, name: str) -> Phase | None:
    return next((one for one in case.rank.phases if one.name == name), None)


def phase_share(case: Case, name: str) -> float:
    """Return the phase's fraction of the step, from the clean run if there is one.

    Otherwise it is the device time of the work launched from the phase, or on a CPU the phase's host time.
    """
    clean, found = clean_share(case, f"phase_{name}"), phase(case, name)
    if clean is not None:
        return clean
    return 0.0 if found is None else share(case, found.host if case.rank.device is None else found.device)


def at_most(cost: float) -> Saving:
    """Return the saving, limited to the step: work of several streams or threads may add up to more."""
    return Saving(min(1.0, cost))


def option(case: Case, lacking: str) -> str | None:
    """Return the option that would record what the trace lacks, as the program's own setting if it has one.

    None means that the trace lacks nothing.
    """
    needed = case.rank.missing.get(lacking)
    own = f"profiling.{needed}"
    return own if own in (case.settings or {}) else needed


def recorded_eagerly(case: Case) -> bool:
    """Say whether the run is compiled and its recording is not: the launches of the two are not comparable."""
    return case.setting("performance.compile") is True and case.rank.compiled is None


def cores(case: Case) -> int | None:
    """Return the cores for each rank of the run, as recorded; None for a trace from elsewhere."""
    usable = case.environment.get("cpu.usable_cores")
    return max(1, usable // ranks(case)) if isinstance(usable, int) else None


def threads(case: Case) -> int | None:
    """Return the threads with which each rank of a run on a CPU computes; None if unknown, or on a GPU."""
    number = case.setting("performance.cpu_threads") or case.environment.get("threads.intra_op")
    return number if case.rank.device is None and isinstance(number, int) else None


def ranks(case: Case) -> int:
    return int(case.setting("distributed.world_size") or case.rank.world_size or 1)


def gpu(case: Case) -> Mapping[str, Any]:
    """Return what the environment records about the first GPU."""
    gpus = case.environment.get("gpus") or [{}]
    return gpus[0] if isinstance(gpus[0], Mapping) else {}


def memory_used(case: Case) -> float | None:
    """Return the fraction of the GPU's memory that the clean run held at its peak, with setup and autotuning."""
    names = ("peak_memory_reserved", "setup_peak_memory_reserved")
    peaks = [case.metrics[name].estimate for name in names if name in case.metrics]
    memory = gpu(case).get("memory_bytes")
    return max(peaks) / memory if peaks and memory else None
