"""What is filled in for the user on machines that have this and lack that, and what is refused there."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpubench import devices
from gpubench.configuration import apply_overrides
from gpubench.defaults import complete
from gpubench.devices import Gpu
from gpubench.dotkeys import flatten
from gpubench.errors import DataError, DeviceError, ModelError, SettingsError
from gpubench.settings import Device, Precision, TrainSettings

H200 = Gpu(0, "NVIDIA H200", "GPU-a", 150 << 30, (9, 0))
V100 = Gpu(1, "Tesla V100", "GPU-b", 16 << 30, (7, 0))
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, 16 GiB, no GPU."""
    monkeypatch.setattr(devices, "physical_cores", lambda: 8)
    monkeypatch.setattr(devices, "memory_limit", lambda: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB))
    has(monkeypatch, build="cpu")


def has(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, build: str | None = "cuda 12.8") -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: list(gpus))
    monkeypatch.setattr(devices, "torch_build", lambda: build)
    monkeypatch.setattr(devices, "torch_version", lambda: "2.13.0")


def settings(**overrides: Any) -> TrainSettings:
    return apply_overrides(TrainSettings(), {key.replace("__", "."): value for key, value in overrides.items()})


def under_torchrun(monkeypatch: pytest.MonkeyPatch, world_size: int, local: int) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local}
    for name, value in place.items() | {("MASTER_ADDR", "there"), ("MASTER_PORT", 1)}:
        monkeypatch.setenv(name, str(value))


def test_a_cpu_gets_a_small_model_in_fp32() -> None:
    done, choices = complete(TrainSettings())
    assert (done.device, done.precision, done.distributed.backend) == (Device.cpu, Precision.fp32, "gloo")
    assert (done.model.name, done.data.image_size, done.training.batch_size) == ("resnet18", 64, 16)
    assert (done.data.workers, done.data.pin_memory, done.performance.channels_last) == (0, False, False)
    assert done.performance.cpu_threads == 8
    assert next(choice.reason for choice in choices if choice.key.endswith("cpu_threads")) == "8 cores for 1 rank"
    assert next(choice.reason for choice in choices if choice.key == "device") == "no GPU found"


def test_a_gpu_gets_resnet50_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200)
    done, choices = complete(TrainSettings())
    assert (done.device, done.precision, done.distributed.backend) == (Device.cuda, Precision.bf16, "nccl")
    assert (done.model.name, done.data.image_size, done.training.batch_size) == ("resnet50", None, 128)
    assert (done.data.workers, done.data.pin_memory, done.performance.channels_last) == (0, True, True)
    assert next(choice.reason for choice in choices if choice.key == "device") == "1 x NVIDIA H200"


def test_a_gpu_without_bfloat16_gets_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    assert complete(TrainSettings())[0].precision is Precision.amp


def test_a_gpu_is_of_no_use_to_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, build="cpu")
    done, choices = complete(TrainSettings())
    assert done.device is Device.cpu
    assert "CPU build" in next(choice.reason for choice in choices if choice.key == "device")


def test_a_transformer_is_not_laid_out_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200)
    assert complete(settings(model="gpt2"))[0].performance.channels_last is False


def test_data_from_disk_gets_workers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    assert complete(settings(data="synthetic-host"))[0].data.workers == 8
    assert complete(settings(data="synthetic-host", world_size=2))[0].data.workers == 4


def test_ranks_share_the_cores() -> None:
    assert complete(settings(world_size=3))[0].performance.cpu_threads == 2


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200)
    given = {
        "device": "cpu",
        "precision": "bf16",
        "model.name": "gpt2-tiny",
        "training.batch_size": 3,
        "data.workers": 1,
        "data.pin_memory": True,
        "performance.channels_last": True,
        "performance.cpu_threads": 5,
        "distributed.backend": "gloo",
    }
    done, choices = complete(apply_overrides(TrainSettings(), given))
    assert {key: flatten(done.model_dump(mode="json"))[key] for key in given} == given
    assert choices == []


def test_what_was_chosen_is_what_is_done() -> None:
    done, choices = complete(TrainSettings())
    flat = flatten(done.model_dump())
    assert {choice.key: choice.value for choice in choices}.items() <= flat.items()
    assert all(choice.reason for choice in choices)
    assert complete(done) == (done, [])


def test_cuda_needs_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, build="cpu")
    with pytest.raises(DeviceError, match=r"device=cuda, but torch 2\.13\.0 is a CPU build"):
        complete(settings(device="cuda"))


def test_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch)
    with pytest.raises(DeviceError, match="device=cuda, but no NVIDIA GPU is visible"):
        complete(settings(device="cuda"))


def test_an_amd_gpu_is_taken_on_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, build="rocm 6.3")
    assert complete(settings(device="cuda"))[0].device is Device.cuda


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    with pytest.raises(
        DeviceError, match=r"distributed\.world_size=3 needs as many GPUs, and 2 are visible"
    ) as refusal:
        complete(settings(world_size=3))
    assert refusal.value.hint == "use --world-size 2 or less"


def test_ranks_on_other_machines_need_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    under_torchrun(monkeypatch, world_size=4, local=2)
    done, _ = complete(settings(world_size=4))
    assert (done.device, done.performance.cpu_threads) == (Device.cuda, 4)


def test_each_rank_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"distributed\.world_size=999 x 400 MiB .* 16384 MiB") as refusal:
        complete(settings(world_size=999))
    assert refusal.value.hint == "use --world-size 40 or less"
    assert complete(settings(world_size=40))[0].distributed.world_size == 40


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_limit", lambda: GIB)
    with pytest.raises(DeviceError, match="1024 MiB of memory"):
        complete(settings(world_size=3))


def test_tf32_needs_tensor_cores() -> None:
    with pytest.raises(DeviceError, match="tf32"):
        complete(settings(precision="tf32"))


def test_nccl_needs_gpus() -> None:
    with pytest.raises(SettingsError, match=r"distributed\.backend=nccl"):
        complete(settings(distributed__backend="nccl"))


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="'resnet5'") as refusal:
        complete(settings(model="resnet5"))
    assert "did you mean 'resnet50'?" in str(refusal.value.hint)


def test_a_model_folder_needs_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        complete(settings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    assert complete(settings(model=str(tmp_path)))[0].training.batch_size == 8


def test_a_callable_is_left_to_the_worker() -> None:
    assert complete(settings(model="mine.zoo:build"))[0].training.batch_size == 8


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        complete(settings(data="image-folder", data__path=tmp_path / "nowhere"))


def test_weights_and_biases_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"logging\.wandb needs the wandb package"):
        complete(settings(logging__wandb=True))


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a" * 300])
def test_a_name_longer_than_any_file_is_an_unknown_one(name: str) -> None:
    with pytest.raises(ModelError):
        complete(settings(model=name))
    with pytest.raises(DataError, match="does not exist"):
        complete(settings(data="text", data__path=name))
