"""Rules about the data loader."""

import math
from typing import Any

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import NOTABLE, Answers, ProfileCase, at_most, severity
from gpubench.findings import Finding

MOSTLY_IDLE = 0.9
"""Of the workers' time: those that wait so much would keep up with a step several times as fast."""


def data_loading(case: ProfileCase) -> Answers:
    waiting = _waiting(case)
    if waiting < NOTABLE:
        return
    workers = case.setting("data.workers")
    if (idle := code.idle_share(case)) is not None and idle >= MOSTLY_IDLE:
        yield _passed_on(case, waiting)
        return
    more = _workers(case, workers, waiting)
    if more is not None:
        yield _too_few(case, workers, more, waiting)
        return
    cause, advice = _without_workers(case, workers)
    yield Finding(
        id="data-loading",
        title=f"{case.who()} waits for batches",
        severity=severity(waiting),
        evidence=_evidence(case),
        cause=cause,
        advice=advice + _why(case),
        expected=at_most(_bounded(case, waiting)),
        threshold=_threshold(case),
    )


def _passed_on(case: ProfileCase, waiting: float) -> Finding:
    """Returns the finding for workers that wait themselves, so that passing their batches on is what takes time."""
    return Finding(
        id="data-loading",
        title=f"{case.who()} waits for batches, though the workers have little to do",
        severity=severity(waiting),
        evidence=[*code.idle_workers(case), *_evidence(case, idle=False)],
        cause="making a batch is fast; what may take the time is to pass it on, from a worker process to this one",
        advice="load without workers, num_workers=0, as for data in memory; or send less often, in larger batches",
        fix=case.fix(data__workers=0) if case.setting("data.workers") else {},
        expected=at_most(_bounded(case, waiting)),
        threshold=_threshold(case),
    )


def _why(case: ProfileCase) -> str:
    """Returns which command says more about a program of the user."""
    own = case.setting("model.name") is not None
    return "" if own else "; gpubench loader -- PROGRAM says what makes its samples slow"


def _bounded(case: ProfileCase, saving: float) -> float:
    """Returns a saving that is no larger than what data that is always ready has been measured to save."""
    return min(saving, max(0.0, 1 - 1 / case.ready.ratio)) if case.ready else saving


def restarted_workers(case: ProfileCase) -> Answers:
    starting, step = case.clean_share("phase_worker_start"), case.metrics.get("step_time")
    fix = case.fix(data__persistent_workers=True)
    if starting is None or step is None or starting < NOTABLE or not fix:
        return
    yield Finding(
        id="restarted-workers",
        title="the DataLoader starts its workers again for each epoch",
        severity=severity(starting),
        evidence=[
            f"a step without the profiler takes {units.seconds(step.estimate)}, of which starting workers and waiting "
            f"for their first batch is {units.percent(starting)} on average",
            f"data.workers is {case.setting('data.workers')}, and data.persistent_workers is false",
        ],
        cause="at the end of an epoch the workers end, and the next epoch waits until new ones have started and have "
        "made its first batch",
        advice="keep the workers from one epoch to the next",
        fix=fix,
        expected=at_most(starting + (case.clean_share("phase_data_wait") or 0.0)),  # in which the workers end
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}; each epoch still waits for its first batch, "
        "and the workers end within the waits for batches",
    )


def _threshold(case: ProfileCase) -> str:
    least = f"at least {units.percent(NOTABLE)} of {case.window()}"
    return f"{least}: a loader that keeps up delivers a batch in far less than that"


def _waiting(case: ProfileCase) -> float:
    clean = case.clean_share("phase_data_wait")
    if clean is not None:
        return clean
    waiting = case.cpu_share("data_loader") if case.on_cpu else case.idle_share("data_loader")
    return min(1.0, waiting)


def _too_few(case: ProfileCase, workers: int, more: int, waiting: float) -> Finding:
    free = _free_cores(case, workers)
    saving = _saving(workers, more, waiting if free else _asleep(case, waiting))
    return Finding(
        id="too-few-workers",
        title=f"{case.who()} waits for batches while CPU cores are free"
        if free
        else f"{case.who()} waits for batches, and the loader takes most of the time outside of PyTorch",
        severity=severity(saving),
        evidence=[*_evidence(case), _cores(case, workers), *case.taken_evidence()],
        cause="the training process itself reads and prepares every batch, between two steps"
        if workers == 0
        else f"{units.counted(workers, 'DataLoader worker')} cannot make batches as fast as the step needs them",
        advice=f"load batches in {units.counted(more, 'worker')} beside the step"
        + ("" if free else "; no core is free: they help as far as the loader waits, for example for a disk")
        + _cheaper(case, "; or make {} faster")
        + _why(case),
        fix=case.fix(data__workers=more),
        expected=at_most(_bounded(case, saving)),
        threshold=_threshold(case),
    )


