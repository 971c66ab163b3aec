"""The differences between the releases of PyTorch that gpubench supports, 2.6 and later.

Features that can be detected at run time are detected where they are used. This module holds the others by version,
taken from the wheels of the releases on both sides of each change. It does not import PyTorch.
"""

import re
from dataclasses import dataclass
from functools import cache

from gpubench.devices import torch_version


@dataclass(frozen=True, order=True)
class Release:
    """A release of PyTorch, by the first two numbers of its version."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def allocator_variables(self) -> tuple[str, ...]:
        """The environment variables that configure the caching allocator.

        PyTorch reads only the first one that is set. If none is set, gpubench sets the last one.
        """
        old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
        return (old, new) if self >= Release(2, 10) else (old,)

    @property
    def shards_on_cpu(self) -> bool:
        """Whether FSDP2 runs on CPU tensors; before, it asks for methods that `torch.cpu.Stream` does not have."""
        return self >= Release(2, 7)

    @property
    def predicts_ranks(self) -> bool:
        """Whether collectives can be called with tensors that have no memory."""
        return self >= Release(2, 7)

    @property
    def keeps_events_of_ended_threads(self) -> bool:
        """Whether NCCL operations can be called in a thread that ends before they are cleaned up.

        In 2.6 their events then go back to a cache that ended with the thread, which corrupts the process's memory
        (PyTorch issue 143470).
        """
        return self >= Release(2, 7)

    @property
    def fuses_rms_norm(self) -> bool:
        """Whether CUDA has a kernel for rms_norm. PyTorch 2.8 has an operator of that name for Apple's GPUs alone."""
        return self >= Release(2, 9)

    @property
    def records_frees_safely(self) -> bool:
        """Whether the allocator's history can keep the stacks of frees while an exception is raised.

        In 2.11 taking a stack loses that exception. Activation checkpointing raises one to end a recomputation, and the
        backward pass then fails with a SystemError, on an H100 and on the simulated CUDA; with 2.12 it does not.
        """
        return self >= Release(2, 12)

    @property
    def reduces_scatter_separately(self) -> bool:
        """Whether FSDP2 can reduce-scatter in a process group of its own."""
        return self >= Release(2, 13)

    @property
    def efficient_attention_shares_keys(self) -> bool:
        """Whether the memory-efficient kernel lets heads share keys (PyTorch pull request 191085)."""
        return self >= Release(2, 14)

    @property
    def keeps_blas_workspaces(self) -> bool:
        """Whether cuBLAS's workspaces stay. Later releases allocate one for each product and free it.

        Snapshots on the simulated CUDA show this with 2.15 and not with 2.14."""
        return self < Release(2, 15)

    @property
    def notes(self) -> list[str]:
        """The notes on a prediction that is made with this release."""
        if self == STUDIED:
            return []
        found = [
            f"this is PyTorch {self}, and the prediction follows the rules of {STUDIED}, except for known differences"
        ]
        if self >= Release(2, 15):  # ResNet-18 at batch 64: 2319 MB on the simulated CUDA, 2062 MB predicted
            found.append("the allocator of PyTorch 2.15 can reserve an eighth more than predicted")
        return found


STUDIED = Release(2, 13)
"""The release whose kernels and allocator the predictions model."""


@cache
def installed() -> Release:
    """The installed release, or the one that predictions model if the version cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", torch_version() or "")
    return Release(int(found[1]), int(found[2])) if found else STUDIED
