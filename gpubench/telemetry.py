"""What the hardware was doing while the workers measured, sampled by the host and never by a timed process.

A sample costs the host well under a millisecond of CPU on a machine without GPUs (about 0.1 ms with one worker), and
says itself what it cost. All processes are looked at only while others than the workers keep the CPU busy, and never so
often that it takes more than a hundredth of a core. What the driver, the kernel or a permission withholds is left out,
never guessed.
"""

import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import psutil

from gpubench.control_characters import spelled_out
from gpubench.devices import ask, open_nvml

# NVML's clocks event reasons (nvml.h), but for None and GpuIdle: an idle GPU is not a slowed one.
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
IDLE_CORES = 0.25  # what a quiet machine's own housekeeping takes
IDLE_SHARE = 0.02  # the same on a machine of many cores, of all of them
STEAL = 0.02  # of all CPU time
CENSUS_COST = 0.01  # of a core
MOST_NAMED = 5  # processes of others
LEAST_NAMED = 0.02  # cores that one has to keep busy
PROC = Path("/proc")


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One GPU at one instant; None where NVML does not say. `index` is NVML's, as in `devices.Gpu`.

    `energy_j` counts since the driver was loaded and advances every 20 to 100 ms. `utilization` is the fraction of the
    driver's last averaging period in which some kernel ran. `other_processes` counts compute processes on the GPU
    other than the host and the workers.
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
    """The machine's CPU, and the workers' part of it, over the time since the previous sample.

    `load` and `steal` are fractions of all logical CPUs' time: busy here, and taken by the hypervisor for other guests.
    `worker_cpu` is in cores. `context_switches` counts how often a worker's main thread was made to yield its CPU.
    `memory_rss_bytes` is what the workers hold now. These three are None while no worker lives. `processes` are the
    cores that the busiest other processes used since they were last looked at, by name: None where that was not done.
    """

    load: float | None = None
    steal: float | None = None
    worker_cpu: float | None = None
    context_switches: int | None = None
    memory_rss_bytes: int | None = None
    processes: dict[str, float] | None = None


class TelemetrySample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of telemetry.jsonl: `time` in seconds since the epoch, `cost` in seconds of the host's CPU time."""

    time: float
    cost: float
    gpus: list[GpuSample] = []
    cpu: CpuSample | None = None


