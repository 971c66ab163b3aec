"""gpubench memory"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.commands import completion, options, output, program
from gpubench.commands.options import INPUT
from gpubench.commands.running import (
    check_trial_name,
    finish,
    measure,
    print_configurations,
    run_and_report,
    try_memory_advice,
)
from gpubench.errors import UsageError
from gpubench.hardware import ACCELERATORS
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.settings.options import MEASUREMENT, OUTPUT

if TYPE_CHECKING:
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import CompletedMemorySettings, MemorySettings

EPILOG = f"""Examples:

gpubench memory

gpubench memory --config gpt2 --device-model h200 --predict

gpubench memory -- python train.py --epochs 1

gpubench memory --verify -- python train.py

gpubench memory --vs precision=bf16 -- python train.py

gpubench memory --snapshot snapshot.pickle --html memory.html

gpubench memory --trace run.pt.trace.json.gz

Every setting of --print-config is an option by its dotted name: --training.optimizer=sgd.

GPUs that --device-model knows: {", ".join(one.key for one in ACCELERATORS)}.

Exit codes: 0 done, 1 the run failed, 2 usage error or a file without memory data, 130 interrupted.
"""

Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Run each proposed fix and measure what it saves and costs.",
        rich_help_panel=MEASUREMENT,
    ),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="With --predict: also measure, and compare the two.", rich_help_panel=MEASUREMENT),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        metavar="FILE",
        help="Read a snapshot of the CUDA allocator, written by any program.",
        rich_help_panel=INPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Read a trace of any program, recorded with profile_memory=True.",
        autocompletion=completion.traces,
        rich_help_panel=INPUT,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="With --snapshot or --trace: also write an HTML page.", rich_help_panel=OUTPUT
    ),
]


SETTINGS = {
    "trust": ("model", "data", "precision", "batch_size", "inference", "world_size", "steps", "device"),
    "vs_ref": ("predict", "device_model", "device_memory", "find_batch_size", "spare"),
    "html": ("experiment", "results"),
}


@options.of_settings("memory", SETTINGS)
def memory(
    ctx: typer.Context,
    snapshot: Snapshot = None,
    trace: Trace = None,
    config: options.Config = None,
    trust: options.Trust = False,
    vs: options.Vs = None,
    vs_args: options.VsArguments = None,
    vs_ref: options.VsRef = None,
    check: Check = False,
    verify: Verify = False,
    html: Html = None,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Show what uses the memory of a model or of your own program in each phase, and which batch size fits."""
    from gpubench.settings.schema import MemorySettings

    if snapshot or trace:
        file = "--snapshot" if snapshot else "--trace"
        if options.program(ctx) is not None:
            raise UsageError(f"{file} reads a file, and a program after -- is run", f"leave out {file} or the program")
        options.refuse_beside(ctx, MemorySettings, file, "snapshot", "trace", "html", "json", "quiet", "verbose")
        _of_file(snapshot, trace, html, json=json, verbose=verbose)
        return
    versus = program.Versus(vs, vs_args, vs_ref)
    if program.is_given(ctx, config):
        _refuse_beside_program(ctx)
        shown = options.Shown(json=json, quiet=quiet, verbose=verbose)
        program.follow(ctx, config, shown, versus, verify=verify, print_config=print_config)
        return
    versus.refuse_without_program(ctx)
    if html:
        raise UsageError("--html needs --snapshot or --trace", "the page of a run is report.html in its directory")

    from gpubench.memory.defaults import complete_memory
    from gpubench.settings.keys import naming_origins
    from gpubench.settings.loading import complete_all, load

    base = load(MemorySettings, config, options.overrides(ctx, MemorySettings))
    with naming_origins(base.origins):
        _refuse_idle(base, verify=verify, check=check, vs=bool(vs))
    run, *others = runs = options.labelled(ctx, complete_all(base, vs, complete_memory))
    if verify or (base.settings.memory.find_batch_size and not base.settings.memory.predict):
        check_trial_name(run)
    if print_config:
        print_configurations(runs, "memory")
        return
    if others:
        from gpubench.host import memory_recorder

        run_and_report(runs, memory_recorder.MemoryRecorder, memory_recorder, json=json, quiet=quiet, verbose=verbose)
        return
    run, *measurements = options.labelled(ctx, [run, *([_checking(run)] if check else [])])
    _of_run(run, measurements, verify=verify, json=json, quiet=quiet, verbose=verbose)


def _refuse_beside_program(ctx: typer.Context) -> None:
    """Raises UsageError for options that need a model of gpubench, or that no run takes."""
    given = options.given(ctx)
    for name in ("predict", "find_batch_size", "check", "spare", "device_model"):
        if name in given:
            raise UsageError(
                f"--{name.replace('_', '-')} needs a model that gpubench can build, and a program builds its own",
                "leave it out, or give the model as --model module:callable",
            )
    if "html" in given:
        raise UsageError("--html needs --snapshot or --trace", "the page of a run is report.html in its directory")


