"""The report of the settings that trade memory for speed."""

from dataclasses import replace
from typing import Any

from gpubench import units
from gpubench.memory.batch_sizes import Trade, Trades
from gpubench.report import memory_figures as figures
from gpubench.report.document import UNASKED, Block, Heading, Medium, Paragraph, Table, table


def trade_table(found: Trades) -> Table:
    """Memory and throughput of each setting, least memory first."""
    base = next((trade for trade in found.trades if not trade.fix), None)
    rows = [_trade(number, trade, base) for number, trade in enumerate(found.trades, 1)]
    return table(
        "Every setting that was run", rows, ("kind",), sentences=("kind",), expendable=("less memory", "speed")
    )


def _trade(number: int, trade: Trade, base: Trade | None) -> dict[str, str]:
    kind = "Pareto-optimal" if trade.efficient else trade.reason or ""
    return {
        "option": f"{number}. {_settings(trade.fix)}",
        "peak": units.size(trade.peak) if trade.peak is not None else "",
        "throughput": units.rate(trade.throughput, "samples/s") if trade.throughput is not None else "",
        "less memory": _change(trade.peak, base.peak if base else None),
        "speed": _change(trade.throughput, base.throughput if base else None),
        "kind": kind,
    }


def _settings(fix: dict[str, Any]) -> str:
    """The settings without the names of their sections, to save width."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in fix.items()).lower() or "as it was"


def _change(now: float | None, before: float | None) -> str:
    if now is None or not before or now == before:
        return ""
    return units.signed_percent(now / before - 1)


def trades(found: Trades) -> list[Block]:
    heading = Heading("Memory against speed", anchor="memory-against-speed")
    if found.trades and not any(trade.fix for trade in found.trades):
        return [heading, Paragraph("nothing to try: no finding has a setting that a run could be made with")]
    shown = trade_table(found)
    missing = Paragraph("no settings were run", "missing", on=Medium.PAGE)
    return [heading, *figures.trades(found), replace(shown, on=UNASKED) if shown else missing]
