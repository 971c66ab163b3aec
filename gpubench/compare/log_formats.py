"""Reads the logs and results of well-known tools, which are recognised by their content.

Each console format is a class that takes one line after another, and each kind of JSON document has a function. Tables,
such as CSV or JSON lines, have no fixed columns: the one that names a speed and its unit is found, and `compare.logs`
reads it as if the user had named it.
"""

import csv
import io
import json
import re
from bisect import bisect_left
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, AnyStr, ClassVar

import numpy as np

from gpubench import units
from gpubench.compare.log_columns import Cells, LogColumn, Number, clock_step, json_of
from gpubench.compare.speed_columns import LONGEST_NAME, column_of_speed, no_speed, shortened, speed_column
from gpubench.errors import DataError
from gpubench.foreign_files import LONGEST, too_long
from gpubench.runs.stats import Series

OF_OTHERS = "gpubench reads any CSV or JSON lines with --column NAME --unit UNIT"
CUT_OFF = "give a whole JSON document, or one object per line"
AGAIN = "measure it again"
NOT_THIS_LINE = "leave this line out in a copy of the log"
TABLE = "a table"
STEP_TIME = LogColumn.of("step_time", "s")
JSON_LIST = re.compile(rb"\[\s*[\[{\]]")
MOST_RANKS = 4096
MOST_OF_A_LINE = 4096  # characters in which a line says what it is
MOST_ROWS = 1000  # rows of JSON lines whose columns are considered


@dataclass(frozen=True)
class LogMetric:
    """One metric of a log."""

    column: LogColumn
    repeats: Sequence[Series]
    """The values in the unit of the column: one series for each process, with one value for each of its steps."""
    tick: float | None
    """The smallest difference that the values can show, in the unit of the column; None if it is unknown."""
    between_readings: bool = False
    """Whether values are the times between readings of one clock, whose rounding cancels in their sum."""


@dataclass(frozen=True)
class LogContent:
    """What was read from a log."""

    kind: str
    """What the log is, such as "a log of torchtitan"."""
    metrics: Sequence[LogMetric]
    notes: Sequence[str] = ()
    """What was left out, and what the values do not tell."""


def recognise(path: Path, content: bytes) -> LogContent | LogColumn:
    """Returns what the log holds or, for a table, the column that names a speed and its unit.

    Raises DataError, with a hint on what to do, for any other content. Raises UnicodeDecodeError for a JSON document or
    a table that is not UTF-8 text, and OSError for a line that is too long.
    """
    content = content.removeprefix(BOM_UTF8)
    begins = content[:MOST_OF_A_LINE].lstrip()
    if begins.startswith(b"\x1f\x8b"):
        hint = f"give <(zcat {path}) or, if it is a trace: gpubench profile --trace {path} --against AFTER"
        raise DataError(f"{path} is compressed", hint)
    if b"\0" in content[:MOST_OF_A_LINE]:
        raise DataError(f"{path} is not a log: it is not UTF-8 text", OF_OTHERS)
    if not begins:
        raise DataError(f"{path} is empty", OF_OTHERS)
    if begins.startswith(b"{"):
        try:
            return _json(path, content.decode())
        except DataError as error:
            if found := _console(path, content):
                return found
            raise error from None
    if found := _console(path, content):
        return found
    if JSON_LIST.match(begins):
        raise DataError(f"{path} is a JSON list", f"jq -c '.[]' {path} > rows.jsonl writes one row per line")
    return _table(path, content)


def split(line: str, delimiter: str) -> list[str]:
    """Returns the cells of a line of a table. Raises csv.Error."""
    return [cell.strip() for row in csv.reader([line], delimiter=delimiter, skipinitialspace=True) for cell in row]


