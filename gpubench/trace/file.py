"""Reads the events of a trace file of any size in pieces, whichever profiler wrote it.

Format: "Trace Event Format" by the Chromium project. The keys of `args` are those of libkineto's output_json.cpp, and
of the profiler before it (2021). Only the fields that are used are decoded.

Reading in pieces needs little more memory than what is kept of the file. A piece ends between two events, which needs
no parser: a prefix of the events that decodes is complete.
"""

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar, cast

import msgspec
import psutil
from msgspec import UNSET, Raw, Struct, UnsetType, field

from gpubench import foreign_files
from gpubench.errors import DataError
from gpubench.trace.columns import SliceKind, WorkKind

SLICE_KINDS = {
    "cpu_op": SliceKind.OPERATOR,
    "operator": SliceKind.OPERATOR,
    "user_annotation": SliceKind.ANNOTATION,
    "python_function": SliceKind.PYTHON,
    "cuda_runtime": SliceKind.RUNTIME,
    "cuda_driver": SliceKind.RUNTIME,
    "hip_runtime": SliceKind.RUNTIME,
    "xpu_runtime": SliceKind.RUNTIME,
    "xpu_driver": SliceKind.RUNTIME,
    "mtia_runtime": SliceKind.RUNTIME,
    "privateuse1_runtime": SliceKind.RUNTIME,
    "privateuse1_driver": SliceKind.RUNTIME,
    "runtime": SliceKind.RUNTIME,
}
"""Kinds of events by category, in lower case: old traces write Operator and Runtime."""

WORK_KINDS = {
    "kernel": WorkKind.KERNEL,
    "gpu_memcpy": WorkKind.COPY,
    "memcpy": WorkKind.COPY,
    "gpu_memset": WorkKind.SET,
    "memset": WorkKind.SET,
}

LEFT_OUT = frozenset({
    "trace", "overhead", "gpu_user_annotation", "external_correlation", "cpu_instant_event", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "xpu_sync", "ac2g", "async_cpu_to_gpu", "fwdbwd",
})  # fmt: skip
"""Categories of torch.profiler that describe no further work, in lower case. Categories that are not listed belong to
devices that are not read: mtia_ccp_events, hpu_op and those of PrivateUse1 backends."""

OF_DEVICES = re.compile(r"(?i)(mtia|hpu|xpu|privateuse1|glow|mlu|gcu|npu|musa)_|collective_comm$")
"""Categories that torch.profiler and its backends write for devices, including those that are not read."""

ANNOTATIONS = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.step#", "Optimizer.zero_grad#")
"""Beginnings of the names of annotations, which old traces call operators."""


ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
"""The size of an element by the name of c10::ScalarType with which collectives give their type."""


class Args(Struct, gc=False):
    name: Any = None
    """The name of a process, in metadata."""
    external: int | None = field(default=None, name="External id")
    """The unique number of an operator or annotation."""
    python: int | None = field(default=None, name="Python id")
    """The unique number of a call of a Python function."""
    correlation: int | None = None
    stream: int | None = None
    device: int | None = None
    bytes: int | None = None
    grid: Any = None
    """Three integers; a string for operators that Triton compiled."""
    block: Any = None
    sequence: int | None = field(default=None, name="Sequence number")
    forward_thread: int | None = field(default=None, name="Fwd thread id")
    dims: Raw | UnsetType = field(default=UNSET, name="Input Dims")
    types: Raw | UnsetType = field(default=UNSET, name="Input type")
    strides: Raw | UnsetType = field(default=UNSET, name="Input Strides")
    concrete: Raw | UnsetType = field(default=UNSET, name="Concrete Inputs")
    stack: str | None = field(default=None, name="Call stack")
    collective: Any = field(default=None, name="Collective name")
    """The name of a collective, such as "allreduce", which the other fields describe: from the rank's part in it to its
    process group."""
    elements_in: int | None = field(default=None, name="In msg nelems")
    elements_out: int | None = field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = field(default=None, name="Process Group Name")
    group_ranks: Any = field(default=None, name="Process Group Ranks")
    group_size: Any = field(default=None, name="Group size")
    collective_number: Any = field(default=None, name="Seq")


