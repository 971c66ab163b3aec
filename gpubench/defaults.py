"""Fills in what the user left open, from the model and the machine, and refuses early what cannot work.

No torch: this runs in the command line process, before anything is started.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpubench import devices
from gpubench.configuration import apply_overrides
from gpubench.errors import DeviceError, ModelError, SettingsError
from gpubench.settings import Device, Precision, TrainSettings
from gpubench.sources import SYNTHETIC, check_source
from gpubench.zoo import MODELS, find

AMPERE = (8, 0)
FASTEST_LOADERS = 8  # DataLoader workers by default on a GPU: beyond it most image pipelines stop gaining
WORKER_BYTES = 400 << 20  # a rank that has imported torch and nothing else


@dataclass(frozen=True)
class Choice:
    """A setting that was filled in, and why."""

    key: str
    value: Any
    reason: str


def complete(settings: TrainSettings) -> tuple[TrainSettings, list[Choice]]:
    """Settings without gaps, and what was chosen.

    Raises DeviceError, ModelError, DataError or SettingsError for what is known not to work on this machine.
    """
    gpus = devices.visible_gpus()
    choices: list[Choice] = []

    def choose(key: str, given: Any, value: Any, reason: str) -> Any:
        if given is not None:
            return given
        choices.append(Choice(key, value, reason))
        return value

    build = devices.torch_build() or "none"
    usable = bool(gpus) and build != "cpu"
    why = f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU found"
    if gpus and not usable:
        why = "a GPU is there, but this torch is a CPU build"
    device = choose("device", settings.device, Device.cuda if usable else Device.cpu, why)
    refuse_device(settings, device, gpus, build)

    on_gpu = device is Device.cuda
    modern = all((gpu.compute_capability or AMPERE) >= AMPERE for gpu in gpus)
    fastest = Precision.bf16 if on_gpu and modern else Precision.amp if on_gpu else Precision.fp32
    precision = choose("precision", settings.precision, fastest, "the fastest that trains safely here")
    if precision is Precision.tf32 and not on_gpu:
        raise DeviceError("precision tf32 is a format of NVIDIA's tensor cores; the CPU has none", "use fp32 or bf16")

    name = settings.model.name
    image_size = settings.data.image_size
    if name is None:
        name = choose(
            "model.name", None, "resnet50" if on_gpu else "resnet18", "ResNet in a size that suits the device"
        )
        if not on_gpu:
            image_size = choose("data.image_size", image_size, 64, "small enough for a CPU")
    model_batch, convolutional = known_model(name, on_gpu)
    check_source(settings.data)
    world_size = settings.distributed.world_size
    cores = devices.physical_cores()
    loaded = settings.data.source not in SYNTHETIC[:1]
    loaders = min(FASTEST_LOADERS, max(1, cores // world_size)) if on_gpu and loaded else 0
    filled = {
        "device": device,
        "precision": precision,
        "model.name": name,
        "data.image_size": image_size,
        "training.batch_size": choose(
            "training.batch_size", settings.training.batch_size, model_batch, "the model's own"
        ),
        "data.workers": choose("data.workers", settings.data.workers, loaders, f"{cores} cores for {world_size} ranks"),
        "data.pin_memory": choose("data.pin_memory", settings.data.pin_memory, on_gpu, f"on {device}"),
        "performance.channels_last": choose(
            "performance.channels_last", settings.performance.channels_last, on_gpu and convolutional, f"on {device}"
        ),
        "performance.cpu_threads": choose(
            "performance.cpu_threads",
            settings.performance.cpu_threads,
            max(1, cores // world_size),
            f"{cores} physical cores for {world_size} ranks",
        ),
        "distributed.backend": choose(
            "distributed.backend", settings.distributed.backend, "nccl" if on_gpu else "gloo", f"on {device}"
        ),
    }
    return apply_overrides(settings, filled), choices


def refuse_device(settings: TrainSettings, device: Device, gpus: list[devices.Gpu], build: str) -> None:
    world_size = settings.distributed.world_size
    if device is Device.cuda and not build.startswith("rocm"):
        if build == "cpu":
            raise DeviceError(f"device=cuda, but torch {devices.torch_version()} is a CPU build", "use --device cpu")
        if not gpus:
            raise DeviceError("device=cuda, but no NVIDIA GPU is visible", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
        if world_size > len(gpus):
            raise DeviceError(
                f"distributed.world_size={world_size} needs as many GPUs, and {len(gpus)} are visible",
                f"use --world-size {len(gpus)} or less",
            )
    if device is Device.cpu:
        memory = psutil.virtual_memory().available
        if world_size * WORKER_BYTES > memory:
            raise DeviceError(
                f"distributed.world_size={world_size} x {WORKER_BYTES >> 20} MiB a rank exceeds the "
                f"{memory >> 20} MiB of memory available",
                f"use --world-size {memory // WORKER_BYTES} or less",
            )
        if settings.distributed.backend == "nccl":
            raise SettingsError("distributed.backend=nccl moves data between GPUs only", "use gloo on a CPU")


def known_model(name: str, on_gpu: bool) -> tuple[int, bool]:
    """(default batch size, whether it is convolutional), if `name` is a model that can be found.

    Raises ModelError naming the nearest built-in model.
    """
    if name in MODELS:
        spec = find(name)
        convolutional = spec.model_class.startswith(("ResNet", "UNet"))
        return spec.batch_size_cuda if on_gpu else spec.batch_size_cpu, convolutional
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model folder {name!r} has no config.json", "give a folder as transformers saves it")
    elif ":" not in name:
        find(name)
    return 32 if on_gpu else 8, False
