"""Logs of other tools: one column of a CSV, TSV or JSON-lines file, a row a step, as the evidence of one repeat."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, AnyStr

import msgspec
import numpy as np

from gpubench import stats, units
from gpubench.comparison.evidence import RunEvidence, Series
from gpubench.comparison.steps import StepTable
from gpubench.errors import DataError, UsageError, did_you_mean
from gpubench.foreign_files import LONGEST, too_long
from gpubench.metrics import RATES, Better, Metric
from gpubench.runs import COMPLETED
from gpubench.steady import SteadyWindow

SUFFIXES = (".csv", ".tsv", ".jsonl")
DELIMITERS = (",", ";", "\t")
SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
MOST_LISTED = 20  # columns that an error names
A_SECOND = ("s", "sec", "second")
GREATEST = 1e100  # squares of values, and sums of them, are to be finite
LEAST = 1 / GREATEST  # of times and rates, whose inverses are to be so too
READS = "--column reads .csv, .tsv and .jsonl"
A_LINE = "each line is one JSON object, such as a .jsonl file holds"
PLAIN = "write numbers with a decimal point, without separators of thousands"
EMPTY = "leave the cell empty where nothing was measured, and the row is passed over"


@dataclass(frozen=True)
class Column:
    """What to read from a log. Values are multiplied by `scale` to be in `unit`, which is a base unit where known."""

    name: str
    unit: str
    scale: float
    better: Better

    @classmethod
    def of(cls, name: str, unit: str, better: Better | None = None) -> "Column":
        """Raises UsageError where the unit does not tell which way is better and `better` does not either."""
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
                f"unit {unit!r} does not tell which way is better", "add --better lower or --better higher"
            )
        return cls(name, unit, 1.0, better)

    @property
    def is_rate(self) -> bool:
        """Whether it holds work over time, a step a row."""
        return self.unit.endswith("/s") or (self.name in RATES and self.unit not in ("s", "B"))


@dataclass(frozen=True, kw_only=True)
class LogEvidence(RunEvidence):
    """A log of another tool: no record, settings or phases, one metric, one repeat."""

    column: Column
    values: Series
    """The column from first to last, in the metric's unit; of a rate the time of one."""

    def series(self, metric: str) -> list[Series] | None:
        return [self.values[window.first :] for window in self.windows] if metric in self.metrics else None

    def is_rate(self, metric: str) -> bool:
        return self.column.is_rate

    @cached_property
    def steps(self) -> StepTable:
        """The rows as steps of rank 0 if the column holds times; none otherwise."""
        return StepTable.of_totals(self.values if self.column.unit == "s" else self.values[:0])


def open_log(path: Path, column: Column) -> LogEvidence:
    """One repeat of the metric `column`, the warm-up found by `stats.warmup_length` left out.

    A row is a step, and all steps do the same work: the rate of several is all of their work over all of their time,
    which is the harmonic mean of theirs. A row whose cell is empty is no step: it is passed over, and a problem. Raises
    DataError, by file and line, for anything else that is no finite number (or not above 0, for a time or a rate, or
    negative, for a size), for a column that is not there, and for fewer than two values.
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
        raise DataError(f"{path}: values of {column.name}: {len(values)}", "two are the least: a row is a step")
    passed_over = (
        f"{units.counted(cells.empty, 'row')} without {column.name} {'was' if cells.empty == 1 else 'were'} passed over"
    )
    problems = [passed_over] if cells.empty else []
    values = 1 / values if column.is_rate else values
    first = stats.warmup_length(values)
    steady = values[first:]
    window = SteadyWindow(
        repeat=0, first=first, steps=len(steady), settled=first < max(1, len(values) // 2), start=0.0, end=0.0
    )
    spread = stats.describe([steady])  # type: ignore[list-item]  # an array does as well
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
        metrics={metric.name: metric},
        windows=[window],
        problems=problems,
        column=column,
        values=values,
    )


class _Cells:
    """Makes numbers of the cells of one column, and counts the rows that have none."""

    def __init__(self, path: Path, column: Column) -> None:
        self._path = path
        self._column = column
        self._per_step = "rate" if column.is_rate else "time" if column.unit == "s" else None
        self._least = 0.0 if column.unit == "B" else -GREATEST
        self.empty = 0

    def number(self, cell: Any, line: int) -> float:
        """Raises DataError naming the line."""
        try:
            value = math.nan if isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError, OverflowError):
            hint = PLAIN if "," in str(cell) and any(map(str.isdigit, str(cell))) else EMPTY
            raise self._refusal(f"{cell!r} is not a number", line, hint) from None
        if self._per_step and value * self._column.scale < LEAST and value > -math.inf:
            raise self._refusal(f"{cell!r} cannot be the {self._per_step} of a step", line, EMPTY)
        if not self._least <= value <= GREATEST:
            raise self._refusal(f"{cell!r} cannot be a value", line, EMPTY)
        return value

    def _refusal(self, reason: str, line: int, hint: str) -> DataError:
        return DataError(f"{self._path}:{line}: {self._column.name}: {reason}", hint)

    def column_of(self, names: Sequence[str]) -> int:
        """The place of the column among those of the file. Raises DataError if that cannot be told."""
        name = self._column.name
        if names.count(name) == 1:
            return names.index(name)
        if name in names:
            raise DataError(f"{self._path} has {names.count(name)} columns {name!r}", "rename all but one")
        known = ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")
        hint = f"{did_you_mean(name, names)} its columns are {known}".lstrip() if known else "the file names no column"
        raise DataError(f"{self._path} has no column {name!r}", hint)


def _delimited(path: Path, column: str, cells: _Cells) -> Iterator[float]:
    with path.open(encoding="utf-8-sig", newline="") as file:
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
            elif row:  # else a blank line
                cells.empty += 1


def _bounded(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Its lines; it may be a pipe. Raises OSError for one that is too long to be a row."""
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
    with path.open("rb") as file:
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
