"""gpubench memory"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.commands import options, output, trying
from gpubench.commands.options import INPUT, MEASUREMENT, OUTPUT
from gpubench.commands.running import finish, measured, print_configurations, resolved
from gpubench.errors import UsageError
from gpubench.origins import COMMAND_LINE
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.configuration import Configuration
    from gpubench.settings import MemorySettings

EPILOG = """Examples:

gpubench memory

gpubench memory --config gpt2 --device-model h200 --predict

gpubench memory --snapshot snapshot.pickle --html memory.html

gpubench memory --trace run.pt.trace.json.gz

Every setting of --print-config is an option by its dot-key: --training.optimizer=sgd.

Exit codes: 0 done, 1 the run failed, 2 usage or a file that tells of no memory, 130 interrupted.
"""

Steps = Annotated[str | None, options.option("N", "Optimizer steps to follow, not to time; 3 by default.", MEASUREMENT)]
Predict = Annotated[
    bool,
    typer.Option("--predict", help="Predict for a GPU, without one.", rich_help_panel=MEASUREMENT),
]
DeviceModel = Annotated[str | None, options.option("NAME", "GPU to predict for, as h200 or a100-80gb.", MEASUREMENT)]
DeviceMemory = Annotated[str | None, options.option("SIZE", "Memory to fit into, as 80GiB.", MEASUREMENT)]
FindBatchSize = Annotated[
    bool,
    typer.Option("--find-batch-size", help="Find the largest batch that fits.", rich_help_panel=MEASUREMENT),
]
Spare = Annotated[
    str | None, options.option("P%", "Share of the memory that this batch leaves free; 5% by default.", MEASUREMENT)
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Verify the fixes that are proposed: run each, for what it saves and costs.",
        rich_help_panel=MEASUREMENT,
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="With --predict: measure as well, and lay the two side by side.", rich_help_panel=MEASUREMENT
    ),
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        metavar="FILE",
        help="Read a snapshot of the CUDA allocator, of any program.",
        rich_help_panel=INPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Read a trace recorded with profile_memory, of any program.",
        rich_help_panel=INPUT,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Of a file: write a page as well.", rich_help_panel=OUTPUT),
]


def memory(
    ctx: typer.Context,
    snapshot: Snapshot = None,
    trace: Trace = None,
    config: options.Config = None,
    model: options.Model = None,
    data: options.Data = None,
    precision: options.Precision = None,
    batch_size: options.BatchSize = None,
    world_size: options.WorldSize = None,
    steps: Steps = None,
    device: options.Device = None,
    predict: Predict = False,
    device_model: DeviceModel = None,
    device_memory: DeviceMemory = None,
    find_batch_size: FindBatchSize = False,
    spare: Spare = None,
    check: Check = False,
    verify: Verify = False,
    html: Html = None,
    experiment: options.Experiment = None,
    results: options.Results = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Show what fills the memory at each phase, and what would fit."""
    from gpubench.settings import MemorySettings

    if snapshot or trace:
        file = "--snapshot" if snapshot else "--trace"
        options.refuse_beside(ctx, MemorySettings, file, "snapshot", "trace", "html", "json", "quiet", "verbose")
        _of_file(snapshot, trace, html, json=json)
        return
    if html:
        raise UsageError("--html belongs to a file", "a run's own page is report.html in its directory")

    from gpubench.configuration import load
    from gpubench.memory_defaults import complete_memory
    from gpubench.origins import telling

    base = load(MemorySettings, config, options.overrides(ctx, MemorySettings))
    with telling(base.origins):
        _refuse_idle(base, verify=verify, check=check)
    (run,) = resolved(base, None, complete_memory)
    if verify or (base.settings.memory.find_batch_size and not base.settings.memory.predict):
        trying.check(run)
    if print_config:
        print_configurations([run], "memory")
        return
    beside = [_checking(run)] if check else []
    _of_run(run, beside, verify=verify, json=json, quiet=quiet, verbose=verbose)


