"""Samples the state of the hardware during a run. The host takes the samples, never a timed process.

A sample costs the host about 0.1 ms of CPU time with one worker and no GPU, and the cost is recorded with it. While
other processes keep the CPU busy, the host also reads how long each thread of the workers waited for a core, which
takes about 0.04 ms per thread, and lists all processes, on which it spends at most a hundredth of a core. It asks NVML
for the processes on a GPU only between repeats, because that query takes a driver lock that programs need to launch
kernels. A value that cannot be read is left out.
"""

import os
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import psutil

from gpubench.devices import ask, open_nvml
from gpubench.text import spelled_out

# NVML's clocks event reasons (nvml.h), without None and GpuIdle, because an idle GPU is not throttled.
CLOCK_REASONS = {
    0x002: "ApplicationsClocksSetting",
    0x004: "SwPowerCap",
    0x008: "HwSlowdown",
    0x010: "SyncBoost",
    0x020: "SwThermalSlowdown",
    0x040: "HwThermalSlowdown",
    0x080: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}
IDLE_CORES = 0.25  # cores that background tasks use on an otherwise idle machine
IDLE_SHARE = 0.02  # the same as a share of all cores, for machines with many cores
STEAL = 0.02  # share of all CPU time below which stolen time is ignored
LISTING_COST = 0.01  # largest share of a core for listing processes
MOST_NAMED = 5  # largest number of other processes that are named
LEAST_NAMED = 0.02  # cores; a process that uses less is not named
PROC = Path("/proc")


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The state of one GPU. Values that NVML does not give are None. `index` is that of NVML, as in `devices.Gpu`.

    `energy_j` is the energy used since the driver was loaded; the driver updates it every 20 to 100 ms. `utilization`
    is the fraction of the driver's last averaging period in which a kernel ran. `other_processes` is the number of
    compute processes on the GPU besides the host and the workers; it is None if the sample did not count them.

    A GPU in MIG mode has instances that others may use. NVML gives power, energy, memory, utilization and processes of
    the whole GPU, which are then left out.
    """

    index: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: int | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    throttle_reasons: list[str] | None = None
    other_processes: int | None = None


class CpuSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The load of the machine's CPU, and the workers' part of it, since the previous sample.

    `load` and `steal` are the fractions of all logical CPUs' time that were busy, and that the hypervisor gave to other
    guests. `worker_cpu` is the number of cores that the workers used, `context_switches` the number of involuntary
    switches of their main threads, and `memory_rss_bytes` their resident memory now; these are None while there is no
    worker. `processes` maps the names of the busiest other processes to the cores that they used since the last
    listing; it is None if the processes were not listed. `waited` is the mean number of threads of the workers and of
    their children that were ready to run and waited for a core, since the last sample that counted them; it is counted
    only while other processes keep the CPU busy, and None without Linux's scheduler statistics.
    """

    load: float | None = None
    steal: float | None = None
    worker_cpu: float | None = None
    context_switches: int | None = None
    memory_rss_bytes: int | None = None
    processes: dict[str, float] | None = None
    waited: float | None = None


