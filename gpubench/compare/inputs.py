"""Finds the sides of a comparison from the names on the command line: runs, groups, `latest`, logs of other tools."""

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, AnyStr

import msgspec
import numpy as np

from gpubench import foreign_files, units
from gpubench.compare.evidence import RunEvidence, Series, Side, open_run
from gpubench.compare.verdicts import WELL_KNOWN
from gpubench.errors import (
    DataError,
    GpubenchError,
    NothingMeasured,
    RunDirectoryError,
    StillRunning,
    UsageError,
    did_you_mean,
)
from gpubench.foreign_files import LONGEST, SEARCH, too_long
from gpubench.metrics import RATES, Better, Metric
from gpubench.registry import kind_of
from gpubench.runs import references, stats
from gpubench.runs.directory import COMPLETED, RUN
from gpubench.runs.reader import DAMAGED
from gpubench.runs.references import LOGS, SKIPPED, children, closest, counts_back, exists, is_folder, listed
from gpubench.runs.steps import SteadyWindow, StepTable
from gpubench.runs.summary import NO_MEASUREMENTS
from gpubench.units import counted

DELIMITERS = (",", ";", "\t")
SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
MOST_COLUMNS_LISTED = 20  # number of columns that an error lists
A_SECOND = ("s", "sec", "second")
GREATEST = 1e100  # largest value: sums of squares must be finite
LEAST = 1 / GREATEST  # smallest time or rate: inverses must be finite too
READS = "--column reads .csv, .tsv and .jsonl"
A_LINE = "each line is one JSON object, such as a .jsonl file holds"
PLAIN = "write numbers with a decimal point, without separators of thousands"
EMPTY = "leave the cell empty where nothing was measured, and the row is skipped"


@dataclass(frozen=True)
class LogColumn:
    """The column to read from a log. Values times `scale` are in `unit`, which is a base unit if it is known."""

    name: str
    unit: str
    scale: float
    better: Better

    @classmethod
    def of(cls, name: str, unit: str, better: Better | None = None) -> "LogColumn":
        """Returns the column with its base unit. Raises UsageError if the better direction is unknown."""
        amount, _, per = unit.partition("/")
        if (
            amount in SECONDS and unit != f"{amount}/" and per not in A_SECOND
        ):  # "ms", or "s/it" as progress bars have it
            return cls(name, "s", SECONDS[amount], better or "lower")
        if unit in BYTES:
            return cls(name, "B", BYTES[unit], better or "lower")
        work, _, time = unit.rpartition("/")
        if work and time in A_SECOND:
            unit = f"{work}/s"
        better = better or ("higher" if unit.endswith("/s") else None)
        if better is None:
            raise UsageError(
                f"it is unknown whether lower or higher values in {unit!r} are better",
                "add --better lower or --better higher",
            )
        return cls(name, unit, 1.0, better)

    @property
    def is_rate(self) -> bool:
        """Whether the column holds work over time, with one step per row."""
        return self.unit.endswith("/s") or (self.name in RATES and self.unit not in ("s", "B"))


@dataclass(frozen=True, kw_only=True)
class LogEvidence(RunEvidence):
    """A log of another tool: one metric and one repeat, without record, settings or phases."""

    column: LogColumn
    values: Series
    """The values of the column in the metric's unit; for a rate, the inverse."""

    def series(self, metric: str) -> list[Series] | None:
        return [self.values[window.first :] for window in self.windows] if metric in self.metrics else None

    def is_rate(self, metric: str) -> bool:
        return self.column.is_rate

    @cached_property
    def steps(self) -> StepTable:
        """The rows as steps of rank 0 if the column holds times; otherwise empty."""
        return StepTable.of_totals(self.values if self.column.unit == "s" else self.values[:0])


