"""Changes the arguments of a call of the program."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import libcst as cst

from gpubench.patches.source import AlreadySo, NotEdited, SourceFile, is_call_of

LITERALS = (cst.Integer, cst.Float, cst.SimpleString, cst.UnaryOperation)
CONSTANTS = ("True", "False", "None")
PARSING = ("parse_args", "parse_known_args")
"""The methods of a parser of options."""

Arguments = Mapping[str, str | None]
"""The code of each argument by its name; None removes it."""


class Changed(NamedTuple):
    """The content of the file after an edit, and the line that it changes in the file as it was before."""

    content: bytes
    line: int


def changed(
    source: SourceFile,
    call: cst.Call,
    arguments: Arguments,
    positional: Sequence[str] = (),
    words: Collection[str] = (),
) -> Changed:
    """Gives a call these arguments.

    `positional` are the names of its parameters in their order, and `words` those of the program's command. Where an
    argument is an option of the program's own, or a name that is assigned once, the default of the option or the
    assignment is changed. Raises NotEdited where no change is certain to be right.
    """
    given = _given(source, call, arguments, positional)
    asked = {name: value for name, value in arguments.items() if not _has(source, given.get(name), value)}
    if not asked:
        raise AlreadySo(f"{source.place(call)} has {in_words(arguments)} already")
    if len(asked) == 1:
        ((name, value),) = asked.items()
        if name in given and value is not None:
            where, new = _where_it_is_set(source, call, name, given[name].value, value, words)
            return Changed(source.with_changed(where, new), source.line(where))
    args = list(call.args)
    for name, value in asked.items():
        args = _with(args, call, given.get(name), name, value)
    return Changed(source.with_changed(call, call.with_changes(args=args)), source.end(call)[0])


def with_argument(call: cst.Call, name: str, code: str) -> cst.Call:
    """A call with one more argument by its name."""
    return call.with_changes(args=_with(list(call.args), call, None, name, code))


def in_words(arguments: Arguments) -> str:
    """The arguments to set; without any, those to remove."""
    given = [f"{name}={value}" if name else value for name, value in arguments.items() if value is not None]
    return ", ".join(given or [f"no {name}" for name in arguments])


def _given(source: SourceFile, call: cst.Call, arguments: Arguments, positional: Sequence[str]) -> dict[str, cst.Arg]:
    """The arguments of a call by name, as far as it shows them."""
    found: dict[str, cst.Arg] = {}
    for place, arg in enumerate(call.args):
        if arg.star == "**" and not _lacks(source, arg.value, arguments):
            raise NotEdited(
                f"{source.place(call)} takes arguments from **{source.text(arg.value)}: set {in_words(arguments)} there"
            )
        if arg.star == "*":
            raise NotEdited(
                f"{source.place(call)} takes arguments from *{source.text(arg.value)}: set {in_words(arguments)} there"
            )
        if arg.keyword:
            found[arg.keyword.value] = arg
        elif not arg.star and place < len(positional):
            found[positional[place]] = arg
    return found


def _lacks(source: SourceFile, mapping: cst.BaseExpression, arguments: Arguments) -> bool:
    """Whether a mapping is written out as a literal without these keys, and nothing is added to it."""
    if isinstance(mapping, cst.Name):
        uses = [name for name in source.all_of(cst.Name) if name.value == mapping.value]
        made = [one for one in source.all_of(cst.Assign) if source.text(one.targets[0].target) == mapping.value]
        plain = {id(arg.value) for arg in source.all_of(cst.Arg) if arg.star == "**"}
        others = [name for name in uses if id(name) not in plain]
        if len(made) != 1 or len(made[0].targets) != 1 or len(others) != 1:
            return False
        mapping = made[0].value
    if not isinstance(mapping, cst.Dict):
        return False
    keys = [one.key for one in mapping.elements if isinstance(one, cst.DictElement)]
    texts = [key.evaluated_value for key in keys if isinstance(key, cst.SimpleString)]
    return len(texts) == len(mapping.elements) and not arguments.keys() & set(texts)


def _has(source: SourceFile, arg: cst.Arg | None, value: str | None) -> bool:
    return value is None if arg is None else value is not None and source.text(arg.value) == value


def _is_literal(node: cst.CSTNode) -> bool:
    return isinstance(node, LITERALS) or (isinstance(node, cst.Name) and node.value in CONSTANTS)


def _where_it_is_set(
    source: SourceFile, call: cst.Call, name: str, now: cst.BaseExpression, value: str, words: Collection[str]
) -> tuple[cst.CSTNode, cst.CSTNode]:
    """The node by which an argument has its value, and the node to put in its place."""
    new = cst.parse_expression(value)
    if _is_literal(now):
        return now, new
    if isinstance(now, cst.Name):
        made = source.only_assignment(now)
        if made and _is_literal(made.value):
            return made.value, new
    if isinstance(now, cst.Attribute) and _is_parsed(source, now.value) and (option := _option(source, now.attr.value)):
        flags = _flags(option)
        flag = next(one for one in flags if one.startswith("--"))
        if any(_gives(word, flags) for word in words):
            plain = value.strip('"')
            raise NotEdited(f"{source.place(call)} takes {name} from an option: give the command {flag} {plain}")
        default = next((arg for arg in option.args if arg.keyword and arg.keyword.value == "default"), None)
        if default is None:
            return option, option.with_changes(args=_with(list(option.args), option, None, "default", value))
        return default.value, new
    if isinstance(now, cst.Name | cst.Attribute):
        return now, new
    what = name or "its argument"
    raise NotEdited(f"{source.place(call)} computes {what}, as {source.text(now)}: set it to {value} there")


def _flags(option: cst.Call) -> list[str]:
    """The names of an option in a command line, such as "-w" and "--workers"."""
    given = [arg.value for arg in option.args if not arg.keyword]
    return [str(one.evaluated_value) for one in given if isinstance(one, cst.SimpleString)]


def _gives(word: str, flags: Sequence[str]) -> bool:
    """Whether a word of a command gives an option, as argparse reads it: also by a prefix, or as "-w4"."""
    if word.startswith("--"):
        return len(word) > 2 and any(flag.startswith(word.partition("=")[0]) for flag in flags)
    return any(word.startswith(flag) for flag in flags if not flag.startswith("--"))


def _is_parsed(source: SourceFile, node: cst.BaseExpression) -> bool:
    """Whether an object is what the file's own parser of options returns, as far as its name shows."""
    parses = [one for one in source.all_of(cst.Call) if is_call_of(one, *PARSING)]
    own = {scope.name.value for one in parses if isinstance(scope := source.scope(one), cst.FunctionDef)}
    name = source.text(node)
    if not parses or any(is_call_of(one, "set_defaults") for one in source.all_of(cst.Call)):
        return False
    made = [one for one in source.all_of(cst.Assign) for each in one.targets if source.text(each.target) == name]
    made = [one for one in made if one.value not in parses and not is_call_of(one.value, *own)]
    return isinstance(node, cst.Name) and not made


