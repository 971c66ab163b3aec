"""One word for one thing: no two classes have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

import gpubench
from gpubench import commands


def test_no_class_name_is_defined_in_two_modules() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for folder in (gpubench, commands):
        for path in sorted(Path(str(folder.__file__)).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(path.name)
    assert len(found) > 300
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