class TelemetrySample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of telemetry.jsonl.

    `time` is in seconds since the epoch. `cost` is the host's CPU time for the sample in seconds, and `wall` its
    duration in seconds, waits for the driver included.
    """

    time: float
    cost: float
    wall: float | None = None
    gpus: list[GpuSample] = []
    cpu: CpuSample | None = None


class Telemetry:
    """Samples the GPUs `gpu_indices` (NVML's numbers), the CPU and the watched workers about every `interval` seconds.

    It has no thread: the host calls `due()` and `sample()` between two events of the workers.
    """

    def __init__(self, gpu_indices: Sequence[int], interval: float, now: Callable[[], float] = time.time) -> None:
        """`now` is the clock that dates the samples, in seconds since the epoch."""
        self.interval = interval
        self._now = now
        self._next_due = float("-inf")
        self._nvml: Any = open_nvml() if gpu_indices else None
        self._handles: dict[int, Any] = {}
        if self._nvml:
            found = {index: ask(self._nvml, "nvmlDeviceGetHandleByIndex", index) for index in gpu_indices}
            self._handles = {index: handle for index, handle in found.items() if handle is not None}
        self._shared = {index for index, handle in self._handles.items() if self._is_partitioned(handle)}
        self._cpu_times: Any = psutil.cpu_times()
        self._workers: dict[int, _Worker] = {}
        self._processes = _Processes()

    def watch(self, pids: Iterable[int]) -> None:
        """Replaces the watched workers by `pids`. A process that has ended already is skipped."""
        workers: dict[int, _Worker] = {}
        for pid in pids:
            with suppress(psutil.Error):
                workers[pid] = self._workers.get(pid) or _Worker(pid)
        self._workers = workers

    def due(self, now: float) -> bool:
        """Returns whether a sample is due at `now`, in seconds of `time.monotonic()`."""
        return now >= self._next_due

    def sample(self, *, processes: bool = False) -> TelemetrySample:
        """Takes a sample. It counts the processes on the GPUs only if `processes` is set.

        Missed samples are not made up for: the next one is due `interval` seconds from now.
        """
        called = time.monotonic()
        self._next_due = called + self.interval
        began, now = time.thread_time(), self._now()
        gpus = [self._sample_gpu(index, handle) for index, handle in self._handles.items()]
        if processes:
            counted = [
                None if index in self._shared else self._other_processes(handle)
                for index, handle in self._handles.items()
            ]
            gpus = [msgspec.structs.replace(gpu, other_processes=n) for gpu, n in zip(gpus, counted, strict=True)]
        cpu = self._sample_cpu()
        cost, wall = time.thread_time() - began, time.monotonic() - called
        return TelemetrySample(time=now, cost=cost, wall=wall, gpus=gpus, cpu=cpu)

    def close(self) -> None:
        """Releases the driver. No sample may be taken afterwards."""
        if self._nvml:
            ask(self._nvml, "nvmlShutdown")
            self._nvml, self._handles = None, {}

    def _is_partitioned(self, handle: Any) -> bool:
        """Returns whether a GPU is in MIG mode. NVML gives the mode as [current, after the next reset]."""
        mode = ask(self._nvml, "nvmlDeviceGetMigMode", handle)
        return bool(mode and mode[0])

    def _sample_gpu(self, index: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        energy_mj = power_mw = rates = memory = None
        if index not in self._shared:
            energy_mj = ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)  # read first, at the sample's time
            power_mw = ask(nvml, "nvmlDeviceGetPowerUsage", handle)
            rates = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
            memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        reasons = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # the name before driver 535
            reasons = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            index=index,
            sm_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            power_w=None if power_mw is None else power_mw / 1e3,
            energy_j=None if energy_mj is None else energy_mj / 1e3,
            temperature_c=ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            throttle_reasons=None
            if reasons is None
            else [name for bit, name in CLOCK_REASONS.items() if reasons & bit],
        )

    def _other_processes(self, handle: Any) -> int | None:
        running = ask(self._nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
        if running is None:
            return None
        others = {process.pid for process in running} - self._workers.keys() - {os.getpid()}
        # In a container some drivers give the host's process ids, so that a worker looks like another process.
        return len(others) if all(psutil.pid_exists(pid) for pid in others) else None

    def _sample_cpu(self) -> CpuSample:
        before, self._cpu_times = self._cpu_times, psutil.cpu_times()
        spent = {name: getattr(self._cpu_times, name) - getattr(before, name) for name in before._fields}
        # Linux counts guests' time in user and nice already.
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
        idle = sum(spent.get(name, 0.0) for name in ("idle", "iowait", "steal"))
        steal = spent.get("steal")
        alive = []
        for worker in self._workers.values():
            with suppress(psutil.Error):
                alive.append(worker.usage())
        cpu = CpuSample(
            load=_fraction(total - idle, total),
            steal=None if steal is None else _fraction(steal, total),
            worker_cpu=sum(cores for cores, _, _ in alive) if alive else None,
            context_switches=sum(switches for _, switches, _ in alive) if alive else None,
            memory_rss_bytes=sum(rss for _, _, rss in alive) if alive else None,
        )
        count = psutil.cpu_count() or 1
        other = _other_cores(cpu, count)
        if other is None or other <= IDLE_CORES:
            return cpu
        waits = [waited for worker in self._workers.values() if (waited := worker.waited()) is not None]
        own = {os.getpid(), *self._workers}
        listed = self._processes.busiest_except(own) if self._processes.due() else None
        return msgspec.structs.replace(cpu, processes=listed, waited=sum(waits) if waits else None)


class _Worker:
    """A watched worker process, and its counters at their last reading."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._read = time.monotonic()
        self._cpu, self._switches, _ = self._counters()
        self._waits: dict[str, int] = {}
        self._waits_read = 0.0

    def usage(self) -> tuple[float, int, int]:
        """Returns the cores used and involuntary context switches since the last call, and the resident bytes now."""
        read, cpu, switches = self._read, self._cpu, self._switches
        self._cpu, self._switches, rss = self._counters()
        self._read = time.monotonic()
        return (self._cpu - cpu) / (self._read - read), self._switches - switches, rss

    def _counters(self) -> tuple[float, int, int]:
        with self._process.oneshot():
            times, switches = self._process.cpu_times(), self._process.num_ctx_switches()
            return times.user + times.system, switches.involuntary, self._process.memory_info().rss

    def waited(self) -> float | None:
        """Returns the mean number of threads of the process and of its children that waited for a core since the last
        call; None in the first one, and without Linux's scheduler statistics.
        """
        before, since = self._waits, self._waits_read
        self._waits, self._waits_read = _waits(self._process.pid), time.monotonic()
        if not before or not self._waits:
            return None
        grown = sum(max(0, waited - before.get(thread, 0)) for thread, waited in self._waits.items())
        return grown / 1e9 / (self._waits_read - since)


def _waits(pid: int) -> dict[str, int]:
    """Returns the nanoseconds that each thread of a process and of its children has waited for a core while it was
    ready to run: the second number of /proc/PID/task/TID/schedstat (proc_pid_schedstat(5)).
    """
    found: dict[str, int] = {}
    with suppress(OSError):
        children = (PROC / f"{pid}/task/{pid}/children").read_text().split()
        for process in (str(pid), *children):
            for statistics in PROC.glob(f"{process}/task/*/schedstat"):
                with suppress(OSError, ValueError, IndexError):  # the thread may have ended by now
                    found[statistics.parent.name] = int(statistics.read_text().split()[1])
    return found


class _Processes:
    """The CPU time of every process of the machine at the last listing; empty without Linux's /proc."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._used, _ = self._list()

    def due(self) -> bool:
        """Returns whether another listing keeps within LISTING_COST."""
        return time.monotonic() - self._listed >= self._cost / LISTING_COST

    def busiest_except(self, own: set[int]) -> dict[str, float] | None:
        """Returns the cores used since the last listing by the busiest processes that do not descend from `own`.

        The keys are process names. The result is None without /proc.
        """
        before, since = self._used, self._listed
        self._used, parents = self._list()
        if not self._used:
            return None
        cores: defaultdict[str, float] = defaultdict(float)
        for process, (name, used) in self._used.items():
            if not _descends(process[0], own, parents):
                cores[name] += (used - before.get(process, (name, 0.0))[1]) / max(self._listed - since, 1e-6)
        return _busiest([cores])

    def _list(self) -> tuple[dict[tuple[int, str], tuple[str, float]], dict[int, int]]:
        """Returns {(pid, start time): (name, seconds of CPU time)} and {pid: pid of the parent}."""
        self._listed, began = time.monotonic(), time.thread_time()
        found: dict[tuple[int, str], tuple[str, float]] = {}
        parents: dict[int, int] = {}
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # the process may have ended by now
                head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
                fields, pid = tail.split(), int(folder.name)
                parents[pid] = int(fields[1])
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[pid, fields[19]] = (
                    spelled_out(head.partition("(")[2]),
                    seconds,
                )  # a name may contain any character
        self._cost = time.thread_time() - began
        return found, parents


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):  # bounded, because pids that are reused during the listing may form a cycle
        if pid in ancestors or pid not in parents:
            break
        pid = parents[pid]
    return pid in ancestors


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


def of_gpus(samples: Sequence[TelemetrySample], gpus: Container[int]) -> list[TelemetrySample]:
    """Returns the samples with the state of the GPUs `gpus` (NVML's numbers) only."""
    return [
        msgspec.structs.replace(sample, gpus=[gpu for gpu in sample.gpus if gpu.index in gpus]) for sample in samples
    ]


def within(samples: Iterable[TelemetrySample], windows: Sequence[tuple[float, float]]) -> list[TelemetrySample]:
    """Returns the samples taken in any of the windows, which are (start, end) in seconds since the epoch."""
    return [sample for sample in samples if any(start <= sample.time <= end for start, end in windows)]


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
        cores=_mean(listed if loaders else [_other_cores(cpu, machine_cores) for cpu in cpus if machine_cores]),
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
    """Returns, for each check of the processes on the GPUs, 1 if there were other processes and 0 if not.

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


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a run's samples, and their mean and largest duration in seconds of wall time."""

    samples: int
    mean: float
    largest: float


def sampling(samples: Iterable[TelemetrySample]) -> Sampling | None:
    """Returns the duration of the samples; None if no sample recorded its duration."""
    walls = [sample.wall for sample in samples if sample.wall is not None]
    return Sampling(samples=len(walls), mean=fmean(walls), largest=max(walls)) if walls else None


def together(loads: Sequence[OtherLoad]) -> OtherLoad | None:
    """Returns the mean of the loads of several runs; None without runs."""
    if len(loads) < 2:
        return loads[0] if loads else None
    means = {
        name: _mean([getattr(load, name) for load in loads]) for name in ("cores", "steal", "gpu_share", "slowdown")
    }
    cores = max((load.machine_cores for load in loads if load.machine_cores), default=None)
    return OtherLoad(machine_cores=cores, processes=_busiest([load.processes for load in loads]), **means)


def _named(samples: Iterable[TelemetrySample]) -> dict[str, float]:
    """Returns the mean cores that the busiest processes used, by name, over the samples that list processes."""
    return _busiest([sample.cpu.processes for sample in samples if sample.cpu and sample.cpu.processes is not None])


def _busiest(listings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean cores by process name, without processes below LEAST_NAMED, the largest first."""
    total: Counter[str] = Counter()
    for cores in listings:
        total.update(cores)
    means = {name: round(busy / len(listings), 3) for name, busy in total.most_common(MOST_NAMED)}
    return {name: busy for name, busy in means.items() if busy >= LEAST_NAMED}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _other_cores(cpu: CpuSample, cores: int) -> float | None:
    """Returns the number of busy cores that the workers do not use."""
    return None if cpu.load is None or cpu.worker_cpu is None else cpu.load * cores - cpu.worker_cpu


def _fraction(part: float, whole: float) -> float | None:
    """Returns `part / whole` clipped to [0, 1], because the kernel's counters tick every 10 ms."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


def energy_between(samples: Sequence[TelemetrySample], start: float, end: float, gpus: Sequence[int]) -> float | None:
    """Returns the energy of `gpus` in joules over [start, end], in seconds since the epoch; `samples` in order of time.

    The energy counter of each GPU is interpolated linearly at both ends. Returns None if a GPU has no reading at or
    before `start` or at or after `end`, or fewer than two in between, because interpolation would dominate the result.
    """
    joules = [_energy_of(samples, start, end, gpu) for gpu in gpus]
    known = [energy for energy in joules if energy is not None]
    return sum(known) if known and len(known) == len(joules) else None


def _energy_of(samples: Sequence[TelemetrySample], start: float, end: float, index: int) -> float | None:
    readings = [
        (sample.time, gpu.energy_j)
        for sample in samples
        for gpu in sample.gpus
        if gpu.index == index and gpu.energy_j is not None
    ]
    within = sum(start <= moment <= end for moment, _ in readings)
    if within < 2 or readings[0][0] > start or readings[-1][0] < end:
        return None
    return _interpolate(readings, end) - _interpolate(readings, start)


def _interpolate(readings: Sequence[tuple[float, float]], moment: float) -> float:
    """Returns the counter at `moment`, which must be within the readings, by linear interpolation."""
    after = bisect_left(readings, moment, key=lambda reading: reading[0])
    later, energy_later = readings[after]
    if later == moment:
        return energy_later
    earlier, energy_earlier = readings[after - 1]
    return energy_earlier + (energy_later - energy_earlier) * (moment - earlier) / (later - earlier)


def throttled(samples: Iterable[TelemetrySample], start: float, end: float) -> dict[str, float]:
    """Returns for each reason the fraction of samples in [start, end] in which it held some GPU's clocks down.

    Idle GPUs and clocks set by the user do not count as throttling. Reasons that never occurred are left out.
    """
    known = [
        {reason for gpu in sample.gpus for reason in gpu.throttle_reasons or ()}
        for sample in samples
        if start <= sample.time <= end and any(gpu.throttle_reasons is not None for gpu in sample.gpus)
    ]
    counts = Counter(reason for reasons in known for reason in reasons if reason != "ApplicationsClocksSetting")
    return {reason: count / len(known) for reason, count in counts.most_common()}
