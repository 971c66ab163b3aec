"""The steps of a run as columns: collected while it runs, read from steps.jsonl, and reduced to the steady part."""

import math
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Final, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpubench import foreign_files
from gpubench.events import MOST_PHASES, Loss, ModelBuilt, Name, Part, RepeatDone, Step, WorkCounted
from gpubench.foreign_files import BadLines
from gpubench.probe.length import warmup_of
from gpubench.runs import stats
from gpubench.runs.clocks import ClockRates, Exchanges, worst

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]
Column = NDArray[Any] | Sequence[Any]


@dataclass(frozen=True, eq=False)
class StepTable:
    """Steps as columns with one entry per step. Times are in seconds.

    The columns correspond to the fields of `events.Step`. A phase that a step does not have takes 0 s in it. `loss` is
    NaN where it is unknown and infinite where it was not finite. `starved` is 1, 0, or NaN if it is unknown.
    """

    repeat: Ids
    rank: Ids
    step: Ids
    time: Floats
    total: Floats
    samples: Ids
    loss: Floats
    skipped: NDArray[np.bool_]
    starved: NDArray[np.float32]
    phases: dict[str, Floats]

    @classmethod
    def of_totals(cls, total: Floats) -> "StepTable":
        """Returns a table of successive steps of which only the times are known."""
        n = len(total)
        zeros, unknown = np.zeros(n, np.int32), np.full(n, np.nan)
        return cls(
            repeat=zeros,
            rank=zeros,
            step=np.arange(n, dtype=np.int32),
            time=np.cumsum(total) - total,
            total=total,
            samples=zeros,
            loss=unknown,
            skipped=np.zeros(n, np.bool_),
            starved=unknown.astype(np.float32),
            phases={},
        )

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, rows: Any) -> "StepTable":
        """Returns the rows of a slice (its columns are views), a mask or indices."""
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "phases"}
        return StepTable(**columns, phases={name: column[rows] for name, column in self.phases.items()})

    @property
    def wall(self) -> float:
        """The time of all steps together, in seconds."""
        return float(sum(self.total.tolist()))

    def phase(self, name: str) -> Floats:
        """Returns the time of a phase in each step; 0 if no step has the phase."""
        return self.phases.get(name, np.zeros(len(self)))

    @property
    def counted_samples(self) -> Ids:
        """The samples of each step. A step that the gradient scaler skipped counts none."""
        return np.where(self.skipped, np.int32(0), self.samples)

    # The following need the order of (repeat, rank, step), which `read_steps` gives.

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

    def steady(self, window: "SteadyWindow") -> dict[int, "StepTable"]:
        """Returns the rows of a repeat's steady window by rank, as views. A rank without rows is left out."""
        found: dict[int, StepTable] = {}
        for rank, rows in self.of_repeat(window.repeat).items():
            first, last = np.searchsorted(rows.step, np.array([window.first, window.first + window.steps], np.int32))
            if first < last:
                found[rank] = rows[first:last]
        return found


def slowest_rank(ranks: Mapping[int, StepTable]) -> int:
    """Returns the rank whose steps took the most time together. It represents the run."""
    return max(ranks, key=lambda rank: ranks[rank].wall)


def _where(column: Ids, value: int) -> slice:
    """Returns the rows with `value` in a sorted column."""
    wanted = np.int32(value)  # with a wider integer, numpy would convert the whole column
    return slice(int(np.searchsorted(column, wanted, "left")), int(np.searchsorted(column, wanted, "right")))


TYPES: Final[Mapping[str, type[np.generic]]] = {
    "repeat": np.int32,
    "rank": np.int32,
    "step": np.int32,
    "samples": np.int32,
    "time": np.float64,
    "total": np.float64,
    "loss": np.float64,
    "skipped": np.bool_,
    "starved": np.float32,
}
WAITING = 256  # steps that are converted at once, because columns of single steps would take ten times as long


