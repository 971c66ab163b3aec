"""The list of runs, what it says of each one, and what a removal would remove.

It is imported whenever runs are listed, so that it imports nothing that takes time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gpubench import units
from gpubench.metrics import LEADERS
from gpubench.registry import TUNE
from gpubench.report import quoted
from gpubench.report.document import Block, Cell, Document, Paragraph, Style, table
from gpubench.runs.directory import COMPLETED, FAILED, INTERRUPTED, RUNNING
from gpubench.runs.entries import RUN_ID, Compared, Entry, EntryFigure, common_variables, without
from gpubench.runs.removal import Unit
from gpubench.runs.selection import value_of

STYLES: dict[str, Style] = {RUNNING: "better", COMPLETED: "", INTERRUPTED: "inconclusive"}
COLUMNS = frozenset({"command", "model", "variant", "commit", "status", "name", "tags", "experiment", "host"})
"""The columns of words."""
EXPENDABLE = ("host", "tags", "experiment", "age", "status", "commit", "name", "result")
"""The columns that a narrow terminal does without or shows in brief, the first ones first."""
KEPT = ("command", "model", "variant", "result")
BRIEF_ID = len("20261124-091451")
"""The characters of a run id that a narrow terminal shows: the time, by which a run is found too."""
COMMIT = 8
"""The characters of a commit that are shown."""
MOST_NAMED = 20
"""The number of runs that a removal lists one by one."""


def document(
    results: Path,
    entries: Sequence[Entry],
    shown: Sequence[Entry],
    *,
    hidden: int = 0,
    others: int = 0,
    sort: str = "",
    details: bool = False,
) -> Document:
    """Returns the list of the runs in `shown`, which are the first of the chosen `entries`.

    `hidden` counts the runs that are left out because they are only a part of something, and `others` all runs that are
    not chosen. `sort` is the metric or setting that they are sorted by, which gets a column of its own if it has none.
    """
    several, shared = len({commit(entry) for entry in shown}) > 1, common_variables(entries)
    blocks: list[Block] = [
        table(
            "",
            [row for entry in shown for row in _rows(entry, sort, shared, details=details, commits=several)],
            words=COLUMNS,
            expendable=EXPENDABLE,
            kept=KEPT,
            rest=_rest(len(entries) - len(shown)),
        )
    ]
    notes = []
    if hidden:
        notes.append(f"without {units.counted(hidden, 'run')} of searches by tune and of trials: --all lists them too")
    damaged = [entry for entry in shown if entry.problem]
    notes += [f"{entry.run_id}: {entry.problem}" for entry in damaged[:3]]
    return Document(_headline(results, entries, others), [*blocks, Paragraph(notes, "quiet")])


def to_document(
    results: Path, entries: Iterable[Entry], documents: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns the list as --json prints it. Every run has the same keys, whether it is listed or shown.

    `documents` are the complete results of a run that is shown, by its path; those of a run that is listed are null.
    """
    shown = documents or {}
    runs = [_as_document(entry) | {"documents": shown.get(entry.folder)} for entry in entries]
    return {"schema_version": 2, "results": str(results), "runs": runs}


def of_removal(found: Sequence[Unit], spared: Sequence[Unit] = ()) -> Document:
    """Returns the runs to remove as a table, with the disk space that each takes, and how many are spared."""
    sizes = [unit.bytes() for unit in found]
    runs = sum(len(unit.runs) for unit in found)
    statuses = Counter(entry.record.status for unit in found for entry in unit.runs)
    rows = [
        {
            "run": Cell(unit.label),
            "command": Cell(TUNE if unit.runs[0].part_of == "search" else unit.runs[0].command),
            "model": Cell(unit.runs[0].model),
            "variant": Cell(unit.runs[0].variant if len(unit.runs) == 1 else ""),
            "status": _status(unit.runs[0])
            if len(unit.runs) == 1
            else Cell(_counts(Counter(entry.record.status for entry in unit.runs))),
            "age": Cell(age(unit.started)),
            "name": Cell(", ".join(entry.name for entry in unit.runs if entry.name)),
            "experiment": Cell(unit.runs[0].record.experiment),
            "disk space": Cell(units.size(size)),
        }
        for unit, size in zip(found, sizes, strict=True)
    ]
    headline = f"{units.counted(runs, 'run')} and {units.size(sum(sizes))} to remove: {_counts(statuses)}"
    left = len(rows) - MOST_NAMED
    shown = table("", rows[:MOST_NAMED], words=COLUMNS, expendable=EXPENDABLE, rest=f"{left} more" if left > 0 else "")
    kept = sum(len(unit.runs) for unit in spared)
    note = f"spared: {units.counted(kept, 'run')} that are named, tagged, running or cannot be read" if kept else ""
    return Document(headline if found else "nothing to remove", [shown, Paragraph([note] if note else [], "quiet")])


def main_figure(entry: Entry) -> tuple[str, EntryFigure] | None:
    """Returns the name and the figure of a run's result; None if it has none."""
    return next(((name, entry.metrics[name]) for name in LEADERS if name in entry.metrics), None)


def result(entry: Entry) -> tuple[str, str]:
    """Returns the main figure of a run and its interval; of a search without one, that nothing is proved."""
    if found := main_figure(entry):
        return quoted.of_entry(found[1])
    return "nothing proved" if entry.is_search and entry.record.status == COMPLETED else "", ""


