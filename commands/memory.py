"""gpubench memory"""

from collections.abc import Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.commands import options, output
from gpubench.commands.memory_trying import try_out
from gpubench.commands.options import INPUT, MEASUREMENT, OUTPUT
from gpubench.commands.running import finish, measured, resolved
from gpubench.errors import UsageError
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
Margin = Annotated[str | None, options.option("P%", "Part of the memory that this batch leaves free.", MEASUREMENT)]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Run every fix that is proposed, for what it saves and costs.", rich_help_panel=MEASUREMENT
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
    device: options.Device = None,
    predict: Predict = False,
    device_model: DeviceModel = None,
    device_memory: DeviceMemory = None,
    find_batch_size: FindBatchSize = False,
    margin: Margin = None,
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
    from gpubench.configuration import load, parse_unknown_overrides

    named = options.given(
        config=config,
        model=model,
        data=data,
        precision=precision,
        batch_size=batch_size,
        world_size=world_size,
        device=device,
        predict="true" if predict else None,
        device_model=device_model,
        device_memory=device_memory,
        find_batch_size="true" if find_batch_size else None,
        margin=margin,
        experiment=experiment,
        results=results,
    )
    overrides = named | parse_unknown_overrides(ctx.args)
    switches = {"--verify": verify, "--check": check, "--print-config": print_config}
    if snapshot or trace:
        _of_file(snapshot, trace, overrides, [name for name, on in switches.items() if on], html, json=json)
        return
    if html:
        raise UsageError("--html belongs to a file", "a run's own page is report.html in its directory")

    from gpubench.memory_defaults import complete_memory
    from gpubench.settings import MemorySettings

    config = overrides.pop("config", None)
    _refuse_idle(overrides, verify=verify, check=check)
    if launched_by_torchrun():
        overrides |= options.under_torchrun(overrides, None)
    (run,) = resolved(load(MemorySettings, config, overrides), None, complete_memory)
    if print_config:
        output.write(run.to_yaml(), "gpubench memory --print-config > FILE")
        return
    beside = [_checking(run)] if check else []
    _of_run(run, beside, verify=verify, json=json, quiet=quiet, verbose=verbose)


def _refuse_idle(overrides: dict[str, str], *, verify: bool, check: bool) -> None:
    """Raises UsageError for options that would do nothing."""
    predicting, finding = "predict" in overrides, "find_batch_size" in overrides
    for wrong, said, hint in (
        (verify and predicting, "--verify runs what --predict only predicts", "leave one of them out"),
        (verify and finding, "--verify is for one batch, and --find-batch-size is for many", "leave one of them out"),
        (check and not predicting, "--check lays a measurement beside a prediction", "add --predict"),
        (check and finding, "--check is for one batch; --find-batch-size runs its own", "leave --check out"),
        (
            "device_model" in overrides and (not predicting or overrides.get("device") == "cpu"),
            "--device-model is for predictions of a GPU",
            "add --predict, and leave --device out",
        ),
        (
            launched_by_torchrun() and not predicting and (verify or finding),
            "--verify and --find-batch-size start fresh processes, which torchrun does not",
            "run it without torchrun, with --world-size",
        ),
        (
            launched_by_torchrun() and check,
            "--check starts fresh processes, which torchrun does not",
            "use --world-size",
        ),
        ("margin" in overrides and not finding, "--margin is for --find-batch-size", "leave it out"),
    ):
        if wrong:
            raise UsageError(said, hint)


def _checking(run: "Configuration[MemorySettings]") -> "Configuration[MemorySettings]":
    """The same run, measured. Raises DeviceError where what was predicted for is not here."""
    from gpubench.defaults import completed
    from gpubench.memory_defaults import complete_memory

    changes = {"memory.predict": False, "memory.find_batch_size": False, "memory.advise": False}
    return completed(run.with_overrides(changes, "--check"), complete_memory)


def _of_file(
    snapshot: Path | None,
    trace: Path | None,
    overrides: dict[str, str],
    switches: list[str],
    html: Path | None,
    *,
    json: bool,
) -> None:
    """Raises UsageError for options that only a run can follow."""
    from gpubench.memory.advice import advise
    from gpubench.memory.files import of_snapshot, of_trace_file
    from gpubench.report import footprint_page, footprint_tables
    from gpubench.terminal import Terminal

    if launched_by_torchrun() and not is_rank_zero():
        return
    if snapshot and trace:
        raise UsageError("--snapshot and --trace are one file each", "give one of them")
    given = [*(f"--{key.replace('_', '-')}" for key in overrides), *switches]
    if given:
        raise UsageError(f"{given[0]} is for a run, and a file tells of one that is over", "leave it out")
    if html:
        output.check_file(html, "--html", *filter(None, (snapshot, trace)))
    devices = of_snapshot(snapshot) if snapshot else of_trace_file(trace or Path())
    found = max(devices, key=lambda one: one.peak.level.total)
    findings, label = advise(found, None), (snapshot or trace or Path()).name
    if html:
        output.write_file(html, footprint_page.page(found, findings, label))
    if json:
        text = dumps(footprint_tables.to_document(found, findings), indent=2, ensure_ascii=False) + "\n"
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
    from gpubench import live_memory, notebook
    from gpubench.memory_recording import MemoryRecorder
    from gpubench.report import footprints, frame
    from gpubench.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measured([run, *beside], MemoryRecorder, live_memory, terminal)
    stopped = try_out(run, outcomes[0], terminal, verify=verify)
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair = notebook.judge_pair(paths, ("predicted", "measured")) if beside else None
    finish(frame.to_json(outcomes, pair) if json else terminal.render(footprints.show, outcomes, pair), outcomes)
    if stopped:
        raise stopped
