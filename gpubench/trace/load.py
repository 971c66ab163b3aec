"""Loads a trace file into columns, or reports which program wrote it if that was not torch.profiler.

Many programs write Chrome's format. They differ in the categories of events, in the names of processes, and in what the
file has besides the events.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from gpubench import units
from gpubench.errors import DataError
from gpubench.trace.columns import (
    MISSING,
    CollectiveMessage,
    CpuSlices,
    DeviceProperties,
    DeviceWork,
    Mask,
    Ns,
    Signature,
    SliceKind,
    Trace,
)
from gpubench.trace.file import (
    ANNOTATIONS,
    ELEMENT_BYTES,
    HOW,
    LEFT_OUT,
    OF_DEVICES,
    SLICE_KINDS,
    STANDARD_INPUT,
    WORK_KINDS,
    Args,
    EventDecoders,
    TraceDocument,
    TraceEvent,
)
from gpubench.trace.profile import STANDARD_INPUT_LABEL

SPANS = "XBE"
"""Phases of events with a duration: complete events, and pairs of a beginning and an end."""
NAMED = 4  # categories that a message lists

_VIZTRACER = "VizTracer"
_SYSTRACE = "Android's systrace or Perfetto"
_XLA = "JAX, XLA or TensorFlow"
_CATEGORIES = (
    (
        r"devtools\.timeline|disabled-by-default-|blink|v8|latencyInfo|loading$|netlog|toplevel$",
        "Chrome or its DevTools",
    ),
    (r"FEE$", _VIZTRACER),
    (r"nvtx|cuda_api$|cuda$", "nsys2json, which converts reports of Nsight Systems"),
    (r"sched$|irq$|freq$|binder|gfx$|am$|wm$|ftrace", _SYSTRACE),
    (r"(Session|Node|Api)$", "ONNX Runtime's profiler"),
    (r"action processing|bazel|general information", "Bazel"),
)
_OF_CPU_TOOLS = r"FEE$|nvtx"
_PROCESSES = (
    (r"(/job:.*)?/(device|host):", _XLA),
    (
        r"(CPU|CUDA) functions$",
        "EventList.export_chrome_trace, which leaves most out: the profiler has an export_chrome_trace of its own",
    ),
    (r"CPU (HIP|HSA) API|GPU\d+$", "rocprof"),
    (r"rank \d+$", "gpubench pipe-infer, a timeline"),
)
_KEYS = {
    "viztracer_metadata": _VIZTRACER,
    "systemTraceEvents": _SYSTRACE,
    "beginningOfTime": "clang (-ftime-trace)",
}
"""The programs that write a key besides the events, by key."""


@dataclass
class Signs:
    """The facts that identify the program that wrote a file, collected from its events."""

    categories: Counter[str] = field(default_factory=Counter)
    """Categories of events with a duration."""
    processes: set[str] = field(default_factory=set)
    """Names of processes, from metadata or from the events."""

    def add(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            if event.ph == "M" and event.name == "process_name" and event.args is not None:
                self.processes.add(str(event.args.name))
            elif event.ph and event.ph in SPANS:
                self.categories[event.cat] += 1
                if isinstance(event.pid, str):
                    self.processes.add(event.pid)

    def unreadable(self, about: Mapping[str, Any]) -> str | None:
        """Why nothing in the file can be read, and the likely program; None if no event has a duration.

        `about` is what the file has besides the events.
        """
        if not self.categories:
            return None
        named = [category for category, _ in self.categories.most_common() if category]
        more = [f"{len(named) - NAMED} more"] if len(named) > NAMED else []
        what = "its events have no category"
        if named:
            number = "its categories are" if len(named) > 1 else "its only category is"
            what = f"{number} {units.listed([*named[:NAMED], *more])}"
        if all(category.lower() in LEFT_OUT for category in self.categories):
            return f"it has no operators, runtime calls or kernels: {what}"
        if any(map(OF_DEVICES.match, named)):
            return f"the events of its device are not read: {what}"
        producer = self._producer(about)
        return f"torch.profiler did not write it: {what}" + (f", as in traces of {producer}" if producer else "")

    def _producer(self, about: Mapping[str, Any]) -> str | None:
        source = about.get("metadata")
        if isinstance(source, dict) and source.get("source") == "DevTools":
            return "Chrome's DevTools"
        if isinstance(source, dict) and "highres-ticks" in source:
            return _XLA
        pieces = {piece.strip() for category in self.categories for piece in category.split(",")}
        every = (
            *(name for key, name in _KEYS.items() if key in about),
            *_matching(_PROCESSES, self.processes),
            *_matching(_CATEGORIES, pieces),
        )
        return next(iter(every), None)


def of_cpu_tool(category: str) -> bool:
    """Whether a category is of a tool that records the CPU beside torch.profiler, and so not of a device."""
    return bool(re.match(_OF_CPU_TOOLS, category))


def _matching(known: Iterable[tuple[str, str]], found: Iterable[str]) -> list[str]:
    return [producer for pattern, producer in known if any(re.match(pattern, one) for one in found)]


RECORDED = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")
LONGEST = 2**53  # microseconds: beyond it a float is no longer whole, and nanoseconds soon exceed an int64

_NO_ARGS = Args()
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, to spread near numbers (Knuth, TAOCP 6.4)
_NARROW = {"kind": np.int8, "name": np.int32, "thread": np.int32, "signature": np.int32, "stack": np.int32}
_NARROW |= {"device": np.int32, "stream": np.int32, "message": np.int32}


def read(path: Path) -> Trace:
    """Loads the trace at `path`, JSON or gzipped JSON.

    Raises DataError for a file that is not a trace, is incomplete, has nothing that torch.profiler records, or does not
    fit in memory.
    """
    document, builder = TraceDocument(path, EventDecoders()), _Builder()
    for batch in document.batches():
        builder.add(batch)
    events, dropped = builder.events + document.dropped, builder.timeless + document.dropped
    about = document.metadata
    if not builder.kept:
        raise _nothing(path, builder, events, about)
    cpu, device = builder.cpu_slices(), builder.device_work()
    distributed = about.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return Trace(
        label=STANDARD_INPUT_LABEL if path == STANDARD_INPUT else path.name,
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        backend=str(distributed["backend"]) if "backend" in distributed else None,
        devices=_devices(about.get("deviceProperties")),
        names=list(builder.names),
        threads=[(str(process), str(thread)) for process, thread in builder.threads],
        signatures=[_signature(*parts) for parts in builder.signatures],
        cpu=cpu,
        device=device,
        settings={key: about[key] for key in RECORDED if key in about},
        events=events,
        dropped=dropped,
        repeated=builder.repeated,
        unread=dict(builder.unread),
        messages=list(builder.messages),
        truncated=document.truncated,
    )


def _nothing(path: Path, builder: "_Builder", events: int, about: dict[str, Any]) -> DataError:
    """The error for a file without any event that is read."""
    if why := builder.signs.unreadable(about):
        return DataError(f"{path} cannot be read: {why}", HOW)
    if not events:
        return DataError(f"{path} is an empty trace: it has no events", HOW)
    return DataError(f"{path} has nothing to diagnose: {units.counted(events, 'event')}, none with a duration", HOW)


@dataclass
class _Builder:
    """Collects columns, a batch of events at a time."""

    names: dict[str, int] = field(default_factory=dict)
    threads: dict[tuple[int | str | None, int | str | None], int] = field(default_factory=dict)
    signatures: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    events: int = 0
    timeless: int = 0
    """The number of events without a valid duration whose kind requires one."""
    repeated: int = 0
    """The number of slices and works that were left out because they repeat others."""
    unread: Counter[str] = field(default_factory=Counter)
    signs: Signs = field(default_factory=Signs)
    """The facts that identify the program, collected up to the first event that is read."""
    messages: dict[CollectiveMessage, int] = field(default_factory=dict)
    cpu: list[dict[str, Any]] = field(default_factory=list)
    device: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return any(len(part["start"]) for part in (*self.cpu, *self.device))

    def add(self, batch: list[TraceEvent]) -> None:
        self.events += len(batch)
        spans = [event for event in batch if event.ph == "X"]
        complete = [event for event in spans if _has_time(event)]
        self.timeless += len(spans) - len(complete)
        if not self.kept:
            self.signs.add(batch)
        known = SLICE_KINDS.keys() | WORK_KINDS.keys() | LEFT_OUT
        self.unread.update(event.cat for event in complete if event.cat.lower() not in known)
        self.cpu.append(self._cpu_columns([event for event in complete if event.cat.lower() in SLICE_KINDS]))
        self.device.append(self._device_columns([event for event in complete if event.cat.lower() in WORK_KINDS]))

    @property
    def correlated(self) -> bool:
        """Whether a call or a work has a correlation number. Old traces of ROCm pair them by "External id" instead."""
        return any((part["correlation"] > 0).any() for part in (*self.cpu, *self.device))

    def cpu_slices(self) -> CpuSlices:
        columns = self._once(_joined(self.cpu))
        identity = columns.pop("identity")
        if not self.correlated:
            columns["correlation"] = _paired(identity, columns["kind"] == SliceKind.RUNTIME)
        annotations = np.fromiter((name.startswith(ANNOTATIONS) for name in self.names), np.bool_, len(self.names))
        columns["kind"][annotations[columns["name"]]] = SliceKind.ANNOTATION
        order = np.lexsort((-columns["end"], columns["start"], columns["thread"]))
        return CpuSlices(**{name: column[order] for name, column in columns.items()})

    def device_work(self) -> DeviceWork:
        columns = self._once(_joined(self.device))
        external = columns.pop("external")
        if not self.correlated:
            columns["correlation"] = external
        order = np.lexsort((columns["end"], columns["start"]))
        return DeviceWork(**{name: column[order] for name, column in columns.items()})

    def _once(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Drops rows equal to an earlier one."""
        new = ~_repeated(columns)
        self.repeated += int((~new).sum())
        return {name: column[new] for name, column in columns.items()} if not new.all() else columns

    def _cpu_columns(self, events: list[TraceEvent]) -> dict[str, Any]:
        args = [event.args or _NO_ARGS for event in events]
        start, end = _times(events)
        columns = {
            "kind": [SLICE_KINDS[event.cat.lower()] for event in events],
            "name": [_number(self.names, event.name) for event in events],
            "thread": [_number(self.threads, (event.pid, event.tid)) for event in events],
            "start": start,
            "end": end,
            "correlation": [_or_missing(one.correlation) for one in args],
            "sequence": [_or_missing(one.sequence) for one in args],
            "forward_thread": [_or_missing(one.forward_thread) for one in args],
            "signature": [MISSING if one.dims is UNSET else self._signature(one) for one in args],
            "stack": [_number(self.names, one.stack) if one.stack else MISSING for one in args],
            "message": self._messages(args),
            "identity": [_or_missing(one.external if one.python is None else one.python) for one in args],
        }
        return _arrays(columns)

    def _device_columns(self, events: list[TraceEvent]) -> dict[str, Any]:
        args = [event.args or _NO_ARGS for event in events]
        start, end = _times(events)
        columns = {
            "kind": [WORK_KINDS[event.cat.lower()] for event in events],
            "name": [_number(self.names, event.name) for event in events],
            "device": [_short(one.device) for one in args],
            "stream": [_short(one.stream) for one in args],
            "start": start,
            "end": end,
            "correlation": [_or_missing(one.correlation) for one in args],
            "external": [_or_missing(one.external) for one in args],
            "bytes": [_or_missing(one.bytes if one.dtype is None else _message_bytes(one)) for one in args],
            "blocks": [_product(one.grid) for one in args],
            "threads": [_product(one.block) for one in args],
            "message": self._messages(args),
        }
        return _arrays(columns)

    def _messages(self, args: list[Args]) -> list[int]:
        return [_number(self.messages, _message(one)) if isinstance(one.collective, str) else MISSING for one in args]

    def _signature(self, args: Args) -> int:
        parts = (args.dims, args.types, args.strides, args.concrete)
        return _number(self.signatures, tuple(bytes(part) if part is not UNSET else b"" for part in parts))


