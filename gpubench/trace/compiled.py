"""What torch.compile leaves in a trace (2.2 and later): regions that ran, and compilations."""

import re

import numpy as np

from gpubench.trace.columns import Mask
from gpubench.trace.intervals import clip, union
from gpubench.trace.nesting import nearest, nearest_around
from gpubench.trace.profile import Compiled
from gpubench.trace.program import Program

_REGION = r"Torch-Compiled Region"
_COMPILATION = r"(_compile\.)?compile_inner( \(dynamo_timed\))?$"
_COMPILING = rf"{_COMPILATION}|entire_(frame|backward)_compile( |$)|.*\(dynamo_timed\)$"
_ANY = rf"{_REGION}|CompiledFunction|TorchDynamo Cache Lookup|## Call CompiledFxGraph|inductor::|{_COMPILING}"


def compiled(program: Program) -> Compiled | None:
    """Compiled regions, and time in nanoseconds that the window spent compiling; None for an eager program.

    Regions with different numbers are different graphs of one step. What torch.compile is applied to apart, as each
    block of a model, counts as one more region too: from a trace the two cannot be told apart.
    """
    if not _matching(program, _ANY).any():
        return None
    host, window = program.trace.host, program.window
    compiling = _matching(program, _COMPILING)
    regions = _regions_of_a_step(program)
    return Compiled(
        regions=regions,
        graph_breaks=max(0, regions - 1),
        compilations=_compilations(program),
        compiling=clip(union(host.start[compiling], host.end[compiling]), window.start, window.end).length,
    )


def _compilations(program: Program) -> int:
    """Slices are nested, under two names for one compilation, so those within another are not counted."""
    found = _matching(program, _COMPILATION)
    outer = nearest_around(program.nest, nearest(program.nest, found)) < 0
    return int((found & outer & program.inside).sum())


def _regions_of_a_step(program: Program) -> int:
    """The most graphs with different numbers that began in one step."""
    host = program.trace.host
    regions = _matching(program, _REGION) & program.inside
    edges = np.array([step.start for step in program.window.steps], np.int64)
    steps = np.searchsorted(edges, host.start[regions], side="right")
    graphs = np.unique(np.stack((steps, host.name[regions])), axis=1)
    return int(np.bincount(graphs[0]).max(initial=0))


def _matching(program: Program, pattern: str) -> Mask:
    match = re.compile(pattern).match
    names = program.trace.names
    known = np.fromiter((match(name) is not None for name in names), np.bool_, len(names))
    return known[program.trace.host.name]
