"""Rules about ranks that come late to what all of them do together."""

from scipy.special import bdtrc

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, Unanswered, severity
from gpubench.trace.profile import Rank, Straggler

CHANCE = 0.05
"""Ranks that are late by turns would look as one-sided as this in one program of twenty: the confidence, 95 %, that
everything here is told with."""


def stragglers(case: Case) -> Answers:
    if not every_rank_is_traced(case):
        needs = "profiling.all_ranks" if case.setting("profiling.all_ranks") is False else "a trace of every rank"
        yield Unanswered("straggler", "traces of the other ranks", needs)
    slow = slowest(case)
    if slow is None and _too_few_to_tell(case):
        needs = "profiling.active" if case.setting("profiling.active") else "traces of more steps"
        yield Unanswered("straggler", "collectives enough to tell a slow rank from chance", needs)
    if slow is None or waited_for(case, slow) < WORTH:
        return
    cost = waited_for(case, slow)
    skew = case.metrics.get("straggler_skew")
    reason, advice = _difference(case, slow)
    yield Finding(
        id="straggler",
        title=f"rank {slow.rank} keeps the others waiting",
        severity=severity(cost),
        evidence=[
            f"rank {slow.rank} reached {slow.waited_for} of {slow.of} collectives last, "
            f"{units.seconds(slow.late / 1e9)} after the first on average",
            *([f"straggler_skew of the clean run is {units.percent(skew.estimate)}"] if skew is not None else []),
        ],
        cause=reason,
        advice=advice,
        expected=measures.at_most(cost),
        threshold=f"{WORTH_REASON}, where one rank is last so often that ranks late by turns would show it in less "
        f"than {units.percent(CHANCE)} of programs",
    )


def every_rank_is_traced(case: Case) -> bool:
    """Of a program that communicates; where it does not say with how many ranks, one trace is not all."""
    world = case.setting("distributed.world_size") or case.rank.world_size
    if world is None:
        return len(case.profile.ranks) > 1 or not _communicates(case.rank)
    return len(case.profile.ranks) >= world


def slowest(case: Case) -> Straggler | None:
    """The rank that is late most, among those that are last too often for chance."""
    found = case.profile.stragglers
    ranks, waits = max(2, len(found)), sum(one.waited_for for one in found)
    often = [one for one in found if one.waited_for > 0 and _by_chance(one.waited_for, waits, ranks) < CHANCE]
    return max(often, key=lambda one: one.late, default=None)


def _too_few_to_tell(case: Case) -> bool:
    """Whether some rank is late, and not even one that is always the last would stand out."""
    found = case.profile.stragglers
    waits, most = sum(one.waited_for for one in found), max((waited_for(case, one) for one in found), default=0.0)
    return waits > 0 and most >= WORTH and _by_chance(waits, waits, max(2, len(found))) >= CHANCE


def _by_chance(last: int, waits: int, ranks: int) -> float:
    """The probability, at most, that some rank is last in so many of the collectives in which one was, if each is as
    likely to: the tail of the binomial distribution for one rank, times their number (Bonferroni)."""
    return float(bdtrc(last - 1, waits, 1 / ranks)) * ranks


def waited_for(case: Case, slow: Straggler) -> float:
    """The fraction of the step, at most: no more than another rank has nothing else to do, since collectives may wait
    side by side, or behind computing."""
    others = [exposed(rank) for rank in case.profile.ranks if rank.rank != slow.rank]
    return measures.share(case, min([slow.late * slow.of, *([max(others)] if others else [])]))


def exposed(rank: Rank) -> int:
    """Nanoseconds of a rank in which only communication, or waiting for it, keeps it from going on."""
    if rank.device is None:
        return rank.host.get("communication", 0)
    return rank.device.exposed_communication + rank.idle.get("communication_wait", 0)


def _communicates(rank: Rank) -> bool:
    return exposed(rank) > 0 or (rank.device is not None and rank.device.communication > 0)


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
