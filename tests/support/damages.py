"""What can happen to a file: parts of it are lost, changed, repeated or replaced, or it is no file any more."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[Path], None]

VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, 0, -1, 10**30, 1e308, -0.0, float("nan"), float("inf"), "", "running", [], {}, [[]]]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
TOKENS = st.sampled_from(
    [b"NaN", b"1e400", b"\x00", b"\xff\xfe", b"}", b"[" * 5000, b'"', b"\n", b"\\ud800", b"9" * 5000]
)


def cut(share: float) -> Damage:
    def damage(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: round(share * file.stat().st_size)])

    return damage


def flip(places: list[tuple[float, int]]) -> Damage:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        for share, mask in places:
            content[int(share * len(content))] ^= mask
        file.write_bytes(content)

    return damage


def insert(share: float, token: bytes) -> Damage:
    def damage(file: Path) -> None:
        content = file.read_bytes()
        place = round(share * len(content))
        file.write_bytes(content[:place] + token + content[place:])

    return damage


def repeat_lines(first: float, count: int) -> Damage:
    def damage(file: Path) -> None:
        lines = file.read_bytes().splitlines(keepends=True)
        start = int(first * len(lines))
        file.write_bytes(b"".join(lines[start:] + lines[start : start + count] + lines[:start]))

    return damage


def remove(file: Path) -> None:
    file.unlink()


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def swap_values(choices: list[float], value: Any) -> Damage:
    """Puts `value` somewhere into each JSON document of the file; a file of something else becomes `value`."""

    def damage(file: Path) -> None:
        text = file.read_text()
        try:
            documents = [json.loads(text)]
        except ValueError:
            try:
                documents = [json.loads(line) for line in text.splitlines()]
            except ValueError:
                documents = [value]
        file.write_text("\n".join(json.dumps(swapped(document, choices, value)) for document in documents))

    return damage


def swapped(document: Any, choices: list[float], value: Any) -> Any:
    """`document` with `value` at the place that `choices` lead to, a child at each level."""
    if not choices or not isinstance(document, dict | list) or not document:
        return deepcopy(value)
    keys = list(document) if isinstance(document, dict) else range(len(document))
    key = keys[int(choices[0] * len(keys))]
    document[key] = swapped(document[key], choices[1:], value)
    return document


SHARES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.one_of(
    st.builds(cut, SHARES),
    st.builds(flip, st.lists(st.tuples(SHARES, st.integers(1, 255)), min_size=1, max_size=8)),
    st.builds(insert, SHARES, TOKENS),
    st.builds(repeat_lines, SHARES, st.integers(0, 5)),
    st.builds(swap_values, st.lists(SHARES, max_size=4), VALUES),
    st.sampled_from([remove, make_folder, make_loop]),
)
