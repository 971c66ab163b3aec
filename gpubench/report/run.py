"""The report of a finished run, read from its directory: for the terminal, for report.html and as JSON."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side, open_run
from gpubench.compare.result import Comparison, Comparisons
from gpubench.data_cost import DataCost
from gpubench.errors import GpubenchError, RunDirectoryError, StillRunning
from gpubench.findings import Findings
from gpubench.memory.batch_sizes import BatchSizes, Trades
from gpubench.memory.footprint import Footprints
from gpubench.metrics import DEFINITIONS, LATENCIES, Metric
from gpubench.registry import kind_of
from gpubench.report import comparison, patches, perfetto, phrases, profile, quoted, run_figures
from gpubench.report.document import (
    EVERYWHERE,
    TEXT,
    Block,
    Cell,
    Chip,
    Command,
    Document,
    Facts,
    Figures,
    Folded,
    Heading,
    Medium,
    NestedDocument,
    Paragraph,
    raised,
    table,
)
from gpubench.report.kind_report import KindReport, intervals, missing, report_of
from gpubench.report.profile_tables import PLAIN, Arrangement
from gpubench.runs import directory
from gpubench.runs.directory import BATCH_SIZES, FINDINGS, LOADER, MEMORY, PROFILE, SUMMARY, TRACES, TRADES
from gpubench.runs.reader import Run
from gpubench.runs.steps import StepSamples
from gpubench.runs.summary import LATENCY, NO_MEASUREMENTS, Summary
from gpubench.trace.profile import Profile

NOTABLY_LONGER = 1.25
"""The difference is explained if the mean step of inference is at least this multiple of its usual latency."""
NOTABLE = 0.02
"""That explanation names parts that are at least this share of a step."""
DOCUMENTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "profile": (PROFILE, Profile),
    "findings": (FINDINGS, Findings),
    "memory": (MEMORY, Footprints),
    "batch_sizes": (BATCH_SIZES, BatchSizes),
    "trades": (TRADES, Trades),
    "loader": (LOADER, DataCost),
}
"""What stands beside the summary in --json: name, file and type."""
MOST_LINKS = 6  # runs of one command that a page leads to
DAMAGED = "restore it from a copy, or leave --json out"
UNKNOWN_SAMPLES = "the number of samples in a step is unknown"


def to_json(paths: Sequence[Path], comparisons: Comparisons | None = None) -> str:
    """Returns one document: for two runs that of `compare --json`, then every run with path, status, error and summary.

    The summary is empty for a run that ended before its summary was written. Raises RunDirectoryError for a document
    that cannot be read.
    """
    compared = msgspec.structs.asdict(comparisons) if comparisons else {}
    runs = [
        {"path": str(path), "status": run.status, "error": run.record.error, **documents(run)}
        for path in paths
        for run in (Run.open(path),)
    ]
    return directory.to_json({"schema_version": directory.SCHEMA_VERSION} | compared | {"runs": runs})


def documents(run: Run) -> dict[str, Any]:
    """Returns the summary of a run, and its other documents by name.

    Raises RunDirectoryError for one that cannot be read.
    """
    summary = _as_written(run, SUMMARY, Summary) or msgspec.to_builtins(NO_MEASUREMENTS)
    beside = {name: _as_written(run, file, kind) for name, (file, kind) in DOCUMENTS.items()}
    if not kind_of(run.record.command).timed:
        beside["memory"] = beside["memory"] or msgspec.to_builtins(Footprints([]))
    known = {name: found for name, found in beside.items() if found}
    return {**summary, **known}


def _as_written(run: Run, name: str, kind: type[msgspec.Struct]) -> dict[str, Any] | None:
    """Returns one document without its version; None if the file does not exist.

    It is checked against its type but not converted, because 1 would become 1.0.
    """
    if run.required(name, kind, DAMAGED) is None:
        return None
    found = run.required(name, dict[str, Any], DAMAGED) or {}
    found.pop("schema_version", None)
    return found


def document(
    paths: Sequence[Path],
    comparisons: Comparisons | None = None,
    arranged: Arrangement = PLAIN,
    *,
    later: bool = False,
) -> Document:
    """Returns what a command prints when its runs have ended: how two compare, each run, and where the files are.

    `arranged` is how the tables of a profile are shown. `later` adds the errors that ended runs, for a command other
    than the one that ran them, which says these itself. Raises RunDirectoryError if there is one run,
    which has ended and is damaged.
    """
    made: list[Block] = list(comparison.document(comparisons).blocks) if comparisons else []
    ends: list[Block] = []
    sides = (comparisons.comparisons[0].baseline, comparisons.comparisons[0].candidate) if comparisons else ()
    names = [f"{side.label}: " for side in sides] or [""] * len(paths)
    for path, name in zip(paths, names, strict=True):
        try:
            run = open_run(path, measured=False)
        except GpubenchError as error:
            if len(paths) == 1 and not isinstance(error, StillRunning):
                raise
            made.append(NestedDocument(f"no results: {error.message}", [], path.name, ""))
            continue
        found = [*(_error(run) if later else ()), *blocks(run, arranged)]
        if run.status == directory.COMPLETED:  # others may lack files
            found.append(Paragraph(run.problems, "warning", "warning: "))
        shown = EVERYWHERE & ~Medium.BRIEF if comparisons else EVERYWHERE
        label = "" if comparisons and ends else run.label
        made.append(NestedDocument(f"{name}{headline(run)}", found, label, "", on=shown))
        ends.append(Command(run.status, str(path)))
        if (html := path / directory.REPORT).is_file():
            ends.append(Command("page", str(html)))
    if len(paths) > 1 and comparisons is None:
        made.insert(0, Paragraph("no comparison, because a run has no complete repeat", "strong"))
    return Document("", [*made, *ends])


def page(
    run: RunEvidence,
    previous: Comparison | None = None,
    earlier: RunEvidence | None = None,
    arranged: Arrangement = PLAIN,
) -> Document:
    """Returns a run's report.html. `previous` compares the experiment's previous run, `earlier`, with this one."""
    record = run.record
    called = (record.name if record else None) or run.label
    about = [called, run.status] + ([_code_state(record.git)] if record and record.git else [])
    context = "log of another tool"
    if record:
        context = f"{record.experiment}, {phrases.moment(record.started)}, on {record.host}"
    found = [
        *blocks(run, arranged),
        *_recorded(run),
    ]  # reads files, and what cannot be read is among the warnings before it
    known = Paragraph(_rests_on(run) if run.metrics and not run.untimed else "", "quiet", on=Medium.PAGE)
    lead = list(takewhile(lambda block: isinstance(block, Paragraph), found))  # which belongs to the headline
    made = [known, *_error(run), *lead, *_since(run, previous, earlier), *found[len(lead) :]]
    return Document(
        headline(run),
        made,
        title=_title(run),
        context=context,
        about=", ".join(about),
        names=[record.name] if record and record.name else [],
        chips=[] if run.status == directory.COMPLETED else [Chip(run.status, "rejected")],
        links=links(run),
        footer=[([str(run.path)], [" ".join(record.argv)] if record and record.argv else [])],
    )


def _title(run: RunEvidence) -> str:
    """Returns what the user calls the run, or what was run; its id if nothing else is known."""
    record = run.record
    if record is None:
        return run.label
    called = record.name or run.kind.describe(run.settings, run.workload, ranks=run.ranks, samples=run.summary.samples)
    return " · ".join(filter(None, (called, record.variant, record.experiment)))


def links(run: RunEvidence) -> list[tuple[str, str]]:
    """Returns the other pages that a run's page leads to, those of its comparison only if they are there."""
    found = [("All runs", "../../index.html")]
    if (run.path.parent.parent / directory.HISTORY).is_file():
        found.append(("History", f"../../{directory.HISTORY}"))
    others = run.record.interleaved_with if run.record else []
    for folder in (run.path, *(run.path.parent / other for other in others[:MOST_LINKS])):
        if (folder / directory.COMPARISON_PAGE).is_file():
            found.append(("Comparison", f"../{quote(folder.name)}/{directory.COMPARISON_PAGE}"))
        if folder != run.path and (folder / directory.REPORT).is_file():
            found.append((_side(folder), f"../{quote(folder.name)}/{directory.REPORT}"))
    return found


