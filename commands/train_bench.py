"""gpubench train-bench"""

import shlex
from collections.abc import Sequence
from typing import Any

import typer

from gpubench.commands import options
from gpubench.commands.running import print_configurations, run_and_report
from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.zoo import MODELS

EPILOG = f"""Examples:

gpubench train-bench --precision bf16

gpubench train-bench --config resnet50 --training.batch_size=64 --world-size 2

gpubench train-bench --model my_package.zoo:build --data image-folder --data.path photos/

gpubench train-bench --precision bf16 --vs precision=fp32

gpubench train-bench -- python train.py --epochs 1

gpubench train-bench --vs-args "--compile" -- python train.py

gpubench train-bench --vs-ref main -- torchrun --nproc-per-node 2 train.py

gpubench compare latest~1 latest

Every setting of --print-config is an option by its dotted name: --training.epochs=5.

Presets: {", ".join(presets())}.

Built-in models: {", ".join(MODELS)}.
"""


def train_bench(
    ctx: typer.Context,
    config: options.Config = None,
    model: options.Model = None,
    data: options.Data = None,
    precision: options.Precision = None,
    batch_size: options.BatchSize = None,
    steps: options.Steps = None,
    world_size: options.WorldSize = None,
    repeats: options.Repeats = None,
    target_precision: options.TargetPrecision = None,
    measure_peak: options.MeasurePeak = False,
    device: options.Device = None,
    vs: options.Vs = None,
    vs_args: options.VsArguments = None,
    vs_ref: options.VsRef = None,
    experiment: options.Experiment = None,
    results: options.Results = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Measure how fast a model, or your own program, trains on this machine, and where the time of a step goes."""
    program = options.program(ctx)
    if program is not None or runs_program(config):
        measure_program(
            ctx, config, program, vs, vs_args, vs_ref, print_config, json=json, quiet=quiet, verbose=verbose
        )
        return
    if vs_args or vs_ref:
        name = "--vs-args" if vs_args else "--vs-ref"
        raise UsageError(f"{name} needs a program", f"gpubench train-bench {name} ... -- python train.py")
    # Settings are imported here, and the modules that measure and draw only once the settings are valid.
    from gpubench.settings.defaults import complete
    from gpubench.settings.loading import complete_all, load
    from gpubench.settings.schema import TrainSettings

    base = load(TrainSettings, config, options.overrides(ctx, TrainSettings))
    runs = complete_all(base, vs, complete)
    if print_config:
        print_configurations(runs, "train-bench")
        return

    from gpubench.host import live
    from gpubench.host.recorder import TrainRecorder

    run_and_report(runs, TrainRecorder, live, json=json, quiet=quiet, verbose=verbose)


def runs_program(config: str | None) -> bool:
    """Returns whether `config` is the file of a run that measured a program of the user."""
    from gpubench.settings.loading import find_config, writer_of
    from gpubench.settings.schema import PROGRAM

    return config is not None and writer_of(find_config(config)) == PROGRAM


def measure_program(
    ctx: typer.Context,
    config: str | None,
    words: Sequence[str] | None,
    vs: Sequence[str] | None,
    vs_args: str | None,
    vs_ref: str | None,
    print_config: bool,
    **shown: Any,
) -> None:
    """Measures a program of the user, or two versions interleaved. `words` is None if `config` has the command."""
    from gpubench.host.program import ProgramRecorder, complete_program
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, completed, load, owners
    from gpubench.settings.schema import ProgramSettings

    known = fields(ProgramSettings)
    if launched_by_torchrun():
        raise UsageError("torchrun started gpubench", "put it behind --: gpubench train-bench -- torchrun train.py")
    if vs:
        raise UsageError("--vs changes a setting of gpubench, and a program has its own", "use --vs-args or --vs-ref")
    foreign = [name for name in options.given(ctx) if owners(name) and canonical(ProgramSettings, name) not in known]
    if foreign:
        raise UsageError(
            f"--{foreign[0].replace('_', '-')} configures a model of gpubench, not a program",
            "leave it out, or give the program an argument of its own after --",
        )
    if vs_args and vs_ref:
        raise UsageError("--vs-args and --vs-ref are two comparisons", "give one of them")
    given = options.overrides(ctx, ProgramSettings)
    if words is not None:
        given["program.command"] = shlex.join(words)
    run = completed(load(ProgramSettings, config, given), complete_program)
    runs, labels = [run], []
    if vs_args:
        more = {"program.command": f"{run.settings.program.command} {vs_args}"}
        runs, labels = [run, run.with_overrides(more, "--vs-args")], ["as given", f"with {vs_args}"]
    elif vs_ref:
        runs, labels = [run.with_overrides({"program.ref": vs_ref}, "--vs-ref"), run], [vs_ref, "this directory"]
    if print_config:
        print_configurations(runs, "train-bench")
        return

    from gpubench.host import live

    run_and_report(runs, ProgramRecorder, live, labels=labels, **shown)
