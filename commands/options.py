"""The options that every command shares, in the same words.

Values stay text here: the settings say what is valid, so that one place answers a wrong one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import Ranks, launched_by_torchrun
from gpubench.zoo import MODELS

if TYPE_CHECKING:
    from gpubench.settings import RunSettings

MEASUREMENT, MODEL, OUTPUT = "Measurement", "Model and data", "Output"
VERDICT, GATE, INPUT = "Verdict", "Gate", "Input"
SAMPLING, PIPELINE = "Sampling", "Pipeline"


def option(metavar: str, help_: str, panel: str, *names: str, values: Iterable[str] = ()) -> Any:
    """`values` are what a shell completes; where none are named, the words of a metavar such as cpu|cuda."""
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


Config = Annotated[str | None, option("NAME|FILE", "Preset or YAML file to start from.", MODEL, values=presets())]
Model = Annotated[
    str | None, option("NAME", "Built-in model, module:callable, or a folder with config.json.", MODEL, values=MODELS)
]
Data = Annotated[
    str | None, option("SOURCE", "synthetic, synthetic-host, image-folder, text or module:callable.", MODEL)
]
Precision = Annotated[str | None, option("fp32|tf32|amp|bf16", "Arithmetic of the forward and backward pass.", MODEL)]
BatchSize = Annotated[str | None, option("N", "Samples per rank and forward pass.", MODEL)]
Steps = Annotated[str | None, option("N", "Optimizer steps measured in each repeat.", MEASUREMENT)]
WorldSize = Annotated[str | None, option("N", "Ranks, one process each.", MEASUREMENT)]
Repeats = Annotated[str | None, option("N", "Fresh processes that repeat the measurement.", MEASUREMENT)]
TargetPrecision = Annotated[
    str | None,
    option(
        "P%", "Repeat, whatever --repeats says, until the throughput's 95 % interval is within P % of it.", MEASUREMENT
    ),
]
MeasurePeak = Annotated[
    bool, typer.Option("--measure-peak", help="Time a large matrix product as a ceiling.", rich_help_panel=MEASUREMENT)
]
Vs = Annotated[
    list[str] | None,
    typer.Option(
        "--vs",
        metavar="KEY=VALUE",
        help="Run again with this setting changed, interleaved A B B A; repeat it to change more.",
        rich_help_panel=MEASUREMENT,
    ),
]
Device = Annotated[str | None, option("cpu|cuda", "Where to run; the GPU if there is one.", MEASUREMENT)]
Experiment = Annotated[str | None, option("NAME", "Folder under results that groups the runs.", OUTPUT)]
Results = Annotated[str | None, option("DIR", "Where run directories are written.", OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="Say more; twice, everything.", rich_help_panel=OUTPUT)
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Show every setting and where it comes from, and stop.", rich_help_panel=OUTPUT
    ),
]


def overrides(ctx: typer.Context, cls: "type[RunSettings]") -> dict[str, Any]:
    """What the command line sets of `cls`: by its named options, and by any other as `--section.key=value` or
    `--section.no-key`.

    Raises UsageError where that is no option, or goes against the torchrun that this is under.
    """
    from gpubench.configuration import parse_unknown_overrides
    from gpubench.setting_keys import canonical, fields

    known = fields(cls)
    named = {name: value for name, value in _given(ctx).items() if canonical(cls, name) in known}
    found = named | parse_unknown_overrides(ctx.args, cls)
    return found | _torchrun_s(found) if launched_by_torchrun() else found


def refuse_beside(ctx: typer.Context, cls: "type[RunSettings]", file: str, *allowed: str) -> None:
    """Raises UsageError for options that only a run can follow where `file` is read, the option that names it, and
    SettingsError for those that nobody knows."""
    from gpubench.configuration import parse_unknown_overrides, refuse_unknown
    from gpubench.setting_keys import canonical

    settings = parse_unknown_overrides(ctx.args, cls)
    refuse_unknown(cls, {canonical(cls, key): value for key, value in settings.items()}, {})
    for key in [*(name for name in _given(ctx) if name not in allowed), *settings]:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(
            f"{option} is for a run, and {file} reads of one that is over", f"leave it out, or leave {file} out"
        )


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The named options that the user gave, in the settings' own terms; every other is left to what lies below."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"
    }
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}


def _torchrun_s(overrides: dict[str, Any]) -> dict[str, Any]:
    """The world size that torchrun decided on. Raises UsageError where the command line contradicts it."""
    decided = str(Ranks.from_environment().world_size)
    asked = overrides.get("world_size", overrides.get("distributed.world_size", decided))
    if asked != decided:
        raise UsageError(f"--world-size {asked}, but torchrun started {decided} processes", "leave --world-size out")
    return {"world_size": decided}
