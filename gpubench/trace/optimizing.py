"""How much the optimizer asked for."""

from dataclasses import dataclass

import numpy as np

from gpubench.trace.intervals import Spans, intersect, union
from gpubench.trace.nesting import nearest, nearest_around
from gpubench.trace.phases import OPTIMIZER, Phases
from gpubench.trace.program import Program

ZEROING = ("aten::zero_", "aten::_foreach_zero_", "aten::fill_")


@dataclass(frozen=True)
class Optimizing:
    """Of the window."""

    steps: int
    """That the host went through."""
    kernels: int
    """Launches in these, and in what else is the optimizer's phase; without device work the operators there."""
    zeroed_gradients: int
    """Operators with which zero_grad writes zeros."""
    zeroing: int
    """Nanoseconds of these: of the work that they launched, without device work their own."""


def optimizing(program: Program, phases: Phases) -> Optimizing:
    """Steps and launches are both the host's, so that their ratio holds where the device is behind."""
    host, lexicon = program.trace.host, program.lexicon
    ours = (phases.of == OPTIMIZER) & program.inside
    launches = program.operators.copy()
    if not program.trace.host_only:
        launches[:] = False
        launches[program.links[program.links >= 0]] = True
    in_zero_grad = nearest(program.nest, lexicon.zero_grad[host.name]) >= 0
    zeroing = nearest(program.nest, program.named(ZEROING) & in_zero_grad)
    calls = (zeroing == np.arange(len(host))) & (nearest_around(program.nest, zeroing) < 0)  # zero_ calls fill_
    return Optimizing(
        steps=int((lexicon.optimizer[host.name] & program.inside).sum()),
        kernels=int((ours & launches).sum()),
        zeroed_gradients=int((calls & program.counted).sum()),
        zeroing=int(program.effort[zeroing >= 0].sum()),
    )


def zeroing_idle(program: Program, waiting: Spans) -> int:
    """How much of `waiting`, when the device waits for Python and launches, zero_grad takes to write zeros."""
    host = program.trace.host
    zero_grad = nearest(program.nest, program.lexicon.zero_grad[host.name])
    filling = zero_grad[program.named(ZEROING) & (zero_grad >= 0)]
    return intersect(union(host.start[filling], program.nest.end[filling]), waiting).length
