"""Rules about batches that come too late."""

import math
from typing import Any

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, Answers
from gpubench.findings import Finding, severity

THRESHOLD = (
    f"from {units.percent(NOTABLE)} of the step on: a loader that keeps up hands over a batch in far less than that"
)


def data_loading(case: Case) -> Answers:
    waiting = _waiting(case)
    if waiting < NOTABLE:
        return
    workers = case.setting("data.workers")
    more = _workers(case, workers, waiting)
    if more is not None:
        yield _too_few(case, workers, more, waiting)
        return
    cause, advice = _unmended(case, workers)
    yield Finding(
        id="data-loading",
        title="the step waits for batches",
        severity=severity(waiting),
        evidence=_evidence(case),
        cause=cause,
        advice=advice,
        expected=measures.at_most(waiting),
        threshold=THRESHOLD,
    )


def _waiting(case: Case) -> float:
    clean = measures.clean_share(case, "phase_data_wait")
    if clean is not None:
        return clean
    waiting = measures.host(case, "data_loader") if case.rank.device is None else measures.idle(case, "data_loader")
    return min(1.0, waiting)


def _too_few(case: Case, workers: int, more: int, waiting: float) -> Finding:
    free = _free_cores(case, workers)
    saving = _saving(workers, more, waiting if free else _asleep(case, waiting))
    return Finding(
        id="too-few-workers",
        title="the step waits for batches, and cores are free to make them"
        if free
        else "the step waits for batches, and the loader for something else than a core",
        severity=severity(saving),
        evidence=[*_evidence(case), _cores(case, workers)],
        cause=_CAUSE_WITHOUT
        if workers == 0
        else f"{_counted(workers)} cannot make batches as fast as the step takes them",
        advice=f"let {units.counted(more, 'worker')} make batches beside the step"
        + ("" if free else "; no core is free, which what only waits, as for a disk, does not need"),
        fix=case.fix(data__workers=more),
        expected=measures.at_most(saving),
        threshold=THRESHOLD,
    )


def _workers(case: Case, workers: Any, waiting: float) -> int | None:
    """How many there should be; None where more are no way out, or nothing is known of them."""
    allowed = measures.cores(case)
    if not isinstance(workers, int) or allowed is None:
        return None
    free = _free_cores(case, workers)
    if free:
        return min(workers + free, _needed(workers, waiting))
    asleep = workers < allowed and _asleep(case, waiting) >= NOTABLE
    return min(allowed, _needed(workers, waiting)) if asleep else None


def _free_cores(case: Case, workers: int) -> int:
    """Cores of the rank with neither a worker nor, on a CPU, a thread that computes."""
    computing = (measures.threads(case) or 1) if case.rank.device is None else 0
    return max(0, (measures.cores(case) or 0) - workers - computing)


def _asleep(case: Case, waiting: float) -> float:
    """The part of `waiting` in which the loader does not compute, as far as operators tell; 0 where worker processes
    load, of which the trace shows nothing.

    The loader's operators are those that the main thread's other parts leave over.
    """
    host = case.rank.host
    loading = host.get("data_loader", 0)
    if case.setting("data.workers") != 0 or loading <= 0:
        return 0.0
    elsewhere = host.get("operators", 0) + host.get("copies", 0) + host.get("optimizer", 0)
    within = sum(one.host for one in case.rank.operators) - elsewhere
    return waiting * (1 - min(1.0, max(0, within) / loading))


def _needed(workers: int, waiting: float) -> int:
    """Workers that make a batch in the rest of the step, and one more, since batches take unequal times.

    No workers need `waiting` of a step for a batch, and w of them w steps.
    """
    return math.ceil(max(workers, waiting) / max(1 - waiting, 0.01)) + 1


def _saving(workers: int, more: int, waiting: float) -> float:
    """At most: the step is then as long as its rest, or as a batch takes `more` workers."""
    return min(waiting, 1 - max(workers, waiting) / more)


_CAUSE_WITHOUT = "the training process reads and prepares every batch itself, between two steps"


def _counted(workers: int) -> str:
    return units.counted(workers, "DataLoader worker")


def _cores(case: Case, workers: int) -> str:
    """Who has the cores."""
    threads = measures.threads(case)
    computing = f", {units.counted(threads, 'thread')} computing" if threads and case.rank.device is None else ""
    has = units.counted(measures.cores(case) or 0, "core")
    return f"data.workers is {workers}{computing}, and each rank has {has}"


def _unmended(case: Case, workers: Any) -> tuple[str, str]:
    """Cause and advice where more workers are no way out, or nothing is known of them."""
    if isinstance(workers, int) and measures.cores(case) is not None:
        return (
            f"every core has its work already ({_cores(case, workers)}), and a batch costs more than the step takes",
            "make samples cheaper: store them decoded and resized, cache them, or augment on the GPU",
        )
    return (
        "batches are made in the training process, or by too few workers",
        "DataLoader(num_workers=..., persistent_workers=True), up to the machine's cores for each GPU",
    )


def _evidence(case: Case) -> list[str]:
    said = []
    clean, step = measures.clean_share(case, "phase_data_wait"), case.metrics.get("step_time")
    if clean is not None and step is not None:
        said.append(
            f"a step of the clean run takes {units.seconds(step.estimate)} and waits {units.percent(clean)} of it for "
            "its batches"
        )
    starved = case.metrics.get("starved_steps")
    if starved is not None and starved.estimate > 0:
        said.append(f"{units.percent(starved.estimate)} of the clean run's steps began with the GPU out of work")
    device, loading = case.rank.device, case.rank.idle.get("data_loader", 0)
    if device is not None and loading:
        said.append(
            f"the GPU is idle {phrases.a_step(case, device.idle)}, and "
            f"{units.percent(loading / device.idle)} of that under enumerate(DataLoader)"
        )
    if device is None and case.rank.host.get("data_loader"):
        spent = phrases.a_step(case, case.rank.host["data_loader"])
        said.append(f"the main thread is in enumerate(DataLoader) for {spent}")
    return said
