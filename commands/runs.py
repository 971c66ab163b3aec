"""gpubench runs"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.commands import completion, options, output
from gpubench.commands.parsing import ParsedCommand
from gpubench.errors import GpubenchError, UsageError, one_of
from gpubench.registry import COMMANDS
from gpubench.settings.options import OUTPUT
from gpubench.units import whole

if TYPE_CHECKING:
    from gpubench.report.document import Document
    from gpubench.runs.entries import Entry
    from gpubench.runs.removal import Unit

SELECTION, PRUNING = "Which runs", "What to remove"
SCREEN = 20
"""The number of runs that a listing shows."""
BROWSER_SECONDS = 3.0
"""How long to wait for the word of a browser that it cannot start. One that works takes longer to end, or ends well."""

EPILOG = """Examples:

gpubench runs

gpubench runs --model gpt2 --where precision=bf16 --since 7d --sort throughput

gpubench runs show latest

gpubench runs open latest~1

gpubench runs tag latest baseline

gpubench runs prune --keep 20 --failed --older 30d

RUN is a run directory, the beginning of a run id, a name, latest, latest~2, latest:profile or EXPERIMENT/latest.
"""

app = typer.Typer(no_args_is_help=False, rich_markup_mode="rich")

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Path, id, name or latest.", autocompletion=completion.runs, show_default=False),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Paths, ids, names or latest.", autocompletion=completion.runs, show_default=False
    ),
]
Within = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help="Directory of the run directories.", rich_help_panel=OUTPUT),
]
Command = Annotated[
    str | None,
    options.option("NAME", "Runs of this command.", SELECTION, "--command", values=COMMANDS),
]
Experiment = Annotated[
    str | None,
    options.option(
        "NAME",
        "Runs of this experiment, or of those that match a pattern such as tune-*.",
        SELECTION,
        "--experiment",
        completed_by=completion.experiments,
    ),
]
Model = Annotated[
    str | None,
    options.option(
        "TEXT",
        "Runs whose model or program has this in its name.",
        SELECTION,
        "--model",
        completed_by=completion.models,
    ),
]
Where = Annotated[
    list[str] | None,
    options.option(
        "KEY=VALUE",
        "Runs with this setting; also !=, <, <=, > and >=; repeatable.",
        SELECTION,
        "--where",
        completed_by=completion.conditions,
    ),
]
Tag = Annotated[
    list[str] | None,
    options.option("TAG", "Runs with this tag; repeatable.", SELECTION, "--tag", completed_by=completion.tags),
]
Host = Annotated[
    str | None, options.option("NAME", "Runs on this machine.", SELECTION, "--host", completed_by=completion.hosts)
]
Since = Annotated[
    str | None, options.option("AGE|DATE", "Runs that began since: 12h, 30d or 2026-11-01.", SELECTION, "--since")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.", rich_help_panel=OUTPUT)]


@app.callback(invoke_without_command=True)
def runs(
    ctx: typer.Context,
    command: Command = None,
    experiment: Experiment = None,
    model: Model = None,
    tag: Tag = None,
    status: Annotated[
        str | None,
        options.option("STATUS", "Runs with this status.", SELECTION, "--status", values=completion.STATUSES),
    ] = None,
    host: Host = None,
    since: Since = None,
    where: Where = None,
    all_: Annotated[
        bool,
        typer.Option(
            "--all", help="Also the single runs of searches by tune, and of trials.", rich_help_panel=SELECTION
        ),
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="KEY",
            help="Sort by a metric, best first, a setting, or started, experiment, command, model, status, name.",
            rich_help_panel=OUTPUT,
            show_default=False,
            autocompletion=completion.sort_keys,
        ),
    ] = "started",
    limit: Annotated[
        str | None, options.option("N", "List at most N runs; 20 by default, 0 for all.", OUTPUT, "--limit")
    ] = None,
    results: options.RunsFolder = Path("results"),
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """List the runs in the results folder; find, show, open, tag and remove them."""
    if ctx.invoked_subcommand:
        if others := options.given(ctx).keys() - {"results"}:
            option = f"--{min(others).replace('_', '-').rstrip('-')}"
            message = f"{option} before {ctx.invoked_subcommand} is an option of the listing"
            raise UsageError(message, f"gpubench runs {ctx.invoked_subcommand} --help shows its own options")
        return
    most = _limit(limit, SCREEN if not json else 0)

    from gpubench.report import listing
    from gpubench.runs.catalogue import catalogue
    from gpubench.runs.selection import Selection, ordered

    asked = chosen(
        command=command,
        experiment=experiment,
        model=model,
        tag=tag,
        status=status,
        host=host,
        since=since,
        where=where,
    )
    known = catalogue(existing(results))
    found = ordered(Selection(**asked, whole=not all_).of(known), sort)
    shown = found[:most] if most else found
    if json:
        from gpubench.runs.directory import to_json

        output.write(to_json(listing.to_document(results, shown)), "narrow the listing down, or use --limit")
        return
    hidden = 0 if all_ else len(Selection(**asked, whole=False).of(known)) - len(found)
    rest = len(known) - len(found)
    document = listing.document(results, found, shown, hidden=hidden, others=rest, sort=sort, details=verbose > 0)
    _print(document, verbose)


@app.command(cls=ParsedCommand, epilog="Example: gpubench runs show latest")
def show(
    ctx: typer.Context,
    run: Run,
    results: Within = None,
    sort: options.SortTables = None,
    rows: options.TableRows = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show the report of a run again, or of a search by tune."""
    folder = _results(ctx, results)
    path = _path(run, folder)

    from gpubench.foreign_files import SEARCH
    from gpubench.report.profile_tables import arrangement
    from gpubench.report.terminal import Terminal
    from gpubench.runs.directory import PROFILE

    terminal = Terminal(quiet=False, verbosity=verbose)
    arranged = arrangement(sort or [], rows or [], unfolded=verbose > 1)
    if arranged and not (path / PROFILE).is_file():
        raise UsageError(f"--sort and --rows arrange the tables of a profile, and {path} has none", "leave them out")
    if json:
        text = _as_json(path, folder)
    elif (path / SEARCH).exists():
        from gpubench.report import tuning
        from gpubench.tuning.result import read

        text = terminal.render(tuning.document(path, read(path)))
    else:
        from gpubench.report import run as report

        text = terminal.render(report.document([path], arranged=arranged, later=True))
    output.write(text, f"{path} has all results")


