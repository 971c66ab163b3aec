"""The tables of a profile: by phase, by module, by operator, by kernel, and what moved data or waited."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpubench import units
from gpubench.report.plain import words
from gpubench.report.profile_phrases import bound_known, calls, duration, kernel_name, name, share, steps
from gpubench.report.sheets import Sheet, sheet
from gpubench.trace.modules import folded
from gpubench.trace.profile import Copy, Module, Operator, Profile, Rank

MODULES = 15
OPERATORS = 15
KERNELS = 10
PLACES = 10  # of copies, synchronisations and collectives
FOLDED = "A number in brackets counts equal layers, whose sum the row is; gpubench profile -v has a row for each."

Item = TypeVar("Item")


def tables(rank: Rank, *, unfolded: bool = False) -> list[Sheet]:
    """All that have something to say. unfolded: every module in a row of its own, where equal layers else share one."""
    made = [
        phases(rank), modules(rank, unfolded=unfolded), operators(rank), kernels(rank), copies(rank),
        synchronisations(rank), collectives(rank),
    ]  # fmt: skip
    return [one for one in made if one]


def ranks(profile: Profile, unit: str = "step") -> Sheet:
    """One row a rank, in shares of its own wall time."""
    return sheet("Ranks", [_rank_row(rank, unit) for rank in profile.ranks])


def phases(rank: Rank) -> Sheet:
    rows = [
        {
            "phase": words(phase.name),
            "host": duration(rank, phase.host),
            "of host": share(rank, phase.host),
            "device": duration(rank, phase.device),
            "of device": share(rank, phase.device),
            "launches": calls(rank, phase.launches),
            "recompute": duration(rank, phase.recompute),
        }
        for phase in rank.phases
        if phase.host or phase.device
    ]
    return sheet("Phases", rows)


def modules(rank: Rank, *, unfolded: bool = False) -> Sheet:
    layers = [(module, 1) for module in rank.modules] if unfolded else folded(rank.modules)
    found, rest = _top(layers, MODULES, lambda layer: layer[0].own, rank)
    rows = [
        {
            "module": _module_name(module, equal),
            "own time": duration(rank, module.own),
            "share": share(rank, module.own),
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
    return sheet("Modules, by time outside their submodules", rows, rest, note, [module.own for module, _ in found])


def operators(rank: Rank) -> Sheet:
    found, rest = _top(rank.operators, OPERATORS, lambda one: _work(rank, one), rank)
    rows = [operator_row(rank, one) for one in found]
    if not bound_known(rank):
        for row in rows:
            row["bound"] = ""
    return sheet("Operators", rows, rest, sizes=[_work(rank, one) for one in found])


def kernels(rank: Rank) -> Sheet:
    found, rest = _top(rank.kernels, KERNELS, lambda one: one.total, rank)
    rows = [
        {
            "kernel": kernel_name(one.name),
            "time": duration(rank, one.total),
            "share": share(rank, one.total),
            "calls": calls(rank, one.calls),
            "median": units.seconds(one.median / 1e9),
            "longest": units.seconds(one.longest / 1e9),
            "kind": one.kind,
            "launched by": one.operator,
        }
        for one in found
    ]
    return sheet("Kernels", rows, rest, sizes=[one.total for one in found])


def copies(rank: Rank) -> Sheet:
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
    return sheet("Copies", rows, rest)


def synchronisations(rank: Rank) -> Sheet:
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
    return sheet("Waits of the host for the device", rows, rest)


def collectives(rank: Rank) -> Sheet:
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
    return sheet("Collectives", rows, rest)


def _top(items: Sequence[Item], limit: int, time: Callable[[Item], int], rank: Rank) -> tuple[list[Item], str]:
    """Those that took most, and a line for the others."""
    ordered = sorted(items, key=time, reverse=True)
    others = ordered[limit:]
    spent = duration(rank, sum(map(time, others)))
    said = f"{units.counted(len(others), 'other')}{f', {spent} in all' if spent else ''}" if others else ""
    return ordered[:limit], said


def _module_name(module: Module, equal: int) -> str:
    name = module.path or "(the whole model)"
    return f"{name} ({equal})" if equal > 1 else name


def _work(rank: Rank, operator: Operator) -> int:
    """Time on the device that the operator is about."""
    return operator.host if rank.host_only else operator.device


def operator_row(rank: Rank, operator: Operator) -> dict[str, str]:
    """The cells of an operator, by column; empty where they are not known."""
    elsewhere = rank.host_only and bool(rank.work_missing or rank.unread)  # the work ran on a device that is not seen
    seconds = 0.0 if elsewhere else _work(rank, operator) / 1e9
    return {
        "operator": operator.name,
        "host" if rank.host_only else "device": duration(rank, _work(rank, operator)),
        "shapes": operator.shapes,
        "host": duration(rank, operator.host),
        "share": share(rank, _work(rank, operator)),
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
    row = {"rank": name(rank), unit if rank.steps else "window": duration(rank, rank.wall)}
    if rank.device is None:
        return row | {words(part): share(rank, time) for part, time in rank.host.items()}
    idle, cause = max(((time, cause) for cause, time in rank.idle.items()), default=(0, ""))
    return row | {
        "compute": share(rank, rank.device.compute),
        "communication": share(rank, rank.device.exposed_communication),
        "copies": share(rank, rank.device.exposed_copies),
        "idle": share(rank, rank.device.idle),
        "mostly idle for": f"{words(cause)} {units.percent(idle / rank.device.idle)}" if idle else "",
    }
