"""Wall time for events: the host's own clock wherever it can be read."""

import socket
import time
from collections.abc import Callable

from gpubench.events import Job


def calendar(job: Job) -> Callable[[], float]:
    """A clock of seconds since the epoch: on the host's machine the host's, whatever NTP does to it in between."""
    if job.host != socket.gethostname():
        return time.time
    unix, monotonic = job.clock
    return lambda: unix + time.monotonic() - monotonic
