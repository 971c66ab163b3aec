"""Tables of a profile: phases, modules, operators, kernels, copies, waits and collectives.

Each is declared by its columns, by any of which a user can have it ordered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpubench import units
from gpubench.errors import UsageError, did_you_mean
from gpubench.report.document import EVERYWHERE, UNASKED, Table, table
from gpubench.sampled import SampledCode, SampledFunction, SeenCall
from gpubench.text import step_part, words
from gpubench.trace.families import kernel_name
from gpubench.trace.profile import (
    Collective,
    Copy,
    Kernel,
    Module,
    Operator,
    Profile,
    RankProfile,
    StepPhase,
    Synchronisation,
    folded,
    short_shapes,
)

DRAWN = 8  # bars of a chart
FOLDED = "A number in brackets counts equal layers, whose sum the row is; gpubench profile -vv has a row for each."

MODULES, OPERATORS, KERNELS = "Modules", "Operators", "Kernels"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table: what it holds of an item, by which rows are ordered too, and how that is written."""

    value: Callable[[RankProfile, Item], Any]
    text: Callable[[RankProfile, Any], str] = lambda rank, value: value or ""


@dataclass(frozen=True)
class Listing(Generic[Item]):
    """A table of a profile. The first column names its rows."""

    name: str
    items: Callable[[RankProfile, bool], Sequence[Item]]
    """The items of a rank. The flag asks for all of them, where equal ones share a row otherwise."""
    columns: Mapping[str, Column[Item]]
    size: Callable[[RankProfile, Item], int] | None = None
    """What the rows are ordered by, the largest first; in the order of the items if it is None."""
    most: int | None = None
    """The rows that are shown; all if it is None."""
    by: str = ""
    """The order, for the title."""
    words: Sequence[str] = ()
    """The columns of words."""
    barred: bool = False
    """Whether a bar shows the size of each row."""
    note: str = ""
    """What is said if the items are fewer than all of them."""
    leading: str = ""
    """The column that comes second if the CPU alone was recorded."""
    expendable: Sequence[str] = ()
    """The columns that a narrow terminal leaves out, the first one first."""

    def order(self, rank: RankProfile) -> list[str]:
        names = [*self.columns]
        if rank.host_only and self.leading:
            names.remove(self.leading)
            names.insert(1, self.leading)
        return names

    def row(self, rank: RankProfile, item: Item) -> dict[str, str]:
        """Returns the cells of an item by column; cells with unknown values are empty."""
        columns = ((name, self.columns[name]) for name in self.order(rank))
        return {name: column.text(rank, column.value(rank, item)) for name, column in columns}

    def sorted_by(self, rank: RankProfile, items: Sequence[Item], name: str) -> list[Item]:
        """Returns the items by a column: the largest number or the first word first, and unknown values last."""
        known = [(value, item) for item in items if (value := self.columns[name].value(rank, item)) not in (None, "")]
        known.sort(key=lambda one: one[0], reverse=not any(isinstance(value, str) for value, _ in known))
        unknown = [item for item in items if self.columns[name].value(rank, item) in (None, "")]
        return [item for _, item in known] + unknown


@dataclass(frozen=True)
class Arrangement:
    """How the tables are shown.

    Equal layers have a row each if `unfolded`. By table, `columns` names the column that orders it, and `rows` the
    number of its rows, which is None for all.
    """

    unfolded: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, int | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Says whether the user has arranged a table."""
        return bool(self.columns or self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in self.rows


PLAIN = Arrangement()


def steps(rank: RankProfile) -> int:
    """Returns the divisor for what is counted over the window: the number of steps, or 1."""
    return max(1, len(rank.steps))


def duration(rank: RankProfile, time: float) -> str:
    """Returns nanoseconds of the window as a time per step; an empty string for 0."""
    return units.seconds(time / 1e9 / steps(rank)) if time else ""


def calls(rank: RankProfile, number: int) -> str:
    return units.digits(number / steps(rank)) if number else ""


def part_share(rank: RankProfile, time: int) -> str:
    return units.percent(time / rank.wall) if time and rank.wall else ""


def part_name(rank: RankProfile) -> str:
    return rank.label if rank.rank is None else f"rank {rank.rank}"


def bound_known(rank: RankProfile) -> bool:
    """Tells whether any operator's bound is known, which needs shapes and the published peaks of the device."""
    return any(operator.bound != "insufficient data" for operator in rank.operators)


