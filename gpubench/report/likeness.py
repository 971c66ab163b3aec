"""Whether two profiles are of one program on one kind of device, so that a change between them means something."""

from collections import Counter
from collections.abc import Iterable

from gpubench import units
from gpubench.report.plain import clean
from gpubench.trace.profile import Profile, Rank

ENOUGH = 0.5
"""Of the time, in names that both have: an optimised program still does most of what it did."""


def differences(before: Profile, after: Profile) -> list[str]:
    """What keeps them from being set against each other, a clause each; nothing where they are alike."""
    ours, theirs = before.ranks[0], after.ranks[0]
    found = [
        _unless_equal("the devices differ", _device(ours), _device(theirs)),
        _unless_equal("the numbers of ranks differ", str(_ranks(before)), str(_ranks(after))),
    ]
    alike = common(ours, theirs)
    if alike is not None and alike < ENOUGH:
        found.append(f"only {units.percent(alike)} of the time is in kernels or operators that both have")
    return [clause for clause in found if clause]


def common(before: Rank, after: Rank) -> float | None:
    """The part of the time in names that both have, as a mean of the two: of kernels or operators, whichever have more
    in common, as a library may pick another kernel for the same operator. None where neither says anything."""
    on_host = before.host_only or after.host_only
    kernels = _shared(*((((one.name, one.total) for one in rank.kernels)) for rank in (before, after)))
    operators = _shared(
        *(((one.name, one.host if on_host else one.device) for one in rank.operators) for rank in (before, after))
    )
    return max((share for share in (kernels, operators) if share is not None), default=None)


def _shared(before: Iterable[tuple[str, int]], after: Iterable[tuple[str, int]]) -> float | None:
    ours, theirs = _by_name(before), _by_name(after)
    wholes = ours.total(), theirs.total()
    if not all(wholes):
        return None
    names = ours.keys() & theirs.keys()
    return (
        sum(sum(side[name] for name in names) / whole for side, whole in zip((ours, theirs), wholes, strict=True)) / 2
    )


def _by_name(times: Iterable[tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, time in times:
        found[name] += time
    return found


def _device(rank: Rank) -> str | None:
    return "the host alone" if rank.host_only else rank.device_name


def _ranks(profile: Profile) -> int:
    return profile.ranks[0].world_size or len(profile.ranks)


def _unless_equal(clause: str, before: str | None, after: str | None) -> str:
    """Nothing where one is not known, either."""
    if before is None or after is None or before == after:
        return ""
    return f"{clause}: {clean(before)} before, {clean(after)} after"
