"""Chooses the settings that the user did not set, from the model and the machine, and rejects invalid ones early.

This runs on the command line before any worker starts, so it does not import torch.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import psutil

from gpubench import devices, foreign_files, releases
from gpubench.errors import DeviceError, ModelError, SettingsError
from gpubench.hardware import AMPERE
from gpubench.ranks import Ranks, launched_by_torchrun
from gpubench.settings.callables import check_arguments, refuse_missing, signature_in_source
from gpubench.settings.commands import COMMANDS
from gpubench.settings.data_sources import (
    SYNTHETIC,
    batches_each,
    check_source,
    check_task,
    names_callable,
    refuse_short,
    samples_in,
)
from gpubench.settings.keys import flatten
from gpubench.settings.loading import validate
from gpubench.settings.schema import CompletedTrainSettings, Device, Precision, RunSettings, TrainSettings
from gpubench.settings.sections import DataSettings, DistributedSettings, TrainingSettings
from gpubench.units import counted
from gpubench.zoo import LONGEST, TASK_OF_SUFFIX, find, is_builtin

FASTEST_LOADERS = 8  # DataLoader workers by default on a GPU: beyond it most image pipelines stop gaining

WORKER_BYTES = 400 << 20  # a rank that has imported torch and nothing else


class Gaps:
    """The values of all settings by dot-key, and the reasons for those that gpubench chose."""

    def __init__(self, settings: RunSettings) -> None:
        self._class = type(settings)
        self._values = flatten(settings.model_dump())
        self.reasons: dict[str, str] = {}

    def fill(self, key: str, value: Any, reason: str) -> Any:
        """Chooses `value` if `key` is not set, and returns the setting's value."""
        if self._values[key] is None:
            self.choose(key, value, reason)
        return self._values[key]

    def choose(self, key: str, value: Any, reason: str) -> None:
        self._values[key], self.reasons[key] = value, reason

    def filled(self) -> Any:
        """The settings as an instance of the completed class. Raises SettingsError."""
        cls: Any = COMMANDS[self._class.command]
        return validate(cls[Never], self._values, {})


def complete(settings: TrainSettings) -> tuple[CompletedTrainSettings, dict[str, str]]:
    """Completes the settings, and gives the reasons for those that were chosen, by dot-key.

    Raises DeviceError, ModelError, DataError or SettingsError for settings that cannot work on this machine.
    """
    gaps = Gaps(settings)
    fill_training(settings, gaps, on_gpu=fill_device(settings, gaps) is Device.cuda)
    return gaps.filled(), gaps.reasons


