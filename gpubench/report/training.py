"""What a finished run has to say, in the terminal and as JSON; both from the same summary."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gpubench import stats, units
from gpubench.benchmark import Outcome
from gpubench.comparison.result import Comparisons
from gpubench.dotkeys import flatten
from gpubench.live import COLOURS, bar
from gpubench.metrics import Metric
from gpubench.report import comparing, phrases
from gpubench.settings import TrainSettings
from gpubench.summary import Summary

HEADLINES = (
    "throughput",
    "token_throughput",
    "step_time",
    "mfu",
    "hfu",
    "mfu_of_measured_peak",
    "measured_peak",
    "energy_per_sample",
    "peak_memory_allocated",
    "peak_memory_reserved",
    "peak_memory_rss",
    "first_step_time",
    "warmup_time",
    "straggler_skew",
    "starved_steps",
    "closure_error",
    "skipped_steps",
    "final_loss",
)


def to_json(outcomes: Sequence[Outcome], comparisons: Comparisons | None) -> str:
    """One document: every run with its path, status, error and summary, and of two runs how they compare."""
    document: dict[str, Any] = {"runs": [_document(outcome) for outcome in outcomes]}
    if comparisons:
        document["comparison"] = msgspec.to_builtins(comparisons.comparisons[0])
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    for outcome in outcomes:
        _show_run(outcome, console)
    if comparisons:
        console.print()
        comparing.show(comparisons, console)
    for outcome in outcomes:
        console.print(f"{outcome.status}: {outcome.recorder.writer.path}", soft_wrap=True)


def differences(base: Outcome, other: Outcome) -> tuple[str, str]:
    """The settings in which two runs differ, as each has them: ("precision=bf16", "precision=fp32")."""
    ours, theirs = (flatten(outcome.recorder.settings.model_dump(mode="json")) for outcome in (base, other))
    keys = [key for key in ours if ours[key] != theirs[key]]
    first, second = (" ".join(f"{key}={values[key]}" for key in keys) for values in (ours, theirs))
    return first or "the first", second or "the same again"


def _document(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error
    return {
        "path": str(outcome.recorder.writer.path),
        "status": outcome.status,
        "error": error.record() if error else None,
        **msgspec.to_builtins(outcome.summary),
    }


def _show_run(outcome: Outcome, console: Console) -> None:
    summary, settings = outcome.summary, outcome.recorder.settings
    console.print()
    console.print(Text(headline(settings, summary), style="bold"), soft_wrap=True)
    if not summary.metrics:
        console.print("nothing was measured: no repeat got past its warm-up")
        return
    console.print(_metrics(summary, narrow=console.width < 80))
    console.print(_phases(summary))
    if summary.ranks:
        console.print(_ranks(summary))


def headline(settings: TrainSettings, summary: Summary) -> str:
    """The run in one line."""
    what = f"{settings.model.name}, {settings.precision}, batch {settings.training.batch_size}"
    if settings.distributed.world_size > 1:
        what += f" x {settings.distributed.world_size} ranks"
    what += f" on {settings.device}"
    throughput = summary.get("throughput")
    if throughput is None:
        return what
    return f"{what}: {units.quantity(throughput.estimate, throughput.unit)} {half_width(throughput)}".rstrip()


def half_width(metric: Metric) -> str:
    """Half the 95 % interval over repeats, relative to the estimate; nothing where there is no interval."""
    width = stats.relative_half_width(metric.repeats)
    return "" if width is None or not metric.estimate else f"+- {units.percent(width)}"


def _metrics(summary: Summary, narrow: bool) -> Group:
    table = Table(box=None, pad_edge=False, header_style="dim")
    spreads = () if narrow else ("median", "p95", "p99")
    for column in ("metric", "estimate", "+- 95 %", *spreads):
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=True)
    for name in HEADLINES:
        metric = summary.get(name)
        if metric is None or phrases.WITHOUT_NEWS.get(name) == metric.estimate:
            continue
        spread = metric.distribution
        cells = [spread.median, spread.p95, spread.p99] if spread and not narrow else []
        table.add_row(
            name.replace("_", " "),
            units.quantity(metric.estimate, metric.unit),
            half_width(metric),
            *(units.quantity(cell, metric.unit) for cell in cells),
        )
    repeats, steps = len(summary.steady), sum(window.steps for window in summary.steady)
    step_time = summary["step_time"]
    cut = max(window.first for window in summary.steady)
    caption = f"{repeats} repeat{'s' * (repeats != 1)}, {steps} steady steps worth {step_time.effective_n or 0:.0f}"
    caption += f" independent ones, after up to {cut} of warm-up; +- is over repeats\n"
    return Group(table, Text(caption, style="dim"))


def _phases(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase", no_wrap=True)
    table.add_column("of a step", no_wrap=True)
    step_time = summary["step_time"].estimate
    for metric in summary.metrics:
        if metric.name.startswith("phase_"):
            name = metric.name.removeprefix("phase_")
            label = units.quantity(metric.estimate, metric.unit)
            table.add_row(name.replace("_", " "), bar(metric.estimate / step_time, COLOURS.get(name, "white"), label))
    return table


def _ranks(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("rank", "step time", "busy", "slowest in"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in summary.ranks:
        busy, slowest = units.seconds(rank.busy_time), units.percent(rank.slowest)
        table.add_row(str(rank.rank), units.seconds(rank.step_time), busy, f"{slowest} of steps")
    return table
