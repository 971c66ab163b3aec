"""What the reports of all commands share: a run as JSON, its frame in the terminal, its table of metrics."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from gpubench import cautions, runs, units
from gpubench.comparison.result import Comparisons
from gpubench.dotkeys import flatten
from gpubench.host.benchmark import Outcome
from gpubench.origins import FILLED_IN
from gpubench.report import comparing, phrases, plain
from gpubench.screen import Fitting, plain_table, say, say_unbroken
from gpubench.settings import RunSettings
from gpubench.summary import Summary


def to_json(outcomes: Sequence[Outcome], comparisons: Comparisons | None) -> str:
    """One document: every run with its path, status, error and summary, and of two runs what `compare --json` has."""
    compared = msgspec.structs.asdict(comparisons) if comparisons else {}
    return runs.to_json(document([_of_outcome(outcome) for outcome in outcomes]) | compared)


def document(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What --json shows of runs, each as `of_run` has it."""
    return {"schema_version": runs.SCHEMA_VERSION, "runs": of_runs}


def of_run(
    path: Path, status: str, error: Mapping[str, Any] | None, summary: Mapping[str, Any], documents: Mapping[str, Any]
) -> dict[str, Any]:
    """`documents` stand beside the summary, by their names."""
    return {"path": str(path), "status": status, "error": error, **summary, **documents}


def show(
    outcomes: Sequence[Outcome],
    comparisons: Comparisons | None,
    console: Console,
    show_run: Callable[[Outcome, Console], None],
) -> None:
    """Every run as `show_run` has it, how two compare, and where all of it is."""
    for outcome in outcomes:
        console.print()
        show_run(outcome, console)
        for line in cautions.noise(outcome.summary.others, outcome.summary.get("throughput")):
            say(console, line, "yellow")
        _show_diagnosis(outcome, console)
    if comparisons:
        console.print()
        comparing.show(comparisons, console)
    for outcome in outcomes:
        say_unbroken(console, f"{outcome.status}: {plain.clean(str(outcome.recorder.writer.path))}")


def _show_diagnosis(outcome: Outcome, console: Console) -> None:
    """In a line, where a run was recorded beside being measured."""
    diagnosis = outcome.recorder.diagnosis
    if diagnosis and outcome.recorder.command != "profile":
        found = units.counted(len(diagnosis.findings.findings), "finding")
        say(console, f"profile: {diagnosis.findings.headline}; {found} in report.html")


def differences(base: Outcome, other: Outcome) -> tuple[str, str]:
    """The settings in which two runs differ, as each has them: ("precision=bf16", "precision=fp32").

    What was filled in on both sides follows from another of them and is left out.
    """
    ours, theirs = (by_key(outcome.recorder.settings) for outcome in (base, other))
    origins = [outcome.recorder.origins for outcome in (base, other)]
    given = [key for key in ours if not all(origin.get(key, "").startswith(FILLED_IN) for origin in origins)]
    keys = [key for key in given if ours[key] != theirs[key]]
    first, second = (" ".join(f"{key}={values[key]}" for key in keys) for values in (ours, theirs))
    return first or "the first", second or "the same again"


def by_key(settings: RunSettings) -> dict[str, Any]:
    """The settings by dot-key, as config.yaml has them."""
    return flatten(settings.model_dump(mode="json"))


def metrics_table(summary: Summary, names: Sequence[str]) -> Fitting:
    """Those of `names` that are known and news; with quantiles of the single values where there is room for them."""
    return Fitting(_metrics_table(summary, names, with_quantiles) for with_quantiles in (True, False))


def _metrics_table(summary: Summary, names: Sequence[str], with_quantiles: bool) -> Table:
    table = plain_table()
    spreads = ("median", "p95", "p99") if with_quantiles else ()
    for column in ("metric", "estimate", "interval", *spreads):
        gives_way = column == "metric"
        table.add_column(column, justify="left" if gives_way else "right", no_wrap=not gives_way)
    for name in names:
        metric = summary.get(name)
        if metric is None or phrases.WITHOUT_NEWS.get(name) == metric.estimate:
            continue
        spread = metric.distribution
        cells = [spread.median, spread.p95, spread.p99] if spread and with_quantiles else []
        table.add_row(
            units.words(name),
            phrases.TOO_NOISY if metric.too_noisy else units.quantity(metric.estimate, metric.unit),
            phrases.uncertainty(metric),
            *(units.quantity(cell, metric.unit) for cell in cells),
        )
    return table


def speed(summary: Summary) -> str:
    """The throughput with its uncertainty, behind a colon; an empty string where it is not known."""
    throughput = summary.get("throughput")
    if throughput is None:
        return ""
    lone = "from one repeat" if len(throughput.repeats) == 1 else ""
    busy = "on a busy machine" if summary.others and summary.others.busy else ""
    told = " ".join(filter(None, (lone, busy)))
    return f": {phrases.figure(throughput)}" + (f", {told}" if told else "")


def _of_outcome(outcome: Outcome) -> dict[str, Any]:
    recorder, error = outcome.recorder, outcome.error.record() if outcome.error else None
    summary = msgspec.to_builtins(outcome.summary)
    return of_run(recorder.writer.path, outcome.status, error, summary, recorder.documents())
