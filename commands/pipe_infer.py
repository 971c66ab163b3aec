"""gpubench pipe-infer"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import completion, options, output
from gpubench.commands.running import print_configurations, run_and_report
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.pipeline.resuming import Finished
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import PipeSettings

EPILOG = """Examples:

gpubench pipe-infer --world-size 4

gpubench pipe-infer --world-size 4 --unet dummy --step-ms 20

gpubench pipe-infer --model path/to/sd15 --prompts prompts.txt --world-size 4 --output.images=true

gpubench pipe-infer --world-size 3 --scheduler DPMSolverMultistepScheduler --steps 50 --verify

torchrun --nproc-per-node 4 -m gpubench pipe-infer

Every setting of --print-config is an option by its dotted name: --pipeline.deadline=120.
"""


def pipe_infer(
    ctx: typer.Context,
    config: options.Config = None,
    model: Annotated[str | None, options.option("DIR", "Folder of a local diffusers pipeline.", options.MODEL)] = None,
    unet: Annotated[
        str | None,
        options.option(
            "dummy|tiny|unet2d|sd15|sdxl", "Architecture with random weights, instead of --model.", options.MODEL
        ),
    ] = None,
    step_ms: Annotated[
        str | None, options.option("MS", "Duration of one evaluation of the dummy, in milliseconds.", options.MODEL)
    ] = None,
    prompts: Annotated[str | None, options.option("FILE", "Text file with one prompt per line.", options.MODEL)] = None,
    precision: Annotated[
        str | None, options.option("fp32|fp16|bf16", "Type of weights and latents.", options.MODEL)
    ] = None,
    scheduler: Annotated[
        str | None,
        options.option("CLASS", "Class name of a diffusers scheduler; the model's own by default.", options.SAMPLING),
    ] = None,
    steps: Annotated[str | None, options.option("N", "Denoising steps of each sample.", options.SAMPLING)] = None,
    guidance_scale: Annotated[
        str | None, options.option("X", "Scale of classifier-free guidance; 1 or less turns it off.", options.SAMPLING)
    ] = None,
    samples: Annotated[str | None, options.option("N", "Images to generate.", options.SAMPLING)] = None,
    micro_batch: Annotated[
        str | None, options.option("N", "Images that are evaluated and handed over together.", options.SAMPLING)
    ] = None,
    world_size: options.WorldSize = None,
    split: Annotated[
        str | None,
        options.option(
            "even|balanced|A,B,...",
            "Evaluations per rank; with even, the last rank takes the remainder.",
            options.PIPELINE,
        ),
    ] = None,
    in_flight: Annotated[
        str | None,
        options.option("N", "Maximum number of hand-offs in flight on each side of a rank.", options.PIPELINE),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare each sample bit by bit with single-process diffusers; default for small models.",
            rich_help_panel=options.PIPELINE,
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        options.option("off|sequential|replicas", "What to measure in addition, for comparison.", options.MEASUREMENT),
    ] = None,
    repeats: options.Repeats = None,
    vs: options.Vs = None,
    device: options.Device = None,
    resume: Annotated[
        str | None,
        options.option(
            "RUN",
            "A run that ended early: generate the missing samples.",
            options.PIPELINE,
            completed_by=completion.runs,
        ),
    ] = None,
    inject: Annotated[
        str | None,
        options.option("FAULT", "Inject a fault, for tests: KIND,rank=R,sample=S[,seconds=T].", options.PIPELINE),
    ] = None,
    experiment: options.Experiment = None,
    results: options.Results = None,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Split the denoising steps of a diffusion model over ranks: measure speed and idle time, and verify samples."""
    from gpubench.pipeline.defaults import complete
    from gpubench.settings.loading import complete_all, load
    from gpubench.settings.schema import PipeSettings

    overrides = options.overrides(ctx, PipeSettings)
    done = None
    if resume is not None:
        done, base = resumed(resume, config, overrides, vs)
    else:
        base = load(PipeSettings, config, overrides)
    runs = options.labelled(ctx, complete_all(base, vs, complete))
    if print_config:
        print_configurations(runs, "pipe-infer")
        return
    total = runs[0].settings.work.samples
    if done and not done.missing(total):
        print(f"nothing to do: all {total} samples of {resume} are finished", file=sys.stderr)
        show_finished(done.path, json=json)
        return

    from gpubench.host import pipeline_recorder

    run_and_report(
        runs,
        partial(pipeline_recorder.PipeRecorder, finished=done),
        pipeline_recorder,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )


def _found(run: str, overrides: dict[str, Any]) -> Path:
    """Returns the directory of the run that is named. Raises RunDirectoryError if there is none, or no single one."""
    from gpubench.runs.references import Lookup

    return Lookup(Path(overrides.get("results") or os.environ.get("GPUBENCH_RESULTS") or "results")).run(run)


def show_finished(path: Path, *, json: bool) -> None:
    """Shows the results of the run at `path`. If the run failed although its samples are complete, raises its error."""
    from gpubench.errors import recorded
    from gpubench.report import run
    from gpubench.runs.directory import FAILED
    from gpubench.runs.reader import Run

    if json:
        output.write(run.to_json([path]), "the run directory has all results")
    record = Run.open(path).record
    if record.status == FAILED and record.error:
        raise recorded(record.error)


def resumed(
    name: str, config: str | None, overrides: dict[str, Any], vs: list[str] | None
) -> "tuple[Finished, Configuration[PipeSettings]]":
    """Returns the finished samples of the run that is named, and the configuration with which to make the others.

    The configuration has one repeat and no injected fault. Raises UsageError, RunDirectoryError or SettingsError if the
    other samples cannot be made.
    """
    from gpubench.pipeline.resuming import finished, refuse_changes, refuse_other_files, run_at
    from gpubench.runs.directory import CONFIG
    from gpubench.settings.keys import flatten
    from gpubench.settings.loading import canonical, load, validate
    from gpubench.settings.schema import CompletedPipeSettings, PipeSettings

    if vs:
        raise UsageError("--resume completes one run, and --vs starts two", "leave one of them out")
    if config:
        raise UsageError("--resume uses the configuration of its run", "leave --config out")
    if launched_by_torchrun():
        raise UsageError("--resume cannot run under torchrun", "start it without torchrun; gpubench starts the ranks")
    path = _found(name, overrides)
    old = run_at(path)
    before = load(PipeSettings, str(path / CONFIG))
    single = {"measurement.repeats": 1, "measurement.target_precision": None}
    requested = {canonical(PipeSettings, key): value for key, value in overrides.items()}
    if conflicts := [key for key in single if key in requested]:
        raise UsageError(f"--resume makes each missing sample once, so {conflicts[0]} cannot be set", "leave it out")
    run = load(PipeSettings, str(path / CONFIG), {"inject": None} | single | requested)
    refuse_changes(before.settings, run.settings)
    settings = validate(CompletedPipeSettings, flatten(run.settings.model_dump()), run.origins)
    done = finished(old, settings)
    refuse_other_files(done, settings)
    return done, run
