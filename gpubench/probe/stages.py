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
import random
import sys
from contextlib import suppress
from operator import getitem
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils.data import Dataset, Subset

from .attributes import attributes, set_attribute
from .observed import SourcePlaces

INDEX, DATASET, READ, DECODE, TRANSFORM, COLLATE, PIN, TRANSFER = (
    *("index", "dataset", "read", "decode", "transform", "collate", "pin", "transfer"),
)
"""The kinds of stages. One that has a name is called by both, as "transform Normalize" or "dataset Photos.load"."""
OF_TRANSFORMS = ("transform", "augment", "process", "tokeniz")
"""What the names of functions that change samples have in them, or those of the attributes that hold them."""
CALL = "__call__"
MAKERS = ("__getitem__", "__getitems__", "__iter__", "__next__")
"""The methods by which a dataset makes samples."""
MOST_DEPTH = 10
MOST_LISTED = 64
"""The entries of a list or mapping that are looked at."""
MOST_CALLS, SHORT = 32, 10_000
"""The calls in a sample from which on a function whose calls take less than so many nanoseconds is too small to be a
stage: timing them takes about as long as they do."""
ASKED = 8
"""Of so many batches in a row the CPU time is asked for in one, and in the first FIRST_ASKED."""
FIRST_ASKED = 3
KNOWN = {
    "PIL.Image": {"open": (DECODE, "PIL")},
    "PIL.ImageFile": {"ImageFile.load": (DECODE, "PIL")},
    "bz2": {"decompress": (DECODE, "bz2.decompress")},
    "cv2": {"imread": (DECODE, "cv2.imread"), "imdecode": (DECODE, "cv2.imdecode")},
    "gzip": {"decompress": (DECODE, "gzip.decompress")},
    "h5py": dict.fromkeys(("Dataset.__getitem__", "Group.__getitem__"), (READ, "h5py")),
    "imageio.v2": {"imread": (DECODE, "imageio.imread")},
    "imageio.v3": {"imread": (DECODE, "imageio.imread")},
    "json": {"load": (DECODE, "json.load"), "loads": (DECODE, "json.loads")},
    "librosa": {"load": (DECODE, "librosa.load")},
    "lzma": {"decompress": (DECODE, "lzma.decompress")},
    "nibabel": {"load": (READ, "nibabel.load")},
    "numpy": {name: (READ, f"numpy.{name}") for name in ("load", "fromfile", "loadtxt", "genfromtxt")},
    "orjson": {"loads": (DECODE, "orjson.loads")},
    "pandas": {name: (READ, f"pandas.{name}") for name in ("read_csv", "read_parquet", "read_json", "read_pickle")},
    "pathlib": {name: (READ, name) for name in ("Path.read_bytes", "Path.read_text")},
    "pickle": {"load": (DECODE, "pickle.load"), "loads": (DECODE, "pickle.loads")},
    "pyarrow.parquet": {"read_table": (READ, "pyarrow.parquet.read_table")},
    "pydicom": {"dcmread": (DECODE, "pydicom.dcmread")},
    "safetensors.torch": {"load_file": (READ, "safetensors.load_file")},
    "skimage.io": {"imread": (DECODE, "skimage.io.imread")},
    "soundfile": {"read": (DECODE, "soundfile.read")},
    "tifffile": {"imread": (DECODE, "tifffile.imread")},
    "torch": {"load": (READ, "torch.load")},
    "torchaudio": {"load": (DECODE, "torchaudio.load")},
    "torchvision.io": {
        **{
            name: (DECODE, f"torchvision.io.{name}")
            for name in ("decode_image", "decode_jpeg", "decode_png", "decode_webp", "read_image")
        },
        "read_file": (READ, "torchvision.io.read_file"),
    },
    "zarr": {"Array.__getitem__": (READ, "zarr")},
    "zlib": {"decompress": (DECODE, "zlib.decompress")},
}
"""Functions that read or decode, by their modules: the kinds and the names of their stages."""
WITH_SUBCLASSES = {"ImageFile.load"}
"""The methods that classes replace with their own."""