def largest(rank: RankProfile) -> dict[str, list[tuple[str, float]]]:
    """Returns what took most time in a step, as (name, seconds), by the name of the table that lists it."""
    found = {
        MODULES: [(_module_name(one, equal), one.own) for one, equal in folded(rank.modules)],
        OPERATORS: [(one.name, _work(rank, one)) for one in rank.operators],
        KERNELS: [(kernel_name(one.name), one.total) for one in rank.kernels],
    }
    return {
        title: [(name, time / 1e9 / steps(rank)) for name, time in sorted(items, key=lambda item: -item[1])[:DRAWN]]
        for title, items in found.items()
    }


def tables(rank: RankProfile, arranged: Arrangement = PLAIN) -> dict[str, Table]:
    """Returns all tables that have rows, by name. A table that the user has arranged is shown without -v too."""
    made = {name: _table(one, rank, arranged) for name, one in LISTINGS.items()}
    return {name: one for name, one in made.items() if one}


def _table(listing: Listing[Any], rank: RankProfile, arranged: Arrangement) -> Table:
    all_of_them = listing.items(rank, True)
    items = all_of_them if arranged.unfolded else listing.items(rank, False)
    size = listing.size
    ordered = sorted(items, key=lambda one: size(rank, one), reverse=True) if size else items
    by, most = arranged.columns.get(listing.name), arranged.rows.get(listing.name, listing.most)
    if by is not None:
        ordered = listing.sorted_by(rank, ordered, by)
    found, others = ordered[:most], ordered[most:] if most is not None else []
    spent = duration(rank, sum(size(rank, one) for one in others)) if size else ""
    return table(
        ", by ".join(filter(None, (listing.name, by or listing.by))),
        [listing.row(rank, one) for one in found],
        listing.words,
        sizes=[size(rank, one) for one in found] if size and listing.barred else (),
        rest=f"{units.counted(len(others), 'other')}{f', {spent} in all' if spent else ''}" if others else "",
        note=listing.note if len(items) < len(all_of_them) else "",
        on=EVERYWHERE if listing.name in arranged else UNASKED,
        kept=(by,) if by else (),
        expendable=tuple(name for name in listing.expendable if name != listing.leading or not rank.host_only),
    )


def arrangement(sort: Sequence[str], rows: Sequence[str], *, unfolded: bool) -> Arrangement:
    """Returns the arrangement of "TABLE=COLUMN" and "TABLE=N", or of "COLUMN" and "N" for all tables that have it.

    Raises UsageError for an unknown table or column, and for what is not a number of rows.
    """
    columns: dict[str, str] = {}
    for text in sort:
        table_name, equals, asked = text.rpartition("=")
        of = [_listing("--sort", table_name)] if equals else [*LISTINGS.values()]
        found = {one.name: name for one in of for name in one.columns if name.casefold() == asked.strip().casefold()}
        if not found:
            known = list(dict.fromkeys(name for one in of for name in one.columns))
            whose = f"{of[0].name} has" if equals else "no table has"
            missing = f"{whose} {'no' if equals else 'a'} column {asked!r}"
            raise UsageError(f"--sort {text}: {missing}", _one_of("columns", asked, known))
        columns |= found
    lengths: dict[str, int | None] = {}
    for text in rows:
        table_name, equals, asked = text.rpartition("=")
        if asked != "all" and not units.whole(asked):
            raise UsageError(f"--rows {text}: {asked!r} is not a number of rows", "for example 30, all or kernels=30")
        of = [_listing("--rows", table_name)] if equals else [*LISTINGS.values()]
        lengths |= dict.fromkeys((one.name for one in of), None if asked == "all" else int(asked))
    return Arrangement(unfolded, columns, lengths)


