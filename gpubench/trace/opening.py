"""The bytes of a file, unpacked, read once from its beginning to its end: so may a pipe be."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from gpubench.errors import DataError

HOW = "record one with torch.profiler and export_chrome_trace, or gpubench profile"

_GZIP = b"\x1f"  # enough: no text begins so
_OF_GZIP = 16 + zlib.MAX_WBITS  # its header, and its checksum at the end
_PACKED = 256 * 1024
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
"""What is taken for a trace and is none, by its first bytes, with the hint."""
_PROTOCOL_BUFFERS = re.compile(rb"\n[^\s\[{\xef]")
"""A message begins with the number of its first field, 10, and a length. JSON may begin with a line end, which is a 10
too, and goes on as text."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, through gzip if it is compressed so.

    Raises DataError for a file that cannot be opened, is empty or of a known other format; and of errors while reading.
    """
    try:
        with path.open("rb") as file:
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
        raise DataError(f"{path} is binary, as Perfetto and JAX (xplane.pb) write their traces", HOW)
    return cast("IO[bytes]", _Unpacked(file)) if first.startswith(_GZIP) else file


class _Unpacked:
    """What gzip compressed, in one member or several.

    GzipFile goes through zeros behind a member byte by byte, and a hole of gigabytes takes it minutes.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._member = zlib.decompressobj(wbits=_OF_GZIP)
        self._packed = b""
        self._begun = False

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end. Raises EOFError where a member is cut off, and zlib.error."""
        while True:
            self._packed = self._packed or self._file.read(_PACKED)
            if not self._begun:
                self._packed = self._packed.lstrip(b"\0") if self._packed else b""
            if not self._packed:
                if self._begun:
                    raise EOFError("it ends within what gzip compressed")
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
                return found
