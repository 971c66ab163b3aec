"""Time by nn.Module: forward by where operators stand, backward by the forward operator whose gradient is computed."""

import re
from collections.abc import Sequence

import numpy as np

from gpubench.trace.calls import ModuleCalls
from gpubench.trace.columns import MISSING, Ids, Mask, Ns
from gpubench.trace.nesting import nearest, nearest_around
from gpubench.trace.phases import Phases
from gpubench.trace.profile import Module
from gpubench.trace.program import Program


def modules(program: Program, phases: Phases) -> list[Module]:
    """Every module that ran in the window, parents before their children.

    Times are nanoseconds. With work on a device, they are of the work that was launched from the module; else, of the
    operators themselves. Calls, and the host's time, are of those from which such work was launched. Work of the
    backward pass is its forward operator's module's, found by sequence number.
    """
    calls, backward = phases.calls, phases.evaluation >= 0
    around = nearest(program.nest, calls.mask)
    parents = _parents(program, calls, around, backward)
    place = _place(calls, around, phases)
    parts = (~backward, backward & ~phases.recompute, phases.recompute)
    own = [_by_module(calls, place, np.where(part, program.effort, 0)) for part in parts]
    whole = [_with_children(amounts, parents) for amounts in own]
    called = calls.mask & ~backward & program.counted
    count = _by_module(calls, calls.of, called.astype(np.int64))
    host = _by_module(calls, calls.of, np.where(called, program.nest.end - program.trace.host.start, 0))
    found = [
        Module(
            path=path,
            kind=calls.kinds[one],
            calls=int(count[one]),
            host=int(host[one]),
            forward=int(whole[0][one]),
            backward=int(whole[1][one]),
            recompute=int(whole[2][one]),
            own=int(sum(amounts[one] for amounts in own)),
        )
        for path, one in _in_order(_paths(calls, parents))
    ]
    return [one for one in found if one.calls or one.forward or one.backward or one.recompute]


def folded(found: Sequence[Module]) -> list[tuple[Module, int]]:
    """Equal layers as one, with how many there are: those of one class whose paths differ in nothing but numbers.

    The sum of "layers.0.attn" to "layers.23.attn" has the path "layers.*.attn"; a module that is alone keeps its own.
    """
    groups: dict[tuple[str, ...], list[Module]] = {}
    for module in found:
        groups.setdefault((module.kind, *without_numbers(module.kind, module.path)), []).append(module)
    return [(_sum(group), len(group)) for group in groups.values()]


def without_numbers(kind: str, path: str) -> list[str]:
    """The parts of the path of a module of class `kind`, equal for equal layers: with a star for those that are numbers
    of a qualified path, or for the numbers by which the profiler tells modules of a class apart."""
    counted = path.rpartition("/")[2].rpartition("_")[0] == kind
    parts = path.split("/" if counted else ".")
    return [_NUMBER.sub("*", part) if counted or part.isdecimal() else part for part in parts]


def common_path(paths: Sequence[str]) -> str:
    """What paths of equal layers have in common, with a star for each number in which they differ."""
    separator = "/" if "/" in paths[0] else "."
    parts = [path.split(separator) for path in paths]
    if len({len(one) for one in parts}) > 1:
        return paths[0]
    return separator.join(
        same[0] if len(set(same)) == 1 else _NUMBER.sub("*", same[0]) for same in zip(*parts, strict=True)
    )


_NUMBER = re.compile(r"(^|(?<=_))\d+$")
"""The last number of a part of a path, if it is all of it or stands behind an underscore."""


def _sum(group: Sequence[Module]) -> Module:
    return Module(
        path=common_path([module.path for module in group]),
        kind=group[0].kind,
        calls=sum(module.calls for module in group),
        host=sum(module.host for module in group),
        forward=sum(module.forward for module in group),
        backward=sum(module.backward for module in group),
        recompute=sum(module.recompute for module in group),
        own=sum(module.own for module in group),
    )


def _place(calls: ModuleCalls, around: Ids, phases: Phases) -> Ids:
    """For each slice the module it works for, or -1."""
    evaluated = np.where(phases.evaluation >= 0, phases.forward[phases.evaluation], np.int32(MISSING))
    call = np.where(around > phases.evaluation, around, np.where(evaluated >= 0, around[evaluated], np.int32(MISSING)))
    forward = np.where(phases.evaluation >= 0, call, around)
    return np.where(forward >= 0, calls.of[forward], np.int32(MISSING))


def _by_module(calls: ModuleCalls, place: Ids, amounts: Ns) -> Ns:
    total = np.zeros(len(calls.names), np.int64)
    placed = place >= 0
    np.add.at(total, place[placed], amounts[placed])
    return total


def _parents(program: Program, calls: ModuleCalls, around: Ids, backward: Mask) -> list[int]:
    """Of each module the one it is part of, or -1: by qualified name, or by who called it first."""
    if calls.qualified:
        numbers = {name: number for number, name in enumerate(calls.names)}
        return [_prefix(numbers, name) for name in calls.names]
    slices = np.flatnonzero(calls.mask)
    slices = slices[np.lexsort((program.trace.host.start[slices], backward[slices]))]
    _, first = np.unique(calls.of[slices], return_index=True)
    outer = nearest_around(program.nest, around)[slices[first]]
    parents = np.where(outer >= 0, calls.of[outer], MISSING)
    return [int(parent) if parent != module else MISSING for module, parent in enumerate(parents)]


def _prefix(numbers: dict[str, int], name: str) -> int:
    """The number of the longest name that is a proper prefix in whole words; the root's is empty."""
    while name:
        name = name.rpartition(".")[0]
        if name in numbers:
            return numbers[name]
    return MISSING


def _with_children(amounts: Ns, parents: list[int]) -> Ns:
    total = amounts.copy()
    for module, parent in enumerate(parents):
        while parent >= 0:
            total[parent] += amounts[module]
            parent = parents[parent]
    return total


def _paths(calls: ModuleCalls, parents: list[int]) -> list[str]:
    if calls.qualified:
        return calls.names
    paths = []
    for module, parent in enumerate(parents):
        path = calls.names[module]
        while parent >= 0:
            path = f"{calls.names[parent]}/{path}"
            parent = parents[parent]
        paths.append(path)
    return paths


def _in_order(paths: list[str]) -> list[tuple[str, int]]:
    return sorted((path, module) for module, path in enumerate(paths))