def _side(folder: Path) -> str:
    """Returns what the other side of a comparison is called."""
    try:
        record = open_run(folder, measured=False).record
    except RunDirectoryError:
        record = None
    return (record.variant if record else None) or folder.name


def headline(run: RunEvidence) -> str:
    """Returns the answer in one line: what ran and how fast, what takes the time, or what its kind of run answers."""
    if run.kind.diagnosed and run.findings:
        return run.findings.headline.rstrip(".")
    return report_of(run).answer(run) or _measured(run)


def _measured(run: RunEvidence) -> str:
    """Returns what ran and how fast."""
    what = run.kind.describe(run.settings, run.workload, ranks=run.ranks, samples=run.summary.samples)
    gpu = f" ({run.device})" if run.device and run.settings.get("device") == "cuda" else ""
    return f"{what}{gpu}{_speed(run)}"


def blocks(run: RunEvidence, arranged: Arrangement = PLAIN) -> list[Block]:
    """Returns what stands below a run's headline: results first, then where the time and the memory went."""
    own = report_of(run)
    made: list[Block] = [Paragraph(beyond_latency(run.metrics))]
    if run.metrics and not (run.untimed or run.kind.diagnosed):
        made.append(Paragraph(_rests_on(run), "quiet", on=Medium.BRIEF))
    diagnosed = (run.profile, run.findings) if run.profile and run.findings else None
    diagnosing = run.kind.diagnosed
    if not diagnosing and run.profile and run.findings:
        made.append(Paragraph(run.findings.headline, "strong", anchor="profile", on=Medium.PAGE))
    if diagnosing:
        ran = Paragraph(_measured(run), on=EVERYWHERE)
        made += [ran if diagnosed else missing(run, "no profile"), *own.after_metrics(run)]
        made += raised(_profile(run, *diagnosed, arranged)) if diagnosed else []
    made += [*own.before_metrics(run), *_metrics_in_text(run, own)]
    if not diagnosing:
        made += own.after_metrics(run)
        made += _diagnosis(run, *diagnosed, arranged) if diagnosed else []
        made += _trace(run)
    made += [*own.over_time(run), *_metrics_on_page(run, own)]
    made.append(Paragraph(run.summary.warnings, "warning", "warning: ", on=Medium.TERMINAL))
    if run.metrics and not (run.untimed or diagnosing):
        made.append(Paragraph(own.MORE, "quiet", on=Medium.BRIEF))
    return made


