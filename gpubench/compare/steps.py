"""Reads the steps of a run as columns: a million lines of steps.jsonl take about a second and 100 MB."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gpubench import foreign_files
from gpubench.runs.directory import BadLines
from gpubench.runs.steps import SteadyWindow

BLOCK = 1 << 18  # bytes decoded at once, so few that the rows stay in the CPU's cache until the columns are made
SHORTEST = len('{"repeat":0,"rank":0,"step":0,"time":0,"total":1,"phases":{},"samples":0}')  # a row, in bytes
NEWLINE = ord("\n")
# MessagePack's type bytes, and the sizes of its array headers in bytes
FLOAT64, TRUE, ARRAY_HEADERS = b"\xcb", 0xC3, (1, 3, 5)
MOST_PHASES = 64  # a run has about ten; each has its own column
LONGEST = 1e9  # seconds; sums of longer times lose precision

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

# The sort key of a row has 64 bits: 16 bits of repeat, 16 of rank, 31 of step.
_SMALL = Meta(ge=0, lt=1 << 16)
_COUNT = Meta(ge=0, lt=1 << 31)
_IDS: Final = {"repeat": _SMALL, "rank": _SMALL, "step": _COUNT, "samples": _COUNT}
_TIMES: Final = {"time": Meta(ge=0, le=1e12), "total": Meta(gt=0, le=LONGEST)}
_Part = Annotated[float, Meta(ge=-LONGEST, le=LONGEST)]
_Name = Annotated[str, Meta(pattern=r'\A[^"\\\x00-\x1f]+\Z', max_length=100)]


@dataclass(frozen=True, eq=False)
class StepTable:
    """Steps in the order of (repeat, rank, step); each column has one entry per step. Times are in seconds.

    The columns correspond to the fields of `events.Step`. `loss` is NaN for a step without one.
    """

    repeat: Ids
    rank: Ids
    step: Ids
    time: Floats
    total: Floats
    samples: Ids
    loss: Floats
    skipped: NDArray[np.bool_]
    phases: dict[str, Floats]

    @classmethod
    def of_totals(cls, total: Floats) -> "StepTable":
        """Returns a table of successive steps of which only the times are known."""
        n = len(total)
        zeros = np.zeros(n, np.int32)
        steps, times = np.arange(n, dtype=np.int32), np.cumsum(total) - total
        return cls(zeros, zeros, steps, times, total, zeros, np.full(n, np.nan), np.zeros(n, np.bool_), {})

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, rows: Any) -> "StepTable":
        """Returns the rows of a slice (its columns are views), a mask or indices."""
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "phases"}
        return StepTable(**columns, phases={name: column[rows] for name, column in self.phases.items()})

    def of_repeat(self, repeat: int) -> dict[int, "StepTable"]:
        """Returns the rows of one repeat by rank, as views."""
        own = self[_where(self.repeat, repeat)]
        ranks: dict[int, StepTable] = {}
        start = 0
        while start < len(own):
            rank = int(own.rank[start])
            rows = _where(own.rank, rank)
            ranks[rank] = own[rows]
            start = rows.stop
        return ranks

    def steady(self, window: SteadyWindow) -> dict[int, "StepTable"]:
        """Returns the rows of a repeat's steady window by rank, as views. A rank without rows is left out."""
        found: dict[int, StepTable] = {}
        for rank, rows in self.of_repeat(window.repeat).items():
            first, last = np.searchsorted(rows.step, np.array([window.first, window.first + window.steps], np.int32))
            if first < last:
                found[rank] = rows[first:last]
        return found

    def slowest_rank(self, window: SteadyWindow) -> "StepTable":
        """Returns the steady rows of the slowest rank, whose window took the most time (as in `runs.steps.measure`).

        The table is empty if there are none.
        """
        return max(self.steady(window).values(), key=lambda rows: float(rows.total.sum()), default=self[:0])


