"""What the device did with its time: a partition of wall time that sums exactly.

Where several kinds of work run at once, the time is counted for the first of compute, communication, copies: so what
is counted for the latter two is what a perfect overlap could save.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpubench.trace.columns import Mask, Trace, WorkKind
from gpubench.trace.intervals import Spans, join, overlap, subtract, union
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import Breakdown


@dataclass(frozen=True)
class Sets:
    """When the device did what, over the whole trace."""

    compute: Spans
    """Kernels that are no communication, and memsets."""
    communication: Spans
    copies: Spans
    busy: Spans
    exposed_communication: Spans
    """Communication while nothing computes."""
    exposed_copies: Spans
    """Copies while nothing computes or communicates."""


def device_spans(trace: Trace, lexicon: Lexicon) -> Sets:
    device = trace.device
    communicates = communication_work(trace, lexicon)
    copies = device.kind == WorkKind.COPY
    compute = _spans(trace, ~communicates & ~copies)
    communication = _spans(trace, communicates)
    copied = _spans(trace, copies)
    busy_without_copies = join(compute, communication)
    return Sets(
        compute=compute,
        communication=communication,
        copies=copied,
        busy=join(busy_without_copies, copied),
        exposed_communication=subtract(communication, compute),
        exposed_copies=subtract(copied, busy_without_copies),
    )


def communication_work(trace: Trace, lexicon: Lexicon) -> Mask:
    """Over `Trace.device`."""
    communicates: Mask = lexicon.communication_kernel[trace.device.name]
    communicates &= trace.device.kind == WorkKind.KERNEL
    return communicates


def breakdown(trace: Trace, lexicon: Lexicon, start: int, end: int) -> Breakdown:
    return breakdowns(device_spans(trace, lexicon), [(start, end)])[0]


def breakdowns(sets: Sets, windows: Sequence[tuple[int, int]]) -> list[Breakdown]:
    """Of each [start, end)."""
    bounds = np.array(windows, np.int64).reshape(-1, 2)
    start, end = bounds[:, 0], bounds[:, 1]
    parts = (sets.compute, sets.exposed_communication, sets.exposed_copies, sets.communication, sets.copies)
    found = np.stack([end - start, *(overlap(start, end, part) for part in parts)], axis=1)
    return [_breakdown(*row) for row in found.tolist()]


def _breakdown(wall: int, compute: int, exposed: int, exposed_copies: int, together: int, copies: int) -> Breakdown:
    return Breakdown(
        wall=wall,
        compute=compute,
        exposed_communication=exposed,
        exposed_copies=exposed_copies,
        idle=wall - compute - exposed - exposed_copies,
        communication=together,
        copies=copies,
        hidden_communication=together - exposed,
    )


def _spans(trace: Trace, chosen: Mask) -> Spans:
    return union(trace.device.start[chosen], trace.device.end[chosen])
