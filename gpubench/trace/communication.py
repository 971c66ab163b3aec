"""What ranks said to each other, and what of it nothing else hid."""

import numpy as np

from gpubench.trace.breakdown import communication_work
from gpubench.trace.columns import MISSING, Trace
from gpubench.trace.intervals import Spans, clip, intersect, union
from gpubench.trace.launches import started_in
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import Collective
from gpubench.trace.windows import Window


def collectives(trace: Trace, lexicon: Lexicon, window: Window, exposed: Spans) -> list[Collective]:
    """By the name of the kernel, the most exposed first. `exposed` is `Sets.exposed_communication`.

    Where two of different names run at once, the time is in the `exposed` of both. Bytes are
    those of the messages on this rank, and known where the trace has them for every call.
    """
    device = trace.device
    works = np.flatnonzero(started_in(trace, window) & communication_work(trace, lexicon))
    visible = clip(exposed, window.start, window.end)
    found = []
    for name in np.unique(device.name[works]).tolist():
        own = works[device.name[works] == name]
        start, end, size = device.start[own], device.end[own], device.bytes[own]
        found.append(
            Collective(
                name=trace.names[name],
                calls=len(own),
                total=int((end - start).sum()),
                exposed=intersect(union(start, end), visible).length,
                bytes=None if (size == MISSING).any() else int(size.sum()),
            )
        )
    return sorted(found, key=lambda one: (-one.exposed, -one.total, one.name))
