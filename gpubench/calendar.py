"""Wall time for events: the host's own clock wherever it can be read."""

import time
from collections.abc import Callable

from gpubench.events import Job
from gpubench.ranks import machine


def calendar(job: Job) -> Callable[[], float]:
    """A clock of seconds since the epoch: on the host's machine the host's, whatever NTP does to it in between."""
    if job.machine != machine():
        return time.time
    unix, monotonic = job.clock
    return lambda: unix + time.monotonic() - monotonic