def _speed(run: RunEvidence) -> str:
    """Returns the throughput with its uncertainty after a colon, or that nothing was measured.

    It is the step time for a program whose samples are not known. The latency of inference comes before it.
    """
    speed = run.metrics.get("throughput") or run.metrics.get("step_time")
    if speed is None and (run.untimed or run.status == directory.RUNNING):
        return ""
    if speed is None:
        return f": {report_of(run).without_throughput(run)}"
    ended = {directory.FAILED: "of a failed run", directory.INTERRUPTED: "of an interrupted run"}.get(run.status, "")
    repeats = len(speed.repeats)
    number = "one repeat" if repeats == 1 else units.counted(repeats, "repeat")
    known = f"from {number}" if ended or repeats == 1 else ""
    busy = "on a busy machine" if run.summary.others and run.summary.others.busy else ""
    qualified = " ".join(filter(None, (known, ended, busy)))
    figures = [latency, quoted.figure(speed)] if (latency := _latency(run)) else [quoted.figure(speed)]
    return f": {'; '.join(figures)}" + (f", {qualified}" if qualified else "")


def _latency(run: RunEvidence) -> str:
    """Returns the quantiles of the latency that are known, as "latency p50 3.1 ms, p95 3.4 ms"."""
    known = [found for name in LATENCIES if (found := run.metrics.get(name))]
    if known and known[0].too_noisy:
        return f"latency p50 {quoted.figure(known[0])}"
    said = [
        f"{found.name.removeprefix('latency_')} {units.quantity(found.estimate, found.unit)}"
        for found in known
        if not found.too_noisy
    ]
    return f"latency {', '.join(said)}" if said else ""