def bounded(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yields the lines of a file, which may be a pipe. Raises OSError for a line that is too long for a row."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise too_long(path)
        yield line


# Logs of steps, printed as text.

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_RANK = re.compile(r"\[[A-Za-z_]{0,40}(\d{1,6})\]: ?|(\d{1,6}): ", re.ASCII)
"""What torchrun, or srun with --label, writes before the lines of a rank."""


@dataclass(frozen=True)
class _Interval:
    """What one line says of the steps since the one before."""

    steps: int
    value: float
    apart: str | None = None
    """Why it does not show the speed of the steps; None if it does."""


_NUMBER = r"-?(?:\d[\d,.]{0,30}|nan|inf)"
Reading = tuple[int, float]
"""A step and the time when it ended, on a clock that began with the training."""


class _Console:
    """Collects the step lines of one rank."""

    kind: ClassVar[str]
    metric: ClassVar[str] = "step_time"
    clock: ClassVar[bool] = False
    marks: ClassVar[re.Pattern[bytes]]
    """Is in every line that matters."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unit = ""
        self._last: int | None = None
        self.cells = self._cells("ms")
        self.rows: list[_Interval] = []
        self.left_out: Counter[str] = Counter()
        self.notes: list[str] = []

    def take(self, line: int, text: str) -> None:
        """Takes the next line. Raises DataError for a number that cannot be right."""
        raise NotImplementedError

    def ended(self) -> None:
        """Is called after the last line."""

    def _number(self, cell: str, unit: str, line: int) -> float:
        """Returns the number, in its unit. Raises DataError if the unit is not that of the lines before."""
        if self._unit not in ("", unit):
            reason = f"{self._path}:{line}: {self.metric}: the unit is {unit}, and {self._unit} in the lines before"
            raise DataError(reason, NOT_THIS_LINE)
        if not self._unit:
            self._unit, self.cells = unit, self._cells(unit)
        return self.cells.number(cell.rstrip(",.").replace(",", ""), line)

    def _cells(self, unit: str) -> Cells:
        return Cells(self._path, LogColumn.of(self.metric, unit), clock=self.clock, hint=NOT_THIS_LINE)

    def _advances(self, step: int, line: int) -> bool:
        """Tells whether the line is of a step that follows, and not another line of the same step.

        Raises DataError if the step lies before the last one.
        """
        if self._last is not None and step < self._last:
            raise DataError(
                f"{self._path}:{line}: step {step} follows step {self._last}: the file holds more than one run",
                f"give each run a file of its own, with head -n {line - 1} and tail -n +{line}",
            )
        follows, self._last = step != self._last, step
        return follows


class _Torchtitan(_Console):
    """Lines of torchtitan: each has the rate of the steps since the last one, with what was done between them."""

    kind = "a log of torchtitan"
    metric = "tps"
    marks = re.compile(rb"step:|heckpoint|Dumping ")
    _STEP = re.compile(r"\b(validate )?step: {0,9}(\d{1,12})\b", re.ASCII)
    _RATE = re.compile(rf"\b[tw]ps: {{0,9}}({_NUMBER})", re.ASCII)
    _BETWEEN: ClassVar[Mapping[str, re.Pattern[str]]] = {
        "with a checkpoint": re.compile(r"\b(?:Saving|Staging) (?:the|a) (?:[\w-]{1,20} ){0,3}checkpoint"),
        "with a dump of the profiler": re.compile(r"\bDumping (?:profiler traces|memory snapshot)"),
    }
    _before = 0
    _apart: str | None = None

    def take(self, line: int, text: str) -> None:
        step, rate = self._STEP.search(text), self._RATE.search(text)
        if not (step and rate):
            self._apart = next((what for what, sign in self._BETWEEN.items() if sign.search(text)), self._apart)
            return
        number = int(step[2])
        if step[1]:  # the next rate is that of the steps after the validation
            self.left_out["of validation"] += 1
        elif self._advances(number, line):
            self.rows.append(_Interval(number - self._before, self._number(rate[1], "tokens/s", line), self._apart))
        else:
            self.left_out["of other ranks"] += 1
            return
        self._before, self._apart = number, None


class _NanoGpt(_Console):
    """Lines of nanoGPT: each has the time of one iteration, and evaluation is part of the one that it precedes."""

    kind = "a log of nanoGPT"
    marks = re.compile(rb"(?:iter|step) \d")
    _ITERATION = re.compile(rf"\biter (\d{{1,12}}): loss \S{{1,30}}, time ({_NUMBER})(m?s)\b", re.ASCII)
    _EVALUATION = re.compile(r"\bstep (\d{1,12}): train loss ", re.ASCII)
    _evaluated: int | None = None
    _every = 1

    def take(self, line: int, text: str) -> None:
        if found := self._EVALUATION.search(text):
            self._evaluated = int(found[1])
        elif found := self._ITERATION.search(text):
            number, before = int(found[1]), self._last
            if not self._advances(number, line):
                self.left_out["of other ranks"] += 1
                return
            self._every = number - before if before is not None else 1
            apart = "with an evaluation" if number == self._evaluated else None
            self.rows.append(_Interval(1, self._number(found[2], found[3], line), apart))

    def ended(self) -> None:
        if self._every > 1:
            self.notes.append(
                f"one of {self._every} iterations is logged: nanoGPT waits for the GPU only after these, so that their"
                " times may be too short: log_interval=1 logs all"
            )


class _ModdedNanoGpt(_Console):
    """Lines of modded-nanogpt: each has the time since training began, without that of evaluation."""

    kind = "a log of modded-nanogpt"
    clock = True
    marks = re.compile(rb"train_time:")
    _STEP = re.compile(r"\bstep:(\d{1,12})/\d", re.ASCII)
    _TIME = re.compile(rf"\btrain_time:({_NUMBER})(m?s)\b", re.ASCII)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._readings: list[Reading] = []

    def take(self, line: int, text: str) -> None:
        step, time = self._STEP.search(text), self._TIME.search(text)
        if not (step and time):
            return
        if not self._advances(int(step[1]), line):  # an evaluation waits for the GPU, which makes its reading exact
            self._readings.pop()
        self._readings.append((int(step[1]), self._number(time[1], time[2], line)))

    def ended(self) -> None:
        self.rows = list(_between(self._path, self._readings))


CONSOLES: Sequence[type[_Console]] = (_Torchtitan, _NanoGpt, _ModdedNanoGpt)


def _between(path: Path, readings: Sequence[Reading]) -> Iterator[_Interval]:
    """Yields the time of a step between each two readings. Raises DataError if the clock stands still."""
    for (before, began), (step, ended) in pairwise(readings):
        if ended == began:
            reason = f"{path}: the clock shows the same time at steps {before} and {step}"
            raise DataError(reason, "log the time with more digits, or less often")
        apart = "in which the clock starts again" if ended < began else None
        yield _Interval(step - before, (ended - began) / (step - before), apart)


def _console(path: Path, content: bytes) -> LogContent | None:
    """Reads the steps of the first rank that has some; None if no line is a step."""
    found: dict[str, dict[tuple[int, ...], _Console]] = {one.kind: {} for one in CONSOLES}
    for number, line in enumerate(bounded(io.BytesIO(content), path), 1):
        for format_ in CONSOLES:
            if format_.marks.search(line):
                rank, text = _without_rank(line)
                of_rank = found[format_.kind]
                if rank not in of_rank and len(of_rank) < MOST_RANKS:
                    of_rank[rank] = format_(path)
                if rank in of_rank:
                    of_rank[rank].take(number, text)
    told = []
    for of_rank in found.values():
        for steps in of_rank.values():
            steps.ended()
        told.append([of_rank[rank] for rank in sorted(of_rank) if of_rank[rank].rows])
    ranks = max(told, key=lambda ranks: sum(len(one.rows) for one in ranks))
    if not ranks:
        return None
    first, *others = ranks
    first.left_out["of other ranks"] += sum(len(one.rows) for one in others)
    return _of_rows(path, first.kind, first.rows, first.cells, first.left_out, "line", first.notes)


def _without_rank(line: bytes) -> tuple[tuple[int, ...], str]:
    """Returns the rank in the prefix of a line, and its text as a terminal shows it at last, without colours."""
    shown = line.decode(errors="replace").rstrip().rpartition("\r")[2]
    text = _COLOURS.sub("", shown[:MOST_OF_A_LINE])
    rank: list[int] = []
    while found := _RANK.match(text):
        rank.append(int(found[1] or found[2]))
        text = text[found.end() :]
    return tuple(rank), text


def _of_rows(
    path: Path,
    kind: str,
    rows: Sequence[_Interval],
    cells: Cells,
    left_out: Counter[str],
    noun: str,
    notes: Iterable[str] = (),
) -> LogContent:
    """Returns the values of the rows that show the speed of as many steps as most of them.

    Raises DataError if these are fewer than two.
    """
    clear = [row for row in rows if row.apart is None]
    lengths = Counter(row.steps for row in clear)
    usual = max(lengths, key=lambda steps: (lengths[steps], steps), default=0)
    column, written = cells.column, cells.written
    values = np.asarray([row.value for row in clear if row.steps == usual], np.float64) * column.scale
    left_out.update(row.apart for row in rows if row.apart)
    left_out["of another number of steps"] += sum(row.steps != usual for row in clear)
    said = _left_out(left_out, noun)
    if len(values) < 2:
        reason = "; ".join([f"{path} has {units.counted(len(values), 'value')} of {column.name}", *said])
        raise DataError(reason, f"give two or more: a {noun} is a step")
    tick = None if written is None else written if column.is_rate else clock_step(values, written / usual)
    return LogContent(kind, [LogMetric(column, [values], tick, between_readings=cells.is_clock)], [*said, *notes])


def _left_out(counted: Counter[str], noun: str) -> list[str]:
    """Returns the line on what was left out, if there is any."""
    known = {why: number for why, number in counted.items() if number}
    if not known:
        return []
    total = sum(known.values())
    reasons = units.listed(f"{number:,} {why}" for why, number in known.items())
    return [f"{units.counted(total, noun)} {'was' if total == 1 else 'were'} left out: {reasons}"]


# Results in one JSON document.


def _json(path: Path, text: str) -> LogContent | LogColumn:
    """Reads a JSON document, or finds the column of JSON lines."""
    try:
        document, end = json_of(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: it is not valid JSON: {error.msg}", CUT_OFF) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: it is not valid JSON: {error}", CUT_OFF) from None
    if text[end : end + LONGEST].strip():
        return speed_column(path, _names(text))
    if "traceEvents" in document:
        raise DataError(f"{path} is a trace", f"gpubench profile --trace {path} --against AFTER")
    for name, read in DOCUMENTS.items():
        if isinstance(document.get(name), list) and (found := read(path, document)):
            return found
    raise DataError(
        f"{path} is not a result that gpubench reads: its keys are {shortened(document)}",
        f"gpubench reads {units.listed(READ_FROM_JSON)}, and one object per line with --column NAME --unit UNIT",
    )


def _names(text: str) -> list[str]:
    """Returns the names in the first JSON lines."""
    names: dict[str, None] = {}
    for line in io.StringIO(text[: MOST_ROWS * MOST_OF_A_LINE]):
        try:
            row, _ = json_of(line.strip())
        except (ValueError, RecursionError):
            break  # whoever reads the column says where
        names |= dict.fromkeys(row) if isinstance(row, dict) else {}
    return list(names)


def _objects(entries: Any) -> list[dict[str, Any]]:
    return [entry for entry in entries if isinstance(entry, dict)]


def _hyperfine(path: Path, document: Mapping[str, Any]) -> LogContent | None:
    """Reads what hyperfine exports: each run of a command is a process of its own."""
    metrics = []
    for one in _objects(document["results"]):
        if "command" not in one or not ("times" in one or "mean" in one):
            continue
        command, codes = _name(one["command"]), one.get("exit_codes") or []
        failed = [code for code in codes if code != "0"] if isinstance(codes, list) else []
        if failed:
            ended = "was killed" if failed[0] is None else f"ended with exit code {failed[0]}"
            raise DataError(
                f"{path}: {command}: {len(failed)} of its {units.counted(len(codes), 'run')} failed: one {ended}",
                "measure a command that succeeds, without --ignore-failure",
            )
        times = one.get("times") or [one.get("mean")]
        metrics.append(_metric(path, command, times, processes=True))
    return LogContent(HYPERFINE, _distinct(path, metrics)) if metrics else None


def _pytest_benchmark(path: Path, document: Mapping[str, Any]) -> LogContent | None:
    """Reads what pytest-benchmark saves: the rounds of a benchmark are steps of one process."""
    metrics, means = [], 0
    for one in _objects(document["benchmarks"]):
        stats = one.get("stats")
        if not isinstance(stats, dict) or not ("data" in stats or "mean" in stats):
            continue
        rounds = stats.get("data")
        means += not rounds
        name = _name(one.get("fullname") or one.get("name"))
        metrics.append(_metric(path, name, rounds or [stats.get("mean")], processes=False))
    said = f"of {units.counted(means, 'benchmark')} only the mean is saved: --benchmark-save-data keeps the rounds"
    return LogContent(PYTEST_BENCHMARK, _distinct(path, metrics), [said] if means else []) if metrics else None


def _metric(path: Path, name: str, cells: Any, *, processes: bool) -> LogMetric:
    """Returns a metric of times in seconds, each of a process of its own, or else all of one process."""
    column = LogColumn.of(name, "s")
    read = Cells(path, column, hint=AGAIN)
    values = np.asarray([read.number(cell) for cell in (cells if isinstance(cells, list) else [cells])], np.float64)
    repeats = [values[place : place + 1] for place in range(len(values))] if processes else [values]
    single = len(values) < 2  # it may be the mean of several, whose resolution is not known
    return LogMetric(column, repeats, None if single else clock_step(values, read.written or 0.0))


def _name(text: Any) -> str:
    return " ".join(str(text).split())[:LONGEST_NAME] or "time"


def _distinct(path: Path, metrics: Sequence[LogMetric]) -> Sequence[LogMetric]:
    """Returns the metrics. Raises DataError if two have the same name."""
    name, number = Counter(one.column.name for one in metrics).most_common(1)[0]
    if number > 1:
        raise DataError(f"{path} has {number} results called {name!r}", "give each a name, as with hyperfine -n NAME")
    return metrics


TOTALS = ("train_tokens_per_second", "train_samples_per_second", "train_steps_per_second")
"""What the Trainer logs at the end, of the whole training."""
ROUNDED = 1e-3
"""What the Trainer rounds its rates to."""
TIMES_OF_STEPS = "train with include_num_input_tokens_seen, which logs the time in every row"


def _trainer(path: Path, document: Mapping[str, Any]) -> LogContent | LogColumn:
    """Reads the state of the Trainer of transformers.

    Its rows have the time since training began only with `include_num_input_tokens_seen`. Otherwise there is one rate,
    of the whole training, unless the rows have a column of the user's that names a speed.
    """
    rows = _objects(document[HISTORY])
    training = [row for row in rows if not any(map(_of_evaluation, row))]
    last = next((row for row in reversed(training) if any(name in row for name in TOTALS[1:])), None)
    before = [row for row in training if row is not last]
    timed = [row for row in before if "train_runtime" in row and "step" in row]
    left_out = Counter({"of evaluation": len(rows) - len(training)})
    if len(timed) > 2:
        return _trainer_steps(path, document, rows, timed, left_out)
    names = [name for name in dict.fromkeys(name for row in before for name in row) if name not in TOTALS]
    if column := column_of_speed(names):
        return column
    found = next((name for name in TOTALS if last and name in last), None)
    if last is None or found is None:
        raise no_speed(path, names, f"give the state that the Trainer saves after the training, or {TIMES_OF_STEPS}")
    column = LogColumn.of(found, f"{found.split('_')[1]}/s")
    value = np.asarray([Cells(path, column, hint=AGAIN).number(last[found])], np.float64)
    of_all = f"its rate is of the whole training, with its start, evaluation and checkpoints: {TIMES_OF_STEPS}"
    return LogContent(TRAINER, [LogMetric(column, [value], ROUNDED)], [*_left_out(left_out, "row"), of_all])


def _trainer_steps(
    path: Path,
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    left_out: Counter[str],
) -> LogContent:
    """Reads the time of a step between each two rows that have the time since training began."""
    cells = Cells(path, STEP_TIME, clock=True, hint=AGAIN)
    readings = {_whole(row["step"]): cells.number(row["train_runtime"]) for row in timed}
    evaluated = sorted({_whole(row.get("step")) for row in rows if any(map(_of_evaluation, row))})
    every = _whole(document.get("save_steps"))
    found = []
    for began, row in zip(readings, _between(path, list(readings.items())), strict=False):
        end = began + row.steps  # what follows the row of a step is part of the next one
        apart = row.apart
        if bisect_left(evaluated, began) < bisect_left(evaluated, end):
            apart = "with an evaluation"
        elif every and max(1, -(-began // every)) * every < end:
            apart = "with a checkpoint"
        found.append(replace(row, apart=apart))
    return _of_rows(path, TRAINER, found, cells, left_out, "row")


def _whole(cell: Any) -> int:
    """Returns a whole number of at most twelve digits; 0 for anything else."""
    return int(cell) if isinstance(cell, Number) and cell.isdigit() and len(cell) <= 12 else 0


def _of_evaluation(name: str) -> bool:
    return name.startswith("eval_")


TRAINER = "a state of the Trainer of transformers"
HYPERFINE = "a result of hyperfine"
PYTEST_BENCHMARK = "a result of pytest-benchmark"
BENCHMARKS = (HYPERFINE, PYTEST_BENCHMARK)
"""The kinds of logs whose metrics are called as the user has called a benchmark."""
HISTORY = "log_history"
"""The key of the rows of a Trainer."""
DOCUMENTS: Mapping[str, Callable[[Path, Mapping[str, Any]], LogContent | LogColumn | None]] = {
    "results": _hyperfine,
    "benchmarks": _pytest_benchmark,
    HISTORY: _trainer,
}
"""What reads a document, by the key of the list that it holds."""
READ_FROM_JSON = ("the trainer_state.json of transformers", "hyperfine --export-json", "pytest --benchmark-json")


# Tables.

DELIMITERS = (",", ";", "\t")


def _table(path: Path, content: bytes) -> LogColumn:
    """Finds the column of CSV. Raises DataError if the content is none."""
    lines = (line.decode() for line in bounded(io.BytesIO(content), path) if line.strip())
    header, first = next(lines), next(lines, "")
    try:
        delimiter = max(DELIMITERS, key=lambda one: len(split(header, one)))
        names, cells = split(header, delimiter), split(first, delimiter)
    except csv.Error:
        names, cells = [], []
    if any(map(_is_number, names)) or not any(map(_is_number, cells)) or len(cells) > len(names) + 1:
        read = units.listed(["logs of torchtitan, nanoGPT and modded-nanogpt", *READ_FROM_JSON])
        hint = f"gpubench reads {read}, and any CSV or JSON lines with --column NAME --unit UNIT"
        raise DataError(f"{path} is not a log that gpubench reads", hint)
    return speed_column(path, names)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
