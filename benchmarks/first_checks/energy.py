"""Do the energy counter, the sampled power and what gpubench reports agree, and are the clocks those of a busy GPU?"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import bars
from bars import Bar

from first_checks.here import Failed, Here
from gpubench.devices import ask, open_nvml

ENERGY = 0.05
SETTLING = 1.5
"""Seconds after which the power that NVML reports, a mean over the last second of some GPUs, is that of the load."""
CLOCK = 0.5
"""The least SM clock of a busy GPU, as a share of its highest, for which no reason has to be named."""


def check(here: Here) -> Iterator[Bar]:
    index = here.gpus[0].index
    if index is None:
        yield bars.skipped("energy and clocks", "NVML does not know this GPU")
        return
    size = ("--width=64", "--seconds=3") if here.tiny else ("--seconds=9",)
    try:
        run, _ = here.measured("trained.py", *size, options=("--measurement.telemetry_interval=0.1",))
    except Failed as failed:
        yield bars.holds("energy: the run completes", str(failed), "it does", good=False)
        return
    window = run.window()
    if window is None:
        yield bars.holds("energy: steps that are measured", "none", "some", good=False)
        return
    samples = [
        (line["time"], gpu)
        for line in run.lines("telemetry.jsonl")
        for gpu in line["gpus"]
        if gpu["index"] == index and window["start"] + SETTLING <= line["time"] <= window["end"]
    ]
    yield from judged(samples, run.metrics(), highest_clock(index))


def highest_clock(index: int) -> int | None:
    """The highest SM clock of a GPU in MHz; None if the driver does not tell."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
        found = ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM) if handle else None
        return int(found) if found else None
    finally:
        nvml.nvmlShutdown()


def judged(samples: Sequence[tuple[float, Any]], metrics: dict[str, float], highest: int | None) -> Iterator[Bar]:
    """Judges the samples of one GPU, each with its time, in which it was busy."""
    power = [(time, gpu["power_w"], gpu["energy_j"]) for time, gpu in samples if {"power_w", "energy_j"} <= gpu.keys()]
    if len(power) < 2:
        yield bars.skipped("energy", "the driver reports no power or no energy of this GPU")
    else:
        counted = power[-1][2] - power[0][2]
        summed = sum((later - time) * (watts + after) / 2 for (time, watts, _), (later, after, _) in pairwise(power))
        yield _near("energy: power over time, from the counter", summed, counted, "J")
        mean = counted / (power[-1][0] - power[0][0])
        told = metrics["energy_per_sample"] * metrics["throughput"] if "energy_per_sample" in metrics else 0.0
        yield _near("energy: J/sample times samples/s, from the counter of the GPU that was used", told, mean, "W")
    clocks = [(gpu.get("sm_clock_mhz"), gpu.get("throttle_reasons")) for _, gpu in samples]
    if not highest or not clocks:
        yield bars.skipped("clocks under load", "the driver reports no clocks of this GPU")
        return
    explained = [clock is not None and (clock >= CLOCK * highest or bool(reasons)) for clock, reasons in clocks]
    what = f"clocks under load: samples of at least {CLOCK:.0%} of {highest} MHz, or with a reason"
    yield bars.every(what, sum(explained), len(explained))


def _near(what: str, found: float, wanted: float, unit: str) -> Bar:
    detail = f"{found:.4g} {unit}, {wanted:.4g} {unit}"
    return bars.at_most(what, abs(found / wanted - 1) if wanted else 1.0, ENERGY, "{:.1%}", detail)
