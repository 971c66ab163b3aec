"""Changes a model of the program: after the statement that makes it, or where it is called in training."""

import builtins
import sys
from collections.abc import Iterator

import libcst as cst

from gpubench.patches.calls import Changed
from gpubench.patches.source import Block, NotEdited, SourceFile, Statement

MOST_CALLERS = 4
"""How many calls of functions a model is followed through."""
MOST_STATEMENTS = 6
"""The largest number of statements from the call of a model to the backward pass that one context is put around."""
UNSAFE = frozenset({"binary_cross_entropy", "BCELoss"})
"""The losses that autocast refuses to compute on a GPU."""
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
    while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in MOVING:
        value = value.func.value
    return value


def within_context(source: SourceFile, line: int, context: str, name: str = "", *, alone: bool = True) -> Changed:
    """Puts a context around the call of the model and what follows it up to the backward pass.

    `name` is that of the model in the line, as far as it is known, and `alone` means that the program has no other one.
    Raises NotEdited where these statements are not certain.
    """
    call = model_call(source, line, name)
    wanted = f"{source.at(line)} calls the model: put `with {context}:` around it and the loss"
    narrow = [one for one in source.all_of(cst.Call) if source.full_name(one.func).endswith(("autocast", "GradScaler"))]
    if narrow:
        used = f"{source.place(narrow[0])} uses autocast or a GradScaler already"
        raise NotEdited(f"{used}: make it with {context}, and no GradScaler")
    unsafe = [one for one in source.all_of(cst.Call) if source.full_name(one.func).rpartition(".")[2] in UNSAFE]
    if unsafe and '"cpu"' not in context:
        loss = source.full_name(unsafe[0].func).rpartition(".")[2]
        raise NotEdited(f"{wanted}, but not around {loss} at {source.place(unsafe[0])}, which autocast refuses there")
    passes = [one for one in source.all_of(cst.Call) if source.text(one.func).endswith(".backward")]
    if len(passes) > 1 and not (alone and len({source.scope(one) for one in passes}) == len(passes)):
        raise NotEdited(f"{wanted}, and around the other forward passes")
    deferred = (cst.Lambda, cst.BaseComp)
    statement = source.statement(call)
    if any(isinstance(one, deferred) for one in _up_to(source, call, statement)):
        raise NotEdited(wanted)
    block = source.block(statement)
    following = list(block.body)[list(block.body).index(statement) :]
    ends = [place for place, one in enumerate(following) if _calls(one, "backward")]
    inside = following[: ends[0]] if ends else []
    while len(inside) > 1 and _only_calls(inside[-1]) and not _names(source, inside[-1]) & _given(source, inside):
        inside.pop()  # such as zero_grad()
    if not 0 < len(inside) <= MOST_STATEMENTS or not all(_is_plain(one) for one in inside):
        raise NotEdited(wanted)
    if _computes_loss(source, following[ends[0]], call, inside):
        raise NotEdited(wanted)
    outputs = _outputs(source, call)
    if converted := _in_numpy(source, outputs, source.scope(call), following[ends[0] :]):
        raise NotEdited(f"{wanted}, and convert what {source.place(converted)} gives NumPy, which has no bfloat16")
    first = inside[0]
    assert isinstance(first, cst.SimpleStatementLine)
    parsed = cst.parse_statement(f"with {context}:\n    pass\n", config=source.tree.config_for_parsing)
    assert isinstance(parsed, cst.With)
    body = [first.with_changes(leading_lines=[]), *inside[1:]]
    new = parsed.with_changes(body=parsed.body.with_changes(body=body), leading_lines=first.leading_lines)
    place = list(block.body).index(statement)
    statements = [*block.body[:place], new, *block.body[place + len(inside) :]]
    return Changed(source.with_changed(block, block.with_changes(body=statements)), source.line(statement))


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
    return [one for one in source.all_of(BINDING, within) if name in _targets(source, one)]


def _own(source: SourceFile, name: str, scope: cst.CSTNode) -> list[cst.CSTNode]:
    """What assigns to a name in a function or the module, and not in a function inside of it."""
    return [one for one in _binding(source, name, scope) if source.scope(one) is scope]


def _targets(source: SourceFile, node: cst.CSTNode) -> Iterator[str]:
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


def _up_to(source: SourceFile, node: cst.CSTNode, end: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for one in source.ancestors(node):
        if one is end:
            return
        yield one


def _calls(node: cst.CSTNode, name: str) -> bool:
    waiting: list[cst.CSTNode] = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, cst.Call) and isinstance(each.func, cst.Attribute) and each.func.attr.value == name:
            return True
        waiting += each.children
    return False


def _names(source: SourceFile, node: cst.CSTNode) -> set[str]:
    """The variables that a node has in it, and all other names."""
    return {one.value for one in source.all_of(cst.Name, node)}


def _given(source: SourceFile, statements: list[cst.BaseStatement]) -> set[str]:
    """The names to which statements assign."""
    return {
        name for statement in statements for one in source.all_of(BINDING, statement) for name in _targets(source, one)
    }


def _outputs(source: SourceFile, call: cst.Call) -> set[str]:
    """The names that a statement gives what a call returns, or parts of it."""
    value: cst.CSTNode = call
    for one in source.ancestors(call):
        if isinstance(one, cst.Assign):
            return set(_targets(source, one))
        if not (isinstance(one, cst.Attribute | cst.Subscript) and one.value is value):
            return set()
        value = one
    return set()


def _computes_loss(source: SourceFile, end: cst.CSTNode, call: cst.Call, inside: list[cst.BaseStatement]) -> bool:
    """Whether the statement with the backward pass computes the loss itself, from what the model has returned."""
    outputs, given = _outputs(source, call), _given(source, inside)
    for one in source.all_of(cst.Name, end):
        parent = next(source.ancestors(one))
        of_model = isinstance(parent, cst.Attribute) and parent.value is one and parent.attr.value == "loss"
        if one.value in outputs and not of_model:
            return True
    inner = [one for one in source.all_of(cst.Call, end) if not _is_backward(one)]
    return any(_names(source, arg) & given for one in inner for arg in one.args)


def _is_backward(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"


def _in_numpy(
    source: SourceFile, outputs: set[str], scope: cst.CSTNode, after: list[cst.BaseStatement]
) -> cst.Call | None:
    """The first call from some statements on that makes an array of NumPy of what a model has returned."""
    begin = source.line(after[0])
    for call in source.all_of(cst.Call, scope):
        is_method = isinstance(call.func, cst.Attribute) and call.func.attr.value in ("numpy", "__array__")
        makes = is_method or source.full_name(call.func).startswith("numpy.")
        if makes and source.line(call) >= begin and _names(source, call) & outputs:
            return call
    return None


def _only_calls(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and all(isinstance(one, cst.Expr) for one in node.body)


def _is_plain(node: cst.CSTNode) -> bool:
    """Whether a statement only assigns or calls, so that it may stand in a context."""
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(one, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.Expr) for one in node.body
    )
