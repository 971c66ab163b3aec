"""Show the result of `compare --null`: how much this workload varies here, and which changes are resolvable."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.compare.result import Noise, NullMetric
from gpubench.compare.verdicts import LEADERS
from gpubench.report import documents
from gpubench.runs import stats
from gpubench.text import Fitting, plain_table, say, words

CHANGES = (0.005, 0.01, 0.02)  # changes for which the needed repeats are given
SINGLE = "one against one"
COLUMNS = ("metric", "spread", "within", "noise floor", "false verdicts", SINGLE, "resolvable")
LAYOUTS = (COLUMNS, tuple(name for name in COLUMNS if name not in ("within", SINGLE)))
NARROW = ("metric", "spread", "noise floor", "resolvable")
NARROWEST = ("metric", "resolvable")


def show(noise: Noise, console: Console) -> None:
    say(console, headline(noise), "bold")
    if not noise.metrics:
        return
    console.print()
    console.print(Fitting(_table(noise, columns) for columns in (*LAYOUTS, NARROW, NARROWEST)))
    for line in (caption(noise), *budget(noise)):
        say(console, line, "dim")


def to_markdown(noise: Noise) -> str:
    rows = [[cells(metric)[column] for column in COLUMNS] for metric in noise.metrics]
    lines = [f"### {documents.escape(headline(noise))}", *documents.table(COLUMNS, rows)]
    lines += [f"- {documents.escape(line)}" for line in (caption(noise), *budget(noise)) if line]
    return "\n".join(lines) + "\n"


def headline(noise: Noise) -> str:
    leading = _leading(noise.metrics)
    if leading is None:
        return "no noise known: no metric was measured often enough"
    runs = units.counted(len(noise.runs), "run")
    whose = runs if leading.level == "run" else f"{units.counted(leading.units, 'repeat')} of {runs}"
    sentence = f"{whose}: {words(leading.metric)} varies by"
    sentence += f" {units.percent(leading.spread)} where nothing was changed"
    if leading.resolvable is None:
        return sentence
    enough = f"{units.counted(leading.per_side, leading.level)} a side"
    return f"{sentence}; {enough} resolve a change of {units.difference(leading.resolvable)}"


def cells(metric: NullMetric) -> dict[str, str]:
    """Return the cells of a metric by column; false verdicts are given with the number of splits."""
    return {
        "metric": words(metric.metric),
        "spread": units.percent(metric.spread),
        "within": _percent(metric.within),
        "noise floor": units.difference(metric.noise_floor),
        "false verdicts": _of(metric.false_verdicts, metric.splits),
        SINGLE: _of(metric.single_false_verdicts, metric.single_splits),
        "resolvable": "-" if metric.resolvable is None else units.difference(metric.resolvable),
    }


def caption(noise: Noise) -> str:
    leading = _leading(noise.metrics)
    unit = leading.level if leading else "repeat"
    splits = f"{leading.per_side} against {leading.per_side} {unit}s" if leading and leading.splits else "no splits"
    return (
        f"spread: standard deviation between {unit}s; within: standard error that the steps of one {unit} leave; noise"
        f" floor: one {unit} against one; false verdicts: random A/A splits ({splits}) called a change at a margin of"
        f" {units.percent(noise.margin)}; {SINGLE}: the same for single {unit}s, by their steps alone;"
        " resolvable: found with 80 % power"
    )


def budget(noise: Noise) -> list[str]:
    """Say how many runs or repeats a side are needed to resolve changes of the leading metric."""
    leading = _leading(noise.metrics)
    if leading is None:
        return []
    prices = []
    for change in CHANGES:
        needed = stats.repeats_for(change, leading.spread, noise.margin) if change > noise.margin else None
        price = f"{units.counted(needed, leading.level)} a side" if needed else "out of reach"
        prices.append(f"{units.percent(change)}: {'within the margin' if change <= noise.margin else price}")
    return [f"to resolve a change of {words(leading.metric)} by {', '.join(prices)}"]


def _table(noise: Noise, columns: Sequence[str]) -> Table:
    table = plain_table()
    for column in columns:
        first = column == "metric"
        table.add_column(column, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for metric in noise.metrics:
        said = cells(metric)
        table.add_row(*(Text(said[column]) for column in columns))
    return table


def _leading(metrics: Sequence[NullMetric]) -> NullMetric | None:
    return next((one for name in LEADERS for one in metrics if one.metric == name), next(iter(metrics), None))


def _percent(value: float | None) -> str:
    return "-" if value is None else units.percent(value)


def _of(share: float | None, splits: int) -> str:
    return "-" if share is None else f"{units.percent(share)} of {splits}"
