"""The run directory: the names in it, the one writer, and a reader that survives whatever it finds.

Whole documents are written aside, synced and renamed; line files only ever grow. Whatever instant the machine stops,
the directory reads, short of the last line at most.
"""

import errno
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import msgspec
import psutil

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.run_names import RUN as RUN

SCHEMA_VERSION = 4
# 1: first.
# 2: run.json gained `workload`, `interleaved_with` and `resumed_from`, summary.json `pipeline`; noise.json,
#    report.html, profile.json, findings.json, profiler_traces/ and the files of a pipeline came.
# 3: memory.json, batch_sizes.json, trades.json and snapshots of the CUDA allocator came.
# 4: summary.json gained `others` and `environment`, the CPU of telemetry.jsonl `processes`.

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
TELEMETRY = "telemetry.jsonl"
SUMMARY = "summary.json"
SUMMARY_TABLE = "summary.csv"
NOISE = "noise.json"
REPORT = "report.html"
LOG = "run.log"
TENSORBOARD = "tensorboard"
SAMPLES = "samples.jsonl"
HANDOFFS = "handoffs.jsonl"
TIMELINE = "timeline.jsonl"
TRACE = "timeline.trace.json"
PROFILE = "profile.json"
FINDINGS = "findings.json"
MEMORY = "memory.json"
BATCH_SIZES = "batch_sizes.json"
TRADES = "trades.json"

TRACES = "profiler_traces"
TRACE_FILES = "*.pt.trace.json*"
"""In there, compressed or not."""
SAMPLE_FOLDER = "samples"
LATENT, IMAGE = "safetensors", "png"  # suffixes in there

RUNNING: Final = "running"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"

ROOM = ".room"
ROOM_BYTES = 2**17
"""Kept free in a run that goes on, so that on a full disk it can still say what happened and what it measured."""
ENDING = frozenset({RUN, SUMMARY, SUMMARY_TABLE})
"""The files that this room is for."""

EXPECTED = "give results/<experiment>/<run_id>"

T = TypeVar("T")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    schema_version: int
    experiment: str
    run_id: str
    command: str
    argv: list[str]
    status: Literal["running", "completed", "failed", "interrupted"]
    started: str
    """UTC, ISO 8601; so is `ended`."""
    ended: str | None = None
    host: str
    pid: int
    """Of the host process; with `pid_created`, seconds since the epoch, it tells whether a running run still runs."""
    pid_created: float
    git: dict[str, Any] | None
    """Commit, branch and whether tracked files differ, of the working directory."""
    world_size: int
    repeats: int = 0
    """Repeats that were completed."""
    repeat_kind: Literal["process", "in-process"] = "process"
    """Fresh processes, or one after the other in those of torchrun."""
    workload: dict[str, Any] | None = None
    """What the model turned out to be: parameters, sample shape, tokens per sample; None before it was built."""
    interleaved_with: list[str] = []
    """Run ids whose repeats were measured in turn with this one's: the other side of a `--vs`."""
    resumed_from: str | None = None
    """The run directory whose finished samples this run took over."""
    error: dict[str, str | None] | None = None
    """`kind`, `message` and `hint` of what ended the run."""


