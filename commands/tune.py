"""gpubench tune"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import amounts, completion, options, output, program
from gpubench.commands import loss_margin as of_losses
from gpubench.commands.options import option
from gpubench.commands.running import print_configurations
from gpubench.errors import (
    GpubenchError,
    Interrupted,
    RunDirectoryError,
    RunFailed,
    SettingsError,
    UsageError,
    alike,
)
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import PROGRAM, kind_of
from gpubench.units import whole

if TYPE_CHECKING:
    from gpubench.bench import Bench
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import Configuration, Labels
    from gpubench.settings.schema import RunSettings
    from gpubench.tuner import SearchFolder, Tuner, Wishes
    from gpubench.tuning.progress import SearchDrawing
    from gpubench.tuning.result import Tuning

SEARCH = "Search"
QUIETER = "to detect smaller gains, close other programs, or"
EPILOG = """Examples:

gpubench tune --config tiny

gpubench tune --config resnet50 --memory 22GiB --budget 30m --keep-arithmetic

gpubench tune --only performance.compile,data.workers,precision --json

gpubench tune --try performance.cpu_threads=1,2 --try training.batch_size=64,128

gpubench tune -- python train.py --epochs 1

gpubench tune --resume results/tune-20261122-065319-773-81c0

gpubench tune --apply results/tune-20261122-065319-773-81c0

Every setting of --print-config is an option by its dotted name: --training.warmup_steps=20.

