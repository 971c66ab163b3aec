"""Sets what concerns all of PyTorch at the start of the program: after its imports, or first in its main code."""

from collections.abc import Sequence
from dataclasses import replace

import libcst as cst

from gpubench.patches import calls
from gpubench.patches.calls import Changed
from gpubench.patches.source import Block, NotEdited, SourceFile, Statement


def called(source: SourceFile, function: str, value: str) -> Changed:
    """Calls a function of torch, such as "set_num_threads", with a value; changes the call that there is already."""
    made = [one for one in source.all_of(cst.Call) if source.full_name(one.func) == f"torch.{function}"]
    if len(made) == 1 and _runs_once(source, made[0]):
        return calls.changed(source, made[0], {"": value}, ("",))
    if made:
        raise NotEdited(_elsewhere(source, made, f"call it with {value} only"))
    return _added(source, f"{{}}.{function}({value})")


def assigned(source: SourceFile, attribute: str, value: str) -> Changed:
    """Assigns a value to an attribute of torch; changes the assignment that there is already."""
    full = f"torch.{attribute}"
    made = [one for one in source.all_of(cst.Assign) for each in one.targets if source.full_name(each.target) == full]
    if len(made) == 1 == len(made[0].targets) and _runs_once(source, made[0]):
        return Changed(source.with_changed(made[0].value, cst.parse_expression(value)), source.line(made[0]))
    if made:
        raise NotEdited(_elsewhere(source, made, f"set {full} to {value} only"))
    return _added(source, f"{{}}.{attribute} = {value}")


def _runs_once(source: SourceFile, node: cst.CSTNode) -> bool:
    """Whether a node is evaluated whenever the file runs as a script, in itself or in a function that it then calls."""
    for one in source.ancestors(node):
        if isinstance(one, cst.Module):
            return True
        if isinstance(one, cst.FunctionDef):
            starts = [each for each in source.all_of(cst.Call) if source.text(each.func) == one.name.value]
            is_first = len(starts) == 1 and isinstance(source.scope(starts[0]), cst.Module)
            return is_first and _runs_once(source, starts[0])
        if isinstance(one, cst.If) and _is_guard(one) and isinstance(source.block(one), cst.Module):
            return True
        if isinstance(one, cst.BaseCompoundStatement | cst.IfExp | cst.BooleanOperation | cst.Lambda | cst.BaseComp):
            return isinstance(one, cst.With) and _runs_once(source, one)
    raise AssertionError("every node is in a module")


def _elsewhere(source: SourceFile, made: Sequence[cst.CSTNode], wanted: str) -> str:
    """Why what sets something already is not changed."""
    if len(made) > 1:
        return f"{source.place(made[0])} and other lines set it: {wanted}"
    return f"{source.place(made[0])} sets it where that may not run, or together with something else: {wanted}"


def _added(source: SourceFile, code: str) -> Changed:
    """Adds a statement to the start of a script. `code` has the name of torch as {}."""
    module = source.tree
    name, last = _torch_and_last_import(source)
    if last is None:
        raise NotEdited(f"{source.name} imports nothing: at its start, write {code.format('torch')}")
    if name is None:
        if "torch" in source.imported and source.imported["torch"] != "torch":
            raise NotEdited(f"{source.name} calls something else torch: at its start, write {code.format('torch')}")
        content = source.with_after(last, module, "import torch")
        return Changed(_added(replace(source, content=content), code).content, source.end(last)[0])
    guard = next((one for one in module.body if isinstance(one, cst.If) and _is_guard(one)), None)
    if guard is not None and isinstance(guard.body, cst.IndentedBlock):
        return Changed(source.with_after(None, guard.body, code.format(name)), source.line(guard))
    return Changed(source.with_after(last, module, code.format(name), apart=True), source.end(last)[0])


def is_script(source: SourceFile) -> bool:
    """Whether a file has code that runs only if it is started itself."""
    return any(isinstance(one, cst.If) and _is_guard(one) for one in source.tree.body)


def _is_guard(node: cst.If) -> bool:
    test = node.test
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return False
    sides = [test.left, test.comparisons[0].comparator]
    names = {one.value for one in sides if isinstance(one, cst.Name)}
    texts = {one.evaluated_value for one in sides if isinstance(one, cst.SimpleString)}
    return isinstance(test.comparisons[0].operator, cst.Equal) and "__name__" in names and "__main__" in texts


def _torch_and_last_import(source: SourceFile) -> tuple[str | None, Statement | None]:
    """What the file calls torch, and the last of the imports in a row of which one is that of torch.

    Where it does not import torch in a statement of its own, they are the first in a row; None without one.
    """
    body = list(source.tree.body)
    names = [_name_of_torch(source, one) for one in body]
    imports = [_imports(source, one) for one in body]
    first = next((place for place, name in enumerate(names) if name), None)
    name = None if first is None else names[first]
    if first is None:
        first = next((place for place, is_import in enumerate(imports) if is_import), None)
    if first is None:
        return None, None
    end = next((place for place in range(first + 1, len(body)) if not imports[place]), len(body))
    return name, body[end - 1]


def _imports(source: SourceFile, statement: cst.CSTNode) -> bool:
    """Whether a statement only imports, itself or by what it tries."""
    if isinstance(statement, cst.SimpleStatementLine):
        return all(isinstance(one, cst.Import | cst.ImportFrom) for one in statement.body)
    if isinstance(statement, cst.Try) and isinstance(statement.body, Block):
        return all(_imports(source, one) for one in statement.body.body)
    return False


def _name_of_torch(source: SourceFile, statement: cst.CSTNode) -> str | None:
    """The name by which a statement imports torch; None if it does not."""
    for one in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        for each in one.names if isinstance(one, cst.Import) else ():
            full = source.text(each.name)
            if full == "torch" and each.asname:
                return source.text(each.asname.name)
            if full.partition(".")[0] == "torch" and not each.asname:
                return "torch"
    return None
