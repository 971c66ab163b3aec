"""Rules about batches that come too late."""

import math
from typing import Any

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, Answers
from gpubench.findings import Finding

THRESHOLD = (
    f"from {units.percent(NOTABLE)} of the step on: a loader that keeps up hands over a batch in far less than that"
)


def data_loading(case: Case) -> Answers:
    waiting = _waiting(case)
    if waiting < NOTABLE:
        return
    workers, allowed = case.setting("data.workers"), measures.cores(case)
    if isinstance(workers, int) and allowed is not None and workers < allowed:
        more = min(allowed, _needed(workers, waiting))
        saving = _saving(workers, more, waiting)
        yield Finding(
            id="too-few-workers",
            title="the step waits for batches, and cores are free to make them",
            severity=measures.severity(saving),
            evidence=[*_evidence(case), f"data.workers is {workers}, and each rank has {allowed} cores"],
            cause=_too_few(workers),
            advice=f"let {units.counted(more, 'worker')} make batches beside the step",
            fix=measures.fix(case, data__workers=more),
            expected=measures.at_most(saving),
            threshold=THRESHOLD,
        )
        return
    cause, advice = _unmended(case, workers)
    yield Finding(
        id="data-loading",
        title="the step waits for batches",
        severity=measures.severity(waiting),
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


def _needed(workers: int, waiting: float) -> int:
    """Workers that make a batch in the rest of the step, and one more, since batches take unequal times.

    No workers need `waiting` of a step for a batch, and w of them w steps.
    """
    return math.ceil(max(workers, waiting) / max(1 - waiting, 0.01)) + 1


def _saving(workers: int, more: int, waiting: float) -> float:
    """At most: the step is then as long as its rest, or as a batch takes `more` workers."""
    return min(waiting, 1 - max(workers, waiting) / more)


def _too_few(workers: int) -> str:
    if workers == 0:
        return "the training process reads and prepares every batch itself, between two steps"
    return f"{units.counted(workers, 'DataLoader worker')} cannot make batches as fast as the step takes them"


def _unmended(case: Case, workers: Any) -> tuple[str, str]:
    """Cause and advice where more workers are no way out, or nothing is known of them."""
    if isinstance(workers, int) and measures.cores(case) is not None:
        return (
            f"every core has a worker already ({workers}), and a batch costs them more than the step takes",
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
