"""gpubench train-bench"""

import typer

from gpubench.commands import gate, options, program
from gpubench.commands.running import print_configurations, run_and_report, sweep_and_report
from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.zoo import MODELS

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
        *("model", "data", "precision", "batch_size", "inference", "steps", "samples_per_step", "world_size"),
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
    versus = program.Versus(vs, vs_args, vs_ref)
    gated = gate.of_new_runs(fail_on, strict=strict, two_sided=any(versus))
    shown = options.Shown(json=json, quiet=quiet, verbose=verbose)
    if program.is_given(ctx, config):
        program.measure(ctx, config, shown, versus, gated, print_config=print_config)
        return
    versus.refuse_without_program(ctx)
    # Settings are imported here, and the modules that measure and draw only once the settings are valid.
    from gpubench.settings.defaults import complete
    from gpubench.settings.keys import COMMAND_LINE
    from gpubench.settings.loading import complete_all, completed, load, refuse_idle
    from gpubench.settings.schema import TrainSettings

    given = options.overrides(ctx, TrainSettings)
    sizes = options.several(given, TrainSettings, BATCH_SIZE)
    if sizes and vs:
        raise UsageError("--vs and several batch sizes are different comparisons", "give one of them")
    if sizes and launched_by_torchrun():
        raise UsageError("several batch sizes take fresh processes, which torchrun does not start", "give one")
    base = load(TrainSettings, config, given)
    if sizes:
        runs = refuse_idle(
            [completed(base.with_overrides({BATCH_SIZE: size}, COMMAND_LINE), complete) for size in sizes]
        )
    else:
        runs = complete_all(base, vs, complete)
    runs = options.labelled(ctx, runs)
    if print_config:
        print_configurations(runs, "train-bench")
        return

    from gpubench.host import live
    from gpubench.host.recorder import TrainRecorder

    if sizes:
        sweep_and_report(runs, TrainRecorder, live, **shown._asdict())
    else:
        run_and_report(runs, TrainRecorder, live, gate=gated, **shown._asdict())