class Telemetry:
    """Samples the GPUs `gpu_indices` (NVML's numbers), the CPU and the watched workers about every `interval` seconds.

    It has no thread: whoever listens to the workers asks `due()` and calls `sample()` between two events.
    """

    def __init__(self, gpu_indices: Sequence[int], interval: float, now: Callable[[], float] = time.time) -> None:
        """`now` is the clock that samples are placed on, in seconds since the epoch."""
        self.interval = interval
        self._now = now
        self._next_due = float("-inf")
        self._nvml: Any = open_nvml() if gpu_indices else None
        self._handles: dict[int, Any] = {}
        if self._nvml:
            found = {index: ask(self._nvml, "nvmlDeviceGetHandleByIndex", index) for index in gpu_indices}
            self._handles = {index: handle for index, handle in found.items() if handle is not None}
        self._cpu_times: Any = psutil.cpu_times()
        self._workers: dict[int, _Worker] = {}
        self._census = _Census()

    def watch(self, pids: Iterable[int]) -> None:
        """Makes `pids` the workers, in place of those before; one that is already gone is passed over."""
        workers: dict[int, _Worker] = {}
        for pid in pids:
            with suppress(psutil.Error):
                workers[pid] = self._workers.get(pid) or _Worker(pid)
        self._workers = workers

    def due(self, now: float) -> bool:
        """Whether a sample should be taken at `now`, in seconds of `time.monotonic()`."""
        return now >= self._next_due

    def sample(self) -> TelemetrySample:
        """Reads everything once. Samples that fell due meanwhile are dropped, not caught up with."""
        self._next_due = time.monotonic() + self.interval
        began, now = time.thread_time(), self._now()
        gpus = [self._sample_gpu(index, handle) for index, handle in self._handles.items()]
        cpu = self._sample_cpu()
        return TelemetrySample(time=now, cost=time.thread_time() - began, gpus=gpus, cpu=cpu)

    def close(self) -> None:
        """Lets go of the driver; no sample may be taken after."""
        if self._nvml:
            ask(self._nvml, "nvmlShutdown")
            self._nvml, self._handles = None, {}

    def _sample_gpu(self, index: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        energy_mj = ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)  # first: its time is the sample's
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
            other_processes=self._other_processes(handle),
        )

    def _other_processes(self, handle: Any) -> int | None:
        running = ask(self._nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
        if running is None:
            return None
        others = {process.pid for process in running} - self._workers.keys() - {os.getpid()}
        # In a container some drivers give the host's process ids, by which a worker looks like another process.
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
        beside = _beside(cpu, count)
        if beside is None or beside <= IDLE_CORES or not self._census.due():
            return cpu
        return msgspec.structs.replace(cpu, processes=self._census.take({os.getpid(), *self._workers}))


class _Worker:
    """One watched process, and its counters when it was last read."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._read = time.monotonic()
        self._cpu, self._switches, _ = self._counters()

    def usage(self) -> tuple[float, int, int]:
        """Cores used and involuntary context switches since the last reading, and resident bytes now."""
        read, cpu, switches = self._read, self._cpu, self._switches
        self._cpu, self._switches, rss = self._counters()
        self._read = time.monotonic()
        return (self._cpu - cpu) / (self._read - read), self._switches - switches, rss

    def _counters(self) -> tuple[float, int, int]:
        with self._process.oneshot():
            times, switches = self._process.cpu_times(), self._process.num_ctx_switches()
            return times.user + times.system, switches.involuntary, self._process.memory_info().rss


class _Census:
    """The CPU time that every process had used when it was last looked at; empty without Linux's /proc."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._used, _ = self._look()

    def due(self) -> bool:
        return time.monotonic() - self._taken >= self._cost / CENSUS_COST

    def take(self, own: set[int]) -> dict[str, float] | None:
        """Cores used since the last time by the busiest processes that do not descend from `own`, by name."""
        before, since = self._used, self._taken
        self._used, parents = self._look()
        if not self._used:
            return None
        cores: defaultdict[str, float] = defaultdict(float)
        for process, (name, used) in self._used.items():
            if not _descends(process[0], own, parents):
                cores[name] += (used - before.get(process, (name, 0.0))[1]) / max(self._taken - since, 1e-6)
        return _busiest([cores])

    def _look(self) -> tuple[dict[tuple[int, str], tuple[str, float]], dict[int, int]]:
        """By process id and start, the name and the seconds of CPU time; and each one's parent."""
        self._taken, began = time.monotonic(), time.thread_time()
        found: dict[tuple[int, str], tuple[str, float]] = {}
        parents: dict[int, int] = {}
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # it may have ended by now
                head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
                fields, pid = tail.split(), int(folder.name)
                parents[pid] = int(fields[1])
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[pid, fields[19]] = spelled_out(head.partition("(")[2]), seconds  # it may hold anything
        self._cost = time.thread_time() - began
        return found, parents


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):  # what is read while processes come and go may form a ring
        if pid in ancestors or pid not in parents:
            break
        pid = parents[pid]
    return pid in ancestors


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes took of the machine while a run's steady steps were measured; None where nothing tells."""

    cores: float | None
    """CPU cores they kept busy, on average, of the `machine_cores` logical ones that there are."""
    machine_cores: int | None
    processes: dict[str, float]
    """The cores of the busiest of them, by name, as far as they can be seen from here."""
    steal: float | None
    """Share of all CPU time that the hypervisor gave to other guests."""
    gpu_share: float | None
    """Share of the time in which processes of others were on the run's GPUs."""
    slowdown: float | None
    """How much longer a step on the CPU may have taken for them, as a fraction; None on a GPU and where it was quiet.

    The cores that others kept busy or stole, over those the workers used: what both would share if they fought for the
    same ones.
    """

    @property
    def busy(self) -> bool:
        """Whether they kept more of the CPU busy than a quiet machine does by itself."""
        return self.cores is not None and self.cores > max(IDLE_CORES, IDLE_SHARE * (self.machine_cores or 0))


def within(samples: Iterable[TelemetrySample], windows: Sequence[tuple[float, float]]) -> list[TelemetrySample]:
    """The samples that were taken in one of the windows, each from its start to its end."""
    return [sample for sample in samples if any(start <= sample.time <= end for start, end in windows)]