def _listing(option: str, asked: str) -> Listing[Any]:
    """Returns the table whose name begins with `asked`. Raises UsageError if none does, or several."""
    wanted = asked.strip().casefold()
    found = [one for name, one in LISTINGS.items() if wanted and name.casefold().startswith(wanted)]
    if len(found) != 1:
        which = "several tables begin so" if found else "there is no such table"
        raise UsageError(f"{option} {asked}: {which}", _one_of("tables", asked, [*LISTINGS]))
    return found[0]


def _one_of(what: str, asked: str, known: Sequence[str]) -> str:
    return f"{did_you_mean(asked, known)} {what} are {', '.join(known)}".lstrip()


def ranks(profile: Profile, unit: str = "step") -> Table:
    """Returns one row per rank, in shares of the rank's own wall time."""
    return table("Ranks", [_rank_row(rank, unit) for rank in profile.ranks], ("mostly idle for",))


def _module_name(module: Module, equal: int) -> str:
    name = module.path or "(the whole model)"
    return f"{name} ({equal})" if equal > 1 else name


def _work(rank: RankProfile, operator: Operator) -> int:
    """Returns the nanoseconds that rank the operator: of the device, or of the CPU if it alone is recorded."""
    return operator.host if rank.host_only else operator.device


def _copy_kind(copy: Copy) -> str:
    memory = {None: "", True: ", pinned", False: ", pageable"}[copy.pinned]
    return f"{words(copy.kind)}{memory}"


def _rank_row(rank: RankProfile, unit: str) -> dict[str, str]:
    row = {"rank": part_name(rank), unit if rank.steps else "window": duration(rank, rank.wall)}
    if rank.device is None:
        return row | {step_part(part): part_share(rank, time) for part, time in rank.host.items()}
    idle, cause = max(((time, cause) for cause, time in rank.idle.items()), default=(0, ""))
    return row | {
        "compute": part_share(rank, rank.device.compute),
        "communication": part_share(rank, rank.device.exposed_communication),
        "copies": part_share(rank, rank.device.exposed_copies),
        "idle": part_share(rank, rank.device.idle),
        "mostly idle for": f"{step_part(cause)} {units.percent(idle / rank.device.idle)}" if idle else "",
    }


def operator_row(rank: RankProfile, operator: Operator) -> dict[str, str]:
    """Returns the cells of an operator by column; cells with unknown values are empty."""
    return _OPERATORS.row(rank, operator)


def _seconds(rank: RankProfile, operator: Operator) -> float:
    """Returns the seconds of the work; 0 if a device did it and it is not recorded."""
    elsewhere = rank.host_only and bool(rank.work_missing or rank.unread)
    return 0.0 if elsewhere else _work(rank, operator) / 1e9


def _rate(of: str) -> Column[Operator]:
    """Returns the column of the FLOPs or the bytes of an operator per second."""

    def value(rank: RankProfile, operator: Operator) -> float | None:
        done, seconds = getattr(operator, of), _seconds(rank, operator)
        return done / seconds if done and seconds else None

    return Column(value, lambda rank, rate: units.count(rate) if rate else "")


def _bound(rank: RankProfile, operator: Operator) -> str:
    known = operator.bound != "insufficient data" or bound_known(rank)
    return operator.bound if known else ""


def _nanoseconds(rank: RankProfile, time: float) -> str:
    return units.seconds(time / 1e9)


def _per_step(rank: RankProfile, size: int) -> str:
    return units.size(size / steps(rank)) if size else ""


def _words(rank: RankProfile, name: str | None) -> str:
    return words(name or "")


