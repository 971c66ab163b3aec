"""Idioms of a training loop that cost time in every step, and what to write in their place."""

import re
from collections.abc import Iterator

import libcst as cst

from gpubench.patches.calls import with_argument
from gpubench.patches.idioms import Found, Loop, in_each_step, loop_of, uses_of
from gpubench.patches.source import NotEdited, SourceFile, object_of

NARROW = re.compile(r"\b(bfloat16|float16|half|bf16|fp16)\b")
"""The types in which a sum of many values is too inexact."""
GRAPHED = re.compile(r"CUDAGraph|cuda\.graph\(|make_graphed_callables")
FACTORIES = frozenset({"zeros", "ones", "full", "empty", "arange", "linspace", "eye"})
RANDOM = frozenset({"rand", "randn", "randint", "randperm", "normal"})
"""The functions of torch that give other numbers on another device."""
OF_THE_CPU = frozenset({"device", "out", "requires_grad", "pin_memory"})
"""Arguments with which a tensor made on the device is not the one that is moved there."""
READY = frozenset({"cpu", "detach"})
"""The methods by which a tensor is made ready to be read, of which `cpu` waits for it."""
COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
PASSING = frozenset({"enumerate", "tqdm", "tqdm.tqdm"})
"""What gives the batches of a loader unchanged."""


def zeroed_gradients(source: SourceFile) -> Iterator[Found]:
    """`zero_grad(set_to_none=False)`, which drops the gradients without the argument."""
    read = next((one for one in source.all_of(cst.Attribute) if one.attr.value == "grad"), None)
    graph = GRAPHED.search(source.tree.code)
    for call in source.all_of(cst.Call):
        if object_of(call, "zero_grad") is None or len(call.args) != 1:
            continue
        (arg,) = call.args
        if arg.star or (arg.keyword and arg.keyword.value != "set_to_none") or source.text(arg.value) != "False":
            continue
        unless = f"{source.place(read)} uses gradients" if read else f"{graph[0]} needs them" if graph else ""
        wanted = f"{source.place(call)} fills gradients with zeros: remove its argument"
        if unless:
            yield Found(call, why=f"{wanted}, after which they are None, unless {unless}")
        else:
            yield Found(call, {call: call.with_changes(args=[])})


def summed_values(source: SourceFile) -> Iterator[Found]:
    """A value that is read in each step and added to a number, which is to be added up on the device."""
    for node in source.all_of(cst.AugAssign):
        if not isinstance(node.operator, cst.AddAssign) or loop_of(source, node) is None:
            continue
        reads = [one for one in source.all_of(cst.Call, node.value) if _read(one) is not None]
        if not reads:
            continue
        total = source.text(node.target)
        try:
            yield Found(node, _summed_on_device(source, node, reads))
        except NotEdited as reason:
            advice = f"add up detached tensors in {total}, and read it after the loop"
            yield Found(node, why=f"{source.place(node)} reads a value in each step: {advice}; {reason}")


def _read(call: cst.Call) -> cst.BaseExpression | None:
    """The tensor whose value a call reads, by `.item()` or as `float(loss)`; None if it reads none."""
    if not call.args and (tensor := object_of(call, "item")) is not None:
        while (inner := object_of(tensor, *READY)) is not None:
            tensor = inner
        return tensor
    if isinstance(call.func, cst.Name) and call.func.value == "float" and len(call.args) == 1:
        value = call.args[0].value
        return value if isinstance(value, cst.Name) and not call.args[0].star else None
    return None


