"""What can be wrong with a file. Each takes a path and a generator of chance, and leaves something else at the path."""

import gzip
import json
import os
import pickletools
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

Mutation = Callable[[Path, Random], None]

HUGE = 2 << 30
"""Bytes of a file that is larger than the memory a case may have; it has holes and takes no room."""
SPARSE = 0.02  # of the cases: such a file takes its time
HOSTILE = "<script>alert(1)</script>"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r"
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 2**31, 2**53 + 1, -(2**63), 2**64, 10**40, 1e308, -1e-320, float("nan"), float("inf"), "",
    "x", HOSTILE, ESCAPES, "\ud800", "a" * 5000, "../../../etc/passwd", "=cmd|' /C calc'!A0", "{{ 7 * 7 }}", "[bold]",
    "%s%n", "\x00", [], {}, [[]], {"": None}, [1] * 2000, {"a": {"b": {"c": {}}}}, [HOSTILE, None], {HOSTILE: ESCAPES},
]  # fmt: skip
BYTES = [
    b"\x00", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r", b'"', b"\\", b"\\ud800", b"{", b"}",
    b"[", b"]", b",", b":", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\x1b[2J", b"[" * 3000, b'{"a":' * 3000,
    b"\x80\x04", b"\x1f\x8b\x08", b"PK\x03\x04", b"=1+1", b"'", b";", b"\t", b"<script>alert(1)</script>",
]  # fmt: skip
ANCHORS = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
MERGES = "\n".join(
    ["m0: &m0 {k: 1}", *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 12))]
)
YAMLS = [
    ANCHORS, MERGES, "a: &a [*a]", "a: &a {b: *a}", "<<: 5", "<<: [1, 2]", "*unknown", "? [1, 2]\n: 3", "? {a: b}\n: c",
    "a: !!python/object/apply:os.system [touch owned]", "a: !!python/name:os.system",
    "a: !!python/object/new:os.abort []",
    "!!python/object/apply:subprocess.Popen\n- touch owned", "a: !!timestamp x", "a: 2026-99-99", "a: 2026-11-22",
    "a: !!int x", "a: !!float x", "a: !!bool x", "a: !!binary '%'", "a: !!set {b, c}", "a: !!omap [b: c]",
    "a: !!null x",
    "a: =", "a: .nan", "a: 190:20:30:99999999999999999999", "a: 0x" + "f" * 9000, "a: " + "9" * 5000, "a: 0o7",
    "a: 1_0",
    "a: 1e400", "\ta: b", "a: b: c", "a:\n b:\n  - c", "---\n---\n", "%YAML 9.9\n---\na: b", "a: |\n b\n", "5: 6",
    "a: " + "[" * 5000, "a: " + "{b: " * 5000, "- " * 3000, "'", "a: \"\\uD800\"", "a: \x07", "training: 5",
    "training: []",
    "training:\n  steps:\n    deeper: 1", "training.steps: 5", f"'{HOSTILE}': 1", "seed: 1\nseed: 2", "null: 1",
    "? \n: ",
]  # fmt: skip
NAMES = ("0", "sample_0", "a.b", "__class__", "schema_version", HOSTILE, ESCAPES)


def mutate(path: Path, random: Random, *, pipes: bool) -> str:
    """Something is done to the valid file at `path`; what, in a few words. Without `pipes` it does not become one."""
    ways: list[Mutation] = [*BROKEN, *BROKEN, *UNUSUAL, *[pipe] * pipes]
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        ways += [swap, swap, swap, double, *[value] * 8]
    if path.suffix == ".yaml":
        ways += [yaml_line, yaml_line, yaml_value, yaml_value]
    if path.suffix == ".pickle":
        ways += [opcodes, opcodes, opcodes]
    if content.startswith(b"\x1f\x8b"):
        ways += [inside, inside, inside, bomb]
    done = [sparse if random.random() < SPARSE else random.choice(ways)]
    done[0](path, random)
    if done[0] not in (*UNUSUAL, pipe, bomb, sparse) and random.random() < 0.3:
        done.append(random.choice(BROKEN))
        done[1](path, random)
    return f"{path.name}: {' and '.join(way.__name__.replace('_', ' ') for way in done)}"