def beyond_latency(metrics: Mapping[str, Metric]) -> str:
    """Returns what the throughput of inference counts besides the usual latency, if that is a notable part of a step.

    The parts are of the mean step, because the throughput is that of all steps, and the usual latency is the median.
    """
    usual, step = (metrics.get(name) for name in ("latency_p50", "step_time"))
    if usual is None or step is None or step.estimate < NOTABLY_LONGER * usual.estimate:
        return ""
    phases = {name: one.estimate for name, one in metrics.items() if name.startswith("phase_")}
    answering = sum(phases.pop(f"phase_{name}", 0.0) for name in LATENCY)
    parts = {
        "waiting for batches": phases.pop("phase_data_wait", 0.0),
        "work between the calls of the model": sum(phases.values()),
        "calls that take longer than usual": answering - usual.estimate,
    }
    shares = {name: part / step.estimate for name, part in parts.items()}
    named = [f"{units.percent(share)} is {name}" for name, share in shares.items() if share >= NOTABLE]
    if not named:
        return ""
    usually = units.percent(usual.estimate / step.estimate)
    return (
        f"a step takes {units.seconds(step.estimate)} on average, of which a usual call (latency p50) is {usually}, "
        f"{units.listed(named)}; the throughput counts all of it"
    )


def _traces(run: RunEvidence) -> list[Path]:
    """Returns the traces of the run: those that its profile is of, or all of them if it has no profile."""
    traces = sorted(run.path.joinpath(TRACES).glob(directory.TRACE_FILES))
    labels = {rank.label for rank in run.profile.ranks} if run.profile else set()
    return [path for path in traces if path.name in labels] or traces


def _trace(run: RunEvidence) -> Iterator[Block]:
    """Yields where the trace of a run that was also measured is, and how to diagnose it."""
    if traces := _traces(run):
        files = " ".join(f"--trace {shlex.quote(str(path))}" for path in traces)
        yield Command("traces", str(traces[0].parent))
        yield Command("diagnosis", f"gpubench profile {files}")


def _profile(run: RunEvidence, found: Profile, findings: Findings, arranged: Arrangement) -> list[Block]:
    trace = next(map(str, _traces(run)), found.ranks[0].label)
    unit = profile.unit_of(run.kind, run.settings)
    opener = next((page for one in _traces(run) if (page := perfetto.page_of(one)).is_file()), None)
    address = quote(str(opener.relative_to(run.path))) if opener else ""
    made = profile.blocks(found, findings, trace, unit, own=True, arranged=arranged, opener=address)
    return [*made, *patches.blocks(run.path, findings.patch)]


def _diagnosis(run: RunEvidence, found: Profile, findings: Findings, arranged: Arrangement) -> list[Block]:
    """Returns the profile of a run that was also measured: one line in a terminal without -v."""
    count = units.counted(len(findings.findings), "finding")
    line = f"profile: {findings.headline}; {count} in report.html"
    parts = [Paragraph(findings.headline.rstrip("."), "strong"), *_profile(run, found, findings, arranged)]
    asked = Medium.BRIEF if arranged else Medium.DETAILS
    shown = Folded("The profile", parts, opened=True, on=Medium.PAGE | Medium.DETAILS | asked)
    return [Paragraph(line, on=TEXT), Heading("Profile", anchor="profile"), shown]


def _metrics_in_text(run: RunEvidence, own: KindReport) -> Iterator[Block]:
    """Yields the leading metrics in a terminal and in Markdown, and all of them with -v."""
    news, every, note = _metrics(run, own)
    yield table("", [_metric_row(metric) for metric in news if metric.name in own.IN_BRIEF], on=Medium.BRIEF)
    yield table("", [_metric_row(metric) for metric in news], on=Medium.MARKDOWN)
    yield table("", [_full_row(metric) for metric in every], note=note, on=Medium.DETAILS)
    if _leading(run, own):
        yield Paragraph(own.caption(run), "quiet", on=Medium.DETAILS | Medium.MARKDOWN)
        yield Paragraph(what_samples_are(run.summary.samples), "quiet", on=Medium.DETAILS | Medium.MARKDOWN)
        if run.summary.timed_by:
            yield Paragraph(f"times are from {run.summary.timed_by}", "quiet", on=Medium.DETAILS | Medium.MARKDOWN)
            yield Paragraph(beside_the_gpu(run.metrics), "quiet", on=Medium.DETAILS | Medium.MARKDOWN)
        if "step_time" in run.metrics and "throughput" not in run.metrics:
            can_be_set = "training.samples_per_step" in run.settings
            hint = ": set it by --samples-per-step N to get a throughput" if can_be_set else ""
            yield Paragraph(UNKNOWN_SAMPLES + hint)
    elif not (run.untimed or run.kind.diagnosed):
        yield Paragraph(own.without_metrics(run))
    yield Paragraph(ceilings(run), on=Medium.DETAILS, listed=True)


