"""The options that several commands have in common.

Their values stay text, because the settings parse and check them.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpubench.commands import completion, program_words, wrong_words
from gpubench.commands.parsing import ParsedCommand, owners_of, path_of, refuse_one_dash
from gpubench.configs import presets
from gpubench.errors import ProgramFailed, UsageError
from gpubench.ranks import Ranks, launched_by_torchrun
from gpubench.registry import NOT_OF_PROGRAMS
from gpubench.settings.options import MEASUREMENT, MODEL, OUTPUT, YOUR_PROGRAM, Option, options

if TYPE_CHECKING:
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import Configuration, Labels
    from gpubench.settings.schema import RunSettings

VERDICT, GATE, INPUT = "Verdict", "Gate", "Input"

OWN_WORDS = "own words"
LEAST_OF_A_KEY = 3
"""The fewest characters of an option, with its dashes, for which the shell offers settings too: there are a hundred."""


NO_SUCH_OPTION = "--help shows the common options, and --print-config every setting, which is an option too"


class Shown(NamedTuple):
    """What is printed of a result."""

    json: bool
    quiet: bool
    verbose: int

    def terminal(self) -> "Terminal":
        from gpubench.report.terminal import Terminal

        return Terminal(quiet=self.quiet, verbosity=self.verbose)


class Offer(NamedTuple):
    """What the shell offers, as typer reads it."""

    value: str
    help: str | None
    type: str = "plain"


class TakesSettings(ParsedCommand):
    """A command that takes settings as options too, such as --training.steps. The shell completes them."""

    takes_settings = True
    takes_program = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        offered = super().shell_complete(ctx, incomplete)
        if len(incomplete) < LEAST_OF_A_KEY or not incomplete.startswith("--"):
            return offered
        return [*offered, *(Offer(*one) for one in completion.keys(str(ctx.info_name), incomplete))]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, program = args, None
        if "--" in args:
            border = args.index("--")
            own, program = args[:border], args[border + 1 :]
        if self.takes_program:
            ctx.meta[OWN_WORDS] = list(own)  # which parsing empties
            if program is not None:
                ctx.meta[YOUR_PROGRAM] = program
        if not ctx.resilient_parsing:
            refuse_one_dash(
                self, ctx, own, takes_settings=True, program=program
            )  # before its value counts as a stray word
            self._refuse_stray(ctx, own, program)
        return super().parse_args(ctx, own if self.takes_program else args)

    def _refuse_stray(self, ctx: Any, own: list[str], program: list[str] | None) -> None:
        """Raises UsageError for a word that is neither an option nor the value of one."""
        name = str(ctx.info_name)
        if program is not None and not self.takes_program:
            own, program = [*own, *program], None
        at = next(
            (at for at, _, is_option in wrong_words.positions(self, own, takes_settings=True) if not is_option), None
        )
        asks_for_help = any(word in ctx.help_option_names for word in own[:at])
        if at is not None and not asks_for_help:
            found = wrong_words.Stray(name, own[at], own[:at], own[at + 1 :], program, self.takes_program)
            raise UsageError(*wrong_words.stray(found))


class TakesProgram(TakesSettings):
    """A command that runs the user's own program, given after `--`."""

    takes_program = True

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ProgramFailed as error:
            words = program(ctx)
            hint = words and program_words.explained(error, self, str(ctx.info_name), own_words(ctx), words)
            if not hint:
                raise
            raise type(error)(error.message, hint) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM [ARGUMENTS]...]"]


def own_words(ctx: typer.Context) -> list[str]:
    """The words that the user gave between the command and `--`."""
    found: list[str] = ctx.meta.get(OWN_WORDS, [])
    return found


def program(ctx: typer.Context) -> list[str] | None:
    """The program and its arguments, which the user gave after `--`; None without `--`."""
    found: list[str] | None = ctx.meta.get(YOUR_PROGRAM)
    return found


