"""The run directory: the names of its files, and its only writer; `reader.Run` reads it.

Whole documents are written to a temporary file, synced and renamed; line files only grow. If the machine stops at any
moment, the directory stays readable, except perhaps for the last line of a line file.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

import msgspec
import psutil

from gpubench import events, foreign_files, units
from gpubench.errors import RunDirectoryError, RunDirectoryLost, RunFailed
from gpubench.foreign_files import HISTORY as HISTORY
from gpubench.foreign_files import RUN as RUN
from gpubench.probe.length import FEWEST, MOST

SCHEMA_VERSION = 4
# 1: the first version.
# 2: run.json gained `workload`, `interleaved_with` and `resumed_from`, summary.json `pipeline`; noise.json,
#    report.html, profile.json, findings.json, profiler_traces/ and the files of a pipeline came.
# 3: memory.json, batch_sizes.json, trades.json and snapshots of the CUDA allocator came.
# 4: summary.json gained `others`, `environment` and `work`, the CPU of telemetry.jsonl `processes`.

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
STEPS = "steps.jsonl"
EPOCHS = "epochs.jsonl"
TELEMETRY = "telemetry.jsonl"
SUMMARY = "summary.json"
SUMMARY_TABLE = "summary.csv"
NOISE = "noise.json"
REPORT = "report.html"
COMPARISON, COMPARISON_PAGE = "comparison.json", "comparison.html"
"""What the comparison with the run that this one was interleaved with says. The candidate has them."""
DECISION = "decision.json"
"""Whether the edit that this run was made with is kept, against the run that it was interleaved with."""
LOG = "run.log"
OUTPUT = "output.log"
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
LOADER = "loader.json"
"""What the data of a program costs."""

TRACES = "profiler_traces"
TRACE_FILES = "*.pt.trace.json*"
"""A glob pattern for the traces in TRACES, compressed or not."""
SNAPSHOT = ".snapshot.pickle"
"""The suffix of the snapshots of CUDA's caching allocator in TRACES."""
SAMPLE_FOLDER = "samples"
LATENT, IMAGE = "safetensors", "png"  # suffixes of the files in SAMPLE_FOLDER
MADE_OF = r"-prompt\d+-seed\d+"
"""The prompt and the seed in the name of such a file, in runs with a list of seeds."""

RUNNING: Final = "running"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"

RESERVED = ".room"  # the name of the file is part of the run directory's format
RESERVED_BYTES = 2**17
"""Size of the file that reserves disk space during a run, so that the results can be written even on a full disk."""
ENDING = frozenset({RUN, SUMMARY, SUMMARY_TABLE})
"""The files that may use the reserved space."""
WAIT_SECONDS = 5.0
"""How long to wait for another process that changes the labels of the same run."""
SURROGATE = re.compile("[\ud800-\udfff]")


class RepeatLength(msgspec.Struct, frozen=True):
    """How long each repeat of a run is."""

    warmup: int
    """The smallest number of steps that are excluded at the start."""
    steps: int
    """The number of all steps, with those of the warm-up."""
    seconds: float | None
    """The time that gpubench fitted the steps into; None if the user has set their number."""

    @property
    def reason(self) -> str:
        """Why it has so many steps; "" if the user has set their number."""
        if self.seconds is None:
            return ""
        measured = self.steps - self.warmup
        share = units.seconds(self.seconds)
        if measured <= FEWEST:
            return f"the fewest that have a mean and a spread, for {share}"
        return f"the most that help, within {share}" if measured >= MOST else f"what fits in {share}"