class GrowingSteps:
    """Collects steps in columns that grow by doubling, so that each step costs the same however many there are."""

    def __init__(self, capacity: int = 0) -> None:
        """Makes room for `capacity` steps. It takes no memory before they are there."""
        self._length = 0
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(capacity, type_) for name, type_ in TYPES.items()}
        self._phases: dict[str, Floats] = {}  # zero beyond the length
        self._waiting: list[Step] = []

    def append(self, step: Step) -> None:
        self._waiting.append(step)
        if len(self._waiting) >= WAITING:
            self._convert_waiting()

    def extend(self, columns: Mapping[str, Column], phases: Mapping[str, Column]) -> None:
        """Adds steps: the columns of `TYPES`, and by phase its time in each of them. None becomes NaN."""
        self._length = self._write(columns, phases)

    def _write(self, columns: Mapping[str, Column], phases: Mapping[str, Column]) -> int:
        """Writes steps behind the others, without counting them yet. Returns the length that includes them."""
        end = self._length + len(columns["step"])
        self._reserve(end, phases)
        own = slice(self._length, end)
        for name, column in self._columns.items():
            column[own] = columns[name]
        for name, times in phases.items():
            self._phases[name][own] = times
        return end

    def table(self) -> StepTable:
        """Returns the steps so far in their order, as views."""
        self._convert_waiting()
        columns: dict[str, Any] = {name: column[: self._length] for name, column in self._columns.items()}
        return StepTable(**columns, phases={name: column[: self._length] for name, column in self._phases.items()})

    def __len__(self) -> int:
        return self._length + len(self._waiting)

    def _convert_waiting(self) -> None:
        steps = self._waiting
        names = dict.fromkeys(name for step in steps for name in step.phases)  # in their order
        end = self._write(
            _columns(steps),
            {name: [step.phases.get(name, 0.0) for step in steps] for name in names},
        )
        self._length, self._waiting = end, []  # only now, because Ctrl-C may interrupt the lines above

    def _reserve(self, length: int, phases: Iterable[str]) -> None:
        """Makes room for `length` steps with the phases known so far and these."""
        capacity = len(self._columns["step"])
        if length > capacity:
            capacity = max(length, 2 * capacity)
            for name, column in self._columns.items():  # one at a time, so that only one is there twice
                self._columns[name] = _grown(column, np.empty(capacity, column.dtype))
            for name, column in self._phases.items():
                self._phases[name] = _grown(column, np.zeros(capacity))
        for name in phases:
            if name not in self._phases:
                self._phases[name] = np.zeros(capacity)


def _columns(steps: Iterable[Any]) -> dict[str, Column]:
    """Returns the columns of `TYPES` for objects that have the fields of `events.Step`."""
    columns: dict[str, Column] = {name: [getattr(step, name) for step in steps] for name in TYPES}
    return columns | {"loss": [math.inf if step.not_finite else step.loss for step in steps]}


def _grown(column: NDArray[Any], larger: NDArray[Any]) -> NDArray[Any]:
    larger[: len(column)] = column
    return larger


BLOCK = 1 << 18  # bytes decoded at once, so few that the rows stay in the CPU's cache until the columns are made
SHORTEST = len('{"repeat":0,"rank":0,"step":0,"samples":0,"time":0,"total":1,"phases":{}}')
NEWLINE = ord("\n")
FLOAT64, FALSE, TRUE = b"\xcb", 0xC2, 0xC3  # of MessagePack
FLAGS = ("skipped", "starved", "not_finite")
"""The fields that take one byte in MessagePack."""

_IDS = ("repeat", "rank", "step", "samples")
_LIMITS: Final = {
    name: get_type_hints(Step, include_extras=True)[name].__metadata__[0] for name in (*_IDS, "time", "total")
}
"""The limits within which the numbers of a line are believed."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""The names that msgspec accepts as those of fields."""


