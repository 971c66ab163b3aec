"""Reads a pickle of plain data without running code from it.

A pickle is a program for a small machine, and can do harm even if it calls nothing: eight bytes make the machine's memo
larger than the memory (LONG_BINPUT with a large index), and a key of a million nested tuples overflows the stack when
it is hashed. So all opcodes are checked before any is run, and a file with other opcodes than Python and libtorch write
for a memory snapshot is refused. Formats: the docstrings of `pickletools.opcodes`.
"""

import os
import pickle
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from gpubench import foreign_files, units
from gpubench.errors import DataError

HOW = (
    'record one: torch.cuda.memory._record_memory_history(stacks="python"), '
    "and after some steps torch.cuda.memory._dump_snapshot(path)"
)

_TRACE = "if it is a profiler's trace, give it as --trace"
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive, probably a checkpoint of torch.save", HOW),
    b"\x80\x02\x8a\nl\xfc\x9cF": ("a checkpoint of torch.save", HOW),
    b"\x1f\x8b": ("compressed by gzip", f"{_TRACE}; a snapshot must be unpacked first"),
    b"{": ("JSON", _TRACE),
    b"[": ("JSON", _TRACE),
}
"""First bytes of files that are mistaken for snapshots, with a description and a hint."""

_PIECE = 16 * 2**20
_PROTOCOLS = range(2, 6)
# Bytes of memory per byte of the file, and per object whose opcodes are shorter than the object.
_OF_A_BYTE = 16
_OF_AN_OBJECT = {b"}": 256, b"]": 80, b"\x85": 80, b"\x86": 80, b"\x87": 80}

_INTEGER = (
    rb"K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x04.{4}|\x03...|\x02..|\x01.|\x00|\x09.{8}[\x00\xff])"
)
"""Integers of up to 64 bits and a sign, so that every number of C and C++ is one.

The hash of an integer is its remainder of division by 2^61 - 1. Of these, no more than 20 have the same one, so that no
file can make a dict slow."""
_SCALAR = rb"(?:" + _INTEGER + rb"|G.{8}|[N\x88\x89])"
_SHORT = rb"[]})aesu\x94]++|h.|j....|q."
"""Lists, dicts, the empty tuple, operations that add to a container, the memo."""
_TUPLE = rb"\((?:" + _SCALAR + rb"{4,}+t)?+|" + _SCALAR + rb"(?:\x85|" + _SCALAR + rb"(?:\x86|" + _SCALAR + rb"\x87))?+"
"""A scalar, a mark, or a tuple of scalars only: keys of nested tuples overflow the stack when hashed."""
_KNOWN = re.compile(rb"(?:" + _SHORT + rb"|" + _TUPLE + rb")*+", re.DOTALL)
_BETWEEN = re.compile(rb"(?:" + _SHORT + rb"|" + _SCALAR + rb"|[(t\x85-\x87]|r....)*+", re.DOTALL)
"""The opcodes outside of frames, of which only the length matters."""
_FRAME, _FRAMED, _HEADER = 0x95, b"\x04", 9
"""The opcode that begins a frame, the first protocol with frames, and the bytes of a frame's opcode and length."""
_LENGTHS = {0x8C: 1, 0x58: 4, 0x43: 1, 0x42: 4}
"""For opcodes with a length and content, such as those of str and bytes: the size of the length field."""
_TEXT = b"\x8cX"
_LONG_BINPUT, _STOP = b"r."
_CODE = b"cRbio\x81\x82\x83\x84\x92\x93PQ"
"""GLOBAL, REDUCE, BUILD and the other opcodes that name or call something outside of the pickle."""


def plain(path: Path) -> Any:
    """Reads the dicts, lists, strings, numbers and tuples of numbers in the pickle at `path`.

    An object may occur in several places, also within itself. Raises DataError for a file that cannot be read, is not a
    pickle, holds code, is incomplete, or would not fit in memory.
    """
    try:
        with foreign_files.given(path) as file:
            data, frames = _unframed(b"".join(_pieces(file, path)))
        _check(data, frames, path)
        return _Data(BytesIO(_readable(data))).load()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", HOW) from None
    except (MemoryError, RecursionError):
        raise _too_large(path) from None
    except (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError):
        raise _damaged(path, "its contents are inconsistent") from None


