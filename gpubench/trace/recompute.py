"""Forward work that is done again in the backward pass, as activation checkpointing does."""

import re

import numpy as np

from gpubench.trace.calls import ModuleCalls
from gpubench.trace.columns import Ids, Mask
from gpubench.trace.nesting import nearest, nearest_around
from gpubench.trace.program import Program

_CHECKPOINT = re.compile(
    r".*torch/utils/checkpoint\.py\(\d+\): (recompute_fn|unpack_hook)$"  # use_reentrant=False
    r"|CheckpointFunctionBackward$"  # use_reentrant=True
)


def recomputed(program: Program, evaluation: Ids, calls: ModuleCalls) -> Mask:
    """Slices of forward work within the evaluation of an autograd node.

    Told by a call of a module or of torch.utils.checkpoint around them; else by operators that record gradients, while
    the node also has some that do not: a backward pass does so only where create_graph is set, and then with all.
    """
    trace, nest = program.trace, program.nest
    known = np.fromiter((_CHECKPOINT.match(name) is not None for name in trace.names), np.bool_, len(trace.names))
    roots = calls.mask | known[trace.host.name] | _recording(program)
    around = nearest(nest, roots & (evaluation >= 0))
    again = around >= 0
    # Reentrant checkpoints run a backward pass of their own within, which is none of forward's.
    return again & (evaluation <= around)


def _recording(program: Program) -> Mask:
    """Operators with a sequence number of their own, directly in a node that also has some without."""
    host = program.trace.host
    node = nearest_around(program.nest, program.operator)
    direct = program.operators & (node >= 0) & (host.forward_thread[node] > 0)
    recording = direct & (host.sequence >= 0) & (host.forward_thread <= 0)
    mixed = np.zeros(len(host), np.bool_)
    mixed[node[direct & (host.sequence < 0)]] = True
    return recording & mixed[node]