def read_steps(path: Path, problems: list[str]) -> StepTable:
    """Reads a steps.jsonl into a table in the order of (repeat, rank, step). A million lines take 1 s and 100 MB.

    Invalid lines are skipped and added to `problems`. If several lines are for the same step, the first counts.
    """
    bad = BadLines(path, problems)
    found = GrowingSteps()
    phases: tuple[str, ...] = ()
    try:
        found = GrowingSteps(path.stat().st_size // SHORTEST + 1)
        for number, block in _blocks(path):
            try:
                columns = _decoder(phases).columns(block)
            except (ValueError, RecursionError):  # an invalid line, or a new phase
                lines, phases = _sift(block, number, phases, bad)
                columns = _decoder(phases).columns(b"\n".join(lines))
            found.extend(*columns)
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    except MemoryError:
        problems.append(f"{path} cannot be read: it does not fit in memory")
    bad.close()
    return _ordered(found.table(), path, problems)


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


def _places(phases: Sequence[str]) -> dict[str, str]:
    """Maps field names to phases, because a phase need not be a valid field name."""
    return {f"p{number}": name for number, name in enumerate(phases)}


def _row_type(phases: Any) -> Any:
    """Returns the type of a line of steps.jsonl with the type of its phases. Ids are floats; see `_Decoder`."""
    numbers = [(name, Annotated[float, limits]) for name, limits in _LIMITS.items()]
    others = [("loss", Loss | None, math.nan), ("skipped", bool, False), ("starved", bool | None, None)]
    others.append(("not_finite", bool, False))
    return msgspec.defstruct("_Row", [*numbers, *others, ("phases", phases)], gc=False, kw_only=True)


_AnyRow = _row_type(dict[Name, Part])
NOT_WHOLE = f"{', '.join(_IDS)}: one is not a whole number"
_STARVED = np.full(256, np.nan, np.float32)
"""The value of `StepTable.starved` by its byte in MessagePack."""
_STARVED[[FALSE, TRUE]] = 0, 1


class _Decoder:
    """Decodes lines that have no other phases into columns.

    Taking every value out of the decoded rows would take longer than decoding them. They are encoded again instead: in
    MessagePack a float has 8 bytes and a bool one, so that all rows have the same layout, which numpy reads in place.
    For this, ids are decoded as floats, and a row without a loss has NaN as its loss.
    """

    def __init__(self, phases: tuple[str, ...]) -> None:
        places = _places(phases)
        self._phases = places
        parts = [(place, Part, 0.0) for place in places]
        parts_type = msgspec.defstruct("_Parts", parts, gc=False, forbid_unknown_fields=True, rename=places)
        row_type = _row_type(parts_type)
        self._decoder = msgspec.json.Decoder(row_type)
        self._encoder = msgspec.msgpack.Encoder()
        marks = {name: float(mark) for mark, name in enumerate([*_LIMITS, "loss", *places], 1)}
        own = {name: mark for name, mark in marks.items() if name not in places}
        row = self._encoder.encode(row_type(**own, phases=parts_type(**{name: marks[name] for name in places})))
        at = {name: row.index(FLOAT64 + struct.pack(">d", mark)) + 1 for name, mark in marks.items()}
        at |= {name: row.index(name.encode()) + len(name) for name in FLAGS}
        formats = [">f8" if name in marks else "u1" for name in at]
        self._layout = np.dtype({"names": [*at], "offsets": [*at.values()], "formats": formats, "itemsize": len(row)})

    def columns(self, lines: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Floats]]:
        """Returns the columns of `TYPES`, and those of the phases. Raises ValueError or RecursionError."""
        rows = self._decoder.decode_lines(lines)
        packed = self._encoder.encode(rows)
        if len(packed) < len(rows) * self._layout.itemsize:  # a loss is null, which takes one byte
            for row in rows:
                row.loss = math.nan if row.loss is None else row.loss
            packed = self._encoder.encode(rows)
        table = np.frombuffer(packed, self._layout, len(rows), len(packed) - len(rows) * self._layout.itemsize)
        columns: dict[str, NDArray[Any]] = {name: table[name] for name in TYPES}
        columns |= {name: table[name].astype(np.int32) for name in _IDS}
        if any((columns[name] != table[name]).any() for name in _IDS):
            raise ValueError(NOT_WHOLE)
        columns |= {"skipped": table["skipped"] == TRUE, "starved": _STARVED[table["starved"]]}
        columns["loss"] = np.where(table["not_finite"] == TRUE, np.inf, table["loss"])
        return columns, {name: table[place] for place, name in self._phases.items()}


class _AnyDecoder:
    """Decodes lines into columns whatever the names of their phases are. It takes five times as long."""

    _decoder = msgspec.json.Decoder(_AnyRow)

    def __init__(self, phases: tuple[str, ...]) -> None:
        self._phases = phases

    def columns(self, lines: bytes) -> tuple[dict[str, Column], dict[str, Column]]:
        """Returns the same as `_Decoder.columns`."""
        rows = self._decoder.decode_lines(lines)
        if any(row.phases.keys() - set(self._phases) for row in rows):
            raise ValueError("a new phase")
        if not all(getattr(row, name).is_integer() for row in rows for name in _IDS):
            raise ValueError(NOT_WHOLE)
        return _columns(rows), {name: [row.phases.get(name, 0.0) for row in rows] for name in self._phases}


@lru_cache(maxsize=64)
def _decoder(phases: tuple[str, ...]) -> _Decoder | _AnyDecoder:
    return _Decoder(phases) if all(map(_PLAIN.fullmatch, phases)) else _AnyDecoder(phases)


