"""The way in to a run, where workers report: a Unix socket on one machine, TCP with a secret from others.

Whoever can reach a TCP port can knock. A stranger learns nothing, keeps nobody waiting and stays seconds; and when all
ranks are in, the door is gone.
"""

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

import msgspec

from gpubench import events
from gpubench.host.peers import Peer

LONGEST_GREETING = 4096  # bytes
GREETING = 10.0  # seconds that one may take: a rank has it ready as it connects
STRANGERS = 64  # at a time, besides the ranks that are expected


class Door:
    def __init__(self, world_size: int, one_machine: bool) -> None:
        self._world_size = world_size
        self._folder = private_folder()
        self._strangers: list[Peer] = []  # oldest first
        self.listener, self.address, self.secret = listen(self._folder if one_machine else None)

    def open(self) -> Peer | None:
        """Whoever knocks, a stranger still; None where they thought better of it."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        connection.setblocking(False)
        stranger = Peer(connection, heard=time.monotonic())
        self._strangers.append(stranger)
        return stranger

    def admit(self, stranger: Peer, line: bytes, present: Container[int]) -> bool:
        """Whether `line` is the greeting of a rank that is missing and knows the secret; it is then one's `hello`."""
        hello = _read(line)
        known = (
            hello is not None
            and secrets.compare_digest(hello.secret.encode(), self.secret.encode())
            and hello.world_size == self._world_size
            and 0 <= hello.rank < self._world_size
            and hello.rank not in present
        )
        if known:
            stranger.hello = hello
            self._strangers.remove(stranger)
        return known

    def turn_away(self, stranger: Peer) -> None:
        """Forgets one that has hung up or is to be hung up on."""
        with suppress(ValueError):
            self._strangers.remove(stranger)

    def overdue(self, now: float) -> list[Peer]:
        """Strangers that have stood there for too long, or are too many: the oldest of them."""
        crowd = max(0, len(self._strangers) - STRANGERS - self._world_size)
        return [one for number, one in enumerate(self._strangers) if number < crowd or now - one.heard > GREETING]

    def close(self) -> list[Peer]:
        """Lets nobody in from here on. Returns the strangers that are left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.listener.close()
        return list(self._strangers)


def _read(line: bytes) -> events.Hello | None:
    try:
        message = events.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return message if isinstance(message, events.Hello) else None


def private_folder() -> Path:
    """A new folder that only this user can enter, whose name leaves room for a Unix socket's 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="gpubench-", dir=usual if len(os.fsencode(usual)) < 80 else "/tmp"))


def listen(folder: Path | None) -> tuple[socket.socket, str, str]:
    """(listening socket, address for the workers, secret): a Unix socket in `folder`, or TCP where it is None."""
    if folder:
        path = folder / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        return listener, f"unix:{path}", ""
    # Workers on other machines must reach this one, so it cannot stay on loopback; strangers get no answer.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=socket.SOMAXCONN
    )
    listener.setblocking(False)  # who knocked may have left again
    secret = secrets.token_hex(16)
    host = os.environ.get("MASTER_ADDR") or socket.getfqdn()
    return listener, f"tcp:{host}:{listener.getsockname()[1]}#{secret}", secret