def fill_training(settings: TrainSettings, gaps: Gaps, on_gpu: bool) -> None:
    """Chooses what is left open besides device and precision. Raises the errors of `complete`."""
    name = settings.model.name
    if name is None:
        suited = "resnet50" if on_gpu else "resnet18"
        name = gaps.fill("model.name", suited, "ResNet in a size that suits the device")
        if not on_gpu:
            gaps.fill("data.image_size", 64, "small enough for a CPU")
    model_batch, convolutional = known_model(name, on_gpu)
    refuse_arguments(name, settings.model.arguments)
    gaps.fill("training.batch_size", model_batch, "the model's own")
    refuse_combinations(settings)
    check_source(settings.data)
    if is_builtin(name):
        check_task(settings.data.source, find(name).task)
    refuse_sizes(settings, name, settings.training.batch_size or model_batch)
    sharded = settings.distributed.strategy == "fsdp2"
    where = "on a GPU" if on_gpu else "on a CPU"
    ranks, cores = local_ranks(settings), devices.physical_cores()
    share = f"{counted(cores, 'core')} for {counted(ranks, 'rank')}"
    loaders = default_loaders(settings, on_gpu)
    gaps.fill("data.workers", loaders, share if loaders else f"{where}, {settings.data.source} data")
    refuse_loaders(settings, ranks)
    gaps.fill("data.pin_memory", on_gpu, where)
    gaps.fill("performance.channels_last", on_gpu and convolutional and not sharded, f"{name} {where}")
    gaps.fill("performance.cpu_threads", max(1, cores // ranks), share)
    if not on_gpu or not has_gpu_each(settings, devices.visible_gpus()):
        gaps.fill("distributed.backend", "nccl" if on_gpu else "gloo", where)


def default_loaders(settings: TrainSettings, on_gpu: bool) -> int:
    """The number of DataLoader workers per rank if data.workers is not set."""
    if not on_gpu or settings.data.source in SYNTHETIC[:1]:
        return 0
    return min(FASTEST_LOADERS, max(1, devices.physical_cores() // local_ranks(settings)))


def refuse_beside_loader(settings: CompletedTrainSettings) -> None:
    """Raises SettingsError if settings of a DataLoader are not the defaults although the user's own loader is used."""
    data, on_gpu = settings.data, settings.device is Device.cuda
    prefetch = DataSettings.model_fields["prefetch"].get_default()
    unused = {"workers": default_loaders(settings, on_gpu), "pin_memory": on_gpu, "prefetch": prefetch}
    for name, default in unused.items():
        if getattr(data, name) != default:
            raise SettingsError(
                f"data.{name} = {getattr(data, name)}: data.source {data.source} returns a DataLoader, which is used "
                "as it is",
                f"leave data.{name} out, or return the dataset alone",
                keys=[f"data.{name}"],
            )


def refuse_beside_optimizer(training: TrainingSettings) -> None:
    """Raises SettingsError if settings of an optimizer are not the defaults although the user's own is used."""
    for name in ("optimizer", "optimizer_impl", "learning_rate", "momentum", "weight_decay"):
        if (value := getattr(training, name)) != TrainingSettings.model_fields[name].get_default():
            raise SettingsError(
                f"training.{name} = {value}: the model comes with its own optimizer",
                f"leave training.{name} out, or return (module, make_batch, loss) without an optimizer",
                keys=[f"training.{name}"],
            )


def required_torch() -> str:
    """The value of `devices.torch_build()`. Raises DeviceError if PyTorch is not installed."""
    build = devices.torch_build()
    if build is None:
        raise DeviceError(
            "PyTorch is not installed",
            "choose the build for your driver at https://pytorch.org/get-started/locally, and pip install it",
        )
    return build


def find_device(gaps: Gaps) -> tuple[Device, list[devices.Gpu]]:
    """The device to run on, and the visible GPUs. Raises DeviceError if the requested device is missing."""
    build, gpus = required_torch(), devices.visible_gpus()
    usable = bool(gpus) and build != "cpu"
    why = f"{len(gpus)} x {gpus[0].name}" if usable else "no GPU found"
    if gpus and not usable:
        why = "there is a GPU, but this PyTorch is a CPU build"
    device = Device(gaps.fill("device", Device.cuda if usable else Device.cpu, why))
    if device is Device.cuda and build == "cpu":
        message = f"device=cuda, but torch {devices.torch_version()} is a CPU build"
        raise DeviceError(message, "use --device cpu", keys=["device"])
    if device is Device.cuda and not gpus and not build.startswith("rocm"):
        message = "device=cuda, but CUDA's driver shows no GPU"
        raise DeviceError(message, "see nvidia-smi and CUDA_VISIBLE_DEVICES", keys=["device"])
    return device, gpus


def fill_device(settings: TrainSettings, gaps: Gaps) -> Device:
    """Chooses device and precision, and returns the device."""
    device, gpus = find_device(gaps)
    refuse_ranks(settings, device, gpus, settings.distributed.backend)
    modern = all((gpu.compute_capability or AMPERE) >= AMPERE for gpu in gpus)
    fastest = Precision.fp32 if device is Device.cpu else Precision.bf16 if modern else Precision.amp
    precision = gaps.fill("precision", fastest, "the fastest that trains safely here")
    if device is Device.cpu:
        refuse_on_cpu(precision)
        if settings.distributed.strategy == "fsdp2" and not releases.installed().shards_on_cpu:
            raise SettingsError(
                f"distributed.strategy=fsdp2 on a CPU needs PyTorch 2.7 or later; this is {releases.installed()}",
                "use --distributed.strategy=ddp",
                keys=["distributed.strategy"],
            )
    return device


def refuse_on_cpu(precision: Precision) -> None:
    """Raises DeviceError for a precision that CPUs lack."""
    if precision is Precision.tf32:
        message = "precision=tf32 is a format of NVIDIA's tensor cores; the CPU has none"
        raise DeviceError(message, "use fp32 or bf16", keys=["precision"])


def refuse_loaders(settings: TrainSettings, ranks: int) -> None:
    """Raises DeviceError for more DataLoader workers than the memory allows."""
    needed, memory = ranks * (settings.data.workers or 0) * WORKER_BYTES, available_memory()
    if needed > memory and settings.data.source != SYNTHETIC[0]:
        raise DeviceError(
            f"data.workers={settings.data.workers} x {ranks} ranks x {WORKER_BYTES >> 20} MiB exceeds the "
            f"{memory >> 20} MiB of memory available",
            f"use --data.workers={memory // WORKER_BYTES // ranks} or less",
            keys=["data.workers"],
        )


def available_memory() -> int:
    """The memory available to new processes in bytes, within the container's limit."""
    return min(psutil.virtual_memory().available, devices.memory_limit() or sys.maxsize)


def refuse_combinations(settings: TrainSettings) -> None:
    """Raises SettingsError for valid settings that do not work together."""
    check_wandb(settings)
    if settings.distributed.strategy == "fsdp2" and settings.distributed.world_size == 1:
        message = "distributed.strategy=fsdp2 shards among ranks, and there is one"
        raise SettingsError(message, "use --world-size 2", keys=["distributed.strategy"])
    if settings.distributed.strategy == "fsdp2" and settings.performance.channels_last:
        raise SettingsError(
            "performance.channels_last: FSDP2 cannot shard parameters in that layout",
            "use --performance.channels_last=false or --distributed.strategy=ddp",
            keys=["performance.channels_last"],
        )
    if settings.distributed.separate_reduce_scatter:
        refuse_separate_reduce_scatter(settings.distributed)
    if sharded_sgd(settings) and settings.training.optimizer_impl == "fused":
        raise SettingsError(
            "training.optimizer_impl=fused: PyTorch has no fused SGD for parameters that FSDP2 has sharded",
            "use --training.optimizer_impl=foreach or --training.optimizer=adamw",
            keys=["training.optimizer_impl"],
        )
    graphs = settings.performance.compile and settings.performance.compile_mode in ("reduce-overhead", "max-autotune")
    if graphs and settings.training.grad_accumulation > 1:
        raise SettingsError(
            f"performance.compile_mode={settings.performance.compile_mode}: CUDA graphs do not work with "
            f"training.grad_accumulation={settings.training.grad_accumulation}",
            "use --performance.compile_mode=default or max-autotune-no-cudagraphs",
            keys=["performance.compile_mode", "training.grad_accumulation"],
        )


def refuse_separate_reduce_scatter(settings: DistributedSettings) -> None:
    """Raises SettingsError if nothing is reduce-scattered, or if this torch cannot do it separately."""
    without = "leave distributed.separate_reduce_scatter out"
    if settings.strategy != "fsdp2":
        raise SettingsError(
            f"distributed.separate_reduce_scatter: {settings.strategy} does not reduce-scatter",
            f"use --distributed.strategy=fsdp2, or {without}",
            keys=["distributed.separate_reduce_scatter"],
        )
    if not releases.installed().reduces_scatter_separately:
        raise SettingsError(
            "distributed.separate_reduce_scatter: FSDP2 has it since PyTorch 2.13, and this is "
            f"{devices.torch_version()}",
            f"install a later PyTorch, or {without}",
            keys=["distributed.separate_reduce_scatter"],
        )


def sharded_sgd(settings: TrainSettings) -> bool:
    """Whether SGD updates DTensors, for which PyTorch has no fused implementation."""
    return settings.distributed.strategy == "fsdp2" and settings.training.optimizer == "sgd"


def check_wandb(settings: RunSettings) -> None:
    if settings.logging.wandb and importlib.util.find_spec("wandb") is None:
        hint = "pip install wandb, in gpubench's environment"
        raise SettingsError("logging.wandb needs the wandb package", hint, keys=["logging.wandb"])


def local_ranks(settings: RunSettings) -> int:
    """The number of ranks on this machine: all, unless torchrun runs them on several machines."""
    return Ranks.from_environment().local_world_size if launched_by_torchrun() else settings.distributed.world_size


def has_gpu_each(settings: RunSettings, gpus: Sequence[devices.Gpu]) -> bool:
    """Whether each rank of this machine sees one GPU, so that only the ranks know if it is the same one.

    Slurm's --gpus-per-task and --gpu-bind, or a CUDA_VISIBLE_DEVICES for each rank, show a rank its own GPU alone.
    """
    return launched_by_torchrun() and len(gpus) == 1 < local_ranks(settings)


def refuse_ranks(settings: RunSettings, device: Device, gpus: list[devices.Gpu], backend: str | None) -> None:
    """Raises DeviceError or SettingsError for more ranks than the GPUs, or on a CPU the memory, allow."""
    ranks_here = local_ranks(settings)
    if device is Device.cuda and gpus and ranks_here > len(gpus) and not has_gpu_each(settings, gpus):
        raise DeviceError(
            f"distributed.world_size={ranks_here} needs as many GPUs, and {len(gpus)} are visible",
            f"use --world-size {len(gpus)} or less",
            keys=["distributed.world_size"],
        )
    if device is Device.cpu:
        memory = available_memory()
        if ranks_here * WORKER_BYTES > memory:
            raise DeviceError(
                f"distributed.world_size={ranks_here} x {WORKER_BYTES >> 20} MiB a rank exceeds the "
                f"{memory >> 20} MiB of memory available",
                f"use --world-size {max(1, memory // WORKER_BYTES)} or less",
                keys=["distributed.world_size"],
            )
        if backend == "nccl":
            message = "distributed.backend=nccl moves data between GPUs only"
            raise SettingsError(message, "use gloo on a CPU", keys=["distributed.backend"])


def refuse_sizes(settings: TrainSettings, name: str, batch_size: int) -> None:
    """Raises ModelError, DataError or UsageError for sizes of model and data that do not fit together.

    These are a sequence longer than the model's positions, a batch larger than the data, and epochs of too few steps.
    """
    positions, usual = sequence_lengths(name)
    length = settings.data.sequence_length
    if length and positions and length > positions:
        raise ModelError(
            f"data.sequence_length {length} exceeds the {positions} positions of {name}",
            f"set data.sequence_length to {positions} or less",
            keys=["data.sequence_length"],
        )
    ranks, training, profiling = settings.distributed.world_size, settings.reading, settings.profiling
    if training is None:
        return
    steps = max(training.warmup, profiling.units if profiling.enabled else 0) + 1
    enough = ranks * batch_size * (steps * training.grad_accumulation if training.epochs else 1)
    samples = samples_in(settings.data, length or usual, enough)
    if samples is not None:
        batches = batches_each(settings.data.source, samples, batch_size, ranks)
        refuse_short(settings.model_copy(update={"training": training}), batches)


def sequence_lengths(name: str) -> tuple[int | None, int | None]:
    """The (largest, default) number of tokens in a sequence by the table or a config.json; None if unknown."""
    if is_builtin(name):
        spec = find(name)
        return (spec.positions, spec.sequence_length) if spec.task in LONGEST else (None, spec.sequence_length)
    try:
        config = json.loads(foreign_files.content(Path(name) / "config.json"))
        task = next(task for suffix, task in TASK_OF_SUFFIX.items() if config["architectures"][0].endswith(suffix))
        own = config.get("text_config", config)
        positions = own.get("max_position_embeddings") or own.get("n_positions")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, StopIteration):
        return None, None  # a callable, or a folder that the worker will check
    if task not in LONGEST or not isinstance(positions, int) or positions < 1:
        return None, None
    return positions, min(positions, LONGEST[task])


def refuse_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises ModelError if the source of the model `name` shows that it is missing, or takes no such arguments."""
    if is_builtin(name) or ":" not in name or os.path.isdir(name):  # noqa: PTH112
        if arguments:
            kind = "a built-in model" if is_builtin(name) else "a folder with a model"
            keys = [f"model.arguments.{key}" for key in arguments]
            hint = "only a model of your own does: --model module:callable"
            raise ModelError(f"{keys[0]}: {name} is {kind}, which takes no arguments", hint, keys=keys)
    else:
        refuse_missing("model", name, ModelError, ["model.name"])
        if signature := signature_in_source(name):
            check_arguments(name, signature, arguments)


def known_model(name: str, on_gpu: bool) -> tuple[int, bool]:
    """The (default batch size, whether it is convolutional) of the model `name`.

    Raises ModelError with the nearest built-in model if there is none.
    """
    if is_builtin(name):
        spec = find(name)
        convolutional = spec.model_class.startswith(("ResNet", "UNet"))
        return spec.batch_size_cuda if on_gpu else spec.batch_size_cpu, convolutional
    if os.path.isdir(name):  # noqa: PTH112 - Path's own raises for a name too long or a folder out of bounds
        if not (Path(name) / "config.json").is_file():
            raise ModelError(
                f"model.name: folder {name!r} has no config.json",
                "give a folder as transformers saves it",
                keys=["model.name"],
            )
    elif ":" not in name:
        find(name)
    elif not names_callable(name):
        message = f"model.name {name!r} is not module:callable"
        raise ModelError(message, "for example mypackage.zoo:build, without .py", keys=["model.name"])
    return 32 if on_gpu else 8, False
