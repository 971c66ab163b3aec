"""Whether something waits for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Makes every synchronisation that PyTorch knows of an error. It does not know of `torch.cuda.synchronize`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode itself warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
