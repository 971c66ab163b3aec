"""Times how batches are made, in this process or in workers, which leave their records in the host's folder."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing import queues, reduction
from threading import Lock, get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Any, Callable, Dict, List, Optional

from torch.utils.data import dataloader, get_worker_info
from torch.utils.data._utils import pin_memory

from .observed import SourcePlaces
from .processes import core_delay, read_bytes
from .random_numbers import RandomStates
from .reading import ReadTimes
from .stages import INDEX, PIN, TRANSFER, Fetching, FileSink, OneIn, StageFinder, Stages, records_in
from .treatments import stand_in

ALONE_VARIABLE = "_GPUBENCH_ALONE"
"""Set while batches are drawn alone, also for the workers: "timed", or "recorded" in the repeat that is, and the pid of
the process that draws them, which is not the parent of a worker of a fork server."""
ONE_IN = 2
"""Of so many batches in a row in the repeat that is recorded, the calls that read are timed in one."""


class Fetchers:
    """Times how batches are made, in this process or in workers."""

    def __init__(self, folder: str, places: SourcePlaces) -> None:
        self._folder = folder
        self._places = places
        self.stages = Stages()
        """Those of this process."""
        self.records: List[Dict[str, Any]] = []
        """Those of the batches that this process has made."""
        self.received: List[int] = [0, 0, 0]
        self._sent: List[int] = [0, 0, 0]
        self._indices: List[int] = [0, 0, 0]
        self._pinned: List[int] = [0, 0, 0]
        self._pinning = False
        self._lock = Lock()
        self._finder: Optional[StageFinder] = None

    def install(self) -> None:
        stand_in(dataloader._DatasetKind, "create_fetcher", self._create)
        stand_in(pin_memory, "pin_memory", self._pin)
        fetchers = self

        class TimedPickler(reduction.ForkingPickler):
            @classmethod
            def dumps(cls, obj: Any, protocol: Optional[int] = None) -> Any:
                return fetchers._timed(fetchers._sent, super().dumps, obj, protocol)

            @staticmethod
            def loads(data: Any) -> Any:  # type: ignore[override]  # as `multiprocessing.queues` calls it
                return fetchers._timed(fetchers.received, reduction.ForkingPickler.loads, data)

        queues._ForkingPickler = TimedPickler  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Forgets what was timed so far."""
        for total in (self.received, self._sent, self._indices, self._pinned):
            total[:] = [0, 0, 0]
        self.records.clear()

    def index(self, call: Callable[..., Any], iterator: Any) -> Any:
        if ALONE_VARIABLE not in os.environ:
            return call(iterator)
        return self._timed(self._indices, call, iterator)

    def _pin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if ALONE_VARIABLE not in os.environ or self._pinning:  # it calls itself for the parts of a batch
            return call(*args, **kwargs)
        self._pinning = True
        try:
            return self._timed(self._pinned, call, *args, **kwargs)
        finally:
            self._pinning = False

    def _timed(self, total: List[int], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began, cpu = perf_counter_ns(), thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            with self._lock:
                total[0] += perf_counter_ns() - began
                total[1] += thread_time_ns() - cpu
                total[2] += 1

    def _create(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes what fetches the batches of a pass, in this process or in a worker."""
        fetcher = call(*args, **kwargs)
        mode, _, drawing = os.environ.get(ALONE_VARIABLE, "").partition(" ")
        if mode:
            with suppress(Exception):  # nothing of it may reach the program
                self._observe(fetcher, drawing, recorded=mode == "recorded")
        return fetcher

    def _observe(self, fetcher: Any, drawing: str, *, recorded: bool) -> None:
        info = get_worker_info()
        if info is None:
            sink: Callable[[Dict[str, Any]], None] = self.records.append
        else:
            self.stages.thread = get_ident()
            self._lock = Lock()  # another thread may have held it when this process was forked
            self._sent[:] = [0, 0, 0]
            sink = FileSink(os.path.join(self._folder, f"fetched-{drawing}-{os.getpid()}"))
        if self._finder is None:
            self._finder = StageFinder(self.stages, self._places)
        states = RandomStates(fetcher.dataset)
        self._finder.look_at(fetcher.dataset, fetcher.collate_fn)
        ObservedFetching(fetcher, self, sink, info.id if info else 0, states, recorded=recorded)

    def sent(self) -> List[int]:
        """Returns the time of pickling since the last call of it."""
        with self._lock:
            found, self._sent[:] = list(self._sent), [0, 0, 0]
        return found

    def of_workers(self) -> List[Dict[str, Any]]:
        """Returns the records that the workers of this process have left so far."""
        found = []
        prefix = f"fetched-{os.getpid()}-"
        with suppress(OSError):
            for name in sorted(os.listdir(self._folder)):
                if name.startswith(prefix):
                    found += records_in(os.path.join(self._folder, name))
        return found

    def look_again(self) -> None:
        """Times the known functions of modules that the first batch has imported."""
        if self._finder:
            self._finder.find_known()

    @property
    def own(self) -> Dict[str, List[int]]:
        """The stages of this process around the making of batches."""
        return {INDEX: self._indices, PIN: self._pinned, TRANSFER: self.received}


class ObservedFetching:
    """Adds to the record of each batch what else is seen of it."""

    def __init__(
        self,
        fetcher: Any,
        fetchers: Fetchers,
        sink: Callable[[Dict[str, Any]], None],
        worker: int,
        states: RandomStates,
        *,
        recorded: bool,
    ) -> None:
        self._fetchers = fetchers
        self._sink = sink
        self._worker = worker
        self._states = states
        self._reading = ReadTimes(fetchers.stages) if recorded else None
        self._choose = OneIn(ONE_IN)
        self._batches = 0
        self._traced = False
        self._record: Dict[str, Any] = {}
        Fetching(fetcher, fetchers.stages, self._add)
        self._fetch = fetcher.fetch
        fetcher.fetch = self.fetch

    def fetch(self, index: Any) -> Any:
        self._batches += 1
        reads = self._reading if self._choose() else None
        before = read_bytes() if self._reading else None
        delay = core_delay()
        self._traced = reads is not None
        if reads:
            reads.start()
        try:
            batch = self._fetch(index)
        finally:
            if reads:
                reads.stop()
        if self._batches == 1:
            self._fetchers.look_again()
        record, self._record = self._record, {}
        record["delay"] = max(0, min(core_delay() - delay, record["wall"] - record["cpu"]))
        if before and (after := read_bytes()):
            record["bytes"] = [after["asked"] - before["asked"], after["disk"] - before["disk"]]
        if reads:
            record["reads"], reads.found = reads.found, {}
        record.update(self._states.after_batch())
        record["sent"] = self._fetchers.sent()
        record["places"] = self._fetchers.stages.places if self._batches <= 2 else {}
        self._sink(record)
        return batch

    def _add(self, record: Dict[str, Any]) -> None:
        self._record = {**record, "worker": self._worker, "first": self._batches == 1, "traced": self._traced}
