"""gpubench pipe-infer"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import completion, options, output
from gpubench.commands.running import print_configurations, run_and_report
from gpubench.commands.variants import Versus, of_values
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import kind_of
from gpubench.settings.options import PIPELINE

if TYPE_CHECKING:
    from gpubench.kinds.pipeline.resuming import Finished
    from gpubench.kinds.pipeline.settings import PipeSettings
    from gpubench.settings.loading import Configuration

WORLD_SIZE, BASELINE = "distributed.world_size", "measurement.baseline"

EPILOG = """Examples:

gpubench pipe-infer --world-size 4

gpubench pipe-infer --world-size 1,2,4

gpubench pipe-infer --world-size 4 --unet dummy --step-ms 20

gpubench pipe-infer --model path/to/sd15 --prompts prompts.txt --world-size 4 --output.images=true

gpubench pipe-infer --world-size 3 --scheduler DPMSolverMultistepScheduler --steps 50 --verify

torchrun --nproc-per-node 4 -m gpubench pipe-infer

Every setting of --print-config is an option by its dotted name: --pipeline.deadline=120.
"""


Resume = Annotated[
    str | None,
    options.option(
        "RUN", "A run that ended early: generate the missing samples.", PIPELINE, completed_by=completion.runs
    ),
]

SETTINGS = {
    "config": (
        *("model", "unet", "step_ms", "prompts", "precision", "scheduler", "steps", "guidance_scale", "samples"),
        *("seeds", "micro_batch", "world_size", "split", "in_flight", "verify", "baseline", "repeats"),
    ),
    "vs": ("device",),
    "resume": ("inject", "experiment", "results"),
}


@options.of_settings("pipe-infer", SETTINGS, several="world_size")
def pipe_infer(
    ctx: typer.Context,
    config: options.Config = None,
    vs: options.Vs = None,
    resume: Resume = None,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Split the denoising steps of a diffusion model over ranks: measure speed and idle time, and verify samples."""
    from gpubench.kinds.pipeline.settings import PipeSettings
    from gpubench.settings.keys import COMMAND_LINE
    from gpubench.settings.loading import load

    kind, shown = kind_of("pipe-infer"), options.Shown(json=json, quiet=quiet, verbose=verbose)
    overrides = options.overrides(ctx, PipeSettings)
    sizes, done = options.several(overrides, PipeSettings, WORLD_SIZE), None
    if sizes:
        refuse_beside_several(vs, resume)
    if resume is not None:
        done, base = resumed(resume, config, overrides, vs)
    else:
        base = load(PipeSettings, config, overrides)
    if sizes:
        # one rank alone is a row of the table, so that its time need not be measured for the others as well
        quicker = {} if BASELINE in base.origins else {BASELINE: "off"}
        base = base.with_overrides(quicker, COMMAND_LINE)
        variants = of_values(base, WORLD_SIZE, sizes, kind.complete)
    else:
        variants = Versus(vs).variants(base, kind.complete)
    variants = options.labelled(ctx, variants)
    if print_config:
        print_configurations(variants, "pipe-infer")
        return
    total = variants[0].settings.work.samples
    if done and not done.missing(total):
        made = f"all {total} samples of {resume} are finished"
        if not (variants[0].settings.verify and unverified(done.path)):
            print(f"nothing to do: {made}", file=sys.stderr)
            show_finished(done.path, shown)
            return
        print(f"{made} and were never verified: this run compares them with diffusers", file=sys.stderr)

    from gpubench.bench import Bench

    bench = Bench(kind, shown.terminal(), recorder=partial(kind.recorder, finished=done))
    run_and_report(bench, variants, shown, swept=bool(sizes))


def refuse_beside_several(vs: list[str] | None, resume: str | None) -> None:
    """Raises UsageError for what does not go with several numbers of ranks."""
    if vs:
        raise UsageError("--vs and several numbers of ranks are different comparisons", "give one of them")
    if resume is not None:
        raise UsageError("--resume completes one run, and several numbers of ranks start several", "give one number")
    if launched_by_torchrun():
        raise UsageError(
            "several numbers of ranks take fresh processes on one machine, and torchrun has started a fixed number",
            "start it without torchrun on one machine, or start torchrun once for each number with one --world-size",
        )


def _found(run: str, overrides: dict[str, Any]) -> Path:
    """The directory of the named run. Raises RunDirectoryError unless exactly one run has the name."""
    from gpubench.runs.references import Lookup

    return Lookup(Path(overrides.get("results") or os.environ.get("GPUBENCH_RESULTS") or "results")).run(run)


def unverified(path: Path) -> bool:
    """Tells whether no sample of the run at `path` was compared with single-process diffusers."""
    from gpubench.runs.reader import Run

    summary = Run.open(path).summary
    return not (summary and summary.pipeline and summary.pipeline.verification)


def show_finished(path: Path, shown: options.Shown) -> None:
    """Shows the results of the run at `path`, whose samples are complete, and how it ended if it did not complete.

    Raises the error of a run whose samples differed when they were verified: to make them again would change nothing.
    """
    from gpubench.errors import recorded
    from gpubench.report import run
    from gpubench.runs.directory import COMPLETED, FAILED
    from gpubench.runs.reader import Run

    found = Run.open(path)
    summary, error, terminal = found.summary, found.record.error, shown.terminal()
    text = (
        run.to_json([path])
        if shown.json
        else terminal.render(run.document([path]))
        if summary
        else f"samples: {path}\n"
    )
    output.write(text, "the run directory has all results")
    verification = summary.pipeline.verification if summary and summary.pipeline else None
    if error and verification and verification.identical < verification.samples:
        raise recorded(error)
    if found.status != COMPLETED:
        how = "failed" if found.status == FAILED else "was interrupted"
        why = f": {error['message']}" if error and error.get("message") else ""
        print(f"that run {how} after its last sample{why}", file=sys.stderr)
        if verification is None:
            print("its samples were not verified: add --verify to compare them", file=sys.stderr)


def resumed(
    name: str, config: str | None, overrides: dict[str, Any], vs: list[str] | None
) -> "tuple[Finished, Configuration[PipeSettings]]":
    """The finished samples of the named run, and the configuration that makes the others.

    The configuration has one repeat and no injected fault. Raises UsageError, RunDirectoryError or SettingsError if the
    other samples cannot be made.
    """
    from gpubench.kinds.pipeline.resuming import finished, refuse_changes, refuse_other_files, run_at
    from gpubench.kinds.pipeline.settings import CompletedPipeSettings, PipeSettings
    from gpubench.runs.directory import CONFIG
    from gpubench.settings.keys import COMMAND_LINE, flatten
    from gpubench.settings.loading import canonical, load, validate

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
    done = finished(old, settings, before.settings.work.samples)
    refuse_other_files(done, settings, before.settings.work.samples)
    if not done.missing(settings.work.samples):  # nothing is evaluated, at most verified
        run = run.with_overrides({BASELINE: "off", "profiling.enabled": False}, COMMAND_LINE)
    return done, run
