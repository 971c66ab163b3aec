"""The reader of pickles against Python's own picklers, and against files made to get past its check."""

import pickle
import pickletools
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshots_made import FORWARD, alloc, block, event, flat, free, segment, snapshot

from gpubench.errors import DataError
from gpubench.memory.unpickling import plain

FRAME = 64 * 2**10
"""Bytes from which on a pickler ends a frame."""
PICKLERS: dict[str, Callable[[Any, int], bytes]] = {"C": pickle.dumps, "Python": pickle._dumps}  # type: ignore[attr-defined]

INTEGERS = [
    sign * (2**bits + change)
    for bits in (0, 7, 8, 15, 16, 31, 32, 39, 47, 55, 56, 57, 60, 61, 62, 63)
    for change in (-1, 0, 1)
    for sign in (1, -1)
]
LARGEST = 2**64 - 1

integers = st.sampled_from(INTEGERS) | st.integers(-LARGEST, LARGEST)
scalars = st.none() | st.booleans() | st.floats(allow_nan=False) | integers
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
leaves = scalars | texts | st.lists(scalars, max_size=6).map(tuple)
contents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts | integers, inner, max_size=5)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pickle"


def same(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    expected = pickle.loads(data)
    found = plain(file)
    assert found == expected
    assert repr(found) == repr(expected)  # 1, 1.0 and True are equal


@given(contents, st.integers(FRAME - 200, FRAME + 50), st.integers(2, 5), st.sampled_from(sorted(PICKLERS)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_python_pickles_is_read_as_python_reads_it(
    file: Path, content: Any, filler: int, protocol: int, pickler: str
) -> None:
    whole = [content, "x" * filler, content, [content] * 3, "y" * (FRAME - 300), [content, content]]
    same(file, PICKLERS[pickler](whole, protocol))


RECORDS = [
    {"pool": (number, -number), "one": (2**40,), "all": (None, True, 0.5, number, 2**16, -1), "three": (1, 2, 3), 7: ()}
    for number in range(254, 258)
]


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_frame_that_begins_within_a_tuple_is_read(file: Path, protocol: int, pickler: str) -> None:
    broken = set()
    for filler in range(FRAME - 140, FRAME):
        data = PICKLERS[pickler](["x" * filler, RECORDS, "end"], protocol)
        opcodes = [opcode.name for opcode, _, _ in pickletools.genops(data)]
        broken |= {name for at, name in enumerate(opcodes) if "FRAME" in opcodes[max(at - 2, 2) : at]}
        same(file, data)
    assert ({"TUPLE", "TUPLE2", "TUPLE3"} <= broken) == (protocol >= 4)


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_frame_may_begin_before_any_opcode(file: Path, protocol: int, pickler: str) -> None:
    data = pickletools.optimize(PICKLERS[pickler](["x", RECORDS, "x" * 300, RECORDS[::-1]], protocol))
    starts = [at for opcode, _, at in pickletools.genops(data) if opcode.name not in ("PROTO", "FRAME")]
    opcodes = [data[start:end] for start, end in pairwise([*starts, len(data)])]
    for size in (1, 2, 3, 5):
        groups = [b"".join(opcodes[at : at + size]) for at in range(0, len(opcodes), size)]
        same(file, data[:2] + b"".join(framed(len(group)) + group for group in groups))
        # A pickler leaves out the header of the shortest frames.
        same(file, data[:2] + b"".join(framed(len(one)) * (len(one) > 3) + one for one in groups))


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_strings_too_large_for_a_frame_are_read_from_between_frames(file: Path, protocol: int, pickler: str) -> None:
    large = ["é" * (FRAME // 2 + change) for change in (-1, 0, 1, 1000)]
    same(file, PICKLERS[pickler]({"a": large, "pair": (1, 2), "again": large[:], "last": "z" * 3 * FRAME}, protocol))


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_snapshots_of_many_frames_keep_what_they_share(file: Path, protocol: int, pickler: str) -> None:
    stacks = [[dict(frame, line=number) for frame in FORWARD] for number in range(20)]
    events = flat(
        *(
            [
                event("alloc", 2**46 + 512 * at, 1000, stacks[at % 20], pool_id=(0, at % 300)),
                *free(2**46 + 512 * at, 1000),
            ]
            for at in range(2000)
        )
    )
    content = snapshot(events, [segment(0, 2**21, block(1024, 800, frames=stacks[0]))])
    data = PICKLERS[pickler](content, protocol)
    same(file, data)
    assert len(data) > 2 * FRAME
    found = plain(file)
    first, later = (found["device_traces"][0][at]["frames"] for at in (0, 60))
    assert first[0] is later[0]  # a frame that many events share is one object


def test_every_integer_of_64_bits_and_a_sign_is_read_and_larger_ones_are_refused(file: Path) -> None:
    for protocol in range(2, 6):
        same(file, pickle.dumps([INTEGERS, LARGEST, -LARGEST, {one: (one, one) for one in INTEGERS}], protocol))
        for large in (2**64, -(2**65), 2**70, 2**3000):
            file.write_bytes(pickle.dumps([large], protocol))
            with pytest.raises(DataError, match="damaged"):
                plain(file)


def test_few_integers_that_are_read_have_the_same_hash(file: Path) -> None:
    """Thousands of them as keys would take minutes."""
    alike = [number * (2**61 - 1) for number in range(-9, 10)]
    same(file, pickle.dumps([one for one in alike if abs(one) <= LARGEST]))
    file.write_bytes(pickle.dumps([alike[-1]]))
    with pytest.raises(DataError, match="damaged"):
        plain(file)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "name", [b"/tmp/caf\xe9/t.py", b"\xff\xff", b"/a/\xed\xa0\x80b.py", b"\xc3", "é/\xed".encode() + b"\xe9"]
)
def test_a_string_that_is_not_of_utf_8_is_read_with_a_question_mark_for_each_wrong_byte(
    file: Path, protocol: int, name: bytes
) -> None:
    content = [["x" * len(name)] * 2, "é", 7, "y" * (FRAME + 1)]
    data = pickle.dumps(content, protocol)
    file.write_bytes(data.replace(b"x" * len(name), name))
    known = name.decode("utf-8", "surrogateescape")
    expected = "".join("?" if "\udc80" <= one <= "\udcff" else one for one in known)
    assert plain(file) == [[expected] * 2, *content[1:]]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_message_about_an_opcode_names_its_place_in_the_file(file: Path, protocol: int) -> None:
    data = pickle.dumps(["z" * 2 * FRAME, *RECORDS, "x" * FRAME, *RECORDS, 2.5], protocol)
    place = data.rindex(b"G" + struct.pack(">d", 2.5))
    file.write_bytes(data[:place] + b"\x7f" + data[place + 1 :])
    with pytest.raises(DataError, match=f"the opcode at byte {place:,} "):
        plain(file)


def framed(length: int) -> bytes:
    return b"\x95" + struct.pack("<Q", length)


@pytest.mark.parametrize("claimed", [3, 20, 64, 65])
def test_nothing_is_run_that_was_checked_as_the_text_of_a_string(file: Path, claimed: int) -> None:
    """`pickle.Unpickler` drops what is left of a frame where the next one reaches beyond it: here a string's head, so
    that the string's text would be run."""
    nested = (b"N" + b"\x85" * 20 + b".").ljust(64, b"x")
    data = b"\x80\x04" + framed(11) + framed(claimed) + b"\x8c\x40" + nested + b"."
    file.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        plain(file)


def test_a_tuple_holds_no_other(file: Path) -> None:
    inner: Any = (1, 2)
    contents: list[Any] = [(inner,), (inner, 1), (1, inner), (1, 2, inner), (1, 2, 3, inner), ([],), ("a", "b")]
    for content in contents:
        for protocol in range(2, 6):
            file.write_bytes(pickle.dumps(content, protocol))
            with pytest.raises(DataError, match="damaged"):
                plain(file)


def test_tuples_count_for_what_they_take_in_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes make a tuple of 64."""
    file.write_bytes(b"\x80\x04](" + b"N\x85" * 10_000 + b"e.")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 20_000 * 16 + 100_000}))
    with pytest.raises(DataError, match="does not fit in memory"):
        plain(file)


def test_an_allocation_of_every_address_is_read(file: Path) -> None:
    events = [alloc(2**at, 1) for at in range(48)]
    same(file, pickle.dumps(snapshot(events), 4))
