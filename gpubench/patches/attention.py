"""Attention that is written out, and that `scaled_dot_product_attention` computes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from gpubench.patches.idioms import Found, uses_of
from gpubench.patches.source import NotEdited, Replacements, SourceFile, object_of

SOFTMAX = frozenset({"torch.softmax", "torch.nn.functional.softmax"})
MATMUL = frozenset({"torch.matmul", "torch.bmm"})
OTHERS = ("torch.einsum",)
"""Other matrix products, which are not edited."""
FUSED = "torch.nn.functional.scaled_dot_product_attention"


class _Written(NamedTuple):
    """A value that is written in place of a name, with the statement that gives it the name."""

    value: cst.BaseExpression
    made: tuple[cst.BaseStatement, ...]


def written_out(source: SourceFile) -> Iterator[Found]:
    """A product of queries and keys, its softmax, and the product with values: without mask and without dropout."""
    for softmax in source.all_of(cst.Call):
        of = _of_softmax(source, softmax)
        if of is None or not _is_multiplied(source, softmax):
            continue
        wanted = f"{source.place(softmax)} may be attention written out: {FUSED.rpartition('.')[2]} computes it at once"
        try:
            yield Found(softmax, _fused(source, softmax, of))
        except NotEdited as reason:
            yield Found(softmax, why=f"{wanted}; {reason}")


def _of_softmax(source: SourceFile, call: cst.Call) -> cst.BaseExpression | None:
    """What a call takes the softmax of along the last dimension; None if it is not such a call."""
    args = list(call.args)
    if source.full_name(call.func) in SOFTMAX and args and not args[0].keyword:
        value, rest = args[0].value, args[1:]
    elif (tensor := object_of(call, "softmax")) is not None:
        value, rest = tensor, args
    else:
        return None
    is_last = len(rest) == 1 and source.text(rest[0].value) == "-1" and not rest[0].star
    named = is_last and (rest[0].keyword is None or rest[0].keyword.value == "dim")
    return value if named else None


def _is_multiplied(source: SourceFile, softmax: cst.Call) -> bool:
    """Whether a matrix product has the softmax in it, or the name that it is given."""
    assign = next((one for one in source.ancestors(softmax) if isinstance(one, cst.Assign)), None)
    names = {source.text(one.target) for one in assign.targets} if assign else set()
    for one in source.all_of(cst.BaseExpression, source.scope(softmax)):
        is_product = isinstance(one, cst.BinaryOperation) and isinstance(one.operator, cst.MatrixMultiply)
        is_product = is_product or (isinstance(one, cst.Call) and source.full_name(one.func) in (*MATMUL, *OTHERS))
        if is_product and _has(source, one, softmax, names):
            return True
    return False


def _has(source: SourceFile, node: cst.CSTNode, call: cst.Call, names: set[str]) -> bool:
    if any(one is call for one in source.all_of(cst.Call, node)):
        return True
    return any(one.value in names for one in source.all_of(cst.Name, node))


def _fused(source: SourceFile, softmax: cst.Call, of: cst.BaseExpression) -> Replacements:
    scores = _value(source, of)
    removed = list(scores.made)
    value, scale = _unscaled(source, scores.value)
    product = _value(source, value)
    removed += product.made
    if scale is None:
        value, scale = _unscaled(source, product.value)
        product = _Written(value, ())
    queries, keys = _product(source, product.value)
    keys = _transposed(source, keys)
    whole, values, made = _with_values(source, softmax)
    removed += made
    own = source.statement(whole)
    if any(source.block(one) is not source.block(own) for one in removed):
        raise NotEdited("its parts are not in one block")
    names = {one.value for part in (queries, keys, values) for one in source.all_of(cst.Name, part)}
    for one in _between(source, [*removed, own]):
        if one not in removed and any(each.value in names for each in source.all_of(cst.Name, one)):
            raise NotEdited(f"{source.place(one)} uses what it multiplies")
    code = f"{_name(source)}({source.text(queries)}, {source.text(keys)}, {source.text(values)}"
    given = "" if _is_default(source, scale, queries, keys) else f", scale={_scale(source, scale)}"
    return {whole: cst.parse_expression(f"{code}{given})")} | dict.fromkeys(removed, cst.RemoveFromParent())


def _between(source: SourceFile, statements: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    body = list(source.block(statements[0]).body)
    places = [body.index(one) for one in statements]
    return [one for one in body[min(places) : max(places)] if isinstance(one, cst.BaseStatement)]


def _value(source: SourceFile, node: cst.BaseExpression) -> _Written:
    """What an expression is, or what its name was given for this use alone."""
    if not isinstance(node, cst.Name):
        return _Written(node, ())
    assign = next(assign for assign, read in _given_and_read(source, node) if read is node)
    return _Written(assign.value, (source.statement(assign),))


def _given_and_read(source: SourceFile, name: cst.Name) -> Sequence[tuple[cst.Assign, cst.Name]]:
    """The assignments to a name, each with the only use of its value.

    Raises NotEdited unless these are plain statements of one block.
    """
    elsewhere = NotEdited(f"{name.value} is used or changed elsewhere")
    block = source.block(name)
    uses = []
    for node, given in uses_of(source, name.value, name):
        statement = source.statement(node)
        if source.block(statement) is not block or not isinstance(statement, cst.SimpleStatementLine):
            raise elsewhere
        uses.append((list(block.body).index(statement), given is not None, node, given))
    uses.sort(key=lambda use: use[:2])  # a statement reads its values before it gives a name another one
    pairs = []
    for (_, is_given, _, given), (_, is_given_too, read, _) in zip(uses[::2], uses[1::2], strict=False):
        if not isinstance(given, cst.Assign) or not is_given or is_given_too:
            raise elsewhere
        if len(given.targets) != 1 or not isinstance(given.targets[0].target, cst.Name):
            raise elsewhere
        pairs.append((given, read))
    if 2 * len(pairs) != len(uses):
        raise elsewhere
    return pairs


def _unscaled(
    source: SourceFile, value: cst.BaseExpression
) -> tuple[cst.BaseExpression, tuple[str, cst.BaseExpression] | None]:
    """A product and by what it is multiplied or divided; None for a value that is neither."""
    if isinstance(value, cst.BinaryOperation):
        if isinstance(value.operator, cst.Divide) and _is_float(source, value.right):
            return value.left, ("/", value.right)
        if isinstance(value.operator, cst.Multiply):
            for product, scale in ((value.left, value.right), (value.right, value.left)):
                if _is_float(source, scale):
                    return product, ("*", scale)
    return value, None


def _is_float(source: SourceFile, node: cst.BaseExpression) -> bool:
    """Whether an expression is a number of Python without doubt: a root, or a literal."""
    if isinstance(node, cst.Call):
        return source.full_name(node.func) == "math.sqrt"
    if isinstance(node, cst.BinaryOperation):
        power = isinstance(node.operator, cst.Power) and source.text(node.right).strip("-") in (
            "0.5",
            "(-0.5)",
            "(0.5)",
        )
        divided = isinstance(node.operator, cst.Divide) and isinstance(node.left, cst.Integer | cst.Float)
        return (power and _is_size(source, node.left)) or (divided and _is_float(source, node.right))
    return isinstance(node, cst.Integer | cst.Float)


def _is_size(source: SourceFile, node: cst.BaseExpression) -> bool:
    text = source.text(node)
    return isinstance(node, cst.Integer) or text.endswith((".size(-1)", ".shape[-1]"))


def _product(source: SourceFile, node: cst.BaseExpression) -> tuple[cst.BaseExpression, cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return node.left, node.right
    if isinstance(node, cst.Call) and source.full_name(node.func) in MATMUL and len(node.args) == 2:
        return node.args[0].value, node.args[1].value
    raise NotEdited(f"{source.text(node)} is not one product of two matrices")


def _transposed(source: SourceFile, node: cst.BaseExpression) -> cst.BaseExpression:
    """The keys, of which the last two dimensions are exchanged."""
    keys = object_of(node, "transpose")
    dims = {source.text(one.value) for one in node.args} if isinstance(node, cst.Call) else set()
    if keys is not None and dims == {"-1", "-2"}:
        return keys
    if isinstance(node, cst.Attribute) and node.attr.value == "mT":
        return node.value
    raise NotEdited(f"{source.text(node)} is not known to be transposed keys")


def _with_values(
    source: SourceFile, softmax: cst.Call
) -> tuple[cst.BaseExpression, cst.BaseExpression, tuple[cst.BaseStatement, ...]]:
    """The product of the softmax with the values, the values, and the statement that gives the softmax a name."""
    parent = next(source.ancestors(softmax))
    weights: cst.BaseExpression = softmax
    made: tuple[cst.BaseStatement, ...] = ()
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0].target, cst.Name):
        pairs = _given_and_read(source, parent.targets[0].target)
        weights = next(read for assign, read in pairs if assign is parent)
        made = (source.statement(softmax),)
        parent = next(source.ancestors(weights))
    if isinstance(parent, cst.Arg):
        parent = next(source.ancestors(parent))
    if isinstance(parent, cst.BinaryOperation | cst.Call):
        left, values = _product(source, parent)
        if left is weights:
            return parent, values, made
    raise NotEdited("its result is not only multiplied by values")


def _is_default(
    source: SourceFile, scale: tuple[str, cst.BaseExpression] | None, queries: cst.CSTNode, keys: cst.CSTNode
) -> bool:
    """Whether a product is divided by the root of the size of its queries, as it is without a scale."""
    if scale is None:
        return False
    ends = [f"{source.text(one)}{end}" for one in (queries, keys) for end in (".size(-1)", ".shape[-1]")]
    sign, value = scale
    text = source.text(value).strip("()").replace(" ", "")
    roots = [root for end in ends for root in (f"math.sqrt({end})", f"{end}**0.5")]
    inverse = [f"{one}/{root}" for root in roots for one in ("1", "1.0")]
    inverse += [f"{end}**-0.5" for end in ends]
    wanted = {one.strip("()").replace(" ", "") for one in (roots if sign == "/" else inverse)}
    return text in wanted


def _scale(source: SourceFile, scale: tuple[str, cst.BaseExpression] | None) -> str:
    if scale is None:
        return "1.0"
    return source.text(scale[1]) if scale[0] == "*" else f"1 / {_grouped(source, scale[1])}"


def _grouped(source: SourceFile, node: cst.BaseExpression) -> str:
    text = source.text(node)
    return f"({text})" if isinstance(node, cst.BinaryOperation) and not node.lpar else text


def _name(source: SourceFile) -> str:
    """What the file calls the function."""
    for local, full in source.imported.items():
        if full == FUSED:
            return local
        if full == "torch.nn.functional":
            return f"{local}.scaled_dot_product_attention"
    if source.imported.get("torch") == "torch":
        return FUSED
    raise NotEdited("torch is not imported by its name")