def _option(source: SourceFile, name: str) -> cst.Call | None:
    """The only `add_argument` of the file with a literal default, or none, that makes an attribute."""
    found = []
    for call in source.all_of(cst.Call):
        if not is_call_of(call, "add_argument"):
            continue
        keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword}
        long = next((flag for flag in _flags(call) if flag.startswith("--")), "")
        default = keywords.get("default")
        if (
            not {"action", "dest", "nargs", "choices"} & keywords.keys()
            and long.removeprefix("--").replace("-", "_") == name
            and (default is None or _is_literal(default))
        ):
            found.append(call)
    return found[0] if len(found) == 1 else None


def _with(args: list[cst.Arg], call: cst.Call, now: cst.Arg | None, name: str, value: str | None) -> list[cst.Arg]:
    """The arguments of a call with another value of one, which is `now`."""
    if now is not None and value is None:
        return _without(args, now)
    if now is not None and value is not None:
        return [one.with_changes(value=cst.parse_expression(value)) if one is now else one for one in args]
    if value is None:
        return args
    keyword = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
    new = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=keyword)
    if not args:
        return [new]
    *before, last = args
    between = next((_space(one.comma) for one in reversed(before)), call.whitespace_before_args)
    if not isinstance(between, cst.ParenthesizedWhitespace):
        between = cst.SimpleWhitespace(" ")
    else:
        between = between.with_changes(first_line=cst.TrailingWhitespace(newline=between.first_line.newline))
    end = _space(last.comma) if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    if isinstance(end, cst.ParenthesizedWhitespace) and end.first_line.comment:  # which is about the last argument
        if isinstance(between, cst.ParenthesizedWhitespace):
            between = between.with_changes(first_line=end.first_line)
        else:
            between = end
        end = end.with_changes(first_line=cst.TrailingWhitespace(newline=end.first_line.newline), empty_lines=[])
    if isinstance(last.comma, cst.Comma):
        new = new.with_changes(comma=last.comma.with_changes(whitespace_after=end))
    else:
        new = new.with_changes(whitespace_after_arg=end)
    last = last.with_changes(comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace(""))
    return [*before, last, new]


def _without(args: list[cst.Arg], now: cst.Arg) -> list[cst.Arg]:
    """The arguments without one. What follows it to the end of the call stays there."""
    left = [one for one in args if one is not now]
    if left and now is args[-1]:
        left[-1] = left[-1].with_changes(comma=now.comma, whitespace_after_arg=now.whitespace_after_arg)
    return left


def _space(comma: cst.Comma | cst.MaybeSentinel) -> cst.BaseParenthesizableWhitespace:
    return comma.whitespace_after if isinstance(comma, cst.Comma) else cst.SimpleWhitespace(" ")
