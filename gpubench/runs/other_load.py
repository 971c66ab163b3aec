"""How busy other processes kept the machine while the steps of a run were timed."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from gpubench.telemetry import CpuSample, TelemetrySample, within

IDLE_CORES = 0.25  # cores that background tasks use on an otherwise idle machine
IDLE_SHARE = 0.02  # the same as a share of all cores, for machines with many cores
STEAL = 0.02  # share of all CPU time below which stolen time is ignored
MOST_NAMED = 5  # largest number of other processes that are named
LEAST_NAMED = 0.02  # cores; a process that uses less is not named


class OtherLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the machine by other processes during a run's steady steps. Unknown values are None."""

    cores: float | None
    """The mean number of CPU cores that other processes kept busy."""
    machine_cores: int | None
    """The number of logical CPU cores of the machine."""
    processes: dict[str, float]
    """The cores used by the busiest other processes, by name, as far as this process can see them."""
    steal: float | None
    """The share of all CPU time that the hypervisor gave to other guests."""
    gpu_share: float | None
    """The share of checks, before and after each repeat's steady steps, in which other processes used the GPUs."""
    slowdown: float | None
    """The possible slowdown of a step on the CPU, as a fraction; None on a GPU or on an idle machine.

    It is the smaller of two upper limits. One assumes that the workers would have used the cores that other processes
    used: their number divided by the number of cores that the workers used. The other one assumes that the waits of
    the workers' threads for a core followed each other. Time that a hypervisor gave to other guests is added.
    """

    @property
    def busy(self) -> bool:
        """Whether other processes used more CPU time than the background tasks of an idle machine."""
        return self.cores is not None and self.cores > max(IDLE_CORES, IDLE_SHARE * (self.machine_cores or 0))


def other_load(
    samples: Sequence[TelemetrySample],
    windows: Sequence[tuple[float, float]],
    machine_cores: int | None,
    *,
    loaders: bool,
    on_cpu: bool,
) -> OtherLoad | None:
    """Returns the load of other processes in the windows; None if no sample lies in them.

    Other processes use the busy cores that the ranks do not use. If the run also has data `loaders`, which are
    processes too, only the processes that can be listed are counted.
    """
    steady = within(samples, windows)
    if not steady:
        return None
    cpus = [sample.cpu for sample in steady if sample.cpu]
    listed = [sum(cpu.processes.values()) for cpu in cpus if cpu.processes is not None]
    load = OtherLoad(
        cores=_mean(listed if loaders else [other_cores(cpu, machine_cores) for cpu in cpus if machine_cores]),
        machine_cores=machine_cores,
        processes=_named(steady) or _named(samples),
        steal=_mean([cpu.steal for cpu in cpus]),
        gpu_share=_mean(_on_gpus(samples, windows)),
        slowdown=None,
    )
    own, steal = _mean([cpu.worker_cpu for cpu in cpus]), load.steal or 0.0
    if not (on_cpu and own and machine_cores) or not (load.busy or steal > STEAL):
        return load
    slowdown, waited = max(0.0, load.cores or 0.0) / own, _mean([cpu.waited for cpu in cpus])
    if waited is not None and waited < 1:
        slowdown = min(slowdown, waited / (1 - waited))
    return msgspec.structs.replace(load, slowdown=slowdown + steal * machine_cores / max(1.0, own))


def _on_gpus(samples: Iterable[TelemetrySample], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Returns 1 for each check that found other processes on the GPUs, and 0 for each other one.

    The checks are those in the windows, and the last one before and the first one after each window.
    """
    checks: list[tuple[float, float]] = []
    for sample in samples:
        counts = [gpu.other_processes for gpu in sample.gpus if gpu.other_processes is not None]
        checks += [(sample.time, float(any(counts)))] if counts else []
    found = []
    for start, end in windows:
        first = max(0, bisect_left(checks, start, key=lambda check: check[0]) - 1)
        last = bisect_right(checks, end, key=lambda check: check[0]) + 1
        found += [present for _, present in checks[first:last]]
    return found


def together(loads: Sequence[OtherLoad]) -> OtherLoad | None:
    """Returns the mean of the loads of several runs; None without runs."""
    if len(loads) < 2:
        return loads[0] if loads else None
    means = {
        name: _mean([getattr(load, name) for load in loads]) for name in ("cores", "steal", "gpu_share", "slowdown")
    }
    cores = max((load.machine_cores for load in loads if load.machine_cores), default=None)
    return OtherLoad(machine_cores=cores, processes=busiest([load.processes for load in loads]), **means)


def _named(samples: Iterable[TelemetrySample]) -> dict[str, float]:
    return busiest([sample.cpu.processes for sample in samples if sample.cpu and sample.cpu.processes is not None])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def other_cores(cpu: CpuSample, cores: int) -> float | None:
    """Returns the number of busy cores that the workers do not use."""
    return None if cpu.load is None or cpu.worker_cpu is None else cpu.load * cores - cpu.worker_cpu


def busiest(listings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean cores by process name, without processes below LEAST_NAMED, the largest first."""
    total: Counter[str] = Counter()
    for cores in listings:
        total.update(cores)
    means = {name: round(busy / len(listings), 3) for name, busy in total.most_common(MOST_NAMED)}
    return {name: busy for name, busy in means.items() if busy >= LEAST_NAMED}
