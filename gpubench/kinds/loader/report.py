"""The part of a run's report about its data: what it costs, stage by stage, and what it takes not to wait for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.data_cost import DataCost, Estimate, ReadyCeiling, SampleStage, WithWorkers
from gpubench.diagnosis import data_needs as needs
from gpubench.metrics import TOO_WIDE
from gpubench.report import bar_charts, charts, findings, steps
from gpubench.report.charts import Curve, Plane, hue
from gpubench.report.document import (
    UNASKED,
    Block,
    Breakdown,
    Figure,
    Folded,
    Heading,
    Medium,
    Paragraph,
    Part,
    Table,
    raised,
    table,
)
from gpubench.report.kind_report import intervals, missing

METRICS = (
    *("throughput", "step_time", "sample_cpu_time", "first_batch_time", "pass_start_time", "worker_memory"),
    "peak_memory_rss",
)
IN_BRIEF = ()
MORE = "-v shows all stages and every metric, and report.html draws them"
HUES = {
    "read": "host_to_device",
    "decode": "forward",
    "transform": "backward",
    "dataset": "data_wait",
    "collate": "copy",
    "transfer": "exposed_communication",
    "pin": "set",
    "index": "idle",
}
"""The style of each kind of stage."""
SMALL = 0.02
"""The share of a sample below which a terminal leaves out a stage."""
SLOW_SHOWN = 5
NOTABLE_DELAY = 0.1
"""The share of the time from which on waiting for a core is said."""


def answer(run: RunEvidence) -> str:
    """Says what data that is always ready would give; "" if that was not measured."""
    found = run.data_cost
    return ceiling_sentence(found.ceiling) if found and found.ceiling else ""


def ceiling_sentence(found: ReadyCeiling) -> str:
    """Says how much faster training could be."""
    if found.verdict == "equivalent" or (found.ratio is not None and found.verdict == "inconclusive"):
        within = f": {_times(found.ratio, found.interval)}" if found.ratio else ""
        sure = (
            "training does not wait for its data"
            if found.verdict == "equivalent"
            else ("it is not known whether training waits for its data")
        )
        return f"{sure}{within} as fast with data that is always ready" if within else sure
    if found.ratio is None:
        return "it is not known how fast training is with data that is always ready"
    if found.ratio < 1:
        return f"training is not faster with data that is always ready: {_times(found.ratio, found.interval)} as fast"
    return f"training could run {_times(found.ratio, found.interval)} as fast with data that is always ready"


def _times(ratio: float, interval: tuple[float, float] | None) -> str:
    said, ends = units.factors(ratio, interval or ())
    return f"{said} x" + (f" [{', '.join(ends)}]" if ends else "")


def _rate(found: Estimate) -> str:
    said = units.rate(found.value, "samples/s")
    if not found.interval:
        return said
    low, high = found.interval
    if low <= 0 or high > TOO_WIDE * low:
        return units.span(low, high, "samples/s")
    return f"{said} +- {units.percent((high - low) / 2 / found.value)}"


def before_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields what it would take, the stages, the numbers of workers, single samples and what is wrong."""
    found = run.data_cost
    if found is None:
        yield missing(run, "the batches are not all drawn" if run.windows else "nothing was drawn")
        return
    yield Paragraph(list(_what_it_takes(found)))
    yield Paragraph(_sure(run, found), "quiet")
    yield from _stages(found)
    yield from _scaling(found)
    yield from _samples(found)
    if run.findings:
        yield from raised(findings.blocks(run.findings))


