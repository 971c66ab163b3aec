"""How much memory this process has taken at the most."""

import resource
from typing import TypedDict

import torch


class Peaks(TypedDict):
    """Bytes; None of a GPU that there is not."""

    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int


def peaks(device: torch.device) -> Peaks:
    cuda = device.type == "cuda"
    return Peaks(
        peak_allocated=torch.cuda.max_memory_allocated(device) if cuda else None,
        peak_reserved=torch.cuda.max_memory_reserved(device) if cuda else None,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
    )