def others(
    samples: Sequence[TelemetrySample],
    windows: Sequence[tuple[float, float]],
    machine_cores: int | None,
    *,
    loaders: bool,
    on_cpu: bool,
) -> Others | None:
    """What was sampled in the windows; None where nothing was.

    Data `loaders` work beside the ranks, so that what the ranks leave of the busy cores is not that of others: with
    them only the processes that can be seen count.
    """
    steady = within(samples, windows)
    if not steady:
        return None
    cpus = [sample.cpu for sample in steady if sample.cpu]
    seen = [sum(cpu.processes.values()) for cpu in cpus if cpu.processes is not None]
    beside = seen if loaders else [_beside(cpu, machine_cores) for cpu in cpus if machine_cores]
    on_gpus = [[gpu.other_processes for gpu in sample.gpus if gpu.other_processes is not None] for sample in steady]
    found = Others(
        cores=_mean(beside),
        machine_cores=machine_cores,
        processes=_named(steady) or _named(samples),
        steal=_mean([cpu.steal for cpu in cpus]),
        gpu_share=_mean([float(any(numbers)) for numbers in on_gpus if numbers]),
        slowdown=None,
    )
    own, steal = _mean([cpu.worker_cpu for cpu in cpus]), found.steal or 0.0
    if not (on_cpu and own and machine_cores) or not (found.busy or steal > STEAL):
        return found
    taken = max(0.0, found.cores or 0.0) + steal * machine_cores
    return msgspec.structs.replace(found, slowdown=taken / own)


def together(found: Sequence[Others]) -> Others | None:
    """The mean over runs."""
    if len(found) < 2:
        return found[0] if found else None
    means = {name: _mean([getattr(one, name) for one in found]) for name in ("cores", "steal", "gpu_share", "slowdown")}
    cores = max((one.machine_cores for one in found if one.machine_cores), default=None)
    return Others(machine_cores=cores, processes=_busiest([one.processes for one in found]), **means)


def _named(samples: Iterable[TelemetrySample]) -> dict[str, float]:
    """Mean cores of the busiest processes, over the samples in which they were looked at."""
    return _busiest([sample.cpu.processes for sample in samples if sample.cpu and sample.cpu.processes is not None])


def _busiest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean cores by name, of those worth naming, the largest first."""
    total: Counter[str] = Counter()
    for cores in found:
        total.update(cores)
    means = {name: round(busy / len(found), 3) for name, busy in total.most_common(MOST_NAMED)}
    return {name: busy for name, busy in means.items() if busy >= LEAST_NAMED}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _beside(cpu: CpuSample, cores: int) -> float | None:
    return None if cpu.load is None or cpu.worker_cpu is None else cpu.load * cores - cpu.worker_cpu


def _fraction(part: float, whole: float) -> float | None:
    """`part / whole` within [0, 1]: the kernel's counters are not read at one instant, and tick every 10 ms."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


def energy_between(samples: Sequence[TelemetrySample], start: float, end: float, gpus: Sequence[int]) -> float | None:
    """Joules that `gpus` drew over exactly [start, end], in seconds since the epoch; `samples` in order of time.

    Each GPU's energy counter is interpolated linearly at both ends. None if any GPU has no reading at or before
    `start` or at or after `end`, or fewer than two within, where the result would be mostly interpolation.
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
    """The counter at `moment`, which the readings cover."""
    after = bisect_left(readings, moment, key=lambda reading: reading[0])
    later, energy_later = readings[after]
    if later == moment:
        return energy_later
    earlier, energy_earlier = readings[after - 1]
    return energy_earlier + (energy_later - energy_earlier) * (moment - earlier) / (later - earlier)


def throttled(samples: Iterable[TelemetrySample], start: float, end: float) -> dict[str, float]:
    """How much of [start, end] each reason held some GPU's clocks down, as a fraction of the samples that could tell.

    An idle GPU and clocks set by the user are not throttling and are left out, as is a reason that never held.
    """
    known = [
        {reason for gpu in sample.gpus for reason in gpu.throttle_reasons or ()}
        for sample in samples
        if start <= sample.time <= end and any(gpu.throttle_reasons is not None for gpu in sample.gpus)
    ]
    counts = Counter(reason for reasons in known for reason in reasons if reason != "ApplicationsClocksSetting")
    return {reason: count / len(known) for reason, count in counts.most_common()}
