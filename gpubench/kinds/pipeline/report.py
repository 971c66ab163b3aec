"""The part of a run's report that only a pipeline has: its ranks, what splitting was worth, and the samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.events import Divergence
from gpubench.kinds.pipeline import gantt, images
from gpubench.metrics import Metric
from gpubench.report import bar_charts, quoted
from gpubench.report.charts import hue
from gpubench.report.document import (
    EVERYWHERE,
    TEXT,
    UNASKED,
    Block,
    Cell,
    Figure,
    Figures,
    Folded,
    Heading,
    Medium,
    Paragraph,
    Table,
    table,
)
from gpubench.report.kind_report import intervals
from gpubench.runs.stages import PARTS, HandoffSize, Pipeline, StageSummary, Verification
from gpubench.text import clean

METRICS = (
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
"""The metrics that -v and Markdown lead with."""
IN_BRIEF = ("makespan", "time_to_first_sample", "sample_latency", "bubble", "peak_memory_reserved")
"""The metrics that a terminal shows."""
MORE = "-v shows every metric and sample, and report.html what each rank did"
DIGESTS = 4  # digests that a terminal shows
DIGITS = 12  # of each digest
OPEN_SAMPLES = 16  # samples up to which the page shows their table at once
BASELINES = {
    "makespan": "this pipeline",
    "sequential_makespan": "one of these ranks alone",
    "replicas_makespan": "replicas",
}
NOT_VERIFIED = "not verified: --verify compares every sample with single-process diffusers, bit by bit"
CUT_SHORT = "not verified: the run ended before its samples were compared with single-process diffusers"


def caption(run: RunEvidence) -> str:
    makespan, steady = run.metrics.get("makespan"), run.summary.pipeline.steady if run.summary.pipeline else None
    line = f"{measured(run)}, {makespan.n if makespan else 0} evaluations; {intervals(len(run.windows))}"
    if steady and "steady_throughput" in run.metrics:
        first, last = (units.seconds(moment) for moment in steady)
        line += f"; steady from the first finished sample to the last, in the first repeat {first} to {last}"
    return line


def measured(run: RunEvidence) -> str:
    return units.counted(len(run.windows), "repeat")


def without_throughput(run: RunEvidence) -> str:
    if run.summary.pipeline and run.record and run.record.resumed_from:
        return "no sample was missing, so nothing was timed"
    return "no repeat was completed" if run.summary.pipeline else "nothing was measured"


def without_metrics(run: RunEvidence) -> str:
    """How far a run came that has no metrics."""
    if run.summary.pipeline is None:
        return "the pipeline was not built"
    total = run.settings.get("work.samples")
    return f"{len(run.summary.pipeline.samples)} of {units.counted(total, 'sample') if total else '? samples'} finished"


def answer(run: RunEvidence) -> str:
    """Empty, because the answer is the throughput."""
    return ""


def before_metrics(run: RunEvidence) -> Iterator[Block]:
    """How the steps were split, and what each rank did."""
    found = run.summary.pipeline
    if found is None:
        return
    yield Heading("Pipeline")
    yield Paragraph(f"{found.model}, {found.scheduler}", on=Medium.PAGE)
    split = EVERYWHERE if len(found.stages) > 1 else UNASKED  # a single rank does all of it
    lines = [found.assignment, found.bottleneck, lost(run.metrics)]
    yield Paragraph([line for line in lines if line], on=split)
    first = min((span.repeat for span in run.spans), default=0)
    bars = gantt.joined_bars(span for span in run.spans if span.repeat == first)
    chart = gantt.drawing(bars, len(found.stages))
    if chart is None:
        yield Paragraph("no timeline is recorded", "missing", on=Medium.PAGE)
    else:
        note = "Boxes: at work on the sample of that number. Lines: waiting for it. Blank: idle."
        if len(bars) > gantt.MOST_BARS:
            note += f" Only the first {gantt.MOST_BARS:,} of {len(bars):,} are drawn."
        yield Figure(f"What each rank did in repeat {first + 1}", chart, note)
    if shown := list(images.of_samples(run)):
        yield Heading("Images", 3)
        yield Figures(shown)
        if (rest := len(found.samples) - len(shown)) > 0:
            yield Paragraph(f"{units.counted(rest, 'more sample')} in the folder samples", "quiet", on=Medium.PAGE)
    yield Heading("Ranks", 3)
    if shares := gantt.shares(found.stages):
        legend = [(hue(part), part.replace("_", " ")) for part in PARTS]
        yield Figure("", shares, shape="lanes", legends=[("Mean over the completed repeats", legend)])
    yield _ranks(found.stages, seconds=False, on=split & TEXT)
    yield _ranks(found.stages, seconds=True, on=Medium.PAGE)


def after_metrics(run: RunEvidence) -> Iterator[Block]:
    """What splitting was worth, what the ranks sent each other, and the samples."""
    found = run.summary.pipeline
    if found is None:
        return
    yield Heading("Was splitting worth it?", 3)
    cells = [
        {"the same samples by": who, "makespan": makespan, "pipeline's speed-up": speedup}
        for who, makespan, speedup in baselines(run.metrics, len(found.stages))
    ]
    yield table("", cells)
    yield Paragraph(found.verdict or "")
    yield Paragraph(_latency(found, run))
    if not run.metrics:
        yield Paragraph("no repeat was completed", "missing", on=Medium.PAGE)
    if found.handover:
        yield Heading("Hand-offs", 3)
        sizes = [(name, size, "fill solid a") for name, size in handoff_parts(found.handover).items()]
        if drawing := bar_charts.bars("size of a hand-off", "B", sizes):
            yield Figure("Size of a hand-off", drawing, shape="rows")
        yield Paragraph(handoff(found) or "", on=UNASKED)
    yield Heading("Samples", 3)
    cut_short = found.verification is None and run.settings.get("verify") is True
    yield Paragraph(CUT_SHORT if cut_short else verification(found.verification, found.threads))
    if found.samples:
        yield Paragraph(_digests(found), on=Medium.DETAILS | Medium.MARKDOWN)
        opened = len(found.samples) <= OPEN_SAMPLES
        yield Folded("Every sample's final latent", [_samples(found)], opened, on=Medium.PAGE | Medium.DETAILS)


def over_time(run: RunEvidence) -> Iterator[Block]:
    yield from ()


def _latency(found: Pipeline, run: RunEvidence) -> str:
    """What more ranks do for a single sample; empty for one rank."""
    latency = run.metrics.get("sample_latency")
    if len(found.stages) == 1 or latency is None:
        return ""
    why = f"a sample makes its {found.evaluations} evaluations one after another on any number of ranks"
    taken = quoted.central(latency)
    return f"{why}: more ranks can make more samples a second, and none sooner (latency here: {taken})"


def lost(metrics: Mapping[str, Metric]) -> str | None:
    """A sentence on the time that hand-offs cost; None if it is unknown."""
    efficiency = metrics.get("pipeline_efficiency")
    if efficiency is None:
        return None
    known = f"pipeline efficiency {quoted.figure(efficiency)}"
    if efficiency.too_noisy:
        return known
    time = "no" if efficiency.estimate == 1 else f"{units.percent(1 - efficiency.estimate)} of its"
    return f"{known}: the pipeline loses {time} time to hand-offs and its own loop"


def _ranks(stages: Sequence[StageSummary], *, seconds: bool, on: Medium) -> Table:
    cells: list[dict[str, str]] = []
    for stage in stages:
        row = {"rank": str(stage.rank), "evaluations": evaluations(stage)}
        if times := stage.times:
            values = [getattr(times, part) if seconds else times.share(part) for part in PARTS]
            shown = map(units.seconds if seconds else units.percent, values)
            row |= zip((part.replace("_", " ") for part in PARTS), shown, strict=True)
        row["evaluation time"] = "" if stage.evaluation_time is None else units.seconds(stage.evaluation_time)
        if seconds:
            row["sent, received in all"] = f"{stage.sent}, {stage.received}"
        row["peak memory"] = "" if stage.peak_memory is None else units.size(stage.peak_memory)
        cells.append(row)
    return table("", cells, expendable=("peak memory", "evaluation time", "send wait", "recv wait"), on=on)


def _samples(found: Pipeline) -> Table:
    identical = {True: "yes", False: "no", None: "not compared"}
    reproduced = {True: "the same", False: "different", None: "made once"}
    cells: list[dict[str, Any]] = [
        {
            "sample": str(one.sample),
            "seed": str(one.seed),
            "sha256": Cell(one.sha256, code=True),
            "bit-identical": identical[one.identical],
            "in every repeat": reproduced[one.reproduced],
        }
        for one in found.samples
    ]
    return table("", cells, ("sha256", "bit-identical", "in every repeat"))


def _digests(found: Pipeline) -> str:
    shown = ", ".join(f"{one.sample} {one.sha256[:DIGITS]}" for one in found.samples[:DIGESTS])
    made = "" if found.threads is None else f", made with {units.counted(found.threads, 'thread')}"
    more = ", ...; all in summary.json" if len(found.samples) > DIGESTS else ""
    return f"sha256 of the final latents{made}: {shown}{more}"


def evaluations(stage: StageSummary) -> str:
    """Range and number of a stage's evaluations, such as "12-23 (12)"."""
    last = stage.end - 1
    return f"{stage.start if stage.start == last else f'{stage.start}-{last}'} ({stage.end - stage.start})"


