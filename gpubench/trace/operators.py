"""Operators by name and shapes: the time they took on the host and on the device, and how well they used it."""

from collections.abc import Sequence

import numpy as np

from gpubench.hardware import Accelerator, find_accelerator
from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Signature, Trace
from gpubench.trace.costs import Cost, cost
from gpubench.trace.nesting import nearest, nearest_around
from gpubench.trace.profile import Operator
from gpubench.trace.program import Program
from gpubench.trace.roofline import UNKNOWN, Ceiling, ceiling, peak_of
from gpubench.trace.tensors import dtype_text, shapes_text

Kind = tuple[str, Signature | None]
"""Calls that are counted together: their name and their inputs."""


def operators(program: Program) -> list[Operator]:
    """Every operator of the window, one entry for each set of inputs, the most time on the device first.

    Times are nanoseconds of all calls together. Calls, arithmetic and time on the device are of the operators whose
    work starts in the window, whenever they launched it; calls that launched none, and time on the host, are of those
    that began in it. Arithmetic of operators that are done by others is left to those.
    """
    kinds, of = _kinds(program)
    calls = _calls(of, program.counted, len(kinds))
    launcher = _at(of, program.owner)
    working = _calls(of, program.counted & program.launching, len(kinds))
    arithmetic = np.where(working > 0, working, calls)
    host = _summed(_at(of, program.operator), program.own_time, len(kinds))
    device = _summed(launcher, program.work_time, len(kinds))
    works = _summed(launcher, program.started.astype(np.int64), len(kinds))
    costs = _without_wrappers(program, of, [_cost(*kind) for kind in kinds])
    ceilings = _ceilings(program, kinds, arithmetic, device, costs, launcher)
    found = []
    for number, (name, signature) in enumerate(kinds):
        price, times = costs[number], int(arithmetic[number])
        operator = Operator(
            name=name,
            shapes=shapes_text(signature) if signature else "",
            dtype=dtype_text(signature) if signature else "",
            calls=int(calls[number]),
            host=int(host[number]),
            device=int(device[number]),
            kernels=int(works[number]),
            flops=price.flops * times if price and price.flops is not None else None,
            bytes=price.bytes * times if price else None,
            bound=ceilings[number].bound,
            of_ceiling=ceilings[number].fraction,
        )
        found.append(operator)
    return sorted(found, key=lambda one: (-one.device, -one.host, one.name, one.shapes))


def _kinds(program: Program) -> tuple[list[Kind], Ids]:
    """All kinds of operators of the window, and each slice's among them, -1 for the others."""
    trace = program.trace
    counted = np.flatnonzero(program.operators & (program.inside | program.counted))
    signatures: list[Signature | None] = [None, *trace.signatures]
    keys = trace.host.name[counted].astype(np.int64) * len(signatures) + trace.host.signature[counted] + 1
    distinct, inverse = np.unique(keys, return_inverse=True)
    of = np.full(len(trace.host), MISSING, np.int32)
    of[counted] = inverse
    places = (divmod(key, len(signatures)) for key in distinct.tolist())
    return [(trace.names[name], signatures[signature]) for name, signature in places], of


def _calls(of: Ids, chosen: Mask, count: int) -> Ns:
    return np.bincount(of[(of >= 0) & chosen], minlength=count)


def _at(of: Ids, slices: Ids) -> Ids:
    """The kind of each of `slices`, -1 where there is no slice."""
    return np.where(slices >= 0, of[slices], np.int32(MISSING)) if len(of) else slices


def _summed(kind: Ids, amounts: Ns, count: int) -> Ns:
    total = np.zeros(count, np.int64)
    counted = kind >= 0
    np.add.at(total, kind[counted], amounts[counted])
    return total


def _cost(name: str, signature: Signature | None) -> Cost | None:
    return None if signature is None else cost(name, signature)


def _without_wrappers(program: Program, of: Ids, costs: list[Cost | None]) -> list[Cost | None]:
    """None for kinds in which another operator with arithmetic stands, as aten::addmm in aten::linear."""
    arithmetic = np.array([one is not None and one.flops is not None for one in costs] + [False])
    counted = (of >= 0) & arithmetic[of]
    around = nearest_around(program.nest, nearest(program.nest, counted))[counted]
    wrappers = set(of[around[around >= 0]].tolist())
    return [None if number in wrappers else one for number, one in enumerate(costs)]


def _ceilings(
    program: Program, kinds: list[Kind], calls: Ns, device: Ns, costs: list[Cost | None], launcher: Ids
) -> list[Ceiling]:
    accelerator = _accelerator(program.trace)
    if accelerator is None:
        return [UNKNOWN] * len(kinds)
    kernels = _kernels(program.trace, launcher)
    found = []
    for number, (_, signature) in enumerate(kinds):
        seconds = int(device[number]) / max(int(calls[number]), 1) * 1e-9
        peak = peak_of(accelerator, dtype_text(signature) if signature else "", kernels.get(number, ()))
        found.append(ceiling(costs[number], seconds, peak, accelerator.memory_bandwidth))
    return found


def _kernels(trace: Trace, launcher: Ids) -> dict[int, Sequence[str]]:
    """Names of what each kind launched."""
    pairs = np.unique(np.stack((launcher, trace.device.name), axis=1), axis=0).tolist()
    found: dict[int, list[str]] = {}
    for kind, name in pairs:
        found.setdefault(kind, []).append(trace.names[name])
    return dict(found)


def _accelerator(trace: Trace) -> Accelerator | None:
    """The device that the work ran on, if it is known and all of it is of one kind."""
    used = [trace.described(one) for one in np.unique(trace.device.device).tolist()]
    names = {one.name if one else "" for one in used}
    return find_accelerator(names.pop()) if len(names) == 1 else None
