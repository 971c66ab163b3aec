"""Draws the batches of a program's DataLoader without anything else going on, and times how they are made.

The program runs as it would until its first update has shown which DataLoader trains. Then its batches are drawn one
after the other, in fresh passes over the data, and the program ends. Each batch is a step of the run. How its samples
are made is timed by `fetching`.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from threading import get_ident
from time import monotonic_ns, perf_counter_ns, process_time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Tuple
from weakref import ref

from torch.utils.data import IterableDataset, dataloader

from . import ADDRESS_VARIABLE, TREATMENTS_VARIABLE
from .batch_records import BatchRecords
from .batches import samples_of_next
from .facts import peak_rss
from .fetching import ALONE_VARIABLE, Fetchers
from .hooks import ALL_MEASURED, DATA_WAIT, MOST_LOADERS, WORKER_START, End, Probe
from .length import FEWEST, MOST, MOST_WARMUP, Length
from .loader_facts import batch_facts, length_of, loader_facts, objects_of, start_method_of
from .measured import MeasuredStep
from .processes import cpu_seconds, memory
from .random_numbers import same_numbers
from .sampling import StackSampler, of_workers

PATIENCE = 50
"""The updates after which a program without a DataLoader that trains has none."""
MADE_AGAIN = 2
"""How often each of the slowest samples is made again."""
RECORDED_SECONDS = 10.0
"""The time after which slow samples are not made again."""
FEWEST_RECORDED, LONGEST_RECORDING = 400, 5.0
"""The samples that a recorded repeat draws at least, unless drawing takes longer than so many seconds: what is timed in
some of its batches alone, as reading is, varies too much between few samples."""
USUAL_SECONDS = 1.0
"""The time of a repeat if the host gives none."""
NO_LOADER = "the program trains without a DataLoader, in whose place nothing can be drawn alone"
ELSEWHERE = (
    "the thread that trains draws from no DataLoader of the program, in whose place another thread or process may do so"
)
NO_LOADER_HINT = "give what makes its batches, a callable that returns a dataset or a loader: --data module:callable"
UNKNOWN_LOADER = "the DataLoader that the program trains from was made before gpubench could see it"
UNKNOWN_HINT = "make it after the import of torch, as a torch.utils.data.DataLoader"
NO_BATCH = "the DataLoader made no batch"
NO_MORE = "the DataLoader makes no batch after the first {}: its dataset or its sampler gives what it has only once"
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
        self._iterators: Dict[int, Any] = {}
        """The latest iterator of each."""
        self._waits: Dict[int, int] = {}
        """The nanoseconds for which the program has waited for the batches of each since the last update."""

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

    def _next_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        began = monotonic_ns()
        batch = super()._next_batch(call, iterator)
        sampler = id(iterator._index_sampler)
        self._waits[sampler] = self._waits.get(sampler, 0) + monotonic_ns() - began
        self._iterators[sampler] = ref(iterator)
        return batch

    def _next_index(self, call: Callable[..., Any], iterator: Any) -> Any:
        found = self._fetchers.index(call, iterator)
        self._drawn.index(iterator, found)
        return found

    def _advance(self) -> None:
        with self._unbroken():
            self._draw_once_known()

    def _draw_once_known(self) -> None:
        """Begins to draw once an update has shown which DataLoader trains.

        Of several, one may only have been looked at before the first update, so that those of the next step count.
        """
        samplers = [sampler for _, sampler in self._drawn.found]
        waits, self._waits = self._waits, {}
        is_known = len(samplers) == 1 or self._timeline.ended > 1
        drawn = [each for each in samplers if each in waits and is_known]
        if not drawn and self._timeline.ended < PATIENCE:
            return
        sampler = max(drawn or samplers[::-1], key=lambda each: waits.get(each, 0), default=0)
        loader = self._made_loaders.get(sampler)
        self._join()
        if self._host is None:
            return
        self._over = True  # nothing of the training is measured any more
        if loader is None:
            reason = ELSEWHERE if self._made_loaders else NO_LOADER
            self.refuse(*((UNKNOWN_LOADER, UNKNOWN_HINT) if samplers else (reason, NO_LOADER_HINT)))
        for iterator in self._iterators.values():
            _shut_down(iterator())  # its workers would compete with those of the passes to come
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
        os.environ[ALONE_VARIABLE] = f"{'recorded' if self._recorded else 'timed'} {os.getpid()}"
        if start_method_of(self._loader) == "forkserver":  # one that runs already has not got the variable
            with suppress(Exception):
                forkserver._forkserver._stop()  # type: ignore[attr-defined]
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
            if self.passes == 1:
                self._first_memory = [memory(pid) for pid in self._workers]
            for batch in _until_end(iterator):
                self._take(iterator, batch, begins=self.steps == before)
                if self._is_complete:
                    self._complete(iterator)
                    return
            if self.steps == before:  # a pass without a batch
                if self.steps:
                    self._host.warn(NO_MORE.format(self.steps))
                    self._complete(iterator)
                return

    @property
    def _is_complete(self) -> bool:
        if self._planned is None or self.steps < self._planned.steps:
            return False
        more = self._recorded and self._samples < FEWEST_RECORDED
        return not (more and self._last - self._began < 1e9 * LONGEST_RECORDING)

    def _take(self, iterator: Any, batch: Any, *, begins: bool) -> None:
        """Counts a batch as a step, which begins with the end of the one before it."""
        now, host, drawn = monotonic_ns(), self._host, self._probe._drawn
        took = max(1, now - self._last)
        size = samples_of_next(drawn.pass_of(iterator), iterator, batch)
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
        summed = BatchRecords(records, self._fetchers.own, self._samples / self.steps)
        again = self._make_again(summed.slowest) if self._recorded else {}
        if self._recorded:
            self._send_code()
        samples = end.samples - warm.samples
        return {
            **loader_facts(loader),
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
                {**after, "private_first": before["private"], "shared_first": before["shared"], "samples": end.samples}
                for before, after in self._memory
            ],
            "same_numbers": same_numbers(records),
            "read": summed.read(),
            "batch": batch_facts(self._batch),
            **objects_of(dataset),
        }

    def _make_again(self, slowest: List[Tuple[str, int]]) -> Dict[str, Any]:
        """Makes the slowest samples of a map-style dataset again, and as many others, and returns their times."""
        dataset = self._loader.dataset
        length = length_of(dataset)
        if isinstance(dataset, IterableDataset) or not length or not slowest:
            return {}
        until = monotonic_ns() + round(1e9 * RECORDED_SECONDS)
        found: Dict[str, Any] = {"slow": {}, "typical": [], "files": {}}
        opened: List[str] = []
        looks = [False]
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if looks[0] and event == "open" else None)
        draw = random.Random(0)
        with suppress(Exception):  # an error of the program's own, which it has not had until now
            for key, _ in slowest:
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
    text = str(error)
    if "Original Traceback" in text:  # which a worker sends, with the exception at its end
        text = re.split(rf"^[\w.]*{type(error).__name__}(?:: |$)", text, flags=re.MULTILINE)[-1]
    text = " ".join(text.split())
    where = f"making batch {drawn + 1}"
    if "bus error" in text.lower() or "shared memory" in text.lower():
        return f"shared memory is full, {where}: {text}"[:900], SHARED_MEMORY_HINT
    ended = isinstance(error, (ConnectionError, EOFError)) or "exited unexpectedly" in text or "killed by" in text
    if ended and loader.num_workers:
        return f"a worker of the DataLoader was killed or crashed, {where}"[:900], KILLED_HINT
    sent = "pickle" in text.lower() or isinstance(error, pickle.PicklingError)
    if sent and loader.num_workers and start_method_of(loader) != "fork":
        message = f"the dataset cannot be sent to workers that start by {start_method_of(loader)}: {text}"
        return message[:900], "define its classes and functions at the top of a module, or start the workers by fork"
    if isinstance(error, MemoryError):
        return f"there is not enough memory, {where}: {text}"[:900], KILLED_HINT
    said = f": {text}" if text else ""
    return f"the data raised {type(error).__name__}, {where}{said}"[:900], "output.log has the traceback"
