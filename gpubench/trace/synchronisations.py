"""Places where the host waits for the device, by who asked for it."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from gpubench.trace.columns import Mask, Ns
from gpubench.trace.frames import UserFrames
from gpubench.trace.idle import waiting_calls
from gpubench.trace.nesting import outermost
from gpubench.trace.phases import NAMES, Phases
from gpubench.trace.profile import Synchronisation
from gpubench.trace.program import Program

_READING = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
)
"""Operators that bring a value or a size to the host, and so wait for it."""
_ASKING = (*_READING, "aten::to", "aten::_to_copy", "aten::copy_", "aten::index", "aten::_unique2", "aten::unique_dim")


class _Place(NamedTuple):
    operator: str
    call: str
    where: str | None
    phase: str


def synchronisations(program: Program, phases: Phases, idle_by_call: Ns) -> list[Synchronisation]:
    """Calls of the window that blocked the host, the longest wait first. Times are nanoseconds.

    Waits that only the recording makes are left out.
    `idle_by_call` stands beside the host slices: how long the device had nothing to do meanwhile. Of a trace without
    device work, the operators are listed that would wait if there were a device, with no call.
    """
    host = program.trace.host
    asking, waiting = program.named(_ASKING), _waiting(program)
    asked_by = outermost(program.nest, asking)
    frames = UserFrames.of(program)
    totals: defaultdict[_Place, list[int]] = defaultdict(lambda: [0, 0, 0])
    blocked = program.nest.end - host.start
    for slice_ in np.flatnonzero(waiting & program.inside).tolist():
        call = "" if program.trace.host_only else program.trace.names[host.name[slice_]]
        operator = asked_by[slice_] if asked_by[slice_] >= 0 else program.operator[slice_]
        name = program.trace.names[host.name[operator]] if operator >= 0 else call
        total = totals[_Place(name, call, frames.at(slice_), NAMES[phases.of[slice_]])]
        for place, amount in enumerate((1, blocked[slice_], idle_by_call[slice_])):
            total[place] += int(amount)
    found = [
        Synchronisation(
            operator=place.operator,
            call=place.call,
            where=place.where,
            calls=calls,
            blocked=waited,
            idle=idle,
            phase=place.phase,
        )
        for place, (calls, waited, idle) in totals.items()
    ]
    return sorted(found, key=lambda one: (-one.blocked, one.operator, one.where or ""))


def _waiting(program: Program) -> Mask:
    host = program.trace.host
    if program.trace.host_only:
        reading = program.named(_READING)
        outer: Mask = outermost(program.nest, reading) == np.arange(len(host))
        return reading & outer
    return waiting_calls(program.trace, program.lexicon, program.links) & ~program.recorder_waits
