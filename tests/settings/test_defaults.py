"""What is filled in for the user on machines that have this and lack that, and what is refused there."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpubench import devices, releases
from gpubench.devices import Gpu
from gpubench.errors import DataError, DeviceError, ModelError, SettingsError, UsageError
from gpubench.host.launch import worker_environment
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.kinds.pipeline import defaults
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.kinds.pipeline.warnings import other_threads, unused_prompts
from gpubench.releases import Release
from gpubench.settings.defaults import complete, refuse_combinations
from gpubench.settings.keys import flatten
from gpubench.settings.loading import apply_overrides
from gpubench.settings.schema import Device, Precision, TrainSettings
from gpubench.worker.loop import optimizer_impl

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
    done, reasons = complete(TrainSettings())
    assert (done.device, done.precision, done.distributed.backend) == (Device.cpu, Precision.fp32, "gloo")
    assert (done.model.name, done.data.image_size, done.training.batch_size) == ("resnet18", 64, 16)
    assert (done.data.workers, done.data.pin_memory, done.performance.channels_last) == (0, False, False)
    assert done.performance.cpu_threads == 8
    assert reasons["performance.cpu_threads"] == "8 cores for 1 rank"
    assert reasons["device"] == "no GPU found"


def test_a_gpu_gets_resnet50_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200)
    done, reasons = complete(TrainSettings())
    assert (done.device, done.precision, done.distributed.backend) == (Device.cuda, Precision.bf16, "nccl")
    assert (done.model.name, done.data.image_size, done.training.batch_size) == ("resnet50", None, 128)
    assert (done.data.workers, done.data.pin_memory, done.performance.channels_last) == (0, True, True)
    assert reasons["device"] == "1 x NVIDIA H200"


def test_a_gpu_without_bfloat16_gets_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    assert complete(TrainSettings())[0].precision is Precision.amp


def test_a_gpu_is_of_no_use_to_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, build="cpu")
    done, reasons = complete(TrainSettings())
    assert done.device is Device.cpu
    assert "CPU build" in reasons["device"]


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
    done, reasons = complete(apply_overrides(TrainSettings(), given))
    assert {key: flatten(done.model_dump(mode="json"))[key] for key in given} == given
    assert reasons == {}


def test_what_was_chosen_is_what_is_done() -> None:
    done, reasons = complete(TrainSettings())
    flat = flatten(done.model_dump())
    assert all(flat[key] is not None for key in reasons)
    assert all(reasons.values())
    assert complete(done) == (done, {})


def test_cuda_needs_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, build="cpu")
    with pytest.raises(DeviceError, match=r"device=cuda, but torch 2\.13\.0 is a CPU build"):
        complete(settings(device="cuda"))


@pytest.mark.parametrize("command", [complete, defaults.complete, complete_memory])
def test_without_pytorch_nothing_starts_and_the_hint_says_where_to_choose_a_build(
    command: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, build=None)
    kinds = {complete: TrainSettings, defaults.complete: PipeSettings, complete_memory: MemorySettings}
    with pytest.raises(DeviceError, match="PyTorch is not installed") as refused:
        command(kinds[command]())
    assert "for your driver" in str(refused.value.hint)


def test_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch)
    with pytest.raises(DeviceError, match="device=cuda, but CUDA's driver shows no GPU"):
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


def test_ranks_that_see_one_gpu_each_decide_how_they_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200)
    under_torchrun(monkeypatch, world_size=4, local=4)
    done, reasons = complete(settings(world_size=4))
    assert (done.device, done.distributed.backend) == (Device.cuda, None)
    assert "distributed.backend" not in reasons
    piped = apply_overrides(PipeSettings(), {"distributed.world_size": 4, "model.unet": "tiny"})
    assert defaults.complete(piped)[0].distributed.backend is None
    assert complete(settings(world_size=4, distributed__backend="nccl"))[0].distributed.backend == "nccl"
    under_torchrun(monkeypatch, world_size=2, local=1)
    assert complete(settings(world_size=2))[0].distributed.backend == "nccl", "each machine has one rank"


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


def test_a_callable_is_left_to_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "zoo.py").write_text("def build(): ...")
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_a_pipeline_on_a_cpu_has_as_many_threads_whatever_its_ranks(world_size: int) -> None:
    done, reasons = defaults.complete(apply_overrides(PipeSettings(), {"distributed.world_size": world_size}))
    assert done.performance.cpu_threads == 8
    reason = reasons["performance.cpu_threads"]
    assert reason == "8 cores, for any number of ranks"


def test_the_ranks_of_a_pipeline_on_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, H200, V100)
    done, _ = defaults.complete(apply_overrides(PipeSettings(), {"distributed.world_size": 2}))
    assert done.performance.cpu_threads == 4


def test_each_prompt_makes_a_sample_where_no_number_is_given(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"a house with {number} windows" for number in range(12)))
    given = {"work.prompts": prompts}
    done, reasons = defaults.complete(apply_overrides(PipeSettings(), given))
    assert done.work.samples == 12
    assert reasons["work.samples"] == "one for each of 12 prompts"
    assert defaults.complete(apply_overrides(PipeSettings(), given | {"work.samples": 8}))[0].work.samples == 8
    assert defaults.complete(PipeSettings())[0].work.samples == 8


def test_prompts_that_are_left_over_are_named() -> None:
    assert unused_prompts(12, 0, 12) is unused_prompts(0, 0, 8) is unused_prompts(3, 0, 8) is None
    assert unused_prompts(12, 0, 8) == (
        "prompts 9 to 12 are not used: --samples 8 is less than the 12 prompts; leave it out for one of each"
    )
    assert (unused_prompts(9, 0, 8) or "").startswith("prompt 9 is not used")
    assert unused_prompts(2, 3, 4) is unused_prompts(0, 3, 2) is None
    assert unused_prompts(2, 3, 3) == (
        "prompt 2 is not used: --samples 3 is less than the 2 prompts with 3 seeds each; leave it out for all"
    )


def test_a_number_of_threads_that_is_not_the_machines_is_told_with_what_follows() -> None:
    assert other_threads(8, cores=8) is other_threads(None, cores=8) is None
    assert "made with 1 thread a rank, not with this machine's 8" in (other_threads(1, cores=8) or "")


def test_a_sequence_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    for name in ("gpt2-tiny", "bert-tiny", "llama-tiny"):
        with pytest.raises(ModelError, match=f"data.sequence_length 65 exceeds the 64 positions of {name}"):
            complete(settings(model__name=name, data__sequence_length=65))
        complete(settings(model__name=name, data__sequence_length=64))
    with pytest.raises(ModelError, match="1025 exceeds the 1024 positions of gpt2"):
        complete(settings(model__name="gpt2", data__sequence_length=1025))
    config = {"architectures": ["GPT2LMHeadModel"], "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="17 exceeds the 16 positions"):
        complete(settings(model__name=str(tmp_path), data__sequence_length=17))


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": null}', '{"architectures": ["GPT2LMHeadModel"]}'])
def test_a_folder_that_does_not_tell_its_positions_is_left_to_the_worker(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    complete(settings(model__name=str(tmp_path), data__sequence_length=10**6))


@pytest.mark.parametrize(("batch_size", "ranks"), [(11, 1), (6, 2)])
def test_a_batch_larger_than_the_data_is_refused(batch_size: int, ranks: int) -> None:
    given = {"model__name": "gpt2-tiny", "data__samples": 10, "distributed__world_size": ranks}
    with pytest.raises(DataError, match=f"a batch of {batch_size}.* takes .* synthetic holds 10"):
        complete(settings(**given, training__batch_size=batch_size))
    complete(settings(**given, training__batch_size=batch_size - 1))


def test_a_batch_larger_than_the_files_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").touch()
    images = {"model__name": "resnet-tiny", "data__source": "image-folder", "data__path": tmp_path}
    with pytest.raises(DataError, match="image-folder holds 3"):
        complete(settings(**images, training__batch_size=4))
    complete(settings(**images, training__batch_size=3))
    (tmp_path / "text.txt").write_text("x" * 100)
    text = {"model__name": "gpt2-tiny", "data__source": "text", "data__path": tmp_path / "text.txt"}
    with pytest.raises(DataError, match="text holds 3"):  # of 32 bytes each
        complete(settings(**text, training__batch_size=4))
    (tmp_path / "text.txt").write_text("x" * 31)
    with pytest.raises(DataError, match="holds 31 tokens, less than one sequence of 32"):
        complete(settings(**text))


def test_epochs_shorter_than_the_warm_up_are_refused() -> None:
    given = {"model__name": "gpt2-tiny", "training__batch_size": 8, "data__samples": 80}
    with pytest.raises(UsageError, match=r"1 epochs x 10 batches / 1 accumulated = 10 steps.*leaves none to measure"):
        complete(settings(**given, training__epochs=1))
    complete(settings(**given, training__epochs=2))
    complete(settings(**given, training__epochs=1, training__warmup_steps=9))


def test_a_separate_reduce_scatter_is_refused_without_fsdp2_and_before_torch_2_13(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {"distributed__separate_reduce_scatter": True, "distributed__world_size": 2}
    with pytest.raises(SettingsError, match="ddp does not reduce-scatter"):
        refuse_combinations(settings(**wanted))
    sharded = settings(**wanted, distributed__strategy="fsdp2")
    monkeypatch.setattr(devices, "torch_version", lambda: "2.12.1+cu130")
    monkeypatch.setattr(releases, "torch_version", lambda: devices.torch_version())
    monkeypatch.setattr(releases, "installed", releases.installed.__wrapped__)
    with pytest.raises(SettingsError, match=r"since PyTorch 2\.13, and this is 2\.12\.1\+cu130") as refused:
        refuse_combinations(sharded)
    assert refused.value.hint == "install a later PyTorch, or leave distributed.separate_reduce_scatter out"
    for version in ("2.13.0", "2.15.0a0+git12", "3.0"):
        monkeypatch.setattr(devices, "torch_version", lambda version=version: version)
        refuse_combinations(sharded)


def test_fused_sgd_of_sharded_parameters_is_refused_and_auto_takes_foreach_on_a_gpu() -> None:
    sharded = settings(distributed__strategy="fsdp2", distributed__world_size=2, training__optimizer="sgd")
    fused = {"training.optimizer_impl": "fused"}
    with pytest.raises(SettingsError, match=r"training\.optimizer_impl=fused"):
        refuse_combinations(apply_overrides(sharded, fused))
    refuse_combinations(apply_overrides(sharded, {**fused, "training.optimizer": "adamw"}))
    assert [optimizer_impl(sharded, on_gpu) for on_gpu in (True, False)] == ["foreach", "loop"]
    assert optimizer_impl(settings(training__optimizer="sgd"), on_gpu=True) == "fused"


def test_cuda_graphs_are_refused_with_the_accumulation_of_gradients_and_other_modes_are_not() -> None:
    wanted = {"performance__compile": True, "training__grad_accumulation": 2}
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(SettingsError, match="CUDA graphs do not work with") as refused:
            refuse_combinations(settings(**wanted, performance__compile_mode=mode))
        assert "max-autotune-no-cudagraphs" in (refused.value.hint or "")
    refuse_combinations(settings(**wanted, performance__compile_mode="max-autotune-no-cudagraphs"))


@pytest.mark.parametrize(
    ("release", "given", "set_variable"),
    [
        ((2, 10), {}, "PYTORCH_ALLOC_CONF"),
        ((2, 13), {"PYTORCH_ALLOC_CONF": "a:1"}, "PYTORCH_ALLOC_CONF"),
        ((2, 13), {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 13), {"PYTORCH_CUDA_ALLOC_CONF": ""}, "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 6), {}, "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 9), {"PYTORCH_ALLOC_CONF": "a:1"}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_expandable_segments_go_into_the_variable_that_pytorch_reads(
    release: tuple[int, int], given: dict[str, str], set_variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: Release(*release))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = worker_environment(complete(settings(device="cpu", performance__expandable_segments=True))[0])
    parts = [part for part in (given.get(set_variable), "expandable_segments:True") if part]
    assert {name: value for name, value in made.items() if "ALLOC" in name} == {set_variable: ",".join(parts)}
