"""The report of `gpubench history`: since when a workload is faster or slower, and what changed there."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from gpubench import units
from gpubench.compare.changepoints import FEWEST
from gpubench.compare.history import Histories, LevelChange, Series, SeriesPoint
from gpubench.compare.result import Difference, GateResult
from gpubench.report import charts, phrases, quoted
from gpubench.report.document import (
    TEXT,
    UNASKED,
    Block,
    Cell,
    Command,
    Document,
    Figure,
    Folded,
    Heading,
    Medium,
    Paragraph,
    Table,
    table,
)
from gpubench.runs.directory import REPORT
from gpubench.runs.entries import EntryFigure
from gpubench.text import shorten, words

LINES = "▁▂▃▄▅▆▇█"
SPARKS = 24
"""Characters of a series in a terminal: each is the mean of as many runs."""
BRIEF_SERIES, BRIEF_CHANGES, BRIEF_DIFFERENCES, BRIEF_GATES = 4, 2, 3, 3
ROWS = 200  # runs that a page lists of one series
HEIGHT = 220.0  # pixels of a plot
WIDEST = 1.0  # times the range of the estimates that an interval takes beyond them at most
SHOWN = 12  # characters of a commit


def document(found: Histories, page: Path | None = None) -> Document:
    """Returns the report. `page` is where its page will be, which its links to runs start from."""
    series = sorted(found.series, key=_newest_change, reverse=True)
    shared = {name for name, count in Counter(map(_name, series)).items() if count > 1}
    blocks: list[Block] = list(_gates(found.gate))
    changed = [(one, change) for one in series for change in one.changes]
    newest_first = sorted(changed, key=lambda each: (each[1].cause == "code", each[1].started), reverse=True)
    if len(series) > 1:
        blocks += _overview(series, shared)
    elif series:
        blocks.append(Paragraph(_line(series[0]), on=TEXT))
    named = len(series) > 1
    for number, (one, change) in enumerate(newest_first):
        on = Medium.TERMINAL if number < BRIEF_CHANGES else Medium.DETAILS
        whose = _title(one, shared, 50) if named and number > 0 else ""
        blocks += _change(one, change, on | Medium.MARKDOWN, whose)
    if (more := len(newest_first) - BRIEF_CHANGES) > 0:
        blocks.append(Paragraph(f"and {units.counted(more, 'older change')}: -v", "quiet", on=Medium.BRIEF))
    if wandering := [one for one in series if one.wanders]:
        blocks.append(Paragraph(_wandering(wandering), "quiet"))
    blocks += [Paragraph(line, "quiet", on=UNASKED) for line in _limits(series, shared)]
    for number, one in enumerate(series, 1):
        blocks.append(Heading(_title(one, shared), anchor=f"series-{number}"))
        blocks += _on_page(one, page.parent if page else Path())
    return Document(
        _headline(series, newest_first),
        blocks,
        title="History",
        context="gpubench history",
        links=[("All runs", "index.html")] if page and (page.parent / "index.html").is_file() else [],
    )


def _newest_change(one: Series) -> str:
    """Returns when the series last changed, so that the ones without a change come last."""
    return max((change.started for change in one.changes if change.cause == "code"), default="")


def _headline(series: Sequence[Series], newest_first: Sequence[tuple[Series, LevelChange]]) -> str:
    if not series:
        return "no completed run with results yet: a history begins with the first one"
    of_code = [(one, change) for one, change in newest_first if change.cause == "code"]
    for one, change in of_code:
        day, runs = change.started[:10], len(one.points) - change.index
        size = _size(change)
        since = f"since {day}, {units.counted(runs, 'run')} ago"
        higher = "as high" if _is_large(change) else "higher" if change.ratio > 1 else "lower"
        return f"{words(one.metric)} of {shorten(one.workload, 60)} is {size} {higher} {since}"
    long = [one for one in series if one.noise is not None]
    if not long:
        most = max(series, key=lambda one: len(one.points))
        most_runs = f"{'at most ' if len(series) > 1 else ''}{units.counted(len(most.points), 'run')}"
        work = most.workload if len(series) == 1 else "a workload"
        return f"{most_runs} of {work}: a change shows from {2 * FEWEST} runs on"
    count = sum(len(one.points) for one in long)
    of = f" of {units.counted(len(long), 'workload')}" if len(long) > 1 else ""
    machine = " of the code" if newest_first else ""
    whose = f"{words(long[0].metric)} of {shorten(_name(long[0]), 60)}: " if len(long) == 1 else ""
    seen = [one.visible for one in long if one.visible is not None]
    beyond = f" beyond {_rounded(max(seen))}" if len(seen) == len(long) else ""
    start = min(one.points[0].started for one in long)[:10]
    short = len(series) - len(long)
    others = f"; {short} more {'has' if short == 1 else 'have'} too few runs" if short else ""
    found = f"{whose}no change{machine}{beyond} in {units.counted(count, 'run')}{of} since {start}{others}"
    return found if beyond else f"{found}; runs differ too much to show a change by less than a factor of two"


def _rounded(fraction: float) -> str:
    """Returns a fraction in percent, in which a whole number stays whole: "10 %"."""
    return units.percent(fraction).replace(".0 %", " %")


def _size(change: LevelChange) -> str:
    """Returns the size of a change, as "3.1 % [2.6, 3.7]", or from a factor of 2 on "2.44 x [2.31, 2.57]"."""
    if _is_large(change):
        return _factor(change)
    ends = sorted(abs(end - 1) * 100 for end in change.interval)
    return f"{abs(change.ratio - 1) * 100:.1f} % [{ends[0]:.1f}, {ends[1]:.1f}]"


def _is_large(change: LevelChange) -> bool:
    return phrases.large(change.ratio, change.interval)


def _factor(change: LevelChange) -> str:
    ratio, ends = units.factors(change.ratio, change.interval)
    return f"{ratio} x [{', '.join(ends)}]"


def _signed(change: LevelChange) -> str:
    if _is_large(change):
        return f"{units.digits(change.ratio)} x"
    return units.signed_percent(change.ratio - 1, 1)


def _gates(results: Sequence[GateResult]) -> Iterator[Block]:
    """Yields the results of the gate, the failures first, and in a terminal without -v only a few."""
    if results:
        order = ("regressed", "inconclusive", "passed")
        lines = [_gate(one) for one in sorted(results, key=lambda one: order.index(one.outcome))]
        more = len(lines) - BRIEF_GATES
        rest = [f"and {units.counted(more, 'condition')} more: -v"] if more > 0 else []
        yield Paragraph([*lines[:BRIEF_GATES], *rest], on=Medium.BRIEF)
        yield Paragraph(lines, on=UNASKED)


def _gate(result: GateResult) -> str:
    verdict = {"regressed": "regressed", "passed": "passed", "inconclusive": "undecided"}[result.outcome]
    return f"--fail-on {result.condition}: {verdict}, {phrases.worsening(result)} ({shorten(result.candidate, 50)})"


def _overview(series: Sequence[Series], shared: Collection[str]) -> Iterator[Block]:
    """Yields the series as a table, a few of them in a terminal without -v."""
    rows: list[Mapping[str, str | Cell]] = [
        {
            "workload": _title(one, shared, 60),
            "runs": f"{len(one.points):,}",
            "now": _quoted(one, one.points[-1])[0],
            "over time": sparkline([point.estimate for point in one.points], SPARKS // 2),
            "last change": _last(one),
        }
        for one in series
    ]
    named, expendable = ("workload", "over time", "last change"), ("runs", "over time")
    more = len(rows) - BRIEF_SERIES
    rest = f"{units.counted(more, 'workload')} more: -v, or choose some with --model and --where" if more > 0 else ""
    yield table("", rows[:BRIEF_SERIES], named, expendable=expendable, on=Medium.BRIEF)
    if rest:
        yield Paragraph(rest, "quiet", on=Medium.BRIEF)
    yield table("", rows, named, expendable=expendable, on=UNASKED)


def _last(one: Series) -> str:
    if not one.changes:
        return "none" if len(one.points) >= 2 * FEWEST else "too few runs"
    change = one.changes[-1]
    return f"{_signed(change)} on {change.started[:10]}{' (machine)' if change.cause == 'machine' else ''}"


def _name(one: Series) -> str:
    return f"{one.workload} ({', '.join(one.varied)})" if one.varied else one.workload


def _title(one: Series, shared: Collection[str], most: int = 1000) -> str:
    """Returns the name of a series in about `most` characters, with its metric if the name is a `shared` one."""
    name = shorten(_name(one), most)
    return f"{name}: {words(one.metric)}" if _name(one) in shared else name


def _line(one: Series) -> str:
    now = quoted.together(*_quoted(one, one.points[-1]))
    curve = sparkline([point.estimate for point in one.points])
    first, last = one.points[0].started[:10], one.points[-1].started[:10]
    when = first if first == last else f"{first} to {last}"
    return f"{curve}  {units.counted(len(one.points), 'run')}, {when}; {words(one.metric)} is now {now}"


def _quoted(one: Series, point: SeriesPoint) -> tuple[str, str]:
    """Returns the figure of a run and its interval, as a listing of runs quotes them."""
    low, high = point.interval or (None, None)
    return quoted.of_entry(EntryFigure(point.estimate, low, high, one.unit, one.better))


def _change(one: Series, change: LevelChange, on: Medium, whose: str) -> Iterator[Block]:
    """Yields what is known of a change. `whose` is the title of its series; "" where that is clear."""
    yield Paragraph(
        f"{_when(one, change)}{f' ({whose})' if whose else ''}",
        "strong" if change.outcome == "worse" else "plain",
        on=on,
    )
    if change.sameness and (refusals := change.sameness.refusals):
        names = {"baseline": "the run before", "candidate": "the run after"}
        yield Paragraph(
            [f"{names[each.side]} {each.reason}" for each in refusals], "warning", "  not the same: ", on=on
        )
    brief = on & Medium.BRIEF
    if brief:
        yield Paragraph(_because(change, BRIEF_DIFFERENCES), on=brief)
    yield Paragraph(_because(change, len(change.differences)), on=on & ~Medium.BRIEF)
    yield Command("  both sides", change.command, on=on)


def _when(one: Series, change: LevelChange) -> str:
    """Returns how much changed between which runs, and how sure that is."""
    sides = (one.points[change.index - 1], one.points[change.index])
    first, last = (f"{point.started[:16].replace('T', ' ')}{_commit(point.commit)}" for point in sides)
    sure = f"{units.whole_percent(min(change.probability, 0.99))} sure"
    slack = max(change.latest - change.index, change.index - change.earliest)
    where = f", place +- {units.counted(slack, 'run')}" if slack else ""
    whose = ", but by the machine: the reference workload changed too" if change.cause == "machine" else ""
    return f"{_signed(change)} between {first} and {last}, {sure}{where}{whose}"


def _commit(commit: str | None) -> str:
    return f" ({commit[:7]})" if commit else ""


def _because(change: LevelChange, most: int) -> str:
    if not change.differences:
        return "  no setting, commit or version on record changed there"
    named = [_difference(one) for one in change.differences[:most]]
    rest = len(change.differences) - len(named)
    return f"  changed there: {'; '.join(named)}{f'; and {rest} more' if rest else ''}"


def _difference(one: Difference) -> str:
    return f"{one.key.removeprefix('packages.')} {_fact(one, one.baseline)} -> {_fact(one, one.candidate)}"


def _fact(one: Difference, value: object) -> str:
    text = "unset" if value is None else str(value)
    return text[:SHOWN] if one.key.endswith("commit") else shorten(text, 40)


def _wandering(series: Sequence[Series]) -> str:
    """Returns a sentence about series whose level wanders, in which only larger changes can be told."""
    most = max(series, key=lambda one: one.correlation or 0.0)
    whose = "" if len(series) == 1 else f" in {units.counted(len(series), 'workload')}"
    visible = f" below {_rounded(most.visible)}" if most.visible is not None else ""
    return (
        f"the level wanders{whose}: runs are like those before them (correlation {most.correlation or 0:.1f}), as in "
        f"cycles or on a machine that others use; changes{visible} are not told from that"
    )


def _limits(series: Sequence[Series], shared: Collection[str]) -> Iterator[str]:
    """States which change could be seen in each series."""
    for one in series:
        if one.noise is not None:
            seen = "no change" if one.visible is None else f"a change of {_rounded(one.visible)}"
            yield (
                f"{_title(one, shared, 60)}: runs of one level differ by {units.difference(one.noise)}; {seen} "
                f"would be visible after {FEWEST} runs"
            )


def sparkline(values: Sequence[float], most: int = SPARKS) -> str:
    """Returns values as a line of block characters, of at most `most`. A constant series is a line at half height."""
    parts = np.array([part.mean() for part in np.array_split(np.array(values), min(most, len(values)))])
    low, high = float(parts.min()), float(parts.max())
    if high - low <= 1e-9 * abs(high):
        return LINES[3] * len(parts)
    return "".join(LINES[round((value - low) / (high - low) * (len(LINES) - 1))] for value in parts.tolist())


def _on_page(one: Series, folder: Path) -> Iterator[Block]:
    yield Paragraph(_line(one).partition("  ")[2], on=Medium.PAGE)
    if len(one.points) > 1:
        title = f"{words(one.metric)} of {units.counted(len(one.points), 'run')}"
        yield Figure(title, _plot(one, folder), note=_caption(one))
    if one.changes:
        yield _changes(one)
    elif one.noise is not None:
        yield Paragraph("no change was found", on=Medium.PAGE)
    yield _runs(one, folder) if len(one.points) == 1 else Folded("the runs", [_runs(one, folder)], on=Medium.PAGE)


def _caption(one: Series) -> str:
    dotted = " A dotted change is one of the machine." if any(each.cause == "machine" for each in one.changes) else ""
    return (
        "Each dot is a run with its 95 % interval, and leads to its report; an interval that reaches the edge goes on. "
        "Lines are the levels between changes."
        f"{dotted}"
    )


def _changes(one: Series) -> Table:
    rows: list[Mapping[str, str | Cell]] = [
        {
            "change": Cell(_size_signed(change), note="the machine's" if change.cause == "machine" else ""),
            "sure": units.whole_percent(min(change.probability, 0.99)),
            "date": change.started[:10],
            "changed there": Cell("; ".join(map(_difference, change.differences)) or "nothing on record"),
            "compare": Cell(change.command, code=True),
        }
        for change in reversed(one.changes)
    ]
    return table("changes", rows, ("changed there", "compare"), on=Medium.PAGE)


def _size_signed(change: LevelChange) -> str:
    if _is_large(change):
        return _factor(change)
    low, high = ((end - 1) * 100 for end in change.interval)
    return f"{_signed(change)} [{low:+.1f}, {high:+.1f}]"


def _runs(one: Series, folder: Path) -> Table:
    newest = list(reversed(one.points))[:ROWS]
    rows: list[Mapping[str, str | Cell]] = [
        {
            "run": Cell(point.name or point.run_id, link=_report(point.path, folder)),
            "started": phrases.moment(point.started),
            words(one.metric): _quoted(one, point)[0],
            "interval": _quoted(one, point)[1],
            "commit": f"{(point.commit or '')[:SHOWN]}{'+' if point.dirty else ''}",
        }
        for point in newest
    ]
    more = len(one.points) - len(newest)
    return table("", rows, ("started", "commit"), on=Medium.PAGE, rest=f"{more} older ones" if more else "")


def _report(path: str, folder: Path) -> str:
    """Returns the address of a run's report, relative to the page; empty if it has none."""
    report = Path(path) / REPORT
    if not report.is_file():
        return ""
    from urllib.parse import quote  # imported here, because only pages have links

    return quote(os.path.relpath(report, folder))


