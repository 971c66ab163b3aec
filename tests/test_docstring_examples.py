"""The examples in docstrings: each prints what it says."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from places import ROOT
from traces_made import launched, step, write

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "gpubench").rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_packages_that_are_of_use_alone_show_it() -> None:
    assert {"gpubench.settings", "gpubench.trace", "gpubench.memory", "gpubench.kinds"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_an_example_in_a_docstring_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "trace.json", [step(0, 0, 100), *launched("relu", at=10, start=20, end=60, correlation=1)])
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
