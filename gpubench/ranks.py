"""Identifies this process among the processes of a run, by the environment variables that torchrun sets."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STORE_SOCKET = "_GPUBENCH_STORE_SOCKET"
"""The variable with the file descriptor of the socket that the host has bound for the rendezvous store of rank 0."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks, in the run and on this machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """The ranks according to torchrun's variables, or a single rank unless `launched_by_torchrun`.

        One variable alone means nothing: batch schedulers set some of them, such as WORLD_SIZE, in ordinary shells.
        """
        if not launched_by_torchrun():
            return cls(0, 0, 1, 1)

        def variable(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world_size = variable("WORLD_SIZE", 1)
        return cls(variable("RANK", 0), variable("LOCAL_RANK", 0), world_size, variable("LOCAL_WORLD_SIZE", world_size))

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


@cache
def machine() -> str:
    """An identifier that is equal for processes that share a monotonic clock and a pid namespace.

    A machine's name is not enough: machines made from one image share it, and containers on one machine do not.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def is_rank_zero() -> bool:
    """Whether this process is rank 0, which reports for all ranks."""
    return Ranks.from_environment().is_rank_zero


def launched_by_torchrun() -> bool:
    """Whether all variables that torchrun sets are set, so that a torchrun of the user started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
