"""Callables of the user that are missing are refused before anything starts, and nothing of their module is run."""

from pathlib import Path

import pytest

from gpubench.errors import ModelError
from gpubench.settings.callables import refuse_missing


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(name: str) -> ModelError | None:
    try:
        refuse_missing("model", name, ModelError, ["model.name"])
    except ModelError as error:
        return error
    return None


def test_a_misspelt_attribute_is_refused_with_the_nearest_name(here: Path) -> None:
    (here / "mymodel.py").write_text("raise SystemExit\ndef build(): ...\nclass Net: ...\n")
    assert refusal("mymodel:build") is None
    found = refusal("mymodel:biuld")
    assert found
    assert (found.message, found.hint) == (
        "model 'mymodel:biuld': module 'mymodel' has no attribute 'biuld'", "did you mean 'build'?"
    )  # fmt: skip
    other = refusal("mymodel:zzz")
    assert other
    assert other.hint == "it has build, Net"


def test_a_misspelt_module_is_refused_with_the_nearest_file(here: Path) -> None:
    (here / "mymodel.py").touch()
    found = refusal("mymodle:build")
    assert found
    assert "No module named 'mymodle'" in found.message
    assert (found.hint or "").startswith("did you mean 'mymodel'?")
    assert refusal("json:loads") is None, "a module of another folder"


@pytest.mark.parametrize(
    "source",
    [
        "from other import *",
        "def __getattr__(name): ...",
        "globals()['build'] = 1",
        "if True:\n    from other import make as build",
        "build = make()",
        "for build in makers: pass",
        "try:\n    import build\nexcept ImportError:\n    pass",
        "def define():\n    global build\n    build = 1",
        "(build := 3)",
        "not a program",
    ],
)
def test_what_an_import_may_find_is_left_to_it(here: Path, source: str) -> None:
    (here / "mymodel.py").write_text(source)
    assert refusal("mymodel:build") is None
    assert refusal("mymodel:build.inner") is None


def test_a_submodule_may_be_an_attribute_of_its_package(here: Path) -> None:
    (here / "package").mkdir()
    (here / "package" / "__init__.py").touch()
    (here / "package" / "nets.py").touch()
    assert refusal("package:nets.build") is None
    assert refusal("package:other") is not None
