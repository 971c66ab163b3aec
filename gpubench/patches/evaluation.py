"""Functions that only evaluate a model, and are to record no gradients."""

import builtins
import re
from collections.abc import Iterator

import libcst as cst

from gpubench.patches.idioms import Found
from gpubench.patches.source import SourceFile, object_of

NAMED = re.compile(r"(^|_)(eval|evaluate|evaluation|validate|validation|valid|val|test|accuracy)(_|$)")
SWITCHES = frozenset({"no_grad", "inference_mode", "enable_grad", "set_grad_enabled"})
TRAINING = frozenset({"step", "zero_grad", "requires_grad_", "requires_grad", "grad"})
DIFFERENTIATING = frozenset({"grad", "backward", "jacobian", "hessian", "jvp", "vjp", "jacrev", "jacfwd"})
"""The functions and methods that compute gradients, from whichever module."""
KEEPING = frozenset({"append", "extend", "add", "update"})
NUMBERS = frozenset({"float", "int", "len", "bool", "str", "round"})


def evaluations(source: SourceFile) -> Iterator[Found]:
    """A function of which the name and the code say that it evaluates, and which records gradients."""
    for function in source.all_of(cst.FunctionDef):
        if not NAMED.search(function.name.value) or not _calls_a_variable(source, function):
            continue
        methods = {one.attr.value for one in source.all_of(cst.Attribute, function)}
        if "backward" in methods or SWITCHES & (methods | {one.value for one in source.all_of(cst.Name, function)}):
            continue
        wanted = f"{source.place(function)} evaluates and records gradients: write @torch.no_grad() above it"
        if source.imported.get("torch") != "torch":
            yield Found(function, why=f"{wanted}, and import torch")
        elif reason := _doubt(source, function, methods):
            yield Found(function, why=f"{wanted}, unless {reason}")
        else:
            mark = cst.Decorator(cst.parse_expression("torch.no_grad()"))
            yield Found(function, {function: function.with_changes(decorators=[*function.decorators, mark])})


def _calls_a_variable(source: SourceFile, function: cst.FunctionDef) -> bool:
    """Whether a function calls a variable, or an attribute of its object, as it does a model."""
    known = {one.name.value for one in source.all_of(cst.FunctionDef)} | vars(builtins).keys()
    known |= {one.name.value for one in source.all_of(cst.ClassDef)}
    called = {source.text(one.func) for one in source.all_of(cst.Call, function)}
    variables = {one for one in called if one.isidentifier()} - known - source.imported.keys()
    return bool(variables) or any(re.fullmatch(r"self\.\w*(model|net)\w*", one) for one in called)


def _doubt(source: SourceFile, function: cst.FunctionDef, methods: set[str]) -> str:
    """Why a backward pass may need what a function computes; empty if none can."""
    if used := sorted(methods & TRAINING):
        return f"its {used[0]} needs gradients"
    if function.asynchronous or any(True for _ in source.all_of((cst.Yield, cst.Lambda), function.body)):
        return "its values are used before it ends"
    if any(True for _ in source.all_of((cst.Global, cst.Nonlocal), function)):
        return "its variables are used elsewhere"
    if any(one is not function for one in source.all_of(cst.FunctionDef, function)):
        return "a function in it is called elsewhere"
    if differentiates := _differentiates(source, function):
        return f"{source.place(differentiates)} differentiates"
    numbers = _numbers(source, function)
    leaving: list[tuple[cst.CSTNode, cst.BaseExpression]]
    leaving = [(one, one.value) for one in source.all_of(cst.Return, function) if one.value is not None]
    leaving += [(one, value) for one, target, value in _given(source, function) if not isinstance(target, cst.Name)]
    own = {source.text(one.target) for one in source.all_of(cst.AssignTarget, function)}
    for call in source.all_of(cst.Call, function):
        keeper = object_of(call, *KEEPING)
        if keeper is not None and source.text(keeper) not in own:
            leaving += [(call, arg.value) for arg in call.args]
    kept = next((one for one, value in leaving if not _is_number(source, value, numbers)), None)
    return f"{source.place(kept)} keeps a tensor for a backward pass" if kept else ""


def _differentiates(source: SourceFile, function: cst.FunctionDef) -> cst.Call | None:
    """The call by which a function, or one of the file that it calls, may compute gradients; None without one."""
    functions = {one.name.value: one for one in source.all_of(cst.FunctionDef)}
    waiting, seen = [function], {function}
    while waiting:
        for call in source.all_of(cst.Call, waiting.pop()):
            name = source.full_name(call.func)
            last = name.rpartition(".")[2]
            if last in DIFFERENTIATING or name.startswith(("torch.autograd.", "torch.func.")):
                return call
            if (called := functions.get(last)) is not None and called not in seen:
                seen.add(called)
                waiting.append(called)
    return None


def _given(
    source: SourceFile, function: cst.FunctionDef
) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression, cst.BaseExpression]]:
    """What a function assigns: the assignment, the target and the value, of tuples the parts."""
    for one in source.all_of(cst.CSTNode, function):
        if isinstance(one, cst.AugAssign) or (isinstance(one, cst.AnnAssign) and one.value is not None):
            assert one.value is not None
            yield one, one.target, one.value
        elif isinstance(one, cst.Assign):
            for each in one.targets:
                yield from ((one, *pair) for pair in _parts(each.target, one.value))


def _parts(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    if not isinstance(target, cst.Tuple):
        yield target, value
        return
    values = list(value.elements) if isinstance(value, cst.Tuple) else []
    for place, one in enumerate(target.elements):
        alike = len(values) == len(target.elements)
        yield one.value, values[place].value if alike else value


def _numbers(source: SourceFile, function: cst.FunctionDef) -> set[str]:
    """The variables of a function that are only ever given numbers."""
    given: dict[str, list[cst.BaseExpression]] = {}
    for _, target, value in _given(source, function):
        given.setdefault(source.text(target), []).append(value)
    found = set(given)
    while tensors := {name for name in found if not all(_is_number(source, value, found) for value in given[name])}:
        found -= tensors
    return found


def _is_number(source: SourceFile, value: cst.BaseExpression, numbers: set[str]) -> bool:
    """Whether an expression is a number or a text, or a collection of such."""

    def are(*parts: cst.BaseExpression) -> bool:
        return all(_is_number(source, one, numbers) for one in parts)

    if isinstance(value, cst.Integer | cst.Float | cst.SimpleString | cst.FormattedString):
        return True
    if isinstance(value, cst.Name):
        return value.value in numbers or value.value in ("True", "False", "None")
    if isinstance(value, cst.Call):
        function = source.full_name(value.func)
        reads = object_of(value, "item", "tolist") is not None
        chosen = function in ("max", "min", "abs", "sum") and are(*(arg.value for arg in value.args))
        return reads or chosen or function in NUMBERS or function.startswith("math.")
    if isinstance(value, cst.BinaryOperation):
        return are(value.left, value.right)
    if isinstance(value, cst.UnaryOperation):
        return are(value.expression)
    if isinstance(value, cst.Tuple | cst.List):
        return are(*(one.value for one in value.elements))
    if isinstance(value, cst.Dict):
        return all(isinstance(one, cst.DictElement) for one in value.elements) and are(
            *(one.value for one in value.elements)
        )
    return False
