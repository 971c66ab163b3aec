"""How much the optimizer asked for."""

from dataclasses import dataclass

import numpy as np

from gpubench.trace.nesting import nearest
from gpubench.trace.phases import OPTIMIZER, Phases
from gpubench.trace.program import Program

ZEROING = ("aten::zero_", "aten::_foreach_zero_", "aten::fill_")


@dataclass(frozen=True)
class Optimizing:
    """Counts over the window."""

    steps: int
    kernels: int
    """Launches in the optimizer's phase; without device work the operators there."""
    zeroed_gradients: int
    """Operators with which zero_grad writes zeros."""


def optimizing(program: Program, phases: Phases) -> Optimizing:
    host, lexicon = program.trace.host, program.lexicon
    ours = phases.of == OPTIMIZER
    in_zero_grad = nearest(program.nest, lexicon.zero_grad[host.name]) >= 0
    zeroing = np.array([name in ZEROING for name in program.trace.names], np.bool_)[host.name]
    outermost = ~(zeroing[program.nest.parent] & (program.nest.parent >= 0))  # zero_ calls fill_
    works = program.operators & program.inside if program.trace.host_only else program.launched_time > 0
    return Optimizing(
        steps=int((lexicon.optimizer[host.name] & program.inside).sum()),
        kernels=int((ours & works).sum()),
        zeroed_gradients=int((zeroing & in_zero_grad & outermost & program.inside).sum()),
    )
