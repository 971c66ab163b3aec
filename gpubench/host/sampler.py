"""Samples the state of the hardware during a run. The host takes the samples, never a timed process.

A sample costs the host about 0.1 ms of CPU time with one worker and no GPU, and the cost is recorded with it. While
other processes keep the CPU busy, the host also reads how long each thread of the workers waited for a core, which
takes about 0.04 ms per thread, and lists all processes, on which it spends at most a hundredth of a core. It asks NVML
for the processes on a GPU only between repeats, because that query takes a driver lock that programs need to launch
kernels. A value that cannot be read is left out.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from gpubench.devices import ask, open_nvml
from gpubench.runs.other_load import IDLE_CORES, busiest, other_cores
from gpubench.telemetry import CpuSample, GpuSample, TelemetrySample
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
LISTING_COST = 0.01  # largest share of a core for listing processes
PROC = Path("/proc")


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
        """Whether a sample is due at `now`, in seconds of `time.monotonic()`."""
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
        """Whether a GPU is in MIG mode. NVML gives the mode as [current, after the next reset]."""
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
        # In a container some drivers give the process ids of the machine, so that a worker looks like another process.
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
        other = other_cores(cpu, count)
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
        """The cores used and involuntary context switches since the last call, and the resident bytes now."""
        read, cpu, switches = self._read, self._cpu, self._switches
        self._cpu, self._switches, rss = self._counters()
        self._read = time.monotonic()
        return (self._cpu - cpu) / (self._read - read), self._switches - switches, rss

    def _counters(self) -> tuple[float, int, int]:
        with self._process.oneshot():
            times, switches = self._process.cpu_times(), self._process.num_ctx_switches()
            return times.user + times.system, switches.involuntary, self._process.memory_info().rss

    def waited(self) -> float | None:
        """The mean number of threads of the process and of its children that waited for a core since the last call.

        None in the first call, and without Linux's scheduler statistics.
        """
        before, since = self._waits, self._waits_read
        self._waits, self._waits_read = _waits(self._process.pid), time.monotonic()
        if not before or not self._waits:
            return None
        grown = sum(max(0, waited - before.get(thread, 0)) for thread, waited in self._waits.items())
        return grown / 1e9 / (self._waits_read - since)


def _waits(pid: int) -> dict[str, int]:
    """The nanoseconds that each thread of a process and of its children has waited for a core while it was ready to
    run.

    It is the second number of /proc/PID/task/TID/schedstat (proc_pid_schedstat(5)).
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
        """Whether another listing keeps within LISTING_COST."""
        return time.monotonic() - self._listed >= self._cost / LISTING_COST

    def busiest_except(self, own: set[int]) -> dict[str, float] | None:
        """The cores used since the last listing by the busiest processes that do not descend from `own`.

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
        return busiest([cores])

    def _list(self) -> tuple[dict[tuple[int, str], tuple[str, float]], dict[int, int]]:
        """Lists {(pid, start time): (name, seconds of CPU time)} and {pid: pid of the parent}."""
        self._listed, began = time.monotonic(), time.thread_time()
        found: dict[tuple[int, str], tuple[str, float]] = {}
        parents: dict[int, int] = {}
        for folder in PROC.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # the process may have ended by now
                head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
                fields, pid = tail.split(), int(folder.name)
                parents[pid] = int(fields[1])
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                name = spelled_out(head.partition("(")[2])  # it may contain any character
                found[pid, fields[19]] = name, seconds
        self._cost = time.thread_time() - began
        return found, parents


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):  # bounded, because pids that are reused during the listing may form a cycle
        if pid in ancestors or pid not in parents:
            break
        pid = parents[pid]
    return pid in ancestors


def _fraction(part: float, whole: float) -> float | None:
    """Clips `part / whole` to [0, 1], because the kernel's counters tick every 10 ms."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None
