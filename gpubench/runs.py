"""The run directory: the names in it, the one writer, and a reader that survives whatever it finds.

Whole documents are written aside, synced and renamed; line files only ever grow. Whatever instant the machine stops,
the directory reads, short of the last line at most.
"""

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import psutil

from gpubench.errors import RunDirectoryError

SCHEMA_VERSION = 1
# 1: first.

RUN = "run.json"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
TELEMETRY = "telemetry.jsonl"
SUMMARY = "summary.json"
SUMMARY_TABLE = "summary.csv"
LOG = "run.log"
TENSORBOARD = "tensorboard"

RUNNING, COMPLETED, FAILED, INTERRUPTED = "running", "completed", "failed", "interrupted"

T = TypeVar("T")


class RunWriter:
    """Creates a run directory and is the only thing that writes to it.

    `record` is the content of run.json and is rewritten whenever `update` changes it.
    """

    def __init__(self, results: Path, experiment: str, record: Mapping[str, Any], config: str) -> None:
        """Raises RunDirectoryError if the directory cannot be made."""
        self.path = create_directory(results / experiment)
        self._lines: dict[str, IO[bytes]] = {}
        self._record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "experiment": experiment,
            "run_id": self.path.name,
            "status": RUNNING,
            "started": timestamp(),
            "ended": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_created": psutil.Process().create_time(),
            "error": None,
            **record,
        }
        self.replace(CONFIG, config)
        self.update()

    def update(self, **changes: Any) -> None:
        self._record |= changes
        self.replace(RUN, self._record)

    def replace(self, name: str, document: Any) -> None:
        """Writes a whole file atomically; text as it is, anything else as JSON."""
        text = document if isinstance(document, str) else to_json(document)
        target = self.path / name
        aside = target.with_name(f".{name}.tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)

    def append(self, name: str, record: msgspec.Struct | Mapping[str, Any]) -> None:
        """Adds one JSON line; it reaches the disk with the next `flush`."""
        self._file(name).write(msgspec.json.encode(record) + b"\n")

    def append_text(self, name: str, line: str) -> None:
        self._file(name).write(line.encode() + b"\n")

    def flush(self) -> None:
        for file in self._lines.values():
            file.flush()

    def finish(self, status: str, error: Mapping[str, Any] | None = None) -> None:
        for file in self._lines.values():
            file.close()
        self._lines.clear()
        self.update(status=status, ended=timestamp(), error=error)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._lines:
            self._lines[name] = (self.path / name).open("ab")
        return self._lines[name]


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
        except OSError as error:
            raise RunDirectoryError(
                f"cannot create a run directory under {parent}: {error.strerror}", "choose another --results"
            ) from None
        return path


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_json(document: Any) -> str:
    return json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Run:
    """A run directory as found. `problems` names what in it could not be read, by file and line."""

    path: Path
    record: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Raises RunDirectoryError if `path` is no run directory, or one from a newer gpubench."""
        if not path.is_dir():
            raise RunDirectoryError(f"{path} is not a run directory", "give results/<experiment>/<run_id>")
        try:
            record = json.loads((path / RUN).read_text(encoding="utf-8"))
            version = record["schema_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{path / RUN} does not describe a run: {error!r}") from None
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise RunDirectoryError(
                f"{path / RUN} has schema version {version}, newer than {SCHEMA_VERSION}", "upgrade gpubench"
            )
        return cls(path, record)

    @property
    def status(self) -> str:
        """As recorded, but a run whose host process is gone was interrupted, whatever it had time to write."""
        status = str(self.record.get("status"))
        if status == RUNNING and self.record.get("host") == socket.gethostname() and not self._host_lives():
            return INTERRUPTED
        return status

    def _host_lives(self) -> bool:
        try:
            created = psutil.Process(self.record["pid"]).create_time()
        except (psutil.Error, KeyError, TypeError, ValueError):
            return False
        return abs(created - float(self.record.get("pid_created", created))) < 1

    def lines(self, name: str, type_: type[T]) -> Iterator[T]:
        """The records of a line file. A line that does not read goes to `problems` and is passed over."""
        file = self.path / name
        if not file.exists():
            return
        decoder = msgspec.json.Decoder(type_)
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self.problems.append(f"{file}:{number}: {error}")
