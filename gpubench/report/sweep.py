"""The report of runs that differ in one number only: the latency and the throughput of each.

The number is the batch size, or for a pipeline the number of ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubench import units
from gpubench.compare import comparability
from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.compare.result import Verdict
from gpubench.errors import NO_MESSAGE
from gpubench.metrics import Metric
from gpubench.report import after_run, phrases
from gpubench.report.document import Block, Command, Document, Paragraph, table
from gpubench.report.run import LATENCIES
from gpubench.runs.directory import FAILED
from gpubench.runs.warnings import more_repeats, on_noise

COLUMNS = ("step_time", "throughput", "token_throughput", "energy_per_sample", "peak_memory_reserved")
"""The metrics of a table for training; one of inference has the latency in place of the step time."""
OF_RANKS = ("throughput", "sample_latency", "energy_per_sample", "peak_memory_reserved", "peak_memory_rss")
"""The metrics of a table of a pipeline with several numbers of ranks."""


def document(paths: Sequence[Path]) -> Document:
    """Returns which number is best, the figures of each, and where the runs are. Their own reports have the rest.

    Raises RunDirectoryError for a run that cannot be read.
    """
    runs = [open_run(path, measured=False) for path in paths]
    by_ranks = _is_pipeline(runs[0])
    columns = [*LATENCIES, *COLUMNS[1:]] if runs[0].settings.get("inference") else OF_RANKS if by_ranks else COLUMNS
    known = [name for name in columns if any(name in run.metrics for run in runs)]
    loudest = max(runs, key=lambda run: (run.summary.others.cores if run.summary.others else None) or 0.0)
    doubts = on_noise(loudest.summary.others, loudest.metrics.get("throughput"), loudest.windows, loudest.settings)
    failures = [
        f"{_named(run)}: {run.record.error.get('message') or NO_MESSAGE}"
        for run in runs
        if run.status == FAILED and run.record and run.record.error
    ]
    made: list[Block] = [
        Paragraph(headline_of_ranks(runs) if by_ranks else headline(runs), "strong"),
        Paragraph(doubts, "warning", "warning: "),
        table("", _of_ranks(runs, known) if by_ranks else [_row(run, known) for run in runs]),
        Paragraph([_caption(runs), *(_about_ranks(runs) if by_ranks else [])], "quiet"),
        Paragraph(failures, "warning"),
    ]
    return Document("", [*made, *(Command(f"{_named(run)} {run.status}", str(run.path)) for run in runs)])


def headline(runs: Sequence[RunEvidence]) -> str:
    """Returns the batch size with the highest throughput and, for inference, the one with the lowest latency.

    Batch sizes whose intervals overlap that of the best one are named with it.
    """
    first = runs[0]
    ranks = first.record.world_size if first.record else 1
    what = f"{comparability.model_in(first.settings)}{comparability.over(ranks)}"
    what += f" on {first.settings.get('device') or '?'}"
    best = [
        said
        for name, word in (("throughput", "the highest throughput"), ("latency_p50", "the lowest latency"))
        if (said := _best(runs, name, word))
    ]
    return f"{what}: {'; '.join(best)}" if best else f"{what}: nothing was measured"


def headline_of_ranks(runs: Sequence[RunEvidence]) -> str:
    """Returns which number of ranks pays: the smallest that no larger one is measurably faster than."""
    first = runs[0]
    found = first.summary.pipeline
    model, samples, device = (first.settings.get(key) for key in ("model.name", "work.samples", "device"))
    model = found.model if found else model or first.settings.get("model.unet")
    many = units.counted(samples, "sample") if samples else "? samples"
    what = f"{model or '?'}, {many} on {device or '?'}"
    measured = sorted((run for run in runs if "throughput" in run.metrics), key=_ranks)
    if not measured:
        return f"{what}: nothing was measured"
    if len(measured) == 1:
        return f"{what}: only {_named(measured[0])} was measured, so that nothing is compared"
    best = least = measured[0]
    not_faster: list[int] = []
    unknown: list[int] = []
    for run in measured[1:]:
        verdict = _judged(best, run)
        if verdict and verdict.verdict == "faster":
            best, not_faster, unknown = run, [], []
        elif verdict and verdict.verdict in ("slower", "equivalent"):
            not_faster.append(_ranks(run))
        else:
            unknown.append(_ranks(run))
    against, more = f"than {_named(best)}", more_repeats(best.settings)
    rest = [
        f"{_listed(not_faster)} not faster {against}" if not_faster else "",
        f"whether {_listed(unknown)} faster {against} is within the noise: {more}" if unknown else "",
    ]
    if best is not least:
        rest.insert(0, f"{_named(best)} pay, with {_gain(least, best)}")
    elif not unknown:
        rest.insert(0, f"more ranks than {_ranks(best)} do not pay")
    return f"{what}: {'; '.join(filter(None, rest))}"


def _gain(least: RunEvidence, best: RunEvidence) -> str:
    """Returns by what factor the best number of ranks has a higher throughput than the smallest."""
    verdict = _judged(least, best)
    if verdict is None or not verdict.ratio:
        return phrases.figure(best.metrics["throughput"])
    ends = phrases.width(verdict)
    sure = f" (95 % interval {units.digits(1 / ends[1])} to {units.digits(1 / ends[0])})" if ends else ""
    return f"{units.digits(1 / verdict.ratio)} x the throughput of {_named(least)}{sure}"


def _judged(base: RunEvidence, other: RunEvidence) -> Verdict | None:
    """Returns the verdict on the makespan of the same samples; None if the runs cannot be compared."""
    judged = after_run.judge_pair([base.path, other.path], metrics=["makespan"])
    verdicts = judged.comparisons[0].verdicts if judged else []
    return next((verdict for verdict in verdicts if verdict.metric == "makespan"), None)


def _listed(ranks: Sequence[int]) -> str:
    """Returns "4 ranks are", "1 rank is" or "4 and 8 ranks are"."""
    if len(ranks) == 1:
        return f"{units.counted(ranks[0], 'rank')} {'is' if ranks[0] == 1 else 'are'}"
    return f"{units.listed(map(str, ranks))} ranks are"


def _of_ranks(runs: Sequence[RunEvidence], columns: Sequence[str]) -> list[Mapping[str, str]]:
    """Returns a row for each number of ranks, with its efficiency against the smallest one."""
    known = [run for run in runs if "throughput" in run.metrics]
    least = min(known, key=_ranks, default=None)
    rows: list[Mapping[str, str]] = []
    for run in runs:
        cells = _row(run, columns)
        if least is not None:
            throughput = run.metrics.get("throughput")
            each = least.metrics["throughput"].estimate / _ranks(least)
            share = throughput.estimate / _ranks(run) / each if throughput and not throughput.too_noisy else None
            cells["efficiency"] = "-" if share is None else units.percent(share)
        rows.append(cells)
    return rows


def _about_ranks(runs: Sequence[RunEvidence]) -> list[str]:
    """Returns how to read the table of a pipeline."""
    known = [run for run in runs if "throughput" in run.metrics]
    if not known:
        return []
    least = _named(min(known, key=_ranks))
    return [
        f"efficiency is the throughput of a rank / that with {least}, the time to fill and drain the pipeline included",
        "a sample makes its evaluations one after another on any number of ranks: more ranks cannot shorten its "
        "latency, a longer one is waiting or a shared device, and a shorter one is noise",
    ]


def _is_pipeline(run: RunEvidence) -> bool:
    return run.record is not None and run.record.command == "pipe-infer"


def _ranks(run: RunEvidence) -> int:
    known = run.record.world_size if run.record else 1
    return int(run.settings.get("distributed.world_size") or known)


def _named(run: RunEvidence) -> str:
    return units.counted(_ranks(run), "rank") if _is_pipeline(run) else f"batch {_size(run)}"


def _best(runs: Sequence[RunEvidence], name: str, word: str) -> str:
    found = {_size(run): run.metrics[name] for run in runs if name in run.metrics}
    if not found:
        return ""
    size, best = (max if name == "throughput" else min)(found.items(), key=lambda pair: pair[1].estimate)
    alike = [other for other, metric in found.items() if other == size or _overlap(best, metric)]
    if len(alike) == 1:
        return f"batch {size} has {word}, {phrases.figure(best)}"
    return f"batches {units.listed(alike)} have {word}, with intervals that overlap"


def _overlap(one: Metric, other: Metric) -> bool:
    """Returns whether two intervals overlap; two repeats or more have one."""
    if one.interval is None or other.interval is None:
        return False
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


def _size(run: RunEvidence) -> str:
    return str(run.settings.get("training.batch_size") or "?")


def _row(run: RunEvidence, columns: Sequence[str]) -> dict[str, str]:
    cells = {units.words(name): _cell(run.metrics.get(name)) for name in columns}
    return ({"ranks": str(_ranks(run))} if _is_pipeline(run) else {"batch": _size(run)}) | cells


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    if metric.name in ("throughput", "sample_latency"):
        return phrases.figure(metric)
    return phrases.TOO_NOISY if metric.too_noisy else units.quantity(metric.estimate, metric.unit)


def _caption(runs: Sequence[RunEvidence]) -> str:
    repeats = min((len(run.windows) for run in runs if run.windows), default=0)
    if not repeats:
        return ""
    times = "one repeat of each, so that the variation between processes is unknown" if repeats == 1 else ""
    return times or f"{repeats} repeats of each, interleaved; intervals are 95 %, over repeats"
