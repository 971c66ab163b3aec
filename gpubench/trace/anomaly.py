"""Finds the checks of anomaly detection, which looks for NaN in what each node of the backward pass has computed."""

import numpy as np

from gpubench.trace.columns import SliceKind, at
from gpubench.trace.profile import AnomalyChecks
from gpubench.trace.slices import ProgramSlices

_NODE = "autograd::engine::evaluate_function"
_CHECKS = frozenset({
    "aten::isnan", "aten::ne", "aten::any", "aten::_is_any_true", "aten::item", "aten::is_nonzero",
    "aten::_local_scalar_dense",
})  # fmt: skip
OFTEN = 0.5
"""The checks of a node at least: one for each of its outputs, and none of those that have no output."""


def anomaly_checks(program: ProgramSlices) -> AnomalyChecks | None:
    """Returns the checks in the window; None where there are too few of them for all nodes to be checked."""
    trace, cpu = program.trace, program.trace.cpu
    operators = program.inside & (cpu.kind == SliceKind.OPERATOR)
    nodes = operators & trace.names_where(lambda name: name.startswith(_NODE))[cpu.name]
    of_node = at(nodes, program.nest.parent, False)
    tests = operators & of_node & trace.names_where("aten::isnan".__eq__)[cpu.name]
    if not nodes.any() or tests.sum() < OFTEN * nodes.sum():
        return None
    checks = np.flatnonzero(operators & of_node & trace.names_where(_CHECKS.__contains__)[cpu.name])
    return AnomalyChecks(int(tests.sum()), int((program.nest.end[checks] - cpu.start[checks]).sum()))
