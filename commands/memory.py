"""gpubench memory"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench import units
from gpubench.commands import completion, options, output, program
from gpubench.commands.options import INPUT
from gpubench.commands.running import finish, print_configurations, run_and_report
from gpubench.commands.trying import check_trial_name, try_batch_sizes, try_memory_fixes
from gpubench.commands.variants import Versus
from gpubench.errors import UsageError
from gpubench.hardware import ACCELERATORS
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.registry import PROGRAM_MEMORY, RunKind, kind_of
from gpubench.settings.options import MEASUREMENT, OUTPUT

if TYPE_CHECKING:
    from gpubench.bench import Bench
    from gpubench.kinds.memory.settings import CompletedMemorySettings, MemorySettings
    from gpubench.settings.loading import Configuration

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
Gpu = Annotated[
    int | None,
    typer.Option(
        "--gpu",
        metavar="N",
        help="With --snapshot or --trace: the GPU to show; by default the one with the highest peak.",
        rich_help_panel=OUTPUT,
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
    gpu: Gpu = None,
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
    from gpubench.kinds.memory.settings import MemorySettings

    if snapshot or trace:
        file = "--snapshot" if snapshot else "--trace"
        if options.program(ctx) is not None:
            raise UsageError(f"{file} reads a file, and a program after -- is run", f"leave out {file} or the program")
        options.refuse_beside(ctx, MemorySettings, file, "snapshot", "trace", "gpu", "html", "json", "quiet", "verbose")
        _of_file(snapshot, trace, gpu, html, json=json, verbose=verbose)
        return
    shown, versus = options.Shown(json=json, quiet=quiet, verbose=verbose), Versus(vs, vs_args, vs_ref)
    is_program = program.is_given(ctx, config)
    kind = kind_of(PROGRAM_MEMORY if is_program else "memory")
    if gpu is not None:
        raise UsageError("--gpu needs --snapshot or --trace", "a run measures the GPU that it runs on")
    if html:
        raise UsageError("--html needs --snapshot or --trace", "the page of a run is report.html in its directory")
    if is_program:
        _refuse_beside_program(ctx, versus, verify=verify)
        base = program.configuration(ctx, config, kind)
    else:
        versus.refuse_without_program(ctx)
        base = _of_model(ctx, config, versus, verify=verify, check=check)
    variants = options.labelled(ctx, versus.variants(base, kind.complete), versus.own)
    run = variants[versus.own]
    searches = not is_program and run.settings.memory.find_batch_size and not run.settings.memory.predict
    if verify or searches:
        check_trial_name(run)
    if print_config:
        print_configurations(variants, "memory")
        return

    from gpubench.bench import Bench

    if check:
        variants = options.labelled(ctx, [run.called(variant="predicted"), _measured(run, kind)])
    bench = Bench(kind, shown.terminal())
    if verify or searches:
        _run_and_try(bench, run, shown, verify=verify)
    else:
        run_and_report(bench, variants, shown)


def _run_and_try(bench: "Bench", run: "Configuration[Any]", shown: options.Shown, *, verify: bool) -> None:
    """Runs a configuration, tries its fixes (`verify`) or the batch sizes that were predicted to fit, and reports."""
    (outcome,) = bench.run([run])
    stopped = try_memory_fixes(run, outcome, bench) if verify else try_batch_sizes(run, outcome, bench)
    found = outcome.recorder.findings if bench.kind.command == PROGRAM_MEMORY and not stopped else None
    if found and not any(one.measured for one in found.findings):
        bench.terminal.err.print("no finding has a fix that gpubench can try without an edit of the program")
    # The summary may have changed to that of the batch size found.
    finish([replace(outcome, summary=outcome.recorder.summary())], None, bench.terminal, json=shown.json)
    if stopped:
        raise stopped


def _refuse_beside_program(ctx: typer.Context, versus: Versus, *, verify: bool) -> None:
    """Raises UsageError for options that need a model of gpubench, or that contradict each other."""
    given = options.given(ctx)
    if verify and any(versus):
        raise UsageError("--verify tries the fixes of one program, and --vs compares two", "leave one out")
    for name in ("predict", "find_batch_size", "check", "spare", "device_model"):
        if name in given:
            raise UsageError(
                f"--{name.replace('_', '-')} needs a model that gpubench can build, and a program builds its own",
                "leave it out, or give the model as --model module:callable",
            )


def _of_model(
    ctx: typer.Context, config: str | None, versus: Versus, *, verify: bool, check: bool
) -> "Configuration[MemorySettings]":
    """The settings from all sources. Raises UsageError as `_refuse_idle` does."""
    from gpubench.kinds.memory.settings import MemorySettings
    from gpubench.settings.keys import naming_origins
    from gpubench.settings.loading import load

    base = load(MemorySettings, config, options.overrides(ctx, MemorySettings))
    with naming_origins(base.origins):
        _refuse_idle(base, verify=verify, check=check, vs=bool(versus.settings))
    return base


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


def _measured(run: "Configuration[CompletedMemorySettings]", kind: RunKind) -> "Configuration[CompletedMemorySettings]":
    """The predicted run as a measurement. Raises DeviceError if this machine does not have the predicted device."""
    from gpubench.settings.loading import completed

    changes = {"memory.predict": False, "memory.find_batch_size": False, "memory.advise": False}
    return completed(run.with_overrides(changes, "--check"), kind.complete).called(variant="measured")


def _of_file(
    snapshot: Path | None, trace: Path | None, gpu: int | None, html: Path | None, *, json: bool, verbose: int
) -> None:
    from gpubench.diagnosis.rules import advise
    from gpubench.kinds.memory import footprint_report as report
    from gpubench.memory.from_trace import of_trace_file
    from gpubench.memory.snapshot import of_snapshot
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
    known = [device for device in devices if gpu is None or device.device == f"GPU {gpu}"]
    if not known:
        names = units.listed(device.device or "a device without a number" for device in devices)
        raise UsageError(f"--gpu {gpu}: {snapshot or trace} has {names}", "name one of these, or leave --gpu out")
    found = max(known, key=lambda device: device.peak.level.total)
    findings, label = advise(found, None), (snapshot or trace or Path()).name
    document = report.document(found, findings, label, beside=devices if len(devices) > 1 else ())
    if html:
        output.write_file(html, page.render(document))
    if json:
        text = to_json(report.to_document(found, findings))
    else:
        text = Terminal(quiet=False, verbosity=verbose).render(document)
    output.write(text, "gpubench memory --snapshot FILE --html PAGE")
