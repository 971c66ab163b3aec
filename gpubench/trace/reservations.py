"""Calls by which PyTorch's allocators get memory from the driver and give it back."""

import re

import numpy as np

from gpubench.trace.columns import SliceKind
from gpubench.trace.profile import Reservations
from gpubench.trace.slices import ProgramSlices

_GIVES = re.compile(r"\w*?(Malloc|Alloc|MemCreate|HostRegister)")
_PAGE_LOCKED = re.compile(r"\w*Host")
_FREES = re.compile(r"\w*?(Free|MemRelease|HostUnregister)")
_MAPS = re.compile(r"(cu|hip|cuda)Mem(Create|Map|Unmap|Release|SetAccess|Address)")
_MAKES = frozenset({"aten::empty", "aten::empty_strided"})
"""The operators that ask for the memory of a tensor; all others that return new tensors call one of them."""


def reservations(program: ProgramSlices) -> Reservations | None:
    """The calls in the window; None if there are none."""
    trace, window = program.trace, program.window
    cpu, names = trace.cpu, trace.names
    calls = np.flatnonzero(program.lexicon.allocator[cpu.name] & (cpu.kind == SliceKind.RUNTIME) & program.inside)
    if not len(calls):
        return None
    time = cpu.end[calls] - cpu.start[calls]
    total: dict[str, tuple[int, int]] = {}
    for name, spent in zip(cpu.name[calls].tolist(), time.tolist(), strict=True):
        count, before = total.get(names[name], (0, 0))
        total[names[name]] = count + 1, before + spent
    makes = trace.names_where(lambda name: name in _MAKES)
    starts = np.array([step.start for step in window.steps], np.int64)
    steps = np.searchsorted(starts, cpu.start[calls], side="right") - 1
    return Reservations(
        calls={name: total[name][0] for name in sorted(total, key=lambda name: -total[name][1])},
        host=int(time.sum()),
        page_locked=sum(spent for name, (_, spent) in total.items() if _PAGE_LOCKED.match(name)),
        given=sum(count for name, (count, _) in total.items() if _GIVES.match(name)),
        freed=sum(count for name, (count, _) in total.items() if _FREES.match(name)),
        tensors=int((program.operators & program.inside & makes[cpu.name]).sum()),
        maps=any(_MAPS.match(name) for name in total),
        by_step=np.bincount(steps[steps >= 0], minlength=len(starts)).tolist() if len(starts) else [],
    )
