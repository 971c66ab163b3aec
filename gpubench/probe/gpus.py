"""Finds out which GPUs this process has used, by the identifiers that the host knows them by."""

from __future__ import annotations

from typing import Any

import torch


def used_gpus() -> list[str] | None:
    """Returns the digits of the uuids of the GPUs on which this process has held memory; None if they are unknown.

    It initialises nothing and never raises: a process that has not initialised CUDA has used no GPU.
    """
    try:
        if not torch.cuda.is_initialized():
            return []
        return [uuid_digits(device) for device in range(torch.cuda.device_count()) if _has_held_memory(device)]
    except Exception:  # which one depends on the release of PyTorch, and on what the program has replaced
        return None


def uuid_digits(device: int) -> str:
    """Returns the hexadecimal digits of a GPU's uuid, or of a MIG instance's own. It initialises CUDA.

    HIP's uuids are the 16 digits in ASCII, and PyTorch prints the code of each character in hexadecimal. Raises
    ValueError for a GPU without a uuid, for which HIP has "XX" and others zeros.
    """
    digits = str(torch.cuda.get_device_properties(device).uuid).replace("-", "")
    if torch.version.hip:
        digits = bytes.fromhex(digits).decode()
    if not int(digits, 16):
        raise ValueError("the GPU has no uuid")
    return digits


def _has_held_memory(device: int) -> bool:
    """Tells whether the process has held memory on the device, or at least has a context on it if that is unknown."""
    try:
        return torch.cuda.max_memory_reserved(device) > 0
    except RuntimeError:  # an allocator of the program keeps no statistics
        has_context: Any = vars(torch._C)["_cuda_hasPrimaryContext"]  # torch's stubs do not know it
        return bool(has_context(device))