def _sift(block: bytes, number: int, phases: tuple[str, ...], bad: BadLines) -> tuple[list[bytes], tuple[str, ...]]:
    """Returns the valid lines of a block, and all phases known after them."""
    names = dict.fromkeys(phases)
    decoder = msgspec.json.Decoder(_AnyRow)
    good: list[bytes] = []
    for line_number, line in enumerate(block.split(b"\n"), number):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            known = names | dict.fromkeys(row.phases)
            if not all(getattr(row, name).is_integer() for name in _IDS):
                raise ValueError(NOT_WHOLE)
            if len(known) > MOST_PHASES:
                raise ValueError(f"more than {MOST_PHASES} phases in one run")
        except (ValueError, RecursionError) as error:
            bad.add(line_number, error)
        else:
            names = known
            good.append(line)
    return good, tuple(names)


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
            f"{first.repeat[0] + 1} on rank {first.rank[0]}; the first line of each counts"
        )
    return table[order[~again]]


UNEVEN = 0.01
"""The relative difference between the mean and the usual number of samples in a step that is worth mention."""


LEAST = ("backward_passes", "forwarded", "updated_first", "updated_least", "updated_bytes", "updated_parameters")
"""The kinds of work of which a repeat has those of the rank that did least."""


@dataclass
class Repeat:
    """The events of one repeat."""

    number: int
    warmup: int | None = None
    """The least number of steps to exclude at its start; None if it follows from the number of steps."""
    steps: dict[int, GrowingSteps] = field(default_factory=lambda: defaultdict(GrowingSteps))
    """The steps of each rank, in order."""
    built: ModelBuilt | None = None
    done: dict[int, RepeatDone] = field(default_factory=dict)
    exchanges: dict[int, Exchanges] = field(default_factory=lambda: defaultdict(Exchanges))
    """What the reports of each rank tell about its clock."""
    reference_time: float | None = None
    """The time of the reference workload on rank 0, in seconds. Its metric is persisted as `yardstick_time`."""

    @property
    def samples_from(self) -> str:
        """What the samples of a program are, by its lowest rank; empty if that is unknown."""
        return next((done.samples_from for _, done in sorted(self.done.items())), "")

    @property
    def clock_rates(self) -> ClockRates | None:
        """Those of the rank whose clock is the least certain to be the host's; None if none is known."""
        return worst([rates for each in self.exchanges.values() if (rates := each.rates())])

    @property
    def timed_by(self) -> str:
        """What the times of a program are from, by its lowest rank; empty if it uses no GPU."""
        return next((done.timed_by for _, done in sorted(self.done.items())), "")

    @property
    def unanswered(self) -> dict[str, str]:
        """The errors of queries of a device that failed in a program, on any rank."""
        return {query: error for _, done in sorted(self.done.items()) for query, error in done.unanswered.items()}

    @property
    def work(self) -> WorkCounted | None:
        """The work of the ranks, None if none has counted it: for each kind in LEAST that of the rank that did least.

        Other counts are added, because shares of them need numbers of the same ranks.
        """
        found = [done.work for _, done in sorted(self.done.items()) if done.work]
        if not found:
            return None
        merged: dict[str, Any] = {"shapes": found[0].shapes}
        for name in WorkCounted.__struct_fields__:
            known = [value for one in found if (value := getattr(one, name)) is not None]
            if name not in merged and known:
                merged[name] = min(known) if name in LEAST else max(known) if name == "elements_spread" else sum(known)
        return WorkCounted(**merged)


class StepSamples(msgspec.Struct, frozen=True):
    """The samples of all ranks in the steady steps of all repeats, without those of skipped steps."""

    mean: float
    """The mean over the steps. Divided by the step time it is the throughput."""
    usual: int
    """The number that most steps have."""
    counted_from: str = ""
    """What the samples of a program of the user are; empty if that is unknown, or for gpubench's own loop."""

    @property
    def even(self) -> bool:
        """Whether the usual number, divided by the step time, is the throughput too."""
        return abs(self.mean - self.usual) <= UNEVEN * self.usual


class LevelShift(msgspec.Struct, frozen=True):
    """Where the steps of a repeat begin to take another time."""

    step: int
    """The first step at the new level, counting from 0."""
    factor: float
    """How many times as long a step takes from there on, by the medians."""

    @classmethod
    def within(cls, totals: Floats, first: int) -> "LevelShift | None":
        """Returns the change within the times of steps, of which the first is step `first`; None if there is none."""
        found = stats.level_change(stats.coarsened(totals))
        if found is None:
            return None
        return cls(first + found[0] * stats.coarseness(totals), found[1])


class SteadyWindow(msgspec.Struct, frozen=True):
    """The steady steps of one repeat, which the metrics are computed from."""

    repeat: int
    first: int
    steps: int
    settled: bool
    """False if steps of the warm-up are among these, or may be: it may reach beyond half of the repeat."""
    start: float
    end: float
    """The end in seconds since the epoch, on the timeline of the rank with the longest window."""
    partial_first: bool = False
    """Whether the first step of the repeat is timed only from its first backward pass, so that its time is unknown."""
    level: LevelShift | None = None
    """The largest change of the level of its steps; None if there is none."""