def _refuse_idle(base: "Configuration[MemorySettings]", *, verify: bool, check: bool) -> None:
    """Raises UsageError for options that would do nothing."""
    memory, device = base.settings.memory, base.settings.device
    predicting, finding = memory.predict, memory.find_batch_size
    for wrong, said, hint in (
        (verify and predicting, "--verify runs what memory.predict=true only predicts", "leave one of them out"),
        (verify and finding, "--verify is for one batch, and memory.find_batch_size=true for many", "leave one out"),
        (check and not predicting, "--check lays a measurement beside a prediction", "add --predict"),
        (check and finding, "--check is for one batch; memory.find_batch_size=true runs its own", "leave --check out"),
        (
            bool(memory.device_model) and not predicting,
            f"memory.device_model={memory.device_model} is for predictions",
            "add --predict, or leave it out",
        ),
        (
            bool(memory.device_model) and device == "cpu",
            f"memory.device_model={memory.device_model} is a GPU, and device=cpu is not",
            "use --device cuda to predict for the GPU",
        ),
        (
            launched_by_torchrun() and predicting,
            "memory.predict=true: one process predicts for all ranks, and torchrun started several",
            "run it without torchrun, with --world-size",
        ),
        (
            launched_by_torchrun() and (verify or finding),
            ("--verify" if verify else "memory.find_batch_size=true") + " starts fresh processes; torchrun does not",
            "run it without torchrun, with --world-size",
        ),
        (
            base.origins.get("memory.spare") == COMMAND_LINE and not finding,
            "--spare is for --find-batch-size",
            "leave it out",
        ),
    ):
        if wrong:
            raise UsageError(said, hint)


def _checking(run: "Configuration[MemorySettings]") -> "Configuration[MemorySettings]":
    """The same run, measured. Raises DeviceError where what was predicted for is not here."""
    from gpubench.defaults import completed
    from gpubench.memory_defaults import complete_memory

    changes = {"memory.predict": False, "memory.find_batch_size": False, "memory.advise": False}
    return completed(run.with_overrides(changes, "--check"), complete_memory)


def _of_file(snapshot: Path | None, trace: Path | None, html: Path | None, *, json: bool) -> None:
    from gpubench.memory.advice import advise
    from gpubench.memory.files import of_snapshot, of_trace_file
    from gpubench.report import footprint_page, footprint_tables
    from gpubench.runs import to_json
    from gpubench.terminal import Terminal

    if launched_by_torchrun() and not is_rank_zero():
        return
    if snapshot and trace:
        raise UsageError("--snapshot and --trace are one file each", "give one of them")
    if html:
        output.check_file(html, "--html", *filter(None, (snapshot, trace)))
    devices = of_snapshot(snapshot) if snapshot else of_trace_file(trace or Path())
    found = max(devices, key=lambda one: one.peak.level.total)
    findings, label = advise(found, None), (snapshot or trace or Path()).name
    if html:
        output.write_file(html, footprint_page.page(found, findings, label))
    if json:
        text = to_json(footprint_tables.to_document(found, findings))
    else:
        show = partial(footprint_tables.show, label=label)
        text = Terminal(quiet=False, verbosity=0).render(show, found, findings)
    output.write(text, "gpubench memory --snapshot FILE --html PAGE")


def _of_run(
    run: "Configuration[MemorySettings]",
    beside: "Sequence[Configuration[MemorySettings]]",
    *,
    verify: bool,
    json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    from gpubench import notebook
    from gpubench.host import live_memory
    from gpubench.host.memory_recording import MemoryRecorder
    from gpubench.report import footprints, frame
    from gpubench.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measured([run, *beside], MemoryRecorder, live_memory, terminal)
    stopped = trying.memory(run, outcomes[0], terminal, verify=verify)
    outcomes[0] = replace(outcomes[0], summary=outcomes[0].recorder.summary())  # of the batch that was found
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair = notebook.judge_pair(paths, ("predicted", "measured")) if beside else None
    finish(frame.to_json(outcomes, pair) if json else terminal.render(footprints.show, outcomes, pair), outcomes)
    if stopped:
        raise stopped
