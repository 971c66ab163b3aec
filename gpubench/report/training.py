"""What a finished run has to say, in the terminal and as JSON; both from the same summary."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.benchmark import Outcome
from gpubench.comparison.result import Comparisons
from gpubench.live import BAR, COLOURS, Fitting, bar
from gpubench.report import frame
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


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    frame.show(outcomes, comparisons, console, _show_run)


def _show_run(outcome: Outcome, console: Console) -> None:
    summary, settings = outcome.summary, outcome.recorder.settings
    console.print(Text(headline(settings, summary), style="bold"), soft_wrap=True)
    if not summary.metrics:
        console.print("nothing was measured: no repeat got past its warm-up")
        return
    console.print(_metrics(summary, narrow=console.width < 80))
    console.print(Fitting(_phases(summary, BAR), _phases(summary, 0)))
    if summary.ranks:
        console.print(_ranks(summary))


def headline(settings: TrainSettings, summary: Summary) -> str:
    """The run in one line."""
    what = f"{settings.model.name}, {settings.precision}, batch {settings.training.batch_size}"
    if settings.distributed.world_size > 1:
        what += f" x {settings.distributed.world_size} ranks"
    what += f" on {settings.device}"
    return what + frame.speed(summary)


def _metrics(summary: Summary, narrow: bool) -> Group:
    repeats, steps = len(summary.steady), sum(window.steps for window in summary.steady)
    step_time = summary["step_time"]
    cut = max(window.first for window in summary.steady)
    caption = f"{repeats} repeat{'s' * (repeats != 1)}, {steps} steady steps worth {step_time.effective_n or 0:.0f}"
    caption += f" independent ones, after up to {cut} of warm-up; +- is over repeats\n"
    return Group(frame.metrics_table(summary, HEADLINES, narrow), Text(caption, style="dim"))


def _phases(summary: Summary, bar_width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase", no_wrap=True)
    table.add_column("of a step", no_wrap=True)
    step_time = summary["step_time"].estimate
    for metric in summary.metrics:
        if metric.name.startswith("phase_"):
            name = metric.name.removeprefix("phase_")
            label = units.quantity(metric.estimate, metric.unit)
            drawn = bar(metric.estimate / step_time, COLOURS.get(name, "white"), label, bar_width)
            table.add_row(name.replace("_", " "), drawn)
    return table


def _ranks(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("rank", "step time", "busy", "slowest in steps"):
        table.add_column(column, justify="right", no_wrap=column != "slowest in steps")
    for rank in summary.ranks:
        busy, slowest = units.seconds(rank.busy_time), units.percent(rank.slowest)
        table.add_row(str(rank.rank), units.seconds(rank.step_time), busy, slowest)
    return table
