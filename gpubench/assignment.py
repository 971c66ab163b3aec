"""What one rank was given to do, and what it needs to do it."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from gpubench import events
from gpubench.channel import Activity
from gpubench.ranks import Ranks


class Assignment(NamedTuple):
    """One rank's part of a job."""

    job: events.Job
    ranks: Ranks
    store: Store | None
    """Where the ranks have met; None for one alone."""
    activity: Activity
    """Says what this rank is at."""
    tell: Callable[[events.Message], None]
    """Takes the events of threads, at once."""

    def carry_out(self) -> Iterator[events.Message]:
        """What the job's own module makes of it, loaded only now: training needs no diffusers."""
        work: Callable[[Assignment], Iterator[events.Message]] = import_module(self.job.worker).work
        return work(self)