def _refuse_idle(base: "Configuration[MemorySettings]", *, verify: bool, check: bool, vs: bool) -> None:
    """Raises UsageError for options that contradict each other or would have no effect."""
    from gpubench.settings.keys import COMMAND_LINE

    memory, device = base.settings.memory, base.settings.device
    predicting, finding = memory.predict, memory.find_batch_size
    if vs and (verify or check or finding):
        message = "--vs compares two runs, and --verify, --check and memory.find_batch_size=true start others"
        raise UsageError(message, "leave one out", keys=["memory.find_batch_size"] if finding else [])
    for wrong, message, hint, *keys in (
        (
            verify and predicting,
            "--verify runs each fix, and memory.predict=true runs nothing",
            "leave one out",
            "memory.predict",
        ),
        (
            verify and finding,
            "--verify needs one batch size, and memory.find_batch_size=true tries several",
            "leave one out",
            "memory.find_batch_size",
        ),
        (check and not predicting, "--check compares a prediction with a measurement", "add --predict"),
        (
            check and finding,
            "--check needs one batch size, and memory.find_batch_size=true tries several",
            "leave one out",
            "memory.find_batch_size",
        ),
        (
            bool(memory.device_model) and not predicting,
            f"memory.device_model={memory.device_model} is for predictions only",
            "add --predict, or leave it out",
            "memory.device_model",
        ),
        (
            bool(memory.device_model) and device == "cpu",
            f"memory.device_model={memory.device_model} is a GPU, but device is cpu",
            "use --device cuda to predict for the GPU",
            "memory.device_model",
            "device",
        ),
        (
            launched_by_torchrun() and predicting,
            "memory.predict=true: one process predicts for all ranks, and torchrun started several",
            "run it without torchrun, with --world-size",
            "memory.predict",
        ),
        (
            launched_by_torchrun() and verify,
            "--verify starts fresh processes; torchrun does not",
            "run it without torchrun, with --world-size",
        ),
        (
            launched_by_torchrun() and finding,
            "memory.find_batch_size=true starts fresh processes; torchrun does not",
            "run it without torchrun, with --world-size",
            "memory.find_batch_size",
        ),
        (
            base.origins.get("memory.spare") == COMMAND_LINE and not finding,
            "--spare is for --find-batch-size",
            "leave it out",
        ),
    ):
        if wrong:
            raise UsageError(message, hint, keys=keys)


def _checking(run: "Configuration[CompletedMemorySettings]") -> "Configuration[CompletedMemorySettings]":
    """Returns the run as a measurement. Raises DeviceError if this machine does not have the predicted device."""
    from gpubench.memory.defaults import complete_memory
    from gpubench.settings.loading import completed

    changes = {"memory.predict": False, "memory.find_batch_size": False, "memory.advise": False}
    return completed(run.with_overrides(changes, "--check"), complete_memory)


def _of_file(snapshot: Path | None, trace: Path | None, html: Path | None, *, json: bool, verbose: int) -> None:
    from gpubench.diagnosis.rules import advise
    from gpubench.memory.from_trace import of_trace_file
    from gpubench.memory.snapshot import of_snapshot
    from gpubench.report import memory as report
    from gpubench.report import page
    from gpubench.report.terminal import Terminal
    from gpubench.runs.directory import to_json

    if launched_by_torchrun() and not is_rank_zero():
        return
    if snapshot and trace:
        raise UsageError("--snapshot and --trace cannot be combined", "leave one out")
    if html:
        output.check_file(html, "--html", *filter(None, (snapshot, trace)))
    devices = of_snapshot(snapshot) if snapshot else of_trace_file(trace or Path())
    found = max(devices, key=lambda device: device.peak.level.total)
    findings, label = advise(found, None), (snapshot or trace or Path()).name
    if html:
        output.write_file(html, page.render(report.document(found, findings, label)))
    if json:
        text = to_json(report.to_document(found, findings))
    else:
        text = Terminal(quiet=False, verbosity=verbose).render(report.document(found, findings, label))
    output.write(text, "gpubench memory --snapshot FILE --html PAGE")


def _of_run(
    run: "Configuration[CompletedMemorySettings]",
    measurements: "Sequence[Configuration[CompletedMemorySettings]]",
    *,
    verify: bool,
    json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    from gpubench.host import memory_recorder
    from gpubench.report import after_run
    from gpubench.report.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measure([run, *measurements], memory_recorder.MemoryRecorder, memory_recorder, terminal)
    stopped = try_memory_advice(run, outcomes[0], terminal, verify=verify)
    outcomes[0] = replace(
        outcomes[0], summary=outcomes[0].recorder.summary()
    )  # it may have changed to that of the batch size found
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair = after_run.judge_pair(paths, ("predicted", "measured")) if measurements else None
    finish(outcomes, pair, terminal, json=json)
    if stopped:
        raise stopped