def _paired(identity: Ns, calls: Mask) -> Ns:
    """The numbers of the calls that no other call has; -1 elsewhere. A number that several calls have is an
    operator's."""
    numbers, count = np.unique(identity[calls], return_counts=True)
    found: Ns = np.where(calls & np.isin(identity, numbers[count == 1]), identity, MISSING)
    return found


def _has_time(event: TraceEvent) -> bool:
    return event.ts >= 0 and event.dur >= 0 and event.ts + event.dur < LONGEST


def _times(events: list[TraceEvent]) -> tuple[Ns, Ns]:
    """Start and end in nanoseconds; below `file.EXACT_BELOW` a float has the exact nanosecond."""
    if events and not isinstance(events[0].ts, float):  # ExactEvent
        start = np.array([round(event.ts * 1000) for event in events], np.int64)
        return start, start + np.array([round(event.dur * 1000) for event in events], np.int64)
    starts = np.array([event.ts for event in events], np.float64)
    durations = np.array([event.dur for event in events], np.float64)
    start = nanoseconds(starts)
    return start, start + nanoseconds(durations)


def nanoseconds(microseconds: np.ndarray[Any, np.dtype[np.float64]]) -> Ns:
    """Converts whole microseconds and the rest separately, since a product would round."""
    whole = np.floor(microseconds)
    found: Ns = whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
    return found


