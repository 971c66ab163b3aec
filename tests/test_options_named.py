"""What a message advises can be typed: every option that any of them names is one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_options import known

import gpubench

SOURCES = Path(gpubench.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w.-]*")
OF_OTHERS = {
    "--nproc-per-node": "torchrun",
    "--standalone": "torchrun",
    "--node-rank": "torchrun",
    "--master-addr": "torchrun",
    "--disable-cuda-graph": "SGLang",
    "--binary": "git",
    "--compile": "an argument of a program",
    "--new": "an argument of a program",
    "--no-color": "git",
    "--old": "an argument of a program",
    "--export-json": "hyperfine",
    "--ignore-failure": "hyperfine",
    "--benchmark-json": "pytest-benchmark",
    "--benchmark-save-data": "pytest-benchmark",
    "--epochs": "an argument of a program",
    "--gpu-bind": "Slurm",
    "--porcelain": "git",
    "--deleted": "git",
    "--detach": "git",
    "--end-of-options": "git",
    "--ignore-submodules": "git",
    "--no-ext-diff": "git",
    "--no-textconv": "git",
    "--shortstat": "git",
    "--multiprocessing-fork": "Python",
    "--null": "git",
    "--add": "git",
    "--git-common-dir": "git",
    "--global": "git",
    "--quiet": "git",
    "--submodule": "git",
    "--max-count": "git",
    "--format": "git",
    "--encoding": "git",
    "--object-format": "git",
    "--absolute-git-dir": "git",
    "--file": "git",
    "--no-includes": "git",
    "--list": "git",
    "--stage": "git",
    "--show-toplevel": "git",
    "--is-shallow-repository": "git",
    "--unshallow": "git",
    "--verify": "git",
    "--branch": "git",
    "--template": "git",
    "--untracked-files": "git",
    "--oneline": "git",
    "--execute": "Jupyter",
    "--to": "Jupyter",
    "--no-": "begins the opposite of a setting",
    "--section.key": "stands for any setting",
    "--KEY": "stands for any setting",
}


def named(source: str) -> Iterator[tuple[int, str]]:
    """Line and option of each that a string names, but for docstrings, which nobody is shown."""
    tree = ast.parse(source)
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            for found in OPTION.finditer(node.value):
                yield node.lineno, found.group()


def fits(option: str, options: set[str]) -> bool:
    """One that ends in a dot is the beginning of several, whose ends are filled in."""
    return option.rstrip(".") in options or (option.endswith(".") and any(one.startswith(option) for one in options))


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in SOURCES.rglob("*.py")} | {SOURCES / "commands"}),
    ids=lambda path: path.name,
)
def test_every_option_that_is_named_exists(folder: Path) -> None:
    options = known() | OF_OTHERS.keys()
    assert [
        f"{path.name}:{line} {option}"
        for path in sorted(folder.glob("*.py"))
        for line, option in named(path.read_text())
        if not fits(option, options)
    ] == []


def test_what_does_not_exist_would_be_found() -> None:
    source = """def f():\n    "--of-a-docstring"\n    g("use --repeats or --no-such.", f"try --training.{x}", "a--b")"""
    assert [option for _, option in named(source)] == ["--repeats", "--no-such.", "--training."]
    assert [option for _, option in named(source) if not fits(option, known())] == ["--no-such."]
