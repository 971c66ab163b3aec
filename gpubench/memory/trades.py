"""Memory against speed: settings that were run, and which of them nothing else beats in both."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct


class Trade(Struct, frozen=True):
    """One set of settings, as it was measured."""

    fix: dict[str, Any]
    """Overrides of the run's own settings; none for the run as it was."""
    peak: int | None
    """Bytes of the fullest device at its peak; None where it failed."""
    throughput: float | None
    """Samples/s of all ranks; None where it failed, or was not timed."""
    interval: tuple[float, float] | None = None
    """95 %, of the throughput over its repeats."""
    efficient: bool = False
    """No other is known to take no more memory and be faster, or to be as fast with less."""
    reason: str | None = None
    """Why it failed."""


class Trades(Struct, frozen=True):
    """The content of trades.json."""

    trades: list[Trade]
    """In order of memory; those that failed come last."""


def weigh(trades: Sequence[Trade]) -> Trades:
    """Marks the efficient ones (the Pareto frontier) and puts them in order."""
    measured = [trade for trade in trades if trade.peak is not None and trade.throughput is not None]
    marked = [
        msgspec.structs.replace(
            trade, efficient=trade in measured and not any(_beats(other, trade) for other in measured)
        )
        for trade in trades
    ]
    return Trades(sorted(marked, key=lambda trade: (trade.peak is None, trade.peak or 0, -(trade.throughput or 0))))


def _beats(one: Trade, other: Trade) -> bool:
    """Whether `one` takes no more memory and is surely no slower, and is better in one of them."""
    assert one.peak is not None
    assert other.peak is not None
    low, high = _bounds(one)[0], _bounds(other)[1]
    return one.peak <= other.peak and low >= high and (one.peak < other.peak or low > high)


def _bounds(trade: Trade) -> tuple[float, float]:
    assert trade.throughput is not None
    return trade.interval or (trade.throughput, trade.throughput)