_PHASES = Listing[StepPhase](
    "Phases",
    lambda rank, all_: [phase for phase in rank.phases if phase.host or phase.device],
    {
        "phase": Column(lambda rank, one: one.name, _words),
        "host": Column(lambda rank, one: one.host, duration),
        "of host": Column(lambda rank, one: one.host, part_share),
        "device": Column(lambda rank, one: one.device, duration),
        "of device": Column(lambda rank, one: one.device, part_share),
        "launches": Column(lambda rank, one: one.launches, calls),
        "recompute": Column(lambda rank, one: one.recompute, duration),
    },
)
_MODULES = Listing[tuple[Module, int]](
    MODULES,
    lambda rank, all_: [(one, 1) for one in rank.modules] if all_ else folded(rank.modules),
    {
        "module": Column(lambda rank, layer: _module_name(*layer)),
        "own time": Column(lambda rank, layer: layer[0].own, duration),
        "share": Column(lambda rank, layer: layer[0].own, part_share),
        "class": Column(lambda rank, layer: layer[0].kind),
        "forward": Column(lambda rank, layer: layer[0].forward, duration),
        "backward": Column(lambda rank, layer: layer[0].backward, duration),
        "recompute": Column(lambda rank, layer: layer[0].recompute, duration),
        "host": Column(lambda rank, layer: layer[0].host, duration),
        "calls": Column(lambda rank, layer: layer[0].calls, calls),
    },
    size=lambda rank, layer: layer[0].own,
    most=15,
    by="time outside their submodules",
    words=("class",),
    barred=True,
    note=FOLDED,
)
_OPERATORS = Listing[Operator](
    OPERATORS,
    lambda rank, all_: rank.operators,
    {
        "operator": Column(lambda rank, one: one.name),
        "device": Column(lambda rank, one: 0 if rank.host_only else one.device, duration),
        "shapes": Column(lambda rank, one: short_shapes(one.shapes)),
        "host": Column(lambda rank, one: one.host, duration),
        "share": Column(_work, part_share),
        "calls": Column(lambda rank, one: one.calls, calls),
        "bound": Column(_bound),
        "of ceiling": Column(
            lambda rank, one: one.of_ceiling, lambda rank, share: "" if share is None else units.percent(share)
        ),
        "FLOP/s": _rate("flops"),
        "bytes/s": _rate("bytes"),
        "of type": Column(lambda rank, one: one.dtype),
    },
    size=_work,
    most=15,
    words=("shapes", "bound", "of type"),
    barred=True,
    leading="host",
    # what is left says what takes most time, and how far it is from the device's limits
    expendable=("of type", "bytes/s", "calls", "host", "FLOP/s", "bound", "share"),
)
_KERNELS = Listing[Kernel](
    KERNELS,
    lambda rank, all_: rank.kernels,
    {
        "kernel": Column(lambda rank, one: kernel_name(one.name)),
        "time": Column(lambda rank, one: one.total, duration),
        "share": Column(lambda rank, one: one.total, part_share),
        "calls": Column(lambda rank, one: one.calls, calls),
        "median": Column(lambda rank, one: one.median, _nanoseconds),
        "longest": Column(lambda rank, one: one.longest, _nanoseconds),
        "kind": Column(lambda rank, one: one.kind),
        "launched by": Column(lambda rank, one: one.operator),
    },
    size=lambda rank, one: one.total,
    most=10,
    words=("kind", "launched by"),
    barred=True,
)
_COPIES = Listing[Copy](
    "Copies",
    lambda rank, all_: rank.copies,
    {
        "copy": Column(lambda rank, one: _copy_kind(one)),
        "host": Column(lambda rank, one: one.host, duration),
        "device": Column(lambda rank, one: one.device, duration),
        "calls": Column(lambda rank, one: one.calls, calls),
        "size": Column(lambda rank, one: one.bytes, _per_step),
        "in phase": Column(lambda rank, one: one.phase, _words),
        "where": Column(lambda rank, one: one.where),
        "example": Column(lambda rank, one: one.example),
    },
    size=lambda rank, one: one.device + one.host,
    most=10,
    words=("in phase", "where", "example"),
)
_WAITS = Listing[Synchronisation](
    "Waits of the CPU for the device",
    lambda rank, all_: [] if rank.host_only else rank.synchronisations,
    {
        "wait asked by": Column(lambda rank, one: one.operator or one.call),
        "CPU waits": Column(lambda rank, one: one.blocked, duration),
        "where": Column(lambda rank, one: one.where),
        "device idle": Column(lambda rank, one: one.idle, duration),
        "calls": Column(lambda rank, one: one.calls, calls),
        "in phase": Column(lambda rank, one: one.phase, _words),
        "in call": Column(lambda rank, one: one.call if one.operator else ""),
    },
    size=lambda rank, one: max(one.blocked, one.idle),
    most=10,
    words=("where", "in phase", "in call"),
)
_READS = Listing[Synchronisation](
    "Reads of values on the CPU",
    lambda rank, all_: rank.synchronisations if rank.host_only else [],
    {
        "operator": Column(lambda rank, one: one.operator or one.call),
        "time": Column(lambda rank, one: one.blocked, duration),
        "share": Column(lambda rank, one: one.blocked, part_share),
        "calls": Column(lambda rank, one: one.calls, calls),
        "in phase": Column(lambda rank, one: one.phase, _words),
        "where": Column(lambda rank, one: one.where),
    },
    size=lambda rank, one: one.blocked,
    most=10,
    words=("in phase", "where"),
)
_COLLECTIVES = Listing[Collective](
    "Collectives",
    lambda rank, all_: rank.collectives,
    {
        "kind": Column(lambda rank, one: one.kind, _words),
        "collective": Column(lambda rank, one: one.name),
        "time": Column(lambda rank, one: one.total, duration),
        "exposed": Column(lambda rank, one: one.exposed, duration),
        "calls": Column(lambda rank, one: one.calls, calls),
        "size": Column(lambda rank, one: one.bytes, _per_step),
    },
    size=lambda rank, one: one.total,
    most=10,
    words=("collective",),
)