def baselines(metrics: Mapping[str, Metric], ranks: int) -> list[tuple[str, str, str]]:
    """Who, its makespan and the speed-up of the pipeline over it, for the pipeline and for its alternatives."""
    if ranks == 1:
        return []
    found = [(name, metrics[name].estimate) for name in BASELINES if name in metrics]
    makespan = dict(found).get("makespan")
    if not makespan:
        return []
    speedups = {name: "" if name == "makespan" else f"{units.digits(taken / makespan)} x" for name, taken in found}
    return [(BASELINES[name], units.seconds(taken), speedups[name]) for name, taken in found]


def handoff_parts(mean: HandoffSize) -> dict[str, float]:
    """Mean bytes by part; parts that are never sent are left out."""
    parts = {
        "latent": mean.latent,
        "scheduler state": mean.state,
        "generator": mean.generator,
        "header": mean.header,
    }
    return {name: size for name, size in parts.items() if size}


def handoff(pipeline: Pipeline) -> str | None:
    """The size and parts of a hand-off; None if there was none."""
    if pipeline.handover is None:
        return None
    parts = handoff_parts(pipeline.handover)
    said = ", ".join(f"{units.size(size)} {name}" for name, size in parts.items())
    carried = f"; it carries {', '.join(map(clean, pipeline.carried))}" if pipeline.carried else ""
    return f"a hand-off is {units.size(sum(parts.values()))}: {said}{carried}"


def verification(found: Verification | None, threads: int | None) -> str:
    """The result of the verification, for whose reference as for the ranks `threads` applied."""
    if found is None:
        return NOT_VERIFIED
    same = f"{found.identical} of {units.counted(found.samples, 'sample')} {'is' if found.identical == 1 else 'are'}"
    said = f"{same} bit-identical to {found.reference}"
    if threads is not None:
        said += f" with {units.counted(threads, 'thread')}"
    return said if found.divergence is None else f"{said}; {_divergence(found.divergence)}"


def _divergence(found: Divergence) -> str:
    said = f"sample {found.sample} differs by up to {found.largest_difference:.3g}"
    if found.step is None:
        return f"{said}, and did not when it was made again"
    said += f", first in evaluation {found.step} on rank {found.rank}"
    return said if found.step_difference is None else f"{said} by {found.step_difference:.3g}"
