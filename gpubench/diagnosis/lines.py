"""The lines of the program that a finding is about, as far as calls of its code and stacks show them."""

from collections.abc import Iterable, Iterator

from gpubench.diagnosis.copies import COMPUTING
from gpubench.trace.profile import RankProfile


def lines_of(finding: str, ranks: Iterable[RankProfile]) -> list[str]:
    """The lines that a finding, by the name of its rule, is about, as file:line; none if they are not known."""
    return list(dict.fromkeys(line for rank in ranks for line in _lines(finding, rank) if line))


def _lines(finding: str, rank: RankProfile) -> Iterator[str | None]:
    calls = rank.code.calls if rank.code else []
    if finding == "synchronisation":
        yield from (one.place for one in calls if one.kind == "read")
        yield from (one.where for one in rank.synchronisations)
    elif finding == "unfused-attention":
        yield from (one.place for one in calls if one.kind == "softmax")
        yield from (one.where for one in rank.attention)
    elif finding in ("host-tensors", "blocking-copies"):
        computing = finding == "host-tensors"
        copies = [one for one in rank.copies if one.kind == "host_to_device" and (one.phase in COMPUTING) is computing]
        yield from (one.where for one in copies)
    elif finding == "unused-gradients" and rank.unused_gradients:
        yield rank.unused_gradients.where
