"""Check that all files of a run directory are readable, also after its run was killed."""

import csv
import gzip
import io
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from safetensors.numpy import load as load_tensors

from gpubench.errors import RunDirectoryError
from gpubench.runs.directory import COMPLETED, INTERRUPTED, RESERVED, RUN, RUNNING, SUMMARY
from gpubench.runs.reader import Run

HEAD, CHECKSUM = 12, 4  # bytes before and after a TensorBoard record


def asides(folder: Path) -> list[Path]:
    """Return hidden files left by an interrupted write, which no reader uses."""
    return [path for path in folder.rglob(".*") if path.is_file() and path.name != RESERVED]


def complaints(folder: Path) -> Iterator[str]:
    """Yield the problems in the directory of a run whose host was killed.

    A directory without run.json is not a run yet: nothing in it may claim to be more than its configuration.
    """
    yield from (f"{path}: {problem}" for path in _visible(folder) if (problem := _problem(path)))
    if not (folder / RUN).exists():
        yield from (f"{path}: exists without {RUN}" for path in _visible(folder) if path.name != "config.yaml")
        return
    try:
        run = Run.open(folder)
    except RunDirectoryError as error:
        yield error.message
        return
    told, shown = run.record.status, run.status
    if told == RUNNING and shown != INTERRUPTED:
        yield f"{folder}: its host was killed, but it is shown as {shown}"
    if told not in (RUNNING, COMPLETED):
        yield f"{folder}: its host was killed, but run.json has the status {told}"
    if told == COMPLETED and not (run.record.ended and run.record.repeats and (folder / SUMMARY).exists()):
        yield f"{folder}: run.json has the status completed, but the run is incomplete"


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _problem(path: Path) -> str | None:
    read = _tensorboard if path.name.startswith("events.out.tfevents.") else READERS.get(path.suffix)
    if read is None:
        return "nothing here can read it"
    try:
        read(path.read_bytes())
    except Exception as error:  # any error of a reader
        return f"{type(error).__name__}: {error}"
    return None


def _lines(content: bytes) -> None:
    """Raise ValueError if a line is not JSON; an incomplete last line is allowed."""
    for line in content.splitlines(keepends=True):
        if line.endswith(b"\n"):
            json.loads(line)


def _page(content: bytes) -> None:
    if not content.decode().rstrip().endswith("</html>"):
        raise ValueError("it is incomplete")


def _table(content: bytes) -> None:
    if len({len(row) for row in csv.reader(io.StringIO(content.decode()))}) != 1:
        raise ValueError("its rows are not of one length")


def _tensorboard(content: bytes) -> None:
    """Check a TensorBoard file: each record has length, contents and checksums; the last one may be incomplete."""
    place = 0
    while place + HEAD <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        if length > 1 << 24:
            raise ValueError(f"a record of {length} bytes at {place}")
        place += HEAD + length + CHECKSUM


READERS: dict[str, Callable[[bytes], object]] = {
    ".json": json.loads,
    ".jsonl": _lines,
    ".yaml": yaml.safe_load,
    ".csv": _table,
    ".html": _page,
    ".log": bytes.decode,
    ".gz": lambda content: json.loads(gzip.decompress(content)),
    ".safetensors": load_tensors,
}