class TraceEvent(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = -1.0
    dur: float = 0.0
    args: Args | None = None


class ExactEvent(TraceEvent, gc=False):
    """An event whose times a float cannot represent to the nanosecond."""

    ts: Decimal = Decimal(-1)  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


Kind = TypeVar("Kind")

_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])[+-]?(?:inf(?:inity)?|nan)(?=[\s,\]}])", re.IGNORECASE)
_PAIR, _HALF = rb"u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w", rb"u[dD][89a-fA-F]\w\w"
_HALVES = re.compile(
    rb"(?:[^\\]++|\\(?:" + _PAIR + rb"|(?!" + _HALF + rb").))++|(?P<half>\\" + _HALF + rb")", re.DOTALL
)
"""A character beyond 16 bits is escaped in two halves; a single half is invalid text.

All between two of them is one match, because a match for each of millions of escapes would fill the memory.
"""
_json = json.JSONDecoder(strict=False)

SHORT = 10
"""The number of characters that no truncated word or escape exceeds; -Infinit is one of the longest."""


def decodable(found: bytes) -> str:
    """The text as JSON that can be decoded, if possible."""
    found = _NOT_A_NUMBER.sub(b"null", found)
    return _HALVES.sub(lambda match: rb"\ufffd" if match["half"] else match[0], found).decode(errors="replace")


def sensible_events(found: bytes) -> tuple[list[ExactEvent], int] | None:
    """The valid events of an array, and the number of invalid ones; None if the array is incomplete."""
    try:
        every = json.loads(decodable(found), strict=False, parse_float=Decimal)
    except (ValueError, RecursionError):
        return None
    good = [event for one in every if (event := _event(one)) is not None]
    return good, len(every) - len(good)


class Broken(Exception):
    def __init__(self, why: str, *, early: bool = False) -> None:
        super().__init__(why)
        self.early = early
        """Whether more text might complete the JSON."""


def value(found: str) -> tuple[Any, int]:
    """The value at the beginning of the text, and where it ends. Raises Broken."""
    try:
        return _json.raw_decode(found)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or len(found) - error.pos < SHORT:
            raise Broken("its JSON is incomplete", early=True) from None
        raise Broken("its JSON is broken") from None
    except RecursionError:
        raise Broken("its brackets are nested too deeply") from None
    except ValueError:  # Python reads no integers of thousands of digits
        raise Broken("a number in it is too long") from None


def _event(found: Any) -> ExactEvent | None:
    """The event without invalid arguments; None if nothing valid is left."""
    if not isinstance(found, dict):
        return None
    args, name = found.get("args"), found.get("name", "")
    known = {key: value for key, value in args.items() if _as(Args, {key: value})} if isinstance(args, dict) else {}
    return _as(ExactEvent, found) or _as(ExactEvent, found | {"args": known, "name": str(name)})


def _as(kind: type[Kind], found: dict[str, Any]) -> Kind | None:
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None


EXACT_BELOW = 2.0**43  # microseconds: below this, the nearest double still has the nanosecond
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

E = TypeVar("E")

_LONG_FRACTION = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.')
_ts = attrgetter("ts")
_fast = msgspec.json.Decoder(list[TraceEvent], strict=False)
_exact = msgspec.json.Decoder(list[ExactEvent], strict=False)


class Decoder(Protocol[E]):
    """Two decoders of a whole array. Each returns the events and the number left out; None if it cannot decode it."""

    def strictly(self, text: bytes) -> tuple[list[E], int] | None:
        """Decodes valid JSON."""

    def leniently(self, text: bytes) -> tuple[list[E], int] | None:
        """Decodes text with parts that are not JSON (NaN, bytes that are not UTF-8), and leaves out invalid events."""