def _metrics_on_page(run: RunEvidence, own: KindReport) -> Iterator[Block]:
    """Yields all metrics, those that do not lead folded up."""
    yield Heading("Metrics")
    news, every, note = _metrics(run, own)
    yield table("", [_full_row(metric) for metric in news or every], note=note, on=Medium.PAGE)
    others = [metric for metric in every if metric not in news] if news else []
    if others:
        yield Folded("Other metrics", [table("", [_full_row(metric) for metric in others])], on=Medium.PAGE)
    if not run.metrics:
        yield Paragraph("nothing was measured", "missing", on=Medium.PAGE)
    if said := ceilings(run):
        yield Heading("What efficiency is measured against", 3)
        yield Paragraph(said, on=Medium.PAGE, listed=True)


def _leading(run: RunEvidence, own: KindReport) -> list[Metric]:
    """Returns the metrics that the runs of a kind lead with."""
    names = () if run.untimed or run.kind.diagnosed else own.METRICS
    return [run.metrics[name] for name in names if name in run.metrics]


def _metrics(run: RunEvidence, own: KindReport) -> tuple[list[Metric], list[Metric], str]:
    """Returns the leading metrics and all of them, without those that say nothing, and what intervals are over."""
    news = [one for one in _leading(run, own) if phrases.WITHOUT_NEWS.get(one.name) != one.estimate]
    every = [metric for metric in run.metrics.values() if _is_news(metric)]
    over = f"intervals are Student's t over {units.counted(run.repeats, 'repeat')}, on a logarithmic scale"
    return news, every, over if any(metric.interval for metric in every) else ""


def what_samples_are(samples: StepSamples | None) -> str:
    """Returns what the samples of a step are, and how uneven they are; empty if there is nothing to say."""
    if samples is None:
        return ""
    said = [f"samples are {samples.counted_from}"] if samples.counted_from else []
    if not samples.even:
        said.append(f"batches are uneven: {samples.usual} samples in most steps, {samples.mean:.4g} on average")
    return "; ".join(said)


def beside_the_gpu(metrics: Mapping[str, Metric]) -> str:
    """Returns what gpubench itself took in a program that uses a GPU, and what the GPU hid; empty if it is unknown."""
    took, share = (metrics.get(name) for name in ("probe_time", "probe_share"))
    if took is None:
        return ""
    said = f"gpubench itself took {units.seconds(took.estimate)} of CPU time in a step"
    if share is None:
        return f"{said}; it is unknown how much of that the GPU hid"
    return f"{said}, of which the GPU hid all but {units.percent(share.estimate)} of a step"


def _is_news(metric: Metric) -> bool:
    return not metric.name.startswith("phase_") and phrases.WITHOUT_NEWS.get(metric.name) != metric.estimate


def _metric_row(metric: Metric) -> dict[str, str]:
    spread = metric.distribution
    quantiles = {"median": spread.median, "p95": spread.p95, "p99": spread.p99} if spread else {}
    return {
        "metric": units.words(metric.name),
        "estimate": quoted.central(metric),
        "interval": quoted.uncertainty(metric),
        **{name: units.quantity(value, metric.unit) for name, value in quantiles.items()},
    }


def _full_row(metric: Metric) -> dict[str, str | Cell]:
    ends = metric.interval
    interval = "" if ends is None else quoted.wide(metric) or units.span(ends[0], ends[1], metric.unit)
    definition = DEFINITIONS.get(metric.name)
    row: dict[str, str | Cell] = {**_metric_row(metric)}
    return row | {
        "metric": Cell(units.words(metric.name), note=definition.meaning if definition else ""),
        "interval": "the same in all repeats" if ends and ends[0] == ends[1] else interval,
    }


def _rests_on(run: RunEvidence) -> str:
    """Returns what the figures rest on, in brief."""
    repeats = len(run.windows)
    if not repeats:
        return ""
    return f"{report_of(run).measured(run)}; {intervals(repeats)}"