def _what_it_takes(found: DataCost) -> Iterator[str]:
    alone = next((one for one in found.scaling if one.workers == found.record.workers), None)
    if alone and alone.throughput:
        how = units.counted(alone.workers, "worker") if alone.workers else "no workers, as the program has it,"
        known = found.ceiling and found.ceiling.verdict != "inconclusive"
        takes = f", and training could take {_rate(found.ceiling.ready)}" if found.ceiling and known else ""
        yield f"the loader alone makes {_rate(alone.throughput)} with {how}".rstrip(",") + takes
    if said := needs.sentence(found):
        yield said
    if said := needs.elsewhere(found):
        yield said
    if found.proposed and found.proposed.ratio:
        said = _times(found.proposed.ratio, found.proposed.interval)
        yield f"with --data.workers={found.proposed.workers} training runs {said} as fast ({found.proposed.verdict})"


def _sure(run: RunEvidence, found: DataCost) -> str:
    record = found.record
    what = f"{record.dataset}, {record.style}-style"
    size = f" of {units.counted(record.length, 'sample')}" if record.length else ""
    where = f", DataLoader at {record.place}" if record.place else ""
    others = f"; {units.counted(record.others, 'other DataLoader')} not measured" if record.others else ""
    return f"{what}{size}{where}{others}"


def _stages(found: DataCost) -> Iterator[Block]:
    stages = found.stages
    if not stages:
        return
    yield Heading("Where the time of a sample goes", anchor="stages")
    yield Paragraph(
        f"a sample takes {units.seconds(found.sample)} in all processes together{_computes(found)}{_read(found)}"
    )
    drawing = bar_charts.stack(
        "stages of a sample", [(one.called, one.seconds, hue(HUES[one.kind])) for one in stages if one.seconds > 0]
    )
    if drawing is not None:
        yield Figure("", drawing, shape="wide")
    parts = [_part(one) for one in stages]
    yield Breakdown("", "stage of a sample", "time", [one for one in parts if one.share >= SMALL], on=Medium.BRIEF)
    yield Breakdown("", "stage of a sample", "time", parts, on=Medium.PAGE)
    yield Folded("What computes in each stage, and where it is", [_stage_table(stages)], on=UNASKED)


def _computes(found: DataCost) -> str:
    if found.sample <= 0:
        return ""
    delay = found.delay / found.sample
    if delay < NOTABLE_DELAY:
        return f", {units.percent(found.sample_cpu / found.sample)} of it computing"
    computes = max(0.0, found.sample_cpu / found.sample - delay)
    return f", {units.percent(computes)} of it computing and {units.percent(delay)} waiting for a core"


def _read(found: DataCost) -> str:
    read = found.record.read
    if read is None or not read.samples or read.asked < 1024 * read.samples:
        return ""
    each = units.size(read.asked / read.samples)
    cold = read.disk / read.asked if read.asked else 0.0
    where = f"{units.percent(min(1.0, cold))} of them from a disk" if cold >= 0.01 else "all from memory (a warm cache)"
    return f"; {each} are read for it, {where}"


def _part(one: SampleStage) -> Part:
    return Part(one.called, HUES[one.kind], one.share, units.seconds(one.seconds), units.percent(one.share))


def _stage_table(stages: Sequence[SampleStage]) -> Table:
    rows = [
        {
            "stage": one.called,
            "time": units.seconds(one.seconds),
            "share": units.percent(one.share),
            "computes": units.percent(1 - one.waits),
            "calls": f"{one.calls:.3g}",
            "where": one.place,
        }
        for one in stages
    ]
    note = "Times are of one sample, in all processes, each without the stages inside it."
    return table("Stages of a sample", rows, ("where",), note=note)


def _scaling(found: DataCost) -> Iterator[Block]:
    scaling = [one for one in found.scaling if one.throughput or one.error]
    if len(scaling) < 2:
        return
    yield Heading("How it scales", anchor="workers")
    known = [one for one in scaling if one.throughput]
    if len(known) > 1:
        x = np.array([float(one.workers) for one in known])
        y = np.array([one.throughput.value for one in known if one.throughput])
        curves = [Curve(x, y, "a", "loader")]
        if found.ceiling:
            curves.append(Curve(x, np.full(len(x), found.ceiling.ready.value), "b", "training"))
        said = "; ".join(f"{one.workers}: {_rate(one.throughput)}" for one in known if one.throughput)
        plane = Plane("throughput over workers", said, "workers", "", "samples/s", from_zero=True)
        if (drawing := charts.over(plane, curves)) is not None:
            note = "Training: its throughput with data that is always ready." if found.ceiling else ""
            yield Figure("Throughput of the loader alone", drawing, note)
    yield table(
        "The loader alone",
        [_with_workers(one, found) for one in scaling],
        ("why no more",),
        sentences=("why no more",),
        expendable=("memory", "start of a pass", "first batch"),
        note="CPU is that of all processes for one sample. Memory is the proportional share of one worker.",
    )


