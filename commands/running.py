"""What the commands that run variants have in common: they print the settings, or run them and print the results."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands import output
from gpubench.commands.gate import OPEN, Gate
from gpubench.commands.options import Shown
from gpubench.commands.variants import without_change
from gpubench.errors import GpubenchError, RunDirectoryLost
from gpubench.ranks import is_rank_zero

if TYPE_CHECKING:
    from gpubench.bench import Bench
    from gpubench.compare.losses import Margin
    from gpubench.compare.result import Comparisons
    from gpubench.host.schedule import Outcome
    from gpubench.report.profile_tables import Arrangement
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import Configuration

log = logging.getLogger("gpubench.run")


def print_configurations(variants: "Sequence[Configuration[Any]]", command: str) -> None:
    """Prints the configurations on stdout, one after the other; under torchrun on one rank only."""
    if is_rank_zero():
        output.write("---\n".join(one.to_yaml() for one in variants), f"gpubench {command} --print-config > FILE")


def run_and_report(
    bench: "Bench",
    variants: "Sequence[Configuration[Any]]",
    shown: Shown,
    *,
    swept: bool = False,
    gate: Gate = OPEN,
    loss_margin: "Margin | None" = None,
) -> None:
    """Runs the variants, compares two of them, shows the results, and raises the error of the runs.

    `swept` variants differ in one number and become one table. The others still run if one of them fails, unless it is
    the first one. Raises typer.Exit if the gate does not let the second variant pass, and UsageError if the runs cannot
    decide it.
    """
    if alike := without_change(variants):
        log.warning("%s", alike)
    if names := _names(variants):
        bench.terminal.say(names)
    outcomes = bench.run(variants, independent=swept)
    pair, undecidable = None, None
    if len(outcomes) == 2 and not swept:
        try:
            pair = bench.compare(outcomes, conditions=gate.conditions, loss_margin=loss_margin)
        except GpubenchError as error:  # the measurements are shown all the same
            pair, undecidable = bench.compare(outcomes, loss_margin=loss_margin), error
    finish(outcomes, pair, bench.terminal, json=shown.json, swept=swept)
    if undecidable:
        raise undecidable
    gate.decide(pair, bench.terminal)


def _names(variants: "Sequence[Configuration[Any]]") -> str:
    """Returns which of several runs has which name; "" for a single one, or for runs without names."""
    called = [one.labels for one in variants if one.labels.name]
    return f"names: {', '.join(f'{one.name} is {one.variant}' for one in called)}" if len(called) > 1 else ""


def finish(
    outcomes: "Sequence[Outcome]",
    pair: "Comparisons | None",
    terminal: "Terminal",
    *,
    json: bool,
    arranged: "Arrangement | None" = None,
    swept: bool = False,
) -> None:
    """Prints the results from the run directories, and raises the error of the run, if any.

    `arranged` says how the tables of a profile are shown, also on the page of the run. `swept` runs differ in one
    number, and are printed as one table.
    """
    from gpubench.report import after_run, index, run, sweep
    from gpubench.report.profile_tables import PLAIN

    if terminal.err.is_terminal and not terminal.quiet:
        terminal.err.print()  # between the progress and the results
    for outcome in outcomes:
        try:
            outcome.recorder.writer.check()
        except RunDirectoryLost as lost:  # there is nothing to print
            raise outcome.error or lost from None
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    if arranged:
        for path in paths:
            after_run.write_up(path, arranged)
    page = after_run.keep_pair(paths, pair) if pair else None
    if json:
        text = run.to_json(paths, pair)
    else:
        text = terminal.render(sweep.document(paths) if swept else run.document(paths, pair, arranged or PLAIN))
    output.write(text, "the run directory has all results")
    if page and not (json or terminal.quiet):
        terminal.err.print(f"comparison: {page}", markup=False, highlight=False, soft_wrap=True)
    index.refresh(paths[0].parent.parent)
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