def _briefly(entry: Entry) -> str:
    """Returns the main figure of a run for a narrow terminal."""
    found = main_figure(entry)
    return quoted.briefly(found[1]) if found else result(entry)[0]


def age(started: str, now: datetime | None = None) -> str:
    """Returns how long ago a run began, such as "3 h"; "?" if it is unknown."""
    try:
        seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(started)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _headline(results: Path, entries: Sequence[Entry], others: int) -> str:
    if not entries:
        return f"none of {units.counted(others, 'run')} in {results} fits" if others else f"no runs in {results}"
    counts = Counter(entry.record.status for entry in entries)
    return f"{units.counted(len(entries), 'run')} in {results}: {_counts(counts)}"


def _counts(statuses: "Counter[str]") -> str:
    order = (RUNNING, COMPLETED, FAILED, INTERRUPTED)
    known = sorted(statuses, key=lambda status: order.index(status) if status in order else len(order))
    return ", ".join(f"{statuses[status]:,} {status}" for status in known)


def _rest(left: int) -> str:
    return f"{left:,} more: --limit 0 lists all" if left else ""


def commit(entry: Entry) -> str:
    """Returns the beginning of the commit that a run has measured, with a plus if tracked files differed from it."""
    git = entry.record.git or {}
    return f"{str(git.get('commit') or '')[:COMMIT]}{'+' if git.get('dirty') else ''}"


def _rows(
    entry: Entry, sort: str, shared: frozenset[str], *, details: bool, commits: bool
) -> list[dict[str, str | Cell]]:
    """Returns the row of a run, after that of the comparison whose candidate it is.

    `shared` has the words of its variant that all runs have.
    """
    row = _row(entry, sort, shared, details=details, commits=commits)
    found = entry.compared
    if found is None:
        return [row]
    return [
        {
            "run": "comparison" if found.by == "compare" else "judgement",
            "command": found.by,
            "model": row["model"],
            "variant": comparison_label(found),
            "result": verdict(found),
        },
        row,
    ]


def comparison_label(found: Compared) -> str:
    return f"{found.labels[1]} against {found.labels[0]}"


DECIDED = ("faster", "slower", "equivalent", "more", "less", "keep", "discard")
"""The verdicts and decisions that are shown with the ratio."""


def verdict(found: Compared) -> str:
    """Returns the verdict of a comparison, with the ratio of its main metric if it is established."""
    if found.ratio is None or found.verdict not in DECIDED:
        return found.verdict
    figures = [found.ratio, *(edge for edge in (found.low, found.high) if edge is not None)]
    ratio, *edges = (units.digits(one, 3) for one in figures)
    return f"{found.verdict}, {ratio} x{f' [{edges[0]}, {edges[1]}]' if len(edges) == 2 else ''}"


def _row(entry: Entry, sort: str, shared: frozenset[str], *, details: bool, commits: bool) -> dict[str, str | Cell]:
    record = entry.record
    main = main_figure(entry)
    row: dict[str, str | Cell] = {
        "run": Cell(entry.run_id, brief=entry.run_id[:BRIEF_ID] if RUN_ID.fullmatch(entry.run_id) else None),
        "command": entry.command,
        "model": f"{'inference of ' if entry.settings.get('inference') else ''}{entry.model}",
        "variant": without(entry.variant, shared),
        "result": Cell(quoted.together(*result(entry)), brief=_briefly(entry)),
        "commit": commit(entry) if commits else "",
        "status": _status(entry),
        "age": age(record.started),
        "name": entry.name or "",
        "tags": ", ".join(entry.tags),
    }
    if sort in entry.metrics and not (main and main[0] == sort):
        row[units.words(sort)] = quoted.together(*quoted.of_entry(entry.metrics[sort]))
    elif value_of(entry, sort) is not None:
        row[sort] = str(value_of(entry, sort))
    if details or not is_usual(entry):
        row["experiment"] = record.experiment
    if details:
        row["host"] = record.host
    return row


def is_usual(entry: Entry) -> bool:
    """Returns whether a run is in the experiment that it is in unless the user names one: that of its command."""
    return entry.record.experiment in (entry.command, entry.record.command)


def _status(entry: Entry) -> Cell:
    status = entry.record.status
    return Cell(status, style=STYLES.get(status, "worse"))


def _as_document(entry: Entry) -> dict[str, Any]:
    record = entry.record
    return {
        "run_id": entry.run_id,
        "path": entry.folder,
        "experiment": record.experiment,
        "command": entry.command,
        "status": record.status,
        "started": record.started,
        "ended": record.ended,
        "host": record.host,
        "name": entry.name,
        "tags": entry.tags,
        "part_of": entry.part_of,
        "model": entry.model,
        "variant": entry.variant,
        "interleaved_with": entry.others,
        "comparison": msgspec.to_builtins(entry.compared),
        "device": entry.device,
        "world_size": record.world_size,
        "argv": record.argv,
        "git": record.git,
        "error": record.error,
        "problem": entry.problem,
        "metrics": {name: found._asdict() for name, found in entry.metrics.items()},
        "settings": entry.settings,
        "environment": entry.environment,
    }
