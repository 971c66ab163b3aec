"""Reads the log of another tool: the values of its metrics, their warm-up, and how finely they were written.

`compare.log_formats` recognises well-known logs; of a table one column is read here.
"""

import csv
import errno
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import msgspec
import numpy as np

from gpubench import foreign_files
from gpubench.compare.evidence import RunEvidence, Series
from gpubench.compare.log_columns import PLAIN, Cells, LogColumn, clock_step, json_of
from gpubench.compare.log_formats import DELIMITERS, HISTORY, TABLE, LogContent, LogMetric, bounded, recognise, split
from gpubench.compare.speed_columns import shortened
from gpubench.errors import DataError, did_you_mean
from gpubench.metrics import Better, Metric
from gpubench.runs import stats
from gpubench.runs.directory import COMPLETED
from gpubench.runs.steps import LevelShift, SteadyWindow, StepTable
from gpubench.runs.summary import NO_MEASUREMENTS
from gpubench.units import counted

READS = "a log is a file of UTF-8 text, such as CSV or JSON lines"
A_LINE = "each line is one JSON object, such as a .jsonl file holds"
SMOOTH = 3
"""The number of ticks over which values have to be spread for rounding to change their mean hardly at all: 1 over the
sum of the squared shares of the different values."""


@dataclass(frozen=True)
class LogSeries:
    """All values of one metric of a log, in its unit; for a rate, the inverse."""

    rate: bool
    repeats: Sequence[Series]
    windows: Sequence[SteadyWindow]
    tick: float | None
    """The smallest difference that the values can show, in the metric's unit; None if it is unknown."""
    between_readings: bool = False
    """Whether values are the times between readings of one clock, whose rounding cancels in their sum."""

    @property
    def steady(self) -> list[Series]:
        return [values[window.first :] for values, window in zip(self.repeats, self.windows, strict=True)]

    @property
    def rounding(self) -> float:
        """By which fraction the mean may be off, because values are multiples of `tick`.

        That is half a tick, unless the values are spread over SMOOTH ticks or more. Then their errors are as those of
        independent numbers between minus and plus half a tick, and the mean has hardly any (Sheppard 1898, Proceedings
        of the London Mathematical Society 29, 353).
        """
        if not self.tick:
            return 0.0
        values = np.concatenate(self.steady)
        values = 1 / values if self.rate else values
        if self.between_readings:
            return float(self.tick / len(values) / values.mean())
        _, counts = np.unique(np.round(values / self.tick), return_counts=True)
        is_smooth = 1 / np.square(counts / len(values)).sum() >= SMOOTH
        error = self.tick / np.sqrt(12 * len(values)) if is_smooth else self.tick / 2
        return float(error / values.mean())

    def since(self, first: int) -> "LogSeries":
        """Returns the values with the first `first` of each repeat as warm-up; itself if that leaves a repeat none."""
        if min(map(len, self.repeats)) <= first:
            return self
        return replace(self, windows=[_window(number, values, first) for number, values in enumerate(self.repeats)])


@dataclass(frozen=True, kw_only=True)
class LogEvidence(RunEvidence):
    """A log of another tool, without record, settings or phases. The windows are those of its first metric."""

    measured: Mapping[str, LogSeries]
    """The values of each metric by its name."""

    @property
    def values(self) -> Series:
        """All values of the first repeat of the first metric."""
        return next(iter(self.measured.values())).repeats[0]

    def since(self, first: int) -> "LogEvidence":
        measured = {name: series.since(first) for name, series in self.measured.items()}
        metrics = [
            _metric_of(metric.name, metric.unit, metric.better, measured[metric.name])
            for metric in self.summary.metrics
        ]
        windows = list(measured[metrics[0].name].windows)
        return replace(
            self, measured=measured, summary=msgspec.structs.replace(self.summary, metrics=metrics, steady=windows)
        )

    def series(self, metric: str) -> list[Series] | None:
        if metric not in self.measured or max(map(len, self.measured[metric].repeats)) < 2:
            return None  # one value of each process is no step of it
        return self.measured[metric].steady

    @property
    def tick(self) -> float | None:
        """The resolution of the first metric; see `LogSeries.tick`."""
        return next(iter(self.measured.values())).tick

    def rounding(self, metric: str) -> float:
        return self.measured[metric].rounding

    def is_rate(self, metric: str) -> bool:
        return metric in self.measured and self.measured[metric].rate

    @cached_property
    def steps(self) -> StepTable:
        """The values as steps of rank 0 if they are the times of one metric in one process; otherwise empty."""
        (name, first), *others = self.measured.items()
        alone = not others and len(first.repeats) == 1 and self.metrics[name].unit == "s" and self.series(name)
        return StepTable.of_totals(self.values if alone else self.values[:0])


