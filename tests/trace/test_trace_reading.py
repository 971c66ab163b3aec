"""Whatever is given as a trace, it is read as one, or it is said why not."""

import bz2
import gzip
import json
import lzma
import os
import random
import tarfile
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from io import BufferedReader, BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces_made import PUBLIC, Record, call, document, launched, made, slice_, step, work, write

from gpubench.errors import DataError
from gpubench.trace import file as documents
from gpubench.trace.columns import SliceKind, Trace, WorkKind
from gpubench.trace.device import idle_causes
from gpubench.trace.load import read
from gpubench.trace.names import Lexicon
from gpubench.trace.slices import ProgramSlices

Damage = Callable[[bytes], bytes]

SHAPES: dict[str, Any] = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"], "Sequence number": 7}
EVENTS: list[Record] = [
    step(1, 0, 100),
    slice_("aten::mm", 1, 9, **SHAPES),
    slice_("model.py(12): forward", 0.5, 20, cat="python_function"),
    *launched("gemm", 2, 4.125, 12.5, 11),
    call("cudaMemcpyAsync", 20, 22, 12),
    work("Memcpy HtoD (Pageable -> Device)", 21, 25, 12, cat="gpu_memcpy", bytes=4096),
    {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 3, "pid": 1, "tid": 1, "args": {"Bytes": 512}},
    {"ph": "s", "id": 11, "cat": "ac2g", "name": "ac2g", "ts": 2, "pid": 1, "tid": 1},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
]
ABOUT: dict[str, Any] = {
    "deviceProperties": [
        {"name": "A GPU", "computeMajor": 9, "computeMinor": 0, "numSms": 132, "totalGlobalMem": 80 << 30}
    ],
    "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
    "record_shapes": 1,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


def given_bytes(file: Path, content: bytes) -> Trace:
    file.write_bytes(content)
    return read(file)


def events_of(trace: Trace) -> set[tuple[str, int, int]]:
    cpu, device = trace.cpu, trace.device
    return {
        (trace.names[name], start, end)
        for columns in (cpu, device)
        for name, start, end in zip(columns.name.tolist(), columns.start.tolist(), columns.end.tolist(), strict=True)
    }


def test_a_trace_is_read_into_columns(file: Path) -> None:
    trace = given_bytes(file, document(EVENTS, **ABOUT))
    cpu, device = trace.cpu, trace.device
    assert [SliceKind(kind).name for kind in cpu.kind] == ["ANNOTATION", "PYTHON", "OPERATOR", "RUNTIME", "RUNTIME"]
    assert [WorkKind(kind).name for kind in device.kind] == ["KERNEL", "COPY"]
    assert (device.start.tolist(), device.end.tolist()) == ([4_125, 21_000], [12_500, 25_000])
    assert device.bytes.tolist() == [-1, 4096]
    assert (trace.rank, trace.world_size, trace.backend, trace.events) == (1, 2, "nccl", len(EVENTS))
    assert trace.devices[0].compute_capability == (9, 0)
    assert trace.settings == {"record_shapes": 1}
    signature = trace.signatures[cpu.signature.max()]
    assert (signature.dims, signature.types) == ([[2, 3], [3, 4]], ["float", "float"])


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(EVENTS).encode(),
        b"\xef\xbb\xbf" + document(EVENTS),
        document(EVENTS).replace(b", ", b" ,\n\t"),
        json.dumps({"traceEvents": EVENTS, "last": [{"a": [{}]}, {"b": 1}] * 100}).encode(),
        json.dumps({"traceEvents": EVENTS, "traceName": "a"}, indent=4).encode(),
        gzip.compress(document(EVENTS)),
        document(EVENTS).replace(b'"pid": 1', b'"pid": "python 1"'),
        document(EVENTS).replace(b'"Bytes": 512', b'"Bytes": NaN, "x": -Infinity'),
        document(EVENTS).replace(b'"name": "python"', b'"name": "\xff\xfe"'),
        document(EVENTS).replace(b'"name": "python"', b'"name": "a\x01\x00\nb"'),
        document([*EVENTS, {"ph": "X", "ts": "soon"}, {"ph": 7}, 5, None, [], "x"]),  # type: ignore[list-item]
        document([{**event, "args": {**event.get("args", {}), "stream_": [[1]], "device": True}} for event in EVENTS]),
    ],
)
@pytest.mark.parametrize("piece", [documents.PIECE, 64])
def test_the_same_events_are_read_however_they_are_written(
    file: Path, written: bytes, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", piece)
    expected = made(EVENTS)
    trace = given_bytes(file, written)
    assert events_of(trace) == events_of(expected)
    assert trace.device.correlation.tolist() == expected.device.correlation.tolist()


def test_old_traces_use_other_words() -> None:
    words = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    old = [{**event, "cat": words.get(event.get("cat", ""), "Operator")} for event in EVENTS]
    assert Lexicon.of(made(old)).profiler_step.any()
    assert made(old).device.kind.tolist() == made(EVENTS).device.kind.tolist()


@pytest.mark.parametrize("began", [0, 6_389_245_893, 1_682_725_898_237_042])
def test_times_are_exact_to_the_nanosecond_since_whenever_they_count(file: Path, began: int) -> None:
    text = b'[{"ph":"X","cat":"kernel","name":"k","ts":%d.123,"dur":4.001},' % began
    text += b'{"ph":"X","cat":"cpu_op","name":"o","ts":%d.999,"dur":0.002,"args":{"x":NaN}}]' % began
    for bad in (text, text.replace(b"NaN", b"0")):
        trace = given_bytes(file, bad)
        assert [trace.device.start[0] - began * 1000, trace.device.end[0] - began * 1000] == [123, 4_124]
        assert [trace.cpu.start[0] - began * 1000, trace.cpu.end[0] - began * 1000] == [999, 1_001]


def archive(content: bytes, mode: Literal["w", "w:gz"]) -> bytes:
    """A tar archive of one trace."""
    made = BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as tar:
        one = tarfile.TarInfo("trace.json")
        one.size = len(content)
        tar.addfile(one, BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{}", "not a trace"),
        (b"# Report", "not a trace"),
        (b'{"traceEvents": 5}', "not a trace"),
        (b'{"traceEvents": []}', "an empty trace"),
        (b"[]", "an empty trace"),
        (b"[1, 2]", "2 events, none with a duration"),
        (b"\x80\x04\x95\x00", "pickle"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
        (b"PK\x05\x06" + b"\x00" * 18, "a zip archive"),
        (bz2.compress(document(EVENTS)), "bzip2, which is not supported"),
        (archive(document(EVENTS), "w"), "is a tar archive, not a trace"),
        (archive(document(EVENTS), "w:gz"), "is a tar archive, not a trace"),
        (gzip.compress(gzip.compress(document(EVENTS))), "was compressed twice"),
        (gzip.compress(bz2.compress(document(EVENTS))), "is, once unpacked, compressed by bzip2"),
        (lzma.compress(document(EVENTS)), "xz, which is not supported"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd, which is not supported"),
        (document(EVENTS).decode().encode("utf-16"), "UTF-16, which is not supported"),
        (document(EVENTS)[:-200], "cut short or damaged: its JSON is incomplete"),
        (document(EVENTS) + b"garbage", "continues after the end of its JSON"),
        (document(EVENTS) + document(EVENTS), "continues after the end of its JSON"),
        (json.dumps(EVENTS).encode() + b"]", "continues after the end of its JSON"),
        (b'{"a": 1} {"traceEvents": []}', "JSON is broken"),
        (document(EVENTS).replace(b"}, {", b"}], {", 1), "JSON is broken"),
        (b'{"traceEvents": [' + b"[" * 200_000 + b"]" * 200_000 + b"]}", "nested too deeply"),
        (b"[" * 200_000, "nested too deeply"),
        (b'[{"ts": ' + b"9" * 5000 + b"}]", "a number in it is too long"),
        (document([], **ABOUT)[:150], "ends before any traceEvents: it is cut short"),
        (document([], **ABOUT)[:20], "ends before any traceEvents: it is cut short"),
        (b"{", "ends before any traceEvents"),
        (b"{% extends page %} text", "not a trace: no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN}]}', "1 event, none with a duration"),
        (gzip.compress(document(EVENTS))[:-20], "cut short or damaged"),
        (gzip.compress(document(EVENTS), mtime=0)[:200] + b"\x00" * 200, "damaged"),
        (b"\x1f\x8bnot gzip at all", "cannot read|damaged"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(file: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        given_bytes(file, content)
    assert refused.value.hint


@pytest.mark.parametrize("content", [document(EVENTS), gzip.compress(document(EVENTS))])
def test_a_pipe_is_read_as_a_file_is(tmp_path: Path, content: bytes) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    trace = read(pipe)
    writer.join()
    assert events_of(trace) == events_of(made(EVENTS))


@pytest.mark.parametrize("begins", [b"", b"{", b'{"traceEvents": [', b'{"traceEvents": [1', b'[{"name": "'])
def test_what_never_ends_is_refused_soon(file: Path, begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 600)
    monkeypatch.setattr(documents, "MOST_PENDING", 6000)
    pieces = Endless(begins)
    monkeypatch.setattr(documents, "opened", lambda _: nullcontext(pieces))
    with pytest.raises(DataError, match=r"not a trace|no event ends"):
        read(file)
    assert pieces.given < 10_000


def test_a_damaged_file_is_refused_at_the_damage(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 600)
    pieces = Endless(document(EVENTS).replace(b'"ph"', b"ph", 1))
    monkeypatch.setattr(documents, "opened", lambda _: nullcontext(pieces))
    with pytest.raises(DataError, match="JSON is broken"):
        read(file)
    assert pieces.given < 2_000


class Endless:
    def __init__(self, begins: bytes) -> None:
        self.begins = begins
        self.given = 0

    def read(self, size: int) -> bytes:
        self.given += size
        text, self.begins = self.begins[:size], self.begins[size:]
        return text.ljust(size, b"\0")


def test_a_file_that_ends_anywhere_behind_its_events_is_read(file: Path) -> None:
    about = {"traceName": None, "a": '\u1234\\ "', "b": [{"c": -1.5}, True], "record_shapes": 1}
    whole = json.dumps({"traceEvents": EVENTS, **about}).encode()
    for end in range(whole.index(b', "traceName"'), len(whole)):
        trace = given_bytes(file, whole[:end])
        assert trace.truncated
        assert trace.events == len(EVENTS)
    assert not given_bytes(file, whole).truncated


def test_events_that_are_left_out_are_counted(file: Path) -> None:
    bad: list[Record] = [
        {"ts": float("nan")},
        {"dur": float("inf")},
        {"ts": -5},
        {"dur": -1},
        {"ts": 1e300},
        {"ts": "x"},
        {"ts": "nan"},
    ]
    good = slice_("aten::mm", 5, 6)
    trace = given_bytes(file, document([good, *({**good, **times} for times in bad)]))
    assert (trace.events, trace.dropped, len(trace.cpu)) == (8, 7, 1)


@pytest.mark.parametrize(
    ("name", "read_as"),
    [
        (b'"a\\ud800b"', "a\ufffdb"),
        (b'"\\udc00\\ud800"', "\ufffd\ufffd"),
        (b'"\\ud83d\\ude00 \\udead"', "\U0001f600 \ufffd"),
        (b'"\\\\ud800 NaN"', "\\ud800 NaN"),
        (b"5", "5"),
        (b"null", "None"),
    ],
)
def test_a_name_that_makes_no_sense_costs_no_event(file: Path, name: bytes, read_as: str) -> None:
    trace = given_bytes(file, document([slice_("aten::mm", 5, 6)]).replace(b'"aten::mm"', name))
    assert (trace.dropped, trace.names) == (0, [read_as])
    assert trace.cpu.end.tolist() == [6_000]


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(DataError, match="cannot read"):
            read(path)


def test_a_file_that_does_not_fit_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SPARE_MEMORY", 2**60)
    with pytest.raises(DataError, match="does not fit in memory"):
        read(write(tmp_path / "trace.json.gz", EVENTS))


@pytest.mark.parametrize(
    "about",
    [
        {"deviceProperties": 5, "distributedInfo": 7},
        {
            "deviceProperties": [5, {"name": None, "numSms": "many"}],
            "distributedInfo": {"rank": "first", "world_size": 1.5},
        },
    ],
)
def test_what_stands_beside_the_events_may_make_no_sense(file: Path, about: dict[str, Any]) -> None:
    trace = given_bytes(file, document(EVENTS, **about))
    assert (trace.rank, trace.world_size) == (None, None)


def test_an_operator_that_triton_compiled_keeps_its_arguments() -> None:
    trace = made(slice_("triton_poi_fused_add_0", 0, 1, "cpu_op", 1, grid="grid(100,)", stream=0, **SHAPES))
    assert trace.signatures[trace.cpu.signature[0]].dims == [[2, 3], [3, 4]]


def test_arguments_that_make_no_sense_cost_an_event_only_these() -> None:
    trace = made(work("k", 0, 1, correlation=7, bytes="4 KB", grid=[2, "x"], block=[2**40, 2**40]))
    device = trace.device
    assert [column.tolist() for column in (device.correlation, device.bytes, device.blocks, device.threads)] == [
        [7], [-1], [-1], [-1]
    ]  # fmt: skip


def test_streams_numbered_by_addresses_stay_apart() -> None:
    trace = made([work("k", 0, 1, stream=94_000_000_000_000 + place * 64) for place in range(5)])
    assert len(set(trace.device.stream.tolist())) == 5


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, -1, 2**31, 2**63, 10**30, 1e308, 2.0**53, float("nan"), float("-inf"), "", "nan", [], {}, [[]]]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
TOKENS = st.sampled_from(
    [b"NaN", b"1e400", b"\x00", b"\xff\xfe", b"}", b"},{", b"]", b"[" * 5000, b'"', b"\\ud800", b"9" * 5000, b"null"]
)
SHARE = st.floats(0, 1, exclude_max=True)


def cut(share: float) -> Damage:
    return lambda content: content[: round(share * len(content))]


def insert(share: float, token: bytes) -> Damage:
    return lambda content: content[: (at := round(share * len(content)))] + token + content[at:]


def flip(places: list[tuple[float, int]]) -> Damage:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        for share, mask in places:
            if changed:
                changed[int(share * len(changed))] ^= mask
        return bytes(changed)

    return damage


def replace(place: int, key: str, value: Any) -> Damage:
    """Of one event, in itself or in its arguments."""

    def damage(content: bytes) -> bytes:
        try:
            found = json.loads(content)
            event = found["traceEvents"][place % len(found["traceEvents"])]
            (event if key in event else event["args"])[key] = value
        except (ValueError, LookupError, TypeError, RecursionError):
            return content
        return json.dumps(found).encode()

    return damage


keys = st.sampled_from(
    ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "stream", "device", "correlation", "Input Dims"]
)
damages = st.one_of(
    st.builds(cut, SHARE),
    st.builds(insert, SHARE, TOKENS),
    st.builds(flip, st.lists(st.tuples(SHARE, st.integers(1, 255)), min_size=1, max_size=8)),
    st.builds(replace, st.integers(0, 20), keys, VALUES),
    st.builds(replace, st.integers(0, 20), keys, VALUES),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(damages, min_size=1, max_size=4), st.sampled_from([documents.PIECE, 600]), st.booleans(), st.randoms())
def test_a_damaged_trace_is_read_or_refused(
    file: Path, found: list[Damage], piece: int, compressed: bool, order: random.Random
) -> None:
    content = document(order.sample(EVENTS, len(EVENTS)), **ABOUT)
    for damage in found[1:]:
        content = damage(content)
    content = found[0](gzip.compress(content) if compressed else content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(documents, "PIECE", piece)
        try:
            trace = given_bytes(file, content)
        except DataError:
            return
    for columns in (trace.cpu, trace.device):
        assert (columns.start >= 0).all()
        assert (columns.end >= columns.start).all()
    assert np.array_equal(trace.device.start, np.sort(trace.device.start))
    assert len(trace.cpu) + len(trace.device) + trace.dropped <= trace.events
    causes = idle_causes(ProgramSlices.of(trace))
    assert all(spans.length >= 0 for spans in causes.values())


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "events", "slices", "works"),
    [
        ("hta_a100_nccl_rank0of2.json.gz", 40_573, 23_128, 3_774),
        ("hta_cpu_only_rank0.json.gz", 2_467, 2_467, 0),
        ("hta_v100_ddp_rank1of2.json.gz", 216_092, 101_088, 22_290),
        ("kineto_v100_resnet50_workers0.pt.trace.json.gz", 75_718, 35_569, 9_096),
        ("tracelens_h100_bert_small.json.gz", 2_551, 1_997, 61),
    ],
)
def test_real_traces_are_read_whole(name: str, events: int, slices: int, works: int) -> None:
    trace = read(PUBLIC / name)
    assert (trace.events, len(trace.cpu), len(trace.device)) == (events, slices, works)
    assert (trace.dropped, trace.truncated) == (0, False)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_memory_snapshot_is_not_taken_for_a_trace() -> None:
    with pytest.raises(DataError, match="pickle") as refused:
        read(PUBLIC / "snapshot_magma27_small.pickle")
    assert "gpubench memory --snapshot" in str(refused.value.hint)


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool = False) -> None:
    stream = SimpleNamespace(buffer=BufferedReader(BytesIO(content)), closed=False, isatty=lambda: terminal)
    monkeypatch.setattr("sys.stdin", stream)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    piped(monkeypatch, pack(document([step(1, 0, 9), slice_("aten::mm", 1, 3)])))
    found = read(Path("-"))
    assert found.label == "standard input"
    assert len(found.cpu) == 2


def test_a_terminal_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, b"", terminal=True)
    with pytest.raises(DataError, match="is a terminal") as refusal:
        read(Path("-"))
    assert "pipe a trace" in (refusal.value.hint or "")


def test_white_space_without_end_is_refused_early(tmp_path: Path) -> None:
    """By how much it shrank, before much is unpacked."""
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (40 * 2**20), 6))
    with pytest.raises(DataError, match="more than 400 times its size"):
        read(file)


def test_events_far_apart_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubench.trace.file.PIECE", 64)
    monkeypatch.setattr("gpubench.trace.file.MOST_PENDING", 1000)
    file = tmp_path / "trace.json"
    event = json.dumps(step(1, 0, 9)).encode()
    file.write_bytes(
        b'{"traceEvents": [' + event + b" " * 300 + b"," + b"\n" * 300 + event.replace(b"#1", b"#2") + b"]}"
    )
    assert len(read(file).cpu) == 2
    file.write_bytes(b'{"traceEvents": [' + b" " * 2000 + event + b"]}")
    with pytest.raises(DataError, match="no event ends within"):
        read(file)


def test_millions_of_escapes_take_memory_in_proportion_to_their_text() -> None:
    text = b"\\n" * 2**19 + b"\\ud800" + b"\\ud83d\\ude00\\\\ud800" * 2**10
    tracemalloc.start()
    try:
        found = documents.decodable(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == text.decode().replace("n\\ud800", "n\\ufffd")
    assert peak < 8 * len(text)
