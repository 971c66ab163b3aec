"""gpubench history"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.commands import completion, gate, options, output
from gpubench.commands.compare import fraction_of
from gpubench.commands.runs import Command, Experiment, Host, Model, Since, Tag, Where, chosen, existing
from gpubench.errors import UsageError
from gpubench.foreign_files import HISTORY

if TYPE_CHECKING:
    from gpubench.report.document import Document

THREADS = "OPENBLAS_NUM_THREADS"
EPILOG = f"""Examples:

gpubench history

gpubench history step_time --model gpt2 --where training.batch_size=8

gpubench history --since 30d --fail-on "throughput>2%"

Exit codes: 0 done, 1 output error, 2 usage error, {gate.EXIT_CODES}.
"""


def history(
    metric: Annotated[
        str | None,
        typer.Argument(
            metavar="[METRIC]",
            help="Metric; by default the main one of each workload.",
            show_default=False,
            autocompletion=completion.metrics,
        ),
    ] = None,
    command: Command = None,
    experiment: Experiment = None,
    model: Model = None,
    tag: Tag = None,
    host: Host = None,
    since: Since = None,
    where: Where = None,
    margin: options.Margin = "0.5%",
    fail_on: Annotated[
        list[str] | None,
        options.option(
            "METRIC>X%", "Exit with 3 if the level now is worse than an earlier one by more; repeatable.", options.GATE
        ),
    ] = None,
    strict: options.Strict = False,
    results: options.RunsFolder = Path("results"),
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Where to write the page; by default {HISTORY} in the results directory.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show runs over time: since when is a workload slower, by how much, and what changed there?"""
    gate.refuse_idle_strict(fail_on, strict=strict)
    existing(results)
    if metric:
        _refuse_other_words(metric, results)
    if html:
        output.check_file(html, "--html")
    # Numerical libraries are imported only now, because help and usage errors do not need them.
    with _one_thread():
        import numpy  # noqa: F401  # before any module that imports it
    fraction = fraction_of(margin)

    from gpubench import units
    from gpubench.compare import result
    from gpubench.compare.gate import parse_condition
    from gpubench.compare.history import histories
    from gpubench.report import history as report
    from gpubench.report import index
    from gpubench.report.terminal import Terminal
    from gpubench.runs.catalogue import catalogue
    from gpubench.runs.selection import Selection

    conditions = [parse_condition(text) for text in fail_on or ()]
    asked = chosen(command=command, experiment=experiment, model=model, tag=tag, host=host, since=since, where=where)
    known = catalogue(results)
    entries = Selection(**asked).of(known)
    if known and not entries:
        raise UsageError(f"none of {units.counted(len(known), 'run')} in {results} fits", "gpubench runs lists them")
    found = histories(entries, metric, margin=fraction, conditions=conditions)
    terminal = Terminal(quiet=quiet, verbosity=verbose)
    document = report.document(found, html or results / HISTORY)
    page = _write_page(document, html, results) if found.series or html else None
    index.refresh(results)  # which leads to the page of the history
    retry = "--html FILE writes a page instead"
    if json:
        output.write(result.to_json(found), retry)
    else:
        output.write(terminal.render(document), retry)
        if page and not quiet:
            terminal.err.print(f"page: {page}", markup=False, soft_wrap=True)
    raise typer.Exit(gate.exit_code(found.gate, terminal, strict=strict))


def _refuse_other_words(metric: str, results: Path) -> None:
    """Raises UsageError for a word that is not a metric but names runs."""
    from gpubench.runs.references import LATEST, is_folder

    folder = next((path for path in (Path(metric), results / metric) if is_folder(path)), None)
    if folder is None and not LATEST.fullmatch(metric):
        return
    is_experiment = folder is not None and folder.resolve().parent == results.resolve()
    hint = (
        f"gpubench history --experiment {folder.name}" if folder and is_experiment else f"gpubench runs show {metric}"
    )
    raise UsageError(f"{metric} names runs, and is not a metric", hint)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A context in which OpenBLAS, which numpy loads, is told to use one thread, unless the user has chosen.

    The matrices are so small that more threads mostly wait for each other, which takes three times the processor time.
    """
    chosen_by_user = THREADS in os.environ
    os.environ.setdefault(THREADS, "1")
    try:
        yield
    finally:
        if not chosen_by_user:
            del os.environ[THREADS]


def _write_page(document: "Document", html: Path | None, results: Path) -> Path | None:
    """None if the results folder cannot be written, or if the page there is not one of gpubench."""
    from gpubench.report.page import is_of_others, render
    from gpubench.runs.directory import write_document

    target = html or results / HISTORY
    if not html and is_of_others(target):
        return None
    text = render(document)
    if html:
        output.write_file(target, text)
        return target
    try:
        write_document(target, text)  # not through a link, as one that the user has named
    except OSError:
        return None
    return target
