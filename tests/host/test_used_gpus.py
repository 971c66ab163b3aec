"""The telemetry of a run is that of the GPUs that its ranks used, whatever else the machine has."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_runs import edit, write_run

from gpubench import devices, events
from gpubench.devices import Gpu
from gpubench.kinds.program.defaults import complete_program
from gpubench.kinds.program.recorder import ProgramRecorder
from gpubench.probe import gpus
from gpubench.runs.directory import TELEMETRY
from gpubench.runs.reader import Run
from gpubench.settings.loading import completed, load
from gpubench.settings.programs import ProgramSettings
from gpubench.telemetry import GpuSample, TelemetrySample, of_gpus

GPUS = [
    Gpu(index, f"card {index}", f"GPU-0000000{index}-0000-0000-0000-00000000000{index}", 1, (9, 0))
    for index in range(3)
]
WATTS = (90, 500, 300)
STEPS = 30


def sampled() -> list[TelemetrySample]:
    """A sample a second while the three GPUs draw WATTS. Another process uses the first, whose clocks are throttled."""
    return [
        TelemetrySample(
            time=1e9 + second,
            cost=0.0,
            gpus=[
                GpuSample(
                    index=index,
                    energy_j=float(watts * second),
                    throttle_reasons=[] if index else ["HwSlowdown"],
                    other_processes=0 if index else 1,
                )
                for index, watts in enumerate(WATTS)
            ],
        )
        for second in range(STEPS + 1)
    ]


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: list[Gpu], *used: list[str] | None
) -> ProgramRecorder:
    """A program whose ranks take a step of 4 samples a second, and report the GPUs `used`; None if they do not know."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: visible)
    given = {"program.command": "true", "results": str(folder), "training.warmup_steps": 0}
    recorder = ProgramRecorder(completed(load(ProgramSettings, None, given), complete_program), [])
    recorder.begin_repeat(0, 1)
    for rank, uuids in enumerate(used):
        hello = {"pid": 1, "host": "", "machine": "", "secret": ""}
        recorder.take(events.Hello(rank=rank, world_size=len(used), **hello))  # type: ignore[arg-type]
        if rank == 0:
            listed = [{"name": gpu.name, "uuid": gpu.uuid, "memory_bytes": 1} for gpu in visible]
            recorder.take(events.EnvironmentCaptured(rank=0, environment={"gpus": listed}))
        sizes = {"parameters": 1, "trainable_parameters": 1, "sample_shape": "8", "tokens_per_sample": None}
        recorder.take(events.ModelBuilt(rank=rank, repeat=0, seconds=None, device="cuda", **sizes))  # type: ignore[arg-type]
        steps = [
            events.Step(0, rank, 0, number, 1e9 + number, 1.0, {"other": 1.0}, 1.0, samples=4)
            for number in range(STEPS)
        ]
        recorder.take(events.StepsMeasured(rank=rank, steps=steps))
        done = events.RepeatDone(
            rank=rank, repeat=0, wall=STEPS, peak_allocated=1, peak_reserved=1, peak_rss=1, gpus=uuids
        )
        recorder.take(done)
    for sample in sampled():
        recorder.sample(sample)
    recorder.end_repeat()
    recorder.close("completed", recorder.summary())
    return recorder


@pytest.mark.parametrize(
    ("visible", "used", "own", "joules"),
    [
        ([0, 1, 2], [[1]], [1], 500 / 4),
        ([0, 1, 2], [[1, 2]], [1, 2], 800 / 4),
        ([0, 1, 2], [[2], [1]], [1, 2], 800 / 8),
        ([0, 1, 2], [[0]], [0], 90 / 4),
        ([0, 1, 2], [None], [], None),
        ([0, 1, 2], [[1], None], [], None),
        ([2], [None], [2], 300 / 4),
        ([1], [[1], [2]], [1], None),
        ([0, 1, 2], [[]], [], None),
    ],
    ids=[
        "one of three",
        "two of one rank",
        "one for each rank",
        "the first",
        "unknown",
        "unknown of one rank",
        "unknown, with one visible",
        "one is hidden from the host",
        "none",
    ],
)
def test_energy_and_throttling_are_those_of_the_gpus_that_the_ranks_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: list[int],
    used: list[list[int] | None],
    own: list[int],
    joules: float | None,
) -> None:
    digits = [None if numbers is None else [GPUS[number].digits for number in numbers] for numbers in used]
    recorder = recorded(tmp_path, monkeypatch, [GPUS[number] for number in visible], *digits)
    summary = recorder.summary()
    energy = summary.get("energy_per_sample")
    assert (energy and energy.estimate) == (joules and pytest.approx(joules))
    assert set(summary.throttled) == ({"HwSlowdown"} if 0 in own else set())
    assert summary.others
    assert summary.others.gpu_share == (None if not own else float(0 in own))
    if own:
        assert summary.environment
        assert summary.environment.device == f"card {min(own)}"
    read = Run.open(recorder.writer.path)
    assert read.record.gpus == own
    assert {gpu.index for sample in read.telemetry for gpu in sample.gpus} == set(own)
    lines = (recorder.writer.path / TELEMETRY).read_text().splitlines()
    assert all(len(json.loads(line)["gpus"]) == len(GPUS) for line in lines), "what was sampled is kept"


