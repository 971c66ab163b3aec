"""Whatever happens to a run directory, reading it works or says which file is at fault."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import write_run

from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.errors import GpubenchError
from gpubench.runs.directory import CONFIG, ENVIRONMENT, RUN, STEPS, SUMMARY, TELEMETRY

Damage = Callable[[Path], None]

FILES = st.sampled_from([RUN, SUMMARY, STEPS, TELEMETRY, CONFIG, ENVIRONMENT])
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


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pristine"), repeats=2, ranks=2, steps=16)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(damages=st.lists(st.tuples(FILES, DAMAGES), min_size=1, max_size=3, unique_by=lambda damage: damage[0]))
def test_a_damaged_run_reads_or_is_refused_by_name(pristine: Path, damages: list[tuple[str, Damage]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / pristine.name
        shutil.copytree(pristine, path)
        for name, damage in damages:
            damage(path / name)
        run = refused = None
        try:
            run = open_run(path)
        except GpubenchError as error:
            refused = error
        if run:
            check(run)
        else:
            assert refused
            assert str(path) in refused.message
            assert "\n" not in refused.message


def check(run: RunEvidence) -> None:
    """What holds of everything that opens."""
    assert isinstance(run.telemetry, list)
    assert (run.steps.total > 0).all()
    for metric in run.metrics:
        for series in run.series(metric) or []:
            assert len(series)
            assert np.isfinite(series).all()
    for problem in run.problems:
        assert problem.startswith(str(run.path))
        assert "\n" not in problem
