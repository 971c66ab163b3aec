"""Times the stages in which a DataLoader makes its batches, in the process that makes them.

Stages nest, and the time of each one is without that of the stages inside it, so that all of them sum to the time of a
batch. What the dataset and its transforms call is found by looking at them, once, in the process that fetches: nothing
is changed that is sent to another process, and no line of the program is traced.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from types import FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch.utils.data import Dataset

from .observed import SourcePlaces

INDEX, DATASET, READ, DECODE, TRANSFORM, COLLATE, PIN, TRANSFER = (
    *("index", "dataset", "read", "decode", "transform", "collate", "pin", "transfer"),
)
"""The kinds of stages. One that has a name is called by both, as "transform Normalize" or "dataset Photos.load"."""
OF_TRANSFORMS = ("transform", "augment", "process", "tokeniz")
"""What the names of attributes have in them that hold functions which change samples."""
CALL = "__call__"
MOST_DEPTH = 5
MOST_LISTED = 64
"""The entries of a list or mapping that are looked at."""
MOST_CALLS = 32
"""The calls in a sample from which on a function is too small to be a stage: timing it would take longer than it."""
KNOWN = {
    "PIL.Image": {"open": DECODE},
    "PIL.ImageFile": {"ImageFile.load": DECODE},
    "bz2": {"decompress": DECODE},
    "cv2": {"imread": DECODE, "imdecode": DECODE},
    "gzip": {"decompress": DECODE},
    "h5py": {"Dataset.__getitem__": READ},
    "imageio.v2": {"imread": DECODE},
    "imageio.v3": {"imread": DECODE},
    "json": {"load": DECODE, "loads": DECODE},
    "librosa": {"load": DECODE},
    "lzma": {"decompress": DECODE},
    "nibabel": {"load": READ},
    "numpy": {"load": READ, "fromfile": READ, "loadtxt": READ, "genfromtxt": READ},
    "pandas": {"read_csv": READ, "read_parquet": READ, "read_json": READ, "read_pickle": READ},
    "pathlib": {"Path.read_bytes": READ, "Path.read_text": READ},
    "pickle": {"load": DECODE, "loads": DECODE},
    "pydicom": {"dcmread": DECODE},
    "skimage.io": {"imread": DECODE},
    "soundfile": {"read": DECODE},
    "tifffile": {"imread": DECODE},
    "torch": {"load": READ},
    "torchaudio": {"load": DECODE},
    "torchvision.io": {
        **dict.fromkeys(("decode_image", "decode_jpeg", "decode_png", "decode_webp", "read_image"), DECODE),
        "read_file": READ,
    },
    "zlib": {"decompress": DECODE},
}
"""Functions that read or decode, by their modules."""

Total = List[int]  # wall time and CPU time in nanoseconds, and the number of calls


class Stages:
    """The stages of one thread."""

    def __init__(self) -> None:
        self.thread = get_ident()
        self.totals: Dict[str, Total] = {}
        """Those since the last `take`, by stage."""
        self.calls: Dict[str, int] = {}
        """The calls of each stage so far."""
        self.places: Dict[str, str] = {}
        self.samples = 0
        """The samples so far."""
        self._open: List[str] = []
        self._since = self._cpu = 0

    def enter(self, stage: str) -> None:
        now, cpu = perf_counter_ns(), thread_time_ns()
        if self._open:
            self._add(self._open[-1], now, cpu)
        self._open.append(stage)
        self._since, self._cpu = now, cpu

    def leave(self) -> None:
        now, cpu = perf_counter_ns(), thread_time_ns()
        self._add(self._open.pop(), now, cpu)[2] += 1
        self._since, self._cpu = now, cpu

    def _add(self, stage: str, now: int, cpu: int) -> Total:
        total = self.totals.get(stage)
        if total is None:
            total = self.totals[stage] = [0, 0, 0]
        total[0] += now - self._since
        total[1] += cpu - self._cpu
        return total

    @property
    def current(self) -> str:
        """The innermost stage; empty outside of all."""
        return self._open[-1] if self._open else ""

    def take(self) -> Dict[str, Total]:
        """Returns the totals since the last call of it."""
        found, self.totals = self.totals, {}
        for stage, total in found.items():
            self.calls[stage] = self.calls.get(stage, 0) + total[2]
        return found

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does what `call` does, and whose time inside of another stage is a stage.

        A function of the dataset is one only where the dataset itself calls it, so that one that others call too, such
        as transforms, does not hide them.
        """
        within = DATASET if stage.startswith(DATASET) else None

        @functools.wraps(call, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            running = self._open
            if not running or self.thread != get_ident() or self._is_small(stage):
                return call(*args, **kwargs)
            if within is not None and running[-1] != within:
                return call(*args, **kwargs)
            self.enter(stage)
            try:
                return call(*args, **kwargs)
            finally:
                self.leave()

        wrapper.__wrapped__ = call
        wrapper._gpubench_stage = stage  # type: ignore[attr-defined]
        return wrapper

    def _is_small(self, stage: str) -> bool:
        return self.calls.get(stage, 0) > MOST_CALLS * (self.samples + 1)


class StageFinder:
    """Finds what a dataset calls to make a sample, and times it as stages."""

    def __init__(self, stages: Stages, places: SourcePlaces) -> None:
        self._stages = stages
        self._places = places
        self._seen: set[int] = set()
        self._classes: set[type] = set()

    def look_at(self, dataset: Any, collate: Any) -> None:
        """Times the transforms and functions that the dataset and the function for batches call."""
        self._visit(dataset, 0)
        code = getattr(collate, "__func__", collate)
        if isinstance(code, FunctionType):
            self._look_into(code, 0)
        elif collate is not None:
            self._classes.update(type(collate).__mro__)  # the stage has its time already
            self._visit(collate, 0)
        self.find_known()

    def find_known(self) -> None:
        """Times the known functions of the modules that have been imported so far."""
        for name, functions in KNOWN.items():
            module = sys.modules.get(name)
            for path, kind in functions.items() if module else ():
                owner: Any = module
                *classes, last = path.split(".")
                for each in classes:
                    owner = getattr(owner, each, None)
                call = getattr(owner, last, None) if owner is not None else None
                if call is not None and not _is_timed(call):
                    short = name.partition(".")[0] if last in ("open", "load") and classes else f"{name}.{path}"
                    self._replace(owner, last, f"{kind} {short}", call)

    def _visit(self, found: Any, depth: int) -> None:
        """Looks at an object that takes part in making a sample: at its methods, if it is of the program's own class,
        and at what it holds."""
        if id(found) in self._seen or depth > MOST_DEPTH or isinstance(found, (type, ModuleType)):
            return
        self._seen.add(id(found))
        own = self._is_own(type(found))
        if own:
            self._look_at_methods(type(found))
        held = getattr(found, "__dict__", None)
        if isinstance(held, dict):
            for name, value in list(held.items()):
                self._look_at_value(held, name, value, depth)

    def _look_at_value(self, holder: Any, key: Any, value: Any, depth: int) -> None:
        """Looks at what an object, a list or a mapping holds."""
        if isinstance(value, (type, ModuleType, torch.Tensor)):
            return
        if isinstance(value, (list, tuple, dict)):
            self._look_at_entries(value, depth)
        elif isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._look_at_function(holder, key, value)
        elif callable(value) and not isinstance(value, Dataset):
            self._look_at_class(type(value))
            self._visit(value, depth + 1)
        elif isinstance(value, Dataset) or self._is_own(type(value)):
            self._visit(value, depth + 1)

    def _look_at_entries(self, held: Any, depth: int) -> None:
        if len(held) > MOST_LISTED or id(held) in self._seen:
            return
        self._seen.add(id(held))
        for key, each in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if callable(each) or isinstance(each, (list, tuple, dict, Dataset)):
                self._look_at_value(held, key, each, depth + 1)

    def _look_at_function(self, holder: Any, key: Any, value: Any) -> None:
        """Times a function that an object holds: as a transform, if it is in a list or its attribute says so."""
        if _is_timed(value) or isinstance(holder, tuple):
            return
        changes = not isinstance(key, str) or any(word in key.lower() for word in OF_TRANSFORMS)
        stage = self._stage(TRANSFORM if changes else DATASET, _name_of(value), value)
        with suppress(Exception):  # a mapping that refuses it
            holder[key] = self._stages.timed(stage, value)

    def _look_at_class(self, cls: type) -> None:
        """Times the calls of the instances of a class, such as a transform."""
        if cls in self._classes or issubclass(cls, torch.nn.modules.loss._Loss):
            return
        self._classes.add(cls)
        self._replace(cls, CALL, self._stage(TRANSFORM, cls.__name__, cls), getattr(cls, CALL))

    def _look_at_methods(self, cls: type) -> None:
        """Times the methods of a class of the program's own, and what they call of the program's own functions."""
        for one in cls.__mro__:
            if one in self._classes or not self._is_own(one):
                continue
            self._classes.add(one)
            for name, value in list(vars(one).items()):
                static = isinstance(value, (staticmethod, classmethod))
                function = value.__func__ if static else value
                if not isinstance(function, FunctionType):
                    continue
                self._look_into(function, 0)
                if name.startswith("__") and name != CALL:
                    continue
                kind, shown = (TRANSFORM, one.__name__) if name == CALL else (DATASET, f"{one.__name__}.{name}")
                wrapped = self._stages.timed(self._stage(kind, shown, function), function)
                with suppress(Exception):  # a class that refuses it
                    setattr(one, name, type(value)(wrapped) if static else wrapped)

    def _look_into(self, function: FunctionType, depth: int) -> None:
        """Times the functions of the program's own that a function calls by their names."""
        if depth > MOST_DEPTH or id(function.__code__) in self._seen or not self._places.is_own(_file_of(function)):
            return
        self._seen.add(id(function.__code__))
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType) and not _is_timed(value):
                if self._places.is_own(_file_of(value)):
                    self._look_into(value, depth + 1)
                    stage = self._stage(DATASET, value.__name__, value)
                    function.__globals__[name] = self._stages.timed(stage, value)
                elif kind := KNOWN.get(value.__module__, {}).get(value.__name__):
                    stage = self._stage(kind, f"{value.__module__}.{value.__name__}", value)
                    function.__globals__[name] = self._stages.timed(stage, value)
            elif callable(value) and not inspect.isroutine(value):
                self._look_at_value(function.__globals__, name, value, depth + 1)
        for value in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                held = value.cell_contents
                if isinstance(held, FunctionType) and not _is_timed(held):
                    self._look_into(held, depth + 1)

    def _stage(self, kind: str, name: str, made: Any) -> str:
        stage = f"{kind} {name}"[:100]
        if stage not in self._stages.places:
            self._stages.places[stage] = self._place_of(made)
        return stage

    def _place_of(self, made: Any) -> str:
        """Returns the line of the program at which a function or class begins; empty for one of a package."""
        made = inspect.unwrap(getattr(made, "__func__", getattr(made, "func", made)))
        try:
            path = inspect.getsourcefile(made) or ""
            if not path or not self._places.is_own(path):
                return ""
            code = getattr(made, "__code__", None)
            line = code.co_firstlineno if code else inspect.getsourcelines(made)[1]
        except (OSError, TypeError):
            return ""
        return f"{self._places.shown(self._places.absolute(path))}:{line}"

    def _is_own(self, cls: type) -> bool:
        module = sys.modules.get(cls.__module__)
        path = getattr(module, "__file__", None) or ""
        return bool(path) and self._places.is_own(path)

    def _replace(self, owner: Any, name: str, stage: str, call: Any) -> None:
        self._stages.places.setdefault(stage, "")
        with suppress(Exception):  # a class of an extension module, which cannot be changed
            setattr(owner, name, self._stages.timed(stage, call))


