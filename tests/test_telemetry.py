import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from fake_nvml import GPUS, FakeNvml

from gpubench.host import sampler
from gpubench.host.recorder import Progress
from gpubench.host.sampler import Telemetry, _Processes
from gpubench.host.schedule import _listen
from gpubench.runs import warnings
from gpubench.runs.gpu_state import energy_between, throttled
from gpubench.runs.other_load import other_load, together
from gpubench.telemetry import CpuSample, GpuSample, TelemetrySample, sampling

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
    (gpu,) = watching(monkeypatch, BUSY).sample(processes=True).gpus
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


def test_what_nvml_gives_of_a_whole_gpu_is_not_that_of_its_mig_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons"}
    for mode, left in ([1, 1], whole), ([0, 1], whole | {"power_w", "energy_j", "other_processes"}):
        (gpu,) = watching(monkeypatch, BUSY | {"MigMode": mode}).sample(processes=True).gpus
        assert left <= set(msgspec.to_builtins(gpu)), mode
    (gpu,) = watching(monkeypatch, BUSY | {"MigMode": [1, 1]}).sample(processes=True).gpus
    assert set(msgspec.to_builtins(gpu)) == whole | {"index"}


def test_the_workers_are_not_other_processes(monkeypatch: pytest.MonkeyPatch, worker: subprocess.Popen[bytes]) -> None:
    pids = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=worker.pid)]
    telemetry = watching(monkeypatch, {"ComputeRunningProcesses": lambda: pids})
    assert telemetry.sample(processes=True).gpus[0].other_processes == 1
    telemetry.watch([worker.pid])
    assert telemetry.sample(processes=True).gpus[0].other_processes == 0
    assert telemetry.sample().gpus[0].other_processes is None


def test_process_ids_from_outside_the_container_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    telemetry = watching(monkeypatch, {"ComputeRunningProcesses": lambda: [SimpleNamespace(pid=gone.pid)]})
    assert telemetry.sample(processes=True).gpus[0].other_processes is None


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
    assert sample.wall


def test_what_sampling_took_is_its_mean_and_its_largest_by_the_wall_clock() -> None:
    samples = [TelemetrySample(time=0.0, cost=0.0, wall=wall) for wall in (0.001, 0.002, 0.006, None)]
    took = sampling(samples)
    assert took
    assert took.mean == pytest.approx(0.003)
    assert (took.samples, took.largest) == (3, 0.006)
    assert sampling([TelemetrySample(time=0.0, cost=0.0)]) is None, "a run of before it was recorded"


def test_a_sample_that_waits_for_the_driver_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> int:
        time.sleep(0.05)
        return 61

    sample = watching(monkeypatch, {"Temperature": slow}).sample()
    assert sample.wall is not None
    assert sample.wall >= 0.05 > sample.cost


def test_processes_are_asked_for_only_where_a_repeat_begins_and_where_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    progress = Progress(repeats=2)

    def running() -> list[object]:
        asked.append(progress.place)
        return []

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"ComputeRunningProcesses": running}))
    samples: list[TelemetrySample] = []
    recorder = SimpleNamespace(progress=progress, sample=samples.append, flush=lambda: None)

    def stream() -> Iterator[None]:
        for repeat in (0, 1):
            progress.repeat = repeat
            yield from [None] * 10

    workers = SimpleNamespace(stream=stream, pids=[os.getpid()])
    _listen(workers, recorder, Telemetry([0], interval=0.0), lambda _: None)  # type: ignore[arg-type]
    assert asked == ["repeat 1 of 2", "repeat 2 of 2", "repeat 2 of 2"]
    assert len(samples) == 21
    assert sum(sample.gpus[0].other_processes is not None for sample in samples) == 3


def test_other_processes_on_the_gpus_are_checked_around_each_window_and_not_at_other_times() -> None:
    looks = {0.0: 0, 10.0: 1, 20.0: 0, 30.0: 1}
    samples = [
        TelemetrySample(
            time=float(second), cost=0.0, gpus=[GpuSample(index=0, other_processes=looks.get(float(second)))]
        )
        for second in range(31)
    ]

    def share(*windows: tuple[float, float]) -> float | None:
        found = other_load(samples, windows, 4, loaders=False, on_cpu=False)
        assert found
        return found.gpu_share

    assert share((2.0, 8.0)) == 0.5
    assert share((2.0, 8.0), (12.0, 18.0)) == 0.5
    assert share((12.0, 28.0)) == pytest.approx(2 / 3)
    unknown = [TelemetrySample(time=1.0, cost=0.0, gpus=[GpuSample(index=0)])]
    found = other_load(unknown, [(0.0, 2.0)], 4, loaders=False, on_cpu=False)
    assert found
    assert found.gpu_share is None


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


def beside(telemetry: Telemetry, wanted: str) -> dict[str, float]:
    """The processes of the first sample that names `wanted`."""
    for _ in range(200):
        time.sleep(0.05)
        cpu = telemetry.sample().cpu
        if cpu and cpu.processes and wanted in cpu.processes:
            return cpu.processes
    raise AssertionError(f"{wanted} was never named")


SPINNING = "while :; do :; done"
ORPHANED = "import os, sys\nif os.fork(): sys.exit()\nos.execv(sys.argv[1], ['spins', '-c', sys.argv[2]])"


def shell(folder: Path, name: str) -> str:
    """A shell that goes by `name`."""
    return shutil.copy(shutil.which("sh") or "", str(folder / name))


