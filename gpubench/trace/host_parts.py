"""What the main thread of a program without a device did, as a partition of its time."""

import numpy as np

from gpubench.trace.columns import HostKind, Mask
from gpubench.trace.copies import copying
from gpubench.trace.intervals import Spans, join, subtract, union
from gpubench.trace.nesting import nearest, of_pieces
from gpubench.trace.phases import OPTIMIZER, RECV_WAIT, SEND_WAIT, Phases
from gpubench.trace.profile import HOST_PARTS, HostPart
from gpubench.trace.program import Program
from gpubench.trace.waiting import for_autograd, for_other_ranks

_PYTHON = HOST_PARTS.index("python")


def host_parts(program: Program, phases: Phases) -> dict[HostPart, Spans]:
    """When the main thread did what; the parts are disjoint and fill the window.

    Where several are open at once, the first of HOST_PARTS counts. Where the main thread does nothing that is recorded,
    a collective on a thread of its own is communication, and waiting in `backward()` for autograd's own thread is time
    in operators.
    """
    trace, nest = program.trace, program.nest
    kind, name = trace.host.kind, trace.host.name
    marks: dict[HostPart, Mask] = {
        "data_loader": program.lexicon.data_loader[name],
        "communication": (program.lexicon.communication_host[name] & (kind != HostKind.PYTHON))
        | np.isin(phases.of, (RECV_WAIT, SEND_WAIT)),
        "copies": copying(program),
        "optimizer": phases.of == OPTIMIZER,
        "operators": program.operators,
    }
    part = np.full(len(trace.host), _PYTHON, np.int8)
    for one in reversed(HOST_PARTS[:_PYTHON]):
        part[nearest(nest, marks[one]) >= 0] = HOST_PARTS.index(one)
    pieces = program.main
    of = of_pieces(pieces, part, _PYTHON)
    found = {one: union(pieces.start[of == n], pieces.end[of == n]) for n, one in enumerate(HOST_PARTS)}
    idle = pieces.only(of == _PYTHON)
    ranks = for_other_ranks(program, idle)
    autograd = subtract(for_autograd(program, phases.evaluation >= 0, idle), ranks)
    found["communication"] = join(found["communication"], ranks)
    found["operators"] = join(found["operators"], autograd)
    found["python"] = subtract(found["python"], join(ranks, autograd))
    return found
