"""Checks the arguments of a callable of the user against its parameters, without importing its module."""

import ast
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpubench.errors import FEW, ModelError, UsageError, did_you_mean

ARGUMENTS = "model.arguments"
BINDING = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr"})
"""The functions by which a module may bind names that its source does not show."""
KINDS = frozenset({"bool", "int", "float", "str", "None", "NoneType"})


def check_arguments(name: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raises ModelError if the callable `name` does not take `arguments`, or not values of these kinds.

    The hint lists its parameters. A parameter without a plain annotation or default takes a value of any kind.
    """
    parameters = signature.parameters
    named = {key: one for key, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes = f"{name} takes {', '.join(map(str, parameters.values())) or 'no arguments'}"
    rest = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key, value in arguments.items():
        setting = f"{ARGUMENTS}.{key}"
        if key in named:
            kinds = _kinds(named[key])
            if kinds and not _is_of(value, kinds):
                message = f"{setting} = {value!r}: {name} takes {' or '.join(sorted(kinds))} here"
                raise ModelError(message, takes, keys=[setting])
        elif not rest:
            hint = f"{did_you_mean(key, named)} {takes}".lstrip()
            raise ModelError(f"{setting}: {name} has no parameter {key!r}", hint, keys=[setting])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        setting = f"set --{ARGUMENTS}.NAME=VALUE, or give the parameters defaults; {takes}"
        raise ModelError(f"model {name!r} cannot be called with these arguments: {error}", setting) from None


def _kinds(parameter: inspect.Parameter) -> set[str]:
    """The names of the types that a parameter takes; empty if unknown."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        known = {type(default).__name__} & (KINDS - {"NoneType"})
    else:
        text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        words = set(re.findall(r"\w+", text)) - {"typing", "Optional", "Union"}
        known = words if words <= KINDS else set()
        if "Optional" in text or default is None:
            known = known and known | {"None"}
    return {kind.replace("NoneType", "None") for kind in known}


def _is_of(value: Any, kinds: set[str]) -> bool:
    kind = type(value).__name__.replace("NoneType", "None")
    return kind in kinds or (kind == "int" and "float" in kinds)


def how_to_write() -> str:
    """The hint for the name of a callable that cannot be imported."""
    return f"write package.module:callable, without .py; the current directory {Path.cwd()} is searched first"


def refuse_missing(setting: str, name: str, refused: type[UsageError], keys: Sequence[str]) -> None:
    """Raises `refused` if there is no module of the callable `name`, or if its source shows that it has no such name.

    A name that is bound anywhere in the source counts, so that nothing is refused that an import would find. Nothing of
    the module is executed.
    """
    module, _, path = name.partition(":")
    attribute = path.partition(".")[0]
    package = module.partition(".")[0]
    if _is_missing(package):
        raise refused(
            f"{setting} {name!r} cannot be imported: ModuleNotFoundError: No module named {package!r}",
            f"{did_you_mean(package, _modules_here())} {how_to_write()}".lstrip(),
            keys=keys,
        )
    try:
        tree = ast.parse(_source(module))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    bound = _bound(tree)
    if not attribute or bound is None or attribute in bound or _is_submodule(module, attribute):
        return
    made = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    near = did_you_mean(attribute, made) or did_you_mean(attribute, bound)
    listed = f"it has {', '.join(made[:FEW])}" if made else "name a class or function of it"
    raise refused(f"{setting} {name!r}: module {module!r} has no attribute {attribute!r}", near or listed, keys=keys)


def _is_missing(package: str) -> bool:
    """Tells whether there is no module or package of this name, by looking for its file."""
    if package in sys.modules:
        return False
    try:
        return not (PathFinder.find_spec(package, [os.getcwd()]) or find_spec(package))  # noqa: PTH109
    except (ImportError, ValueError, AttributeError):
        return False


def _modules_here() -> list[str]:
    return [path.stem for path in Path().iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]


def _is_submodule(module: str, name: str) -> bool:
    try:
        _source(f"{module}.{name}")
    except OSError:
        return False
    return True


def _bound(tree: ast.Module) -> set[str] | None:
    """The names that are bound anywhere in a module; None if it may bind others, as by `from other import *`."""
    names = set[str]()
    for one in ast.walk(tree):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.alias):
            names.add(one.asname or one.name.partition(".")[0])
        elif isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            names.add(one.id)
        elif isinstance(one, ast.Name) and one.id in BINDING:
            return None
    return None if names & {"*", "__getattr__"} else names


def signature_in_source(name: str) -> inspect.Signature | None:
    """Reads the signature of the function `name` from its source; None if only an import would show it.

    That is so for classes, decorated functions and functions from elsewhere. Nothing of the module is executed.
    """
    module, _, attribute = name.partition(":")
    try:
        tree = ast.parse(_source(module))
    except (OSError, SyntaxError, ValueError):
        return None
    found = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == attribute]
    rebound = any(
        isinstance(one, ast.Name) and one.id == attribute and isinstance(one.ctx, ast.Store) for one in ast.walk(tree)
    )
    if len(found) != 1 or rebound or found[0].decorator_list:
        return None
    taken, made = found[0].args, list[inspect.Parameter]()
    plain = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(plain) - len(taken.defaults)) + [*taken.defaults]
    positional = zip(plain, defaults, strict=True)
    made += [
        _parameter(one, default, _POSITIONAL_ONLY if one in taken.posonlyargs else _POSITIONAL_OR_KEYWORD)
        for one, default in positional
    ]
    if taken.vararg:
        made.append(_parameter(taken.vararg, None, inspect.Parameter.VAR_POSITIONAL))
    pairs = zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    made += [_parameter(one, default, inspect.Parameter.KEYWORD_ONLY) for one, default in pairs]
    if taken.kwarg:
        made.append(_parameter(taken.kwarg, None, inspect.Parameter.VAR_KEYWORD))
    try:
        return inspect.Signature(made)
    except ValueError:  # two parameters of one name, which the import will report
        return None


_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class _Text(str):
    """An annotation or a default that is shown as it is written."""

    __slots__ = ()
    __repr__ = str.__str__


def _parameter(found: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    """A default that is not a constant is shown as its text."""
    empty = inspect.Parameter.empty
    value: Any = empty
    if default is not None:
        value = default.value if isinstance(default, ast.Constant) else _Text(ast.unparse(default))
    annotation = _Text(ast.unparse(found.annotation)) if found.annotation else empty
    return inspect.Parameter(found.arg, kind, default=value, annotation=annotation)


def _source(module: str) -> bytes:
    """The source of a module, which is looked up in the current directory first."""
    for folder in (os.getcwd(), *sys.path):  # noqa: PTH109
        path = Path(folder, *module.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file.read_bytes()
    raise FileNotFoundError(module)