def _as_json(path: Path, results: Path) -> str:
    """A run or a search as --json lists it, and its complete results."""
    from gpubench.foreign_files import SEARCH
    from gpubench.report import listing
    from gpubench.runs import entries
    from gpubench.runs.directory import to_json

    if (path / SEARCH).exists():
        from gpubench.report import tuning
        from gpubench.tuning.result import read

        documents = tuning.to_document(path, read(path))
    else:
        from gpubench.report import run
        from gpubench.runs.reader import Run as RunDirectory

        documents = run.documents(RunDirectory.open(path))
    return to_json(listing.to_document(results, [entries.read(str(path))], {str(path): documents}))


@app.command("open", cls=ParsedCommand, epilog="Example: gpubench runs open latest")
def open_(ctx: typer.Context, run: Run, results: Within = None) -> None:
    """Open the page of a run, or of a search, in the browser; without a browser, print its path."""
    from gpubench.runs.directory import REPORT

    path = _path(run, _results(ctx, results)) / REPORT
    if not path.is_file():
        raise UsageError(f"{path.parent} has no page yet", f"gpubench runs show {run} prints what is known")
    output.write(f"{path.resolve()}\n", "name a file that can be read")
    if (reason := _open_in_browser(path.resolve())) and sys.stderr.isatty():
        print(reason, file=sys.stderr)


@app.command(
    cls=ParsedCommand, epilog="Examples: gpubench runs tag latest baseline, gpubench runs tag latest --remove baseline"
)
def tag(
    ctx: typer.Context,
    run: Run,
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TAG]...", help="Tags to add.", autocompletion=completion.tags, show_default=False),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="TAG", help="Tag to take away; repeatable.", autocompletion=completion.tags),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="New name of the run; '' takes its name away.")
    ] = None,
    results: Within = None,
) -> None:
    """Tag a run or a search, to find it by the tag and to protect it from removal; without a tag, print its tags."""
    from gpubench.foreign_files import SEARCH
    from gpubench.report import index
    from gpubench.runs.directory import relabel
    from gpubench.runs.reader import Run as RunDirectory
    from gpubench.runs.references import Lookup, check_name
    from gpubench.text import clean

    folder = _results(ctx, results)
    options.check_tags(tags or ())
    if name:
        check_name(name, folder)
    lookup = Lookup(folder)
    path = lookup.path(run)
    is_search = (path / SEARCH).is_file()
    if is_search and name is not None:
        raise UsageError(f"{path} is a search, whose name is that of its folder", "give it a tag instead")
    paths = lookup.runs(str(path))[0] if is_search else [lookup.run(str(path))]
    records = {one: RunDirectory.open(one).record for one in paths}
    known = {tag for record in records.values() for tag in record.tags}
    if missing := [one for one in remove or () if one not in known]:
        raise UsageError(f"{path.name} has no tag {missing[0]!r}", f"it has {', '.join(sorted(known)) or 'none'}")
    if tags or remove or name is not None:
        records = {one: relabel(one, name=name, add=tags or (), remove=remove or ()) for one in records}
        known = {tag for record in records.values() for tag in record.tags}
        index.refresh(folder)
    named = "" if is_search else next(iter(records.values())).name or ""
    said = f"{path.name} {named}".rstrip()
    output.write(clean(f"{said}: {', '.join(sorted(known)) or 'no tags'}") + "\n", "try again")


