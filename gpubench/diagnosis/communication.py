"""Rules about communication that computing does not hide."""

from typing import Any, NamedTuple

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, WORTH, Answers, ProfileCase, at_most, severity, shortened
from gpubench.diagnosis.stragglers import every_rank_is_traced, exposed, slowest, waited_for
from gpubench.findings import Finding
from gpubench.trace.families import kernel_name
from gpubench.trace.profile import Collective, CollectiveKind
from gpubench.trace.ranks import kind_of

TOO_FEW = 2  # collectives a step: the last one's bucket is filled only at the end of the backward pass
TOO_MANY = 8  # collectives a step: with more of them, the fixed cost of each counts
BUCKET_STEP = 4  # factor of the bucket's size: the effect of a smaller one is lost in noise
MOST = 0.5  # of the cost
NAMED = 0.1  # of the exposed communication: kinds of collectives with less are not named
FEWEST_ALIKE = 4  # collectives of a kind that show what is usual
OUTLYING = 5  # times the median: a collective that takes longer waits
ADVISED = 2  # kinds of collectives: the fix names those with most time, and the evidence names all


class _Kind(NamedTuple):
    name: str
    cause: str
    advice: str


_ALL_REDUCE = _Kind(
    "all-reduce",
    "all-reduces, for example of gradients, take longer than the computing that overlaps them",
    "overlap the all-reduces with the backward pass, and reduce once in several micro-batches, with no_sync()",
)
_BETWEEN_LAYERS = _Kind(
    "all-reduce",
    "the results of the ranks are summed, as in tensor parallelism, and what follows waits for the sum",
    "split the model over fewer ranks, keep them within a machine whose links are fast, or overlap the sums with other "
    "work",
)
"""All-reduces of a program that is not known to train, so that gradients are not known either."""
_SHARDED = _Kind(
    "all-gather and reduce-scatter",
    "gathering sharded tensors from all ranks, and scattering gradients to them, takes longer than the computing that "
    "overlaps it",
    "with FSDP, prefetch parameters (set_modules_to_forward_prefetch), keep them from forward to backward where memory "
    "allows (reshard_after_forward=False), or shard within each machine only (HYBRID_SHARD)",
)
_GATHERED = _Kind(
    "all-gather and reduce-scatter",
    "each rank has a part of a tensor, and what follows waits until all parts are gathered or summed",
    "split the model over fewer ranks, keep them within a machine whose links are fast, or overlap the gathering with "
    "other work",
)
"""Those of a program that is not known to train: FSDP's advice is for parameters and gradients in training."""
_ALL_TO_ALL = _Kind(
    "all-to-all",
    "every rank exchanges data with every other, such as embeddings or the tokens of experts, and computes little "
    "meanwhile",
    "balance it over the ranks (embedding tables, load of experts), split it into parts that overlap computing, and "
    "keep most of it within a machine",
)
_SEND_RECV = _Kind(
    "send and receive",
    "ranks exchange data with single others, as pipeline stages or neighbours in a ring do, or with all others, "
    "which NCCL runs as SendRecv too",
    "start transfers before their data is needed, and overlap them with computing (in a pipeline with more and smaller "
    "micro-batches); put ranks that exchange most on the fastest links",
)
_BROADCAST = _Kind(
    "broadcast",
    "one rank sends the others data that they may already have, such as buffers before every forward pass",
    "use DistributedDataParallel(broadcast_buffers=False) where buffers may differ, such as those of BatchNorm; "
    "broadcast constants once, before the loop",
)
_UNKNOWN = _Kind(
    "communication",
    "communication takes longer than the computing that could hide it",
    "send less data, or send it while there is something to compute",
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
_WITHOUT_TRAINING = {_ALL_REDUCE: _BETWEEN_LAYERS, _SHARDED: _GATHERED}
_OF_STRATEGY = {"ddp": _ALL_REDUCE, "fsdp2": _SHARDED}
"""The kind of communication of a strategy, for a trace without kernels of it."""


def repeated_reduction(case: ProfileCase) -> Answers:
    """Finds gradients that are summed over the ranks before they are complete."""
    if not _reduces_each(case):
        return
    micro = case.setting("training.grad_accumulation")
    cost = _exposed(case) * (1 - 1 / micro)
    if cost < WORTH:
        return
    yield Finding(
        id="repeated-reduction",
        title="gradients are all-reduced after every micro-batch",
        severity=severity(cost),
        evidence=[
            f"a step has {micro} micro-batches, and distributed.sync_gradients is each",
            f"{units.percent(_exposed(case))} of {case.window()} is exposed communication",
        ],
        cause="only the sum after the last micro-batch is used: each rank could accumulate the others by itself",
        advice="use model.no_sync() around all micro-batches but the last",
        fix=case.fix(distributed__sync_gradients="last"),
        expected=at_most(cost),
        threshold=case.worth_reason,
    )


def exposed_communication(case: ProfileCase) -> Answers:
    """Finds exposed communication that neither a slow rank nor repeated reductions explain."""
    if _reduces_each(case):
        return
    cost = _exposed(case) - _explained(case)
    if cost < NOTABLE:
        return
    shares = _shares(case)
    cause, advice, factor = _reason(case, cost, shares)
    yield Finding(
        id="exposed-communication",
        title=f"{case.who()} waits for communication",
        severity=severity(cost),
        evidence=[*_evidence(case), *_outlying(case), *_describe_kinds(case, shares)],
        cause=cause,
        advice=advice,
        fix={} if factor is None else _bucket(case, factor),
        expected=at_most(cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}: hardly any program hides all of its "
        "communication",
    )


def collective_kind(collective: Collective) -> CollectiveKind:
    """Returns the kind as recorded, or else by name."""
    return collective.kind or kind_of(collective.name)


def _reduces_each(case: ProfileCase) -> bool:
    return (
        case.ranks > 1
        and (case.setting("training.grad_accumulation") or 1) > 1
        and case.setting("distributed.sync_gradients") == "each"
    )


def _exposed(case: ProfileCase) -> float:
    clean = case.clean_share("phase_exposed_communication")
    if clean is not None:
        return clean
    return case.share(exposed(case.rank))


def _explained(case: ProfileCase) -> float:
    """Returns the fraction of the step that a slow rank explains: 0 if this rank is the slow one."""
    slow = slowest(case)
    return 0.0 if slow is None or slow.rank == case.rank.rank or not slow.whole else waited_for(case, slow)


def _shares(case: ProfileCase) -> dict[_Kind, float]:
    """Returns the kinds of collectives worth naming with their shares of the exposed communication, largest first."""
    found: dict[_Kind, int] = {}
    hidden = not any(one.exposed for one in case.rank.collectives)
    for one in case.rank.collectives:
        kind = _KINDS[collective_kind(one)]
        found[kind] = found.get(kind, 0) + (one.total if hidden else one.exposed)
    whole = sum(found.values())
    if not whole:
        return {_OF_STRATEGY.get(case.setting("distributed.strategy"), _UNKNOWN): 1.0}
    largest = sorted(found.items(), key=lambda each: -each[1])
    return {kind: time / whole for kind, time in largest if time >= NAMED * whole}


def _describe_kinds(case: ProfileCase, shares: dict[_Kind, float]) -> list[str]:
    """Describes how many collectives of each kind there are, and how much of their time is exposed."""
    evidence = []
    for kind in shares:
        own = [one for one in case.rank.collectives if _KINDS[collective_kind(one)] is kind]
        if own:
            calls, visible = sum(one.calls for one in own), sum(one.exposed for one in own)
            name = "of unknown kind" if kind is _UNKNOWN else kind.name
            evidence.append(f"{name}: {case.calls_per_step(calls)}, {case.time_per_step(visible)} exposed")
    return evidence


def _outlying(case: ProfileCase) -> list[str]:
    """Describes single collectives that take most of the time of their kind, as those that wait for a late rank do."""
    every = sum(one.calls for one in case.rank.collectives)
    return [
        f"one {_KINDS[collective_kind(one)].name} takes {units.seconds(one.longest / 1e9)} of the "
        f"{units.seconds(one.total / 1e9)} of {units.counted(one.calls, 'call')} (median "
        f"{units.seconds(one.median / 1e9)}): number {one.place} of {every} collectives"
        + (f", after {shortened(kernel_name(one.after))}" if one.after else "")
        + "; a rank that comes late, or the first use of a group, makes one so long"
        for one in case.rank.collectives
        if one.calls >= FEWEST_ALIKE and 2 * one.longest > one.total and one.longest > OUTLYING * one.median
    ]


def _evidence(case: ProfileCase) -> list[str]:
    evidence, clean = [], case.metrics.get("phase_exposed_communication")
    if clean is not None:
        evidence.append(
            f"exposed communication takes {units.seconds(clean.estimate)} of a step without the profiler "
            f"({units.percent(_exposed(case))})"
        )
    device = case.rank.device
    if device is not None and device.communication:
        hidden = units.percent(device.hidden_communication / device.communication)
        evidence.append(
            f"communication takes {case.time_per_step(device.communication)}, and {hidden} of it is hidden behind "
            "computing"
        )
    if waiting := case.rank.idle.get("communication_wait", 0):
        evidence.append(f"the GPU is idle {case.time_per_step(waiting)} while the CPU waits for other ranks")
    if device is None and clean is None:
        spent = case.time_per_step(case.rank.host.get("communication", 0))
        evidence.append(f"the main thread waits for other ranks for {spent}")
    if calls := sum(one.calls for one in case.rank.collectives) / case.steps:
        evidence.append(f"{units.digits(calls)} collective{'s' * (calls != 1)} {case.per_step()}")
    return evidence


def _reason(case: ProfileCase, cost: float, shares: dict[_Kind, float]) -> tuple[str, str, float | None]:
    """Returns cause, advice, and the factor for the bucket's size."""
    skew = case.metrics.get("straggler_skew")
    even = skew is not None and skew.estimate < MOST * cost  # the clean run's metric is of all ranks
    cause, advice, factor = _by_kind(case, shares)
    if not even and not every_rank_is_traced(case):
        given = len(case.profile.ranks)
        others = "record every rank"
        if given > 1:
            others = f"give the traces of the other {case.ranks - given} ranks too, as --trace"
        return (
            "the link is too slow, or another rank is late: only traces of all ranks show which",
            f"{others}; if none is late: {advice}",
            None,
        )
    if not even and _others_late(case) >= MOST * cost:
        return (
            "ranks wait for each other, but for none of them more often than chance explains",
            "give all ranks the same amount of work in every step: batches of one size, sequences of similar lengths",
            None,
        )
    return cause, advice, factor


def _by_kind(case: ProfileCase, shares: dict[_Kind, float]) -> tuple[str, str, float | None]:
    """Chooses by kind; all-reduces alone are judged by their number, which DistributedDataParallel's buckets decide."""
    first, *others = shares
    if others:
        known = [kind for kind in shares if kind is not _UNKNOWN][:ADVISED]
        known = [kind if case.trains else _WITHOUT_TRAINING.get(kind, kind) for kind in known]
        return known[0].cause, "; ".join(f"{kind.name}: {kind.advice}" for kind in known), None
    if not case.trains:
        first = _WITHOUT_TRAINING.get(first, first)
    if first is not _ALL_REDUCE or not case.rank.step_numbers:
        return first.cause, first.advice, None
    sums = [one for one in case.rank.collectives if collective_kind(one) == "all_reduce"]
    return _by_number(sum(one.calls for one in sums) / case.steps)


def _others_late(case: ProfileCase) -> float:
    """Returns the fraction of the step in which this rank may have waited for others that are not the slowest."""
    slow = slowest(case)
    others = [one for one in case.profile.stragglers if one.rank != case.rank.rank and one is not slow]
    return sum(waited_for(case, one) for one in others)


def _by_number(calls: float) -> tuple[str, str, float | None]:
    """Chooses by the number of all-reduces that carry the gradients of a step."""
    if 0 < calls <= TOO_FEW:
        return (
            "with so few buckets, most all-reduces start at the end of the backward pass, where little can hide them",
            "use smaller buckets, which start earlier: DistributedDataParallel(bucket_cap_mb=...)",
            1 / BUCKET_STEP,
        )
    if calls > TOO_MANY:
        return (
            "gradients are sent in many small pieces, and each has the latency of a collective",
            "use larger buckets: DistributedDataParallel(bucket_cap_mb=...)",
            BUCKET_STEP,
        )
    return (
        "there is more to send than the backward pass has time for",
        "send less: accumulate gradients over more micro-batches under no_sync(), or compress them to bf16",
        None,
    )


def _bucket(case: ProfileCase, factor: float) -> dict[str, Any]:
    size = case.setting("distributed.bucket_mb")
    if size is None or case.setting("distributed.strategy") != "ddp":
        return {}
    return case.fix(distributed__bucket_mb=size * factor)
