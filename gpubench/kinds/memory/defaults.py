"""Chooses the settings of `gpubench memory` that the user did not set, for this machine or for the predicted GPU."""

from gpubench import devices, releases
from gpubench.errors import SettingsError
from gpubench.hardware import AMPERE, find_accelerator
from gpubench.kinds.memory.predicted_device import target_of
from gpubench.kinds.memory.settings import CompletedMemorySettings, MemorySettings
from gpubench.settings.defaults import Gaps, fill_device, fill_training, required_torch
from gpubench.settings.schema import Device, Precision


def complete_memory(settings: MemorySettings) -> tuple[CompletedMemorySettings, dict[str, str]]:
    """Completes the settings as `complete` does. Raises its errors, and DeviceError for an unknown GPU."""
    required_torch()
    memory, gaps = settings.memory, Gaps(settings)
    if memory.predict and settings.distributed.world_size > 1 and not releases.installed().predicts_ranks:
        raise SettingsError(
            f"predicting more than one rank needs PyTorch 2.7 or later; this is {releases.installed()}",
            "predict --world-size 1, or measure on a machine with as many GPUs",
        )
    if memory.predict and settings.device is not Device.cpu:
        device = _fill_predicted(settings, gaps)
    else:
        device = fill_device(settings, gaps)
    fill_training(settings, gaps, on_gpu=device is Device.cuda)
    if memory.find_batch_size and device is Device.cpu and memory.device_memory is None:
        raise SettingsError("a CPU's memory is shared with other programs, so it needs a limit", "--device-memory 4GiB")
    return gaps.filled(), gaps.reasons


def _fill_predicted(settings: MemorySettings, gaps: Gaps) -> Device:
    """Chooses the device and what depends on it as on the predicted GPU, whatever device this machine has."""
    follow = settings.memory
    here = [found.key for gpu in devices.visible_gpus()[:1] if (found := find_accelerator(gpu.name, gpu.memory_bytes))]
    if here and not follow.device_memory:
        model = gaps.fill("memory.device_model", here[0], "the GPU of this machine")
        follow = follow.model_copy(update={"device_model": model})
    gaps.fill("device", Device.cuda, "predicted")
    gaps.fill("data.workers", 0, "a prediction reads one sample")
    capability = target_of(follow, Device.cuda).capability
    old = capability is not None and capability < AMPERE
    gaps.fill("precision", Precision.amp if old else Precision.bf16, "the fastest that trains safely there")
    return Device.cuda