class RunWriter:
    """Creates a run directory and is the only thing that writes to it. Whatever cannot be written raises RunFailed."""

    def __init__(
        self,
        results: Path,
        experiment: str,
        config: str,
        *,
        command: str,
        argv: Sequence[str],
        world_size: int,
        git: dict[str, Any] | None,
    ) -> None:
        """Raises RunDirectoryError if the directory cannot be made."""
        self.path = create_directory(results / experiment)
        self._lines: dict[str, IO[bytes]] = {}
        self._record = RunRecord(
            schema_version=SCHEMA_VERSION,
            experiment=experiment,
            run_id=self.path.name,
            command=command,
            argv=list(argv),
            status=RUNNING,
            started=timestamp(),
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_created=psutil.Process().create_time(),
            git=git,
            world_size=world_size,
        )
        self._reserve_room()
        try:
            self.replace(CONFIG, config)
            self.update()
        except RunFailed:
            shutil.rmtree(self.path, ignore_errors=True)  # there is nothing in it, and it would call itself no run
            raise

    def update(self, **changes: Any) -> None:
        """Changes fields of run.json."""
        self._record = msgspec.structs.replace(self._record, **changes)
        self.replace(RUN, self._record)

    def replace(self, name: str, document: Any) -> None:
        """Writes a whole file atomically; text and bytes as they are, anything else as JSON."""
        path = self.path / name
        with self._writing(name):
            path.parent.mkdir(exist_ok=True)
            try:
                write_document(path, document)
            except OSError:
                if name not in ENDING:
                    raise
                (self.path / ROOM).unlink(missing_ok=True)
                self._write_ending(path, document)

    def append(self, name: str, record: msgspec.Struct | Mapping[str, Any]) -> None:
        """Adds one JSON line; it reaches the disk with the next `flush`."""
        self._append(name, msgspec.json.encode(record))

    def append_text(self, name: str, line: str) -> None:
        self._append(name, line.encode(errors="backslashreplace"))

    def append_piece(self, name: str, piece: bytes, last: bool) -> None:
        """Adds bytes to a file, which gets its name when the last of them are there."""
        path = self.path / name
        part = path.with_name(f".{path.name}.part")
        with self._writing(name):
            path.parent.mkdir(exist_ok=True)
            try:
                with part.open("ab") as file:
                    file.write(piece)
            except OSError:
                with suppress(OSError):
                    part.unlink(missing_ok=True)  # on a full disk others need the room
                raise
            if last:
                part.replace(path)

    def flush(self) -> None:
        for name, file in self._lines.items():
            with self._writing(name):
                file.flush()

    def finish(self, status: str, error: Mapping[str, Any] | None = None) -> None:
        """Closes everything and says how the run ended.

        Where lines could not be written it raises before it says so: called again, it says what it is told then.
        """
        lost: RunFailed | None = None
        while self._lines:
            name, file = self._lines.popitem()
            try:
                with self._writing(name):
                    file.close()
            except RunFailed as failed:
                lost = failed
        if lost:
            raise lost
        self.update(status=status, ended=timestamp(), error=error)
        (self.path / ROOM).unlink(missing_ok=True)

    def _reserve_room(self) -> None:
        """Raises RunDirectoryError on a disk that has not even room for how a run ends."""
        try:
            write_document(self.path / ROOM, secrets.token_bytes(ROOM_BYTES))  # zeros take no room if compressed
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                return  # a limit on the size of files, say: such a run may still go well
            self.path.rmdir()
            raise RunDirectoryError(
                f"no room for a run under {self.path.parent}: {error.strerror}",
                "make room, or choose another --results",
            ) from None

    def _write_ending(self, path: Path, document: Any) -> None:
        """Writes one of `ENDING`; the status also over the one before, where others have taken the room."""
        try:
            write_document(path, document)
        except OSError:
            if path.name != RUN:
                raise
            overwrite(path, to_json(document).encode(errors="backslashreplace"))

    def _append(self, name: str, line: bytes) -> None:
        with self._writing(name):
            if name not in self._lines:
                self._lines[name] = (self.path / name).open("ab")
            self._lines[name].write(line + b"\n")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Turns a disk that is full or gone into an error that says so."""
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"cannot write {self.path / name}: {error.strerror}", "make room there, or choose another --results"
            ) from None


def create_directory(parent: Path) -> Path:
    """A new folder under `parent` whose name sorts by time. Raises RunDirectoryError naming what is in the way."""
    while True:
        now = datetime.now(UTC)
        path = parent / f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise RunDirectoryError(f"{parent} is in the way: not a folder", "choose another --results") from None
        except (OSError, ValueError) as error:  # ValueError: a name that no path can have
            reason = getattr(error, "strerror", None) or error
            raise RunDirectoryError(
                f"cannot create a run directory under {parent}: {reason}", "choose another --results"
            ) from None
        return path


def write_document(path: Path, document: Any) -> None:
    """Writes a whole file aside and renames it; text and bytes as they are, anything else as JSON.

    Raises OSError, and leaves nothing behind then.
    """
    text = document if isinstance(document, str | bytes) else to_json(document)
    content = text.encode(errors="backslashreplace") if isinstance(text, str) else text
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)  # in a folder of others it may be a link to a file of the user's
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def overwrite(path: Path, content: bytes) -> None:
    """Writes into the blocks that a file has, for want of others. Raises OSError where it has too few."""
    with path.open("r+b") as file:
        if len(content) > os.fstat(file.fileno()).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def sample_file(sample: int, suffix: str) -> str:
    """The name, within a run directory, of what is kept of a sample."""
    return f"{SAMPLE_FOLDER}/{sample:05d}.{suffix}"


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_json(document: Any) -> str:
    """As every document of ours is written, to a file or to stdout. Raises ValueError for NaN, which JSON lacks."""
    builtins = msgspec.to_builtins(document, str_keys=True)
    return json.dumps(builtins, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


class _Versioned(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True)
class Run:
    """A run directory as found. `problems` names what in it could not be read, by file and line."""

    path: Path
    record: RunRecord
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Raises RunDirectoryError if `path` is no run directory, or one from a newer gpubench."""
        if not path.is_dir():
            raise RunDirectoryError(f"{path} is not a run directory", EXPECTED)
        try:
            content = foreign_files.content(path / RUN)
            version = msgspec.json.decode(content, type=_Versioned).schema_version
            if version > SCHEMA_VERSION:
                raise RunDirectoryError(
                    f"{path / RUN} has schema version {version}, newer than {SCHEMA_VERSION}", "upgrade gpubench"
                )
            return cls(path, msgspec.json.decode(content, type=RunRecord))
        except FileNotFoundError:
            raise RunDirectoryError(f"{path} is not a run directory: it has no {RUN}", EXPECTED) from None
        except OSError as error:
            raise RunDirectoryError(f"{path / RUN} cannot be read: {error.strerror}", EXPECTED) from None
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path / RUN} does not describe a run: {error}", EXPECTED) from None

    @property
    def status(self) -> str:
        """As recorded, but a run whose host process is gone was interrupted, whatever it had time to write."""
        record = self.record
        if record.status == RUNNING and record.host == socket.gethostname() and not self._host_lives():
            return INTERRUPTED
        return record.status

    def _host_lives(self) -> bool:
        try:
            return abs(psutil.Process(self.record.pid).create_time() - self.record.pid_created) < 1
        except (psutil.Error, ValueError):
            return False

    def lines(self, name: str, type_: type[T]) -> Iterator[T]:
        """The records of a line file. A line that does not read goes to `problems` and is passed over."""
        file = self.path / name
        if not file.exists():
            return
        decoder = msgspec.json.Decoder(type_)
        bad = BadLines(file, self.problems)
        try:
            for number, line in enumerate(foreign_files.lines(file), 1):
                try:
                    yield decoder.decode(line)
                except (ValueError, RecursionError) as error:
                    bad.add(number, error)
        except OSError as error:
            self.problems.append(f"{file} cannot be read: {error.strerror}")
        bad.close()


class BadLines:
    """Names the lines of a file that do not read: the first few one by one, the others by their number."""

    LIMIT = 20

    def __init__(self, file: Path, problems: list[str]) -> None:
        self._file = file
        self._problems = problems
        self._count = 0

    def add(self, number: int, error: Exception) -> None:
        self._count += 1
        if self._count <= self.LIMIT:
            self._problems.append(f"{self._file}:{number}: {error}")

    def close(self) -> None:
        """To be called at the end of the file."""
        if self._count > self.LIMIT:
            self._problems.append(f"{self._file}: {self._count - self.LIMIT} more lines do not read")