@app.command(cls=ParsedCommand, epilog="Example: gpubench runs remove 20261122-065319")
def remove(ctx: typer.Context, runs: Runs, results: Within = None, yes: Yes = False) -> None:
    """Remove runs, the runs of a folder, or a whole search by tune; not one that is running or tagged."""
    from gpubench.runs import removal
    from gpubench.runs.catalogue import Catalogue
    from gpubench.runs.references import Lookup

    folder = _results(ctx, results)
    known, lookup = Catalogue(folder), Lookup(folder)
    paths = [path for run in runs for path in lookup.runs(str(lookup.path(run)))[0]]
    entries = {path: _entry(known, path) for path in paths}
    found = removal.units(entries.values())
    for unit in found:
        if unit.runs[0].part_of == "search" and not _is_whole(known, unit):
            raise UsageError(
                f"{unit.runs[0].path} is not removed: it is a run of a search, which is removed as a whole",
                f"gpubench runs remove {unit.path}",
            )
        if reason := removal.protection(folder, unit):
            raise UsageError(f"{unit.path} is not removed: {reason}", removal.remedy(unit))
    _remove(known, found, yes=yes)


@app.command(
    cls=ParsedCommand,
    epilog="Examples: gpubench runs prune --failed, gpubench runs prune --keep 20 --older 30d --experiment nightly",
)
def prune(
    ctx: typer.Context,
    keep: Annotated[
        str | None, options.option("N", "All but the newest N runs of each experiment.", PRUNING, "--keep")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only runs that did not complete.", rich_help_panel=PRUNING)
    ] = False,
    older: Annotated[
        str | None, options.option("AGE|DATE", "Only runs that began before: 30d, 2w.", PRUNING, "--older")
    ] = None,
    command: Command = None,
    experiment: Experiment = None,
    model: Model = None,
    where: Where = None,
    results: Within = None,
    yes: Yes = False,
) -> None:
    """Remove old or failed runs. A run must meet every condition; running, named and tagged ones are never removed."""
    from gpubench.runs import removal
    from gpubench.runs.catalogue import Catalogue
    from gpubench.runs.selection import Selection, moment, ordered

    if keep is None and not failed and older is None:
        raise UsageError("prune needs to know what to remove", "give --keep N, --failed or --older AGE")
    folder = _results(ctx, results)
    most = None if keep is None else _limit(keep, 0, "--keep")
    limit = moment(older, "--older") if older else None
    known = Catalogue(existing(folder))
    entries = ordered(list(known.entries()), "started")
    known.save()
    asked = Selection(**chosen(command=command, experiment=experiment, model=model, where=where), whole=False)
    folders = {entry.folder for entry in asked.of(entries)}
    found, spared = (
        [unit for unit in units if str(unit.path) in folders or folders.issuperset(run.folder for run in unit.runs)]
        for units in removal.prunable(folder, entries, keep=most, failed=failed, older=limit)
    )
    _remove(known, found, yes=yes, spared=spared)


def _is_whole(known: Any, unit: "Unit") -> bool:
    """Tells whether the unit has all runs of its folder that the results folder lists."""
    inside = [name for name in known.found if known.results / Path(name).parent == unit.path]
    return len(inside) == len(unit.runs)