def _summed_on_device(source: SourceFile, node: cst.AugAssign, reads: list[cst.Call]) -> dict[cst.CSTNode, cst.CSTNode]:
    """What makes a sum one on the device. Raises NotEdited, with the reason, where a use of it is not certain."""
    loop, tensor = loop_of(source, node), _read(reads[0])
    assert loop is not None
    assert tensor is not None
    if isinstance(tensor, cst.Name) and _is_read_already(source, tensor):
        raise NotEdited(f"{tensor.value} is a number already")
    if not isinstance(node.target, cst.Name) or not _is_linear(source, node.value, reads[0]):
        raise NotEdited(f"it is {source.text(node)}")
    if narrow := NARROW.search(source.tree.code):
        raise NotEdited(f"{source.name} uses {narrow[0]}, in which a sum is inexact")
    name = node.target.value
    uses = uses_of(source, name, node)
    starts = [use.given for use in uses if isinstance(use.given, cst.Integer | cst.Float)]
    for use in uses:
        is_known = use.given is None or use.given is node or use.given in starts or _scales(source, use.given, loop)
        if not is_known:
            raise NotEdited(f"{source.place(use.node)} changes {name} too")
        if use.given is None and in_each_step(source, use.node, loop):
            raise NotEdited(f"{source.place(use.node)} uses {name} in each step")
    number = _number(source, tensor, starts, name)
    scaled = [use.node for use in uses if isinstance(use.given, cst.AugAssign) and use.given is not node]
    if scaled and number == "int":
        raise NotEdited(f"{source.place(scaled[0])} changes {name} too")
    changed: dict[cst.CSTNode, cst.CSTNode] = {
        use.node: cst.Call(cst.Name(number), [cst.Arg(use.node)]) for use in uses if use.given is None
    }
    detached = tensor if _counts(tensor) else cst.Call(cst.Attribute(tensor, cst.Name("detach")))
    return changed | {reads[0]: detached}


def _is_read_already(source: SourceFile, name: cst.Name) -> bool:
    """Whether a variable is given a value that was read from a tensor, so that it is a number and no tensor."""
    given = [one.value for one in source.all_of(cst.Assign, source.scope(name)) if _gives(source, one, name.value)]
    calls = [call for one in given for call in source.all_of(cst.Call, one)]
    return any(_read(call) is not None or object_of(call, "tolist") is not None for call in calls)


def _gives(source: SourceFile, node: cst.Assign, name: str) -> bool:
    return any(source.text(each.target) == name for each in node.targets)


def _scales(source: SourceFile, node: cst.CSTNode | None, loop: Loop) -> bool:
    """Whether a statement multiplies or divides a sum outside of the loop that adds it up."""
    scales = isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign | cst.MultiplyAssign)
    return scales and node is not None and loop not in source.ancestors(node)


def _is_linear(source: SourceFile, value: cst.BaseExpression, read: cst.Call) -> bool:
    """Whether an expression is a read value, or one multiplied or divided by something that reads none."""
    while value is not read:
        if not isinstance(value, cst.BinaryOperation) or not isinstance(value.operator, cst.Multiply | cst.Divide):
            return False
        is_left = any(one is read for one in source.all_of(cst.Call, value.left))
        if not is_left and isinstance(value.operator, cst.Divide):
            return False
        value, other = (value.left, value.right) if is_left else (value.right, value.left)
        if any(_read(one) is not None for one in source.all_of(cst.Call, other)):
            return False
    return True


def _number(source: SourceFile, tensor: cst.BaseExpression, starts: list[cst.Integer | cst.Float], name: str) -> str:
    """The type of the number that a sum has become: "float" or "int". Raises NotEdited if it is not certain."""
    if not starts:
        raise NotEdited(f"{name} does not start with a number")
    if all(isinstance(one, cst.Float) for one in starts) or "loss" in source.text(tensor).lower():
        return "float"
    if _counts(tensor) and all(isinstance(one, cst.Integer) for one in starts):
        return "int"
    raise NotEdited(f"it is not known whether {name} is a whole number")


def _counts(tensor: cst.BaseExpression) -> bool:
    """Whether a tensor is how many values are alike, as `(a == b).sum()`."""
    compared = object_of(tensor, "sum")
    return isinstance(compared, cst.Comparison) or (
        compared is not None and object_of(compared, *COMPARING) is not None
    )


def moved_tensors(source: SourceFile) -> Iterator[Found]:
    """A tensor that is made on the CPU and then moved to the device, which is to be made there."""
    for call in source.all_of(cst.Call):
        made = object_of(call, "to", "cuda")
        moves = object_of(call, "cuda") is not None or any(_is_device(source, arg) for arg in call.args)
        if not (isinstance(made, cst.Call) and moves and _is_made_often(source, call)):
            continue
        package, _, function = source.full_name(made.func).rpartition(".")
        if package != "torch" or function not in FACTORIES | RANDOM:
            continue
        device, wanted = _device(source, call), f"{source.place(call)} makes a tensor on the CPU and moves it: "
        wanted += f"give torch.{function} the device"
        if function in RANDOM:
            yield Found(call, why=f"{wanted}, where it makes other random numbers")
        elif device is None or any(
            arg.star == "**" or (arg.keyword and arg.keyword.value in OF_THE_CPU) for arg in made.args
        ):
            yield Found(call, why=wanted)
        else:
            there = with_argument(made, "device", device)
            yield Found(call, {call: there.with_changes(lpar=call.lpar, rpar=call.rpar)})


