"""Rules about ranks: what they tell each other, and how long they wait for it."""

from typing import Any

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, Unanswered
from gpubench.trace.profile import Rank, Straggler

OFTEN_LAST = 0.5  # of the collectives: chance alone would spread them over the ranks
TOO_FEW = 2  # collectives a step: the last one's bucket is filled only as the backward pass ends
TOO_MANY = 8  # collectives a step, beyond which each one's fixed cost counts
BUCKET_STEP = 4  # by which the bucket is changed: less is lost among other things


def repeated_reduction(case: Case) -> Answers:
    """Gradients that are summed over the ranks before they are complete."""
    if not _reduces_each(case):
        return
    micro = case.setting("training.grad_accumulation")
    cost = _exposed(case) * (1 - 1 / micro)
    if cost < WORTH:
        return
    yield Finding(
        id="repeated-reduction",
        title="gradients are summed over the ranks after every micro-batch",
        severity=measures.severity(cost),
        evidence=[
            f"a step has {micro} micro-batches, and distributed.sync_gradients is each",
            f"{units.percent(_exposed(case))} of the step is communication that nothing hides",
        ],
        cause="only the sum after the last micro-batch is used: the others could be added up on each rank",
        advice="model.no_sync() around all micro-batches but the last",
        fix=measures.fix(case, distributed__sync_gradients="last"),
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def exposed_communication(case: Case) -> Answers:
    """What is left when neither a slow rank nor needless sums explain it."""
    if _reduces_each(case):
        return
    slow = slowest(case)
    cost = _exposed(case) - (0.0 if slow is None else _waited(case, slow))
    if cost < NOTABLE:
        return
    calls = sum(one.calls for one in case.rank.collectives) / measures.steps(case)
    cause, advice, factor = _reason(calls)
    yield Finding(
        id="exposed-communication",
        title="the step waits for communication",
        severity=measures.severity(cost),
        evidence=_evidence(case, calls),
        cause=cause,
        advice=advice,
        fix={} if factor is None else _bucket(case, factor),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(NOTABLE)} of the step on: some of it lies at the end of every backward pass",
    )


def stragglers(case: Case) -> Answers:
    if measures.ranks(case) > 1 and case.setting("profiling.all_ranks") is False:
        yield Unanswered("straggler", "traces of the other ranks", "profiling.all_ranks")
    slow = slowest(case)
    if slow is None or _waited(case, slow) < WORTH:
        return
    cost = _waited(case, slow)
    skew = case.metrics.get("straggler_skew")
    reason, advice = _difference(case, slow)
    yield Finding(
        id="straggler",
        title=f"rank {slow.rank} keeps the others waiting",
        severity=measures.severity(cost),
        evidence=[
            f"rank {slow.rank} reached {slow.waited_for} of {slow.of} collectives last, "
            f"{units.seconds(slow.late / 1e9)} after the first on average",
            *([f"straggler_skew of the clean run is {units.percent(skew.estimate)}"] if skew is not None else []),
        ],
        cause=reason,
        advice=advice,
        expected=measures.at_most(cost),
        threshold=f"{WORTH_REASON}, where one rank is last in {units.percent(OFTEN_LAST)} of the collectives",
    )


def slowest(case: Case) -> Straggler | None:
    """The rank that the others wait for most, if it is most often the one."""
    often = [one for one in case.profile.stragglers if one.of and one.waited_for / one.of >= OFTEN_LAST]
    return max(often, key=lambda one: one.late, default=None)


def _reduces_each(case: Case) -> bool:
    return (
        measures.ranks(case) > 1
        and (case.setting("training.grad_accumulation") or 1) > 1
        and case.setting("distributed.sync_gradients") == "each"
    )


def _exposed(case: Case) -> float:
    clean = measures.clean_share(case, "phase_exposed_communication")
    if clean is not None:
        return clean
    device = case.rank.device
    if device is None:
        return measures.host(case, "communication")
    return measures.share(case, device.exposed_communication) + measures.idle(case, "communication_wait")


