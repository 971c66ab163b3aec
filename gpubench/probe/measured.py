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
        parts = _template(tuple(phases)) % tuple(phases.values())
        return (
            f'{{"repeat":{repeat},"rank":{rank},"epoch":0,"step":{number},"time":{began}e-9,'
            f'"total":{total}e-9,"phases":{{{parts}}},"host":{host}e-9,"samples":{samples},'
            f'"loss":{"null" if loss is None or loss == inf else repr(loss)},"starved":{_WORDS[starved]},'
            f'"not_finite":{_WORDS[loss == inf]},"skipped":{_WORDS[skipped]}}}'
        )


@lru_cache(maxsize=64)
def _template(phases: tuple[str, ...]) -> str:
    """Returns the times of phases in JSON, with a place for the nanoseconds of each. Most steps have the same ones."""
    return ",".join(dumps(name, ensure_ascii=False).replace("%", "%%") + ":%de-9" for name in phases)
