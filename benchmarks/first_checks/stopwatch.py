"""Is the step that gpubench measures that of the program's own events, on the first and on the last GPU?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import bars
from bars import Bar

from first_checks.here import Failed, Here, Run, within
from gpubench import units

ROUNDS = 2
"""Fresh processes with and without the probe, in turns."""
TIME = 0.01
"""The bar for times, as a share of the step."""
PHASE = 0.02
MEMORY = 0.01
PHASES = ("forward", "backward", "optimizer")
COST = 0.02
TINY = ("--width=16", "--layers=2", "--steps=40")


def check(here: Here) -> Iterator[Bar]:
    names = [f"cuda:{number}" for number in sorted({0, len(here.gpus) - 1})]
    for name in names:
        if here.wants(name):
            yield from on_device(here, name)
    if len(names) == 1:
        yield bars.skipped("the last GPU, without set_device", "one GPU is visible")


def on_device(here: Here, device: str) -> Iterator[Bar]:
    arguments = (f"--device={device}", *(TINY if here.tiny else ()))
    ratios = []
    try:
        for number in range(1 if here.tiny else ROUNDS):
            before = None if number % 2 or here.tiny else here.alone("trained.py", *arguments)
            run, own = here.measured("trained.py", *arguments)
            if number == 0:
                yield from agreement(device, run, own)
            if not here.tiny:
                free = before or here.alone("trained.py", *arguments)
                ratios.append(median(own["totals"]) / median(free["totals"]))
    except Failed as failed:
        yield blamed(here, arguments, device, failed)
        return
    yield cost(device, ratios)


def blamed(here: Here, arguments: Sequence[str], what: str, failed: Failed) -> Bar:
    """Judges a failure: a program that fails without gpubench too shows nothing of gpubench."""
    try:
        here.alone("trained.py", *arguments)
    except Failed as alone:
        return bars.skipped(what, f"the program fails without gpubench too: {alone}")
    return bars.holds(f"{what}: the run completes", str(failed), "it does", good=False)


def agreement(what: str, run: Run, own: Any, rank: int = 0) -> Iterator[Bar]:
    """Yields what holds of a rank of a measured run and of what its program measured of itself."""
    steps, last = run.steps(rank), run.last(rank)
    yield bars.every(f"{what}: updates that are counted", len(steps), own["updates"])
    steady = within(steps, last)
    if not steady:
        yield bars.holds(f"{what}: steps that are measured", "none", "some", good=False)
        return
    time = fmean(within(own["totals"], last))
    yield deviation(f"{what}: time of a step", fmean(step["total"] for step in steady), time)
    if "samples" in own:
        throughput = run.metrics().get("throughput")
        yield deviation(f"{what}: time of a sample", 1 / throughput if throughput else 0.0, time / own["samples"])
    if "peak" in own:
        yield peak_memory(what, run.metrics().get("peak_memory_allocated"), own["peak"])
    off = phases_off([step["phases"] for step in steady], within(own["parts"], last))
    if off:
        most = max(off, key=off.__getitem__)
        what = f"{what}: {most}, the phase that is most wrong, of the step"
        yield bars.at_most(what, off[most] / time, PHASE, "{:.1%}")


def phases_off(found: Sequence[Mapping[str, float]], own: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns by how many seconds the mean of each phase differs from that of the program's own part."""
    return {
        phase: abs(fmean(one.get(phase, 0.0) for one in found) - fmean(one[phase] for one in own))
        for phase in PHASES
        if phase in own[0]
    }


def deviation(what: str, found: float, own: float, bar: float = TIME) -> Bar:
    """Judges a time by the one that the program's own events give."""
    detail = f"{found * 1e3:.4g} ms, the program's {own * 1e3:.4g} ms"
    return bars.at_most(f"{what}, from the program's own events", abs(found / own - 1), bar, "{:.2%}", detail)


def peak_memory(what: str, found: float | None, own: int) -> Bar:
    """Judges a peak in bytes by what the allocator of the program's own device says."""
    what = f"{what}: peak memory, from the allocator of the device"
    if found is None:
        return bars.holds(what, f"unknown, the program's {units.size(own)}", "known", good=False)
    detail = f"{units.size(found)}, the program's {units.size(own)}"
    return bars.at_most(what, abs(found / own - 1), MEMORY, "{:.2%}", detail)


def cost(device: str, ratios: Sequence[float]) -> Bar:
    """Judges how much slower the program is with the probe, by the range of the rounds."""
    what = f"{device}: step with the probe over without"
    if not ratios:
        return bars.skipped(what, "programs as small as these show no speed")
    return bars.near_one(
        f"{what}, range of {len(ratios)} rounds",
        math.exp(fmean(map(math.log, ratios))),
        (min(ratios), max(ratios)),
        COST,
    )
