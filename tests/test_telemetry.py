import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from fake_nvml import GPUS, FakeNvml

from gpubench.telemetry import GpuSample, Telemetry, TelemetrySample, energy_between, throttled

BUSY = GPUS[0] | {
    "ClockInfo": {1: 1980, 2: 3201}.get,
    "PowerUsage": 650_500,
    "TotalEnergyConsumption": 123_456_789,
    "Temperature": lambda sensor: 61,
    "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "CurrentClocksEventReasons": 0x1 | 0x4 | 0x20,
    "ComputeRunningProcesses": lambda: [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
}


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def watching(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, object]) -> Telemetry:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    return Telemetry(range(len(gpus)), interval=0.2)


def test_a_gpu_sample_is_in_the_units_its_fields_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = watching(monkeypatch, BUSY).sample().gpus
    assert gpu == GpuSample(
        index=0,
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        power_w=650.5,
        energy_j=123_456.789,
        temperature_c=61,
        utilization=0.97,
        memory_used_bytes=1_000_000_000,
        throttle_reasons=["SwPowerCap", "SwThermalSlowdown"],
        other_processes=1,
    )


def test_what_a_gpu_does_not_support_is_absent_from_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = watching(monkeypatch, {"PowerUsage": 70_000, "CurrentClocksThrottleReasons": 0x1}).sample()
    assert msgspec.to_builtins(sample.gpus) == [{"index": 0, "power_w": 70.0, "throttle_reasons": []}]


def test_the_workers_are_not_other_processes(monkeypatch: pytest.MonkeyPatch, worker: subprocess.Popen[bytes]) -> None:
    pids = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=worker.pid)]
    telemetry = watching(monkeypatch, {"ComputeRunningProcesses": lambda: pids})
    assert telemetry.sample().gpus[0].other_processes == 1
    telemetry.watch([worker.pid])
    assert telemetry.sample().gpus[0].other_processes == 0


def test_process_ids_from_outside_the_container_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    telemetry = watching(monkeypatch, {"ComputeRunningProcesses": lambda: [SimpleNamespace(pid=gone.pid)]})
    assert telemetry.sample().gpus[0].other_processes is None


def test_only_the_gpus_asked_for_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(*GPUS)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    telemetry = Telemetry([2, 0, 9], interval=0.2)
    assert [gpu.index for gpu in telemetry.sample().gpus] == [2, 0]
    telemetry.close()
    telemetry.close()
    assert fake.users == 0


def test_without_a_driver_the_cpu_is_sampled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*GPUS, driver=False))
    sample = Telemetry([0], interval=0.2).sample()
    assert sample.gpus == []
    assert sample.cpu is not None


def test_a_busy_worker_shows_in_the_cpu_sample(worker: subprocess.Popen[bytes]) -> None:
    telemetry = Telemetry([], interval=0.2)
    telemetry.watch([worker.pid])
    busy = psutil.Process(worker.pid)
    before = busy.cpu_times().user
    while busy.cpu_times().user < before + 0.1:  # the kernel counts in ticks of 10 ms
        time.sleep(0.02)
    cpu = telemetry.sample().cpu
    assert cpu is not None
    assert cpu.worker_cpu is not None
    assert cpu.worker_cpu > 0
    assert cpu.memory_rss_bytes is not None
    assert cpu.memory_rss_bytes > 1_000_000
    assert cpu.context_switches is not None
    assert cpu.context_switches >= 0
    assert cpu.load is not None
    assert 0 < cpu.load <= 1


def test_a_worker_that_has_died_is_passed_over(worker: subprocess.Popen[bytes]) -> None:
    telemetry = Telemetry([], interval=0.2)
    telemetry.watch([worker.pid, os.getpid()])
    worker.kill()
    worker.wait()
    cpu = telemetry.sample().cpu
    assert cpu is not None
    assert cpu.worker_cpu is not None
    telemetry.watch([worker.pid])
    cpu = telemetry.sample().cpu
    assert cpu is not None
    assert (cpu.worker_cpu, cpu.context_switches, cpu.memory_rss_bytes) == (None, None, None)


