"""gpubench loader"""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import options, program
from gpubench.commands.running import finish, print_configurations
from gpubench.commands.trying import check_trial_name, record
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import LOADER, kind_of
from gpubench.settings.options import MEASUREMENT, MODEL
from gpubench.units import whole

if TYPE_CHECKING:
    from gpubench.bench import Bench
    from gpubench.data_cost import DataCost
    from gpubench.host.schedule import Outcome
    from gpubench.settings.loading import Configuration

EPILOG = """Examples:

gpubench loader -- python train.py

gpubench loader --alone -- python train.py

gpubench loader --data my_data:dataset --batch-size 64

gpubench compare latest~1 latest

Every setting of --print-config is an option by its dotted name: --data.workers=4.

Exit codes: 0 done, 1 the run failed, 2 usage error, 130 interrupted.
"""

Alone = Annotated[
    bool,
    typer.Option(
        "--alone",
        help="Measure the loader as the program has it alone: with no other number of workers, and without training.",
        rich_help_panel=MEASUREMENT,
    ),
]


Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="MODULE:CALLABLE",
        help="Draw from a dataset, a DataLoader or batches that a callable returns, without a program.",
        rich_help_panel=MODEL,
    ),
]
BatchSize = Annotated[
    str | None,
    typer.Option(
        "--batch-size", metavar="N", help="With --data: samples in a batch; 32 by default.", rich_help_panel=MODEL
    ),
]


SETTINGS = {"trust": ("steps", "repeats", "target_precision"), "quiet": ("experiment", "results")}


@options.of_settings(LOADER, SETTINGS)
def loader(
    ctx: typer.Context,
    config: options.Config = None,
    data: Data = None,
    batch_size: BatchSize = None,
    trust: options.Trust = False,
    alone: Alone = False,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Measure what the data of your program costs, stage by stage, and what it takes not to wait for it."""
    from gpubench.commands.variants import Versus

    if launched_by_torchrun():
        raise UsageError("loader starts fresh processes, which torchrun does not", "run it without torchrun")
    shown, kind = options.Shown(json=json, quiet=quiet, verbose=verbose), kind_of(LOADER)
    base = _of_data(ctx, config, data, batch_size) if data or batch_size else _of_program(ctx, config)
    (run,) = options.labelled(ctx, Versus().variants(base, kind.complete))
    check_trial_name(run)
    if print_config:
        print_configurations([run], LOADER)
        return

    from gpubench.bench import Bench

    bench = Bench(kind, shown.terminal())
    (outcome,) = bench.run([run])
    stopped = None if alone or outcome.error else _go_on(run, outcome, bench, trains=not data)
    finish([outcome], None, bench.terminal, json=json)
    if stopped:
        raise stopped


def _of_program(ctx: typer.Context, config: str | None) -> "Configuration[Any]":
    if not program.is_given(ctx, config):
        raise UsageError(
            "loader needs a program that trains, or its data",
            "gpubench loader -- python train.py, or gpubench loader --data my_data:dataset --batch-size 64",
        )
    return program.configuration(ctx, config, kind_of(LOADER))


def _of_data(ctx: typer.Context, config: str | None, data: str | None, batch_size: str | None) -> "Configuration[Any]":
    """The settings of a run without a program. Raises UsageError and DataError for what cannot be drawn from."""
    from gpubench.errors import DataError
    from gpubench.kinds.loader.headline import OWN_DATA
    from gpubench.settings.callables import refuse_missing
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.data_sources import names_callable
    from gpubench.settings.loading import load

    if options.program(ctx) is not None:
        if not data:
            raise UsageError("--batch-size goes with --data: a program has a batch size of its own", "leave it out")
        raise UsageError("--data takes the place of a program, and a program after -- has its own", "leave one out")
    if data is None:
        raise UsageError("--batch-size needs --data", "gpubench loader --data my_data:dataset --batch-size 64")
    if batch_size is not None and not whole(batch_size):
        raise UsageError(f"--batch-size takes a whole number of 1 or more, not {batch_size!r}", "for example 64")
    if not names_callable(data):
        raise UsageError(f"--data {data!r} is not module:callable", "for example my_data:dataset, of my_data.py")
    refuse_missing("--data", data, DataError, [])
    words = [sys.executable, "-m", OWN_DATA, data, batch_size or "-"]
    cls = COMMANDS[LOADER]
    return load(cls, config, options.overrides(ctx, cls) | {"program.command": shlex.join(words)})


def _go_on(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench", *, trains: bool) -> Exception | None:
    """Tries other numbers of workers, and trains with data that is always ready. Returns the error that ended it."""
    from gpubench import feeding
    from gpubench.kinds.loader.recorder import LoaderRecorder

    recorder = outcome.recorder
    assert isinstance(recorder, LoaderRecorder)
    last: list[DataCost] = []

    def keep(found: "DataCost") -> None:
        last.append(found)
        recorder.keep_cost(found)

    stopped = record(feeding.with_workers(run, outcome, bench), keep, recorder)
    if stopped or not last or not trains:
        return stopped
    return record(feeding.with_ready_data(run, last[-1], bench.terminal), keep, recorder)
