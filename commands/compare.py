"""gpubench compare"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpubench.commands import completion, gate, options, output, wrong_words
from gpubench.commands import loss_margin as of_losses
from gpubench.errors import RunDirectoryError, UsageError

if TYPE_CHECKING:
    from gpubench.compare.evidence import Side
    from gpubench.compare.log_columns import LogColumn
    from gpubench.compare.result import Comparisons, Noise
    from gpubench.report.terminal import Terminal

EPILOG = f"""Examples:

gpubench compare latest~1 latest

gpubench compare results/before results/after --html change.html

gpubench compare base new1 new2 --metric throughput --fail-on "step_time>2%"

gpubench compare latest~1 latest --format markdown >> pr.md

gpubench compare old.log new.log

gpubench compare old.csv new.csv --column dt --unit ms

gpubench compare --null results/before

A path is a run directory, a folder of repeated runs, a run id, an experiment, or latest~N.

Exit codes: 0 compared, 1 output error, 2 usage error, {gate.EXIT_CODES}, 130 interrupted.
"""
NOT_KEPT = "not kept for later comparisons, whose warm-up is the one that gpubench finds"
RETRY = "--html FILE writes a page instead"


class Format(StrEnum):
    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"


def compare(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BASELINE CANDIDATE...",
            help="Runs, groups of runs, or log files.",
            autocompletion=completion.runs,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        options.option(
            "NAME",
            "Judge only this metric, or those that match a pattern such as phase_*.",
            options.VERDICT,
            completed_by=completion.metrics,
        ),
    ] = None,
    margin: options.Margin = "0.5%",
    loss_margin: options.LossMargin = None,
    assume: Annotated[
        str | None,
        options.option(
            "X%",
            "Single equal runs differ by at most this, where no others show it; 5% by default.",
            options.VERDICT,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Compare runs even if their workloads differ.", rich_help_panel=options.VERDICT),
    ] = False,
    null: Annotated[
        bool,
        typer.Option(
            "--null",
            help="Estimate the smallest detectable change from one group of identical runs.",
            rich_help_panel=options.VERDICT,
        ),
    ] = False,
    fail_on: options.FailOn = None,
    strict: options.Strict = False,
    results: options.RunsFolder = Path("results"),
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Skip damaged runs of a group.", rich_help_panel=options.INPUT),
    ] = False,
    skip: Annotated[
        int | None,
        options.option(
            "N",
            "Leave out the first N steps of each repeat; by default the warm-up that gpubench finds.",
            options.INPUT,
        ),
    ] = None,
    column: Annotated[
        str | None, options.option("NAME", "Column to read from CSV or JSON lines of another tool.", options.INPUT)
    ] = None,
    unit: Annotated[
        str | None, options.option("UNIT", "Unit of the column, such as ms or samples/s.", options.INPUT)
    ] = None,
    better: Annotated[
        Better | None,
        typer.Option(help="Whether lower or higher values of the column are better.", rich_help_panel=options.INPUT),
    ] = None,
    format_: Annotated[
        Format | None, typer.Option("--format", help="Format of the result on stdout.", rich_help_panel=options.OUTPUT)
    ] = None,
    json: options.Json = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the result as an HTML page.", rich_help_panel=options.OUTPUT),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Compare runs: which one is faster, by how much, is the difference significant, and what explains it?"""
    names, fails = paths or [], fail_on or []
    chosen = Format.JSON if json else format_ or Format.TERMINAL
    gate.refuse_idle_strict(fails, strict=strict)
    _refuse(
        (json and format_ not in (None, Format.JSON), f"--json and --format {format_} contradict", "leave one out"),
        (bool(unit or better) and not column, "--unit and --better describe a --column", "add --column NAME"),
        (bool(column) and not unit, f"--column {column} needs a --unit", "for example --unit ms"),
        (
            null and len(names) != 1,
            "--null needs exactly one group of runs",
            "gpubench compare --null results/EXPERIMENT",
        ),
        (
            null and bool(fails or html),
            "--null compares nothing, so --fail-on and --html have no effect",
            "leave them out",
        ),
        (
            null and assume is not None,
            "--null measures how runs differ, so --assume has no effect",
            "leave --assume out",
        ),
        (null and loss_margin is not None, "--null compares nothing, so --loss-margin has no effect", "leave it out"),
        (
            skip is not None and skip < 0,
            f"--skip {skip} is negative",
            "give the number of steps to leave out, such as 10",
        ),
        (null and force, "--null compares nothing, so --force has no effect", "leave --force out"),
        (null and chosen in (Format.CSV, Format.HTML), f"--null has no {chosen} output", "--format markdown or json"),
        (not null and len(names) < 2, "nothing to compare: give two runs or more", "gpubench compare latest~1 latest"),
    )
    if html:
        output.check_file(html, "--html")

    # Numerical libraries are imported only now, because help and usage errors do not need them.
    from gpubench.compare import compare as comparison
    from gpubench.compare import inputs
    from gpubench.compare.evidence import aligned
    from gpubench.compare.gate import parse_condition
    from gpubench.compare.verdicts import ASSUMED
    from gpubench.report.terminal import Terminal

    fraction, conditions = fraction_of(margin), [parse_condition(text) for text in fails]
    of_loss = of_losses.parse(loss_margin)
    assumed = ASSUMED if assume is None else fraction_of(assume, "--assume")
    terminal = Terminal(quiet=quiet, verbosity=verbose)
    try:
        found, left_out = inputs.find(names, results, column=_column(column, unit, better), skip_invalid=skip_invalid)
    except RunDirectoryError as error:
        missing = next((name for name in names if error.message.startswith(f"{name}: no such")), None)
        hint = wrong_words.of_compare(names, missing) if missing else None
        raise type(error)(error.message, hint or error.hint) from None
    found = aligned(found, skip)
    if null:
        from gpubench.report.phrases import omission

        learned = comparison.null(found[0], margin=fraction)
        if skip is None:
            _keep(learned, found[0], terminal)
        else:
            terminal.err.print(NOT_KEPT, markup=False, soft_wrap=True)
        for line in left_out:
            terminal.err.print(omission(line), markup=False, soft_wrap=True)
        output.write(_noise(comparison.only(learned, metric or ()), chosen, terminal), RETRY)
        return
    comparisons = comparison.compare(
        found,
        margin=fraction,
        assumed=assumed,
        metrics=metric or (),
        force=force,
        conditions=conditions,
        left_out=left_out,
        loss_margin=of_loss,
    )
    if html:
        output.write_file(html, _page(comparisons, found))
        if not quiet:
            terminal.err.print(f"wrote {html}", markup=False, soft_wrap=True)
    output.write(_document(comparisons, found, chosen, terminal, everything=bool(metric)), RETRY)
    raise typer.Exit(gate.exit_code(comparisons.gate, terminal, strict=strict))


