"""Fills in what the settings of `gpubench memory` leave open."""

from gpubench import devices
from gpubench.configuration import apply_overrides
from gpubench.defaults import Choice, Gaps, complete, fill_training, required_torch
from gpubench.errors import SettingsError
from gpubench.hardware import AMPERE, find_accelerator
from gpubench.memory.predicting import target_of
from gpubench.settings import Device, MemorySettings, Precision


def complete_memory(settings: MemorySettings) -> tuple[MemorySettings, list[Choice]]:
    """Settings without gaps, and what was chosen. Raises what `complete` does, and DeviceError for an unknown GPU."""
    required_torch()
    memory = settings.memory
    on_gpu = memory.predict and settings.device is not Device.cpu
    filled, choices = _predicted(settings) if on_gpu else complete(settings)
    if memory.find_batch_size and filled.device is Device.cpu and memory.device_memory is None:
        raise SettingsError("a CPU's memory is everybody's: how much of it may a batch fill?", "--device-memory 4GiB")
    return filled, choices


def _predicted(settings: MemorySettings) -> tuple[MemorySettings, list[Choice]]:
    """As on the GPU that is predicted for: this machine's own device has no say."""
    gaps = Gaps(settings)
    here = [found.key for gpu in devices.visible_gpus()[:1] if (found := find_accelerator(gpu.name))]
    if here and not settings.memory.device_memory:
        gaps.fill("memory.device_model", here[0], "the GPU that is here")
    gaps.fill("device", Device.cuda, "predicted")
    gaps.fill("data.workers", 0, "a prediction reads one sample")
    chosen = apply_overrides(settings, {choice.key: choice.value for choice in gaps.choices})
    capability = target_of(chosen.memory, Device.cuda).capability
    old = capability is not None and capability < AMPERE
    gaps.fill("precision", Precision.amp if old else Precision.bf16, "the fastest that trains safely there")
    known = apply_overrides(settings, {choice.key: choice.value for choice in gaps.choices})
    filled, choices = fill_training(known, Gaps(known), on_gpu=True)
    return filled, gaps.choices + choices
