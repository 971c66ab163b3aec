"""gpubench loader"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import options, program
from gpubench.commands.running import finish, print_configurations
from gpubench.commands.trying import check_trial_name, record
from gpubench.errors import UsageError
from gpubench.registry import LOADER, kind_of
from gpubench.settings.options import MEASUREMENT

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


SETTINGS = {"trust": ("steps", "repeats", "target_precision"), "quiet": ("experiment", "results")}


@options.of_settings(LOADER, SETTINGS)
def loader(
    ctx: typer.Context,
    config: options.Config = None,
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

    shown, kind = options.Shown(json=json, quiet=quiet, verbose=verbose), kind_of(LOADER)
    if not program.is_given(ctx, config):
        raise UsageError("loader needs a program", "gpubench loader -- python train.py")
    base = program.configuration(ctx, config, kind)
    (run,) = options.labelled(ctx, Versus().variants(base, kind.complete))
    check_trial_name(run)
    if print_config:
        print_configurations([run], LOADER)
        return

    from gpubench.bench import Bench

    bench = Bench(kind, shown.terminal())
    (outcome,) = bench.run([run])
    stopped = None if alone or outcome.error else _go_on(run, outcome, bench)
    finish([outcome], None, bench.terminal, json=json)
    if stopped:
        raise stopped


def _go_on(run: "Configuration[Any]", outcome: "Outcome", bench: "Bench") -> Exception | None:
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
    if stopped or not last:
        return stopped
    return record(feeding.with_ready_data(run, last[-1], bench.terminal), keep, recorder)
