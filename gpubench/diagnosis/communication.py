"""Rules about what ranks tell each other, and how long they wait for it."""

from typing import Any, NamedTuple

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, WORTH, WORTH_REASON, Answers
from gpubench.diagnosis.stragglers import every_rank_is_traced, exposed, slowest, waited_for
from gpubench.findings import Finding, severity
from gpubench.trace.communication import kind_of
from gpubench.trace.profile import CollectiveKind

TOO_FEW = 2  # collectives a step: the last one's bucket is filled only as the backward pass ends
TOO_MANY = 8  # collectives a step, beyond which each one's fixed cost counts
BUCKET_STEP = 4  # by which the bucket is changed: less is lost among other things
MOST = 0.5
NAMED = 0.1  # of the communication that nothing hides: kinds of collectives from which on one is spoken of


class _Kind(NamedTuple):
    name: str
    cause: str
    advice: str


_ALL_REDUCE = _Kind(
    "all-reduce",
    "sums over all ranks, as of gradients, take longer than the computing beside them",
    "overlap the sums of gradients with the backward pass, and sum once in several micro-batches, with no_sync()",
)
_SHARDED = _Kind(
    "all-gather and reduce-scatter",
    "sharded tensors are gathered from all ranks, and gradients scattered to them, faster than computing hides it",
    "with FSDP, prefetch parameters (set_modules_to_forward_prefetch, backward_prefetch=BACKWARD_PRE), keep them from "
    "forward to backward where memory allows (reshard_after_forward=False), or shard within each machine only (a mesh "
    "of two dimensions, HYBRID_SHARD)",
)
_ALL_TO_ALL = _Kind(
    "all-to-all",
    "every rank exchanges data with every other, as embeddings or the tokens of experts, and computes little meanwhile",
    "give ranks equal shares of the exchange (sharding of embedding tables, load of experts), split it into parts that "
    "overlap computing, and keep most of it within a machine, where links are faster",
)
_SEND_RECV = _Kind(
    "send and receive",
    "ranks exchange data with single others, as stages of a pipeline or neighbours in a ring do, or with all others, "
    "which NCCL runs as SendRecv too",
    "start transfers before their data is needed, and overlap them with computing (in a pipeline by more and smaller "
    "micro-batches); put ranks that exchange most on the fastest links; of an all-to-all, give ranks equal shares (of "
    "embedding tables, experts), in parts",
)
_BROADCAST = _Kind(
    "broadcast",
    "one rank sends the others what they may have already, as buffers before every forward pass",
    "DistributedDataParallel(broadcast_buffers=False) where ranks may differ in buffers, as of BatchNorm; send what "
    "stays the same once, before the loop",
)
_UNKNOWN = _Kind(
    "communication",
    "there is more to send than computing has time to hide",
    "send less, or while there is something to compute",
)
_KINDS: dict[CollectiveKind, _Kind] = {
    "all_reduce": _ALL_REDUCE,
    "all_gather": _SHARDED,
    "reduce_scatter": _SHARDED,
    "all_to_all": _ALL_TO_ALL,
    "send_recv": _SEND_RECV,
    "broadcast": _BROADCAST,
    "other": _UNKNOWN,
}
_OF_STRATEGY = {"ddp": _ALL_REDUCE, "fsdp2": _SHARDED}
"""What a program communicates by whose trace has no kernels of it."""


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
        severity=severity(cost),
        evidence=[
            f"a step has {micro} micro-batches, and distributed.sync_gradients is each",
            f"{units.percent(_exposed(case))} of {phrases.whole(case)} is communication that nothing hides",
        ],
        cause="only the sum after the last micro-batch is used: the others could be added up on each rank",
        advice="model.no_sync() around all micro-batches but the last",
        fix=case.fix(distributed__sync_gradients="last"),
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def exposed_communication(case: Case) -> Answers:
    """What is left when neither a slow rank nor needless sums explain it."""
    if _reduces_each(case):
        return
    cost = _exposed(case) - _explained(case)
    if cost < NOTABLE:
        return
    shares = _shares(case)
    cause, advice, factor = _reason(case, cost, shares)
    yield Finding(
        id="exposed-communication",
        title="the step waits for communication",
        severity=severity(cost),
        evidence=[*_evidence(case), *_told(case, shares)],
        cause=cause,
        advice=advice,
        fix={} if factor is None else _bucket(case, factor),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(NOTABLE)} of the step on: some of it is hidden in hardly any program",
    )


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
    return measures.share(case, exposed(case.rank))


