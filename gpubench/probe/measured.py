"""A measured step, as the host gets it: `gpubench.events.Step` in JSON.

It is written without an encoder, which would take a good part of the time of the whole probe: nearly all of it goes
into the digits of floating-point numbers. The times are whole nanoseconds, so that "1500e-9" is exact.
"""

from __future__ import annotations

from functools import lru_cache
from json import dumps
from math import inf
from typing import Mapping, NamedTuple

_WORDS = {True: "true", False: "false", None: "null"}


class MeasuredStep(NamedTuple):
    """A step of a repeat. Times are in nanoseconds."""

    repeat: int
    rank: int
    number: int
    began: int
    """Since the epoch."""
    total: int
    """The sum of the phases."""
    phases: Mapping[str, int]
    host: int
    """The time that the CPU took to issue the work of the step."""
    samples: int
    loss: float | None
    """Infinite for one that is not finite."""
    starved: bool | None
    skipped: bool

    def json(self) -> str:
        repeat, rank, number, began, total, phases, host, samples, loss, starved, skipped = self
        return _template(tuple(phases)) % (
            repeat,
            rank,
            number,
            began,
            total,
            *phases.values(),
            host,
            samples,
            "null" if loss is None or loss == inf else repr(loss),
            _WORDS[starved],
            _WORDS[loss == inf],
            _WORDS[skipped],
        )


@lru_cache(maxsize=64)
def _template(phases: tuple[str, ...]) -> str:
    """Returns a step with these phases in JSON, with a place for each value. Most steps have the same phases."""
    times = ",".join(dumps(name, ensure_ascii=False).replace("%", "%%") + ":%de-9" for name in phases)
    return (
        '{"repeat":%d,"rank":%d,"epoch":0,"step":%d,"time":%de-9,"total":%de-9,"phases":{'
        + times
        + '},"host":%de-9,"samples":%d,"loss":%s,"starved":%s,"not_finite":%s,"skipped":%s}'
    )