def _rewriting(change: Callable[[bytes, Random], bytes]) -> Mutation:
    def rewrite(path: Path, random: Random) -> None:
        path.write_bytes(change(path.read_bytes(), random))

    rewrite.__name__ = change.__name__
    return rewrite


@_rewriting
def flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(min(len(changed), random.choice([1, 1, 4, 32]))):
        changed[random.randrange(len(changed))] ^= random.randrange(1, 256)
    return bytes(changed)


@_rewriting
def cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


@_rewriting
def drop(content: bytes, random: Random) -> bytes:
    first, last = sorted(random.randrange(len(content) + 1) for _ in range(2))
    return content[:first] + content[last:]


@_rewriting
def repeat(content: bytes, random: Random) -> bytes:
    first, last = sorted(random.randrange(len(content) + 1) for _ in range(2))
    times = min(random.choice([1, 2, 1000]), 2**22 // (last - first + 1))
    return content[:last] + content[first:last] * times + content[last:]


@_rewriting
def insert(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(BYTES) + content[place:]


@_rewriting
def yaml_line(content: bytes, random: Random) -> bytes:
    lines = content.decode(errors="replace").splitlines()
    lines.insert(random.choice([0, len(lines), random.randrange(len(lines) + 1)]), random.choice(YAMLS))
    return "\n".join(lines).encode(errors="surrogatepass")


@_rewriting
def yaml_value(content: bytes, random: Random) -> bytes:
    lines = content.decode(errors="replace").splitlines()
    places = [number for number, line in enumerate(lines) if ":" in line]
    if places:
        place = random.choice(places)
        value = random.choice([*(line.partition(": ")[2] for line in YAMLS), *map(_as_yaml, VALUES)])
        lines[place] = f"{lines[place].partition(':')[0]}: {value}"
    return "\n".join(lines).encode(errors="surrogatepass")


def _as_yaml(value: Any) -> str:
    return json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")


@_rewriting
def swap(content: bytes, random: Random) -> bytes:
    """Values, or keys, of the JSON in it are others."""
    documents, lined = _documents(content)
    for _ in range(random.choice([1, 1, 3])):
        if documents:
            place = random.randrange(len(documents))
            documents[place] = _swapped(documents[place], random)
    separator = "\n" if lined else ""
    return separator.join(json.dumps(document) for document in documents).encode()


def _swapped(document: Any, random: Random) -> Any:
    if not isinstance(document, dict | list) or not document or random.random() < 0.1:
        return deepcopy(random.choice(VALUES))
    if isinstance(document, list):
        place = random.randrange(len(document))
        document[place] = _swapped(document[place], random)
        return document
    key = random.choice(list(document))
    match random.randrange(8):
        case 0:
            del document[key]
        case 1:
            document[random.choice(NAMES)] = document.pop(key)
        case _:
            document[key] = _swapped(document[key], random)
    return document


@_rewriting
def value(content: bytes, random: Random) -> bytes:
    """Values of the JSON in it are others of their type, which a reader has no reason to expect."""
    documents, lined = _documents(content)
    for _ in range(random.choice([1, 1, 1, 3])):
        by_kind: dict[tuple[object, ...], list[tuple[Any, Any]]] = {}
        for place in _places(documents, ()):
            by_kind.setdefault(place[0], []).append(place[1:])
        if by_kind:  # each kind is as likely as any other, however many values of it there are
            holder, key = random.choice(random.choice(list(by_kind.values())))
            holder[key] = random.choice(_others(holder[key]))
    return ("\n" if lined else "").join(json.dumps(document) for document in documents).encode()


def _places(holder: Any, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], Any, Any]]:
    """Each value with its path, in which the items of a list are alike, and what holds it by which key."""
    for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        here = (*path, key if isinstance(holder, dict) else None)
        yield here, holder, key
        if isinstance(item, dict | list):
            yield from _places(item, here)


