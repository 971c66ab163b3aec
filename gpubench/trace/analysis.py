"""Everything that is told of traces, put together."""

from collections.abc import Mapping, Sequence

from gpubench.trace import ranks
from gpubench.trace.attention import attention
from gpubench.trace.breakdown import breakdowns, device_spans
from gpubench.trace.columns import Trace
from gpubench.trace.communication import collectives
from gpubench.trace.compiled import compiled
from gpubench.trace.copies import copies
from gpubench.trace.critical import critical_path
from gpubench.trace.host_parts import host_parts
from gpubench.trace.idle import idle_by_call, idle_causes, idle_within
from gpubench.trace.intervals import EMPTY, Spans, clip
from gpubench.trace.kernels import fusible, kernels
from gpubench.trace.lanes import timeline
from gpubench.trace.launches import launches
from gpubench.trace.modules import modules
from gpubench.trace.nesting import owner
from gpubench.trace.operators import operators
from gpubench.trace.optimizing import optimizing, zeroing_idle
from gpubench.trace.phases import phase_of, phases
from gpubench.trace.profile import CAUSES, Breakdown, Cause, HostPart, Profile, Rank, Step
from gpubench.trace.program import Program
from gpubench.trace.reservations import missing, notes, unread_of_devices, work_is_missing
from gpubench.trace.stretches import stretches
from gpubench.trace.synchronisations import synchronisations


def analyse(traces: Sequence[Trace]) -> Profile:
    """Traces of one program, one a rank. Raises DataError where they do not belong together."""
    programs = [Program.of(trace) for trace in traces]
    windows, lexicons = [program.window for program in programs], [program.lexicon for program in programs]
    ranks.check(traces, lexicons)
    apart = ranks.apart(traces, windows)
    found = sorted(
        (_rank(program, apart) for program in programs), key=lambda rank: -1 if rank.rank is None else rank.rank
    )
    return Profile(ranks=found, stragglers=ranks.stragglers(traces, windows, lexicons))


def _rank(program: Program, beside: Sequence[str]) -> Rank:
    trace, lexicon, links, window = program.trace, program.lexicon, program.links, program.window
    known = phase_of(program)
    whole = (window.start, window.end)
    sets = None if trace.host_only else device_spans(trace, lexicon)
    causes = idle_causes(trace, lexicon, links, window) if sets else dict.fromkeys(CAUSES, EMPTY)
    parts = host_parts(program, known) if sets is None else {}
    optimizer, launched_by = optimizing(program, known), owner(trace, program.nest, links)
    return Rank(
        label=trace.label,
        rank=trace.rank,
        world_size=trace.world_size,
        device_name=_device_name(trace),
        host_only=trace.host_only,
        start=window.start,
        wall=window.wall,
        step_numbers=[step.number for step in window.steps],
        device=breakdowns(sets, [whole])[0] if sets else None,
        idle=idle_within(causes, [whole])[0] if sets else {},
        host=_lengths(parts, whole),
        critical_path=critical_path(trace, lexicon, links, window) if sets else {},
        steps=_steps(program, breakdowns(sets, _borders(program)) if sets else [], causes, parts),
        phases=phases(program, known),
        modules=modules(program, known),
        operators=operators(program),
        attention=attention(program, known),
        kernels=kernels(trace, lexicon, launched_by, window),
        fusible=fusible(trace, launched_by, window),
        launches=launches(trace, links, window),
        copies=copies(program, known),
        synchronisations=synchronisations(program, known, idle_by_call(trace, lexicon, causes)),
        collectives=collectives(trace, lexicon, window, sets.exposed_communication) if sets else [],
        compiled=compiled(program),
        python=stretches(program, known),
        threads=len(set(trace.host.thread[program.operators & program.inside].tolist())),
        unread=unread_of_devices(trace),
        work_missing=work_is_missing(trace),
        zeroed_gradients=optimizer.zeroed_gradients,
        zeroing=optimizer.zeroing,
        zeroing_idle=zeroing_idle(program, clip(causes["python_and_launch"], *whole)),
        optimizer_kernels=optimizer.kernels,
        optimizer_steps=optimizer.steps,
        timeline=timeline(program, known, causes),
        missing=missing(program),
        notes=[*notes(program), *beside],
    )


def _borders(program: Program) -> list[tuple[int, int]]:
    return [(step.start, step.end) for step in program.window.steps]


def _steps(
    program: Program,
    devices: Sequence[Breakdown],
    causes: Mapping[Cause, Spans],
    parts: Mapping[HostPart, Spans],
) -> list[Step]:
    borders = _borders(program)
    idle = idle_within(causes, borders) if devices else [{} for _ in borders]
    return [
        Step(
            number=step.number,
            start=step.start - program.window.start,
            wall=step.end - step.start,
            device=devices[place] if devices else None,
            idle=idle[place],
            host=_lengths(parts, borders[place]),
        )
        for place, step in enumerate(program.window.steps)
    ]


def _lengths(parts: Mapping[HostPart, Spans], window: tuple[int, int]) -> dict[HostPart, int]:
    return {part: clip(spans, *window).length for part, spans in parts.items()}


def _device_name(trace: Trace) -> str | None:
    """Of the device that the trace's work ran on; None where there is none, or it is not described."""
    found = None if trace.host_only else trace.described(int(trace.device.device[0]))
    return (found and found.name) or None