def _workers(case: ProfileCase, workers: Any, waiting: float) -> int | None:
    """Returns how many workers there should be; None if more would not help or the settings are unknown."""
    allowed = case.cores
    if not isinstance(workers, int) or allowed is None:
        return None
    free = _free_cores(case, workers)
    if free:
        return min(workers + free, _needed(workers, waiting))
    asleep = workers < allowed and _asleep(case, waiting) >= NOTABLE
    return min(allowed, _needed(workers, waiting)) if asleep else None


def _free_cores(case: ProfileCase, workers: int) -> int:
    """Returns the rank's cores without a worker, another process or, on a CPU, a computing thread."""
    computing = (case.threads or 1) if case.on_cpu else 0
    return max(0, int((case.cores or 0) - workers - computing - case.taken))


def _asleep(case: ProfileCase, waiting: float) -> float:
    """Returns the fraction of the step, out of `waiting`, in which the loader does not compute.

    The loader computes in the operators that are not in other parts of the main thread. The result is 0 with worker
    processes, because the trace does not contain them.
    """
    host = case.rank.host
    loading = host.get("data_loader", 0)
    if case.setting("data.workers") != 0 or loading <= 0:
        return 0.0
    elsewhere = host.get("operators", 0) + host.get("copies", 0) + host.get("optimizer", 0)
    within = sum(one.host for one in case.rank.operators) - elsewhere
    return waiting * (1 - min(1.0, max(0, within) / loading))


def _needed(workers: int, waiting: float) -> int:
    """Returns the workers that make a batch in the rest of the step, plus one because batches take unequal times.

    The main process needs `waiting` of a step for a batch, and each of w workers needs w steps.
    """
    return math.ceil(max(workers, waiting) / max(1 - waiting, 0.01)) + 1


def _saving(workers: int, more: int, waiting: float) -> float:
    """Returns the most to save: the step then takes its rest, or the time that `more` workers need."""
    return min(waiting, 1 - max(workers, waiting) / more)


def _cores(case: ProfileCase, workers: int) -> str:
    """Describes how the rank's cores are used."""
    threads = case.threads
    computing = f", {units.counted(threads, 'thread')} computing" if threads and case.on_cpu else ""
    has = units.counted(case.cores or 0, "core")
    return f"data.workers is {workers}{computing}, and each rank has {has}"


def _without_workers(case: ProfileCase, workers: Any) -> tuple[str, str]:
    """Returns cause and advice if more workers would not help or the settings are unknown."""
    if isinstance(workers, int) and case.cores is not None:
        keep = "cache them" if case.on_cpu else "cache them, or augment them on the GPU"
        return (
            f"every core is in use ({'; '.join([_cores(case, workers), *case.taken_evidence()])}), and making a batch "
            "takes longer than the step",
            _cheaper(case, "make {} faster, as by operating on whole arrays; or store samples decoded and resized, ")
            + keep
            if _cheaper(case, "{}")
            else f"make samples cheaper: store them decoded and resized, {keep}",
        )
    cores = "the machine's cores" + ("" if case.on_cpu else " for each GPU")
    if case.rank.loads_in_workers:
        return (
            "the worker processes of the DataLoader make batches more slowly than the step needs them",
            f"make samples cheaper: store them decoded and resized, or cache them; or use more workers, up to {cores}",
        )
    or_few = "" if case.rank.loads_in_workers is False else ", or by too few workers"
    return (
        f"batches are made in the program's own process{or_few}",
        f"use DataLoader(num_workers=..., persistent_workers=True), with up to {cores}",
    )


def _cheaper(case: ProfileCase, advice: str) -> str:
    """Returns advice with the function that makes a batch slow in place of {}; "" if it is unknown."""
    found = code.making_batches(case)
    slowest = found.slowest if found else None
    return advice.format(code.named(slowest)) if slowest else ""


def _evidence(case: ProfileCase, *, idle: bool = True) -> list[str]:
    evidence = []
    found = code.making_batches(case)
    clean, step = case.clean_share("phase_data_wait"), case.metrics.get("step_time")
    if clean is not None and step is not None:
        evidence.append(
            f"a step without the profiler takes {units.seconds(step.estimate)} and waits {units.percent(clean)} of it "
            "for its batches" + (f"; {found.summary}" if found and found.summary else "")
        )
    if case.ready:
        evidence.append(case.ready.found)
    evidence += [*code.sampled_evidence(found), *(code.idle_workers(case) if idle else [])]
    evidence += case.idle_starts_evidence()
    device, loading = case.rank.device, case.rank.idle.get("data_loader", 0)
    if device is not None and loading:
        evidence.append(
            f"the GPU is idle {case.time_per_step(device.idle)}, and "
            f"{units.percent(loading / device.idle)} of that under enumerate(DataLoader)"
        )
    if device is None and case.rank.host.get("data_loader"):
        spent = case.time_per_step(case.rank.host["data_loader"])
        evidence.append(f"the main thread is in enumerate(DataLoader) for {spent}")
    return evidence
