"""Finds where the program makes and calls a model, and changes it after the statement that makes it."""

import builtins
import sys
from collections.abc import Iterator

import libcst as cst

from gpubench.patches.calls import Changed
from gpubench.patches.source import Block, NotEdited, SourceFile, Statement, object_of

MOST_CALLERS = 4
"""How many calls of functions a model is followed through."""
MOVING = frozenset({"to", "cuda", "cpu", "float", "double", "half", "bfloat16", "train"})
"""The methods of a module that return it."""
BINDING = (cst.For, cst.With, cst.AnnAssign, cst.Assign, cst.AugAssign, cst.NamedExpr)
"""What gives a name its value, besides an import, a definition and a parameter."""


def after_made(source: SourceFile, line: int, code: str, name: str = "") -> Changed:
    """Adds a statement after the one that makes the model which `line` calls. `code` has its name as {}.

    Of several models, `name` is that of the one in the line. Raises NotEdited where the statement is not certain.
    """
    call = model_call(source, line, name)
    name = source.text(call.func)
    scope: cst.CSTNode = source.scope(call)
    wanted = f"{source.at(line)} calls {name}: after it is made, write {code.format(name)}"
    if name == "self":
        return _after_object(source, call, code)
    if isinstance(call.func, cst.Attribute):
        owner = next((one for one in source.ancestors(call) if isinstance(one, cst.ClassDef)), None)
        methods = {source.scope(one) for one in _binding(source, name, owner or source.tree)}
        if owner is None or len(methods) != 1:
            raise NotEdited(wanted)
        scope = methods.pop()
    else:
        for _ in range(MOST_CALLERS):
            if isinstance(scope, cst.Module) or _own(source, name, scope):
                break
            if not isinstance(scope, cst.FunctionDef) or _parameter(scope, name) is None:
                scope = source.scope(scope)
                continue
            call = _caller(source, scope, name, wanted)
            name, scope = source.text(_argument(source, call, scope, name, wanted)), source.scope(call)
        wanted = f"{source.at(line)} calls the model: after {name} is made, write {code.format(name)}"
    made = _own(source, name, scope)
    if not made or not all(isinstance(one, cst.Assign | cst.AnnAssign) for one in made):
        raise NotEdited(wanted)
    within = source.scope(call) is scope
    before = [one for one in made if source.line(one) < source.line(call)] if within else made
    if len(before) != len(made):
        raise NotEdited(wanted)
    block = _common(source, [*made, *([call] if within else [])])
    last = _statement_in(source, made[-1], block)
    if within and _statement_in(source, call, block) is last:  # they are in a loop or in two branches
        raise NotEdited(wanted)
    return Changed(source.with_after(last, block, code.format(name)), source.end(last)[0])


def _after_object(source: SourceFile, call: cst.Call, code: str) -> Changed:
    """Adds a statement after the only one that makes an object of the class whose method calls the object itself."""
    owner = next((one for one in source.ancestors(call) if isinstance(one, cst.ClassDef)), None)
    wanted = f"{source.place(call)} calls the model in a method of its own: after it is made, write {code.format('it')}"
    if owner is None:
        raise NotEdited(wanted)
    calls = [one for one in source.all_of(cst.Call) if source.text(one.func) == owner.name.value]
    made = source.statement(calls[0]) if len(calls) == 1 else None
    assign = made.body[0] if isinstance(made, cst.SimpleStatementLine) and len(made.body) == 1 else None
    if made is None or not isinstance(assign, cst.Assign) or _moved(assign.value) is not calls[0]:
        raise NotEdited(wanted)
    name = assign.targets[0].target
    if len(assign.targets) != 1 or not isinstance(name, cst.Name):
        raise NotEdited(wanted)
    return Changed(source.with_after(made, source.block(made), code.format(name.value)), source.end(made)[0])


def _moved(value: cst.BaseExpression) -> cst.BaseExpression:
    """What an expression makes and then moves or casts, such as the call in `Net().to(device)`."""
    while (moved := object_of(value, *MOVING)) is not None:
        value = moved
    return value


