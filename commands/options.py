"""The options that several commands have in common.

Their values stay text, because the settings parse and check them.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpubench.commands.plain_help import PlainCommand
from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import Ranks, launched_by_torchrun
from gpubench.zoo import MODELS

if TYPE_CHECKING:
    from gpubench.settings.schema import RunSettings

MEASUREMENT, MODEL, OUTPUT = "Measurement", "Model and data", "Output"
VERDICT, GATE, INPUT = "Verdict", "Gate", "Input"
SAMPLING, PIPELINE, PROGRAM = "Sampling", "Pipeline", "Your program"


class Shown(NamedTuple):
    """What is printed of a result."""

    json: bool
    quiet: bool
    verbose: int


class TakesProgram(PlainCommand):
    """A command that runs the user's own program, given after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            border = args.index("--")
            ctx.meta[PROGRAM] = args[border + 1 :]
            args = args[:border]
        rest = super().parse_args(ctx, args)
        if ctx.args and (which(ctx.args[0]) or Path(ctx.args[0]).is_file()):
            words = shlex.join(ctx.args)
            raise UsageError(
                f"unexpected argument {ctx.args[0]!r}",
                f"a program comes after --, for example: gpubench {ctx.info_name} -- {words}",
            )
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM [ARGUMENTS]...]"]


def program(ctx: typer.Context) -> list[str] | None:
    """Returns the program and its arguments that the user gave after `--`; None without `--`."""
    found: list[str] | None = ctx.meta.get(PROGRAM)
    return found


def option(metavar: str, help_: str, panel: str, *names: str, values: Iterable[str] = ()) -> Any:
    """Declares an option. Shells complete `values`, or the words of a metavar such as cpu|cuda."""
    known = sorted(values or (word for word in metavar.split("|") if word.islower() and "|" in metavar))

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return typer.Option(
        *names,
        metavar=metavar,
        help=help_,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=complete if known else None,
    )


Config = Annotated[
    str | None, option("NAME|FILE", "Preset or YAML file with settings; options override it.", MODEL, values=presets())
]
Model = Annotated[
    str | None, option("NAME", "Built-in model, module:callable, or folder with config.json.", MODEL, values=MODELS)
]
Data = Annotated[
    str | None, option("SOURCE", "synthetic, synthetic-host, image-folder, text or module:callable.", MODEL)
]
Precision = Annotated[str | None, option("fp32|tf32|amp|bf16", "Arithmetic of the forward and backward pass.", MODEL)]
BatchSize = Annotated[str | None, option("N", "Samples per rank and forward pass.", MODEL)]
BatchSizes = Annotated[
    str | None, option("N[,N...]", "Samples per rank and forward pass; several: measures each, in one table.", MODEL)
]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="Measure inference instead of training: latency and throughput of forward passes.",
        rich_help_panel=MEASUREMENT,
    ),
]
Steps = Annotated[str | None, option("N", "Steps measured in each repeat.", MEASUREMENT)]
WorldSize = Annotated[str | None, option("N", "Number of ranks; each is one process.", MEASUREMENT)]
Repeats = Annotated[str | None, option("N", "Times to repeat the measurement, each in new processes.", MEASUREMENT)]
TargetPrecision = Annotated[
    str | None,
    option(
        "P%", "Repeat until the 95 % interval of the throughput is within P % of it; ignores --repeats.", MEASUREMENT
    ),
]
MeasurePeak = Annotated[
    bool,
    typer.Option(
        "--measure-peak", help="Also time a large matrix product: attainable FLOP/s.", rich_help_panel=MEASUREMENT
    ),
]
Vs = Annotated[
    list[str] | None,
    typer.Option(
        "--vs",
        metavar="KEY=VALUE",
        help="Also run with this setting changed, interleaved A B B A, and compare; repeatable.",
        rich_help_panel=MEASUREMENT,
    ),
]
VsArguments = Annotated[
    str | None,
    option(
        "ARGUMENTS",
        "Also run the program with these arguments added, interleaved A B B A, and compare.",
        PROGRAM,
        "--vs-args",
    ),
]
VsRef = Annotated[
    str | None,
    option(
        "COMMIT", "Also run the program as of this git commit, interleaved A B B A, and compare.", PROGRAM, "--vs-ref"
    ),
]
Device = Annotated[str | None, option("cpu|cuda", "Device to run on; by default cuda if there is a GPU.", MEASUREMENT)]
Experiment = Annotated[str | None, option("NAME", "Subdirectory of results that groups runs.", OUTPUT)]
Results = Annotated[str | None, option("DIR", "Directory for run directories.", OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Do not show progress.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="Print more; twice for everything.", rich_help_panel=OUTPUT)
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print every setting and its source, and exit.", rich_help_panel=OUTPUT),
]


def overrides(ctx: typer.Context, cls: "type[RunSettings]") -> dict[str, Any]:
    """Returns the settings of `cls` on the command line: named options, `--section.key=value`, `--section.no-key`.

    Raises UsageError for an unknown option, or one that contradicts torchrun.
    """
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, parse_unknown_overrides

    known = fields(cls)
    named = {name: value for name, value in given(ctx).items() if canonical(cls, name) in known}
    found = named | parse_unknown_overrides(ctx.args, cls)
    return found | _world_size(found) if launched_by_torchrun() else found


def refuse_beside(ctx: typer.Context, cls: "type[RunSettings]", file: str, *allowed: str) -> None:
    """Refuses options of runs, because a file is read instead; `file` is the option that names the file.

    Raises UsageError for an option that is not in `allowed`, and SettingsError for an unknown option.
    """
    from gpubench.settings.loading import canonical, parse_unknown_overrides, refuse_unknown

    settings = parse_unknown_overrides(ctx.args, cls)
    refuse_unknown(cls, {canonical(cls, key): value for key, value in settings.items()}, {})
    for key in [*(name for name in given(ctx) if name not in allowed), *settings]:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(f"{option} is for a new run, but {file} reads a finished one", f"leave out {option} or {file}")


def given(ctx: typer.Context) -> dict[str, Any]:
    """Returns the named options that the user has set, by setting."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"
    }
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}


def _world_size(overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the world size that torchrun has set. Raises UsageError if the command line contradicts it."""
    actual = str(Ranks.from_environment().world_size)
    requested = overrides.get("world_size", overrides.get("distributed.world_size", actual))
    if requested != actual:
        raise UsageError(
            f"--world-size is {requested}, but torchrun started {actual} processes", "leave out --world-size"
        )
    return {"world_size": actual}
