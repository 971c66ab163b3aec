"""Draws the batches of a program's DataLoader without anything else going on, and times how they are made.

The program runs as it would until its first update has shown which DataLoader trains. Then its batches are drawn one
after the other, in fresh passes over the data, and the program ends. Each batch is a step of the run. How its samples
are made is timed by `stages`, in this process or in the workers, which leave their records in the host's folder.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import queues, reduction
from threading import Lock, get_ident
from time import monotonic_ns, perf_counter_ns, process_time, thread_time_ns
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Tuple

import torch
from torch.utils.data import IterableDataset, dataloader, get_worker_info
from torch.utils.data._utils import pin_memory

from . import ADDRESS_VARIABLE, TREATMENTS_VARIABLE
from .cached import tensors_in
from .facts import peak_rss
from .hooks import ALL_MEASURED, DATA_WAIT, MOST_LOADERS, WORKER_START, End, Probe
from .length import FEWEST, MOST, MOST_WARMUP, Length
from .measured import MeasuredStep
from .observed import SourcePlaces
from .processes import core_delay, cpu_seconds, memory, read_bytes
from .random_numbers import RandomStates, same_numbers
from .reading import ReadTimes
from .sampling import StackSampler, of_workers
from .stages import INDEX, PIN, TRANSFER, Fetching, FileSink, StageFinder, Stages, records_in
from .treatments import stand_in

PATIENCE = 50
"""The updates after which a program without a DataLoader that trains has none."""
ALONE_VARIABLE = "_GPUBENCH_ALONE"
"""Set while batches are drawn alone, also for the workers: "timed", or "recorded" in the repeat that is."""
MOST_KEPT = 20_000
"""The samples whose times are kept."""
MOST_SLOW, MADE_AGAIN = 8, 2
"""The slowest samples that are made again, each so many times."""
RECORDED_SECONDS = 10.0
"""The time after which slow samples are not made again."""
FEWEST_VALUES = 16
"""The different values that tell a picture from a constant."""
USUAL_SECONDS = 1.0
"""The time of a repeat if the host gives none."""
DECODERS = ("PIL", "cv2", "torchvision", "turbojpeg", "simplejpeg", "imageio", "skimage")
"""Packages that decode pictures."""
ONE_IN = 4
"""Of so many batches in the repeat that is recorded, the calls that read are timed in one."""
NO_LOADER = "the program trains without a DataLoader, in whose place nothing can be drawn alone"
NO_LOADER_HINT = "give what makes its batches, a callable that returns a dataset or a loader: --data module:callable"
UNKNOWN_LOADER = "the DataLoader that the program trains from was made before gpubench could see it"
UNKNOWN_HINT = "make it after the import of torch, as a torch.utils.data.DataLoader"
NO_BATCH = "the DataLoader made no batch"
NO_BATCH_HINT = "its dataset or its sampler is empty, or drop_last drops all: let it have one batch at least"


SHARED_MEMORY_HINT = (
    "batches are handed over in /dev/shm: give the container more of it (the shm-size of docker), or use fewer "
    "workers, smaller batches or --data.prefetch=1"
)
KILLED_HINT = (
    "output.log may tell why; the system kills for lack of memory, so that fewer workers or --data.prefetch=1 may help"
)

installed: Optional[LoaderProbe] = None
"""That of this process."""


class LoaderProbe(Probe):
    """The measurement of the DataLoader of this process."""

    def __init__(self, address: str, treatments: dict[str, Any]) -> None:
        super().__init__(address, treatments)
        self._fetchers = Fetchers(os.path.dirname(address), self._places)
        self._treatments.trains = False
        self._stands_in = False
        """Whether no program of the user makes the DataLoader."""
        self._made_loaders: Dict[int, Any] = {}
        """The latest DataLoaders of the program, by the identities of their samplers. A program may keep only their
        iterators, which do not lead to them."""

    def install(self) -> None:
        super().install()
        self._fetchers.install()

    def _make_loader(self, call: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> None:
        super()._make_loader(call, loader, *args, **kwargs)
        sampler = getattr(loader, "_index_sampler", None)
        if sampler is not None:
            self._made_loaders[id(sampler)] = loader
            if len(self._made_loaders) > MOST_LOADERS:
                self._made_loaders.pop(next(iter(self._made_loaders)))

    def _next_index(self, call: Callable[..., Any], iterator: Any) -> Any:
        found = self._fetchers.index(call, iterator)
        self._drawn.index(iterator, found)
        return found

    def _advance(self) -> None:
        with self._unbroken():
            self._draw_once_known()

    def _draw_once_known(self) -> None:
        """Begins to draw once an update has shown which DataLoader trains."""
        samplers = [sampler for _, sampler in self._drawn.found]
        if not samplers and self._timeline.ended < PATIENCE:
            return
        latest = self._noted()
        drawn_last = id(latest._index_sampler) if latest is not None else 0
        sampler = drawn_last if drawn_last in samplers else samplers[-1] if samplers else 0
        loader = self._made_loaders.get(sampler)
        self._join()
        if self._host is None:
            return
        self._over = True  # nothing of the training is measured any more
        if loader is None:
            self.refuse(*((UNKNOWN_LOADER, UNKNOWN_HINT) if samplers else (NO_LOADER, NO_LOADER_HINT)))
        _shut_down(latest)  # its workers would compete with those of the passes to come
        loader._iterator = None
        self.draw(loader, self._places.remembered.get(sampler, ""), others=len(samplers) - 1)

    def draw(self, loader: Any, place: str, others: int = 0) -> NoReturn:
        """Draws from a DataLoader, sends what was seen, and ends the program."""
        host = self._host
        assert host
        drawing = LoaderDrawing(self, loader, self._fetchers, recorded=self._repeat == host.job["profiled"])
        found = drawing.run()
        if not drawing.steps:
            self.refuse(NO_BATCH, NO_BATCH_HINT)
        if missed := self._treatments.missed():
            host.put("treatmentsmissed", repeat=self._repeat, missed=missed)
        host.put("loaderdrawn", repeat=self._repeat, loader={**found, "place": place, "others": others})
        host.put(
            "repeatdone",
            repeat=self._repeat,
            wall=drawing.wall / 1e9,
            peak_allocated=None,
            peak_reserved=None,
            peak_rss=peak_rss(),
            samples_from=drawing.samples_from,
        )
        host.put("done")
        host.flush()
        raise End(0, ALL_MEASURED)

    def report(self, iterator: Any) -> None:
        """Tells the host how the DataLoader of an iterator runs."""
        assert self._host
        self._note_loader(iterator)
        facts, place = self._loaders.get(id(iterator._index_sampler), ({}, None))
        self._host.put(
            "modelbuilt",
            repeat=self._repeat,
            parameters=0,
            trainable_parameters=0,
            sample_shape="",
            tokens_per_sample=None,
            seconds=None,
            settings=facts,
            places={"loader": place} if place and not self._stands_in else {},
        )

    def join(self) -> None:
        """Makes this process a rank of the run, in which nothing trains."""
        self._thread = get_ident()
        self._stands_in = True
        _ = self._timeline.part  # which begins the time of the process
        self._join()
        self._over = True

    def _begin_steps(self, host: Any, training: dict[str, Any]) -> None:
        """The steps are those of `LoaderDrawing`."""

    def _begin_recording(self, host: Any, profiling: dict[str, Any]) -> None:
        """What is recorded is that of `LoaderDrawing`."""

    def plan(self, length: Length) -> None:
        """Tells the host how many batches are drawn."""
        assert self._host
        self._host.put("planned", repeat=self._repeat, **length._asdict())
        self._host.flush()

    def refuse(self, reason: str, hint: str) -> NoReturn:
        """Tells the host why nothing, or nothing more, can be drawn, and ends the program."""
        assert self._host
        self._host.put("loaderrefused", reason=reason, hint=hint)
        self._host.put("done")
        self._host.flush()
        raise End(1, f"gpubench cannot measure the DataLoader, and ends the program here: {reason}")


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
        mode = os.environ.get(ALONE_VARIABLE)
        if mode:
            with suppress(Exception):  # nothing of it may reach the program
                self._observe(fetcher, recorded=mode == "recorded")
        return fetcher

    def _observe(self, fetcher: Any, *, recorded: bool) -> None:
        info = get_worker_info()
        if info is None:
            sink: Callable[[Dict[str, Any]], None] = self.records.append
        else:
            self.stages.thread = get_ident()
            self._lock = Lock()  # another thread may have held it when this process was forked
            self._sent[:] = [0, 0, 0]
            sink = FileSink(os.path.join(self._folder, f"fetched-{os.getppid()}-{os.getpid()}"))
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
        self._batches = 0
        self._traced = False
        self._record: Dict[str, Any] = {}
        Fetching(fetcher, fetchers.stages, self._add)
        self._fetch = fetcher.fetch
        fetcher.fetch = self.fetch

    def fetch(self, index: Any) -> Any:
        self._batches += 1
        reads = self._reading if self._batches % ONE_IN == 2 else None
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
        if self._batches <= 2:
            record["drew"] = self._states.drew()
            record["repeats_knowingly"] = self._states.repeats_knowingly
        record["sent"] = self._fetchers.sent()
        record["places"] = self._fetchers.stages.places if self._batches <= 2 else {}
        self._sink(record)
        return batch

    def _add(self, record: Dict[str, Any]) -> None:
        self._record = {**record, "worker": self._worker, "first": self._batches == 1, "traced": self._traced}


class Moment(NamedTuple):
    """What has been used until a moment."""

    time: int
    samples: int
    cpu: float
    """The CPU time of all processes in seconds, and that of this one."""
    own_cpu: float


class LoaderDrawing:
    """The batches that are drawn in one repeat."""

    def __init__(self, probe: LoaderProbe, loader: Any, fetchers: Fetchers, *, recorded: bool) -> None:
        assert probe._host
        self._probe = probe
        self._host = probe._host
        self._loader = loader
        self._fetchers = fetchers
        self._recorded = recorded
        self._training: Dict[str, Any] = self._host.job["settings"]["training"]
        self._planned: Optional[Length] = None
        self.steps = self.passes = self.wall = 0
        self._began = self._last = 0
        self._workers: List[int] = []
        """The processes of the pass that runs."""
        self._memory: List[Tuple[Dict[str, int], Dict[str, int]]] = []
        """Of each worker, its memory at the end of the warm-up and at the end."""
        self._first_memory: List[Optional[Dict[str, int]]] = []
        self._starts: List[float] = []
        """The seconds from the end of the pass before, or from the beginning, to the first batch of each pass."""
        self._samples = 0
        self._warm = self._end = Moment(0, 0, 0.0, 0.0)
        self._batch: Any = None
        self._unsent: List[str] = []
        self._sampler = StackSampler(get_ident(), probe._places) if recorded and not loader.num_workers else None

    def run(self) -> Dict[str, Any]:
        """Draws the batches, and returns the fields of `gpubench.loader_record.LoaderRecord`."""
        os.environ[ALONE_VARIABLE] = "recorded" if self._recorded else "timed"
        self._fetchers.begin()
        if self._sampler:
            self._sampler.start()
        try:
            self._draw()
        except Exception as error:
            with suppress(AttributeError, ValueError):  # PyTorch's handler would raise the end of a worker again
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._send_steps()
            traceback.print_exc()
            self._probe.refuse(*failure(error, self.steps, self._loader))
        if self._sampler:
            self._sampler.stop()
        os.environ.pop(ALONE_VARIABLE)
        self._send_steps()
        return self._found() if self.steps else {}

    @property
    def samples_from(self) -> str:
        return "indices drawn by the DataLoader" if not isinstance(self._loader.dataset, IterableDataset) else ""

    def _draw(self) -> None:
        length, steps = self._host.job["length"], self._training["steps"]
        if length:
            self._plan(Length(*length))
        elif isinstance(steps, int):
            self._plan(Length(self._warmup, self._warmup + steps))
        self._began = self._last = monotonic_ns()
        self._warm = Moment(self._began, 0, cpu_seconds(()), process_time())
        while not self._is_complete:
            before = self.steps
            iterator = dataloader.DataLoader.__iter__(self._loader)
            if not self.passes:
                self._probe.report(iterator)
            self.passes += 1
            self._workers = [each.pid for each in getattr(iterator, "_workers", ())]
            for batch in _until_end(iterator):
                self._take(iterator, batch, begins=self.steps == before)
                if self._is_complete:
                    self._complete(iterator)
                    return
            if self.steps == before:  # a pass without a batch
                return

    @property
    def _is_complete(self) -> bool:
        return self._planned is not None and self.steps >= self._planned.steps

    def _take(self, iterator: Any, batch: Any, *, begins: bool) -> None:
        """Counts a batch as a step, which begins with the end of the one before it."""
        now, host = monotonic_ns(), self._host
        took = max(1, now - self._last)
        size = self._probe._drawn.size_of_next(iterator, batch)
        starts = begins and (self.passes > 1 or bool(self._workers))
        phase = WORKER_START if starts else DATA_WAIT
        began = round(1e9 * host.unix(self._last))
        step = MeasuredStep(
            self._probe._repeat,
            host.rank,
            self.steps,
            began,
            took,
            {phase: took},
            took,
            size,
            None,
            None,
            skipped=False,
        )
        self._unsent.append(step.json())
        if begins:
            self._starts.append(took / 1e9)
        self._last = now
        self.steps += 1
        self._samples += size
        self._batch = batch
        if self._planned is None and (length := self._fitting()):
            self._plan(length)
        if self.steps == (self._planned.warmup if self._planned else self._warmup):
            self._first_memory = [memory(pid) for pid in self._workers]
            self._warm = Moment(now, self._samples, cpu_seconds(self._workers), process_time())
        if host.due(now / 1e9):
            self._send_steps()

    def _send_steps(self) -> None:
        self._host.put("heartbeat", doing="drawing batches", step=self.steps)
        if self._unsent:
            self._host.put_encoded("stepsmeasured", "steps", self._unsent)
        self._unsent = []
        self._host.flush()

    def _plan(self, length: Length) -> None:
        self._planned = length
        self._probe.plan(length)

    def _complete(self, iterator: Any) -> None:
        """Reads what the workers have used, and ends them."""
        self.wall = self._last - self._began
        self._end = Moment(self._last, self._samples, cpu_seconds(self._workers), process_time())
        last = [memory(pid) for pid in self._workers]
        self._memory = [(before, after) for before, after in zip(self._first_memory, last) if before and after]
        _shut_down(iterator)

    @property
    def _warmup(self) -> int:
        """The batches that come before the workers have filled their queues once."""
        given: Optional[int] = self._training["warmup_steps"]
        queued = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        return min(MOST_WARMUP, 1 + queued) if given is None else given

    def _fitting(self) -> Optional[Length]:
        """Returns how many batches fit into the time, once enough of them have come to tell.

        Those of several workers come in turns, some together, so that single times tell nothing.
        """
        taken, elapsed = self.steps - 1, (self._last - self._began) / 1e9 - self._starts[0]
        limit = self._host.job["seconds"] or USUAL_SECONDS
        enough = elapsed >= limit / 2 or (elapsed >= limit / 4 and taken >= 4 * max(1, self._loader.num_workers))
        if taken < 1 or not (enough or taken >= MOST // 2):
            return None
        fit = int(limit * taken / max(elapsed, 1e-6))
        return Length(self._warmup, self._warmup + min(max(fit, FEWEST, self.steps - self._warmup), MOST))

    def _found(self) -> Dict[str, Any]:
        loader, dataset, warm, end = self._loader, self._loader.dataset, self._warm, self._end
        records = self._fetchers.of_workers() if loader.num_workers else self._fetchers.records
        summed = Summed(records, self._fetchers.own, self._samples / self.steps)
        again = self._make_again(summed.slowest) if self._recorded else {}
        if self._recorded:
            self._send_code()
        samples = end.samples - warm.samples
        return {
            **_described(loader),
            "batches": self.steps - (self._planned.warmup if self._planned else 0),
            "samples": samples,
            "wall": (end.time - warm.time) / 1e9,
            "cpu": end.cpu - warm.cpu,
            "main_cpu": end.own_cpu - warm.own_cpu,
            "first_batch": self._starts[0],
            "passes": self.passes,
            "restarts": self._starts[1:],
            "stages": summed.stages(),
            "stage_samples": summed.samples,
            "stage_delay": summed.delay / 1e9,
            "times": summed.times(again),
            "memory": [
                {**after, "private_first": before["private"], "shared_first": before["shared"], "samples": samples}
                for before, after in self._memory
            ],
            "same_numbers": same_numbers(records),
            "read": summed.read(),
            "batch": _facts_of(self._batch),
            "objects": _objects(dataset),
        }

    def _make_again(self, slowest: List[Tuple[str, int]]) -> Dict[str, Any]:
        """Makes the slowest samples of a map-style dataset again, and as many others, and returns their times."""
        dataset = self._loader.dataset
        length = _length(dataset)
        if isinstance(dataset, IterableDataset) or not length or not slowest:
            return {}
        until = monotonic_ns() + round(1e9 * RECORDED_SECONDS)
        found: Dict[str, Any] = {"slow": {}, "typical": [], "files": {}}
        opened: List[str] = []
        looks = [False]
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if looks[0] and event == "open" else None)
        draw = random.Random(0)
        with suppress(Exception):  # an error of the program's own, which it has not had until now
            for key, _ in slowest[:MOST_SLOW]:
                index = int(key)
                for _ in range(MADE_AGAIN):
                    looks[0] = True
                    opened.clear()
                    began = perf_counter_ns()
                    dataset[index]
                    took = perf_counter_ns() - began
                    looks[0] = False
                    found["slow"].setdefault(key, []).append(took / 1e9)
                    if opened:
                        found["files"][key] = self._probe._places.shown(os.path.abspath(opened[0]))[-200:]
                    if monotonic_ns() > until:
                        return found
                began = perf_counter_ns()
                dataset[draw.randrange(length)]
                found["typical"].append((perf_counter_ns() - began) / 1e9)
        return found

    def _send_code(self) -> None:
        host, places = self._host, self._probe._places
        main = self._sampler or StackSampler(get_ident(), places)
        workers = of_workers(host.folder)
        host.put(
            "codesampled",
            repeat=self._probe._repeat,
            main=main.samples.json(places),
            workers=workers.json(places),
            calls=[],
        )


class Summed:
    """The records of many batches, added."""

    def __init__(self, records: List[Dict[str, Any]], own: Mapping[str, List[int]], each_batch: float) -> None:
        rest = [each for each in records if not each.get("first")] or records
        self._rest = rest
        self._places: Dict[str, str] = {}
        for each in records:
            self._places.update(each.get("places", {}))
        plain = [each for each in rest if not each.get("traced")] or rest
        self._plain = plain
        self.delay = sum(each.get("delay", 0) for each in plain)
        made = sum(each["made"] for each in plain)
        self._each = each_batch if made == len(plain) else 1
        """The samples of what the dataset makes at a time, which may be a whole batch."""
        self.samples = round(self._each * made)
        totals: Dict[str, List[int]] = {}
        for each in plain:
            for stage, total in each["stages"].items():
                _add(totals, stage, total)
            _add(totals, TRANSFER, each.get("sent", (0, 0, 0)))
        for stage, total in own.items():  # of all batches, and of some that are not made any more
            share = len(plain) / total[2] if total[2] else 0.0
            _add(totals, stage, [round(share * part) for part in total])
        self._totals = totals
        times = [(key, wall) for each in plain for key, wall in each["samples"] if self._each == 1]
        self._times = times[:MOST_KEPT]
        longest: Dict[str, int] = {}
        for key, wall in self._times:
            longest[key] = max(wall, longest.get(key, 0))
        self.slowest = sorted(longest.items(), key=lambda each: -each[1])[:MOST_SLOW]

    def _reading(self) -> Dict[str, List[int]]:
        """Returns the time of the calls that read by the stage that they are in, for as many samples as the stages."""
        traced = [each for each in self._rest if "reads" in each]
        samples = self._each * sum(each["made"] for each in traced)
        found: Dict[str, List[int]] = {}
        for each in traced:
            for stage, total in each["reads"].items():
                _add(found, stage, [round(self.samples / samples * part) for part in total])
        return found

    def stages(self) -> List[Dict[str, Any]]:
        """Returns the stages, those with most time first."""
        found = []
        reading = self._reading()
        for stage, (wall, cpu, calls) in sorted(self._totals.items(), key=lambda each: -each[1][0]):
            if wall <= 0:
                continue
            kind, _, name = stage.partition(" ")
            read, read_cpu, _ = reading.get(stage, (0, 0, 0))
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "seconds": wall / 1e9,
                    "cpu": max(0, min(cpu, wall)) / 1e9,
                    "calls": calls,
                    "place": self._places.get(stage, "")[:200],
                    "reading": min(read, wall) / 1e9,
                    "reading_cpu": max(0, min(read_cpu, read, wall)) / 1e9,
                }
            )
        return found[:1000]

    def times(self, again: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
        walls = sorted(wall for _, wall in self._times)
        if not walls:
            return None
        last = len(walls) - 1
        files, slow = again.get("files", {}), again.get("slow", {})
        return {
            "number": len(walls),
            "quantiles": [walls[round(part * last / 100)] / 1e9 for part in range(101)],
            "slowest": [
                {"index": key, "seconds": wall / 1e9, "again": slow.get(key, []), "file": files.get(key, "")}
                for key, wall in self.slowest
            ],
            "typical_again": again.get("typical", []),
        }

    def read(self) -> Optional[Dict[str, int]]:
        found = [each for each in self._rest if "bytes" in each]
        if not found:
            return None
        return {
            "samples": round(self._each * sum(each["made"] for each in found)),
            "asked": sum(each["bytes"][0] for each in found),
            "disk": sum(each["bytes"][1] for each in found),
        }


def install(variables: Mapping[str, str]) -> None:
    """Installs the probe as `hooks.install` does."""
    global installed
    installed = LoaderProbe(variables[ADDRESS_VARIABLE], json.loads(variables.get(TREATMENTS_VARIABLE, "{}")))
    installed.install()


def _shut_down(iterator: Any) -> None:
    """Ends the workers of an iterator, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        with suppress(Exception):  # one that has ended already
            iterator._shutdown_workers()


