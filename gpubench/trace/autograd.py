"""The backward pass in a trace: autograd's own slices, and the forward operator each of them belongs to.

An operator that makes an autograd node, and the slice that later evaluates the node, carry one "Sequence number"; it
counts per thread of the forward pass, and "Fwd thread id" says which, in numbers of the profiler's own (the docstring
of torch.autograd.profiler.emit_nvtx explains both).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, Trace

Places = NDArray[np.integer[Any]]

_NODE = ("autograd::engine::evaluate_function: ", "torch::autograd::")


def evaluations(trace: Trace) -> Mask:
    """Slices in which autograd evaluates a node of the backward pass: by their names, or by the forward's thread."""
    names = np.fromiter((name.startswith(_NODE) for name in trace.names), np.bool_, len(trace.names))
    return names[trace.host.name] | (trace.host.forward_thread > 0)


def forward_of(trace: Trace, backward: Mask) -> Ids:
    """For each slice of `backward` the operator whose node it evaluates, as a slice; -1 elsewhere, and if unknown.

    Operators that make no node carry the number of the next one made, so of those with a number the last before it
    was evaluated is meant.
    """
    host = trace.host
    forward = np.flatnonzero((host.sequence >= 0) & (host.forward_thread <= 0) & ~backward)
    nodes = np.flatnonzero(backward & (host.sequence >= 0))
    found = np.full(len(host), MISSING, np.int32)
    for number in np.unique(host.forward_thread[nodes]).tolist():
        ours = nodes[host.forward_thread[nodes] == number]
        thread = _forward_thread(trace, forward, ours)
        found[ours] = _last_before(trace, forward[host.thread[forward] == thread], ours)
    return found


def _forward_thread(trace: Trace, forward: Places, nodes: Places) -> int:
    """The thread that has operators with most of the numbers of `nodes`."""
    host = trace.host
    candidates = forward[np.isin(host.sequence[forward], host.sequence[nodes])]
    pairs = np.unique(np.stack((host.thread[candidates].astype(np.int64), host.sequence[candidates])), axis=1)
    return int(np.bincount(pairs[0]).argmax()) if pairs.size else MISSING


def _last_before(trace: Trace, forward: Places, nodes: Places) -> Ids:
    """For each of `nodes` the last of `forward` with its number that began before it, else -1."""
    if not len(forward):
        return np.full(len(nodes), MISSING, np.int32)
    host = trace.host
    both = np.concatenate((forward, nodes))
    is_node = np.arange(len(both)) >= len(forward)
    order = np.lexsort((is_node, host.start[both], host.sequence[both]))
    last = np.maximum.accumulate(np.where(is_node[order], MISSING, np.arange(len(both))))
    candidate = both[order][np.maximum(last, 0)]
    known = (last >= 0) & (host.sequence[candidate] == host.sequence[both[order]])
    found = np.empty(len(both), np.int32)
    found[order] = np.where(known, candidate, MISSING)
    return found[len(forward) :]