def _waited(case: Case, slow: Straggler) -> float:
    """At most: other work may fill some of the wait."""
    return measures.share(case, slow.late * slow.of)


def _difference(case: Case, slow: Straggler) -> tuple[str, str]:
    """What that rank does for longer than the median of the others, as far as their traces tell."""
    own = next((_parts(rank) for rank in case.profile.ranks if rank.rank == slow.rank), {})
    others = [_parts(rank) for rank in case.profile.ranks if rank.rank != slow.rank]
    excess = {part: own[part] - _median([other.get(part, 0) for other in others]) for part in own if others}
    most = max(excess.keys() & _PARTS.keys(), key=lambda part: excess[part], default=None)
    if most is None or measures.share(case, excess[most]) < WORTH:
        return "it does more, or does it more slowly; the traces do not tell what", _ADVICE_UNKNOWN
    name, advice = _PARTS[most]
    return f"it spends {phrases.a_step(case, excess[most])} more than the others {name}", advice


def _parts(rank: Rank) -> dict[str, int]:
    if rank.device is None:
        return {"compute": rank.host.get("operators", 0)} | {str(part): time for part, time in rank.host.items()}
    return {"compute": rank.device.compute} | {str(cause): time for cause, time in rank.idle.items()}


def _median(times: list[int]) -> int:
    """The lower of two."""
    return sorted(times)[(len(times) - 1) // 2]


_ADVICE_UNKNOWN = "compare clocks, temperatures and the load of its machine with those of the others"
_PARTS = {
    "compute": ("computing", "give every rank the same amount of work, and compare the clocks of the devices"),
    "data_loader": ("waiting for its batches", "look at the storage and the cores that this rank's loader has"),
    "synchronisation": ("in synchronisations", "leave out what this rank alone does: logging, saving, evaluation"),
    "python_and_launch": ("in Python between launches", "leave out what this rank alone does: logging, saving"),
    "python": ("in Python", "leave out what this rank alone does: logging, saving, evaluation"),
}


def _evidence(case: Case, calls: float) -> list[str]:
    said, clean = [], case.metrics.get("phase_exposed_communication")
    if clean is not None:
        said.append(
            f"communication that nothing hides takes {units.seconds(clean.estimate)} of a clean step "
            f"({units.percent(_exposed(case))})"
        )
    device = case.rank.device
    if device is not None and device.communication:
        hidden = units.percent(device.hidden_communication / device.communication)
        said.append(
            f"communication takes {phrases.a_step(case, device.communication)}, and {hidden} of it is hidden behind "
            "computing"
        )
    if device is None and clean is None:
        spent = phrases.a_step(case, case.rank.host.get("communication", 0))
        said.append(f"the main thread waits for other ranks for {spent}")
    if calls:
        said.append(f"{units.digits(calls)} collectives a step")
    return said


def _reason(calls: float) -> tuple[str, str, float | None]:
    """Cause and advice by how many collectives carry the gradients of a step, and what to multiply the bucket by."""
    if 0 < calls <= TOO_FEW:
        return (
            "so few buckets are full only near the end of the backward pass, where little is left to hide their sums",
            "smaller buckets, which set out earlier: DistributedDataParallel(bucket_cap_mb=...)",
            1 / BUCKET_STEP,
        )
    if calls > TOO_MANY:
        return (
            "gradients are sent in many small pieces, and each costs a round among the ranks",
            "larger buckets: DistributedDataParallel(bucket_cap_mb=...)",
            BUCKET_STEP,
        )
    return (
        "there is more to send than the backward pass has time for",
        "send less: accumulate gradients over more micro-batches, or compress them to bf16",
        None,
    )


def _bucket(case: Case, factor: float) -> dict[str, Any]:
    size = case.setting("distributed.bucket_mb")
    if size is None or case.setting("distributed.strategy") != "ddp":
        return {}
    return measures.fix(case, distributed__bucket_mb=size * factor)