def _of_functions(whole: Callable[[SampledCode], int]) -> dict[str, Column[SampledFunction]]:
    """Returns the columns of sampled functions. `whole` returns the samples that shares refer to."""
    return {
        "function": Column(lambda rank, one: f"{one.function} {one.place}".strip()),
        "share": Column(
            lambda rank, one: one.samples / max(1, whole(rank.code)) if rank.code else 0.0,
            lambda rank, value: units.percent(value),
        ),
        "samples": Column(lambda rank, one: one.samples, lambda rank, value: f"{value:,}"),
        "phase": Column(lambda rank, one: one.phase, _words),
        "most at": Column(lambda rank, one: one.line, lambda rank, value: f"line {value}" if value else ""),
        "source": Column(lambda rank, one: one.source),
        "within": Column(lambda rank, one: one.within),
    }


_CODE = Listing[SampledFunction](
    "Code of the program in the steps",
    lambda rank, all_: rank.code.main.functions if rank.code else [],
    _of_functions(lambda code: code.main.samples),
    most=10,
    words=("phase", "most at", "source", "within"),
    expendable=("within", "source"),
)
_WORKERS = Listing[SampledFunction](
    "Code of the program in the DataLoader's workers",
    lambda rank, all_: rank.code.workers.functions if rank.code else [],
    _of_functions(lambda code: code.workers.samples - code.workers.waiting),
    most=10,
    words=("phase", "most at", "source", "within"),
    expendable=("within", "source"),
)
_CALLS = Listing[SeenCall](
    "Lines that read values, make float64, compute softmax or enter autocast",
    lambda rank, all_: rank.code.calls if rank.code else [],
    {
        "line": Column(lambda rank, one: one.place or one.function),
        "call": Column(lambda rank, one: one.name),
        "times": Column(lambda rank, one: one.calls, lambda rank, value: f"{value:,}"),
        "in phase": Column(lambda rank, one: one.phase, _words),
        "source": Column(lambda rank, one: one.source),
    },
    most=10,
    words=("in phase", "source"),
    expendable=("source",),
)
LISTINGS: Mapping[str, Listing[Any]] = {
    one.name: one
    for one in (
        _PHASES, _MODULES, _OPERATORS, _KERNELS, _COPIES, _WAITS, _READS, _COLLECTIVES, _CODE, _WORKERS, _CALLS,
    )
}  # fmt: skip