def _is_made_often(source: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node is in a loop, or in a function that is not called to make an object."""
    scope = source.scope(node)
    in_function = isinstance(scope, cst.FunctionDef) and scope.name.value != "__init__"
    return in_function or loop_of(source, node) is not None


def _device(source: SourceFile, call: cst.Call) -> str | None:
    """The code of the device to which a call moves a tensor and does nothing else; None if that is not certain."""
    args = [arg for arg in call.args if not (arg.keyword and arg.keyword.value == "non_blocking")]
    if object_of(call, "cuda") is not None:
        return None if args else '"cuda"'
    return source.text(args[0].value) if len(args) == 1 and _is_device(source, args[0]) else None


def _is_device(source: SourceFile, arg: cst.Arg) -> bool:
    """Whether an argument is a device without doubt, by its own name or by that of what it is given."""
    if arg.keyword or arg.star:
        return arg.keyword is not None and arg.keyword.value == "device"
    if isinstance(arg.value, cst.Name | cst.Attribute):
        return source.text(arg.value).rpartition(".")[2].lower() == "device"
    is_made = isinstance(arg.value, cst.Call) and source.full_name(arg.value.func) == "torch.device"
    return is_made or isinstance(arg.value, cst.SimpleString)


def blocking_copies(source: SourceFile) -> Iterator[Found]:
    """A batch that is moved to the device from page-locked memory, for which the CPU need not wait."""
    for call in source.all_of(cst.Call):
        loop, moved = loop_of(source, call), object_of(call, "to", "cuda")
        if moved is None or not isinstance(loop, cst.For):
            continue
        device = _device(source, call)
        batch = {one.value for one in source.all_of(cst.Name, loop.target)}
        is_blocking = not any(arg.keyword and arg.keyword.value == "non_blocking" for arg in call.args)
        if not isinstance(moved, cst.Name) or moved.value not in batch or device is None or not is_blocking:
            continue
        if device.strip("\"'") == "cpu":
            continue
        wanted = f"{source.place(call)} waits for the copy of a batch: give it non_blocking=True"
        if _is_changed_before(source, moved, call, loop):
            yield Found(call, why=f"{wanted}, if {moved.value} is still in page-locked memory")
        elif not _pins(source, loop.iter):
            yield Found(call, why=f"{wanted}, with a DataLoader that has pin_memory=True")
        else:
            yield Found(call, {call: with_argument(call, "non_blocking", "True")})


def _is_changed_before(source: SourceFile, name: cst.Name, call: cst.Call, loop: cst.For) -> bool:
    """Whether a loop may give a name another value before a call, in another statement."""
    try:
        uses = uses_of(source, name.value, call)
    except NotEdited:  # a function uses it as well
        return True
    given = [use.node for use in uses if use.given is not None and use.given is not loop]
    own = source.statement(call)
    return any(
        loop_of(source, one) is not None and source.statement(one) is not own and source.end(one) < source.end(call)
        for one in given
    )


def _pins(source: SourceFile, batches: cst.BaseExpression) -> bool:
    """Whether batches come from a DataLoader that puts them into page-locked memory."""
    while isinstance(batches, cst.Call) and batches.args and source.full_name(batches.func) in PASSING:
        batches = batches.args[0].value
    made = [
        one.value
        for one in source.all_of(cst.Assign)
        if any(source.text(each.target) == source.text(batches) for each in one.targets)
    ]
    if len(made) != 1 or not isinstance(made[0], cst.Call):
        return False
    pinned = [source.text(arg.value) for arg in made[0].args if arg.keyword and arg.keyword.value == "pin_memory"]
    return source.full_name(made[0].func).rpartition(".")[2] == "DataLoader" and pinned == ["True"]