def model_call(source: SourceFile, line: int, name: str = "") -> cst.Call:
    """The call of a variable at a line, of several the one that is evaluated first, or that of the `name`.

    Raises NotEdited without one.
    """
    functions = {node.name.value for node in source.all_of(cst.FunctionDef)}
    functions |= {node.name.value for node in source.all_of(cst.ClassDef)}
    known = functions | source.imported.keys() | vars(builtins).keys()
    calls = [one for one in source.calls_at(line) if _is_variable(one.func) and source.text(one.func) not in known]
    calls = [one for one in calls if source.text(one.func) == name] if name else calls
    if not calls:
        raise NotEdited(f"{source.at(line)} does not show by which name it calls the model")
    return min(calls, key=source.end)


def _is_variable(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Attribute):
        return isinstance(node.value, cst.Name) and node.value.value == "self"
    return isinstance(node, cst.Name)


def _binding(source: SourceFile, name: str, within: cst.CSTNode) -> list[cst.CSTNode]:
    """What assigns to a name or an attribute below a node, in the order of the source."""
    return [one for one in source.all_of(BINDING, within) if name in targets(source, one)]


def _own(source: SourceFile, name: str, scope: cst.CSTNode) -> list[cst.CSTNode]:
    """What assigns to a name in a function or the module, and not in a function inside of it."""
    return [one for one in _binding(source, name, scope) if source.scope(one) is scope]


def targets(source: SourceFile, node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.Assign):
        found: list[cst.CSTNode] = [one.target for one in node.targets]
    elif isinstance(node, cst.With):
        found = [one.asname.name for one in node.items if one.asname]
    elif isinstance(node, cst.For | cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
        found = [node.target]
    else:
        found = []
    while found:
        each = found.pop()
        if isinstance(each, cst.Tuple | cst.List):
            found += [one.value for one in each.elements]
        else:
            yield source.text(each)


def _parameter(function: cst.FunctionDef, name: str) -> int | None:
    """The place of a parameter of a function, behind all others if it has only a name; None for a name that is none."""
    params = function.params
    names = [one.name.value for one in (*params.posonly_params, *params.params)]
    if name in [one.name.value for one in params.kwonly_params]:
        return sys.maxsize
    return names.index(name) if name in names else None


def _caller(source: SourceFile, function: cst.FunctionDef, name: str, wanted: str) -> cst.Call:
    """The call of a function, the first of several that give it the same. Raises NotEdited without a certain one."""
    called = function.name.value
    same = [one for one in source.all_of(cst.FunctionDef) if one.name.value == called]
    calls = [one for one in source.all_of(cst.Call) if source.text(one.func) == called]
    given = {(source.text(_argument(source, one, function, name, wanted)), source.scope(one)) for one in calls}
    if len(same) != 1 or len(given) != 1:
        raise NotEdited(wanted)
    return calls[0]


def _argument(
    source: SourceFile, call: cst.Call, function: cst.FunctionDef, name: str, wanted: str
) -> cst.BaseExpression:
    """The variable that a call gives to a parameter. Raises NotEdited where it is not one, or not certain."""
    place = _parameter(function, name)
    assert place is not None
    keyword = next((arg for arg in call.args if arg.keyword and arg.keyword.value == name), None)
    plain = [arg for arg in call.args if not arg.keyword]
    arg = keyword or (plain[place] if place < len(plain) else None)
    if arg is None or any(one.star for one in call.args) or not isinstance(arg.value, cst.Name):
        raise NotEdited(wanted)
    return arg.value


def _common(source: SourceFile, nodes: list[cst.CSTNode]) -> Block:
    """The innermost block that all nodes are in."""
    chains = [[one for one in source.ancestors(node) if isinstance(one, Block)] for node in nodes]
    return next(block for block in chains[0] if all(any(block is one for one in chain) for chain in chains))


def _statement_in(source: SourceFile, node: cst.CSTNode, block: Block) -> Statement:
    """The statement of a block that a node is in."""
    chain = {id(one) for one in (node, *source.ancestors(node))}
    return next(one for one in block.body if id(one) in chain)
