"""The command line: one module per subcommand, registered here, and the one place where errors are shown."""

import io
import sys
import time

import typer

from gpubench import __version__
from gpubench.commands import compare, memory, pipe_infer, profile, train_bench
from gpubench.errors import GpubenchError, Interrupted, UsageError
from gpubench.ranks import Ranks, launched_by_torchrun

AFTER_YOU_SECONDS = 3.0

app = typer.Typer(
    name="gpubench",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its users are engineers: an ordinary traceback serves them best
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
SETTINGS_AS_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("train-bench", epilog=train_bench.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(train_bench.train_bench)
app.command("pipe-infer", epilog=pipe_infer.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(pipe_infer.pipe_infer)
app.command("profile", epilog=profile.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(profile.profile)
app.command("memory", epilog=memory.EPILOG, context_settings=SETTINGS_AS_OPTIONS)(memory.memory)
app.command("compare", epilog=compare.EPILOG)(compare.compare)


def _version(wanted: bool) -> None:
    if wanted:
        from gpubench import devices

        gpus = ", ".join(gpu.name for gpu in devices.visible_gpus()) or "no GPU"
        print(f"gpubench {__version__} (torch {devices.torch_version() or 'not installed'}; {gpus})")
        raise typer.Exit


@app.callback()
def gpubench(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version, torch's, and the GPUs."
    ),
) -> None:
    """How fast does it run, why is it not faster, will it fit, and did the change help?"""


def main() -> None:
    """Runs the command line. Expected errors become `error:` and `hint:`; any other is a bug and keeps its trace."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without block characters is no reason to fail
    try:
        code = app(standalone_mode=False)
    except GpubenchError as error:
        show(error)
        code = error.exit_code
    except typer.TyperException as error:
        if message := error.format_message():  # none where help was shown instead
            show(UsageError(message, "gpubench --help shows how it is used"))
        code = UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    sys.exit(code)


def show(error: GpubenchError) -> None:
    """On stderr, and under torchrun once a machine: its other ranks would only repeat it."""
    if launched_by_torchrun() and Ranks.from_environment().local_rank != 0:
        time.sleep(AFTER_YOU_SECONDS)  # torchrun ends all ranks with the first one that exits
        return
    from rich.console import Console
    from rich.markup import escape

    from gpubench.report.plain import clean  # a file's name, or a model's own words, may hold anything

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(clean(error.message))}")
    if error.hint:
        console.print(f"[bold cyan]hint:[/] {escape(clean(error.hint))}")
