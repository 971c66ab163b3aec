"""What the edits of idioms have in common: where one is found, in which loop it is, and what else uses its names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import libcst as cst

from gpubench.patches.source import NotEdited, Replacements, SourceFile

Loop = cst.For | cst.While
FUNCTIONS = (cst.FunctionDef, cst.Lambda, cst.ClassDef)
READING = (
    *(cst.Arg, cst.BinaryOperation, cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation, cst.IfExp),
    *(cst.Return, cst.Assign, cst.Element, cst.DictElement, cst.FormattedStringExpression),
)
"""What a name may stand in directly where only its value is needed."""
GIVING = (cst.AsName, cst.Del, cst.Param, cst.Global, cst.Nonlocal, cst.ImportAlias)
TARGETED = (cst.For, cst.CompFor, cst.NamedExpr, cst.AugAssign, cst.AnnAssign)


@dataclass(frozen=True)
class Found:
    """An idiom in a file, and the nodes that replace some of it."""

    at: cst.CSTNode
    changed: Replacements = field(default_factory=dict)
    """Empty if no edit is certain to be right."""
    why: str = ""
    """What to write there by hand, and why that is not certain."""


class Use(NamedTuple):
    """A name in a function or module."""

    node: cst.Name
    given: cst.CSTNode | None
    """The number or the node that gives it a value here; None where its value is read."""


def loop_of(source: SourceFile, node: cst.CSTNode) -> Loop | None:
    """The innermost loop of the same function whose body a node is in; None if it is in none."""
    inner = node
    for one in source.ancestors(node):
        if isinstance(one, FUNCTIONS):
            return None
        if isinstance(one, Loop) and inner is one.body:
            return one
        inner = one
    return None


def in_each_step(source: SourceFile, node: cst.CSTNode, loop: Loop) -> bool:
    """Whether a node is evaluated each time that a loop goes round, and not only where a condition counts by `%`."""
    inner, is_rare = node, False
    for one in source.ancestors(node):
        if one is loop:
            repeated = (loop.body, loop.test) if isinstance(loop, cst.While) else (loop.body,)
            return not is_rare and any(inner is each for each in repeated)
        if isinstance(one, cst.If) and inner is one.body:
            is_rare = is_rare or any(True for _ in source.all_of(cst.Modulo, one.test))
        inner = one
    return False


def uses_of(source: SourceFile, name: str, node: cst.CSTNode) -> Sequence[Use]:
    """All uses of a name in the function or module of a node. Raises NotEdited if another function uses it as well."""
    scope = source.scope(node)
    found = []
    for one in source.all_of(cst.Name, scope):
        if one.value != name or _is_label(source, one):
            continue
        if source.scope(one) is not scope or any(isinstance(each, cst.ClassDef) for each in _up_to(source, one, scope)):
            raise NotEdited(f"{source.place(one)} uses {name} in another function")
        found.append(Use(one, _given(source, one)))
    if isinstance(scope, cst.FunctionDef) and any(
        isinstance(one.given, cst.Param | cst.Global | cst.Nonlocal) for one in found
    ):
        raise NotEdited(f"{name} is not a variable of its function alone")
    return found


def _up_to(source: SourceFile, node: cst.CSTNode, end: cst.CSTNode) -> Sequence[cst.CSTNode]:
    found = []
    for one in source.ancestors(node):
        if one is end:
            break
        found.append(one)
    return found


def _is_label(source: SourceFile, name: cst.Name) -> bool:
    """Whether a name is that of an attribute or of an argument in a call, and so no variable."""
    parent = next(source.ancestors(name))
    return (isinstance(parent, cst.Attribute) and parent.attr is name) or (
        isinstance(parent, cst.Arg) and parent.keyword is name
    )


def _given(source: SourceFile, name: cst.Name) -> cst.CSTNode | None:
    """What gives a name its value where it stands, a literal number as that; None where the value is read."""
    parent = next(source.ancestors(name))
    inner: cst.CSTNode = name
    for one in source.ancestors(name):
        if isinstance(one, cst.Assign):
            break
        if isinstance(one, GIVING):
            return one
        if isinstance(one, TARGETED) and inner is one.target:
            return _literal(one.value) or one if isinstance(one, cst.AnnAssign) else one
        inner = one
        if isinstance(one, cst.BaseStatement):
            break
    assign = next((one for one in source.ancestors(name) if isinstance(one, cst.Assign)), None)
    if assign is not None and inner is not assign.value:
        return _assigned(assign, name)
    is_shown = isinstance(parent, cst.FormattedStringExpression) and parent.equal is not None
    return None if isinstance(parent, READING) and not is_shown else parent


def _assigned(assign: cst.Assign, name: cst.Name) -> cst.CSTNode:
    """The literal that an assignment gives a name, also in a tuple; the assignment itself for another value."""
    for one in assign.targets:
        if one.target is name:
            return _literal(assign.value) or assign
        if isinstance(one.target, cst.Tuple) and isinstance(assign.value, cst.Tuple):
            pairs = zip(one.target.elements, assign.value.elements, strict=False)
            if len(one.target.elements) == len(assign.value.elements):
                return next((_literal(to.value) or assign for at, to in pairs if at.value is name), assign)
    return assign


def _literal(node: cst.BaseExpression | None) -> cst.Integer | cst.Float | None:
    return node if isinstance(node, cst.Integer | cst.Float) else None