def open_log(path: Path, column: LogColumn | None = None) -> LogEvidence:
    """Reads a log: the metric `column` of a table, or without one what `log_formats.recognise` finds.

    Repeats are read without the warm-up that most of them need (`stats.common_warmup`). A value is a step, and all
    steps do the same work, so the mean of a rate is harmonic. What is left out is reported as a problem. Raises
    DataError, with file and line, for a value that is not a finite number (above 0 for a time or a rate, not negative
    for a size), for a missing column, for fewer than two steps, and for a file of another kind.
    """
    try:
        with foreign_files.given(path) as file:
            log = _read(path, file, column)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", READS) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}", READS) from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}", READS) from None
    except DataError as error:
        raise error if column is None else _corrected(path, error) from None
    return evidence_of(path, log)


def evidence_of(path: Path, log: LogContent) -> LogEvidence:
    """Returns what a comparison needs of the values of a log."""
    measured = {one.column.name: _series_of(one) for one in log.metrics}
    columns = [one.column for one in log.metrics]
    metrics = [_metric_of(one.name, one.unit, one.better, measured[one.name]) for one in columns]
    return LogEvidence(
        label=path.name,
        path=path,
        record=None,
        status=COMPLETED,
        settings={},
        environment={},
        workload={},
        summary=msgspec.structs.replace(
            NO_MEASUREMENTS, metrics=metrics, steady=list(measured[metrics[0].name].windows)
        ),
        problems=["; ".join(log.notes)] if log.notes else [],
        kind_of_log=log.kind,
        measured=measured,
    )


def _read(path: Path, file: BufferedReader, column: LogColumn | None) -> LogContent:
    if column is None:
        content = file.read(foreign_files.MOST + 1)
        if len(content) > foreign_files.MOST:
            raise OSError(errno.EFBIG, f"it is larger than {foreign_files.MOST >> 20} MiB", str(path))
        found = recognise(path, content)
        return found if isinstance(found, LogContent) else _of_column(path, BufferedReader(BytesIO(content)), found)
    return _of_column(path, file, column)


def _corrected(path: Path, error: DataError) -> DataError:
    """Returns the error for a file that has no such column, with the advice to name none if it is read without."""
    try:
        found = open_log(path)
    except DataError:
        return error
    how = f"leave --column and --unit out: it is {found.kind_of_log}"
    return error if found.kind_of_log == TABLE else DataError(error.message, how)


def _series_of(metric: LogMetric) -> LogSeries:
    rate = metric.column.is_rate
    repeats = [1 / values if rate else values for values in metric.repeats]
    windows = [_window(number, values, 0) for number, values in enumerate(repeats)]
    found = LogSeries(rate, repeats, windows, metric.tick, metric.between_readings)
    return found.since(stats.common_warmup([list(map(stats.warmup_length, repeats))]))


def _window(repeat: int, values: Series, first: int) -> SteadyWindow:
    return SteadyWindow(
        repeat=repeat,
        first=first,
        steps=len(values) - first,
        settled=stats.is_settled(stats.warmup_length(values), first, len(values)),
        start=0.0,
        end=0.0,
        level=LevelShift.within(values[first:], first),
    )


