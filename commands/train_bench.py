"""gpubench train-bench"""

from typing import TYPE_CHECKING, Any

import typer

from gpubench.commands import gate, options, program
from gpubench.commands import loss_margin as of_losses
from gpubench.commands.running import print_configurations, run_and_report
from gpubench.commands.variants import Versus, of_values
from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import PROGRAM, RunKind, kind_of
from gpubench.zoo import MODELS

if TYPE_CHECKING:
    from gpubench.settings.loading import Configuration

BATCH_SIZE = "training.batch_size"

EPILOG = f"""Examples:

gpubench train-bench --precision bf16

gpubench train-bench --config resnet50 --training.batch_size=64 --world-size 2

gpubench train-bench --model my_package.zoo:build --data image-folder --data.path photos/

gpubench train-bench --precision bf16 --vs precision=fp32

gpubench train-bench --inference --model resnet50 --batch-size 1,4,16,64

gpubench train-bench -- python train.py --epochs 1

gpubench train-bench --inference -- python serve.py

gpubench train-bench --vs-args "--compile" -- python train.py

gpubench train-bench --vs-ref main -- torchrun --nproc-per-node 2 train.py

gpubench train-bench --vs-ref main --fail-on "step_time>2%" -- python train.py

gpubench compare latest~1 latest

Every setting of --print-config is an option by its dotted name: --training.epochs=5.

Presets: {", ".join(presets())}.

Built-in models: {", ".join(MODELS)}.

Exit codes: 0 done, 1 a run failed, 2 usage error, {gate.EXIT_CODES}, 130 interrupted.
"""


SETTINGS = {
    "trust": (
        *("model", "data", "precision", "batch_size", "inference", "steps", "samples_per_step", "watch", "world_size"),
        *("repeats", "target_precision", "measure_peak", "device"),
    ),
    "strict": ("experiment", "results"),
}


@options.of_settings("train-bench", SETTINGS, several="batch_size")
def train_bench(
    ctx: typer.Context,
    config: options.Config = None,
    trust: options.Trust = False,
    vs: options.Vs = None,
    vs_args: options.VsArguments = None,
    vs_ref: options.VsRef = None,
    loss_margin: options.LossMargin = None,
    fail_on: options.FailOn = None,
    strict: options.Strict = False,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Measure how fast a model, or your own program, trains or infers on this machine, and where the time goes."""
    shown, versus = options.Shown(json=json, quiet=quiet, verbose=verbose), Versus(vs, vs_args, vs_ref)
    gated = gate.of_new_runs(fail_on, strict=strict, two_sided=any(versus))
    margin = of_losses.of_comparison(loss_margin, compared=any(versus))
    kind = kind_of(PROGRAM if program.is_given(ctx, config) else "train-bench")

    # Which variants? The run that is asked for, alone or beside another version of it, or a run for each batch size.
    variants = _variants(ctx, config, kind, versus)
    swept = len(variants) > 1 and not any(versus)
    variants = options.labelled(ctx, variants, versus.own)
    if print_config:
        print_configurations(variants, "train-bench")
        return

    # Run them interleaved, each repeat in fresh processes, until each has its repeats; then say what they show.
    from gpubench.bench import Bench  # not loaded for settings that are refused

    bench = Bench(kind, shown.terminal())
    run_and_report(bench, variants, shown, swept=swept, gate=gated, loss_margin=margin)


def _variants(ctx: typer.Context, config: str | None, kind: RunKind, versus: Versus) -> "list[Configuration[Any]]":
    """The variants to run, complete and named. Raises an error for what cannot be run."""
    from gpubench.settings.loading import load
    from gpubench.settings.schema import TrainSettings

    if kind.command == PROGRAM:
        return versus.variants(program.configuration(ctx, config, kind), kind.complete)
    versus.refuse_without_program(ctx)
    given = options.overrides(ctx, TrainSettings)
    sizes = options.several(given, TrainSettings, BATCH_SIZE)
    if sizes and versus.settings:
        raise UsageError("--vs and several batch sizes are different comparisons", "give one of them")
    if sizes and launched_by_torchrun():
        raise UsageError("several batch sizes take fresh processes, which torchrun does not start", "give one")
    base = load(TrainSettings, config, given)
    return of_values(base, BATCH_SIZE, sizes, kind.complete) if sizes else versus.variants(base, kind.complete)