class EventDecoders:
    """The decoders of events, of which they keep only the fields that the analysis uses."""

    def strictly(self, text: bytes) -> tuple[list[TraceEvent], int] | None:
        try:
            events = _fast.decode(text)
            if any(map(EXACT_BELOW.__le__, map(_ts, events))) and _LONG_FRACTION.search(text):
                return _finite(_exact.decode(text))
            return events, 0
        except UNREADABLE:
            return None

    def leniently(self, text: bytes) -> tuple[list[TraceEvent], int] | None:
        if (found := sensible_events(text)) is None:
            return None
        events, dropped = found
        finite, more = _finite(events)
        return finite, dropped + more


def _finite(events: list[ExactEvent]) -> tuple[list[TraceEvent], int]:
    """The events with finite times and the number of others, because a NaN Decimal cannot be compared."""
    finite = [event for event in events if event.ts.is_finite() and event.dur.is_finite()]
    return cast("list[TraceEvent]", finite), len(events) - len(finite)


HOW = "record one with torch.profiler and export_chrome_trace, or gpubench profile"

_GZIP = b"\x1f"  # sufficient, because no text begins with it
_OF_GZIP = 16 + zlib.MAX_WBITS  # with gzip's header and checksum
_PACKED = 64 * 1024
MOST_COMPRESSED = 400
"""The most by which gzip shrinks a trace: 98 public ones shrink by 6.7 to 30.3 (median 16), one of equal events by less
than 300, and white space by 1000."""
MOST_UNCHECKED = 16 * 2**20  # unpacked bytes, from which on the limit applies
_FOREIGN = {
    b"\x80": ("a pickle, not a trace", "a snapshot of CUDA memory goes to gpubench memory --snapshot"),
    b"PK\x03\x04": ("a zip archive, not a trace", "unpack it first"),
    b"PK\x05\x06": ("a zip archive, and empty", HOW),
    b"BZh": ("compressed by bzip2, which is not supported", "unpack it first"),
    b"\xfd7zXZ": ("compressed by xz, which is not supported", "unpack it first"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd, which is not supported", "unpack it first"),
    b"SQLite format 3\0": ("an SQLite database, as Nsight Systems exports it, not a trace", HOW),
    b"# tracer: ": ("text of ftrace, as Android's systrace collects it", HOW),
    b"<": ("a web page, as Android's systrace writes it", HOW),
    b"\xff\xfe": ("text in UTF-16, which is not supported", "convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16, which is not supported", "convert it to UTF-8"),
}
"""First bytes of files that are mistaken for traces, with a description and a hint."""
_PROTOCOL_BUFFERS = re.compile(rb"\n[^\s\[{\xef]")
"""A message begins with the number of its first field, 10, and a length. JSON may also begin with byte 10, a line end,
but continues as text."""


_TAR = slice(257, 262)
"""Where a tar archive says that it is one, after the name of its first file."""
STANDARD_INPUT = Path("-")


def _standard_input() -> BufferedReader:
    """Raises DataError for a terminal, on which nobody types a trace."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise DataError("- is standard input, which is a terminal or closed", "pipe a trace into it, or name a file")
    return cast("BufferedReader", sys.stdin.buffer)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens the file, decompressing gzip. "-" is standard input.

    Raises DataError for a file that cannot be opened, is empty or of another known format, and for errors while
    reading.
    """
    try:
        if path == STANDARD_INPUT:
            yield _unpacked(_standard_input(), path)
            return
        with foreign_files.given(path) as file:
            yield _unpacked(file, path)
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is cut short or damaged: {error}", "copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", HOW) from None


def _unpacked(file: BufferedReader, path: Path) -> IO[bytes]:
    first = file.peek()
    if not first:
        raise DataError(f"{path} is empty", HOW)
    for magic, (what, hint) in _FOREIGN.items():
        if first.startswith(magic):
            raise DataError(f"{path} is {what}", hint)
    if _PROTOCOL_BUFFERS.match(first):
        raise DataError(f"{path} is a binary trace, as written by Perfetto and JAX (xplane.pb)", HOW)
    return cast("IO[bytes]", _Unpacked(file)) if first.startswith(_GZIP) else file


class _Unpacked:
    """The decompressed contents of gzip, of one member or several.

    GzipFile reads zeros after a member byte by byte, which takes minutes for gigabytes.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._member = zlib.decompressobj(wbits=_OF_GZIP)
        self._packed = b""
        self._begun = False
        self._taken, self._given = 0, 0

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes, none at the end. Raises zlib.error, and EOFError if a member is cut off."""
        while True:
            if not self._packed:
                self._packed = self._file.read(_PACKED)
                self._taken += len(self._packed)
            if not self._begun:
                self._packed = self._packed.lstrip(b"\0") if self._packed else b""
            if not self._packed:
                if self._begun:
                    raise EOFError("its gzip data is incomplete")
                if not self._file.peek(1):
                    return b""
                continue
            self._begun = True
            found = self._member.decompress(self._packed, size)
            self._packed = self._member.unconsumed_tail
            if self._member.eof:
                self._packed, self._begun = self._member.unused_data, False
                self._member = zlib.decompressobj(wbits=_OF_GZIP)
            if found:
                self._given += len(found)
                if self._given > max(MOST_UNCHECKED, MOST_COMPRESSED * self._taken):
                    raise zlib.error(f"it unpacks to more than {MOST_COMPRESSED} times its size, as no trace does")
                return found


PIECE = 8 * 2**20
MOST_PENDING = 64 * 2**20  # bytes: larger than any event, and than anything before the first event
SPARE_MEMORY = 256 * 2**20  # bytes left to the rest of the machine

_TO_SPACE = bytes(range(32)).ljust(32)
_PLAIN = bytes.maketrans(_TO_SPACE, b" " * 32)  # control characters are white space, or invalid in a JSON string
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
NEAR_THE_END = 256 * 1024
MOST_TRIES = 8

Decode = Callable[[bytes], tuple[list[E], int] | None]


class TraceDocument(Generic[E]):
    """One trace file. `batches` yields its events; the other fields are complete after that."""

    def __init__(self, path: Path, decoder: Decoder[E]) -> None:
        self.path = path
        self._decoder = decoder
        self.metadata: dict[str, Any] = {}
        """The contents of the file besides the events."""
        self.dropped = 0
        """The number of invalid events, which are in no batch: not an object, or times that are not numbers."""
        self.truncated = False
        """Whether the events are complete and what follows them is truncated."""
        self._bare = False
        """Whether the document is an array of events."""
        self._blank = 0
        """The length of the white space read since the last event."""

    def batches(self) -> Iterator[list[E]]:
        """Yields the events in the order of the file. Raises DataError for a file that is not a trace or incomplete."""
        try:
            with opened(self.path) as file:
                rest = self._head(file)
                while piece := self._piece(file):
                    events, rest = self._whole(rest + piece)
                    yield events
                yield self._tail(rest)
        except MemoryError:
            raise self._too_large() from None
        except Broken as broken:
            raise self._damaged(str(broken)) from None

    def _piece(self, file: IO[bytes]) -> bytes:
        return self._read(file).translate(_PLAIN)

    def _read(self, file: IO[bytes]) -> bytes:
        if psutil.virtual_memory().available < SPARE_MEMORY:
            raise self._too_large()
        return file.read(PIECE)

    def _head(self, file: IO[bytes]) -> bytes:
        """Goes to the first event, and returns the text of the events read so far."""
        first = self._read(file)
        text = first.translate(_PLAIN).removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"["):
            self._bare = True
            return text[1:]
        if not text.startswith(b"{"):
            raise self._no_trace(first)
        while not (match := _BEGIN.search(text)):
            if len(text) > MOST_PENDING:
                raise self._no_trace(text)
            if not (piece := self._piece(file)):
                raise self._without_events(text)
            text += piece
        before = decodable(text[: match.start()].rstrip().removesuffix(b",")) + "}"
        found, end = value(before)
        if end < len(before):
            raise self._damaged("its JSON is broken")
        self.metadata |= found
        return text[match.end() :]

    def _whole(self, text: bytes) -> tuple[list[E], bytes]:
        """The complete events, and the rest of the text, in which the next one begins."""
        if text.isspace():
            self._blank += len(text)
            if self._blank > MOST_PENDING:
                raise self._damaged(f"no event ends within {MOST_PENDING // 2**20} MiB")
            return [], b""
        self._blank = 0
        if len(text) > MOST_PENDING:
            raise self._damaged(f"no event ends within {MOST_PENDING // 2**20} MiB")
        borders = _last_borders(text)
        for decode in (self._decoder.strictly, self._decoder.leniently):
            for border in borders:
                if (events := self._decoded(decode, text[: border.start() + 1])) is not None:
                    return events, text[border.end() - 1 :]
        self._check_unfinished(text)
        return [], text

    def _check_unfinished(self, text: bytes) -> None:
        """Handles text that does not decode, which more text may complete."""
        try:
            value(decodable(b"[" + text))
        except Broken as broken:
            if not broken.early:
                raise

    def _tail(self, rest: bytes) -> list[E]:
        """Decodes the last events, and reads what follows them."""
        text = decodable(b"[" + rest)
        _, end = value(text)
        self._keep(text[end:].strip())
        inside = text[1 : end - 1].encode()
        for decode in (self._decoder.strictly, self._decoder.leniently):
            if (events := self._decoded(decode, inside)) is not None:
                return events
        raise self._damaged("its JSON is broken")

    def _keep(self, behind: str) -> None:
        """Reads what follows the events, which are complete, so that truncation here matters little."""
        if not self._bare:
            text = "{" + behind.lstrip(", ")
            try:
                found, end = value(text)
            except Broken as broken:
                if not broken.early:
                    raise
                self.truncated = True
                return
            self.metadata |= found
            behind = text[end:].strip()
        if behind:
            raise DataError(
                f"{self.path} continues after the end of its JSON", "a file holds one trace: remove the rest"
            )

    def _decoded(self, decode: Decode[E], inside: bytes) -> list[E] | None:
        """The events of a piece; None if it is incomplete or invalid."""
        if (found := decode(b"[" + inside + b"]")) is None:
            return None
        events, dropped = found
        self.dropped += dropped
        return events

    def _without_events(self, text: bytes) -> DataError:
        try:
            value(decodable(text))
        except Broken as broken:
            if broken.early:
                return DataError(f"{self.path} ends before any traceEvents: it is cut short, or is not a trace", HOW)
        if b"www.speedscope.app" in text:
            return DataError(f"{self.path} is a profile in speedscope's format, as py-spy writes it, not a trace", HOW)
        return self._no_trace(text)

    def _no_trace(self, text: bytes) -> DataError:
        if text[_TAR].startswith(b"ustar"):
            return DataError(f"{self.path} is a tar archive, not a trace", "unpack it first: tar xf")
        if found := next((found for magic, found in _FOREIGN.items() if text.startswith(magic)), None):
            return DataError(f"{self.path} is, once unpacked, {found[0]}", found[1])
        if text.startswith(_GZIP):
            return DataError(f"{self.path} was compressed twice", "unpack it once: gunzip")
        return DataError(f"{self.path} is not a trace: no traceEvents in it", HOW)

    def _too_large(self) -> DataError:
        return DataError(f"{self.path} does not fit in memory", "record fewer steps, or no stacks and memory")

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is cut short or damaged: {why}", "copy it again, or record it again")


def _last_borders(text: bytes) -> list[re.Match[bytes]]:
    """What look like borders between two events, the last one first."""
    return list(_BETWEEN.finditer(text, max(0, len(text) - NEAR_THE_END)))[: -MOST_TRIES - 1 : -1]
