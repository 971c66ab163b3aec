"""The examples in docstrings: each prints what it says."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from places import ROOT
from recorded_runs import write_run
from traces_made import launched, slice_, step, write

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "gpubench").rglob("*.py"))
    if ">>> " in path.read_text()
]
SHOWN = {"compare", "diagnosis", "kinds", "memory", "report", "runs", "settings", "trace", "tuning"}
"""The packages that are of use alone. `probe` is loaded inside foreign programs, and others need processes."""
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


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
            slice_(LOADER, start, start + 600),
            *launched("gemm", start + 610, start + 620, start + 990, correlation=number + 1),
        )
    ]
    write(Path("trace.json"), steps)


def test_packages_that_are_of_use_alone_show_it() -> None:
    assert {f"gpubench.{name}" for name in SHOWN} <= set(MODULES)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", MODULES)
def test_an_example_in_a_docstring_prints_what_it_says(name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