def read_steps(path: Path, problems: list[str]) -> StepTable:
    """Reads the steps in a steps.jsonl. Invalid lines are skipped and added to `problems`.

    If several lines are for the same step, the first counts. A phase that a line lacks counts as 0 s.
    """
    bad = BadLines(path, problems)
    columns = _Columns(0)
    try:
        columns = _Columns(path.stat().st_size // SHORTEST + 1)
        for number, block in _blocks(path):
            try:
                columns.add(block)
            except (ValueError, RecursionError):  # an invalid line, or a new phase
                lines, phases = _sift(block, number, columns.phases, bad)
                columns.widen(phases)
                columns.add(b"\n".join(lines))
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    except MemoryError:  # for example a sparse file without data
        problems.append(f"{path} cannot be read: it does not fit in memory")
    bad.close()
    return _ordered(columns.table(), path, problems)


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the first line, block of whole lines)."""
    number = 1
    with foreign_files.opened(path) as file:
        while block := file.read(BLOCK) + file.readline(foreign_files.LONGEST):
            if len(block) >= foreign_files.LONGEST:
                raise foreign_files.too_long(path)
            yield number, block
            newlines = np.frombuffer(block, np.uint8) == NEWLINE  # bytes.count takes five times as long
            number += int(np.count_nonzero(newlines))


class _AnyRow(msgspec.Struct, gc=False):
    phases: dict[_Name, _Part]


def _places(phases: tuple[str, ...]) -> dict[str, str]:
    """Maps field names to phases, because a phase need not be a valid field name."""
    return {f"p{number}": name for number, name in enumerate(phases)}


@lru_cache(maxsize=64)
def _row_type(phases: tuple[str, ...], id_type: type) -> Any:
    """Returns a struct type with a field for each phase, which msgspec decodes twice as fast as a dictionary."""
    names = _places(phases)
    places = [(place, _Part, 0.0) for place in names]
    parts = msgspec.defstruct("_Parts", places, gc=False, forbid_unknown_fields=True, rename=names)
    ids = [(name, Annotated[id_type, limits]) for name, limits in _IDS.items()]
    times = [(name, Annotated[float, limits]) for name, limits in _TIMES.items()]
    rest: list[Any] = [("phases", parts), ("loss", float | None, None), ("skipped", bool, False)]
    return msgspec.defstruct("_Row", [*ids, *times, *rest], gc=False, kw_only=True)


class _Packer:
    """Decodes rows with exactly these phases, and makes columns of them.

    Taking single values out of the rows would take as long as decoding the lines. Instead the rows are encoded again as
    MessagePack, where every row of floats has the same layout, so that a column is a strided view. For this the ids are
    read as floats.
    """

    def __init__(self, phases: tuple[str, ...]) -> None:
        row_type = _row_type(phases, float)
        self._decoder = msgspec.json.Decoder(row_type)
        self._encoder = msgspec.msgpack.Encoder()
        marks = {name: float(number) for number, name in enumerate([*_IDS, *_TIMES, "loss", *_places(phases)], 1)}
        parts = {name: marks[place] for place, name in _places(phases).items()}
        row, other = (
            self._encoder.encode(msgspec.convert(marks | {"phases": parts, "skipped": skipped}, row_type))
            for skipped in (False, True)
        )
        self._width = len(row)
        self._floats = {name: row.index(FLOAT64 + struct.pack(">d", mark)) + 1 for name, mark in marks.items()}
        self._skipped = next(place for place in range(self._width) if row[place] != other[place])

    def columns(self, lines: bytes) -> dict[str, NDArray[Any]]:
        """Returns the columns by field, with "p0", "p1", ... for phases. Raises ValueError or RecursionError."""
        rows = self._decoder.decode_lines(lines)
        packed = self._encoder.encode(rows)
        if len(packed) - len(rows) * self._width not in ARRAY_HEADERS:  # a loss that is None takes fewer bytes
            for row in rows:
                row.loss = math.nan if row.loss is None else row.loss
            packed = self._encoder.encode(rows)
        start = len(packed) - len(rows) * self._width
        rectangle = np.frombuffer(packed, np.uint8, offset=start).reshape(len(rows), self._width)
        columns = {name: rectangle[:, place : place + 8].view(">f8")[:, 0] for name, place in self._floats.items()}
        return columns | {"skipped": rectangle[:, self._skipped] == TRUE}


_packer = lru_cache(maxsize=64)(_Packer)


def _sift(block: bytes, number: int, phases: tuple[str, ...], bad: BadLines) -> tuple[list[bytes], tuple[str, ...]]:
    """Returns the valid lines of a block, and all phases known after them."""
    names = dict.fromkeys(phases)
    general = msgspec.json.Decoder(_AnyRow)
    good: list[bytes] = []
    for line_number, line in enumerate(block.split(b"\n"), number):
        if not line.strip():
            continue
        try:
            own = general.decode(line).phases
            if len(names | own) > MOST_PHASES:
                raise ValueError(f"more than {MOST_PHASES} phases in one run")
            msgspec.json.decode(line, type=_row_type(tuple(own), int))
        except (ValueError, RecursionError) as error:
            bad.add(line_number, error)
        else:
            names |= dict.fromkeys(own)
            good.append(line)
    return good, tuple(names)


class _Columns:
    """Collects columns for at most `capacity` rows. The kernel allocates only memory that is written to."""

    def __init__(self, capacity: int) -> None:
        self.phases: tuple[str, ...] = ()
        self._capacity = capacity
        self._length = 0
        types = dict.fromkeys(_IDS, np.int32) | dict.fromkeys([*_TIMES, "loss"], np.float64) | {"skipped": np.bool_}
        self._columns = {name: np.empty(capacity, type_) for name, type_ in types.items()}

    def widen(self, phases: tuple[str, ...]) -> None:
        """Adds new phases, which no row so far has."""
        self._columns |= {place: np.zeros(self._capacity) for place in _places(phases) if place not in self._columns}
        self.phases = phases

    def add(self, lines: bytes) -> None:
        """Adds lines. Raises ValueError or RecursionError if one is invalid."""
        found = _packer(self.phases).columns(lines)
        own = slice(self._length, self._length + len(found["step"]))
        for name, column in self._columns.items():
            column[own] = found[name]
        if any((self._columns[name][own] != found[name]).any() for name in _IDS):
            raise ValueError("an id is not a whole number")
        self._length = own.stop

    def table(self) -> StepTable:
        columns: dict[str, Any] = {name: column[: self._length] for name, column in self._columns.items()}
        return StepTable(phases={name: columns.pop(place) for place, name in _places(self.phases).items()}, **columns)


def _ordered(table: StepTable, path: Path, problems: list[str]) -> StepTable:
    key = (table.repeat.astype(np.int64) << 47) | (table.rank.astype(np.int64) << 31) | table.step
    if (key[1:] > key[:-1]).all():
        return table
    order = np.argsort(key, kind="stable")  # stable, so that the first of several lines for a step stays first
    key = key[order]
    again = np.concatenate([[False], key[1:] == key[:-1]])
    if again.any():
        first = table[order[again][:1]]
        problems.append(
            f"{path}: {again.sum()} steps occur more than once, such as step {first.step[0]} of repeat "
            f"{first.repeat[0]} on rank {first.rank[0]}; the first line of each counts"
        )
    return table[order[~again]]


def _where(column: Ids, value: int) -> slice:
    """Returns the rows with `value` in a sorted column."""
    wanted = np.int32(value)  # with a wider integer, numpy would convert the whole column
    return slice(int(np.searchsorted(column, wanted, "left")), int(np.searchsorted(column, wanted, "right")))
