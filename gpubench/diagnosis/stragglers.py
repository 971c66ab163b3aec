"""The rule about a slowest rank that the others wait for."""

from collections.abc import Sequence

from gpubench import units
from gpubench.diagnosis.case import WORTH, Answers, ProfileCase, at_most, severity
from gpubench.distributions import binomial_tail
from gpubench.findings import Finding, Unanswered
from gpubench.trace.profile import RankProfile, Straggler

CHANCE = 0.05
"""The probability below which chance is rejected as the reason why one rank is late most often: the 95 % confidence
that is used everywhere."""
_ADVICE_UNKNOWN = "compare clocks, temperatures and the load of its machine with those of the others"
_PARTS = {
    "compute": ("computing", "give every rank the same amount of work, and compare the clocks of the devices"),
    "data_loader": ("waiting for its batches", "check the storage and the cores that this rank's loader has"),
    "synchronisation": ("in synchronisations", "remove what only this rank does: logging, saving, evaluation"),
    "python_and_launch": ("in Python between launches", "remove what only this rank does: logging, saving"),
    "python": ("in Python", "remove what only this rank does: logging, saving, evaluation"),
}


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
    """Tells whether all ranks are traced. A single trace that communicates is not, if their number is unknown."""
    world = case.setting("distributed.world_size") or case.rank.world_size
    if world is None:
        return len(case.profile.ranks) > 1 or not _communicates(case.rank)
    return len(case.profile.ranks) >= world


def slowest(case: ProfileCase) -> Straggler | None:
    """Returns the latest of the ranks that are last more often than chance explains; None without one."""
    found = case.profile.stragglers
    often = [one for one in found if one.waited_for > 0 and _by_chance(one, one.waited_for, found) < CHANCE]
    return max(often, key=lambda one: one.late, default=None)


def _too_few_to_tell(case: ProfileCase) -> bool:
    """Tells whether a rank is late, but too few collectives were recorded to rule out chance."""
    found = case.profile.stragglers
    late = [one for one in found if one.waited_for > 0 and waited_for(case, one) >= WORTH]
    return bool(late) and all(_by_chance(one, _waits(one, found), found) >= CHANCE for one in late)


def _by_chance(one: Straggler, last: int, found: Sequence[Straggler]) -> float:
    """Returns an upper limit for the probability that a rank is last in `last` of its collectives by chance.

    It is the tail of the binomial distribution for one rank, if all ranks of its smallest group are equally likely to
    be last, times the number of ranks (Bonferroni).
    """
    return binomial_tail(last, _waits(one, found), 1 / max(2, one.among or len(found))) * max(2, len(found))


def _waits(one: Straggler, found: Sequence[Straggler]) -> int:
    """Returns the number of a rank's collectives in which any rank waited."""
    return sum(other.waited_for for other in found) if one.waits is None else one.waits


def waited_for(case: ProfileCase, slow: Straggler) -> float:
    """Returns an upper limit for the fraction of the step in which other ranks wait for this one.

    It is at most the exposed communication of another rank, since collectives may overlap each other or computing.
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
    """Returns cause and advice: the part that takes the slowest rank longer than the median of the others."""
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
