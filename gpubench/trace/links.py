"""Which call brought which work: the runtime gives both the same correlation number."""

import numpy as np

from gpubench.trace.columns import MISSING, HostKind, Ids, Trace


def launchers(trace: Trace) -> Ids:
    """For each work of the device the index of the runtime slice that launched it, -1 where the trace has none.

    Correlations of 0 and below mean none. Work of a CUDA graph has one launch in common. Of several calls with one
    number (a runtime call and the driver call below it) the one that began first counts.
    """
    host, device = trace.host, trace.device
    calls = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation > 0))
    calls = calls[np.lexsort((host.start[calls], host.correlation[calls]))]
    if not len(calls):
        return np.full(len(device), MISSING, np.int32)
    numbers = host.correlation[calls]
    place = np.minimum(np.searchsorted(numbers, device.correlation), len(calls) - 1)
    return np.where(numbers[place] == device.correlation, calls[place], MISSING).astype(np.int32)
