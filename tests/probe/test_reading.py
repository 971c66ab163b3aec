"""Which calls count as reading a file, and for how long."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpubench.probe import reading
from gpubench.probe.reading import ReadTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(ns=0)
    monkeypatch.setattr(reading, "perf_counter_ns", lambda: now.ns)
    monkeypatch.setattr(reading, "thread_time_ns", lambda: now.ns // 2)
    return now


@pytest.fixture
def times() -> ReadTimes:
    stages: Any = SimpleNamespace(current="dataset")
    return ReadTimes(stages)


def test_a_call_is_known_again_though_python_gives_it_as_a_new_object(
    clock: SimpleNamespace, times: ReadTimes, tmp_path: Path
) -> None:
    (tmp_path / "some").write_bytes(b"some")
    with (tmp_path / "some").open("rb", buffering=0) as file:
        for event in ("c_return", "c_exception"):
            assert file.read is not file.read  # as the two events have it from Python 3.12 on
            times._see(None, "c_call", file.read)
            clock.ns += 1000
            times._see(None, event, file.read)
            clock.ns += 7
    assert times.found == {"dataset": [2000, 1000, 2]}


def test_other_calls_and_files_do_not_end_a_read(clock: SimpleNamespace, times: ReadTimes, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).touch()
    with (tmp_path / "one").open("rb") as one, (tmp_path / "other").open("rb") as other:
        times._see(None, "c_call", one.read)
        for call in (len, other.read, one.tell):
            times._see(None, "c_return", call)
        assert not times.found
        clock.ns += 10
        times._see(None, "c_return", one.read)
    assert times.found == {"dataset": [10, 5, 1]}


def test_a_real_file_is_read_and_memory_is_not(times: ReadTimes, tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"some" * 1000)
    memory = io.BytesIO(b"some")
    times.start()
    try:
        memory.read()
        with (tmp_path / "some").open("rb", buffering=0) as file:
            while file.read(1000):
                pass
        with pytest.raises(FileNotFoundError):
            (tmp_path / "none").read_bytes()
    finally:
        times.stop()
    ((stage, (wall, _, calls)),) = times.found.items()
    assert (stage, calls) == ("dataset", 7)  # two files are opened, and one is read five times
    assert wall > 0