def open_log(path: Path, column: LogColumn) -> LogEvidence:
    """Reads a log as one repeat of the metric `column`, without the warm-up that `stats.warmup_length` finds.

    A row is a step, and all steps do the same work, so the mean of a rate is harmonic. A row with an empty cell is
    skipped, and reported as a problem. Raises DataError, with file and line, for any other cell that is not a finite
    number (above 0 for a time or a rate, not negative for a size), for a missing column, and for fewer than two values.
    """
    read = _json_lines if path.suffix.lower() in (".jsonl", ".json") else _delimited
    cells = _Cells(path, column)
    try:
        values = np.fromiter(read(path, column.name, cells), np.float64) * column.scale
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", READS) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}", READS) from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}", READS) from None
    if len(values) < 2:
        raise DataError(f"{path}: values of {column.name}: {len(values)}", "at least two are needed: a row is a step")
    passed_over = (
        f"{units.counted(cells.empty, 'row')} without {column.name} {'was' if cells.empty == 1 else 'were'} skipped"
    )
    problems = [passed_over] if cells.empty else []
    values = 1 / values if column.is_rate else values
    first = stats.warmup_length(values)
    steady = values[first:]
    window = SteadyWindow(
        repeat=0, first=first, steps=len(steady), settled=first < max(1, len(values) // 2), start=0.0, end=0.0
    )
    spread = stats.describe([steady])
    estimate = 1 / spread.mean if column.is_rate else spread.mean
    metric = Metric(
        name=column.name,
        unit=column.unit,
        better=column.better,
        estimate=estimate,
        interval=None,
        n=len(steady),
        effective_n=spread.effective_n,
        repeats=[estimate],
        distribution=None if column.is_rate else spread,
    )
    return LogEvidence(
        label=path.name,
        path=path,
        record=None,
        status=COMPLETED,
        settings={},
        environment={},
        workload={},
        summary=msgspec.structs.replace(NO_MEASUREMENTS, metrics=[metric], steady=[window]),
        problems=problems,
        column=column,
        values=values,
    )


class _Cells:
    """Converts the cells of one column to numbers, and counts the empty ones."""

    def __init__(self, path: Path, column: LogColumn) -> None:
        self._path = path
        self._column = column
        self._per_step = "rate" if column.is_rate else "time" if column.unit == "s" else None
        self._least = 0.0 if column.unit == "B" else -GREATEST
        self.empty = 0

    def number(self, cell: Any, line: int) -> float:
        """Returns the cell as a number. Raises DataError with the line."""
        try:
            value = math.nan if isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError, OverflowError):
            hint = PLAIN if "," in str(cell) and any(map(str.isdigit, str(cell))) else EMPTY
            raise self._refusal(f"{cell!r} is not a number", line, hint) from None
        if self._per_step and value * self._column.scale < LEAST and value > -math.inf:
            raise self._refusal(f"{cell!r} cannot be the {self._per_step} of a step", line, EMPTY)
        if not self._least <= value <= GREATEST:
            raise self._refusal(f"{cell!r} is not a possible value", line, EMPTY)
        return value

    def _refusal(self, reason: str, line: int, hint: str) -> DataError:
        return DataError(f"{self._path}:{line}: {self._column.name}: {reason}", hint)

    def column_of(self, names: Sequence[str]) -> int:
        """Returns the index of the column in the file. Raises DataError if it is missing or ambiguous."""
        name = self._column.name
        if names.count(name) == 1:
            return names.index(name)
        if name in names:
            raise DataError(f"{self._path} has {names.count(name)} columns {name!r}", "rename all but one")
        known = ", ".join(names[:MOST_COLUMNS_LISTED]) + (", ..." if len(names) > MOST_COLUMNS_LISTED else "")
        hint = (
            f"{did_you_mean(name, names)} its columns are {known}".lstrip() if known else "the file has no column names"
        )
        raise DataError(f"{self._path} has no column {name!r}", hint)


