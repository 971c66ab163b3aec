"""Who is who among the processes of one run, by the variables that torchrun sets."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Ranks:
    """This process's place among the others; alone where nobody said otherwise."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        def variable(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world_size = variable("WORLD_SIZE", 1)
        return cls(variable("RANK", 0), variable("LOCAL_RANK", 0), world_size, variable("LOCAL_WORLD_SIZE", world_size))

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


@cache
def machine() -> str:
    """The same wherever a monotonic clock and a pid of one process mean the same to another.

    A host name would not do: machines made from one image share it, and containers share a machine under several.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def is_rank_zero() -> bool:
    """Whether this process speaks for all of them."""
    return Ranks.from_environment().is_rank_zero


def launched_by_torchrun() -> bool:
    """Whether this process is a rank that the user's own torchrun started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
