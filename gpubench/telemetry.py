"""The state of the hardware at one point of time during a run. A value that cannot be read is left out."""

from collections.abc import Container, Iterable, Sequence
from statistics import fmean

import msgspec


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


def of_gpus(samples: Sequence[TelemetrySample], gpus: Container[int]) -> list[TelemetrySample]:
    """The samples with the state of the GPUs `gpus` (NVML's numbers) only."""
    return [
        msgspec.structs.replace(sample, gpus=[gpu for gpu in sample.gpus if gpu.index in gpus]) for sample in samples
    ]


def within(samples: Iterable[TelemetrySample], windows: Sequence[tuple[float, float]]) -> list[TelemetrySample]:
    """The samples taken in any of the windows, which are (start, end) in seconds since the epoch."""
    return [sample for sample in samples if any(start <= sample.time <= end for start, end in windows)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a run's samples, and their mean and largest duration in seconds of wall time."""

    samples: int
    mean: float
    largest: float


def sampling(samples: Iterable[TelemetrySample]) -> Sampling | None:
    """The duration of the samples; None if no sample recorded its duration."""
    walls = [sample.wall for sample in samples if sample.wall is not None]
    return Sampling(samples=len(walls), mean=fmean(walls), largest=max(walls)) if walls else None
