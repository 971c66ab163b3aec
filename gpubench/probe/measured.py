"""A measured step, as the host gets it: `gpubench.events.Step` in JSON.

It is written without an encoder, which would take a good part of the time of the whole probe: nearly all of it goes
into the digits of floating-point numbers. The times are whole nanoseconds, so that "1500e-9" is exact.
"""

from __future__ import annotations

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
    phases: Mapping[str, int]
    host: int
    """The time that the CPU took to issue the work of the step."""
    samples: int
    loss: float | None
    """Infinite for one that is not finite."""
    starved: bool | None
    skipped: bool

    @property
    def total(self) -> int:
        return sum(self.phases.values())

    def json(self) -> str:
        repeat, rank, number, began, phases, host, samples, loss, starved, skipped = self
        parts = ",".join([f"{_named(name)}:{ns}e-9" for name, ns in phases.items()])
        return (
            f'{{"repeat":{repeat},"rank":{rank},"epoch":0,"step":{number},"time":{began}e-9,'
            f'"total":{self.total}e-9,"phases":{{{parts}}},"host":{host}e-9,"samples":{samples},'
            f'"loss":{"null" if loss is None or loss == inf else repr(loss)},"starved":{_WORDS[starved]},'
            f'"not_finite":{_WORDS[loss == inf]},"skipped":{_WORDS[skipped]}}}'
        )


_names: dict[str, str] = {}


def _named(phase: str) -> str:
    """Returns the name of a phase in JSON. There are few of them."""
    found = _names.get(phase)
    if found is None:
        found = _names[phase] = dumps(phase, ensure_ascii=False)
    return found