def _metric_of(name: str, unit: str, better: Better | None, series: LogSeries) -> Metric:
    spread = stats.describe(series.steady)
    means = [float(steady.mean()) for steady in series.steady]
    mean = fmean(means)
    return Metric(
        name=name,
        unit=unit,
        better=better,
        estimate=1 / mean if series.rate else mean,
        interval=None,
        n=spread.n,
        effective_n=spread.effective_n,
        repeats=[1 / one if series.rate else one for one in means],
        distribution=None if series.rate else spread,
    )


def _of_column(path: Path, file: BufferedReader, column: LogColumn) -> LogContent:
    """Reads one column of CSV, or of JSON lines."""
    cells = Cells(path, column)
    begins = file.peek(1).removeprefix(BOM_UTF8).lstrip()
    is_json = path.suffix.lower() in (".jsonl", ".json") or begins.startswith(b"{")
    read = _json_lines if is_json else _delimited
    values = np.fromiter(read(path, file, column.name, cells), np.float64) * column.scale
    if len(values) < 2:
        raise DataError(
            f"{path} has {counted(len(values), 'value')} of {column.name}", "give two or more: a row is a step"
        )
    written = cells.written
    tick = clock_step(values, written) if column.unit == "s" and written is not None else written
    passed_over = f"{counted(cells.empty, 'row')} without {column.name} {'was' if cells.empty == 1 else 'were'} skipped"
    return LogContent(TABLE, [LogMetric(column, [values], tick)], [passed_over] if cells.empty else [])


def _column_of(path: Path, name: str, names: Sequence[str]) -> int:
    """Returns the index of the column in the file. Raises DataError if it is missing or ambiguous."""
    if names.count(name) == 1:
        return names.index(name)
    if name in names:
        raise DataError(f"{path} has {names.count(name)} columns {name!r}", "rename all but one")
    known = f"{did_you_mean(name, names)} its columns are {shortened(names)}".lstrip()
    hint = known if any(names) else "the file has no column names"
    raise DataError(f"{path} has no column {name!r}", hint)


def _delimited(path: Path, content: IO[bytes], column: str, cells: Cells) -> Iterator[float]:
    with TextIOWrapper(content, "utf-8-sig", newline="") as file:
        lines = bounded(file, path)
        above, header = next(((n, line) for n, line in enumerate(lines, 1) if line.strip()), (1, ""))
        delimiter = _delimiter(header, column)
        names = split(header, delimiter)
        place, width = _column_of(path, column, names), len(names)
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


def _delimiter(header: str, column: str) -> str:
    found = next((one for one in DELIMITERS if column in split(header, one)), None)
    return found or max(DELIMITERS, key=lambda one: len(split(header, one)))


def _json_lines(path: Path, content: IO[bytes], column: str, cells: Cells) -> Iterator[float]:
    names: dict[str, None] = {}
    found = False
    for number, row in _rows(path, content):
        cell = row.get(column)
        if cell is None:
            cells.empty += 1
            names |= dict.fromkeys(row) if not found else {}
        else:
            found = True
            yield cells.number(cell, number)
    if not found:
        _column_of(path, column, list(names))


def _rows(path: Path, content: IO[bytes]) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    """Yields the rows of JSON lines with their lines, or those of the state of a Trainer, without."""
    for number, line in enumerate(bounded(content, path), 1):
        if line.removeprefix(BOM_UTF8).strip() == b"{":  # of a document
            line += content.read(foreign_files.MOST)
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig").strip()
            row, end = json_of(text)
            if text[end:]:
                raise ValueError("it has more than one value")
            rows = row.get(HISTORY) if isinstance(row, dict) else None
            if not isinstance(row, dict) or (line.count(b"\n") > 1 and rows is None):
                raise ValueError("it is not one object in one line")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: {error}", A_LINE) from None
        if isinstance(rows, list):
            yield from ((None, one) for one in rows if isinstance(one, dict))
        else:
            yield number, row
