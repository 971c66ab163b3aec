import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest
from fake_nvml import GPUS, MIG, FakeDriver, FakeNvml

from gpubench import devices


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(*GPUS)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(*GPUS))
    return fake


def test_a_gpu_is_what_the_driver_says_and_has_nvmls_number(nvml: FakeNvml) -> None:
    first, second, third = devices.visible_gpus()
    uuid = "GPU-aaaa1111-0000-0000-0000-000000000000"
    assert first == devices.Gpu(0, "NVIDIA H200", uuid, 150_754_820_096, (9, 0))
    assert (second.index, third.index) == (1, 2)
    assert nvml.users == 0


def test_gpus_are_in_cudas_order_whatever_nvmls_is(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(GPUS[2], GPUS[0]))
    assert [(gpu.index, gpu.name) for gpu in devices.visible_gpus()] == [(2, "NVIDIA GB10"), (0, "NVIDIA H200")]


def test_a_gpu_that_cannot_tell_its_memory_is_still_a_gpu(nvml: FakeNvml) -> None:
    gpu = devices.visible_gpus()[2]
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("NVIDIA GB10", None, (12, 1))


def test_a_mig_instance_has_its_own_name_and_memory_and_its_parents_number(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(MIG))
    uuid = "MIG-cccc4444-0000-0000-0000-000000000000"
    assert devices.visible_gpus() == [devices.Gpu(1, "NVIDIA H200 MIG 1g.18gb", uuid, 18_000_000_000, (9, 0))]


def test_without_nvml_there_are_gpus_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*GPUS, driver=False))
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(*GPUS))
    first, *_ = devices.visible_gpus()
    assert (first.index, first.name) == (None, "NVIDIA H200")


def test_all_gpus_of_the_machine_are_listed_whatever_cuda_shows(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(GPUS[1]))
    assert [gpu.index for gpu in devices.visible_gpus()] == [1]
    listed = [(gpu.index, gpu.uuid) for gpu in devices.machine_gpus()]
    assert listed == [(gpu["Index"], gpu["UUID"]) for gpu in nvml.gpus]
    assert devices.machine_gpus()[0] == devices.Gpu(0, "NVIDIA H200", str(GPUS[0]["UUID"]), 150_754_820_096, (9, 0))
    assert nvml.users == 0
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*GPUS, driver=False))
    assert devices.machine_gpus() == []


def test_a_gpu_that_nvml_cannot_read_takes_no_others_number(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus[0] = {"UUID": None, "Index": 0}
    assert [gpu.index for gpu in devices.visible_gpus()] == [None, 1, 2]


def test_without_a_driver_there_are_no_gpus(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "open_driver", lambda: None)
    assert devices.visible_gpus() == []


UNIQUE = (0xABBA000000000001, 0xABBA000000000002, 0xBABA000000000003)
"""The unique ids of three AMD GPUs. The first two begin alike."""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's topology of a machine with a CPU and three AMD GPUs."""
    monkeypatch.setattr(devices, "KFD_NODES", tmp_path)
    monkeypatch.setattr(devices, "torch_build", lambda: "rocm 6.3")
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    describe(tmp_path / "0", simd_count=0)
    for number, unique in enumerate(UNIQUE, 1):
        describe(tmp_path / str(number), simd_count=1216, gfx_target_version=90402, unique_id=unique)
    return tmp_path


def describe(node: Path, **facts: int) -> None:
    node.mkdir(parents=True, exist_ok=True)
    (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))


def test_amd_gpus_are_read_from_the_kernels_topology(amd: Path) -> None:
    found = devices.visible_gpus()
    assert [(gpu.name, gpu.uuid) for gpu in found] == [("AMD gfx942", f"GPU-{unique:x}") for unique in UNIQUE]
    assert {(gpu.index, gpu.memory_bytes, gpu.compute_capability) for gpu in found} == {(None, None, None)}


@pytest.mark.parametrize(
    ("device", "name"), [(0x74A0, "AMD Instinct MI300A"), (0x74A1, "AMD Instinct MI300X"), (0x74FF, "AMD gfx942")]
)
def test_the_device_id_tells_amd_gpus_of_one_architecture_apart(amd: Path, device: int, name: str) -> None:
    describe(amd / "1", simd_count=912, gfx_target_version=90402, unique_id=UNIQUE[0], device_id=device)
    assert devices.visible_gpus()[0].name == name