def _plot(one: Series, folder: Path) -> Markup:
    """Draws the runs in order, their intervals, the levels between changes, and the changes."""
    estimates = np.array([point.estimate for point in one.points])
    n = len(estimates)
    ends = np.array([point.interval or (point.estimate,) * 2 for point in one.points])
    low, high = _range(estimates, ends)
    y = charts.Scale(low, high, HEIGHT, 0)
    x = charts.Scale(-0.5, n - 0.5, 0, 100)
    up = charts.Axis(y, one.unit, count=5)
    parts = charts.framed(None, up, [])
    parts += list(_dates(one, x))
    cuts = [0, *(change.index for change in one.changes), n]
    for start, end in pairwise(cuts):
        level = charts.HEAD + y(float(np.median(estimates[start:end])))
        parts.append(charts.line(x(start - 0.5), level, x(end - 0.5), level, "whisker"))
    for place, (point, (lower, upper)) in enumerate(zip(one.points, ends.tolist(), strict=True)):
        parts.append(
            charts.line(
                x(place), charts.HEAD + y(lower), x(place), charts.HEAD + y(upper), "unchanged" if n <= 150 else "grid"
            )
        )
        hint = f"{point.run_id}: {units.quantity(point.estimate, one.unit)}{_commit(point.commit)}"
        dot = charts.dot(x(place), charts.HEAD + y(point.estimate), 4 if n <= 80 else 2.5, "mean a", hint)
        report = _report(point.path, folder)
        parts.append(Markup('<a href="{}">{}</a>').format(report, dot) if report else dot)
    for change in one.changes:
        at = x(change.index - 0.5)
        style = "whisker withheld" if change.cause == "machine" else "median b"
        parts.append(charts.line(at, charts.HEAD, at, charts.HEAD + HEIGHT, style))
        parts.append(charts.text(at, charts.HEAD - 6, _signed(change), "label middle"))
    described = f"{n} runs of {one.workload}, with {units.counted(len(one.changes), 'change')}"
    return charts.drawing(words(one.metric), described, charts.HEAD + HEIGHT + charts.FOOT, parts)