def option(
    metavar: str,
    help_: str,
    panel: str,
    *names: str,
    values: Iterable[str] = (),
    completed_by: Callable[..., Any] | None = None,
) -> Any:
    """Declares an option of a command.

    Shells complete `values`, the words of a metavar such as cpu|cuda, or what the function `completed_by` finds.
    """
    known = sorted(values or (word for word in metavar.split("|") if word.islower() and "|" in metavar))

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return typer.Option(
        *names,
        metavar=metavar,
        help=help_,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=completed_by or (complete if known else None),
    )


def of_settings(
    command: str, after: Mapping[str, Sequence[str]], *, several: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds options of settings to a command. `overrides` returns their values.

    `after` gives the settings that --help lists, by the parameter of the function that they follow. The setting
    `several` may have more than one value: the command then measures each of them, in one table.
    """
    known = options(command)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            parameters.append(parameter)
            parameters += [_parameter(each, known[each], several=each == several) for each in after.get(name, ())]

        @wraps(function)
        def call(**values: Any) -> None:
            function(**{name: values[name] for name in own})

        # This is where typer looks for the options.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate


@cache  # commands share most of them
def _parameter(name: str, shown: Option, *, several: bool) -> inspect.Parameter:
    """The parameter of a function from which typer makes the option of a setting."""
    words = name.replace("_", "-")
    metavar, sentence = shown.metavar, shown.help
    if several:
        metavar, sentence = f"{metavar}[,{metavar}...]", f"{sentence.removesuffix('.')}{shown.several}."
    kind: Any = str | None
    if metavar:
        found_by = getattr(completion, shown.found_by) if shown.found_by else None
        declared = option(metavar, sentence, shown.panel, f"--{words}", completed_by=found_by)
    else:
        kind, off = (bool | None, f"no-{words}") if shown.is_open else (bool, "")
        names = f"--{words}/--{off}" if off else f"--{words}"
        declared = typer.Option(names, help=sentence, rich_help_panel=shown.panel, show_default=False)
    default = False if kind is bool else None
    annotation = Annotated[kind, declared]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


Config = Annotated[
    str | None, option("NAME|FILE", "Preset or YAML file with settings; options override it.", MODEL, values=presets())
]
Vs = Annotated[
    list[str] | None,
    typer.Option(
        "--vs",
        metavar="KEY=VALUE",
        help="Also run with this setting changed, interleaved in random order, and compare; repeatable.",
        rich_help_panel=MEASUREMENT,
        autocompletion=completion.assignments,
    ),
]
VsArguments = Annotated[
    str | None,
    option(
        "ARGUMENTS",
        "Also run the program with these arguments added, interleaved in random order, and compare.",
        YOUR_PROGRAM,
        "--vs-args",
    ),
]
VsRef = Annotated[
    str | None,
    option(
        "COMMIT",
        "Also run the program as of this git commit, interleaved in random order, and compare.",
        YOUR_PROGRAM,
        "--vs-ref",
    ),
]
Name = Annotated[
    str | None,
    option(
        "NAME",
        "Name of the run, by which other commands find it; other runs of the command are NAME-2 and so on.",
        OUTPUT,
        "--name",
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Tag the run, to list runs by it and to protect them from gpubench runs prune; repeatable.",
        rich_help_panel=OUTPUT,
        autocompletion=completion.tags,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Do not show progress.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="Print more; -vv prints everything.", rich_help_panel=OUTPUT)
]
FailOn = Annotated[
    list[str] | None,
    option("METRIC>X%", "Exit with 3 if the metric is worse by more than X %; repeatable.", GATE),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 4 if a --fail-on condition is undecided.", rich_help_panel=GATE),
]
Margin = Annotated[str, option("X%", "Changes up to this size count as none; 0.5% by default.", VERDICT, "--margin")]
LossMargin = Annotated[
    str | None,
    option(
        "SHARE|NUMBER",
        "Changes of the final loss up to this size do no harm: a share of it, or a number; 1% by default.",
        VERDICT,
        "--loss-margin",
    ),
]
RunsFolder = Annotated[
    Path,
    typer.Option(
        "--results",
        metavar="DIR",
        envvar="GPUBENCH_RESULTS",
        help="Directory of the run directories.",
        rich_help_panel=INPUT,
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code that a file names, also if it was not run before, without a question.",
        rich_help_panel=MODEL,
    ),
]
SortTables = Annotated[
    list[str] | None,
    typer.Option(
        "--sort",
        metavar="[TABLE=]COLUMN",
        help="Show this table ordered by a column, such as kernels=calls; repeatable.",
        rich_help_panel=OUTPUT,
    ),
]
TableRows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows",
        metavar="[TABLE=]N",
        help="Show this number of rows of a table, such as kernels=30, or all; repeatable.",
        rich_help_panel=OUTPUT,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print every setting and its source, and exit.", rich_help_panel=OUTPUT),
]


def overrides(ctx: typer.Context, cls: "type[RunSettings]", refused: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings of `cls` on the command line: named options, `--section.key=value`, `--section.no-key`.

    `refused` are options of the command that cannot be given here, each with the hint that says what to do instead.
    Raises UsageError for an unknown option, or one that contradicts torchrun.
    """
    from gpubench.settings.loading import parse_unknown_overrides

    known = options(str(ctx.info_name))
    named = {name: value for name, value in given(ctx).items() if name in known}
    settings = parse_unknown_overrides(ctx.args, cls)
    _refuse_unknown(ctx, cls, settings, refused)
    found = named | settings
    return found | _world_size(found) if launched_by_torchrun() else found


def _refuse_unknown(
    ctx: typer.Context,
    cls: "type[RunSettings]",
    settings: Iterable[str],
    refused: Mapping[str, str] | None = None,
) -> None:
    """Raises UsageError for an option that is not a setting of any command. Its hint says what was perhaps meant."""
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.field import declared_key, fields
    from gpubench.settings.loading import canonical, inside, nearest, negations

    for key in settings:
        is_setting = any(declared_key(one, canonical(one, key)) or key in negations(one) for one in COMMANDS.values())
        if is_setting or inside(cls, key):
            continue
        option = f"--{key}" if "." in key else f"--{key.replace('_', '-')}"
        closest = nearest(cls, key, negated=f".{key}".rfind(".no_") >= 0)
        hint = wrong_words.unknown_option(
            ctx.command, path_of(ctx), option, partial(owners_of, ctx), fields(cls), closest, refused
        )
        if hint in ("", NOT_OF_PROGRAMS):
            hint = _as_an_argument(ctx, option) or NO_SUCH_OPTION
        raise UsageError(f"there is no option {option}", hint)


def _as_an_argument(ctx: typer.Context, option: str) -> str:
    """The hint that an option may be an argument of the program; "" without a program."""
    own, words = own_words(ctx), program(ctx)
    at = next((at for at, word in enumerate(own) if word.partition("=")[0] == option), None)
    if at is None or words is None:
        return ""
    end = at + 1
    if "=" not in own[at] and own[end : end + 1] and not own[end].startswith("-"):
        end += 1
    moved = [str(ctx.info_name), *own[:at], *own[end:], *wrong_words.behind(words), *own[at:end]]
    return f"an argument of the program comes after it: {wrong_words.line(moved)}"


def refuse_beside(ctx: typer.Context, cls: "type[RunSettings]", file: str, *allowed: str) -> None:
    """Refuses options of runs, because a file is read instead. `file` is the option that names the file.

    Raises UsageError for an option that is not in `allowed`, and SettingsError for an unknown one.
    """
    from gpubench.settings.loading import canonical, parse_unknown_overrides, refuse_unknown

    settings = parse_unknown_overrides(ctx.args, cls)
    _refuse_unknown(ctx, cls, settings)
    refuse_unknown(cls, {canonical(cls, key): value for key, value in settings.items()}, {})
    for key in [*(name for name in given(ctx) if name not in allowed), *settings]:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(f"{option} is for a new run, but {file} reads a finished one", f"leave out {option} or {file}")


def given(ctx: typer.Context) -> dict[str, Any]:
    """The named options that the user has set, by setting."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"
    }
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}


def labels(ctx: typer.Context, results: Path | None = None) -> "Labels":
    """The name and the tags on the command line. Raises UsageError for ones that no run can have."""
    from gpubench.settings.loading import Labels

    name, tags = ctx.params.get("name"), ctx.params.get("tag") or []
    if name is not None:
        from gpubench.runs.references import check_name  # not needed without a name

        check_name(name, results)
    check_tags(tags)
    return Labels(name, tuple(dict.fromkeys(tags)))


def check_tags(tags: Iterable[str]) -> None:
    """Raises UsageError for a text that cannot be a tag."""
    for tag in tags:
        from gpubench.runs.references import TAG  # not needed without tags

        if not TAG.fullmatch(tag):
            raise UsageError(f"{tag!r} is not a tag", "use up to 100 letters, digits and . _ + : / @ = - in it")


def labelled(ctx: typer.Context, runs: "Sequence[Configuration[Any]]", own: int = 0) -> "list[Configuration[Any]]":
    """Gives the configurations of one command, with their variants, the name and the tags on the command line.

    The run at index `own` gets the name; the others are called NAME-2, NAME-3 and so on. All get the tags, and with
    --trust none counts as received. Raises UsageError for a name or a tag that no run can have.
    """
    from dataclasses import replace

    from gpubench.settings.identity import variants

    found = labels(ctx, runs[0].settings.results)
    called = [found._replace(variant=one) for one in variants(runs)]
    runs = [trusted(ctx, run) for run in runs]
    if name := found.name:
        others = (f"{name}-{number}" for number in range(2, len(runs) + 1))
        names = [name if index == own else next(others) for index in range(len(runs))]
        called = [one._replace(name=each) for one, each in zip(called, names, strict=True)]
    return [replace(run, labels=one) for run, one in zip(runs, called, strict=True)]


def trusted(ctx: typer.Context, run: "Configuration[Any]") -> "Configuration[Any]":
    """With --trust, the configuration counts as the user's own and not as a received one."""
    from dataclasses import replace

    return replace(run, received=None) if ctx.params.get("trust") else run


def _world_size(overrides: dict[str, Any]) -> dict[str, Any]:
    """The world size that torchrun has set. Raises UsageError if the command line contradicts it."""
    actual = str(Ranks.from_environment().world_size)
    requested = overrides.get("world_size", overrides.get("distributed.world_size", actual))
    if requested != actual:
        raise UsageError(
            f"--world-size is {requested}, but torchrun started {actual} processes", "leave out --world-size"
        )
    return {"world_size": actual}


def several(given: dict[str, Any], cls: "type[RunSettings[Any]]", key: str) -> list[str]:
    """Removes the setting `key` from the given ones and returns its values, if commas separate several.

    Raises UsageError for a value that is given twice or is empty.
    """
    from gpubench.settings.loading import canonical

    name = next((name for name in given if canonical(cls, name) == key), None)
    if name is None or "," not in str(given[name]):
        return []
    text = str(given.pop(name))
    values = [value.strip() for value in text.split(",")]
    words = key.rpartition(".")[2].replace("_", " ")
    if not all(values):
        raise UsageError(f"{words} {text!r} has an empty value", f"write {','.join(filter(None, values)) or '1,2'}")
    if twice := [value for value in values if values.count(value) > 1]:
        raise UsageError(f"{words} {twice[0]!r} is given twice", f"give each {words} once")
    return values