def common_level(windows: Sequence[SteadyWindow]) -> tuple[LevelShift, int] | None:
    """Returns the change of the level in the direction that most repeats have, and their number; None without one.

    Step and factor are the medians over those repeats.
    """
    changes = [window.level for window in windows if window.level]
    slower = [level for level in changes if level.factor >= 1]
    alike = slower if 2 * len(slower) >= len(changes) else [level for level in changes if level.factor < 1]
    if not alike:
        return None
    factor = math.exp(median(math.log(level.factor) for level in alike))
    return LevelShift(int(median(level.step for level in alike)), factor), len(alike)


@dataclass(frozen=True)
class Measured:
    """The steady steps of one repeat."""

    repeat: Repeat
    window: SteadyWindow
    recorded: dict[int, StepTable]
    """All steps of each rank, warm-up included."""
    ranks: dict[int, StepTable]
    """The steady steps of each rank, as many for each."""
    slowest_rank: int
    """The rank whose steady window took the most time. Its phases and step times represent the run."""

    @property
    def steps(self) -> StepTable:
        return self.ranks[self.slowest_rank]

    @cached_property
    def totals(self) -> Floats:
        """The time of each step on the rank that was slowest in it, in seconds."""
        return _slowest(self.ranks)

    @cached_property
    def wall(self) -> float:
        return self.steps.wall

    @cached_property
    def samples(self) -> int:
        """The number of samples of all ranks."""
        return sum(int(steps.counted_samples.sum(dtype=np.int64)) for steps in self.ranks.values())

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of the steps are known, also if the gradient scaler skipped all steps."""
        return any(steps.samples.any() for steps in self.ranks.values())

    @property
    def throughput(self) -> float:
        return self.samples / self.wall

    def phase(self, name: str) -> float:
        return fmean(self.steps.phase(name).tolist())

    def by_step(self, column: Callable[[StepTable], NDArray[Any]]) -> NDArray[Any]:
        """Returns a column of the steady steps, as ranks x steps."""
        return np.stack([column(steps) for steps in self.ranks.values()])


def measure(repeats: Iterable[Repeat]) -> list[Measured]:
    """Returns the steady part of each repeat that has one; an interruption in the warm-up leaves none.

    The warm-up is the same in all repeats: what `stats.common_warmup` makes of the steps that each of them needs, and
    at least `Repeat.warmup` of each.
    """
    recorded = [(repeat, {rank: steps.table() for rank, steps in sorted(repeat.steps.items())}) for repeat in repeats]
    least = [warmup_of(_length(ranks)) if repeat.warmup is None else repeat.warmup for repeat, ranks in recorded]
    known = [
        (repeat, ranks, warmup)
        for (repeat, ranks), warmup in zip(recorded, least, strict=True)
        if _length(ranks) > warmup
    ]
    needed = [stats.warmup_length(_slowest(ranks)) for _, ranks, _ in known]
    first = max([stats.common_warmup([needed]), *(warmup for _, _, warmup in known)])
    return [
        steady_from(first, repeat, ranks, settled=stats.is_settled(own, first, _length(ranks)))
        for (repeat, ranks, _), own in zip(known, needed, strict=True)
        if _length(ranks) > first
    ]


def steady_from(first: int, repeat: Repeat, recorded: dict[int, StepTable], *, settled: bool) -> Measured:
    """Returns the steps of a repeat from step `first` on, which some have to follow. `recorded` has all by rank."""
    length = _length(recorded)
    ranks = {rank: steps[first:length] for rank, steps in recorded.items()}
    slowest = slowest_rank(ranks)
    steps = ranks[slowest]
    window = SteadyWindow(
        repeat=repeat.number,
        first=first,
        steps=length - first,
        settled=settled,
        start=float(steps.time[0]),
        end=float(steps.time[-1] + steps.total[-1]),
        partial_first=any(done.partial_first for done in repeat.done.values()),
        level=LevelShift.within(_slowest(ranks), first),
    )
    return Measured(repeat, window, recorded, ranks, slowest)


def _length(ranks: Mapping[int, StepTable]) -> int:
    """Returns the number of steps that every rank has taken; 0 without ranks."""
    return min(map(len, ranks.values()), default=0)


def _slowest(ranks: Mapping[int, StepTable]) -> Floats:
    """Returns the time of each step that all ranks have taken on the rank that was slowest in it, in seconds."""
    length = _length(ranks)
    totals: Floats = np.max([steps.total[:length] for steps in ranks.values()], axis=0)
    return totals