def _others(value: Any) -> list[Any]:
    """Values of the same type that may be out of range."""
    match value:
        case bool():
            return [not value]
        case int():
            return [-1, 0, 1, value + 1, -value, 2**31, 2**53 + 1, 2**63 - 1, 2**64, 10**40]
        case float():
            return [-1.0, 0.0, -0.0, 1e-308, 1e308, -1e308, -value, 1e18, 1e70, value * 1e6]
        case str():
            return [
                "",
                f"{value} more",
                f"{value} one more",
                value * 2,
                " ".join(value.split()[1:]),
                "x" * 5000,
                HOSTILE,
            ]
        case list():
            return [[], value[:-1], value + value[-1:], value[1:], value[::-1], value * 50]
        case dict():
            return [{}, dict(list(value.items())[1:])]
        case _:
            return [0, -1, 1e308, "", [], {}]


@_rewriting
def double(content: bytes, random: Random) -> bytes:
    """A key stands there twice, with two values."""
    text = content.decode(errors="replace")
    places = [at for at, char in enumerate(text) if char == "{"]
    if not places:
        return content
    at = random.choice(places) + 1
    key = text[at:].lstrip().partition(":")[0] if text[at:].lstrip().startswith('"') else '"x"'
    return f"{text[:at]}{key}: {json.dumps(random.choice(VALUES))}, {text[at:]}".encode(errors="surrogatepass")


def _documents(content: bytes) -> tuple[list[Any], bool]:
    """The JSON in it, and whether it is in lines; nothing where it is none."""
    try:
        return [json.loads(content)], False
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in content.splitlines() if line.strip()], True
    except ValueError:
        return [], False


@_rewriting
def opcodes(content: bytes, random: Random) -> bytes:
    """Of a pickle: one is another, is gone, is there twice, or many are there."""
    found = [(at or 0) for _, _, at in pickletools.genops(content)]
    number = random.randrange(1, len(found))
    first, last = found[number], [*found, len(content)][number + 1]
    other = bytes([ord(random.choice(pickletools.opcodes).code)])
    replacement = random.choice(
        [b"", content[first:last] * 2, other, other + content[first + 1 : last], other * 5000, b"\x94" + other]
    )
    return content[:first] + replacement + content[last:]


@_rewriting
def inside(content: bytes, random: Random) -> bytes:
    """Of what is compressed."""
    changed = random.choice([_flipped, _inserted, _exchanged])(gzip.decompress(content), random)
    return gzip.compress(changed, 1)


def _flipped(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    changed[random.randrange(len(changed))] ^= random.randrange(1, 256)
    return bytes(changed)


def _inserted(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(BYTES) + content[place:]


def _exchanged(content: bytes, random: Random) -> bytes:
    return json.dumps(_swapped(json.loads(content), random)).encode()


def bomb(path: Path, random: Random) -> None:
    """A thousand times what it takes on the disk: of spaces, of brackets, of events that are none.

    Time is to be in proportion to what it unpacks to, so that is 96 MiB at the most.
    """
    unit = random.choice([b" ", b"[", b"{},", b'{"ph":"X"},', b'"', b"9", b"\\"])
    piece = unit * (2**20 // len(unit))
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(random.choice([b'{"traceEvents":[', b"[", b""]))
        for _ in range(random.choice([8, 96])):
            file.write(piece)


def empty(path: Path, random: Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, random: Random) -> None:
    path.unlink()


def folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path, random: Random) -> None:
    """That nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def loop(path: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def dead_link(path: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def link(path: Path, random: Random) -> None:
    """To something else that is there."""
    path.unlink()
    path.symlink_to(random.choice(["/dev/null", "/dev/zero", "/dev/full", "/etc/hostname", "..", "/proc/self/mem"]))


def sparse(path: Path, random: Random) -> None:
    """Nothing but zeros behind what was there, and more of them than there is memory."""
    with path.open("ab") as file:
        file.truncate(HUGE)


def closed(path: Path, random: Random) -> None:
    path.chmod(0)


def copied(path: Path, random: Random) -> None:
    """Another file of the same folder, whole."""
    others = sorted(one for one in path.parent.iterdir() if one != path and one.is_file())
    if others:
        shutil.copyfile(random.choice(others), path)


BROKEN: list[Mutation] = [flip, cut, drop, repeat, insert]
UNUSUAL: list[Mutation] = [empty, remove, folder, loop, dead_link, link, closed, copied]