def test_hosts_that_see_one_gpu_each_sample_all_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(devices, "machine_gpus", lambda: GPUS)
    recorder = recorded(tmp_path, monkeypatch, GPUS[1:2], [GPUS[1].digits], [GPUS[2].digits])
    energy = recorder.summary().get("energy_per_sample")
    assert energy
    assert energy.estimate == pytest.approx(800 / 8)


def test_a_run_of_before_the_ranks_reported_their_gpus_keeps_all_of_them(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / TELEMETRY).write_text('{"time":1,"cost":0,"gpus":[{"index":0},{"index":5}]}\n')
    assert [gpu.index for gpu in Run.open(path).telemetry[0].gpus] == [0, 5]
    edit(path / "run.json", gpus=[5])
    assert [gpu.index for gpu in Run.open(path).telemetry[0].gpus] == [5]


def test_samples_of_some_gpus_keep_the_rest_of_the_sample() -> None:
    sample = sampled()[1]
    (found,) = of_gpus([sample], [2])
    assert (found.time, found.gpus) == (sample.time, [sample.gpus[2]])


class FakeCuda:
    """torch.cuda of a process on a machine with three GPUs, which holds memory on `held`."""

    def __init__(self, *held: int, initialized: bool = True) -> None:
        self._held, self._initialized = held, initialized

    def is_initialized(self) -> bool:
        return self._initialized

    def device_count(self) -> int:
        return 3

    def max_memory_reserved(self, device: int) -> int:
        return 2**20 * (device in self._held)

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=f"0000000{device}-aaaa-bbbb-cccc-00000000000d")


class WithoutStatistics(FakeCuda):
    def max_memory_reserved(self, device: int) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")


class WithoutUuids(FakeCuda):
    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(name="of an older release")


@pytest.mark.parametrize(
    ("cuda", "used"),
    [
        (FakeCuda(1), ["00000001aaaabbbbcccc00000000000d"]),
        (FakeCuda(0, 2), ["00000000aaaabbbbcccc00000000000d", "00000002aaaabbbbcccc00000000000d"]),
        (FakeCuda(), []),
        (FakeCuda(0, initialized=False), []),
        (WithoutStatistics(), ["00000002aaaabbbbcccc00000000000d"]),
        (WithoutUuids(0), None),
        (object(), None),
    ],
    ids=["one", "two", "none", "not initialised", "an allocator of its own", "no uuids", "nothing works"],
)
def test_a_process_names_the_gpus_on_which_it_has_held_memory(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, used: list[str] | None
) -> None:
    c = SimpleNamespace(_cuda_hasPrimaryContext=lambda device: device == 2)
    version = SimpleNamespace(hip=None)
    monkeypatch.setattr(gpus, "torch", SimpleNamespace(cuda=cuda, _C=c, version=version))
    assert gpus.used_gpus() == used


def test_a_uuid_of_hip_is_printed_as_the_codes_of_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    unique = "abba00000000dead"
    printed = unique.encode().hex()
    found = SimpleNamespace(uuid="-".join((printed[:8], printed[8:12], printed[12:16], printed[16:20], printed[20:])))
    cuda = SimpleNamespace(get_device_properties=lambda device: found)
    monkeypatch.setattr(gpus, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip="6.3")))
    assert gpus.uuid_digits(0) == Gpu(None, "AMD", f"GPU-{unique}", None, None).digits == unique


@pytest.mark.parametrize(("hip", "printed"), [("6.3", b"XX".hex() + 28 * "0"), (None, 32 * "0")])
def test_gpus_without_a_uuid_are_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, printed: str
) -> None:
    cuda = FakeCuda(0, 1)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=printed))
    monkeypatch.setattr(gpus, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))
    with pytest.raises(ValueError, match=r"uuid|invalid literal"):
        gpus.uuid_digits(0)
    assert gpus.used_gpus() is None


def test_this_process_has_used_no_gpu_and_does_not_begin_to() -> None:
    assert gpus.used_gpus() == []
    assert not torch.cuda.is_initialized()
