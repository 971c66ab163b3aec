"""From the allocations of a program to what fills its memory, phase by phase."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory.allocator import Rules
from gpubench.memory.footprint import (
    CATEGORIES,
    Amounts,
    Footprint,
    Holder,
    ModuleFootprint,
    Peak,
    PhaseFootprint,
    Source,
    Stage,
)
from gpubench.memory.history import Allocation, History, Phase
from gpubench.memory.moments import Moments, Span, moments, shortfall
from gpubench.memory.timeline import timeline

MODULES = 200
OTHERS = "(others)"
"""Path of what the modules beyond `MODULES` hold."""
HOLDERS = 30
NOTABLE = 0.01
"""Of the peak: where the readings say less than the history by more than this, it is told."""

_Times = dict[tuple[Stage, Phase], list[Span]]


def footprint(
    history: History,
    *,
    source: Source,
    device: str | None,
    capacity: int | None,
    rank: int = 0,
    rules: Rules | None = None,
    other: int = 0,
    notes: Sequence[str] = (),
) -> Footprint:
    """What a history's allocations add up to, in bytes. Raises DataError where it holds none.

    With `rules`, for a prediction, what is allocated and reserved follows from them; else from the history's readings.
    `other` is what the device holds beside the allocator; `capacity` is the device's. The peak is where most is
    allocated, the first of equals.
    """
    if not history.allocations:
        raise DataError(
            f"the {source} history holds no allocations",
            "record from before the model is built until after the second step",
        )
    found = moments(history, source, rules, other)
    stages = _stages(found.spans)
    times = _times(found.spans, stages)
    tops = [max((found.top(span) for span in spans), key=found.allocated.__getitem__) for spans in times.values()]
    ends = [spans[-1].last for spans in times.values()]
    highest = int(np.argmax(found.allocated))
    drawn, places = timeline(found, [highest, *tops])
    [amounts] = found.amounts([highest])
    stage, span = next(pair for pair in zip(stages, found.spans, strict=True) if highest <= pair[1].last)
    held = [history.allocations[place] for place in found.held(highest)]
    sizes = found.lives.size[found.held(highest)].tolist()
    return Footprint(
        source=source,
        device=device,
        capacity=capacity,
        rank=rank,
        phases=[
            PhaseFootprint(stage, phase, peak, found.level(top), end)
            for (stage, phase), top, peak, end in zip(
                times, tops, found.amounts(tops), found.amounts(ends), strict=True
            )
        ],
        peak=Peak(stage, span.phase, amounts, found.level(highest), places[highest]),
        modules=_modules(held, sizes),
        holders=_holders(held, sizes),
        timeline=drawn,
        allocator=found.counts,
        late=history.late,
        truncated=history.truncated,
        truncation_proven=history.truncation_proven,
        notes=[*history.notes, *notes, *_doubts(history, found, rules)],
    )


def _stages(spans: Sequence[Span]) -> list[Stage]:
    """One for each span. What belongs to no step counts for the step before it."""
    found: list[Stage] = []
    step = None
    for span in spans:
        step = step if span.step is None else span.step
        found.append("setup" if step is None else "first" if step == 0 else "steady")
    return found


def _times(spans: Sequence[Span], stages: Sequence[Stage]) -> _Times:
    """The phases that are told of, in order, and the times each came up: in the set-up, in step 0, and in the last
    whole step after it. A mark behind the last event only closes the history."""
    told, found = (0, _steady_step(spans)), defaultdict(list)
    for stage, span in zip(stages, spans, strict=True):
        belongs = stage == "setup" if span.step is None else span.step in told
        if belongs and (span.events or span.phase != "unknown"):
            found[stage, span.phase].append(span)
    return found


def _steady_step(spans: Iterable[Span]) -> int | None:
    """The last step; the one before it where it does not come to the phase in which that one ended."""
    phases: dict[int, list[Phase]] = defaultdict(list)
    for span in spans:
        if span.step is not None:
            phases[span.step] += [span.phase] if span.phase != "unknown" else []
    steps = list(phases)
    if len(steps) > 1 and not set(phases[steps[-2]][-1:]) <= set(phases[steps[-1]]):
        steps.pop()
    return steps[-1] if steps else None


def _modules(held: Iterable[Allocation], sizes: Iterable[int]) -> list[ModuleFootprint]:
    by_path: dict[str, Counter[str]] = defaultdict(Counter)
    for one, size in zip(held, sizes, strict=True):
        by_path[one.module][one.category] += size
    paths = sorted(by_path, key=lambda path: by_path[path].total(), reverse=True)
    found = [(path, by_path[path]) for path in paths[:MODULES]]
    rest = sum((by_path[path] for path in paths[MODULES:]), Counter[str]())
    found += [(OTHERS, rest)] if rest else []
    return [ModuleFootprint(path, _in_order(amounts)) for path, amounts in found if amounts.total()]


def _in_order(amounts: Mapping[str, int]) -> Amounts:
    return {category: amounts[category] for category in CATEGORIES if amounts[category]}


def _holders(held: Iterable[Allocation], sizes: Iterable[int]) -> list[Holder]:
    groups: dict[tuple[str, str, str, str, str], list[int]] = defaultdict(list)
    for one, size in zip(held, sizes, strict=True):
        if size:
            groups[one.category, one.module, one.operator, one.shape, one.where].append(size)
    found = sorted(
        (Holder(*alike, count=len(group), size=sum(group)) for alike, group in groups.items()),
        key=lambda holder: holder.size,
        reverse=True,
    )
    rest = found[HOLDERS:]
    if not rest:
        return found
    count, size = sum(holder.count for holder in rest), sum(holder.size for holder in rest)
    return [*found[:HOLDERS], Holder("", "", "", "", "", count=count, size=size)]


def _doubts(history: History, found: Moments, rules: Rules | None) -> Iterator[str]:
    lacking, span = shortfall(found, [] if rules else history.readings)
    if lacking > NOTABLE * found.allocated.max():
        yield (
            f"in a {span.phase} phase the history holds {units.size(lacking)} more than the allocator counted: "
            "what it holds is shown"
        )