def _is_timed(call: Any) -> bool:
    return hasattr(call, "_gpubench_stage")


def _name_of(value: Any) -> str:
    inner = getattr(value, "func", value)
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition("<locals>.")[2]


def _file_of(function: Any) -> str:
    return str(function.__code__.co_filename)


class Fetching:
    """Times how the batches of one pass over the data are made in this process.

    `sink` gets a record of each batch: when it began, how long it took by the clock and on the CPU, its samples and
    the times of its stages.
    """

    def __init__(self, fetcher: Any, stages: Stages, sink: Callable[[Dict[str, Any]], None]) -> None:
        self._stages = stages
        self._sink = sink
        self._samples: List[Tuple[str, int, int]] = []
        self._fetch = fetcher.fetch
        fetcher.fetch = self.fetch
        if fetcher.collate_fn is not None:
            fetcher.collate_fn = stages.timed(COLLATE, fetcher.collate_fn)
        if hasattr(fetcher, "dataset_iter"):
            fetcher.dataset_iter = _TimedIterator(fetcher.dataset_iter, self)
        else:
            fetcher.dataset = _TimedDataset(fetcher.dataset, self)

    def fetch(self, index: Any) -> Any:
        stages = self._stages
        stages.thread = get_ident()
        began, cpu = perf_counter_ns(), thread_time_ns()
        stages.enter(DATASET)
        try:
            batch = self._fetch(index)
        except BaseException:
            stages.leave()
            stages.take()
            self._samples = []
            raise
        stages.leave()
        wall, cpu = perf_counter_ns() - began, thread_time_ns() - cpu
        samples, self._samples = self._samples, []
        stages.samples += max(1, len(samples))
        self._sink({"began": began, "wall": wall, "cpu": cpu, "stages": stages.take(), "samples": samples})
        return batch

    def sample(self, key: Any, call: Callable[[], Any]) -> Any:
        """Makes a sample by `call`, and keeps how long that took."""
        began, cpu = perf_counter_ns(), thread_time_ns()
        made = call()
        self._samples.append((_shown(key), perf_counter_ns() - began, thread_time_ns() - cpu))
        return made