class OneIn:
    """Chooses one of so many in a row, at random: what comes at equal distances is neither always chosen nor never."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._random = random.Random(0)
        self._left = self._before = 0
        """How many of these are to come, and how many of them after the one to choose."""

    def __call__(self) -> bool:
        if not self._left:
            self._left, self._before = self._number, self._random.randrange(self._number)
        self._left -= 1
        return self._left == self._before


Total = List[int]  # wall time and CPU time in nanoseconds, and the number of calls


class Stages:
    """The stages of one thread.

    Asking for the CPU time takes ten times as long as asking for the time, so that this is done in some batches, and
    that of the others follows from the share that a stage had in these. On a busy machine the system often takes the
    core away when it is asked: it is asked first, so that this time is that of the stage before.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.totals: Dict[str, Total] = {}
        """Those since the last `take`, by stage."""
        self.small: set[str] = set()
        """The stages that are none any more, because timing them takes about as long as they do. Their time is that of
        the stage around them."""
        self.places: Dict[str, str] = {}
        self._open: List[str] = []
        self._running: List[Total] = []
        """The totals of the open stages."""
        self._since = self._cpu = 0
        self._batches = 0
        self._choose = OneIn(ASKED)
        self._asks = True
        """Whether the CPU time is asked for."""
        self._shares: Dict[str, Total] = {}
        """The totals of the batches in which it was."""

    def enter(self, stage: str) -> None:
        cpu, now = thread_time_ns() if self._asks else 0, perf_counter_ns()
        if self._open:
            total = self._running[-1]
            total[0] += now - self._since
            total[1] += cpu - self._cpu
        total = self.totals.get(stage)  # type: ignore[assignment]
        if total is None:
            total = self.totals[stage] = [0, 0, 0]
        self._open.append(stage)
        self._running.append(total)
        self._since, self._cpu = now, cpu

    def leave(self) -> None:
        cpu, now = thread_time_ns() if self._asks else 0, perf_counter_ns()
        total = self._running.pop()
        total[0] += now - self._since
        total[1] += cpu - self._cpu
        total[2] += 1
        self._open.pop()
        self._since, self._cpu = now, cpu

    @property
    def current(self) -> str:
        """The innermost stage; empty outside of all."""
        return self._open[-1] if self._open else ""

    def take(self, samples: int, cpu: int) -> Dict[str, Total]:
        """Returns the totals since the last call of it, which was at the end of another batch.

        `samples` are those of this batch, and `cpu` is the CPU time that it took in nanoseconds.
        """
        found, self.totals = self.totals, {}
        self.small.update(
            stage
            for stage, (wall, _, calls) in found.items()
            if calls > MOST_CALLS * samples and wall < SHORT * calls and " " in stage
        )
        for stage, total in found.items():
            asked = self._shares.setdefault(stage, [0, 0, 0])
            if self._asks:
                for place, part in enumerate(total):
                    asked[place] += part
            elif asked[0]:
                total[1] = round(total[0] * asked[1] / asked[0])
        if not self._asks:
            self._fit(found, cpu)
        self._batches += 1
        self._asks = self._choose() or self._batches < FIRST_ASKED
        return found

    def _fit(self, found: Dict[str, Total], cpu: int) -> None:
        """Makes the CPU times of the stages, which follow from other batches, sum to that of their batch.

        A batch that waits longer than others do does so where its stages take longer than they usually do.
        """
        waits = {stage: wall - computed for stage, (wall, computed, _) in found.items()}
        more = sum(wall for wall, _, _ in found.values()) - cpu - sum(waits.values())
        if more < 0:
            share = max(-1.0, more / max(1, sum(waits.values())))
            for stage, wait in waits.items():
                found[stage][1] -= round(share * wait)
            return
        longer = {}
        for stage, (wall, computed, calls) in found.items():
            asked = self._shares[stage]
            longer[stage] = max(0, min(computed, wall - asked[0] * calls // max(1, asked[2])))
        for parts in (longer, {stage: total[1] for stage, total in found.items()}):
            share = min(1.0, more / max(1, sum(parts.values())))
            for stage, part in parts.items():
                taken = min(round(share * part), found[stage][1])
                found[stage][1] -= taken
                more -= taken

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does what `call` does, and whose time inside of another stage is a stage.

        A function of the dataset is one only where the dataset itself or another one of them calls it, so that one that
        others call too, such as transforms, does not hide them.
        """
        wrapper = (self._timed_generator if inspect.isgeneratorfunction(call) else self._timed_call)(stage, call)
        functools.update_wrapper(wrapper, call)
        wrapper._gpubench_stage = stage  # type: ignore[attr-defined]
        return wrapper

    def time_in_place(self, stage: str, function: FunctionType) -> None:
        """Times the calls of a function, which stays the object that it is, for `is`, as a key and in a pickle."""
        original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__, original.__doc__ = function.__kwdefaults__, function.__doc__
        original.__qualname__, original.__module__ = function.__qualname__, function.__module__
        original.__annotations__ = function.__annotations__
        vars(original).update(vars(function))
        function.__code__ = _passing_on(self.timed(stage, original), function.__code__)
        function.__wrapped__ = original  # type: ignore[attr-defined]  # which has the signature
        function._gpubench_stage = stage  # type: ignore[attr-defined]

    def _timed_call(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        # What `_counts`, `enter` and `leave` do is written out here: calling them would take longer than they do.
        opened, running, small, of_dataset = self._open, self._running, self.small, stage.startswith(DATASET)
        wall_clock, cpu_clock, this_thread = perf_counter_ns, thread_time_ns, get_ident

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not opened or stage in small or self.thread != this_thread():
                return call(*args, **kwargs)
            around = opened[-1]
            if around == stage or (of_dataset and not around.startswith(DATASET)):
                return call(*args, **kwargs)
            cpu, now = cpu_clock() if self._asks else 0, wall_clock()
            total = running[-1]
            total[0] += now - self._since
            total[1] += cpu - self._cpu
            found = self.totals.get(stage)
            if found is None:
                found = self.totals[stage] = [0, 0, 0]
            opened.append(stage)
            running.append(found)
            self._since, self._cpu = now, cpu
            try:
                return call(*args, **kwargs)
            finally:
                cpu, now = cpu_clock() if self._asks else 0, wall_clock()
                found[0] += now - self._since
                found[1] += cpu - self._cpu
                found[2] += 1
                opened.pop()
                running.pop()
                self._since, self._cpu = now, cpu

        return wrapper

    def _timed_generator(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Times each step of the generators that a function makes."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            made = call(*args, **kwargs)
            step = functools.partial(next, made)
            while True:
                counts = self._counts(stage)
                if counts:
                    self.enter(stage)
                try:
                    item = step()
                except StopIteration as end:
                    return end.value
                finally:
                    if counts:
                        self.leave()
                try:
                    step = functools.partial(made.send, (yield item))
                except GeneratorExit:
                    made.close()
                    raise
                except BaseException as error:
                    step = functools.partial(made.throw, error)

        return wrapper

    def _counts(self, stage: str) -> bool:
        """Tells whether a call now belongs to a stage of its own."""
        running = self._open
        if not running or stage in self.small or self.thread != get_ident():
            return False
        around = running[-1]
        return around != stage and (not stage.startswith(DATASET) or around.startswith(DATASET))


class StageFinder:
    """Finds what a dataset calls to make a sample, and times it as stages."""

    def __init__(self, stages: Stages, places: SourcePlaces) -> None:
        self._stages = stages
        self._places = places
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        """The classes whose methods have been looked at, and those of whose instances the calls have been."""
        self._callable: set[type] = set()
        self._origins: Dict[str, str] = {}
        """The places of the program, or the modules, of what the stages are named after."""
        self._callers: Dict[str, set[str]] = {}
        """The names of the functions of the program's own that call a function which is a stage of the dataset."""
        self._known: Dict[int, Callable[..., Any]] = {}
        """The functions that stand in for known ones, by the identities of these."""

    def look_at(self, dataset: Any, collate: Any) -> None:
        """Times the transforms and functions that the dataset and the function for batches call."""
        self.find_known()
        self._visit(dataset, 0)
        code = getattr(collate, "__func__", collate)
        if isinstance(code, FunctionType):
            self._look_into(code, 0)
        elif collate is not None:
            self._callable.add(type(collate))  # the stage has its time already
            self._visit(collate, 0)
        self._stages.small.update(stage for stage, callers in self._callers.items() if _is_helper(callers))

    def find_known(self) -> None:
        """Times the known functions of the modules that have been imported so far."""
        for name, functions in KNOWN.items():
            module = sys.modules.get(name)
            for path, (kind, shown) in functions.items() if module else ():
                *classes, last = path.split(".")
                owners: List[Any] = [module]
                for each in classes:
                    owners = [found for owner in owners if (found := getattr(owner, each, None)) is not None]
                if path in WITH_SUBCLASSES:
                    owners += [cls for owner in owners for cls in _subclasses(owner) if last in vars(cls)]
                for owner in owners:
                    call = getattr(owner, last, None)
                    if call is not None and not _is_timed(call):
                        self._known[id(call)] = self._replace(owner, last, f"{kind} {shown}", call)

    def _visit(self, found: Any, depth: int) -> None:
        """Looks at an object that takes part in making a sample: at its methods, if it is of the program's own class,
        and at what it holds."""
        if id(found) in self._seen or depth > MOST_DEPTH or isinstance(found, (type, ModuleType)):
            return
        self._seen.add(id(found))
        held = attributes(found)  # first, because the name of an attribute tells what a function is
        for name, value in list(held.items()):
            self._look_at_value(held, name, value, depth, found)
            if held[name] is not value:
                with suppress(Exception):  # an attribute that is read only
                    set_attribute(found, name, held[name])
        if self._is_own(type(found)):
            self._look_at_methods(type(found), depth)

    def _look_at_value(self, holder: Any, key: Any, value: Any, depth: int, of: Any = None) -> None:
        """Looks at what an object, a list or a mapping holds; `of` is the object whose attribute it is."""
        if isinstance(value, (type, ModuleType, torch.Tensor)):
            return
        if isinstance(value, (list, tuple, dict)):
            self._look_at_entries(holder, key, value, depth)
        elif isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, functools.partial)):
            self._look_at_function(holder, key, value, of)
        elif callable(value) and not _is_dataset(value):
            self._look_at_class(type(value))
            self._visit(value, depth + 1)
        elif _is_dataset(value) or self._is_own(type(value)) or _of_one_package(value, of):
            self._visit(value, depth + 1)

    def _look_at_entries(self, holder: Any, key: Any, held: Any, depth: int) -> None:
        if len(held) > MOST_LISTED or id(held) in self._seen:
            return
        self._seen.add(id(held))
        entries = list(held) if isinstance(held, tuple) else held
        for place, each in list(entries.items() if isinstance(entries, dict) else enumerate(entries)):
            if callable(each) or isinstance(each, (list, tuple, dict)) or _is_dataset(each):
                self._look_at_value(entries, place, each, depth + 1)
        if isinstance(held, tuple) and any(new is not old for new, old in zip(entries, held)):
            with suppress(Exception):  # a tuple of the program's own class, or a holder that refuses another one
                holder[key] = held._make(entries) if hasattr(held, "_make") else type(held)(entries)

    def _look_at_function(self, holder: Any, key: Any, value: Any, of: Any) -> None:
        """Times a function that an object holds: as a transform, if it is in a list, if its attribute says so, or if
        the object is of a package and no dataset."""
        if _is_timed(value):
            return
        inner = getattr(value, "__func__", getattr(value, "func", value))
        if isinstance(inner, FunctionType):
            self._look_into(inner, 0)
        named = isinstance(key, str) and not _is_of_transform(key)
        of_dataset = of is None or _is_dataset(of) or self._is_own(type(of))
        name = _name_of(value) if self._is_own_function(inner) else _name_of(value).lstrip("_")
        stage = self._stage(DATASET if named and of_dataset else TRANSFORM, name, inner)
        known = self._known.get(id(value))
        if known is None and not isinstance(value, MethodType) and self._is_own_function(inner):
            self._stages.time_in_place(stage, inner)
            return
        with suppress(Exception):  # a mapping that refuses it
            holder[key] = known or self._stages.timed(stage, value)

    def _look_at_class(self, cls: type) -> None:
        """Times the calls of the instances of a class, such as a transform."""
        if (
            cls in self._callable
            or cls.__module__ in ("builtins", "functools", "typing")
            or issubclass(cls, torch.nn.modules.loss._Loss)
        ):
            return
        self._callable.add(cls)
        call: Any = getattr(cls, CALL)
        inherited = CALL not in vars(cls) and _is_timed(call)
        self._replace(cls, CALL, self._stage(TRANSFORM, cls.__name__, cls), call.__wrapped__ if inherited else call)

    def _look_at_methods(self, cls: type, depth: int) -> None:
        """Times the methods of a class of the program's own, and what they call of the program's own functions."""
        if any(CALL in vars(one) for one in cls.__mro__):
            self._look_at_class(cls)
        for one in cls.__mro__:
            if one in self._classes or not self._is_own(one):
                continue
            self._classes.add(one)
            for name, value in list(vars(one).items()):
                function, again = _taken_apart(value)
                if isinstance(function, FunctionType):
                    if name != "__init__":  # which makes no sample
                        self._look_into(function, 0)
                    if not name.startswith("__"):
                        stage = self._stage(DATASET, f"{one.__name__}.{name}", function)
                        self._set(one, name, again(self._stages.timed(stage, function)))
                elif not name.startswith("__"):
                    self._look_at_value({}, name, value, depth)

    def _look_into(self, function: FunctionType, depth: int) -> None:
        """Times what a function of the program's own calls by its name: functions, classes and other objects of the
        program's own, and known functions."""
        function = inspect.unwrap(function, stop=lambda each: not _is_timed(each))
        code = function.__code__
        if depth > MOST_DEPTH or id(code) in self._seen or not self._places.is_own(code.co_filename):
            return
        self._seen.add(id(code))
        names = names_in(code)
        for name in names:
            self._look_at_name(function.__globals__, name, names, depth)
            stage = getattr(function.__globals__.get(name), "_gpubench_stage", "")
            if stage.startswith(DATASET):
                self._callers.setdefault(stage, set()).add(function.__qualname__)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with suppress(ValueError):  # an empty cell
                held = {name: cell.cell_contents}
                self._look_at_name(held, name, names, depth)
                if held[name] is not cell.cell_contents:
                    cell.cell_contents = held[name]

    def _look_at_name(self, holder: Dict[str, Any], name: str, names: set[str], depth: int) -> None:
        """Looks at what is called `name` in a module, or in the function around another one; `names` are those that the
        caller uses."""
        value = holder.get(name)
        if value is None or _is_timed(value):
            return
        if id(value) in self._known:
            holder[name] = self._known[id(value)]
        elif isinstance(value, ModuleType):
            if depth < MOST_DEPTH and self._places.is_own(getattr(value, "__file__", None) or "<"):
                for each in names & vars(value).keys():
                    self._look_at_name(vars(value), each, names, depth + 1)
        elif isinstance(value, FunctionType):
            if self._is_own_function(value):
                self._look_into(value, depth + 1)
                kind = TRANSFORM if _is_of_transform(name) or _is_of_transform(value.__name__) else DATASET
                self._stages.time_in_place(self._stage(kind, _name_of(value), value), value)
        else:
            self._look_at_object(holder, name, value, depth)

    def _look_at_object(self, holder: Dict[str, Any], name: str, value: Any, depth: int) -> None:
        if isinstance(value, type) and self._is_own(value):
            self._look_at_methods(value, depth + 1)
        elif not inspect.isroutine(value):
            self._look_at_value(holder, name, value, depth + 1)

    def _stage(self, kind: str, name: str, made: Any) -> str:
        """Returns the stage of what is called `name`: that of another one which is called the same has another name."""
        made = inspect.unwrap(made)
        place = self._place_of(made)
        origin = place or str(getattr(made, "__module__", ""))
        stage = f"{kind} {name}"[:100]
        if self._origins.setdefault(stage, origin) != origin:
            stage = f"{kind} {name} ({os.path.basename(origin)})"[:100]
        self._stages.places.setdefault(stage, place)
        return stage

    def _place_of(self, made: Any) -> str:
        """Returns the line of the program at which a function or class begins; empty for one of a package."""
        try:
            path = inspect.getsourcefile(made) or ""
            if not path or not self._places.is_own(path):
                return ""
            code = getattr(made, "__code__", None)
            line = code.co_firstlineno if code else inspect.getsourcelines(made)[1]
        except (OSError, TypeError, ValueError):
            return ""
        return f"{self._places.shown(self._places.absolute(path))}:{line}"

    def _is_own_function(self, function: Any) -> bool:
        return isinstance(function, FunctionType) and self._places.is_own(function.__code__.co_filename)

    def _is_own(self, cls: type) -> bool:
        module = sys.modules.get(cls.__module__)
        path = getattr(module, "__file__", None) or ""
        return bool(path) and self._places.is_own(path)

    def _replace(self, owner: Any, name: str, stage: str, call: Any) -> Callable[..., Any]:
        self._stages.places.setdefault(stage, "")
        timed = self._stages.timed(stage, call)
        self._set(owner, name, timed)
        return timed

    def _set(self, owner: Any, name: str, value: Any) -> None:
        with suppress(Exception):  # a class that refuses it, such as one of an extension module
            setattr(owner, name, value)