def _range(estimates: NDArray[np.float64], ends: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the range of the axis: all estimates, and as much of the intervals as does not flatten them."""
    low, high = charts.widen(float(estimates.min()), float(estimates.max()), 0.15)
    room = WIDEST * (high - low)
    return (
        max(min(low, max(float(ends[:, 0].min()), low - room)), 0.0),
        max(high, min(float(ends[:, 1].max()), high + room)),
    )


def _dates(one: Series, x: charts.Scale) -> Iterator[Markup]:
    """Yields the dates under the axis, at most one for each fifth of the plot; with the time of day if they repeat."""
    n = len(one.points)
    bottom = charts.HEAD + HEIGHT
    places = list(dict.fromkeys(round(share * (n - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)) if n > 4 else range(n))
    started = [one.points[place].started for place in places]
    labels = [moment[:10] for moment in started]
    if any(label == other for label, other in pairwise(labels)):
        labels = [moment[5:16].replace("T", " ") for moment in started]
    for number, (place, label) in enumerate(zip(places, labels, strict=True)):
        if number and label == labels[number - 1]:
            continue  # of the same minute
        style = "tick middle on-desk" if number % 2 and len(labels) > 3 else "tick middle"
        yield charts.text(x(place), bottom + 16, label, style)
    yield charts.text(50, bottom + 34, "runs in order", "name middle")