def test_load_and_steal_are_fractions_of_all_cores_time(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    times = SimpleNamespace(_fields=names, **dict.fromkeys(names, 100.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(**vars(times)))
    telemetry = Telemetry([], interval=0.2)
    times.user, times.guest, times.idle, times.iowait, times.steal = 105.0, 105.0, 102.0, 102.0, 101.0
    cpu = telemetry.sample().cpu
    assert cpu is not None
    assert (cpu.load, cpu.steal) == (0.5, 0.1)


def test_a_sample_is_due_at_once_and_then_once_an_interval() -> None:
    telemetry = Telemetry([], interval=60)
    now = time.monotonic()
    assert telemetry.due(now)
    telemetry.sample()
    assert not telemetry.due(now + 59)
    assert telemetry.due(time.monotonic() + 60)


def test_a_sample_survives_the_trip_through_json() -> None:
    telemetry = Telemetry([], interval=0.2)
    telemetry.watch([os.getpid()])
    sample = telemetry.sample()
    assert msgspec.json.decode(msgspec.json.encode(sample), type=TelemetrySample) == sample
    assert sample.cost > 0


def drawing(watts: float, times: range, index: int = 0) -> list[TelemetrySample]:
    return [
        TelemetrySample(time=float(t), cost=0.0, gpus=[GpuSample(index=index, energy_j=5000 + watts * t)])
        for t in times
    ]


def test_energy_of_a_constant_load_is_power_times_time() -> None:
    samples = drawing(100.0, range(11))
    assert energy_between(samples, 2.0, 8.0, [0]) == pytest.approx(600.0)
    assert energy_between(samples, 2.25, 8.5, [0]) == pytest.approx(625.0)
    assert energy_between(samples, 0.0, 10.0, [0]) == pytest.approx(1000.0)


def test_energy_follows_the_counter_and_not_the_mean_power() -> None:
    counter = [0.0, 10.0, 110.0, 120.0]
    samples = [
        TelemetrySample(time=float(t), cost=0.0, gpus=[GpuSample(index=0, energy_j=joules)])
        for t, joules in enumerate(counter)
    ]
    assert energy_between(samples, 0.5, 2.5, [0]) == pytest.approx(5.0 + 100.0 + 5.0)


def test_energy_adds_up_over_the_gpus_asked_for() -> None:
    pairs = zip(drawing(100.0, range(11)), drawing(50.0, range(11), index=1), strict=True)
    samples = [TelemetrySample(time=a.time, cost=0.0, gpus=[*a.gpus, *b.gpus]) for a, b in pairs]
    assert energy_between(samples, 2.0, 8.0, [0, 1]) == pytest.approx(900.0)
    assert energy_between(samples, 2.0, 8.0, [1]) == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("start", "end", "gpus"),
    [(-1.0, 5.0, [0]), (5.0, 11.0, [0]), (4.2, 5.4, [0]), (2.0, 8.0, [0, 1]), (2.0, 8.0, []), (8.0, 2.0, [0])],
    ids=["before", "after", "one sample within", "unknown gpu", "no gpu", "backwards"],
)
def test_energy_is_unknown_unless_every_gpu_covers_the_window(start: float, end: float, gpus: list[int]) -> None:
    assert energy_between(drawing(100.0, range(11)), start, end, gpus) is None


def test_energy_is_unknown_without_a_counter() -> None:
    samples = [TelemetrySample(time=float(t), cost=0.0, gpus=[GpuSample(index=0, power_w=100.0)]) for t in range(11)]
    assert energy_between(samples, 2.0, 8.0, [0]) is None


def test_throttling_is_the_fraction_of_samples_with_each_reason() -> None:
    reasons: list[list[list[str] | None]] = [
        [["HwSlowdown"]],  # before the window
        [["SwPowerCap", "SwThermalSlowdown"], ["SwPowerCap"]],
        [["SwPowerCap"], []],
        [["ApplicationsClocksSetting"], []],
        [[], None],
        [None, None],  # unknown, so not counted
    ]
    samples = [
        TelemetrySample(
            time=float(t), cost=0.0, gpus=[GpuSample(index=i, throttle_reasons=names) for i, names in enumerate(gpus)]
        )
        for t, gpus in enumerate(reasons)
    ]
    assert throttled(samples, 1.0, 5.0) == {"SwPowerCap": 0.5, "SwThermalSlowdown": 0.25}


def test_nothing_is_known_to_throttle_without_samples() -> None:
    assert throttled([], 0.0, 1.0) == {}
