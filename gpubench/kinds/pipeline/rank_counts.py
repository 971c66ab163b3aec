"""Compares pipelines that differ in the number of ranks: which number is worth its cost."""

from collections.abc import Mapping, Sequence

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.compare.result import Verdict
from gpubench.kinds.pipeline import headline as headline_of
from gpubench.report import after_run, phrases, quoted
from gpubench.report.sweep import cells
from gpubench.runs.headlines import known
from gpubench.runs.warnings import more_repeats

COLUMNS = ("throughput", "sample_latency", "energy_per_sample", "peak_memory_reserved", "peak_memory_rss")


def named(run: RunEvidence) -> str:
    return units.counted(_ranks(run), "rank")


def headline(runs: Sequence[RunEvidence]) -> str:
    """The number of ranks that pays: the smallest that no larger one is measurably faster than."""
    first = runs[0]
    samples, device = (first.settings.get(key) for key in ("work.samples", "device"))
    many = units.counted(samples, "sample") if samples else "? samples"
    what = f"{known(headline_of.model(first.settings, first.workload))}, {many} on {device or '?'}"
    measured = sorted((run for run in runs if "throughput" in run.metrics), key=_ranks)
    if not measured:
        return f"{what}: nothing was measured"
    if len(measured) == 1:
        return f"{what}: only {named(measured[0])} was measured, so that nothing is compared"
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
    against, more = f"than {named(best)}", more_repeats(best.settings)
    rest = [
        f"{_listed(not_faster)} not faster {against}" if not_faster else "",
        f"whether {_listed(unknown)} faster {against} is within the noise: {more}" if unknown else "",
    ]
    if best is not least:
        rest.insert(0, f"{named(best)} pay, with {_gain(least, best)}")
    elif not unknown:
        rest.insert(0, f"more ranks than {_ranks(best)} do not pay")
    return f"{what}: {'; '.join(filter(None, rest))}"


def columns(run: RunEvidence) -> Sequence[str]:
    return COLUMNS


def rows(runs: Sequence[RunEvidence], columns: Sequence[str]) -> list[Mapping[str, str]]:
    """One row for each number of ranks, with its efficiency against the smallest one."""
    known = [run for run in runs if "throughput" in run.metrics]
    least = min(known, key=_ranks, default=None)
    made: list[Mapping[str, str]] = []
    for run in runs:
        row = {"ranks": str(_ranks(run))} | cells(run, columns)
        if least is not None:
            throughput = run.metrics.get("throughput")
            each = least.metrics["throughput"].estimate / _ranks(least)
            share = throughput.estimate / _ranks(run) / each if throughput and not throughput.too_noisy else None
            row["efficiency"] = "-" if share is None else units.percent(share)
        made.append(row)
    return made


def notes(runs: Sequence[RunEvidence]) -> list[str]:
    known = [run for run in runs if "throughput" in run.metrics]
    if not known:
        return []
    least = named(min(known, key=_ranks))
    return [
        f"efficiency is the throughput of a rank / that with {least}, the time to fill and drain the pipeline included",
        "a sample makes its evaluations one after another on any number of ranks: more ranks cannot shorten its "
        "latency, a longer one is waiting or a shared device, and a shorter one is noise",
    ]


def _gain(least: RunEvidence, best: RunEvidence) -> str:
    """By what factor the best number of ranks has a higher throughput than the smallest."""
    verdict = _judged(least, best)
    if verdict is None or not verdict.ratio:
        return quoted.figure(best.metrics["throughput"])
    ends = phrases.width(verdict)
    sure = f" (95 % interval {units.digits(1 / ends[1])} to {units.digits(1 / ends[0])})" if ends else ""
    return f"{units.digits(1 / verdict.ratio)} x the throughput of {named(least)}{sure}"


def _judged(base: RunEvidence, other: RunEvidence) -> Verdict | None:
    """The verdict on the makespan of the same samples; None if the runs cannot be compared."""
    judged = after_run.judge_pair([base.path, other.path], metrics=["makespan"])
    verdicts = judged.comparisons[0].verdicts if judged else []
    return next((verdict for verdict in verdicts if verdict.metric == "makespan"), None)


def _listed(ranks: Sequence[int]) -> str:
    """Such as "4 ranks are", "1 rank is" or "4 and 8 ranks are"."""
    if len(ranks) == 1:
        return f"{units.counted(ranks[0], 'rank')} {'is' if ranks[0] == 1 else 'are'}"
    return f"{units.listed(map(str, ranks))} ranks are"


def _ranks(run: RunEvidence) -> int:
    known = run.record.world_size if run.record else 1
    return int(run.settings.get("distributed.world_size") or known)
