"""Sentences and tables about what a memory run tried: batch sizes, and settings that trade memory for speed."""

from collections.abc import Iterator
from typing import Any

from gpubench import units
from gpubench.memory.batch_sizes import MOST, BatchSizes, Trade, Trades
from gpubench.report.sheets import Sheet, sheet
from gpubench.text import clean

EXACT = 1e-5


def batch_sizes_sentence(found: BatchSizes) -> str:
    """Name the largest batch that fits, and say whether it is also the fastest."""
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
    """Say that no batch fits, from the smallest batch that was run, or else from the prediction."""
    if not found.confirmed:
        least = f"it takes {units.size(found.points[0].total)}" if found.points else "it takes more"
        return f"not even a batch of 1 fits into {room}: {least}, by prediction"
    ran = min(found.confirmed, key=lambda one: one.batch_size)
    took = (
        f"took {units.size(ran.total)}"
        if ran.total is not None
        else f"failed: {clean(ran.reason or 'nothing was followed')}"
    )
    if ran.batch_size > 1:  # the search was interrupted
        return f"no batch that was run fits into {room}: the smallest, {ran.batch_size}, {took}"
    return f"not even a batch of 1 fits into {room}: it was run and {took}"


def line_sentence(found: BatchSizes) -> str:
    line = found.line
    said = f"peak = {units.size(max(line.constant, 0.0))} + {units.size(max(line.per_sample, 0.0))} a sample"
    return f"{said}, within {units.percent(line.error)}" if line.error > EXACT else f"{said}, exactly"


def batch_sizes(found: BatchSizes) -> Sheet:
    """Return a row for each batch size that was predicted, run or timed."""
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
                "kind": ", ".join(_said(found, size)),
            }
        )
    return sheet("Batch sizes", rows)


def _said(found: BatchSizes, size: int) -> Iterator[str]:
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


def trades(found: Trades) -> Sheet:
    """Return memory and throughput of each setting, least memory first."""
    base = next((trade for trade in found.trades if not trade.fix), None)
    return sheet("Memory against speed", [_trade(trade, base) for trade in found.trades])


def _trade(trade: Trade, base: Trade | None) -> dict[str, str]:
    kind = "nothing is known to beat it" if trade.efficient else trade.reason or ""
    return {
        "option": _settings(trade.fix),
        "peak": units.size(trade.peak) if trade.peak is not None else "",
        "throughput": units.rate(trade.throughput, "samples/s") if trade.throughput is not None else "",
        "less memory": _change(trade.peak, base.peak if base else None),
        "speed": _change(trade.throughput, base.throughput if base else None),
        "kind": kind,
    }


def _settings(fix: dict[str, Any]) -> str:
    """Return settings without the names of their sections, to save width."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in fix.items()).lower() or "as it was"


def _change(now: float | None, before: float | None) -> str:
    if now is None or not before or now == before:
        return ""
    return units.signed_percent(now / before - 1)