def _described(loader: Any) -> Dict[str, Any]:
    """Returns how a DataLoader runs."""
    dataset = loader.dataset
    return {
        "dataset": type(dataset).__name__[:200],
        "style": "iterable" if isinstance(dataset, IterableDataset) else "map",
        "length": _length(dataset),
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "workers": loader.num_workers,
        "start_method": _start_method(loader),
        "prefetch": loader.prefetch_factor if loader.num_workers else None,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "threads": 1 if loader.num_workers else torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "decoders": [name for name in DECODERS if find_spec(name)],
    }


def _until_end(iterator: Any) -> Iterator[Any]:
    """Yields the batches of a pass."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def failure(error: Exception, drawn: int, loader: Any) -> Tuple[str, str]:
    """Returns why no more batches can be drawn, and what to do."""
    text = " ".join(str(error).split())
    where = f"making batch {drawn + 1}"
    if "bus error" in text.lower() or "shared memory" in text.lower():
        return f"shared memory is full, {where}: {text}"[:900], SHARED_MEMORY_HINT
    ended = isinstance(error, (ConnectionError, EOFError)) or "exited unexpectedly" in text or "killed by" in text
    if ended and loader.num_workers:
        return f"a worker of the DataLoader was killed or crashed, {where}"[:900], KILLED_HINT
    sent = "pickle" in text.lower() or isinstance(error, pickle.PicklingError)
    if sent and loader.num_workers and _start_method(loader) != "fork":
        message = f"the dataset cannot be sent to workers that start by {_start_method(loader)}: {text}"
        return message[:900], "define its classes and functions at the top of a module, or start the workers by fork"
    if isinstance(error, MemoryError):
        return f"there is not enough memory, {where}: {text}"[:900], KILLED_HINT
    last = text.rpartition("Error: ")[2] if type(error).__name__ in text else text
    return f"the data raised {type(error).__name__}, {where}: {last}"[:900], "output.log has the traceback"


def _add(totals: Dict[str, List[int]], stage: str, more: Any) -> None:
    total = totals.setdefault(stage, [0, 0, 0])
    for place in range(3):
        total[place] += more[place]


def _length(dataset: Any) -> Optional[int]:
    try:
        return len(dataset)
    except Exception:  # it has none
        return None


def _start_method(loader: Any) -> str:
    if not loader.num_workers:
        return ""
    context = loader.multiprocessing_context or torch.multiprocessing
    try:
        return str(context.get_start_method())
    except Exception:  # a context of the program's own
        return ""


def _facts_of(batch: Any) -> Optional[Dict[str, Any]]:
    """Returns the fields of `gpubench.loader_record.BatchFacts`."""
    try:
        tensors = tensors_in(batch)
        sizes = [each.numel() * each.element_size() for each in tensors]
        return {
            "size": sum(sizes),
            "wide": sum(size for each, size in zip(tensors, sizes) if each.dtype is torch.float64),
            "from_bytes": sum(size for each, size in zip(tensors, sizes) if _is_of_bytes(each)),
            "pinned": any(each.is_pinned() for each in tensors if torch.cuda.is_available()),
        }
    except Exception:  # tensors of the program's own class
        return None


def _is_of_bytes(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of pictures has the values of bytes, as they are or divided by 255."""
    if not tensor.is_floating_point() or tensor.dim() < 3 or tensor.numel() < 256:
        return False
    part = tensor.reshape(-1)[:4096].double()
    if part.min() < 0 or part.max() > 255:
        return False
    if len(part.unique()) < FEWEST_VALUES:
        return False
    scaled = part if part.max() > 1 else part * 255
    return bool((scaled - scaled.round()).abs().max() < 1e-3)


def _objects(dataset: Any) -> int:
    """Returns the largest number of entries of a list or mapping of Python objects that a dataset holds."""
    most, level = 0, [dataset]
    for _ in range(3):
        held = [each for one in level for each in getattr(one, "__dict__", {}).values()]
        most = max([most, *(len(each) for each in held if isinstance(each, (list, dict, set, tuple)))])
        level = [each for each in held if isinstance(each, torch.utils.data.Dataset)]
    return most