def ceilings(run: RunEvidence) -> list[str]:
    """Returns the sentences about FLOPs and peaks."""
    lines = []
    if (flops := run.summary.flops) and flops.model_flops_per_sample:
        lines.append(f"{units.count(flops.model_flops_per_sample, 'FLOP')} a sample, counted by {flops.method}")
    if peak := run.summary.peak:
        rate = units.count(peak.flops_per_s, "FLOP/s")
        lines.append(f"{rate} in {peak.dtype} published for {peak.device}: {peak.source}")
    if (measured := run.summary.measured_peak) and measured.flops_per_s:
        rate, size = units.count(measured.flops_per_s, "FLOP/s"), f"{measured.size} x {measured.size}"
        lines.append(f"{rate} in {measured.dtype} measured with a product of two {size} matrices")
    return lines


def _error(run: RunEvidence) -> Iterator[Block]:
    """Yields the error that ended a run, as the command said it."""
    error = run.record.error if run.record and run.status != directory.COMPLETED else None
    if error:
        yield Paragraph(str(error.get("message")), "warning", "error: ")
        yield Paragraph(error.get("hint") or "", "quiet", "hint: ")


def _since(run: RunEvidence, previous: Comparison | None, earlier: RunEvidence | None) -> Iterator[Block]:
    """Yields what changed since the experiment's previous run of the same work, and the warnings of this one."""
    if previous and earlier:
        link = f"../{quote(earlier.path.name)}/report.html"
        yield Heading("What changed since", link=earlier.label, target=link)
        yield Paragraph(phrases.headline(comparison.renamed(previous, "the previous run", "this run")), "strong")
        differing = previous.comparability.differences
        details = [
            *comparison.differences(differing, "before", "now"),
            Paragraph(previous.comparability.reasons, listed=True),
            Paragraph(previous.explanation.notes, listed=True),
            Paragraph(previous.warnings, "warning"),
        ]
        yield Folded(f"{units.counted(len(differing), 'difference')} between the two runs", details)
    elif run.record and run.metrics:
        yield Paragraph(f"experiment {run.record.experiment} has no earlier run of this work", "quiet", on=Medium.PAGE)
    if run.summary.warnings or run.problems:
        yield Heading("Warnings")
        yield Paragraph([*run.summary.warnings, *run.problems], "warning")


def _recorded(run: RunEvidence) -> Iterator[Block]:
    """Yields the hardware over time, the memory, the settings and the environment, for a page."""
    yield Heading("Hardware over time")
    telemetry = run_figures.whole_run(run, run_figures.GPU) or run_figures.whole_run(run, run_figures.CPU)
    if telemetry:
        yield Paragraph("shaded: the steady windows, which the metrics are computed from", "quiet")
        yield Figures(telemetry)
    else:
        yield Paragraph("telemetry is not recorded", "missing")
    yield Heading("Memory")
    side = run_figures.recording(Side(run.label, (run,)))
    estimates = {name: metric.estimate for name, metric in run.metrics.items()}
    held = run_figures.whole_run(run, [run_figures.GPU_MEMORY]) or run_figures.whole_run(run, [run_figures.CPU_MEMORY])
    if said := run_figures.lone_peak(estimates):
        yield Paragraph(said, on=Medium.PAGE)
    lacking = "memory over time is not recorded" if said else "memory is not recorded"
    yield from run_figures.or_missing([run_figures.peaks([side], [estimates]), *held], lacking)
    workload = {f"workload.{key}": value for key, value in run.workload.items()}
    for name, what, values in (
        ("Settings", "Every setting as it was used", run.settings),
        ("Environment", "Machine, libraries and workload", run.environment | workload),
    ):
        yield Heading(name)
        if values:
            yield Folded(what, [Facts(_by_head(values))])
        else:
            yield Paragraph(f"the {name.lower()} {'are' if name == 'Settings' else 'is'} not recorded", "missing")


def _by_head(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns settings grouped by the part before the first dot; those without a dot come first, without heading."""
    groups: dict[str, dict[str, str]] = {"": {}}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        groups.setdefault(head if dot else "", {})[rest if dot else key] = phrases.cell(value)
    return {head: entries for head, entries in groups.items() if entries}


def _code_state(git: Mapping[str, Any]) -> str:
    """Returns a clause about the measured working tree."""
    state = f"at commit {str(git.get('commit') or 'none')[:12]}"
    if git.get("branch"):
        state += f" of {git['branch']}"
    return f"{state}, with changes that were not committed" if git.get("dirty") else state
