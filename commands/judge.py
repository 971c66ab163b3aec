"""gpubench judge"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench import git
from gpubench.commands import amounts, options, output, program, wrong_words
from gpubench.commands import loss_margin as of_losses
from gpubench.commands.options import option
from gpubench.commands.running import print_configurations
from gpubench.errors import Interrupted, RunDirectoryError, UsageError, one_of
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import PROGRAM, kind_of
from gpubench.units import whole

if TYPE_CHECKING:
    from gpubench.judge import Before, Terms
    from gpubench.settings.loading import Configuration

JUDGEMENT = "Judgement"
HEAD = "HEAD"
AIMS = "throughput|latency|peak_memory|energy"
EPILOG = """Examples:

gpubench judge -- python train.py

gpubench judge --base main --budget 10m -- python train.py

gpubench judge --base-args "--old" --args "--new" -- python train.py

gpubench judge --metric peak_memory --margin 5% -- python train.py

gpubench judge --ledger edits.jsonl --max-memory 22GiB -- python train.py

gpubench judge --ledger edits.jsonl

Exit codes: 0 keep, 3 discard, 4 undecided, 5 refused, 1 the base does not run, 2 usage error, 130 interrupted.
"""

Base = Annotated[
    str | None,
    option("COMMIT", "Commit to judge the working tree against; default: HEAD.", JUDGEMENT, "--base"),
]
BaseArguments = Annotated[
    str | None,
    option("ARGUMENTS", "Add these arguments to the program of the base.", JUDGEMENT, "--base-args"),
]
Arguments = Annotated[
    str | None, option("ARGUMENTS", "Add these arguments to the program that is judged.", JUDGEMENT, "--args")
]
Budget = Annotated[str | None, option("TIME", "Take at most about this long: 90s, 30m or 2h.", JUDGEMENT, "--budget")]
Rounds = Annotated[
    str | None, option("N", "Make at most this many rounds, from 3 to 30; default: 30.", JUDGEMENT, "--rounds")
]
Margin = Annotated[str, option("X%", "Keep only what gains more than this; 0.5% by default.", JUDGEMENT, "--margin")]
Aim = Annotated[str, option(AIMS, "What has to be better; throughput by default.", JUDGEMENT, "--metric")]
MaxMemory = Annotated[
    str | None, option("SIZE", "Refuse what needs more memory than this, such as 22GiB.", JUDGEMENT, "--max-memory")
]
Ledger = Annotated[
    Path | None,
    option("FILE", "Add the decision to this file; without a program, show the file.", JUDGEMENT, "--ledger"),
]
Resume = Annotated[
    str | None, option("RUN", "Go on with an undecided judgement, by its edited run.", JUDGEMENT, "--resume")
]

SETTINGS = {
    "trust": ("inference", "steps", "samples_per_step", "watch", "device"),
    "resume": ("experiment", "results"),
}
ALONE = frozenset({"ledger", "results", "json", "quiet", "verbose"})
"""The options that may stand beside --ledger where the file is only shown."""
RESUMED = ALONE | {"resume", "budget", "rounds", "trust"}
"""The options that may stand beside --resume."""
CHOSEN = ("measurement.repeats", "measurement.target_precision")
"""The settings that a judgement chooses itself."""


@options.of_settings("judge", SETTINGS)
def judge(
    ctx: typer.Context,
    config: options.Config = None,
    trust: options.Trust = False,
    base: Base = None,
    base_args: BaseArguments = None,
    args: Arguments = None,
    budget: Budget = None,
    rounds: Rounds = None,
    margin: Margin = "0.5%",
    metric: Aim = "throughput",
    max_memory: MaxMemory = None,
    loss_margin: options.LossMargin = None,
    ledger: Ledger = None,
    resume: Resume = None,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Keep an edit of your program or discard it: is it faster than before, with the same work and the same loss?"""
    if launched_by_torchrun():
        raise UsageError("judge starts fresh processes, which torchrun does not", "run it without torchrun")
    shown = options.Shown(json=json, quiet=quiet, verbose=verbose)
    if ledger and not resume and not program.is_given(ctx, config):
        _show(ctx, ledger, shown)
        return
    terms = _terms(budget, rounds, margin, metric, max_memory, loss_margin)
    if resume:
        _resume(ctx, resume, terms, ledger, shown)
        return
    variants = _variants(ctx, config, base, base_args, args)
    if print_config:
        print_configurations(variants, "judge")
        return
    _judge(options.labelled(ctx, variants, own=1), terms, ledger, shown)


