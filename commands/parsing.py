"""How the commands read their words: what users of other tools type is understood, or answered with what to type."""

import os
import re
from functools import partial
from typing import Any

import typer

from gpubench.commands import wrong_words
from gpubench.commands.plain_help import PlainCommand, PlainGroup, usage
from gpubench.errors import UsageError, did_you_mean
from gpubench.settings.keys import ENVIRONMENT_PREFIX, RESULTS_VARIABLE

CHOICES = re.compile(
    r"Invalid value for '(?P<option>.*?)': (?:Value error, )?(?P<value>'.*') is not one of (?P<known>.*)\."
)


COMPLETION = ("--install-completion", "--show-completion")


class ParsedCommand(PlainCommand):
    """A command that answers an option of another tool, or one with a single dash, with what to type."""

    takes_settings = False
    """Whether an option that it does not know may be a setting."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            refuse_one_dash(self, ctx, args, takes_settings=self.takes_settings)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_surroundings(str(ctx.info_name))
        return rest


class AllCommands(PlainGroup):
    """The commands of gpubench. `gpubench help COMMAND` shows the help of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == [wrong_words.HELP]:
            args = [*args[1:], "--help"]
        if args and not ctx.resilient_parsing and args[0].startswith("-"):
            _refuse_before_command(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        of_runs = list(getattr(self.commands["runs"], "commands", ()))
        of_programs = {name for name, command in self.commands.items() if getattr(command, "takes_program", False)}
        hint = wrong_words.unknown_command(args[0], args[1:], list(self.commands), of_runs, of_programs)
        raise UsageError(f"there is no command {args[0]!r}", hint)


class OfRuns(PlainGroup):
    """The list of runs and the commands for single ones. `gpubench runs list` is the list too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((at for at, _, is_option in wrong_words.positions(self, args) if not is_option), None)
        lists = first is None or args[first] in wrong_words.LISTING
        if first is not None and lists:
            args = [*args[:first], *args[first + 1 :]]
        elif first is not None and args[first] == wrong_words.HELP:
            args = [*args[first + 1 :], "--help"]
        if not ctx.resilient_parsing:
            refuse_one_dash(self, ctx, args[:first])
        rest = super().parse_args(ctx, args)
        if lists and not ctx.resilient_parsing:  # a command for single runs does it itself
            check_surroundings(str(ctx.info_name))
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        commands = list(ctx.find_root().command.commands)
        hint = wrong_words.unknown_of_runs(args[0], args[1:], list(self.commands), commands)
        raise UsageError(f"gpubench runs has no command {args[0]!r}", hint)


def check_surroundings(command: str) -> None:
    """Raises an error for what would be wrong for every command, whether this one would notice it or not.

    That is SettingsError for a `GPUBENCH_*` variable that no command knows, and FileNotFoundError, which
    `gpubench.__main__` explains, if the current directory was removed.
    """
    os.getcwd()  # noqa: PTH109
    if any(name.upper().startswith(ENVIRONMENT_PREFIX) and name != RESULTS_VARIABLE for name in os.environ):
        # imported here, because most environments have none
        from gpubench.settings.commands import COMMANDS
        from gpubench.settings.loading import variables_of_settings

        variables_of_settings(*([COMMANDS[command]] if command in COMMANDS else COMMANDS.values()))


def refuse_one_dash(
    command: Any, ctx: Any, args: list[str], *, takes_settings: bool = False, program: list[str] | None = None
) -> None:
    """Raises UsageError for a long option with one dash, and for a letter that is not an option."""
    path = path_of(ctx)
    if wrong := wrong_words.one_dash(
        command,
        path,
        args,
        owners=partial(owners_of, ctx),
        help_options=ctx.help_option_names,
        takes_settings=takes_settings,
        program=program,
    ):
        raise UsageError(*wrong)


def path_of(ctx: Any) -> str:
    """The words of a command, such as "gpubench runs show", however gpubench was started."""
    return f"{path_of(ctx.parent)} {ctx.info_name}" if ctx.parent else "gpubench"


def owners_of(ctx: Any, option: str) -> list[str]:
    """The commands of gpubench that have the option."""
    known = getattr(ctx.find_root().command, "commands", {})
    return [f"gpubench {name}" for name, command in known.items() if option in wrong_words.own_options(command)]


def _refuse_before_command(group: PlainGroup, ctx: Any, args: list[str]) -> None:
    """Raises UsageError for options of a command that stand before it, and for words like -V."""
    known = (*wrong_words.own_options(group), *ctx.help_option_names)
    first = args[0].partition("=")[0]
    if first in COMPLETION and args[1:]:
        message = f"{first} takes no value: it is for the shell in which it is typed"
        raise UsageError(message, f"start {args[1]}, and type gpubench {first} there")
    if first in known or first == "--":
        return
    if wrong := wrong_words.before_command(args, group.commands):
        raise UsageError(*wrong)
    if meant := wrong_words.COMMANDS.get(first):
        raise UsageError(f"there is no option {first}", f"did you mean '{meant}'?")


def refusal(error: typer.TyperException) -> UsageError:
    """Turns an error of typer into one of gpubench, whose hint says what to do next."""
    message, ctx = error.format_message(), getattr(error, "ctx", None)
    path = path_of(ctx) if ctx else "gpubench"
    command, shown_by = ctx.command if ctx else None, wrong_words.usage(path)
    if command is None:
        return UsageError(message, shown_by)
    option = getattr(error, "option_name", None)
    known = wrong_words.own_options(command)
    if option and "requires an argument" in message and option in known:
        return UsageError(f"{option} has no value", f"write {max(usage(known[option]), key=len)}; {shown_by}")
    if option and "does not take a value" in message:
        return UsageError(f"{option} takes no value", f"write {option} alone, or leave it out; {shown_by}")
    if option and option not in known:
        hint = wrong_words.unknown_option(command, path, option, partial(owners_of, ctx))
        return UsageError(f"there is no option {option}", hint or shown_by)
    if choices := CHOICES.fullmatch(message):
        names = [word.strip(" '") for word in choices["known"].split(",")]
        near = did_you_mean(choices["value"].strip("'"), names)
        return UsageError(
            f"{choices['option']} {choices['value']} is not one of its values",
            f"{near} it is one of {', '.join(names)}".lstrip(),
        )
    if message.startswith("Missing argument"):
        what = message.removeprefix("Missing argument ").rstrip(".").strip("'")
        example = f"{path} latest" if "RUN" in what else f"{path} {what}"
        return UsageError(f"{path} needs {what}", f"for example {example}; {shown_by}")
    if message.startswith("Got unexpected extra argument"):
        extra = message.partition("(s) (")[2].rstrip(")") or message.partition("(")[2].rstrip(")")
        return UsageError(f"unexpected argument {extra.split(' ')[0]!r}", f"{path} takes {_taken(command)}; {shown_by}")
    return UsageError(message, shown_by)


def _taken(command: Any) -> str:
    arguments = [one.metavar for one in command.params if one.param_type_name == "argument"]
    return " ".join(arguments) or "options only"