def test_the_memory_of_an_amd_gpu_is_that_of_its_frame_buffers(amd: Path) -> None:
    for bank, (kind, size) in enumerate([(0, 5), (1, 2**30), (2, 2**31), (4, 7)]):
        describe(amd / "1" / "mem_banks" / str(bank), heap_type=kind, size_in_bytes=size)
    assert devices.visible_gpus()[0].memory_bytes == 3 * 2**30


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"HIP": "1"}, [1]),
        ({"CUDA": "2,0"}, [2, 0]),
        ({"HIP": "2", "CUDA": "0"}, [2]),
        ({"HIP": "", "CUDA": "1"}, [1]),
        ({"HIP": "", "CUDA": ""}, [0, 1, 2]),
        ({"HIP": "-1"}, []),
        ({"HIP": "1,-1,0"}, [1]),
        ({"HIP": "0,3,1"}, [0]),
        ({"HIP": "0, 1"}, [0]),
        ({"HIP": "0,00,1"}, [0]),
        ({"HIP": "1,1,0"}, [1, 0]),
        ({"HIP": "GPU-baba000000000003,0"}, [2, 0]),
        ({"HIP": "GPU-f,0"}, []),
        ({"HIP": "none"}, []),
        ({"ROCR": ""}, []),
        ({"ROCR": "-1"}, []),
        ({"ROCR": "2, 0"}, [2, 0]),
        ({"ROCR": "0,x,1"}, [0]),
        ({"ROCR": "0,3,1"}, [0]),
        ({"ROCR": "1,1,0"}, [1]),
        ({"ROCR": "gpu-baba,1"}, [2, 1]),
        ({"ROCR": "GPU-abba,1"}, []),
        ({"ROCR": "GPU-XX"}, []),
        ({"ROCR": "GPU-"}, []),
        ({"ROCR": "2,0", "HIP": "1"}, [0]),
        ({"ROCR": "2,0", "CUDA": "0"}, [2]),
        ({"ROCR": "2", "HIP": "1"}, []),
    ],
    ids=str,
)
def test_what_hides_amd_gpus_is_read_as_their_runtimes_read_it(
    amd: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: list[int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    assert [UNIQUE.index(int(gpu.uuid.removeprefix("GPU-"), 16)) for gpu in devices.visible_gpus()] == seen


@pytest.mark.parametrize(
    ("lines", "version", "build"),
    [
        (
            ["__version__ = '2.13.0+cpu'", "cuda: Optional[str] = None", "hip: Optional[str] = None"],
            "2.13.0+cpu",
            "cpu",
        ),
        (["__version__ = '2.11.0+cu128'", "cuda: Optional[str] = '12.8'", "hip = None"], "2.11.0+cu128", "cuda 12.8"),
        (["__version__ = '2.9.1+rocm6.3'", "cuda = None", "hip = '6.3.42134-a9a80e791'"], "2.9.1+rocm6.3", "rocm 6.3"),
    ],
)
def test_the_kind_of_pytorch_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], version: str, build: str
) -> None:
    (tmp_path / "version.py").write_text("\n".join(["from typing import Optional", "debug = False", *lines]))
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert (devices.torch_version(), devices.torch_build()) == (version, build)


def test_without_pytorch_its_version_and_kind_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices.torch_version() is None
    assert devices.torch_build() is None


def test_asking_about_pytorch_agrees_with_it_and_does_not_import_it() -> None:
    script = """
import sys
from gpubench import devices, telemetry
from gpubench.runs import directory
version = devices.torch_version()
devices.torch_build(), devices.visible_gpus()
assert "torch" not in sys.modules
print(version)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    import torch

    assert answer.stdout.strip() == str(torch.__version__)


class Machine:
    """Two cores of two hyper-threads each, in files like the kernel's."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cgroup = root / "cgroup"
        for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
            self.write(root / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings)
        self.write(root / "own", "1:cpu:/elsewhere\n0::/slice/job\n")
        monkeypatch.setattr(devices, "CPU_ROOT", root)
        monkeypatch.setattr(devices, "CGROUP_ROOT", self.cgroup)
        monkeypatch.setattr(devices, "OWN_CGROUPS", root / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_hyper_threads_of_one_core_count_once(machine: Machine) -> None:
    assert devices.physical_cores() == 2


def test_affinity_binds_the_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    assert devices.physical_cores() == 1


def test_cpus_of_unknown_topology_count_as_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 8, 9})
    assert devices.physical_cores() == 3


@pytest.mark.parametrize(
    ("quota", "cpus", "cores"),
    [("max 100000", None, 2), ("150000 100000", 1.5, 1), ("50000 100000", 0.5, 1), ("800000 100000", 8.0, 2)],
)
def test_a_cgroup_quota_binds_the_cores(machine: Machine, quota: str, cpus: float | None, cores: int) -> None:
    machine.write(machine.cgroup / "slice" / "job" / "cpu.max", quota)
    assert devices.cpu_quota() == cpus
    assert devices.physical_cores() == cores


def test_the_tightest_limit_on_the_way_up_binds(machine: Machine) -> None:
    machine.write(machine.cgroup / "cpu.max", "300000 100000")
    machine.write(machine.cgroup / "slice" / "cpu.max", "100000 100000")
    machine.write(machine.cgroup / "slice" / "job" / "cpu.max", "max 100000")
    machine.write(machine.cgroup / "slice" / "memory.max", "max")
    machine.write(machine.cgroup / "slice" / "job" / "memory.max", "4096")
    assert devices.cpu_quota() == 1.0
    assert devices.memory_limit() == 4096


def test_without_a_cgroup_there_is_no_limit(machine: Machine) -> None:
    devices.OWN_CGROUPS.unlink()
    assert devices.cpu_quota() is None
    assert devices.memory_limit() is None


def test_this_machine_has_cores_to_use() -> None:
    assert 1 <= devices.physical_cores() <= (psutil.cpu_count() or 1)