def _explained(case: Case) -> float:
    """By a slow rank, which is another rule's; it does not wait for itself."""
    slow = slowest(case)
    return 0.0 if slow is None or slow.rank == case.rank.rank else waited_for(case, slow)


def _shares(case: Case) -> dict[_Kind, float]:
    """The kinds of collectives worth speaking of, each with its part of what nothing hides, the largest first."""
    found: dict[_Kind, int] = {}
    hidden = not any(one.exposed for one in case.rank.collectives)
    for one in case.rank.collectives:
        kind = _KINDS[one.kind or kind_of(one.name)]
        found[kind] = found.get(kind, 0) + (one.total if hidden else one.exposed)
    whole = sum(found.values())
    if not whole:
        return {_OF_STRATEGY.get(case.setting("distributed.strategy"), _UNKNOWN): 1.0}
    largest = sorted(found.items(), key=lambda each: -each[1])
    return {kind: time / whole for kind, time in largest if time >= NAMED * whole}


def _told(case: Case, shares: dict[_Kind, float]) -> list[str]:
    """How often collectives of each kind come, and what of them nothing hides."""
    said = []
    for kind in shares:
        own = [one for one in case.rank.collectives if _KINDS[one.kind or kind_of(one.name)] is kind]
        if own:
            calls, visible = sum(one.calls for one in own), sum(one.exposed for one in own)
            name = "of unknown kind" if kind is _UNKNOWN else kind.name
            said.append(f"{name}: {phrases.times_a_step(case, calls)}, {phrases.a_step(case, visible)} not hidden")
    return said


def _evidence(case: Case) -> list[str]:
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
    if waiting := case.rank.idle.get("communication_wait", 0):
        said.append(f"the GPU is idle {phrases.a_step(case, waiting)} while the host waits for other ranks")
    if device is None and clean is None:
        spent = phrases.a_step(case, case.rank.host.get("communication", 0))
        said.append(f"the main thread waits for other ranks for {spent}")
    if calls := sum(one.calls for one in case.rank.collectives) / measures.steps(case):
        said.append(f"{units.digits(calls)} collective{'s' * (calls != 1)} {phrases.each_step(case)}")
    return said


def _reason(case: Case, cost: float, shares: dict[_Kind, float]) -> tuple[str, str, float | None]:
    """Cause and advice, and what to multiply the bucket by."""
    skew = case.metrics.get("straggler_skew")
    even = skew is not None and skew.estimate < MOST * cost  # the clean run knows of all ranks
    cause, advice, factor = _by_kind(case, shares)
    if not even and not every_rank_is_traced(case):
        return (
            "the link is too slow, or another rank comes late: only traces of all ranks tell",
            f"record every rank; if none comes late: {advice}",
            None,
        )
    if not even and _others_late(case) >= MOST * cost:
        return (
            "ranks wait for each other, and for none of them so often that it could not be chance",
            "give all ranks the same amount of work in every step: batches of one size, sequences of like lengths",
            None,
        )
    return cause, advice, factor


def _by_kind(case: Case, shares: dict[_Kind, float]) -> tuple[str, str, float | None]:
    """Where all-reduces are all that matters, by their number, as DistributedDataParallel's buckets decide it."""
    first, *others = shares
    if others:
        known = [kind for kind in shares if kind is not _UNKNOWN]
        return known[0].cause, "; ".join(f"{kind.name}: {kind.advice}" for kind in known), None
    if first is not _ALL_REDUCE:
        return first.cause, first.advice, None
    sums = [one for one in case.rank.collectives if (one.kind or kind_of(one.name)) == "all_reduce"]
    return _by_number(sum(one.calls for one in sums) / measures.steps(case))


def _others_late(case: Case) -> float:
    """By turns, as a fraction of the step: what this rank may have waited for the others, but for a slow one."""
    slow = slowest(case)
    others = [one for one in case.profile.stragglers if one.rank != case.rank.rank and one is not slow]
    return sum(waited_for(case, one) for one in others)


def _by_number(calls: float) -> tuple[str, str, float | None]:
    """By how many all-reduces carry the gradients of a step."""
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
        "send less: accumulate gradients over more micro-batches under no_sync(), or compress them to bf16",
        None,
    )


def _bucket(case: Case, factor: float) -> dict[str, Any]:
    size = case.setting("distributed.bucket_mb")
    if size is None or case.setting("distributed.strategy") != "ddp":
        return {}
    return case.fix(distributed__bucket_mb=size * factor)