def test_the_processes_that_keep_the_cpu_busy_beside_the_workers_are_named(tmp_path: Path) -> None:
    name, shown = "neigh) (\x1b[1m", "neigh) (\\x1b[1m"  # as hard to read in /proc/PID/stat as one can be
    command = [sys.executable, "-c", ORPHANED, shell(tmp_path, name), SPINNING]
    outside = subprocess.Popen(command, start_new_session=True)  # its parent ends: it descends from nobody here
    try:
        telemetry = Telemetry([], interval=0.2)
        telemetry.watch([os.getpid()])
        busy = beside(telemetry, shown)
        assert 0 < busy[shown] <= (os.cpu_count() or 1) + 0.5
    finally:
        os.killpg(outside.pid, signal.SIGKILL)
        outside.wait()


def test_processes_that_the_host_and_the_workers_started_are_not_other_processes(tmp_path: Path) -> None:
    child = subprocess.Popen([shell(tmp_path, "our own"), "-c", SPINNING])
    try:
        census, taken = _Processes(), psutil.Process(child.pid)
        while taken.cpu_times().user < 0.2:
            time.sleep(0.02)
        assert "our own" not in (census.busiest_except({os.getpid()}) or {})
        time.sleep(0.2)
        assert "our own" in (census.busiest_except(set()) or {})
    finally:
        child.kill()
        child.wait()


def sampled(number: int = 5, **cpu: Any) -> list[TelemetrySample]:
    return [TelemetrySample(time=float(second), cost=0.0, cpu=CpuSample(**cpu)) for second in range(number)]


def test_the_load_of_other_processes_limits_the_reliability_of_the_times() -> None:
    samples = sampled(load=0.75, worker_cpu=2.0, steal=0.0, processes={"cc1plus": 0.8, "sh": 0.2})
    found = other_load(samples, [(1.0, 3.0)], 4, loaders=False, on_cpu=True)
    assert found is not None
    assert (found.cores, found.processes, found.slowdown) == (1.0, {"cc1plus": 0.8, "sh": 0.2}, 0.5)
    said = "other processes kept 1.0 cores busy while it ran (cc1plus, sh)"
    assert (
        warnings.contended(found) == f"{said}: its steps may have taken up to 1.50 times as long as on an idle machine"
    )
    assert warnings.contended(other_load(samples, [(1.0, 3.0)], 4, loaders=False, on_cpu=False)) == said


@pytest.mark.parametrize(("waited", "slowdown"), [(0.2, 0.25), (0.5, 1.0), (0.99, 2.0), (3.0, 2.0), (None, 2.0)])
def test_a_step_is_slowed_down_by_no_more_than_its_threads_waited_for_a_core(
    waited: float | None, slowdown: float
) -> None:
    samples = sampled(load=0.75, worker_cpu=1.0, steal=0.0, processes={}, waited=waited)
    found = other_load(samples, [(0.0, 9.0)], 4, loaders=False, on_cpu=True)
    assert found is not None
    assert found.slowdown == pytest.approx(slowdown)


def test_the_waits_of_all_threads_of_a_process_and_of_its_children_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PROC", tmp_path)
    waits = {"12/task/12": 5, "12/task/14": 7, "13/task/13": 1, "15/task/15": 9}
    for thread, nanoseconds in waits.items():
        (tmp_path / thread).mkdir(parents=True)
        (tmp_path / thread / "schedstat").write_text(f"100 {nanoseconds} 3\n")
    (tmp_path / "12/task/12/children").write_text("13 99 ")
    assert sampler._waits(12) == {"12": 5, "14": 7, "13": 1}
    assert sampler._waits(98) == {}


def test_a_quiet_machine_is_not_said_to_be_busy() -> None:
    quiet = other_load(sampled(load=0.5, worker_cpu=1.9), [(0.0, 9.0)], 4, loaders=False, on_cpu=True)
    assert quiet is not None
    assert (quiet.busy, quiet.slowdown, warnings.contended(quiet)) == (False, None, None)
    large = other_load(sampled(load=0.01, worker_cpu=1.0), [(0.0, 9.0)], 224, loaders=False, on_cpu=False)
    assert large is not None
    assert large.cores == pytest.approx(1.24)
    assert not large.busy, "that is what the kernel of such a machine takes for itself"


def test_what_cannot_be_told_is_not_guessed() -> None:
    busy = sampled(load=0.9, worker_cpu=1.0, processes={"python": 2.0})
    assert other_load(busy, [(10.0, 20.0)], 4, loaders=False, on_cpu=True) is None
    with_loaders = other_load(sampled(load=0.9, worker_cpu=1.0), [(0.0, 9.0)], 4, loaders=True, on_cpu=True)
    assert with_loaders is not None
    assert (with_loaders.cores, with_loaders.processes, with_loaders.slowdown) == (None, {}, None)
    unknown = other_load(busy, [(0.0, 9.0)], None, loaders=False, on_cpu=True)
    assert unknown is not None
    assert unknown.cores is None


def test_beside_data_loaders_only_the_processes_that_can_be_seen_count() -> None:
    busy = sampled(load=0.9, worker_cpu=1.0, processes={"python": 1.5, "sh": 0.5})
    found = other_load(busy, [(0.0, 9.0)], 4, loaders=True, on_cpu=True)
    assert found is not None
    assert (found.cores, found.slowdown) == (2.0, 2.0)


def test_runs_together_had_the_neighbours_of_all_of_them() -> None:
    one, other = (
        other_load(
            sampled(load=load, worker_cpu=1.0, processes={name: 1.0}), [(0.0, 9.0)], 4, loaders=False, on_cpu=True
        )
        for load, name in ((0.5, "a"), (1.0, "b"))
    )
    assert one
    assert other
    both = together([one, other])
    assert both is not None
    assert (both.cores, both.processes, both.slowdown) == (2.0, {"a": 0.5, "b": 0.5}, 2.0)
    assert together([]) is None
