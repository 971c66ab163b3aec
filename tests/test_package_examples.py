"""The examples in the docstrings of packages do what they show."""

import doctest
import importlib
from pathlib import Path

import pytest
from recorded_runs import write_run
from traces_made import launched, slice_, step, write

PACKAGES = ("runs", "compare", "report", "diagnosis", "tuning")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with two runs, of which the second takes four fifths of the time, and a trace."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("results"), "before")
    write_run(Path("results"), "after", pace=0.8)
    steps = [
        event
        for number, start in enumerate(range(0, 4000, 1000))
        for event in (
            step(number, start, start + 1000),
            slice_("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 600),
            *launched("gemm", start + 610, start + 620, start + 990, correlation=number + 1),
        )
    ]
    write(Path("trace.json"), steps)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", PACKAGES)
def test_the_example_of_a_package_does_what_it_shows(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"gpubench.{name}"))
    assert tried
    assert not failed
