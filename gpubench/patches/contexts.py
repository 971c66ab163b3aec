"""Puts a context around the forward pass of a model and its loss, such as that of autocast."""

from collections.abc import Iterator

import libcst as cst

from gpubench.patches.calls import Changed
from gpubench.patches.models import BINDING, model_call, targets
from gpubench.patches.source import NotEdited, SourceFile, object_of

MOST_STATEMENTS = 6
"""The largest number of statements from the call of a model to the backward pass that one context is put around."""
UNSAFE = frozenset({"binary_cross_entropy", "BCELoss"})
"""The losses that autocast refuses to compute on a GPU."""


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
    passes = [one for one in source.all_of(cst.Call) if object_of(one, "backward") is not None]
    if len(passes) > 1 and not (alone and len({source.scope(one) for one in passes}) == len(passes)):
        raise NotEdited(f"{wanted}, and around the other forward passes")
    deferred = (cst.Lambda, cst.BaseComp)
    statement = source.statement(call)
    if any(isinstance(one, deferred) for one in _up_to(source, call, statement)):
        raise NotEdited(wanted)
    block = source.block(statement)
    following = list(block.body)[list(block.body).index(statement) :]
    ends = [place for place, one in enumerate(following) if _has_backward(source, one)]
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


def _up_to(source: SourceFile, node: cst.CSTNode, end: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for one in source.ancestors(node):
        if one is end:
            return
        yield one


def _has_backward(source: SourceFile, statement: cst.CSTNode) -> bool:
    return any(object_of(one, "backward") is not None for one in source.all_of(cst.Call, statement))


def _names(source: SourceFile, node: cst.CSTNode) -> set[str]:
    """The variables that a node has in it, and all other names."""
    return {one.value for one in source.all_of(cst.Name, node)}


def _given(source: SourceFile, statements: list[cst.BaseStatement]) -> set[str]:
    """The names to which statements assign."""
    return {
        name for statement in statements for one in source.all_of(BINDING, statement) for name in targets(source, one)
    }


def _outputs(source: SourceFile, call: cst.Call) -> set[str]:
    """The names that a statement gives what a call returns, or parts of it."""
    value: cst.CSTNode = call
    for one in source.ancestors(call):
        if isinstance(one, cst.Assign):
            return set(targets(source, one))
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
    inner = [one for one in source.all_of(cst.Call, end) if object_of(one, "backward") is None]
    return any(_names(source, arg) & given for one in inner for arg in one.args)


def _in_numpy(
    source: SourceFile, outputs: set[str], scope: cst.CSTNode, after: list[cst.BaseStatement]
) -> cst.Call | None:
    """The first call from some statements on that makes an array of NumPy of what a model has returned."""
    begin = source.line(after[0])
    for call in source.all_of(cst.Call, scope):
        makes = object_of(call, "numpy", "__array__") is not None or source.full_name(call.func).startswith("numpy.")
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
