"""Small traces with known answers. Times are microseconds, as in the files."""

import gzip
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from places import ROOT

from gpubench.trace.columns import Trace
from gpubench.trace.load import read

Record = dict[str, Any]
PUBLIC = ROOT.parent / "shared" / "traces"
"""Real traces, where they are at hand."""


def slice_(name: str, start: float, end: float, cat: str = "cpu_op", thread: int = 1, **args: Any) -> Record:
    """Something on the CPU."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": round(end - start, 3),
        "args": args,
    }  # fmt: skip


def frame(name: str, start: float, end: float, thread: int = 1) -> Record:
    """A call of a Python function."""
    return slice_(name, start, end, "python_function", thread)


def step(number: int, start: float, end: float) -> Record:
    return slice_(f"ProfilerStep#{number}", start, end, cat="user_annotation")


def call(name: str, start: float, end: float, correlation: int = 0, thread: int = 1) -> Record:
    """A call into the CUDA runtime."""
    return slice_(name, start, end, cat="cuda_runtime", thread=thread, correlation=correlation)


def work(
    name: str, start: float, end: float, correlation: int = 0, stream: int = 7, cat: str = "kernel", **args: Any
) -> Record:
    """Something on the device; cat is kernel, gpu_memcpy or gpu_memset."""
    about = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": round(end - start, 3),
        "args": about,
    }  # fmt: skip


def launched(
    name: str, at: float, start: float, end: float, correlation: int, stream: int = 7, thread: int = 1
) -> list[Record]:
    """A kernel, and the launch call of one microsecond that brought it."""
    return [
        call("cudaLaunchKernel", at, at + 1, correlation, thread),
        work(name, start, end, correlation, stream),
    ]


def document(events: Iterable[Record], **metadata: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, **metadata, "traceEvents": list(events)}).encode()


def write(path: Path, events: Iterable[Record], **metadata: Any) -> Path:
    """Compressed where the name ends in .gz."""
    content = document(events, **metadata)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def made(*parts: Record | Sequence[Record], **metadata: Any) -> Trace:
    """The trace of these events, read from a file as any other."""
    events: list[Record] = []
    for part in parts:
        events += [part] if isinstance(part, dict) else part
    with tempfile.TemporaryDirectory() as folder:
        return read(write(Path(folder) / "made.json", events, **metadata))


def numbered(name: str, start: float, end: float, sequence: int, forward_thread: int = 0, thread: int = 1) -> Record:
    """An operator with the number of an autograd node; one of the backward pass names the thread of its forward."""
    about: Record = {"Sequence number": sequence, "Fwd thread id": forward_thread}
    return slice_(name, start, end, thread=thread, **about)


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def anything() -> SearchStrategy[list[Record]]:
    """Events of all kinds that know nothing of each other: they overlap, last for no time, and link what never met."""
    host = ("cpu_op", "cuda_runtime", "user_annotation")
    name = st.sampled_from(
        [
            *(
                LOADER,
                "ProfilerStep#1",
                "aten::mm",
                "aten::copy_",
                "gloo:barrier",
                "cudaLaunchKernel",
                "cudaMemcpyAsync",
                "cudaMalloc",
            ),
            *("cudaStreamSynchronize", "k", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)"),
            "Memcpy DtoH (Device -> Pageable)",
        ]
    )
    start, length, number, thread = st.integers(0, 50), st.integers(0, 30), st.integers(-1, 6), st.integers(1, 3)
    on_host = st.builds(
        lambda cat, name, start, length, thread, number: slice_(
            name, start, start + length, cat, thread, correlation=number
        ),
        *(st.sampled_from(host), name, start, length, thread, number),
    )
    on_device = st.builds(
        lambda cat, name, start, length, thread, number: work(name, start, start + length, number, thread, cat),
        *(st.sampled_from(("kernel", "gpu_memcpy", "gpu_memset")), name, start, length, thread, number),
    )
    return st.lists(on_host | on_device, min_size=1, max_size=25)
