"""Show a finished pipeline run in the terminal and as JSON, both from the same summary."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gpubench import units
from gpubench.compare import comparability
from gpubench.compare.result import Comparisons
from gpubench.host.schedule import Outcome
from gpubench.report import frame, phrases
from gpubench.runs.stages import PARTS, Pipeline, Stage
from gpubench.runs.summary import Summary
from gpubench.settings.schema import CompletedPipeSettings
from gpubench.text import Fitting, plain_table, say

HEADLINES = (
    "throughput",
    "steady_throughput",
    "makespan",
    "time_to_first_sample",
    "sample_latency",
    "evaluation_time",
    "pipeline_efficiency",
    "bubble",
    "ideal_bubble",
    "handover_bytes",
    "handover_time",
    "encode_time",
    "decode_time",
    "model_build_time",
    "energy_per_sample",
    "peak_memory_allocated",
    "peak_memory_reserved",
    "peak_memory_rss",
)
STAGES = (  # columns, from the widest table to the narrowest
    ("rank", "evaluations", *PARTS, "evaluation_time", "peak_memory"),
    ("rank", "evaluations", *PARTS),
    ("rank", "evaluations", "compute", "idle"),
)
DIGESTS = 4  # digests that the terminal shows
DIGITS = 12  # of each digest


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    frame.show(outcomes, comparisons, console, _show_run)


def headline(settings: CompletedPipeSettings, summary: Summary) -> str:
    """Return the run in one line."""
    model = summary.pipeline.model if summary.pipeline else settings.model.name or settings.model.unet
    scheduler = summary.pipeline.scheduler if summary.pipeline else settings.sampling.scheduler
    what = comparability.pipeline(frame.by_key(settings), model, scheduler, settings.distributed.world_size)
    return what + frame.gpu(settings, summary) + frame.speed(summary)


def _show_run(outcome: Outcome, console: Console) -> None:
    summary, settings = outcome.summary, outcome.recorder.settings
    say(console, headline(settings, summary), "bold")
    pipeline = summary.pipeline
    if pipeline is None:
        say(console, "nothing was measured: the pipeline was never built")
        return
    say(console, pipeline.assignment)
    console.print(Fitting(_stages(pipeline.stages, columns) for columns in STAGES))
    console.print()
    if summary.metrics:
        console.print(frame.metrics_table(summary, HEADLINES))
        say(console, _caption(summary, pipeline), "dim")
        if len(pipeline.stages) > 1:
            console.print(_baselines(summary, pipeline))
            console.print()
    else:
        made = f"{len(pipeline.samples)} of {units.counted(settings.work.samples, 'sample')}"
        say(console, f"no repeat was completed: {made} finished")
    for line in _words(pipeline):
        say(console, line)


def _stages(stages: Sequence[Stage], columns: Sequence[str]) -> Table:
    table = plain_table()
    for column in columns:
        table.add_column(units.words(column), justify="right", no_wrap=True)
    for stage in stages:
        cells = {part: units.percent(stage.times.share(part)) if stage.times else "" for part in PARTS} | {
            "rank": str(stage.rank),
            "evaluations": phrases.evaluations(stage),
            "evaluation_time": "" if stage.evaluation_time is None else units.seconds(stage.evaluation_time),
            "peak_memory": "" if stage.peak_memory is None else units.size(stage.peak_memory),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _caption(summary: Summary, pipeline: Pipeline) -> str:
    measured = f"{units.counted(len(summary.steady), 'repeat')}, {summary['makespan'].n} evaluations"
    single = len(summary.steady) == 1
    caption = f"{measured}; {'a single repeat has no interval' if single else 'intervals are 95 %, over repeats'}"
    if pipeline.steady and "steady_throughput" in {metric.name for metric in summary.metrics}:
        first, last = (units.seconds(moment) for moment in pipeline.steady)
        caption += f"; steady from the first finished sample to the last, in the first repeat {first} to {last}"
    return f"{caption}\n"


def _baselines(summary: Summary, pipeline: Pipeline) -> Table:
    table = plain_table()
    for column in ("the same samples by", "makespan", "pipeline's speed-up"):
        table.add_column(column, justify="left" if column.startswith("the") else "right", no_wrap=column == "makespan")
    for cells in phrases.baselines({metric.name: metric for metric in summary.metrics}, len(pipeline.stages)):
        table.add_row(*cells)
    return table


def _words(pipeline: Pipeline) -> list[str]:
    checked = phrases.verification(pipeline.verification, pipeline.threads)
    said = [pipeline.verdict, phrases.handover(pipeline), checked]
    if pipeline.samples:
        said.append(_digests(pipeline))
    return [sentence for sentence in said if sentence]


def _digests(pipeline: Pipeline) -> str:
    samples, threads = pipeline.samples, pipeline.threads
    shown = ", ".join(f"{digest.sample} {digest.sha256[:DIGITS]}" for digest in samples[:DIGESTS])
    made = "" if threads is None else f", made with {units.counted(threads, 'thread')}"
    said = f"sha256 of the final latents{made}: {shown}"
    return said + (", ...; all in summary.json" if len(samples) > DIGESTS else "")