def _delimited(path: Path, column: str, cells: _Cells) -> Iterator[float]:
    with foreign_files.given(path) as content, TextIOWrapper(content, "utf-8-sig", newline="") as file:
        lines = _bounded(file, path)
        above, header = next(((n, line) for n, line in enumerate(lines, 1) if line.strip()), (1, ""))
        delimiter = _delimiter(header, column)
        names = _split(header, delimiter)
        place, width = cells.column_of(names), len(names)
        rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
        for row in rows:
            if len(row) > width and any(row[width:]):
                reason = f"{len(row)} cells under {width} columns"
                raise DataError(f"{path}:{above + rows.line_num}: {reason}", PLAIN)
            cell = row[place] if place < len(row) else ""
            if cell and not cell.isspace():
                yield cells.number(cell, above + rows.line_num)
            elif row:  # otherwise a blank line
                cells.empty += 1


def _bounded(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yields the lines of a file, which may be a pipe. Raises OSError for a line that is too long for a row."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise too_long(path)
        yield line


def _delimiter(header: str, column: str) -> str:
    found = next((one for one in DELIMITERS if column in _split(header, one)), None)
    return found or max(DELIMITERS, key=lambda one: len(_split(header, one)))


def _split(line: str, delimiter: str) -> list[str]:
    return [cell.strip() for row in csv.reader([line], delimiter=delimiter, skipinitialspace=True) for cell in row]


def _json_lines(path: Path, column: str, cells: _Cells) -> Iterator[float]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    names: dict[str, None] = {}
    found = False
    with foreign_files.given(path) as file:
        for number, line in enumerate(_bounded(file, path), 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: {error}", A_LINE) from None
            cell = row.get(column)
            if cell is None:
                cells.empty += 1
                names |= dict.fromkeys(row) if not found else {}
            else:
                found = True
                yield cells.number(cell, number)
    if not found:
        cells.column_of(list(names))


SKIP = "--skip-invalid leaves it out"


def find(
    names: Sequence[str], results: Path, *, column: LogColumn | None = None, skip_invalid: bool = False
) -> tuple[list[Side], list[str]]:
    """Returns the sides that `names` stand for, in order, and a line on each reason for which runs were left out.

    A name is one of those of `references.Lookup` or, with `column`, a log of another tool or a folder of logs.

    Groups and `latest` skip runs without measurements. `latest` counts the runs of one command: that of the other
    sides, or else of the newest run. `skip_invalid` leaves out the runs of a group that cannot be read.

    Raises RunDirectoryError for a name that is missing, ambiguous, damaged or unreadable, and for a run that occurs
    twice.
    """
    left_out: list[str] = []
    known = references.Lookup(results, measured=True)
    found: dict[int, Side] = {}
    for number in sorted(range(len(names)), key=lambda number: references.counts_back(names[number])):
        found[number] = side = _side(names[number], known, column, left_out, skip_invalid)
        record = side.runs[0].record
        known.command = known.command or (record.command if record else None)
    sides = [found[number] for number in range(len(names))]
    _refuse_twice(sides)
    return _labelled(sides), [*known.skipped(), *left_out]


def _side(
    name: str, known: references.Lookup, column: LogColumn | None, left_out: list[str], skip_invalid: bool
) -> Side:
    paths, is_group = _logs(name) if column else known.runs(name)

    def read(path: Path) -> RunEvidence:
        return open_log(path, column) if column else intact(open_run(path), deeply=len(paths) < WELL_KNOWN)

    if not is_group:
        return Side(name, (read(paths[0]),))
    if (paths[0].parent / SEARCH).is_file():
        raise RunDirectoryError(
            f"{name} is a search by tune, whose runs have different settings",
            f"gpubench runs show {name} prints its result; single runs of it can be compared",
        )
    runs, unread, unmeasured = [], [], []
    for path in paths:
        try:
            runs.append(read(path))
        except GpubenchError as error:
            if isinstance(error, NothingMeasured) and not isinstance(error, StillRunning):
                unmeasured.append(path.name)
                unread.append(error.message)
                continue
            if not skip_invalid:
                raise RunDirectoryError(error.message, SKIP) from None
            unread.append(error.message)
            left_out.append(error.message)
    if not runs:
        raise RunDirectoryError(f"{name}: none of its {len(paths)} runs can be read", unread[-1])
    if unmeasured:
        left_out.append(f"{SKIPPED} {counted(len(unmeasured), 'run')} of {name} without results: {listed(unmeasured)}")
    return Side(name, tuple(runs))


def intact(run: RunEvidence, deeply: bool) -> RunEvidence:
    """Returns the run if all its files are readable. `deeply` also reads steps, telemetry and memory.

    The last lines of an interrupted run may be incomplete, which is only a warning. Raises RunDirectoryError with file
    and line if a completed run is damaged.
    """
    if run.status != COMPLETED:
        return run
    if deeply:
        run.series("step_time")
        run.telemetry  # noqa: B018 - reading it finds its problems
        run.footprints  # noqa: B018 - the same
    if run.problems:
        more = f", and {len(run.problems) - 1} more problems" if len(run.problems) > 1 else ""
        raise RunDirectoryError(f"{run.problems[0]}{more}", DAMAGED)
    return run


def _logs(name: str) -> tuple[list[Path], bool]:
    """Returns the logs that a name stands for, and whether it is a folder."""
    path = Path(name)
    if not is_folder(path):
        if not exists(path):
            close = closest(path.name, {child.name: str(child) for child in children(path.parent)})
            raise RunDirectoryError(f"{name}: no such file or folder", close or f"--column reads {', '.join(LOGS)}")
        return [path], False
    if exists(path / RUN):
        raise RunDirectoryError(f"{name} is a run directory, not a log of another tool", "leave --column out")
    found = _logs_in(path)
    if not found:
        raise RunDirectoryError(f"{name} holds no logs", f"--column reads {', '.join(LOGS)}")
    return found, True


def _logs_in(path: Path) -> list[Path]:
    return sorted(child for child in children(path) if child.suffix.lower() in LOGS and not is_folder(child))


def _refuse_twice(sides: Sequence[Side]) -> None:
    seen: dict[str, int] = {}
    for number, side in enumerate(sides):
        for run in side.runs:
            identity = f"{run.record.host}/{run.record.run_id}" if run.record else os.path.realpath(run.path)
            if identity in seen:
                other = seen[identity]
                twice = (
                    f"on two sides, {sides[other].label} and {side.label}" if other != number else "twice on one side"
                )
                raise RunDirectoryError(f"{run.path} is {twice}", _another(run, sides))
            seen[identity] = number


def _another(run: RunEvidence, sides: Sequence[Side]) -> str:
    """Returns the hint for a run that is named twice: what `latest` stands for, if that is one of its names."""
    if not run.record or not any(counts_back(side.label) for side in sides):
        return "compare it with another run"
    if {side.label for side in sides} == {"latest"}:
        return "gpubench compare latest~1 latest compares the two newest runs"
    command = kind_of(run.record.command).run_by
    hint = f"beside a run of {command}, latest is the newest run of {command}"
    return hint if command == "train-bench" else f"{hint}: latest:train-bench is that of train-bench"


def _labelled(sides: Sequence[Side]) -> list[Side]:
    """Gives runs, and sides, of the same name labels with enough of their paths to be unique."""
    runs = [run for side in sides for run in side.runs]
    names = iter(_telling([(run.label, *_ends(run.path)) for run in runs]))
    shown = _telling([(_short(side.label), side.label) for side in sides])
    return [
        Side(label, tuple(run if run.label == (name := next(names)) else replace(run, label=name) for run in side.runs))
        for label, side in zip(shown, sides, strict=True)
    ]


def _telling(candidates: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the first of the lists of candidates that has no duplicates, or else the last list."""
    ways = [list(way) for way in zip(*candidates, strict=True)]
    return next((way for way in ways if len(set(way)) == len(way)), ways[-1])


def _ends(path: Path) -> tuple[str, str]:
    return "/".join(path.resolve().parts[-2:]), str(path.resolve())


def _short(name: str) -> str:
    """Returns the last part of a path, and `latest` unchanged."""
    return name if references.LATEST.fullmatch(name) else Path(name).resolve().name or name