Exit codes: 0 done, 1 the program does not run, 2 usage error, 130 interrupted.
"""

Memory = Annotated[
    str | None, option("SIZE", "Keep no settings that need more memory than this, such as 22GiB.", SEARCH, "--memory")
]
Budget = Annotated[str | None, option("TIME", "Take at most about this long: 90s, 30m or 2h.", SEARCH, "--budget")]
Runs = Annotated[str | None, option("N", "Make at most this many runs.", SEARCH, "--runs")]
Only = Annotated[
    str | None, option("KEY[,KEY...]", "Try these settings only.", SEARCH, "--only", completed_by=completion.tuned)
]
Try = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        metavar="KEY=VALUE[,VALUE...]",
        help="Also try these values of a setting; repeatable.",
        autocompletion=completion.tried,
        rich_help_panel=SEARCH,
    ),
]
KeepArithmetic = Annotated[
    bool,
    typer.Option(
        "--keep-arithmetic",
        help="Try no other precision and no other batch size.",
        rich_help_panel=SEARCH,
    ),
]
Resume = Annotated[
    Path | None,
    option("DIR", "Continue the search in this directory.", SEARCH, "--resume", completed_by=completion.searches),
]


Apply = Annotated[
    Path | None,
    option(
        "DIR",
        "Apply the patch in the directory of a search, or of a profile with --patch, and nothing else.",
        SEARCH,
        "--apply",
        completed_by=completion.searches,
    ),
]


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what --apply would change, and where, and change nothing.",
        rich_help_panel=SEARCH,
    ),
]


SETTINGS = {
    "trust": (
        "model",
        "data",
        "precision",
        "batch_size",
        "inference",
        "steps",
        "samples_per_step",
        "world_size",
        "device",
    ),
    "resume": ("experiment", "results"),
}


@options.of_settings("tune", SETTINGS)
def tune(
    ctx: typer.Context,
    config: options.Config = None,
    trust: options.Trust = False,
    memory: Memory = None,
    budget: Budget = None,
    runs: Runs = None,
    only: Only = None,
    try_: Try = None,
    keep_arithmetic: KeepArithmetic = False,
    loss_margin: options.LossMargin = None,
    resume: Resume = None,
    apply: Apply = None,
    dry_run: DryRun = False,
    name: options.Name = None,
    tag: options.Tags = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    print_config: options.PrintConfig = False,
) -> None:
    """Find the fastest settings of a model or of your own program, prove them, and show what each one contributes."""
    if launched_by_torchrun():
        raise UsageError("tune starts fresh processes, which torchrun does not", "run it without torchrun")
    shown = options.Shown(json=json, quiet=quiet, verbose=verbose)
    if apply:
        _apply(ctx, apply, shown, dry_run=dry_run)
        return
    if dry_run:
        raise UsageError("--dry-run shows what --apply would change", "give --apply DIR too, or leave it out")
    if resume:
        _resume(ctx, resume, shown)
        return
    base = _asked(ctx, config)
    wishes = _wishes(base.settings, memory, budget, runs, only, try_, loss_margin, keep_arithmetic=keep_arithmetic)
    if print_config:
        print_configurations([base], "tune")
        return
    _search(options.trusted(ctx, base), wishes, options.labels(ctx), shown)


def _asked(ctx: typer.Context, config: str | None) -> "Configuration[Any]":
    """The complete settings of the baseline, from all sources."""
    from gpubench.settings.loading import completed, load
    from gpubench.settings.schema import TrainSettings

    if program.is_given(ctx, config):
        kind = kind_of(PROGRAM)
        return completed(program.configuration(ctx, config, kind), kind.complete)
    return completed(
        load(TrainSettings, config, options.overrides(ctx, TrainSettings)), kind_of("train-bench").complete
    )


def _wishes(
    settings: Any,
    memory: str | None,
    budget: str | None,
    runs: str | None,
    only: str | None,
    tried: Sequence[str] | None,
    loss_margin: str | None,
    *,
    keep_arithmetic: bool,
) -> "Wishes":
    """Parses the options of the search. Raises UsageError or SettingsError for what cannot be understood."""
    from gpubench.settings.keys import flatten
    from gpubench.settings.loading import apply_overrides, canonical, parse_assignments
    from gpubench.settings.schema import RunSettings
    from gpubench.tuner import Wishes

    cls: type[RunSettings] = type(settings)
    named = _named(cls, only)
    asked: dict[str, list[Any]] = {}
    for text in tried or []:
        name, equals, values = text.partition("=")
        if not equals or not values:
            key, colon, given = text.partition(":")
            hint = f"--try {key}={given}" if colon and given else "for example --try performance.cpu_threads=1,2"
            raise UsageError(f"--try {text!r} is not KEY=VALUE[,VALUE...]", hint)
        key = canonical(cls, name)
        for value in values.split(","):
            changed = apply_overrides(settings, parse_assignments(cls, [f"{key}={value}"]))
            asked.setdefault(key, []).append(flatten(changed.model_dump())[key])
    _refuse_idle(settings, {"--only": dict.fromkeys(named, ()), "--try": asked}, keep_arithmetic=keep_arithmetic)
    return Wishes(
        amounts.memory(memory, "--memory") if memory is not None else None,
        amounts.seconds(budget, "--budget") if budget else None,
        _count(runs) if runs is not None else None,
        frozenset(named),
        asked,
        loss_margin=of_losses.parse(loss_margin),
        keep_arithmetic=keep_arithmetic,
    )


def _refuse_idle(settings: Any, requests: Mapping[str, Mapping[str, Sequence[Any]]], *, keep_arithmetic: bool) -> None:
    """Raises UsageError for a setting that the user names and no run would change.

    `requests` has the settings that each option names, with the values to try.
    """
    from gpubench.settings.keys import flatten, in_words
    from gpubench.settings.programs import ProgramSettings
    from gpubench.tuner import changeable
    from gpubench.tuning.treatments import KEPT, OF_ARITHMETIC, numbers_of

    known, now = changeable(settings), flatten(settings.model_dump())
    for flag, key, values in ((flag, key, values) for flag, asked in requests.items() for key, values in asked.items()):
        if not _is_tuned(type(settings), key):
            raise UsageError(
                f"{flag} {key}: it changes the work itself, so it cannot be tried",
                "name settings of performance, data, training or distributed",
            )
        if key not in known and isinstance(settings, ProgramSettings):
            raise UsageError(f"{flag} {key}: it cannot be changed in a program from outside", "leave it out")
        if key not in known:
            hint = "leave it out, or tune training without --inference"
            raise UsageError(f"{flag} {key}: inference does not use it", hint)
        if keep_arithmetic and numbers_of(key) in OF_ARITHMETIC:
            hint = f"leave out {KEPT}, or {flag} {key}"
            raise UsageError(f"{flag} {key}: {KEPT} tries no other precision and no other batch size", hint)
        if values and all(value == now[key] for value in values):
            raise UsageError(f"{flag} {key}: {in_words(now[key])} is its value already", "give another value")


def _named(cls: "type[RunSettings]", only: str | None) -> list[str]:
    """The settings that --only names. Raises UsageError or SettingsError for anything else in it."""
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, nearest, suggestion

    named = [canonical(cls, name) for name in re.split(r"[,\s]+", only or "") if name]
    if only is not None and not named:
        raise UsageError("--only names no setting", "for example --only performance.compile,data.workers")
    if valued := [name for name in named if "=" in name]:
        raise UsageError(
            f"--only {valued[0]} has a value, and --only takes settings", f"did you mean --try {valued[0]}?"
        )
    if unknown := [name for name in named if name not in fields(cls)]:
        near = nearest(cls, unknown[0])
        if near is None or not _is_tuned(cls, canonical(cls, near)):
            near = _tuned_alike(cls, unknown[0])
        raise SettingsError(f"--only: there is no setting {unknown[0]!r}", suggestion(near))
    return named


def _tuned_alike(cls: "type[RunSettings]", name: str) -> str | None:
    """The setting that a search can try whose own name begins with a word of `name`, the first word first."""
    from gpubench.settings.field import fields

    tuned = [key for key in fields(cls) if _is_tuned(cls, key)]
    begun = (key for word in re.split(r"[._]", name) for key in tuned if word and key.split(".")[-1].startswith(word))
    return next(begun, None)


def _count(text: str) -> int:
    """A number of runs. Raises UsageError for any other text."""
    if not (found := whole(text)):
        raise UsageError(f"--runs {text!r} is not a number of runs", "for example --runs 40")
    return found


def _search(base: "Configuration[Any]", wishes: "Wishes", labels: "Labels", shown: options.Shown) -> None:
    """Looks at the program, and searches. The name of the `labels` is that of the folder, and every run has the tags.

    Raises UsageError for a folder that exists already.
    """
    import sys

    from gpubench.bench import Bench
    from gpubench.host import signals
    from gpubench.host.live import drawing_of
    from gpubench.tuner import SearchFolder, look
    from gpubench.tuning.progress import SearchDrawing

    terminal, kind = shown.terminal(), kind_of(base.settings.command)
    folder = _folder(base, labels.name)
    drawing = SearchDrawing(drawing_of(kind))
    bench = Bench(kind, terminal, drawing=drawing)
    try:
        with signals.end_the_run(), terminal.errors_only():
            terminal.say(f"tune: a first look at the program, with the profiler; all runs are in {folder}")
            tuning = look(base, bench, SearchFolder(folder, labels.tags), wishes, sys.argv)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            "interrupted in the first look", "there is nothing to continue: start the search again"
        ) from None
    finally:
        with suppress(OSError):  # it is empty if nothing was run
            folder.rmdir()
    _go_on(SearchFolder(folder, labels.tags), tuning, base, bench, drawing, shown)


def _folder(base: "Configuration[Any]", name: str | None) -> Path:
    """Creates the folder of a search."""
    from gpubench.foreign_files import SEARCH as SEARCH_FILE
    from gpubench.runs.directory import create_directory
    from gpubench.runs.references import Lookup

    results: Path = base.settings.results
    if name is None:
        begin = base.settings.experiment if "experiment" in base.origins else "tune"
        return create_directory(results, f"{begin}-")
    if "experiment" in base.origins:
        raise UsageError("--name and --experiment both name the folder of a search", "leave one of them out")
    if named := Lookup(results).named(name):
        raise UsageError(f"--name {name} is the name of the run {named}", "choose another name")
    try:
        (results / name).mkdir(parents=True)
    except FileExistsError:
        taken = f"--name {name}: {results / name} exists"
        is_search = (results / name / SEARCH_FILE).exists()
        others = "--resume that search" if is_search else f"gpubench runs remove {results / name}"
        raise UsageError(taken, f"choose another name, or {others}") from None
    except OSError as error:
        refused = f"cannot create {results / name}: {error.strerror}"
        raise RunDirectoryError(refused, "choose another --results") from None
    return results / name


def _search_at(folder: Path, ctx: typer.Context) -> Path:
    """The folder of the search that the user names, by its path or its name in the results folder.

    Raises RunDirectoryError for any other name, and lists the searches that there are.
    """
    from gpubench.foreign_files import SEARCH as SEARCH_FILE
    from gpubench.runs.references import RESULTS

    results = Path(ctx.params.get("results") or os.environ.get("GPUBENCH_RESULTS") or RESULTS)
    for path in (folder, results / folder):
        if (path / SEARCH_FILE).exists():
            return path
    what = "holds no search by tune" if folder.exists() else "does not exist"
    places = [place for place in (folder, results) if place.is_dir()]
    known = [file.parent for place in places for file in sorted(place.glob(f"*/{SEARCH_FILE}"), reverse=True)]
    if not known:
        raise RunDirectoryError(f"{folder} {what}", f"there is no search in {results}; gpubench tune starts one")
    near = alike(folder.name, [path.name for path in known]) if folder.name else []
    found = next((path for path in known if path.name in near), known[0])
    raise RunDirectoryError(f"{folder} {what}", f"gpubench tune --resume {shlex.quote(str(found))}")


def _apply(ctx: typer.Context, folder: Path, shown: options.Shown, *, dry_run: bool) -> None:
    """Applies the patch of a search or of a profile, or shows it. Raises UsageError for a folder without one."""
    from gpubench import units
    from gpubench.patches import apply
    from gpubench.patches.diff import lines_changed
    from gpubench.patches.result import FILE
    from gpubench.permission import permit
    from gpubench.runs.directory import CONFIG, to_json
    from gpubench.runs.references import RESULTS
    from gpubench.settings.keys import PATCH
    from gpubench.settings.loading import load
    from gpubench.settings.programs import ProgramSettings
    from gpubench.settings.trust import code_in

    allowed = {"apply", "dry_run", "results", "trust", "json", "quiet", "verbose"}
    if options.given(ctx).keys() - allowed or ctx.args or options.program(ctx) is not None:
        hint = "leave out all options but --dry-run, --trust, --json, -q and -v"
        raise UsageError("--apply applies a patch as it is", hint)
    results = Path(ctx.params.get("results") or os.environ.get("GPUBENCH_RESULTS") or RESULTS)
    found = next((one for one in (folder, results / folder) if (one / FILE).is_file()), None)
    if found is None:
        hint = "gpubench tune -- PROGRAM writes one if settings are proved to be faster"
        raise UsageError(f"{folder} has no {FILE}", hint)
    known = next((one for one in (found / "best.yaml", found / CONFIG) if one.is_file()), None)
    if known is None:
        raise UsageError(f"{found} does not say which program its patch is of", f"git apply {found / FILE}")
    patch = found / FILE
    run = options.trusted(ctx, load(ProgramSettings, str(known)).with_overrides({PATCH: str(patch)}, str(known)))
    if dry_run:
        code = code_in(run.settings)
    else:
        advice = f"gpubench tune --apply {shlex.quote(str(folder))} --dry-run shows the change; --trust applies it"
        (code,) = permit([run], shown._replace(quiet=True).terminal(), "apply it?", advice)  # it only asks
    assert code  # a patch is code
    files = apply.applied(patch, code.directory, code.patch)
    if not dry_run:
        apply.apply(files, code.directory)
    lines = {name: lines_changed(versions) for name, versions in files.items()}
    if shown.json:
        made = {"path": str(patch), "directory": str(code.directory), "lines": lines}
        output.write(to_json(made | ({"diff": apply.shown(files)} if dry_run else {})), "")
    elif dry_run:
        counted = units.counted(len(files), "file")
        output.write(f"# {patch} would change {counted} in {code.directory}\n{apply.shown(files)}", "")
    else:
        said = [f"{code.directory / name}: {units.counted(n, 'line')} changed\n" for name, n in lines.items()]
        output.write("".join(said), "")


def _resume(ctx: typer.Context, folder: Path, shown: options.Shown) -> None:
    """Continues a search. Raises UsageError for a folder without one, or beside other options."""
    import msgspec

    from gpubench.bench import Bench
    from gpubench.host.live import drawing_of
    from gpubench.permission import permit
    from gpubench.runs.catalogue import Catalogue
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.loading import Configuration, validate
    from gpubench.tuner import SearchFolder
    from gpubench.tuning.progress import SearchDrawing
    from gpubench.tuning.result import FILE, read

    given = options.given(ctx)
    others = given.keys() - {"resume", "budget", "runs", "trust", "json", "quiet", "verbose"}
    if others or ctx.args or options.program(ctx) is not None:
        raise UsageError(
            "--resume continues with the settings of the search",
            "leave out all options but --budget, --runs, --trust, --json, -q and -v",
        )
    folder = _search_at(folder, ctx)
    tuning = read(folder)
    if tuning.command not in COMMANDS:
        raise RunDirectoryError(f"{folder / FILE} has an unknown command {tuning.command!r}", "start a new search")
    if budget := given.get("budget"):
        tuning = msgspec.structs.replace(tuning, budget=tuning.seconds + amounts.seconds(budget, "--budget"))
    if runs := given.get("runs"):
        tuning = msgspec.structs.replace(tuning, most_runs=_count(runs))
    source = str(folder / FILE)
    origins = dict.fromkeys(tuning.settings, source)
    settings = validate(COMMANDS[tuning.command], tuning.settings, origins)
    base: Configuration[Any] = options.trusted(ctx, Configuration(settings, origins, received=source))
    terminal, kind = shown.terminal(), kind_of(tuning.command)
    _refuse_untried(tuning, type(settings), folder / FILE)
    permit([base], terminal)
    tags = next((entry.tags for entry in Catalogue(folder).entries()), ())
    drawing = SearchDrawing(drawing_of(kind))
    bench = Bench(kind, terminal, drawing=drawing)
    _go_on(SearchFolder(folder, tuple(tags)), tuning, base, bench, drawing, shown)


def _refuse_untried(tuning: "Tuning", cls: "type[RunSettings]", file: Path) -> None:
    """Raises RunDirectoryError if the search changes what no search may change, such as the command itself."""
    from gpubench.settings.loading import canonical

    changed = [key for treatment in tuning.treatments for level in treatment.levels for key in level]
    if wrong := next((key for key in changed if not _is_tuned(cls, canonical(cls, key))), None):
        raise RunDirectoryError(f"{file} changes {wrong}, which no search tries", "start a new search")


def _is_tuned(cls: "type[RunSettings]", key: str) -> bool:
    """Tells whether a search may try values of a setting."""
    from gpubench.settings.field import fields, setting
    from gpubench.settings.sections import NOT_TUNED, TUNED

    return key in fields(cls) and key not in NOT_TUNED and setting(fields(cls)[key]).role in TUNED


def _go_on(
    folder: "SearchFolder",
    tuning: "Tuning",
    base: "Configuration[Any]",
    bench: "Bench",
    drawing: "SearchDrawing",
    shown: options.Shown,
) -> None:
    """Runs the search to its end, prints and writes the results, and raises the error that ended it early."""
    import msgspec

    from gpubench.host import signals
    from gpubench.report import index
    from gpubench.report import tuning as report
    from gpubench.tuner import Tuner
    from gpubench.tuning.result import claim, save

    terminal = bench.terminal

    def keep(found: "Tuning") -> None:
        save(folder.path, found)

    lock = claim(folder.path)
    going_on = msgspec.structs.replace(tuning, status="running", error=None)
    tuner = Tuner(folder, going_on, base, bench, keep)
    ended: GpubenchError | None = None
    try:
        with signals.end_the_run():
            keep(tuner.tuning)
            _measure(tuner, drawing, terminal)
    except (KeyboardInterrupt, Interrupted):  # between two runs, or in one
        ended = Interrupted("interrupted", f"gpubench tune --resume {folder.path} continues the search")
    except GpubenchError as error:
        ended = error
    try:
        with signals.ignored():
            tuner.conclude(ended)
        if ended is None:
            ended = _patch(tuner, drawing, terminal)
        found = tuner.tuning
        best = tuner.configuration(found.conclusion.best) if found.keep and found.conclusion else None
        with signals.ignored():
            report.write(folder.path, found, best.to_yaml() if best else None)
    except (RunFailed, OSError) as error:  # such as a full disk; what is known can still be printed
        ended = ended or RunFailed(f"cannot write all results into {folder.path}: {error}", "free some disk space")
    found = tuner.tuning
    lock.close()
    index.refresh(folder.path.parent)
    text = report.to_json(folder.path, found) if shown.json else terminal.render(report.document(folder.path, found))
    output.write(text, f"{folder.path} has all results")
    if ended:
        raise ended


def _measure(tuner: "Tuner", drawing: "SearchDrawing", terminal: "Terminal") -> None:
    """Runs the search to its end. Raises what ends it early."""
    from gpubench import units
    from gpubench.report.tuning import BUSY
    from gpubench.runs.warnings import more_steps
    from gpubench.tuning import progress

    tuning = tuner.tuning
    block = tuner.next() if tuning.treatments else None
    if tuning.treatments:
        planned = progress.length(tuner.plan() if block else None, tuner.seconds_a_run())
        terminal.say(f"tune: {units.counted(len(tuning.treatments), 'setting')} to try, {planned}")
    while block:
        terminal.say(f"tune: {drawing.show(tuner.tuning, block, tuner.plan(), tuner.standing())}")
        with terminal.errors_only():
            tuner.advance(block)
        if block.stage == "noise" and (noise := tuner.noise()) and noise.sigma > BUSY:
            advice = f"{QUIETER} {more_steps(tuning.settings)}"
            terminal.say(f"tune: equal runs differ by {units.percent(noise.sigma)}: {advice}")
        block = tuner.next()


def _patch(tuner: "Tuner", drawing: "SearchDrawing", terminal: "Terminal") -> GpubenchError | None:
    """Makes the patch of the program and runs it. Returns the error that ended its runs; None without one."""
    from gpubench.host import signals
    from gpubench.tuning.progress import PATCHING

    try:
        with signals.end_the_run():
            if tuner.tuning.keep and tuner.tuning.places:
                terminal.say(f"tune: {PATCHING}")
            drawing.show_patch()
            tuner.patch()
    except (KeyboardInterrupt, Interrupted):
        return Interrupted("interrupted while the patch was run", "the patch is written, and the settings are proved")
    except GpubenchError as error:
        return error
    return None
