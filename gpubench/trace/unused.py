"""Finds calls of models that record gradients, and whose gradients no backward pass computes."""

import numpy as np

from gpubench.trace.columns import at
from gpubench.trace.phases import Phases
from gpubench.trace.profile import UnusedGradients
from gpubench.trace.slices import ProgramSlices, UserFrames, outermost

MODULE = " in <module>"
"""The end of a place whose line is that at which its code was when the recording began."""


def unused_gradients(program: ProgramSlices, phases: Phases) -> UnusedGradients | None:
    """The calls of outermost modules in the window that made nodes of which autograd evaluates none.

    Operators have a sequence number if gradients are on, which is that of the next node to be made: where it does not
    grow until the next operator, as in a model whose parameters are frozen, none was made. None unless there are other
    calls whose nodes are evaluated, or if all calls come after the last backward pass, as the trace may then end before
    theirs. What is recomputed in a backward pass belongs to it.
    """
    cpu, calls = program.trace.cpu, phases.calls
    around = outermost(program.nest, calls.mask)
    inside = calls.mask & program.inside & (phases.evaluation < 0) & ~phases.recompute
    roots = np.flatnonzero(inside & (around == np.arange(len(cpu))))
    used = np.unique(at(around, phases.forward[phases.forward >= 0]))
    if not len(roots) or not np.isin(roots, used).any():
        return None
    numbered = np.flatnonzero(program.operators & (cpu.sequence >= 0) & (cpu.forward_thread <= 0))
    one, following = numbered[:-1], numbered[1:]  # by thread, and in the order in which they began
    grows = (cpu.thread[one] == cpu.thread[following]) & (cpu.sequence[one] < cpu.sequence[following])
    making = np.unique(around[one[grows]])
    unused = roots[np.isin(roots, making) & ~np.isin(roots, used)]
    last = cpu.start[phases.forward >= 0].max()
    if not (cpu.start[unused] < last).any():  # their backward pass may come after the window
        return None
    if program.trace.cpu_only:
        total = int((program.nest.end[unused] - cpu.start[unused]).sum())
    else:
        launched = at(around, program.links)
        total = int(program.work_time[np.isin(launched, unused)].sum())
    frames = UserFrames.of(program)
    named = (place for one in unused.tolist() if (place := frames.at(one)) and not place.endswith(MODULE))
    return UnusedGradients(
        calls=len(unused),
        total=total,
        modules=sorted({calls.kinds[one] for one in calls.of[unused].tolist()}),
        where=next(named, None),
    )