def _number(numbers: dict[Any, int], key: Any) -> int:
    return numbers.setdefault(key, len(numbers))


def _or_missing(value: int | None) -> int:
    return value if value is not None and 0 <= value < 2**63 else MISSING


def _short(number: int | None) -> int:
    """Some runtimes use addresses as numbers of streams, which are shortened to fit into a column."""
    return MISSING if number is None or number < 0 else number % (2**31 - 1)


def _product(sizes: Any) -> int:
    if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
        return MISSING
    return _or_missing(math.prod(sizes))


def _message(args: Args) -> CollectiveMessage:
    return CollectiveMessage(
        name=str(args.collective),
        group="" if args.group is None else str(args.group),
        ranks="" if args.group_ranks is None else str(args.group_ranks),
        group_size=_whole(args.group_size),
        elements_in=args.elements_in,
        elements_out=args.elements_out,
        dtype=str(args.dtype),
        number=_whole(args.collective_number),
    )


def _message_bytes(args: Args) -> int | None:
    """The bytes of a collective's larger side: a rank's input of a reduction, or its output of a gathering."""
    size = ELEMENT_BYTES.get(args.dtype) if isinstance(args.dtype, str) else None
    if size is None or args.elements_in is None:
        return None
    return max(args.elements_in, args.elements_out or 0) * size