class _Data(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yields the file's content while the objects made of it fit in memory."""
    size, available = 0, psutil.virtual_memory().available
    if os.fstat(file.fileno()).st_size * _OF_A_BYTE > available:
        raise _too_large(path)
    while piece := file.read(_PIECE):
        if not size:
            _check_kind(piece, path)
        size += len(piece)
        if size * _OF_A_BYTE > available:
            raise _too_large(path)
        yield piece
    if not size:
        raise DataError(f"{path} is empty", HOW)


def _check_kind(first: bytes, path: Path) -> None:
    for magic, (what, hint) in _FOREIGN.items():
        if first.startswith(magic):
            raise DataError(f"{path} is not a memory snapshot: it is {what}", hint)
    if first[0] != 0x80:
        raise DataError(f"{path} is not a memory snapshot: it is not a pickle", HOW)
    if len(first) > 1 and first[1] not in _PROTOCOLS:
        raise DataError(f"{path} is not a memory snapshot: it is a pickle of unknown protocol {first[1]}", HOW)


def _unframed(data: bytes) -> tuple[bytes, list[int]]:
    """Removes the frames of `data` (PEP 3154), which only say how much a reader may fetch at once.

    The list has the places in the result before which the header of a frame was removed. Frames may begin between any
    two opcodes, and a frame that claims more than it holds makes `pickle.Unpickler` continue elsewhere than at the
    frame's end. Without frames, the checked opcodes are those that run.
    """
    if data[1:2] < _FRAMED:
        return data, []
    pieces: list[bytes] = []
    frames: list[int] = []
    begin, at = 0, 2
    while at < len(data):
        if data[at] == _FRAME:
            pieces.append(data[begin:at])
            frames.append(at - _HEADER * len(frames))
            begin = at + _HEADER
            at = begin + int.from_bytes(data[at + 1 : begin], "little")  # frames are not nested
        elif data[at] in _LENGTHS:
            at = _string_end(data, at)
        elif (end := _end(_BETWEEN, data, at)) > at:
            at = end
        else:
            break
    return b"".join([*pieces, data[begin:]]), frames


def _check(data: bytes, frames: Sequence[int], path: Path) -> None:
    """Checks all opcodes. Raises DataError for one that plain data does not need, or that is cut off."""
    at = 2
    while True:
        at = _end(_KNOWN, data, at)
        if at >= len(data):
            raise _damaged(path, "it is cut short")
        if data[at] == _STOP:
            break
        at = _skip(data, at, frames, path)
    objects = sum(data.count(opcode) * size for opcode, size in _OF_AN_OBJECT.items())
    if len(data) * _OF_A_BYTE + objects > psutil.virtual_memory().available:
        raise _too_large(path)


def _end(opcodes: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Where the `opcodes` that begin at `at` end; `at` itself if there are none."""
    match = opcodes.match(data, at)
    return match.end() if match else at


def _string_end(data: bytes, at: int) -> int:
    """The end of the string whose opcode is at `at`."""
    end = at + 1 + _LENGTHS[data[at]]
    return end + int.from_bytes(data[at + 1 : end], "little")


def _readable(data: bytes) -> bytes:
    """Replaces each byte of a string that is not UTF-8 by a question mark.

    File names are bytes to Linux, and need not be text. Lengths stay the same.
    """
    pieces, begin, at = [], 0, 2
    while (at := _end(_KNOWN, data, at)) < len(data) and data[at] != _STOP:
        opcode, length = data[at], _LENGTHS.get(data[at], 4)  # LONG_BINPUT has 4 bytes, and no content
        start, at = at + 1 + length, _string_end(data, at) if opcode in _LENGTHS else at + 1 + length
        if opcode in _TEXT and not _is_text(data[start:at]):
            pieces += [data[begin:start], _replaced(data[start:at])]
            begin = at
    return b"".join([*pieces, data[begin:]]) if pieces else data


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _replaced(text: bytes) -> bytes:
    """Replaces each byte that is not UTF-8 by a question mark."""
    return b"".join(
        b"?" if "\udc80" <= character <= "\udcff" else character.encode()
        for character in text.decode("utf-8", "surrogateescape")
    )


def _skip(data: bytes, at: int, frames: Sequence[int], path: Path) -> int:
    """The end of the opcode at `at`, whose length varies or whose values are restricted."""
    opcode = data[at]
    if opcode in _CODE:
        raise DataError(f"{path} holds code, refused: a memory snapshot contains only data", HOW)
    if opcode in _LENGTHS:
        return _string_end(data, at)
    if opcode == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") < at:
        return at + 5
    place = at + _HEADER * bisect_right(frames, at)
    raise _damaged(path, f"the opcode at byte {place:,} does not occur in memory snapshots")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged, or not a memory snapshot: {why}", f"copy it again, or {HOW}")


def _too_large(path: Path) -> DataError:
    needed = _OF_A_BYTE * path.stat().st_size if path.is_file() else 0
    about = f": that takes about {units.size(needed)}" if needed else ""
    return DataError(f"{path} does not fit in memory{about}", "record with a smaller max_entries, or fewer steps")