def _refuse(*contradictions: tuple[bool, str, str]) -> None:
    for refused, message, hint in contradictions:
        if refused:
            raise UsageError(message, hint)


def fraction_of(text: str, option: str = "--margin") -> float:
    """The percentage of an option as a fraction. Raises UsageError if the text is not a percentage."""
    from gpubench.compare.gate import percent

    found = percent(text)
    if found is None or found >= 1:
        hint = f"for example {option} 0.5%"
        if found is None and (number := percent(f"{text}%")):
            is_fraction = number < 0.01  # of a number below 1, such as 0.005
            hint = f"did you mean {option} {number * (1e4 if is_fraction else 100):g}%?"
        raise UsageError(f"{option} {text!r} is not a percentage below 100 %", hint)
    return found


def _column(name: str | None, unit: str | None, better: Better | None) -> "LogColumn | None":
    if name is None or unit is None:
        return None
    from gpubench.compare.log_columns import LogColumn

    return LogColumn.of(name, unit, better.value if better else None)


def _document(
    comparisons: "Comparisons", found: "Sequence[Side]", chosen: Format, terminal: "Terminal", everything: bool
) -> str:
    if chosen is Format.HTML:
        return _page(comparisons, found)
    from gpubench.compare import result
    from gpubench.report import comparison, markdown

    if chosen is Format.JSON:
        return result.to_json(comparisons)
    if chosen is Format.CSV:
        return result.to_csv(comparisons)
    document = comparison.document(comparisons, everything=everything)
    return markdown.render(document) if chosen is Format.MARKDOWN else terminal.render(document)


def _page(comparisons: "Comparisons", found: "Sequence[Side]") -> str:
    from gpubench.report import comparison, page

    return page.render(comparison.document(comparisons, found))


def _keep(learned: "Noise", side: "Side", terminal: "Terminal") -> None:
    """Writes the noise to every run that it was learned from, for later comparisons."""
    from gpubench.compare import noise

    for run in side.runs:
        if run.record is None:
            continue
        try:
            noise.write(learned, run.path)
        except OSError as error:
            terminal.err.print(f"cannot write the noise to {run.path}: {error.strerror}", markup=False, soft_wrap=True)


def _noise(learned: "Noise", chosen: Format, terminal: "Terminal") -> str:
    from gpubench.compare import result
    from gpubench.report import markdown, noise

    if chosen is Format.JSON:
        return result.to_json(learned)
    document = noise.document(learned)
    return markdown.render(document) if chosen is Format.MARKDOWN else terminal.render(document)
