"""The names that a program's own source gives to its model and its batch."""

import ast
import builtins
import re
from collections.abc import Mapping
from pathlib import Path

from gpubench import foreign_files, units

Names = Mapping[str, str]
"""What a program calls the "model", the "batch" and "device.type" that the code of a fix names."""
UNNAMED: Names = {}


def names_of(places: Mapping[str, str], directory: Path, device: str | None) -> Names:
    """The names at the call of the model, and the type of its device, as far as they are known.

    `places` are those of `events.ModelBuilt`, relative to `directory`.
    """
    found = {"device.type": f'"{device}"'} if device else {}
    file, _, line = places.get("model", "").partition(" (")[0].rpartition(":")
    if file and (number := units.whole(line)):
        found |= _of_call(directory / file, number)
    return found


def renamed(code: str, names: Names) -> str:
    """The code of a fix with the program's own names."""
    for general, own in names.items():
        code = re.sub(rf"(?<![\w.]){re.escape(general)}(?!\w)", lambda _, own=own: own, code)  # type: ignore[misc]
    return code


def _of_call(path: Path, line: int) -> dict[str, str]:
    """The names of the module that a line calls, and of its first argument; {} if the source does not show them."""
    try:
        tree = ast.parse(foreign_files.content(path))
        nodes = list(ast.walk(tree))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    functions |= {name.asname or name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and _is_variable(node.func)
        and ast.unparse(node.func) not in functions | vars(builtins).keys()
    ]
    if not calls:
        return {}
    call = min(calls, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0))  # the one that is evaluated first
    found = {"model": ast.unparse(call.func)}
    if call.args and _is_variable(call.args[0]):
        found["batch"] = ast.unparse(call.args[0])
    return found


def _is_variable(node: ast.expr) -> bool:
    """Whether an expression is a name, or an attribute of `self`."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name)
