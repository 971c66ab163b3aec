"""Rules about communication: exposed collectives, and a slowest rank that the others wait for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, WORTH, Answers, ProfileCase, at_most, severity
from gpubench.distributions import binomial_tail
from gpubench.findings import Finding, Unanswered
from gpubench.trace.profile import Collective, CollectiveKind, RankProfile, Straggler
from gpubench.trace.ranks import kind_of

CHANCE = 0.05
"""The probability below which chance is rejected as the reason why one rank is late most often: the 95 % confidence
that is used everywhere."""


def stragglers(case: ProfileCase) -> Answers:
    if not every_rank_is_traced(case):
        needs = "profiling.all_ranks" if case.setting("profiling.all_ranks") is False else _traces_needed(case)
        yield Unanswered("straggler", "traces of the other ranks", needs)
    slow = slowest(case)
    if slow is None and _too_few_to_tell(case):
        needs = "profiling.active" if case.setting("profiling.active") else "traces of more steps"
        yield Unanswered("straggler", "enough collectives to distinguish a slow rank from chance", needs)
    if slow is None or waited_for(case, slow) < WORTH:
        return
    cost = waited_for(case, slow)
    skew = case.metrics.get("straggler_skew")
    reason, advice = _difference(case, slow)
    of_given = "" if slow.whole else f" of the {units.counted(len(case.profile.ranks), 'rank')} that were given"
    yield Finding(
        id="straggler",
        title=f"rank {slow.rank} keeps the others waiting"
        if slow.whole
        else f"rank {slow.rank} is later than the other ranks that were given",
        severity=severity(cost) if slow.whole else "low",
        evidence=[
            f"rank {slow.rank} was the last{of_given} to reach {slow.waited_for} of {slow.of} collectives, "
            f"{units.seconds(slow.late / 1e9)} after the first rank on average",
            *([] if slow.whole else ["ranks whose traces were not given may be later still"]),
            *([f"straggler_skew without the profiler is {units.percent(skew.estimate)}"] if skew is not None else []),
        ],
        cause=reason,
        advice=advice,
        expected=at_most(cost),
        threshold=f"{case.worth_reason}, if one rank is last so often that ranks late at random would show it in less "
        f"than {units.percent(CHANCE)} of programs",
    )


def _traces_needed(case: ProfileCase) -> str:
    given = len(case.profile.ranks)
    return "a trace of every rank" if given == 1 else f"traces of all {case.ranks} ranks: {given} were given"


def every_rank_is_traced(case: ProfileCase) -> bool:
    """Returns whether all ranks are traced. If their number is unknown, a single trace that communicates is not all."""
    world = case.setting("distributed.world_size") or case.rank.world_size
    if world is None:
        return len(case.profile.ranks) > 1 or not _communicates(case.rank)
    return len(case.profile.ranks) >= world


def slowest(case: ProfileCase) -> Straggler | None:
    """Returns the latest rank among those that are last more often than chance explains; None if there is none."""
    found = case.profile.stragglers
    often = [one for one in found if one.waited_for > 0 and _by_chance(one, one.waited_for, found) < CHANCE]
    return max(often, key=lambda one: one.late, default=None)


def _too_few_to_tell(case: ProfileCase) -> bool:
    """Returns whether some rank is late, but even a rank that is always last would not stand out from chance."""
    found = case.profile.stragglers
    late = [one for one in found if one.waited_for > 0 and waited_for(case, one) >= WORTH]
    return bool(late) and all(_by_chance(one, _waits(one, found), found) >= CHANCE for one in late)


def _by_chance(one: Straggler, last: int, found: Sequence[Straggler]) -> float:
    """Returns an upper limit for the probability that a rank is last in `last` of its collectives by chance.

    It is the tail of the binomial distribution for one rank, with all ranks of its smallest group equally likely to be
    last, times the number of ranks (Bonferroni).
    """
    return binomial_tail(last, _waits(one, found), 1 / max(2, one.among or len(found))) * max(2, len(found))


def _waits(one: Straggler, found: Sequence[Straggler]) -> int:
    """Returns the number of a rank's collectives in which any rank waited."""
    return sum(other.waited_for for other in found) if one.waits is None else one.waits


