"""Takes out of a text what tells of a person or of a machine's folders, so that it can be sent to somebody else."""

import getpass
import re
import socket
from collections.abc import Callable
from functools import cache
from typing import Any

PATH = re.compile(r"(?<![\w.:/~])~?/(?:[^\s/'\":,;()\[\]<>|]+/)+([^\s/'\":,;()\[\]<>|]*)")
"""An absolute path of two parts or more; its last part is kept."""
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{4,8}(-[0-9a-f]{4,12}){1,4}\b", re.IGNORECASE)
COMMON = frozenset({"root", "user", "ubuntu", "admin", "gpu", "cuda", "nvidia", "python", "torch", "localhost", "node"})
"""Names of users and hosts that tell nothing of anybody, and are words of what is printed too."""
SHORTEST = 3


def sendable(found: Any) -> Any:
    """Returns decoded JSON with every text made sendable."""
    if isinstance(found, str):
        return text(found)
    if isinstance(found, list):
        return [sendable(one) for one in found]
    if isinstance(found, dict):
        return {name: sendable(one) for name, one in found.items()}
    return found


def text(found: str) -> str:
    """Returns a text without folders, the names of the user and the host, and the serial numbers of GPUs."""
    found = UUID.sub(r"\1", PATH.sub(r".../\1", found))
    for name in private_names():
        found = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", "...", found)
    return found


@cache
def private_names() -> tuple[str, ...]:
    """The names of this user and this host, the longest first."""
    host = _or_nothing(socket.gethostname)
    names = {_or_nothing(getpass.getuser), host, host.partition(".")[0]}
    told = {name for name in names if len(name) >= SHORTEST and name.casefold() not in COMMON}
    return tuple(sorted(told, key=len, reverse=True))


def _or_nothing(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (OSError, KeyError, ImportError):  # a user without an entry, as in some containers
        return ""
