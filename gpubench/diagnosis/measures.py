"""Figures that several rules go by."""

from collections.abc import Iterable, Mapping
from typing import Any

from gpubench import units
from gpubench.diagnosis.case import Case
from gpubench.findings import Finding, Saving, Unanswered
from gpubench.trace.profile import Cause, HostPart, Phase

Answers = Iterable[Finding | Unanswered]

WORTH = 0.01
"""A part of the step worth a finding: a few repeats of a run rarely tell a smaller saving from noise."""
WORTH_REASON = f"from {units.percent(WORTH)} of the step on, as a few repeats rarely tell less from noise"

NOTABLE = 0.05
"""For what no program is quite without, as an optimizer or casts: below it, there is more to gain elsewhere."""

HOST_WORTH = 0.1
"""For what the host costs: recording slows it, so that a smaller part may not be there without it."""
UNCORRECTED = 0.25
"""The same where it is not known by how much: of a 20-layer MLP's step on a CPU the profiler's own work was 22 %."""


def share(case: Case, part: int) -> float:
    """`part` nanoseconds of the window as a fraction of it."""
    return part / case.rank.wall if case.rank.wall > 0 else 0.0


def idle(case: Case, cause: Cause) -> float:
    """The fraction of the step in which the device has nothing to do for this reason."""
    return share(case, case.rank.idle.get(cause, 0))


def host(case: Case, part: HostPart) -> float:
    """The fraction of the step that the main thread spends so; 0 for a trace with device work."""
    return share(case, case.rank.host.get(part, 0))


def unrecorded(case: Case, part: float) -> float:
    """What is left of a part of the recorded step, as a fraction of a clean one, if all that recording cost was in it;
    the part itself where that is not known."""
    cost = max(0.0, case.overhead or 0.0)
    return min(1.0, max(0.0, part * (1 + cost) - cost))


def host_worth(case: Case) -> float:
    """The part of the step from which rules speak of the main thread of a program on a CPU."""
    return UNCORRECTED if case.overhead is None else HOST_WORTH


def clean_share(case: Case, metric: str) -> float | None:
    """A time of the clean run as a fraction of its step; None without a clean run."""
    part, step = case.metrics.get(metric), case.metrics.get("step_time")
    if part is None or step is None or step.estimate <= 0:
        return None
    return part.estimate / step.estimate


def steps(case: Case) -> int:
    """At least 1: a trace without steps is looked at as one."""
    return max(1, len(case.rank.step_numbers))


def phase(case: Case, name: str) -> Phase | None:
    return next((one for one in case.rank.phases if one.name == name), None)


def phase_share(case: Case, name: str) -> float:
    """Of the clean run where there is one; else the work launched from the phase, or on a CPU its host time."""
    clean, found = clean_share(case, f"phase_{name}"), phase(case, name)
    if clean is not None:
        return clean
    return 0.0 if found is None else share(case, found.host if case.rank.device is None else found.device)


def at_most(cost: float) -> Saving:
    """Work of several streams or threads may add up to more than the step, of which no more can be saved."""
    return Saving(min(1.0, cost))


def option(case: Case, lacking: str) -> str | None:
    """What would bring what the trace lacks: the program's own setting where it has one; None if it lacks nothing."""
    needed = case.rank.missing.get(lacking)
    own = f"profiling.{needed}"
    return own if own in (case.settings or {}) else needed


def recorded_eagerly(case: Case) -> bool:
    """The run is compiled, and what was recorded of it is not: their launches have nothing in common."""
    return case.setting("performance.compile") is True and case.rank.compiled is None


def cores(case: Case) -> int | None:
    """Cores for each rank of the run, as recorded; None for a trace from elsewhere."""
    usable = case.environment.get("cpu.usable_cores")
    return max(1, usable // ranks(case)) if isinstance(usable, int) else None


def threads(case: Case) -> int | None:
    """That each rank of a run on a CPU computes with."""
    number = case.setting("performance.cpu_threads") or case.environment.get("threads.intra_op")
    return number if case.rank.device is None and isinstance(number, int) else None


def ranks(case: Case) -> int:
    return int(case.setting("distributed.world_size") or case.rank.world_size or 1)


def gpu(case: Case) -> Mapping[str, Any]:
    """What the environment says of the first GPU."""
    gpus = case.environment.get("gpus") or [{}]
    return gpus[0] if isinstance(gpus[0], Mapping) else {}


def memory_used(case: Case) -> float | None:
    """The fraction of the GPU's memory that the clean run held at its peak, setting up and autotuning included."""
    names = ("peak_memory_reserved", "setup_peak_memory_reserved")
    peaks = [case.metrics[name].estimate for name in names if name in case.metrics]
    memory = gpu(case).get("memory_bytes")
    return max(peaks) / memory if peaks and memory else None