def waited_for(case: ProfileCase, slow: Straggler) -> float:
    """Returns an upper limit for the fraction of the step that other ranks wait for this one.

    It is no more than the exposed communication of another rank, since collectives may overlap each other or computing.
    """
    others = [exposed(rank) for rank in case.profile.ranks if rank.rank != slow.rank]
    return case.share(min([slow.late * slow.of, *([max(others)] if others else [])]))


def exposed(rank: RankProfile) -> int:
    """Returns the nanoseconds in which a rank does nothing but communicate, or wait for communication."""
    if rank.device is None:
        return rank.host.get("communication", 0)
    return rank.device.exposed_communication + rank.idle.get("communication_wait", 0)


def _communicates(rank: RankProfile) -> bool:
    return exposed(rank) > 0 or (rank.device is not None and rank.device.communication > 0)


def _difference(case: ProfileCase, slow: Straggler) -> tuple[str, str]:
    """Returns cause and advice: the part on which the slowest rank spends more time than the median of the others."""
    own = next((_parts(rank) for rank in case.profile.ranks if rank.rank == slow.rank), {})
    others = [_parts(rank) for rank in case.profile.ranks if rank.rank != slow.rank]
    excess = {part: own[part] - _median([other.get(part, 0) for other in others]) for part in own if others}
    most = max(excess.keys() & _PARTS.keys(), key=lambda part: excess[part], default=None)
    if most is None or case.share(excess[most]) < WORTH:
        return "it does more work, or works more slowly; the traces do not show which", _ADVICE_UNKNOWN
    name, advice = _PARTS[most]
    return f"it spends {case.time_per_step(excess[most])} more than the others {name}", advice


def _parts(rank: RankProfile) -> dict[str, int]:
    if rank.device is None:
        return {"compute": rank.host.get("operators", 0)} | {str(part): time for part, time in rank.host.items()}
    return {"compute": rank.device.compute} | {str(cause): time for cause, time in rank.idle.items()}


def _median(times: list[int]) -> int:
    """Returns the median; of an even number, the lower one of the two in the middle."""
    return sorted(times)[(len(times) - 1) // 2]


_ADVICE_UNKNOWN = "compare clocks, temperatures and the load of its machine with those of the others"
_PARTS = {
    "compute": ("computing", "give every rank the same amount of work, and compare the clocks of the devices"),
    "data_loader": ("waiting for its batches", "check the storage and the cores that this rank's loader has"),
    "synchronisation": ("in synchronisations", "remove what only this rank does: logging, saving, evaluation"),
    "python_and_launch": ("in Python between launches", "remove what only this rank does: logging, saving"),
    "python": ("in Python", "remove what only this rank does: logging, saving, evaluation"),
}


TOO_FEW = 2  # collectives a step: the last one's bucket is filled only at the end of the backward pass
TOO_MANY = 8  # collectives a step: with more of them, the fixed cost of each counts
BUCKET_STEP = 4  # factor of the bucket's size: the effect of a smaller one is lost in noise
MOST = 0.5  # of the cost
NAMED = 0.1  # of the exposed communication: kinds of collectives with less are not named


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
        evidence=[*_evidence(case), *_describe_kinds(case, shares)],
        cause=cause,
        advice=advice,
        fix={} if factor is None else _bucket(case, factor),
        expected=at_most(cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}: hardly any program hides all of its "
        "communication",
    )


def collective_kind(collective: Collective) -> CollectiveKind:
    """Returns the recorded kind, or else the one that the name gives."""
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
    """Returns the fraction of the step that a slow rank explains, unless this rank is that one."""
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
        evidence.append(f"the GPU is idle {case.time_per_step(waiting)} while the host waits for other ranks")
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
        return (
            "the link is too slow, or another rank is late: only traces of all ranks show which",
            f"{_the_others(case)}; if none is late: {advice}",
            None,
        )
    if not even and _others_late(case) >= MOST * cost:
        return (
            "ranks wait for each other, but for none of them more often than chance explains",
            "give all ranks the same amount of work in every step: batches of one size, sequences of similar lengths",
            None,
        )
    return cause, advice, factor


def _the_others(case: ProfileCase) -> str:
    """Returns what to do for traces of all ranks."""
    given = len(case.profile.ranks)
    if given == 1:
        return "record every rank"
    return f"give the traces of the other {case.ranks - given} ranks too, as --trace"


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
    """Returns the fraction of the step that this rank may have waited for others, without a consistently slow one."""
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
