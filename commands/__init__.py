"""The command line: registers one module per subcommand, and prints all errors."""

import gc
import io
import os
import sys
import time

import typer

from gpubench import __version__
from gpubench.commands import (
    compare,
    history,
    judge,
    loader,
    mcp,
    memory,
    options,
    parsing,
    pipe_infer,
    plain_help,
    profile,
    runs,
    train_bench,
    tune,
    wrong_words,
)
from gpubench.commands.output import drop_unwritten
from gpubench.errors import GpubenchError, Interrupted, UsageError
from gpubench.ranks import Ranks, launched_by_torchrun
from gpubench.settings.keys import RESULTS_VARIABLE

LET_RANK_0_EXIT_SECONDS = 3.0
OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""Python's default is 700. Imports make many objects that stay, and searching them takes a tenth of a short command."""

app = typer.Typer(
    name="gpubench",
    add_completion=True,
    pretty_exceptions_enable=False,  # an ordinary traceback is more useful to engineers
    rich_markup_mode=None,
    cls=parsing.AllCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": plain_help.WIDEST},
)
SETTINGS_AS_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("train-bench", cls=options.TakesProgram, epilog=train_bench.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(
    train_bench.train_bench
)
app.command("pipe-infer", cls=options.TakesSettings, epilog=pipe_infer.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(
    pipe_infer.pipe_infer
)
app.command("profile", cls=options.TakesProgram, epilog=profile.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(
    profile.profile
)
app.command("loader", cls=options.TakesProgram, epilog=loader.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(
    loader.loader
)
app.command("memory", cls=options.TakesProgram, epilog=memory.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(
    memory.memory
)
app.command("tune", cls=options.TakesProgram, epilog=tune.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(tune.tune)
app.command("judge", cls=options.TakesProgram, epilog=judge.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(judge.judge)
app.command("compare", cls=parsing.ParsedCommand, epilog=compare.EPILOG)(compare.compare)
app.add_typer(runs.app, name="runs", cls=parsing.OfRuns, epilog=runs.EPILOG)
app.command("history", cls=parsing.ParsedCommand, epilog=history.EPILOG)(history.history)
app.command("mcp", cls=parsing.ParsedCommand, epilog=mcp.EPILOG)(mcp.mcp)


def _version(requested: bool) -> None:
    if requested:
        from gpubench import devices

        gpus = ", ".join(gpu.name for gpu in devices.visible_gpus()) or "no GPU"
        print(f"gpubench {__version__} (torch {devices.torch_version() or 'not installed'}; {gpus})")
        raise typer.Exit


@app.callback()
def gpubench(
    version: bool = typer.Option(
        False,
        "-V",
        "--version",
        callback=_version,
        is_eager=True,
        help="Show the versions of gpubench and PyTorch, and the GPUs.",
    ),
) -> None:
    """Measure PyTorch programs: how fast, why not faster, will it fit in memory, and did a change help?"""


def main() -> None:
    """Runs the command line. Prints expected errors as `error:` and `hint:`; any other error keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without block characters must not cause an error
    _know_results_in_any_case()
    if not launched_by_torchrun():  # a worker that is measured collects as any other program does
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        code = app(standalone_mode=False)
    except GpubenchError as error:
        show(_as_typed(error))
        code = error.exit_code
    except typer.TyperException as error:
        if error.format_message():  # empty if help was shown instead
            show(_as_typed(parsing.refusal(error)))
        code = UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    drop_unwritten()
    sys.exit(code)


def _know_results_in_any_case() -> None:
    """Gives the variable of the results folder its name in capitals, by which commands without settings know it."""
    for name, folder in list(os.environ.items()):
        if name.upper() == RESULTS_VARIABLE:
            os.environ.setdefault(RESULTS_VARIABLE, folder)


def _as_typed(error: GpubenchError) -> GpubenchError:
    """Adds a hint to an error that comes from a request pasted from a formatted text: how to type it."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if not isinstance(error, UsageError) or wrong_words.typed(own) == own:
        return error
    return UsageError(error.message, wrong_words.typography(sys.argv[1:]))


def show(error: GpubenchError) -> None:
    """Prints an error on stderr. All ranks of torchrun have the same error, so one rank of each machine prints it."""
    if launched_by_torchrun() and Ranks.from_environment().local_rank != 0:
        time.sleep(LET_RANK_0_EXIT_SECONDS)  # torchrun ends all ranks once the first one exits
        return
    from rich.console import Console
    from rich.markup import escape

    from gpubench.text import clean  # because file names and errors of models may contain control characters

    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)  # no :train: in latest:train:
    console.print(f"[bold red]error:[/] {escape(clean(error.message))}")
    if error.hint:
        console.print(f"[bold cyan]hint:[/] {escape(clean(error.hint))}")