def _with_workers(one: WithWorkers, found: DataCost) -> dict[str, str]:
    if one.throughput is None:
        return {"workers": str(one.workers), "throughput": "", "why no more": one.error or "not measured"}
    memory = units.size(one.memory) if one.memory else ""
    if one.memory and one.shm and one.shm > 0.05 * one.memory:
        memory += f" ({units.size(one.shm)} shared)"
    return {
        "workers": str(one.workers),
        "throughput": _rate(one.throughput),
        "CPU": units.seconds(one.cpu) if one.cpu is not None else "",
        "cores busy": f"{one.cores:.2g}" if one.cores is not None else "",
        "first batch": units.seconds(one.first_batch) if one.first_batch is not None else "",
        "start of a pass": units.seconds(one.restart) if one.restart is not None else "",
        "memory": memory,
        "why no more": needs.limit(one, found),
    }


def _samples(found: DataCost) -> Iterator[Block]:
    times = found.times
    if times is None or times.number < 2:
        return
    quantiles = times.quantiles
    yield Heading("Single samples", anchor="samples")
    middle, late, last = quantiles[50], quantiles[95], quantiles[100]
    yield Paragraph(
        f"half of the samples take {units.seconds(middle)} or less, 95 % at most {units.seconds(late)}, "
        f"and the slowest one {units.seconds(last)}{_slow(found)}"
    )
    x = np.arange(101, dtype=np.float64)
    plane = Plane(
        "time of a sample", f"median {units.seconds(middle)}", "%", "share of the samples", "s", from_zero=True
    )
    if (drawing := charts.over(plane, [Curve(x, np.array(quantiles), "a")])) is not None:
        yield Figure("Time of single samples, in order", drawing)
    rows = [
        {
            "sample": one.index,
            "time": units.seconds(one.seconds),
            "again": ", ".join(units.seconds(each) for each in one.again),
            "file": one.file,
        }
        for one in times.slowest
    ]
    yield table("The slowest samples", rows, ("file",), on=UNASKED)


def _slow(found: DataCost) -> str:
    """Says whether the slow samples are the same ones again, if any is much slower than usual."""
    slow = needs.slow_samples(found)
    if slow is None:
        return ""
    named = units.listed([f"number {one.index}" for one in slow.samples[:SLOW_SHOWN]])
    if slow.again:
        return f"; slow again when made again: {named}"
    return "; the slow ones were not slow again, so that it was the moment and not the sample"


def after_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields nothing: the stages come before the metrics."""
    yield from ()


def over_time(run: RunEvidence) -> Iterator[Block]:
    """Yields the batches and their distribution."""
    for block in steps.over_time(run):
        yield replace(block, text="Batches") if isinstance(block, Heading) else block


def measured(run: RunEvidence) -> str:
    batches = sum(window.steps for window in run.windows)
    number = f"{batches:,} batches" if batches != 1 else "1 batch"
    return f"{units.counted(len(run.windows), 'repeat')} with {number} in all"


def caption(run: RunEvidence) -> str:
    return f"{measured(run)}; {intervals(len(run.windows))}"


def without_throughput(run: RunEvidence) -> str:
    return "nothing was drawn"


def without_metrics(run: RunEvidence) -> str:
    """How far a run came that has no metrics."""
    return "no repeat got past its warm-up"