def _shown(key: Any) -> str:
    return str(key)[:60] if isinstance(key, (int, str)) else f"{type(key).__name__}"


class _TimedDataset:
    """Stands in for the dataset of a fetcher, which only gets samples from it."""

    def __init__(self, dataset: Any, fetching: Fetching) -> None:
        self._dataset = dataset
        self._fetching = fetching

    def __getitem__(self, index: Any) -> Any:
        return self._fetching.sample(index, lambda: self._dataset[index])

    @property
    def __getitems__(self) -> Any:
        """The method of the dataset that makes all samples of a batch; an AttributeError if it has none."""
        return self._dataset.__getitems__


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], fetching: Fetching) -> None:
        self._iterator = iterator
        self._fetching = fetching
        self._number = 0

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        made = self._fetching.sample(self._number, lambda: next(self._iterator))
        self._number += 1
        return made


class FileSink:
    """Appends the records of a worker, which may be killed at any time, to a file of the host's folder."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, record: Dict[str, Any]) -> None:
        with suppress(OSError):  # the folder is gone, or the disk is full
            os.write(self._descriptor, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def records_in(path: str) -> List[Dict[str, Any]]:
    """Returns the complete records of a file."""
    found = []
    with suppress(OSError), open(path, "rb") as file:
        for line in file.read().split(b"\n")[:-1]:
            with suppress(ValueError):
                found.append(json.loads(line))
    return found