def _remove(known: Any, found: "Sequence[Unit]", *, yes: bool, spared: "Sequence[Unit]" = ()) -> None:
    """Says what is removed and how much, and what is spared, asks unless `yes` is given, and removes it.

    Raises UsageError if nobody can be asked, and the first error of a removal once the others are tried.
    """
    from gpubench import units
    from gpubench.report import index, listing
    from gpubench.runs import removal

    _print(listing.of_removal(found, spared), 0)
    if not found:
        return
    if not yes:
        if not (sys.stdin and sys.stdin.isatty()):
            raise UsageError(
                "a removal has to be confirmed, and there is no terminal to ask on",
                "add --yes to remove without a question",
            )
        typer.confirm("remove them?", abort=True)
    failed: list[GpubenchError] = []
    freed = count = 0
    for unit in found:
        size = unit.bytes()
        try:
            removal.remove(known, unit)
        except GpubenchError as error:
            failed.append(error)
            continue
        freed, count = freed + size, count + len(unit.runs)
    output.write(f"removed {units.counted(count, 'run')}, {units.size(freed)}\n", "gpubench runs lists what is left")
    index.refresh(known.results)
    if failed:
        raise failed[0]


def _entry(known: Any, path: Path) -> "Entry":
    """The entry of a run directory. Raises UsageError if the run is not in the results folder."""
    name = os.path.relpath(path, known.results)
    entry: Entry | None = known.entry(name) if name in known.found else None
    if entry is None:
        raise UsageError(f"{path} is not a run of {known.results}", "name the results folder with --results DIR")
    return entry


def _open_in_browser(page: Path) -> str:
    """Opens a page in the browser, without waiting for its end. Returns why it cannot; "" if it can."""
    command = _browser()
    if not command:
        return "no browser is known here: BROWSER names one"
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        started = subprocess.Popen([*command, page.as_uri()], start_new_session=True, **streams)
    except OSError as error:
        return f"cannot start {command[0]}: {error.strerror}"
    with suppress(subprocess.TimeoutExpired):
        if started.wait(BROWSER_SECONDS):
            return f"{command[0]} could not open it"
    return ""


def _browser() -> list[str]:
    """The command that opens a page; empty if there is no display to show it on."""
    if named := os.environ.get("BROWSER", "").split(os.pathsep)[0]:
        with suppress(ValueError):
            return [word for word in shlex.split(named) if word != "%s"]
    if sys.platform == "darwin":
        return ["open"]
    return ["xdg-open"] if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") else []


def _path(run: str, results: Path) -> Path:
    """The directory of a run, or of a search by tune. Raises RunDirectoryError for any other name."""
    from gpubench.foreign_files import SEARCH
    from gpubench.runs.references import Lookup

    lookup = Lookup(results)
    path = lookup.path(run)
    return path if (path / SEARCH).is_file() else lookup.run(str(path))


def _results(ctx: typer.Context, own: Path | None) -> Path:
    """The results folder that is given after the subcommand, or else before it."""
    found: Path = own or (ctx.parent.params["results"] if ctx.parent else Path("results"))
    return found


def existing(results: Path) -> Path:
    """The results folder, if there is one. Raises UsageError if not."""
    if not results.is_dir():
        from gpubench.runs.references import around

        there = around(results)
        hint = f"add --results {there}" if there else "gpubench train-bench makes a run, or name --results DIR"
        what = "is a file" if results.exists() else "does not exist"
        raise UsageError(f"the results folder {results} {what}", hint)
    return results


def _limit(text: str | None, default: int, option: str = "--limit") -> int:
    """A number of runs. Raises UsageError for any other text."""
    if text is None:
        return default
    if (found := whole(text)) is None:
        raise UsageError(f"{option} {text!r} is not a number of runs", f"for example {option} 20")
    return found


def chosen(
    *,
    command: str | None,
    experiment: str | None,
    model: str | None,
    tag: list[str] | None = None,
    status: str | None = None,
    host: str | None = None,
    since: str | None = None,
    where: list[str] | None,
) -> dict[str, Any]:
    """The fields of a Selection that the options give. Raises UsageError for values that no run can have."""
    from gpubench.runs.selection import moment

    for option, value, known in (
        ("--command", command, COMMANDS),
        ("--status", status, completion.STATUSES),
    ):
        if value is not None and value not in known:
            raise UsageError(f"{option} {value!r} is not a {option[2:]} of a run", one_of(value, known, ""))
    return {
        "command": command,
        "experiment": experiment,
        "model": model,
        "tags": tag or (),
        "status": status,
        "host": host,
        "since": moment(since, "--since") if since else None,
        "where": where or (),
    }


def _print(document: "Document", verbose: int) -> None:
    from gpubench.report.terminal import Terminal

    output.write(Terminal(quiet=False, verbosity=verbose).render(document), "use --json, or --limit")
