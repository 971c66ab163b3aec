"""Finds the steps of a server of language models: passes that read prompts, and passes that make one more token each.

vLLM, SGLang and TensorRT-LLM mark each pass by an annotation, whose name may say what it does.
"""

import re
from dataclasses import dataclass
from statistics import median

import numpy as np

from gpubench import units
from gpubench.trace.columns import SliceKind
from gpubench.trace.slices import ProgramSlices

_PASS = re.compile(
    r"execute_model\b|execute_(new|context)_\d|step\[(EXTEND|PREFILL|DECODE|MIXED)|\[Executor\] _forward_step \d"
)
# vLLM counts the requests that are new or read their prompt, TensorRT-LLM those of the context phase.
_PREFILL = re.compile(
    r"execute_(new|context)_[1-9]|step\[(EXTEND|PREFILL|MIXED)|\[Executor\] _forward_step \d+: [1-9]\d* ctx"
)
_DECODE = re.compile(r"execute_(new|context)_0|step\[DECODE|\[Executor\] _forward_step \d+: 0 ctx")
FEWEST = 2
LONGER = 2.0
"""Where names do not say it, the first pass reads the prompt if it takes so many times as long as the median one."""


@dataclass(frozen=True)
class Passes:
    """The time of each pass in nanoseconds, from its begin on the CPU to that of the next one, or to its own end."""

    prefill: list[int]
    decode: list[int]
    unknown: list[int]
    """Passes of which it is unknown what they do."""


def passes(program: ProgramSlices) -> Passes | None:
    """Returns the passes within the window; None for fewer than FEWEST."""
    trace, cpu = program.trace, program.trace.cpu
    marked = trace.names_where(lambda name: _PASS.match(name) is not None)
    inside = (cpu.end > program.window.start) & (cpu.start < program.window.end)
    slices = np.flatnonzero(marked[cpu.name] & (cpu.kind == SliceKind.ANNOTATION) & inside)
    slices = slices[np.argsort(cpu.start[slices], kind="stable")]
    if len(slices):  # a name may be marked again within the same pass
        reach = np.maximum.accumulate(cpu.end[slices])
        slices = slices[np.concatenate(([True], cpu.start[slices[1:]] >= reach[:-1]))]
    if len(slices) < FEWEST:
        return None
    ends = np.append(cpu.start[slices[1:]], max(int(cpu.end[slices[-1]]), program.window.end))
    found = Passes([], [], [])
    for name, time in zip(cpu.name[slices].tolist(), (ends - cpu.start[slices]).tolist(), strict=True):
        said = trace.names[name]
        kind = found.prefill if _PREFILL.match(said) else found.decode if _DECODE.match(said) else found.unknown
        kind.append(time)
    first, *others = found.unknown or [0]
    if others and not found.prefill and not found.decode and first >= LONGER * median(others):
        return Passes([first], others, [])
    return found


def in_words(found: Passes) -> str:
    """Says how many passes of each kind there are, and what they take."""
    kinds = {"prefill": found.prefill, "decode": found.decode, "step": found.unknown}
    said = [_times(units.counted(len(times), name), times) for name, times in kinds.items() if times]
    tokens = "; a prefill is the time to the first token without waiting, a decode that of each further one"
    return f"a server of language models: {units.listed(said)}{tokens if found.decode else ''}"


def _times(counted: str, times: list[int]) -> str:
    least, middle, most = (units.seconds(one / 1e9) for one in (min(times), median(times), max(times)))
    return f"{counted} of {middle}" if len(times) == 1 else f"{counted} of {least} to {most} (median {middle})"
