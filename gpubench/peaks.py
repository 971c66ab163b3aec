"""How much memory this process has taken at the most."""

import resource
from typing import TypedDict

import torch


class Peaks(TypedDict):
    """Bytes; None of a GPU that there is not."""

    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int


class SetupPeaks(TypedDict):
    """Bytes that a GPU held at the most until the warm-up was over; None without a GPU, or where it has no end."""

    setup_peak_allocated: int | None
    setup_peak_reserved: int | None


def peaks(device: torch.device) -> Peaks:
    """The peaks since the process began or, of a GPU, since they were last reset."""
    cuda = device.type == "cuda"
    return Peaks(
        peak_allocated=torch.cuda.max_memory_allocated(device) if cuda else None,
        peak_reserved=torch.cuda.max_memory_reserved(device) if cuda else None,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
    )


def end_of_setup(device: torch.device) -> SetupPeaks:
    """The GPU's peaks until now; they are counted anew from here on.

    cuDNN's search for the fastest convolutions, and the tuning of compiled kernels, take much more memory in the first
    steps than any step takes later. Reading and resetting the allocator's counters waits for nothing.
    """
    if device.type != "cuda":
        return SetupPeaks(setup_peak_allocated=None, setup_peak_reserved=None)
    found = peaks(device)
    torch.cuda.reset_peak_memory_stats(device)
    return SetupPeaks(setup_peak_allocated=found["peak_allocated"], setup_peak_reserved=found["peak_reserved"])