def _is_helper(callers: set[str]) -> bool:
    """Tells whether a function helps several others, which have its time, and is no part of making a sample itself."""
    return len(callers) > 1 and not all(name.rpartition(".")[2] in MAKERS for name in callers)


CALLED = "what is called"


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    return "what is called".__call__(*args, **kwargs)  # type: ignore[operator]  # another object takes its place


def _passing_on(call: Callable[..., Any], code: CodeType) -> CodeType:
    """Returns code that calls `call` with what it is given, for a function that had `code`."""
    passing = _pass_on.__code__.replace(
        co_consts=tuple(call if each == CALLED else each for each in _pass_on.__code__.co_consts),
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    return passing.replace(co_qualname=code.co_qualname) if sys.version_info >= (3, 11) else passing


def _is_timed(call: Any) -> bool:
    return isinstance(call, FunctionType) and "_gpubench_stage" in vars(call)


def _is_of_transform(name: str) -> bool:
    return any(word in name.lower() for word in OF_TRANSFORMS)


def _is_dataset(found: Any) -> bool:
    """Tells whether an object is a dataset of PyTorch, or of a package, which then makes whole batches."""
    return isinstance(found, Dataset) or hasattr(type(found), "__getitems__")


def _of_one_package(found: Any, holder: Any) -> bool:
    """Tells whether an object is of a class of the package that the class of its holder is of, other than PyTorch."""
    package = type(found).__module__.partition(".")[0]
    return package not in ("builtins", "torch") and package == type(holder).__module__.partition(".")[0]


def _name_of(value: Any) -> str:
    inner = getattr(value, "func", value)
    name = str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition("<locals>.")[2]
    return "lambda" if name == "<lambda>" else name


def _taken_apart(value: Any) -> Tuple[Any, Callable[[Any], Any]]:
    """Returns the function of what a class has, and what makes the same of another function."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__, type(value)
    if type(value) is property:
        return value.fget, lambda timed: property(timed, value.fset, value.fdel, value.__doc__)
    return value, lambda timed: timed


def names_in(code: CodeType) -> set[str]:
    """Returns the names that code uses, and those that the functions in it use."""
    found = {*code.co_names, *code.co_freevars}
    constants: Tuple[Any, ...] = code.co_consts
    for each in constants:
        if isinstance(each, CodeType):
            found |= names_in(each)
    return found


def _subclasses(cls: type) -> Iterator[type]:
    children: List[type] = cls.__subclasses__()
    for each in children:
        yield each
        yield from _subclasses(each)


class Fetching:
    """Times how the batches of one pass over the data are made in this process.

    `sink` gets a record of each batch: when it began, how long it took by the clock and on the CPU, how many samples
    were made, the times of those that were made one by one, and the times of its stages.
    """

    def __init__(self, fetcher: Any, stages: Stages, sink: Callable[[Dict[str, Any]], None]) -> None:
        self._stages = stages
        self._sink = sink
        self._samples: List[Tuple[str, int]] = []
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
            stages.totals = {}
            self._samples = []
            raise
        stages.leave()
        wall, cpu = perf_counter_ns() - began, thread_time_ns() - cpu
        samples, self._samples = self._samples, []
        made = len(samples) or (len(index) if isinstance(index, list) else 1) or 1
        self._sink(
            {
                "began": began,
                "wall": wall,
                "cpu": cpu,
                "made": made,
                "stages": stages.take(made, cpu),
                "samples": samples,
            }
        )
        return batch

    def sample(self, key: Any, make: Callable[..., Any], *of: Any) -> Any:
        """Makes a sample by `make` of what is given, and keeps how long that took."""
        began = perf_counter_ns()
        made = make(*of)
        self._samples.append((_shown(key), perf_counter_ns() - began))
        return made


def _shown(key: Any) -> str:
    return str(key)[:60] if isinstance(key, (int, str)) else f"{type(key).__name__}"


class _TimedDataset:
    """Stands in for the dataset of a fetcher, which only gets samples from it."""

    def __init__(self, dataset: Any, fetching: Fetching) -> None:
        self._dataset = dataset
        self._fetching = fetching

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):  # of a whole batch
            return self._dataset[index]
        return self._fetching.sample(index, getitem, self._dataset, index)

    @property
    def __getitems__(self) -> Any:
        """The method of the dataset that makes all samples of a batch; an AttributeError if it has none."""
        one_by_one = _one_by_one(self._dataset)
        return self._dataset.__getitems__ if one_by_one is None else functools.partial(self._each, one_by_one)

    def _each(self, make: Callable[[Any], Any], indices: List[Any]) -> List[Any]:
        return [self._fetching.sample(index, make, index) for index in indices]


def _one_by_one(dataset: Any) -> Optional[Callable[[Any], Any]]:
    """Returns how a Subset, whose method for all samples of a batch makes one after the other, makes one of them; None
    for other datasets, and for a Subset of one which makes them together."""
    if getattr(type(dataset), "__getitems__", None) is not getattr(Subset, "__getitems__", dataset):
        return None
    inner, indices = dataset.dataset, dataset.indices
    if not callable(getattr(inner, "__getitems__", None)):
        return lambda index: inner[indices[index]]
    make = _one_by_one(inner)
    return None if make is None else lambda index: make(indices[index])


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], fetching: Fetching) -> None:
        self._iterator = iterator
        self._fetching = fetching
        self._number = 0

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        made = self._fetching.sample(self._number, next, self._iterator)
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
