"""The report of the batch sizes that were tried: the largest that fits, and the fastest."""

from collections.abc import Iterator

from gpubench import units
from gpubench.memory.batch_sizes import MOST, BatchSizes
from gpubench.report import memory_figures as figures
from gpubench.report.document import Block, Heading, Medium, Paragraph, Table, table

EXACT = 1e-5


def batch_sizes_sentence(found: BatchSizes) -> str:
    """Names the largest batch that fits, and says whether it is also the fastest."""
    room = f"{units.size(found.limit)} ({units.size(found.capacity)} less {units.percent(found.spare)})"
    if found.largest is None:
        return _none_fits(found, room)
    said = f"the largest batch that fits into {room} is {found.largest}"
    if found.largest == max(point.batch_size for point in found.points) < MOST:
        said += ", as many as the data holds"
    if not found.speeds:
        ran = any(one.batch_size == found.largest for one in found.confirmed)
        return said + (": run, not timed" if ran else ": predicted, not run")
    fastest = max(found.speeds, key=lambda speed: speed.throughput)
    rate = units.rate(fastest.throughput, "samples/s")
    same = "also the fastest" if fastest.batch_size == found.largest else f"the fastest is {fastest.batch_size}"
    return f"{said}; {same}, {rate}"


def _none_fits(found: BatchSizes, room: str) -> str:
    """Says that no batch fits, with the smallest batch that was run or, if none was, the prediction."""
    if not found.confirmed:
        least = f"it takes {units.size(found.points[0].total)}" if found.points else "it takes more"
        return f"not even a batch of 1 fits into {room}: {least}, by prediction"
    ran = min(found.confirmed, key=lambda one: one.batch_size)
    took = (
        f"took {units.size(ran.total)}" if ran.total is not None else f"failed: {ran.reason or 'nothing was followed'}"
    )
    if ran.batch_size > 1:  # the search was interrupted
        return f"no batch that was run fits into {room}: the smallest, {ran.batch_size}, {took}"
    return f"not even a batch of 1 fits into {room}: it was run and {took}"


def line_sentence(found: BatchSizes) -> str:
    line = found.line
    said = f"peak = {units.size(max(line.constant, 0.0))} + {units.size(max(line.per_sample, 0.0))} a sample"
    return f"{said}, within {units.percent(line.error)}" if line.error > EXACT else f"{said}, exactly"


def batch_size_table(found: BatchSizes) -> Table:
    """A row for each batch size that was predicted, run or timed."""
    predicted = {point.batch_size: point.total for point in found.points}
    confirmed = {one.batch_size: one for one in found.confirmed}
    speeds = {one.batch_size: one.throughput for one in found.speeds}
    rows = []
    for size in sorted({*predicted, *confirmed, *speeds}):
        ran = confirmed.get(size)
        rows.append(
            {
                "batch": str(size),
                "predicted": units.size(predicted[size]) if size in predicted else "",
                "measured": units.size(ran.total) if ran and ran.total else "",
                "throughput": units.rate(speeds[size], "samples/s") if size in speeds else "",
                "kind": ", ".join(_remarks(found, size)),
            }
        )
    return table("Every batch size that was tried", rows, ("kind",))


def _remarks(found: BatchSizes, size: int) -> Iterator[str]:
    fastest = max(found.speeds, key=lambda speed: speed.throughput).batch_size if found.speeds else None
    if size == found.largest:
        yield "largest that fits"
    if size == fastest:
        yield "fastest"
    ran = next((one for one in found.confirmed if one.batch_size == size), None)
    if ran and ran.reason:
        yield ran.reason
    elif not ran and any(one.batch_size == size and one.total > found.limit for one in found.points):
        yield "does not fit"


def batch_sizes(found: BatchSizes, *, headed: bool = False) -> list[Block]:
    """The batch sizes that were tried. `headed`: the first sentence is the report's headline already."""
    made: list[Block] = [Heading("Batch sizes", anchor="batch-sizes")]
    made.append(Paragraph("" if headed else batch_sizes_sentence(found), "strong"))
    made.append(Paragraph(line_sentence(found) if found.points else "", "quiet"))
    made += figures.batch_sizes(found)
    shown = batch_size_table(found)
    return [*made, shown if shown else Paragraph("no batch size was tried", "missing", on=Medium.PAGE)]