def _terms(
    budget: str | None,
    rounds: str | None,
    margin: str,
    metric: str,
    max_memory: str | None,
    loss_margin: str | None,
) -> "Terms":
    """Parses the options of a judgement. Raises UsageError for what cannot be understood."""
    from gpubench.commands.compare import fraction_of
    from gpubench.compare.decision import METRICS
    from gpubench.compare.sequential import FEWEST, MOST
    from gpubench.judge import Terms

    aim = next((one for one in METRICS if one == metric.replace("-", "_")), None)
    if aim is None:
        raise UsageError(f"--metric {metric!r} is not a metric that judge decides by", one_of(metric, METRICS, ""))
    if rounds is not None and not FEWEST <= (whole(rounds) or 0) <= MOST:
        hint = f"for example --rounds 10; fewer than {FEWEST} prove nothing, and the error rates hold for up to {MOST}"
        raise UsageError(f"--rounds {rounds!r} is not a number from {FEWEST} to {MOST}", hint)
    return Terms(
        aim=aim,
        margin=0.0 if margin.strip() in ("0", "0%") else fraction_of(margin),
        max_memory=amounts.memory(max_memory, "--max-memory") if max_memory is not None else None,
        loss_margin=of_losses.parse(loss_margin),
        budget=amounts.seconds(budget, "--budget") if budget is not None else None,
        most=int(rounds) if rounds is not None else MOST,
    )


def _variants(
    ctx: typer.Context, config: str | None, base: str | None, base_args: str | None, args: str | None
) -> "list[Configuration[Any]]":
    """Returns the base and the edited version, complete. Raises an error for what cannot be judged."""
    from gpubench.compare.sequential import MOST
    from gpubench.settings.identity import BASELINE
    from gpubench.settings.loading import complete_all

    if not program.is_given(ctx, config):
        words = ["judge", *options.own_words(ctx), "--", *wrong_words.EXAMPLE]
        raise UsageError("judge needs a program", wrong_words.line(words))
    kind = kind_of(PROGRAM)
    given = program.configuration(ctx, config, kind)
    if wrong := next((key for key in CHOSEN if given.origins.get(key) == "command line"), None):
        raise UsageError(f"{wrong}: a judgement decides itself how many repeats it makes", "--rounds N limits them")
    folder, found = given.settings.program.directory or Path(), given.settings.program
    if found.ref:
        raise UsageError("program.ref is the commit of the base here", f"give it as --base {found.ref}")
    for name, text in (("--base", base), ("--base-args", base_args), ("--args", args)):
        if text is not None and not text.strip():
            raise UsageError(f"{name} is empty", "leave it out, or say what to judge")
    by_arguments = (base_args or "").split() != (args or "").split()
    ref = base or (None if by_arguments else HEAD)
    ours = {"program.command": f"{found.command} {base_args}"} if base_args else {}
    if ref:
        git.commit(folder, ref)
        if not by_arguments and git.is_at(ref, folder):
            raise UsageError(
                f"no file that git tracks has changed since {ref}: there is nothing to judge",
                "edit the program, git add its new files, or name an earlier commit by --base",
            )
        ours["program.ref"] = ref
    theirs = {"program.command": f"{found.command} {args}"} if args else {}
    rounds = {"measurement.repeats": MOST}
    variants = [given.with_overrides(changes | rounds, "judge") for changes in (ours, theirs)]
    variants = complete_all(variants, kind.complete)
    if ref is None:
        labels = [f"+ {more}" if more else BASELINE for more in (base_args, args)]
        variants = [one.called(variant=label) for one, label in zip(variants, labels, strict=True)]
    return variants


