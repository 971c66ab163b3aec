"""Tables of a profile: phases, modules, operators, kernels, copies, waits and collectives."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpubench import units
from gpubench.report.document import Table, table
from gpubench.text import words
from gpubench.trace.profile import Copy, Module, Operator, Profile, Rank, folded

MODULES = 15
OPERATORS = 15
KERNELS = 10
DRAWN = 8  # bars of a chart
MODULES_BY_TIME = "Modules, by time outside their submodules"
PLACES = 10  # rows of copies, synchronisations and collectives
FOLDED = "A number in brackets counts equal layers, whose sum the row is; gpubench profile -vv has a row for each."

Item = TypeVar("Item")


def kernel_name(signature: str) -> str:
    """Returns a kernel's C++ signature without return type and parameters."""
    name = signature.removeprefix("void ")
    if not name.endswith(")"):
        return name
    depth = 0
    for place in reversed(range(len(name))):
        depth += {")": 1, "(": -1}.get(name[place], 0)
        if not depth:
            return name[:place] if place and name[place - 1] != " " else name
    return name


def steps(rank: Rank) -> int:
    """Returns the divisor for what is counted over the window: the number of steps, or 1."""
    return max(1, len(rank.steps))


def duration(rank: Rank, time: float) -> str:
    """Returns nanoseconds of the window as a time per step; an empty string for 0."""
    return units.seconds(time / 1e9 / steps(rank)) if time else ""


def calls(rank: Rank, number: int) -> str:
    return units.digits(number / steps(rank)) if number else ""


def part_share(rank: Rank, time: int) -> str:
    return units.percent(time / rank.wall) if time and rank.wall else ""


def part_name(rank: Rank) -> str:
    return rank.label if rank.rank is None else f"rank {rank.rank}"


def bound_known(rank: Rank) -> bool:
    """Returns whether an operator's bound is known, which needs its shapes and the published peaks of the device."""
    return any(operator.bound != "insufficient data" for operator in rank.operators)


def largest(rank: Rank) -> dict[str, list[tuple[str, float]]]:
    """Returns what took most time in a step, as (name, seconds), by the title of the table that lists it."""
    found = {
        MODULES_BY_TIME: [(_module_name(one, equal), one.own) for one, equal in folded(rank.modules)],
        "Operators": [(one.name, _work(rank, one)) for one in rank.operators],
        "Kernels": [(kernel_name(one.name), one.total) for one in rank.kernels],
    }
    return {
        title: [(name, time / 1e9 / steps(rank)) for name, time in sorted(items, key=lambda item: -item[1])[:DRAWN]]
        for title, items in found.items()
    }


def tables(rank: Rank, *, unfolded: bool = False) -> list[Table]:
    """Returns all tables that have rows. `unfolded` gives every module a row; otherwise equal layers share one."""
    made = [
        phases(rank), modules(rank, unfolded=unfolded), operators(rank), kernels(rank), copies(rank),
        synchronisations(rank), collectives(rank),
    ]  # fmt: skip
    return [one for one in made if one]


def ranks(profile: Profile, unit: str = "step") -> Table:
    """Returns one row per rank, in shares of the rank's own wall time."""
    return table("Ranks", [_rank_row(rank, unit) for rank in profile.ranks], ("mostly idle for",))


def phases(rank: Rank) -> Table:
    rows = [
        {
            "phase": words(phase.name),
            "host": duration(rank, phase.host),
            "of host": part_share(rank, phase.host),
            "device": duration(rank, phase.device),
            "of device": part_share(rank, phase.device),
            "launches": calls(rank, phase.launches),
            "recompute": duration(rank, phase.recompute),
        }
        for phase in rank.phases
        if phase.host or phase.device
    ]
    return table("Phases", rows)


def modules(rank: Rank, *, unfolded: bool = False) -> Table:
    layers = [(module, 1) for module in rank.modules] if unfolded else folded(rank.modules)
    found, rest = _top(layers, MODULES, lambda layer: layer[0].own, rank)
    rows = [
        {
            "module": _module_name(module, equal),
            "own time": duration(rank, module.own),
            "share": part_share(rank, module.own),
            "class": module.kind,
            "forward": duration(rank, module.forward),
            "backward": duration(rank, module.backward),
            "recompute": duration(rank, module.recompute),
            "host": duration(rank, module.host),
            "calls": calls(rank, module.calls),
        }
        for module, equal in found
    ]
    note = FOLDED if len(layers) < len(rank.modules) else ""
    sizes = [module.own for module, _ in found]
    return table(MODULES_BY_TIME, rows, ("class",), sizes=sizes, rest=rest, note=note)


def operators(rank: Rank) -> Table:
    found, rest = _top(rank.operators, OPERATORS, lambda one: _work(rank, one), rank)
    rows = [operator_row(rank, one) for one in found]
    if not bound_known(rank):
        for row in rows:
            row["bound"] = ""
    words = ("shapes", "bound", "of type")
    return table("Operators", rows, words, sizes=[_work(rank, one) for one in found], rest=rest)


