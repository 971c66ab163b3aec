"""What the reports of all commands share: a run as JSON, its header in the terminal, and its table of metrics."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from gpubench import text, units
from gpubench.compare.result import Comparisons
from gpubench.host.schedule import Outcome
from gpubench.report import comparison, phrases
from gpubench.runs import directory
from gpubench.runs.summary import Summary, noise
from gpubench.settings.loading import FILLED_IN, flatten
from gpubench.settings.schema import CompletedSettings, Device
from gpubench.text import Fitting, plain_table, say, say_unbroken


def to_json(outcomes: Sequence[Outcome], comparisons: Comparisons | None) -> str:
    """Return one document: every run with path, status, error and summary, and for two runs that of `compare
    --json`."""
    compared = msgspec.structs.asdict(comparisons) if comparisons else {}
    return directory.to_json(document([_of_outcome(outcome) for outcome in outcomes]) | compared)


def document(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what --json shows of runs, each as in `of_run`."""
    return {"schema_version": directory.SCHEMA_VERSION, "runs": of_runs}


def of_run(
    path: Path, status: str, error: Mapping[str, Any] | None, summary: Mapping[str, Any], documents: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one run's JSON; `documents` stand beside the summary, by name."""
    return {"path": str(path), "status": status, "error": error, **summary, **documents}


def show(
    outcomes: Sequence[Outcome],
    comparisons: Comparisons | None,
    console: Console,
    show_run: Callable[[Outcome, Console], None],
) -> None:
    """Print every run as in `show_run`, how two compare, and where the files are."""
    for outcome in outcomes:
        console.print()
        show_run(outcome, console)
        for line in noise(outcome.summary.others, outcome.summary.get("throughput")):
            say(console, line, "yellow")
        _show_diagnosis(outcome, console)
    if comparisons:
        console.print()
        comparison.show(comparisons, console)
    for outcome in outcomes:
        say_unbroken(console, f"{outcome.status}: {text.clean(str(outcome.recorder.writer.path))}")


def _show_diagnosis(outcome: Outcome, console: Console) -> None:
    """Return the diagnosis in one line, for a run that was also recorded."""
    diagnosis = outcome.recorder.diagnosis
    if diagnosis and outcome.recorder.command != "profile":
        found = units.counted(len(diagnosis.findings.findings), "finding")
        say(console, f"profile: {diagnosis.findings.headline}; {found} in report.html")


def differences(base: Outcome, other: Outcome) -> tuple[str, str]:
    """Return the settings in which two runs differ, as ("precision=bf16", "precision=fp32").

    Settings that were derived on both sides are left out, because they follow from other settings.
    """
    ours, theirs = (by_key(outcome.recorder.settings) for outcome in (base, other))
    origins = [outcome.recorder.origins for outcome in (base, other)]
    given = [key for key in ours if not all(origin.get(key, "").startswith(FILLED_IN) for origin in origins)]
    keys = [key for key in given if ours[key] != theirs[key]]
    first, second = (" ".join(f"{key}={values[key]}" for key in keys) for values in (ours, theirs))
    return first or "the first", second or "the same again"


def by_key(settings: CompletedSettings) -> dict[str, Any]:
    """Return the settings by dot-key, as in config.yaml."""
    return flatten(settings.model_dump(mode="json"))


def metrics_table(summary: Summary, names: Sequence[str]) -> Fitting:
    """Return a table of the known metrics among `names`, with quantiles of single values if the width allows."""
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
    """Return the throughput with its uncertainty after a colon; an empty string if it is unknown."""
    throughput = summary.get("throughput")
    if throughput is None:
        return ""
    lone = "from one repeat" if len(throughput.repeats) == 1 else ""
    busy = "on a busy machine" if summary.others and summary.others.busy else ""
    told = " ".join(filter(None, (lone, busy)))
    return f": {phrases.figure(throughput)}" + (f", {told}" if told else "")


def gpu(settings: CompletedSettings, summary: Summary) -> str:
    """Return the GPU's name in parentheses, for "on cuda"; an empty string on a CPU and if it is unknown."""
    name = summary.environment.device if summary.environment and settings.device is Device.cuda else None
    return f" ({name})" if name else ""


def _of_outcome(outcome: Outcome) -> dict[str, Any]:
    recorder, error = outcome.recorder, outcome.error.record() if outcome.error else None
    summary = msgspec.to_builtins(outcome.summary)
    return of_run(recorder.writer.path, outcome.status, error, summary, recorder.documents())