def _judge(
    variants: "list[Configuration[Any]]",
    terms: "Terms",
    ledger: Path | None,
    shown: options.Shown,
    before: "Before | None" = None,
) -> None:
    """Runs both versions until it is decided, prints the decision, and exits with its code."""
    from gpubench.bench import Bench
    from gpubench.compare import ledger as ledgers
    from gpubench.compare.result import to_json
    from gpubench.host import signals
    from gpubench.judge import Judging, announced, conclude, run
    from gpubench.report import decision as report
    from gpubench.report import index

    terminal = shown.terminal()
    if ledger:
        output.check_file(ledger, "--ledger")
        if ledger.exists():
            ledgers.read(ledger)
    with announced() as others:
        judging = Judging(terms, before, others)
        outcomes = run(variants, Bench(kind_of(PROGRAM), terminal), judging)
    path = outcomes[1].recorder.writer.path
    with signals.ignored():
        decision = conclude(outcomes, judging)
        try:
            report.write(decision, path)
        except OSError as error:
            terminal.say(f"the decision cannot be written into {path}: {error.strerror}")
    if ledger and decision.ending != "interrupted":
        ledgers.add(ledger, ledgers.line_of(decision))
    index.refresh(path.parent.parent)
    text = to_json(decision) if shown.json else terminal.render(report.document(decision))
    output.write(text, f"{path} has the decision")
    if decision.ending == "interrupted":
        raise Interrupted("interrupted", f"gpubench judge --resume {path} goes on")
    raise typer.Exit(decision.exit_code)


def _resume(ctx: typer.Context, name: str, terms: "Terms", ledger: Path | None, shown: options.Shown) -> None:
    """Goes on with an undecided judgement. Raises UsageError for other options, and for a run without one."""
    from dataclasses import replace

    from gpubench import foreign_files
    from gpubench.compare.decision import from_json
    from gpubench.judge import resumed
    from gpubench.runs.directory import CONFIG, DECISION
    from gpubench.runs.references import RESULTS, Lookup
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.loading import Configuration, completed, load

    others = options.given(ctx).keys() - RESUMED
    if others or ctx.args or options.program(ctx) is not None:
        raise UsageError(
            "--resume goes on with the settings of the judgement",
            "leave out all options but --budget, --rounds, --ledger, --trust, --json, -q and -v",
        )
    results = ctx.params.get("results") or os.environ.get("GPUBENCH_RESULTS") or RESULTS
    path = Lookup(Path(results)).run(name)
    try:
        decision = from_json(foreign_files.content(path / DECISION))
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} is not the edited run of a judgement", "gpubench runs lists them") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path / DECISION} cannot be read: {error}", "judge the edit anew") from None
    source, complete = str(path / DECISION), kind_of(PROGRAM).complete
    variants = []
    for run, version in zip(decision.runs[-1], (decision.base, decision.edited), strict=True):
        recorded: Configuration[Any] = load(COMMANDS[PROGRAM], str(Path(run) / CONFIG))
        received = Configuration(recorded.settings, dict.fromkeys(recorded.origins, source), received=source)
        variants.append(options.trusted(ctx, completed(received, complete)).called(variant=version.label))
    before = resumed(decision, variants[1].settings.program.directory or Path())
    if len(before.values) >= terms.most:
        raise UsageError(
            f"it has made {len(before.values)} rounds, and may make at most {terms.most}", "judge the edit anew"
        )
    terms = replace(
        terms,
        aim=decision.aim,
        margin=decision.margin,
        max_memory=decision.max_memory,
        loss_margin=decision.loss_margin,
    )
    _judge(variants, terms, ledger, shown, before)


def _show(ctx: typer.Context, ledger: Path, shown: options.Shown) -> None:
    """Prints a ledger."""
    from gpubench.compare.ledger import read, together
    from gpubench.report import decision as report
    from gpubench.runs.directory import to_json

    if others := sorted(options.given(ctx).keys() - ALONE) or ctx.args:
        raise UsageError(
            f"{others[0]} has no effect on a ledger that is shown", "add a program: gpubench judge -- python train.py"
        )
    terminal = shown.terminal()
    edits = read(ledger)
    if shown.json:
        text = to_json({"edits": edits, "together": together(edits)})
    else:
        text = terminal.render(report.of_ledger(ledger, edits))
    output.write(text, f"{ledger} has all edits")