class Versioned(msgspec.Struct):
    """The version of a document of a run directory, which is read before the rest of it."""

    schema_version: int


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json."""

    schema_version: int
    experiment: str
    run_id: str
    command: str
    argv: list[str]
    status: Literal["running", "completed", "failed", "interrupted"]
    started: str
    """The start time in UTC, ISO 8601. `ended` has the same format."""
    ended: str | None = None
    host: str
    pid: int
    """The pid of the host process. With `pid_created`, in seconds since the epoch, it identifies the process."""
    pid_created: float
    git: dict[str, Any] | None
    """The `git.state` of the working directory."""
    world_size: int
    repeats: int = 0
    """The number of completed repeats."""
    repeat_kind: Literal["process", "in-process"] = "process"
    """Whether each repeat has new processes, or all repeats run in the processes of torchrun."""
    workload: dict[str, Any] | None = None
    """The facts of the built model: parameters, sample shape, tokens per sample; None until it is built."""
    observed: dict[str, Any] | None = None
    """How a program of the user ran, by the dot-keys of the settings that can change it, or which settings the ranks of
    gpubench's own loop decided; None if neither was observed. Settings that gpubench changed have the values that they
    had in the program."""
    gpus: list[int] | None = None
    """The numbers in telemetry.jsonl of the GPUs that the ranks used, as far as they are known; None in runs of
    gpubench 0.2.0 and older, whose samples are all of them. telemetry.jsonl may have other GPUs of the machine too."""
    length: RepeatLength | None = None
    """How long each repeat is; None until it is known, and for a command without a loop of steps."""
    interleaved_with: list[str] = []
    """The ids of the runs whose repeats were interleaved with this one's by `--vs`."""
    order_seed: int | None = None
    """The seed of the order in which they took turns, see `gpubench.host.order`; None for a run alone, or of one
    round."""
    resumed_from: str | None = None
    """The run directory whose finished samples this run took over."""
    config_sha256: str | None = None
    """The sha256 of config.yaml; None in runs of gpubench 0.2.0 and older."""
    settings: dict[str, Any] | None = None
    """Every setting by dot-key; None in runs of gpubench 0.2.0 and older, whose settings are in config.yaml alone."""
    chosen: list[str] = []
    """The dot-keys of the settings that gpubench chose."""
    variant: str | None = None
    """What tells the run from others of the same work, such as "workers=2"; None in runs of 0.2.0 and older."""
    asked: dict[str, Any] | None = None
    """What the user asked of the run beyond the defaults: settings by dot-key, and environment variables by name; None
    in runs of 0.2.0 and older."""
    name: str | None = None
    """The name that the user gave the run."""
    tags: list[str] = []
    """The labels that the user gave the run, in alphabetical order."""
    error: dict[str, str | None] | None = None
    """`kind`, `message` and `hint` of the error that ended the run."""

    def with_observed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of the run by dot-key, those that a program decided itself with its values."""
        known = self.observed or {}
        return {key: known.get(key) if value is None else value for key, value in settings.items()}


class _OfProcess(Protocol):
    @property
    def status(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def pid_created(self) -> float: ...


def status_of(record: _OfProcess) -> str:
    """Returns the recorded status, or "interrupted" for a running run whose host process no longer exists."""
    if record.status == RUNNING and record.host == socket.gethostname() and not _host_lives(record):
        return INTERRUPTED
    return record.status


def _host_lives(record: _OfProcess) -> bool:
    try:
        return abs(psutil.Process(record.pid).create_time() - record.pid_created) < 1
    except (psutil.Error, ValueError):
        return False


FULL = "free some disk space, or choose another --results"
PROTECTED = "check who owns the folder and whether it is read-only, or choose another --results"
HINTS: Final = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another --results",
    errno.EACCES: PROTECTED,
    errno.EPERM: PROTECTED,
    errno.EROFS: PROTECTED,
}
"""What to do about a file that cannot be written, by the number of the error."""


class RunWriter:
    """Creates a run directory and is its only writer. Every method raises RunFailed if it cannot write."""

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
        settings: Mapping[str, Any] | None = None,
        chosen: Sequence[str] = (),
        variant: str | None = None,
        asked: Mapping[str, Any] | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Creates the directory. Raises RunDirectoryError if that fails."""
        self.path = create_directory(results / experiment)
        self._made = self.path.stat()
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
            config_sha256=hashlib.sha256(config.encode(errors="backslashreplace")).hexdigest(),
            settings=None if settings is None else dict(settings),
            chosen=list(chosen),
            variant=variant,
            asked=None if asked is None else dict(asked),
            name=name,
            tags=sorted(tags),
        )
        self._reserve_space()
        try:
            self.replace(CONFIG, config)
            self.update()
        except RunFailed:
            shutil.rmtree(self.path, ignore_errors=True)  # the directory is empty and would not be a valid run
            raise

    def update(self, **changes: Any) -> None:
        """Changes fields of run.json. Name and tags are kept as in the file, where the user may have changed them."""
        with suppress(OSError, ValueError):
            labels = msgspec.json.decode(foreign_files.content(self.path / RUN), type=_Labels)
            changes = {"name": labels.name, "tags": labels.tags} | changes
        self._record = msgspec.structs.replace(self._record, **changes)
        self.replace(RUN, self._record)

    def replace(self, name: str, document: Any) -> None:
        """Writes a whole file atomically: text and bytes as they are, any other document as JSON."""
        path = self.path / name
        self._check(self.path, self._made)
        with self._writing(name):
            path.parent.mkdir(exist_ok=True)
            try:
                write_document(path, document)
            except OSError:
                if name not in ENDING:
                    raise
                (self.path / RESERVED).unlink(missing_ok=True)
                self._write_ending(path, document)

    def append(self, name: str, record: msgspec.Struct | Mapping[str, Any]) -> None:
        """Adds a line of JSON to a file. The next `flush` writes it to the disk."""
        self._append(name, events.encode(record), end=b"")

    def append_text(self, name: str, line: str) -> None:
        self._append(name, line.encode(errors="backslashreplace"))

    def append_bytes(self, name: str, data: bytes) -> None:
        """Adds bytes to a file as they are."""
        self._append(name, data, end=b"")

    def append_piece(self, name: str, piece: bytes, last: bool) -> None:
        """Adds bytes to a temporary file, which is renamed to `name` after the last piece."""
        path = self.path / name
        part = path.with_name(f".{path.name}.part")
        with self._writing(name):
            path.parent.mkdir(exist_ok=True)
            try:
                with foreign_files.appended(part) as file:
                    file.write(piece)
            except OSError:
                with suppress(OSError):
                    part.unlink(missing_ok=True)  # on a full disk the other files need the space
                raise
            if last:
                part.replace(path)

    def check(self) -> None:
        """Raises RunDirectoryLost unless the directory and its open files are still the ones that the writer made."""
        self._check(self.path, self._made)
        for name, file in self._lines.items():
            try:
                self._check(self.path / name, os.fstat(file.fileno()))
            except RunDirectoryLost:
                self._check(self.path, self._made)  # the whole directory may have gone since the first look
                raise

    def _check(self, path: Path, made: os.stat_result) -> None:
        try:
            now = path.stat()
        except OSError:
            now = None
        if now is None or not os.path.samestat(now, made):
            what = "the run directory " if path == self.path else ""
            raise RunDirectoryLost(
                f"{what}{path} was {'replaced' if now else 'removed'} while the program ran",
                "keep the program from changing the results folder, or choose another --results",
            )

    def flush(self) -> None:
        self.check()
        for name, file in self._lines.items():
            with self._writing(name):
                file.flush()

    def finish(self, status: str, error: Mapping[str, Any] | None = None) -> None:
        """Closes all files and writes the final status to run.json.

        If a line file cannot be written, it raises before it writes the status. The caller then calls it again with
        that error.
        """
        lost: RunFailed | None = None
        try:
            self.check()
        except RunDirectoryLost as failed:
            lost = failed
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
        (self.path / RESERVED).unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the run directory, and the directories above it that hold nothing else, as far as possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()

    def _reserve_space(self) -> None:
        """Reserves disk space for the end of the run. Raises RunDirectoryError if the disk is too full."""
        try:
            # a compressing file system would store zeros without space
            write_document(self.path / RESERVED, secrets.token_bytes(RESERVED_BYTES))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                return  # for example a limit on file sizes, with which the run may succeed
            self.path.rmdir()
            raise RunDirectoryError(
                f"no space for a run under {self.path.parent}: {error.strerror}",
                "free some disk space, or choose another --results",
            ) from None

    def _write_ending(self, path: Path, document: Any) -> None:
        """Writes one of `ENDING` with the reserved space.

        If other programs have used that space, run.json is overwritten in place.
        """
        try:
            write_document(path, document)
        except OSError:
            if path.name != RUN:
                raise
            overwrite(path, to_json(document).encode(errors="backslashreplace"))

    def _append(self, name: str, line: bytes, end: bytes = b"\n") -> None:
        with self._writing(name):
            if name not in self._lines:
                self._lines[name] = foreign_files.appended(self.path / name)
            self._lines[name].write(line + end)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Turns an OSError, as from a full disk, into RunFailed."""
        try:
            yield
        except OSError as error:
            self.check()
            raise RunFailed(
                f"cannot write {self.path / name}: {error.strerror}",
                HINTS.get(error.errno or 0, "choose another --results"),
            ) from None


class _Labels(msgspec.Struct):
    name: str | None = None
    tags: list[str] = []


def relabel(path: Path, *, name: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()) -> RunRecord:
    """Changes the name and the tags of a run, and nothing else in its run.json, which it returns. Raises RunFailed.

    A `name` of None leaves the name as it is, and "" removes it. If the host of a run in progress replaces run.json
    meanwhile, the change is applied to the new content, so that no change is lost.
    """
    file, aside = path / RUN, path / f".{RUN}.labels"
    try:
        with foreign_files.locked(path, WAIT_SECONDS):
            while True:
                before = file.stat()
                document = msgspec.json.decode(foreign_files.content(file), type=dict[str, Any])
                document["tags"] = sorted({*document.get("tags", ()), *add} - {*remove})
                document["name"] = document.get("name") if name is None else name or None
                write_document(aside, document)
                if (now := file.stat()).st_ino == before.st_ino and now.st_mtime_ns == before.st_mtime_ns:
                    aside.replace(file)
                    return msgspec.convert(document, RunRecord)
    except OSError as error:
        raise RunFailed(f"cannot write {file}: {error.strerror}", "check who owns the folder") from None
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def create_directory(parent: Path, prefix: str = "") -> Path:
    """Creates a folder under `parent` whose name sorts by time, after `prefix`. Raises RunDirectoryError."""
    while True:
        now = datetime.now(UTC)
        path = parent / f"{prefix}{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir():
                continue
            raise RunDirectoryError(f"{parent} is not a folder", "choose another --results") from None
        except (OSError, ValueError) as error:  # ValueError: not a valid path
            reason = getattr(error, "strerror", None) or error
            raise RunDirectoryError(
                f"cannot create a run directory under {parent}: {reason}", "choose another --results"
            ) from None
        return path


def write_document(path: Path, document: Any) -> None:
    """Writes a file as a whole: text and bytes as they are, any other document as JSON. Raises OSError."""
    text = document if isinstance(document, str | bytes) else to_json(document)
    foreign_files.replace(path, text.encode(errors="backslashreplace") if isinstance(text, str) else text)


def overwrite(path: Path, content: bytes) -> None:
    """Overwrites a file in place, for a full disk. Raises OSError if the content does not fit into its blocks."""
    with foreign_files.overwritten(path) as file:
        if len(content) > os.fstat(file.fileno()).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def sample_file(sample: int, suffix: str, made_of: str = "") -> str:
    """Returns the path of a sample's file, relative to the run directory.

    `made_of` names its prompt and seed as `MADE_OF` does.
    """
    return f"{SAMPLE_FOLDER}/{sample:05d}{made_of}.{suffix}"


def is_sample_file(name: str | None, sample: int, suffix: str) -> bool:
    """Tells whether `name` is the path of the file of that sample, and thus inside the run directory."""
    if name is None:
        return False
    made_of = re.search(MADE_OF, name, re.ASCII)
    return name == sample_file(sample, suffix, made_of[0] if made_of else "")


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_json(document: Any) -> str:
    """Formats a document as JSON for a file or stdout. Raises ValueError for NaN, which JSON lacks.

    Lone surrogates, which JSON lacks too, become escapes, as in `events.encode`.
    """
    builtins = msgspec.to_builtins(document, str_keys=True)
    text = json.dumps(builtins, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text if text.isascii() else SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)
