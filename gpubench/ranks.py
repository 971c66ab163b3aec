"""Identifies the processes of a run by the environment variables that torchrun sets."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STORE_SOCKET = "GPUBENCH_STORE_SOCKET"
"""The variable with the file descriptor of the socket that the host has bound for rank 0's rendezvous store."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the sizes of its run; a single rank if torchrun's variables are not set."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """This process's place by torchrun's variables; alone unless all that it takes are set.

        Schedulers set some of them, such as WORLD_SIZE, in shells that no launcher has started.
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
    """Returns an identifier of the machine that is equal for processes with the same monotonic clock and pids.

    A host name is not enough: machines from the same image share it, and containers on one machine have different ones.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def is_rank_zero() -> bool:
    """Returns whether this process is rank 0, which reports for all ranks."""
    return Ranks.from_environment().is_rank_zero


def launched_by_torchrun() -> bool:
    """Returns whether the user's own torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
