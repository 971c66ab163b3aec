"""Show a finished training run in the terminal and as JSON, both from the same summary."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gpubench import units
from gpubench.compare import comparability
from gpubench.compare.result import Comparisons
from gpubench.host.schedule import Outcome
from gpubench.report import frame
from gpubench.runs.summary import Summary
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.text import Fitting, bar, plain_table, say

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
    "setup_peak_memory_reserved",
    "peak_memory_rss",
    "first_step_time",
    "warmup_time",
    "straggler_skew",
    "starved_steps",
    "closure_error",
    "skipped_steps",
    "final_loss",
)


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    frame.show(outcomes, comparisons, console, _show_run)


def _show_run(outcome: Outcome, console: Console) -> None:
    summary, settings = outcome.summary, outcome.recorder.settings
    say(console, headline(settings, summary), "bold")
    if not summary.metrics:
        say(console, "nothing was measured: no repeat got past its warm-up")
        return
    console.print(frame.metrics_table(summary, HEADLINES))
    say(console, _caption(summary), "dim")
    console.print(Fitting(_phases(summary, with_bars) for with_bars in (True, False)))
    if summary.ranks:
        console.print(_ranks(summary))


def headline(settings: CompletedTrainSettings, summary: Summary) -> str:
    """Return the run in one line."""
    what = comparability.training(frame.by_key(settings), settings.distributed.world_size)
    return f"{what} on {settings.device}{frame.gpu(settings, summary)}{frame.speed(summary)}"


def _caption(summary: Summary) -> str:
    repeats, steps = len(summary.steady), sum(window.steps for window in summary.steady)
    step_time = summary["step_time"]
    cut = max(window.first for window in summary.steady)
    caption = f"{units.counted(repeats, 'repeat')}, {steps} steady steps worth {step_time.effective_n or 0:.0f}"
    intervals = "intervals are 95 %, over repeats" if repeats > 1 else "a single repeat has no interval"
    return f"{caption} independent ones, after up to {cut} of warm-up; {intervals}\n"


def _phases(summary: Summary, with_bars: bool) -> Table:
    table = plain_table()
    for column in ("phase", *["of a step"] * with_bars, "share", "time"):
        table.add_column(column, justify="right" if column in ("share", "time") else "left", no_wrap=True)
    step_time = summary["step_time"].estimate
    for metric in summary.metrics:
        if metric.name.startswith("phase_"):
            name = metric.name.removeprefix("phase_")
            share, time = metric.estimate / step_time, units.quantity(metric.estimate, metric.unit)
            table.add_row(units.words(name), *[bar(share, name)] * with_bars, units.percent(share), time)
    return table


def _ranks(summary: Summary) -> Table:
    table = plain_table()
    for column in ("rank", "step time", "busy", "slowest in steps"):
        table.add_column(column, justify="right", no_wrap=column != "slowest in steps")
    for rank in summary.ranks:
        busy, slowest = units.seconds(rank.busy_time), units.percent(rank.slowest)
        table.add_row(str(rank.rank), units.seconds(rank.step_time), busy, slowest)
    return table