def _arrays(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(column, _NARROW.get(name, np.int64)) for name, column in columns.items()}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _repeated(columns: dict[str, Any]) -> Mask:
    found = np.zeros(len(columns["start"]), np.bool_)
    key = np.zeros(len(found), np.uint64)
    for column in columns.values():
        key = (key ^ column.astype(np.uint64)) * _SPREAD
        key ^= key >> np.uint64(29)
    order = np.argsort(key, kind="stable")
    before, after = order[:-1], order[1:]
    equal = key[before] == key[after]
    before, after = before[equal], after[equal]
    alike = np.ones(len(after), np.bool_)
    for column in columns.values():
        alike &= column[before] == column[after]
    found[after[alike]] = True
    return found


def _signature(dims: bytes, types: bytes, strides: bytes, concrete: bytes) -> Signature:
    return Signature(_list(dims), [str(one) for one in _list(types)], _list(strides), _list(concrete))


def _list(text: bytes) -> list[Any]:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(text)
        return found if isinstance(found, list) else []
    return []


def _devices(found: Any) -> list[DeviceProperties]:
    return [_properties(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _properties(found: dict[str, Any]) -> DeviceProperties:
    major, minor = _whole(found.get("computeMajor")), _whole(found.get("computeMinor"))
    return DeviceProperties(
        id=_whole(found.get("id")),
        name=str(found.get("name", "")),
        multiprocessors=_whole(found.get("numSms")),
        memory=_whole(found.get("totalGlobalMem")),
        compute_capability=None if major is None or minor is None else (major, minor),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
