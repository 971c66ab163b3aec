"""The help of every command as plain text: what it does, its options by subject, and examples.

It replaces the help that typer draws with rich, whose import takes as long as all the rest of a short command.
"""

import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100  # characters: longer lines are hard to read
INDENT = "  "
BESIDE = 26  # characters of an option, up to which its explanation begins on the same line
CONTINUED = " \\"
ARGUMENTS = "Arguments"
NOTHING_ASKED = 2
"""The exit code of gpubench alone, which shows the help."""
LAST = ("Input", "Output")
"""The panels that come after all others: what most users leave as it is."""


class PlainGroup(TyperGroup):
    """A group of commands with plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, formatter.width, self.commands))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] and args[0] in ctx.help_option_names:
            _show_help(ctx)
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            _show_help(ctx, NOTHING_ASKED)
        if args[1:] and args[1] in ctx.help_option_names and args[0] in self.commands:
            self.commands[args[0]].make_context(args[0], args[1:], parent=ctx)  # shows the help and exits
        with _naming_the_command(ctx):
            return super().parse_args(ctx, args)


class PlainCommand(TyperCommand):
    """A command with plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help(self, ctx, formatter.width, {}))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] and args[0] in ctx.help_option_names:
            _show_help(ctx)
        with _naming_the_command(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def _naming_the_command(ctx: Any) -> Iterator[None]:
    """A context in which every error of typer knows the command that it is about; some do not."""
    try:
        yield
    except typer.TyperException as error:
        if getattr(error, "ctx", None) is None:
            error.ctx = ctx  # type: ignore[attr-defined]
        raise


def usage(parameter: Any) -> list[str]:
    """The forms of an option with their values, such as ["-q", "--quiet"], or the name of an argument."""
    if parameter.param_type_name == "argument":
        return [parameter.metavar]
    names = sorted([*parameter.opts, *parameter.secondary_opts], key=len)
    return [f"{name} {value}" if (value := _value(parameter)) else name for name in names]


def explanation(parameter: Any) -> tuple[str, str, str]:
    """The explanation of an option, its default value and its environment variable; "" for what it does not have."""
    is_shown = parameter.show_default and parameter.default and not getattr(parameter, "is_flag", False)
    default = str(getattr(parameter.default, "value", parameter.default)) if is_shown else ""
    return parameter.help or "", default, str(getattr(parameter, "envvar", None) or "")


def by_panel(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """The parameters of a command by the heading that --help prints above them, in the order of the headings."""
    found: dict[str, list[Any]] = {}
    for one in parameters:
        is_argument = one.param_type_name == "argument"
        found.setdefault(ARGUMENTS if is_argument else getattr(one, "rich_help_panel", None) or "", []).append(one)
    order = [ARGUMENTS, *(name for name in found if name and name != ARGUMENTS and name not in LAST), *LAST, ""]
    return {name: found[name] for name in order if name in found}


def _value(parameter: Any) -> str:
    """The placeholder of an option's value; "" for an option without one."""
    if parameter.is_flag or parameter.count:
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    kind = parameter.type_descriptor.annotation  # an enumeration; a test checks that all others have a metavar
    return "|".join(str(one.value) for one in kind)


def _show_help(ctx: Any, code: int = 0) -> NoReturn:
    """Prints the help before typer reads the arguments, because that loads the library that converts them."""
    typer.echo(ctx.get_help(), color=ctx.color)
    raise typer.Exit(code)


def _help(command: Any, ctx: Any, width: int, commands: Mapping[str, Any]) -> str:
    words = " ".join(command.collect_usage_pieces(ctx))
    said = inspect.cleandoc(command.help or "")
    first, *others = _wrapped(f"Usage: {ctx.command_path} {words}", width, subsequent_indent=INDENT)
    parts = [[first.replace("Usage:", _heading("Usage"), 1), *others], _wrapped(said, width)]
    if commands:
        rows = [(name, one.get_short_help_str(1000)) for name, one in commands.items()]
        parts.append([_heading("Commands"), *_rows(rows, max(map(len, commands)), width)])
    panels = by_panel(one for one in command.get_params(ctx) if not getattr(one, "hidden", False))
    names = [", ".join(usage(one)) for parameters in panels.values() for one in parameters]
    column = max(len(name) for name in names if len(name) <= BESIDE)
    if unnamed := panels.pop("", []):  # --help, and the options of the group
        panels.setdefault("Output" if "Output" in panels else "Options", []).extend(unnamed)
    for name, parameters in panels.items():
        rows = [(", ".join(usage(one)), _explained(one)) for one in parameters]
        parts.append([_heading(name), *_rows(rows, column, width)])
    parts += _epilog(command.epilog or "", width)
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _heading(text: str) -> str:
    return typer.style(f"{text}:", bold=True)


def _explained(parameter: Any) -> str:
    said, default, variable = explanation(parameter)
    beside = "; ".join(filter(None, [default and f"default {default}", variable and f"or set {variable}"]))
    return f"{said.removesuffix('.')} ({beside})." if beside else said


def _rows(rows: list[tuple[str, str]], column: int, width: int) -> Iterator[str]:
    """Yields each name with its explanation beside it, or below it if the name is longer than the column."""
    for name, said in rows:
        lines = _wrapped(said, width - column - 2 * len(INDENT))
        first = lines.pop(0) if len(name) <= column and lines else ""
        yield f"{INDENT}{name:<{column}}{INDENT}{first}".rstrip()
        yield from (f"{INDENT}{'':<{column}}{INDENT}{line}" for line in lines)


def _epilog(text: str, width: int) -> list[list[str]]:
    """The paragraphs of an epilog. The commands among them are printed one below the other."""
    parts: list[list[str]] = []
    for paragraph in filter(None, text.strip().split("\n\n")):
        is_heading = paragraph.endswith(":") and "\n" not in paragraph
        if paragraph.startswith(("gpubench ", "torchrun ")) and parts:
            parts[-1] += _command(paragraph, width)
        else:
            parts.append([_heading(paragraph[:-1])] if is_heading else _wrapped(paragraph, width))
    return parts


def _command(text: str, width: int) -> list[str]:
    """A command that can be copied, on several lines if it is long."""
    *first, last = _wrapped(text, width - len(INDENT) - len(CONTINUED), subsequent_indent=INDENT)
    return [*(f"{INDENT}{line}{CONTINUED}" for line in first), f"{INDENT}{last}"]


def _wrapped(text: str, width: int, **options: Any) -> list[str]:
    """Breaks lines between words only, because the names of models and options have hyphens."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **options)
