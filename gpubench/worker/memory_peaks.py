"""Reads, resets and frees the memory of a training process."""

import gc
import resource
import sys
from typing import TypedDict

import torch

from gpubench.probe.gpus import used_gpus


class Peaks(TypedDict):
    """Peak memory in bytes, and the GPUs that held it as in `RepeatDone`; the GPU's figures are None without a GPU."""

    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int
    gpus: list[str] | None


class SetupPeaks(TypedDict):
    """The GPU's peak memory until the end of the warm-up, in bytes; None without a GPU or before that end."""

    setup_peak_allocated: int | None
    setup_peak_reserved: int | None


def peaks(device: torch.device) -> Peaks:
    """The peaks of CPU memory since the start of the process, and of GPU memory since their last reset."""
    cuda = device.type == "cuda"
    return Peaks(
        peak_allocated=torch.cuda.max_memory_allocated(device) if cuda else None,
        peak_reserved=torch.cuda.max_memory_reserved(device) if cuda else None,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        gpus=used_gpus(),
    )


def end_of_setup(device: torch.device) -> SetupPeaks:
    """Reads the peaks of GPU memory until now, and resets them.

    During the first steps, cuDNN's search for the fastest convolutions and the tuning of compiled kernels use much more
    memory than any later step. Reading and resetting the allocator's counters does not synchronise.
    """
    if device.type != "cuda":
        return SetupPeaks(setup_peak_allocated=None, setup_peak_reserved=None)
    found = peaks(device)
    torch.cuda.reset_peak_memory_stats(device)
    return SetupPeaks(setup_peak_allocated=found["peak_allocated"], setup_peak_reserved=found["peak_reserved"])


def free_memory(device: torch.device) -> None:
    """Frees the memory of an earlier repeat in this process, and resets the GPU's peaks.

    A DDP module is part of reference cycles, so only the garbage collector frees it. Compiled code holds memory too.
    """
    if "torch._inductor.compile_fx" in sys.modules:  # something was compiled
        torch.compiler.reset()
        sys.modules["torch._inductor.utils"].clear_inductor_caches()
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
