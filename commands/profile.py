"""gpubench profile"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import completion, options, output, program
from gpubench.commands.options import INPUT
from gpubench.commands.running import finish, print_configurations
from gpubench.commands.trying import check_trial_name, try_fixes, try_patch
from gpubench.commands.variants import Versus
from gpubench.errors import UsageError
from gpubench.ranks import is_rank_zero, launched_by_torchrun
from gpubench.registry import PROGRAM_PROFILE, kind_of
from gpubench.settings.options import MEASUREMENT, OUTPUT

if TYPE_CHECKING:
    from gpubench.report.profile_tables import Arrangement
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import ProfileSettings

EPILOG = """Examples:

gpubench profile

gpubench profile --config gpt2 --precision bf16 --verify

gpubench profile --inference --config gpt2

gpubench profile -- python train.py --epochs 1

gpubench profile --verify --patch -- python train.py

gpubench profile --trace run.pt.trace.json.gz

gpubench profile --trace rank0.json.gz --trace rank1.json.gz --html profile.html

gpubench profile --trace run.pt.trace.json.gz --sort kernels=calls --rows kernels=30

gpubench profile --trace before.json.gz --against after.json.gz

Every setting of --print-config is an option by its dotted name: --profiling.with_stack=true.

Exit codes: 0 done, 1 the run failed, 2 usage error or a file that is not a trace, 130 interrupted.
"""

Traces = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Diagnose an existing trace of any PyTorch program, - from standard input; repeat it for more ranks.",
        autocompletion=completion.traces,
        rich_help_panel=INPUT,
    ),
]
Against = Annotated[
    list[Path] | None,
    typer.Option(
        "--against",
        metavar="FILE",
        help="Compare --trace with this trace, recorded after a change.",
        autocompletion=completion.traces,
        rich_help_panel=INPUT,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="With --trace: also write a self-contained HTML page.", rich_help_panel=OUTPUT
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Run each proposed fix, interleaved with runs without it, and measure its effect.",
        rich_help_panel=MEASUREMENT,
    ),
]
Patch = Annotated[
    bool,
    typer.Option(
        "--patch",
        help="With --verify: write the fixes that are kept into a patch of the program, and run it as patched.",
        rich_help_panel=MEASUREMENT,
    ),
]


SETTINGS = {
    "trust": (
        *("model", "data", "precision", "batch_size", "inference", "steps", "samples_per_step", "world_size"),
        *("repeats", "device"),
    ),
    "rows": ("experiment", "results"),
}


@options.of_settings("profile", SETTINGS)
def profile(
    ctx: typer.Context,
    trace: Traces = None,
    against: Against = None,
    config: options.Config = None,
    trust: options.Trust = False,
    verify: Verify = False,
    patch: Patch = False,
    html: Html = None,
    sort: options.SortTables = None,
    rows: options.TableRows = None,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Find the bottleneck of training, inference or your own program, and estimate what fixing it saves."""
    from gpubench.report.profile_tables import arrangement
    from gpubench.settings.schema import ProfileSettings

    arranged = arrangement(sort or [], rows or [], unfolded=verbose > 1)
    if trace or against:
        allowed = ("trace", "against", "html", "sort", "rows", "json", "quiet", "verbose")
        options.refuse_beside(ctx, ProfileSettings, "--trace", *allowed)
        if launched_by_torchrun() and not is_rank_zero():
            return
        _of_files(trace or [], against or [], html, arranged, json=json, verbose=verbose)
        return
    if html:
        raise UsageError("--html belongs to --trace", "a run's own page is report.html in its directory")
    from gpubench.settings.keys import naming_origins

    shown, is_program = options.Shown(json=json, quiet=quiet, verbose=verbose), program.is_given(ctx, config)
    kind = kind_of(PROGRAM_PROFILE if is_program else "profile")
    if launched_by_torchrun() and verify and not is_program:
        raise UsageError("--verify starts fresh processes, which torchrun does not", "run it without torchrun")
    base = program.configuration(ctx, config, kind) if is_program else _of_model(ctx, config)
    (run,) = options.labelled(ctx, Versus().variants(base, kind.complete))
    if not run.settings.profiling.enabled:
        with naming_origins(run.origins):
            message = "profiling.enabled=false records no profile to diagnose"
            raise UsageError(message, "add --profiling.enabled=true", keys=["profiling.enabled"])
    _check_trials(run, verify=verify, patch=patch, is_program=is_program)
    if print_config:
        print_configurations([run], "profile")
        return

    from gpubench.bench import Bench

    bench = Bench(kind, shown.terminal())
    (outcome,) = bench.run([run])
    stopped = try_fixes(run, outcome, bench) if verify else None
    if patch and not stopped:
        stopped = try_patch(run, outcome, bench)
    finish([outcome], None, bench.terminal, json=json, arranged=arranged)
    if stopped:
        raise stopped


def _check_trials(run: "Configuration[Any]", *, verify: bool, patch: bool, is_program: bool) -> None:
    """Raises an error for trials that cannot be made, before the first run."""
    if patch and not (verify and is_program):
        raise UsageError("--patch needs --verify and a program", "gpubench profile --verify --patch -- python train.py")
    if verify:
        check_trial_name(run)


def _of_model(ctx: typer.Context, config: str | None) -> "Configuration[ProfileSettings]":
    from gpubench.settings.loading import load
    from gpubench.settings.schema import ProfileSettings

    return load(ProfileSettings, config, options.overrides(ctx, ProfileSettings))


def _of_files(
    traces: list[Path],
    against: list[Path],
    html: Path | None,
    arranged: "Arrangement",
    *,
    json: bool,
    verbose: int,
) -> None:
    from gpubench.diagnosis.rules import of_files
    from gpubench.report import page
    from gpubench.report import profile as report
    from gpubench.report.profile import Against
    from gpubench.report.terminal import Terminal
    from gpubench.runs.directory import to_json
    from gpubench.trace.profile import kernel_changes

    if against and arranged and not html:
        raise UsageError("--sort and --rows: --against shows the tables of a profile on a page only", "add --html FILE")
    if [*traces, *against].count(Path("-")) > 1:
        raise UsageError("--trace - is given twice: there is one standard input", "give the other trace as a file")
    if not traces:
        raise UsageError("--against needs --trace", "gpubench profile --trace BEFORE --against AFTER")
    if html:
        output.check_file(html, "--html", *traces, *against)
    terminal = Terminal(quiet=False, verbosity=verbose)
    found, before = of_files(traces), None
    if against:
        first, found = found, of_files(against)
        changes = kernel_changes(first.profile.ranks[0], found.profile.ranks[0])
        before = Against(first.profile, first.findings, changes)
    profile, findings = found.profile, found.findings
    if html:
        output.write_file(html, page.render(report.document(profile, findings, arranged=arranged, against=before)))
    if json:
        text = to_json(report.to_document(profile, findings, before))
    else:
        text = terminal.render(report.document(profile, findings, arranged=arranged, against=before))
    output.write(text, "gpubench profile --trace FILE --html PAGE")
