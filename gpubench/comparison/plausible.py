"""What no run says of itself: the faults of files that read and cannot be true, each in a sentence."""

from collections.abc import Iterator

from gpubench.memory.batch_sizes import BatchSizes
from gpubench.memory.footprint import Footprints
from gpubench.memory.trades import Trades
from gpubench.summary import Summary

OF_STEP_TIMES = ("step_time", "throughput", "token_throughput")
MOST = 2**31 - 1  # steps, or repeats, that a StepTable can count
MOST_BYTES = 2**63
MOST_RATE = 1e18  # samples/s


def contradictions(summary: Summary) -> Iterator[str]:
    """What cannot be, however a run went."""
    for window in summary.steady:
        if min(window.repeat, window.first, window.steps - 1) < 0 or window.repeat + window.first + window.steps > MOST:
            yield f"repeat {window.repeat} has {window.steps} steady steps from step {window.first}"
    repeats, whose = len(summary.steady), f"there are {len(summary.steady)} steady windows"
    if summary.metrics and not summary.steady:
        first = summary.metrics[0]
        repeats, whose = len(first.repeats), f"{first.name} has {len(first.repeats)}"
    for metric in summary.metrics:
        if not metric.repeats or len(metric.repeats) != repeats:
            yield f"{metric.name} has {len(metric.repeats)} repeats, and {whose}"
        if metric.name in OF_STEP_TIMES and min(metric.estimate, *metric.repeats) <= 0:
            yield f"{metric.name} is not positive"


def in_footprints(found: Footprints) -> Iterator[str]:
    """What no footprint of a run says."""
    if not found.ranks:
        yield "it tells of no rank"
    for rank in found.ranks:
        moments = [(rank.peak.level, rank.peak.amounts), *((one.level, one.peak) for one in rank.phases)]
        if max(abs(size) for level, amounts in moments for size in (level.total, *amounts.values())) > MOST_BYTES:
            yield f"rank {rank.rank} has more bytes than there can be"


def in_batch_sizes(found: BatchSizes) -> Iterator[str]:
    """What no search for batch sizes says."""
    totals = [*(one.total for one in found.points), *(one.total for one in found.confirmed if one.total is not None)]
    if any(not 0 <= size <= MOST_BYTES for size in (found.capacity, found.limit, *totals)):
        yield "it has more bytes than there can be, or fewer than none"
    sizes = [*(one.batch_size for one in found.points), *(one.batch_size for one in found.confirmed)]
    if any(not 1 <= size <= MOST for size in (*sizes, *(one.batch_size for one in found.speeds))):
        yield "it has a batch size that cannot be"
    if any(not 0 <= one.throughput <= MOST_RATE for one in found.speeds):
        yield "it has a throughput that cannot be"
    if found.largest is not None and not found.points:
        yield "it has a largest batch, and none that was looked at"
    if max(abs(found.line.constant), abs(found.line.per_sample)) > MOST_BYTES:
        yield "its line has more bytes than there can be"


def in_trades(found: Trades) -> Iterator[str]:
    """What no run of a fix says."""
    if any(trade.peak is not None and not 0 <= trade.peak <= MOST_BYTES for trade in found.trades):
        yield "it has more bytes than there can be, or fewer than none"
    rates = [trade.throughput for trade in found.trades if trade.throughput is not None]
    ends = [end for trade in found.trades for end in trade.interval or ()]
    if any(not 0 <= rate <= MOST_RATE for rate in rates) or any(abs(end) > MOST_RATE for end in ends):
        yield "it has a throughput that cannot be"