def kernels(rank: Rank) -> Table:
    found, rest = _top(rank.kernels, KERNELS, lambda one: one.total, rank)
    rows = [
        {
            "kernel": kernel_name(one.name),
            "time": duration(rank, one.total),
            "share": part_share(rank, one.total),
            "calls": calls(rank, one.calls),
            "median": units.seconds(one.median / 1e9),
            "longest": units.seconds(one.longest / 1e9),
            "kind": one.kind,
            "launched by": one.operator,
        }
        for one in found
    ]
    return table("Kernels", rows, ("kind", "launched by"), sizes=[one.total for one in found], rest=rest)


def copies(rank: Rank) -> Table:
    found, rest = _top(rank.copies, PLACES, lambda copy: copy.device + copy.host, rank)
    rows = [
        {
            "copy": _copy_kind(copy),
            "host": duration(rank, copy.host),
            "device": duration(rank, copy.device),
            "calls": calls(rank, copy.calls),
            "size": units.size(copy.bytes / steps(rank)) if copy.bytes else "",
            "in phase": words(copy.phase),
            "where": copy.where or "",
            "example": copy.example,
        }
        for copy in found
    ]
    return table("Copies", rows, ("in phase", "where", "example"), rest=rest)


def synchronisations(rank: Rank) -> Table:
    found, rest = _top(rank.synchronisations, PLACES, lambda one: max(one.blocked, one.idle), rank)
    rows = [
        {
            "wait asked by": one.operator or one.call,
            "host waits": duration(rank, one.blocked),
            "where": one.where or "",
            "device idle": duration(rank, one.idle),
            "calls": calls(rank, one.calls),
            "in phase": words(one.phase),
            "in call": one.call if one.operator else "",
        }
        for one in found
    ]
    return table("Waits of the host for the device", rows, ("where", "in phase", "in call"), rest=rest)


def collectives(rank: Rank) -> Table:
    found, rest = _top(rank.collectives, PLACES, lambda one: one.total, rank)
    rows = [
        {
            "kind": words(one.kind or ""),
            "collective": one.name,
            "time": duration(rank, one.total),
            "exposed": duration(rank, one.exposed),
            "calls": calls(rank, one.calls),
            "size": units.size(one.bytes / steps(rank)) if one.bytes else "",
        }
        for one in found
    ]
    return table("Collectives", rows, ("collective",), rest=rest)


def _top(items: Sequence[Item], limit: int, time: Callable[[Item], int], rank: Rank) -> tuple[list[Item], str]:
    """Returns the items with the most time, and a line that counts the others."""
    ordered = sorted(items, key=time, reverse=True)
    others = ordered[limit:]
    spent = duration(rank, sum(map(time, others)))
    said = f"{units.counted(len(others), 'other')}{f', {spent} in all' if spent else ''}" if others else ""
    return ordered[:limit], said


def _module_name(module: Module, equal: int) -> str:
    name = module.path or "(the whole model)"
    return f"{name} ({equal})" if equal > 1 else name


def _work(rank: Rank, operator: Operator) -> int:
    """Returns the nanoseconds that rank the operator: device time, or host time where the host alone is recorded."""
    return operator.host if rank.host_only else operator.device


def operator_row(rank: Rank, operator: Operator) -> dict[str, str]:
    """Returns the cells of an operator by column; cells with unknown values are empty."""
    elsewhere = rank.host_only and bool(
        rank.work_missing or rank.unread
    )  # a device did the work, but it is not recorded
    seconds = 0.0 if elsewhere else _work(rank, operator) / 1e9
    return {
        "operator": operator.name,
        "host" if rank.host_only else "device": duration(rank, _work(rank, operator)),
        "shapes": operator.shapes,
        "host": duration(rank, operator.host),
        "share": part_share(rank, _work(rank, operator)),
        "calls": calls(rank, operator.calls),
        "bound": operator.bound,
        "of ceiling": "" if operator.of_ceiling is None else units.percent(operator.of_ceiling),
        "FLOP/s": units.count(operator.flops / seconds) if operator.flops and seconds else "",
        "bytes/s": units.count(operator.bytes / seconds) if operator.bytes and seconds else "",
        "of type": operator.dtype,
    }


def _copy_kind(copy: Copy) -> str:
    memory = {None: "", True: ", pinned", False: ", pageable"}[copy.pinned]
    return f"{words(copy.kind)}{memory}"


def _rank_row(rank: Rank, unit: str) -> dict[str, str]:
    row = {"rank": part_name(rank), unit if rank.steps else "window": duration(rank, rank.wall)}
    if rank.device is None:
        return row | {words(part): part_share(rank, time) for part, time in rank.host.items()}
    idle, cause = max(((time, cause) for cause, time in rank.idle.items()), default=(0, ""))
    return row | {
        "compute": part_share(rank, rank.device.compute),
        "communication": part_share(rank, rank.device.exposed_communication),
        "copies": part_share(rank, rank.device.exposed_copies),
        "idle": part_share(rank, rank.device.idle),
        "mostly idle for": f"{words(cause)} {units.percent(idle / rank.device.idle)}" if idle else "",
    }
