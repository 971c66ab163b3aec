"""Runs that are all alike, against each other: how often does `gpubench compare` call them different on this machine?

    .venv/bin/python benchmarks/compare_equal.py [--runs 6] [--repeats 3] [-- TRAIN-BENCH OPTIONS]

Measures one configuration several times and judges its step time in every pair: of runs, as the command does, which
from the fourth on have on record how their likes differed, and by their repeats alone; of single repeats, by the
interval of their steps alone and, as many tools do, by a rank test. Then it asks what `--null` makes of the runs.
Prints Markdown.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import msgspec
from overhead import print_table
from scipy.stats import mannwhitneyu

from gpubench import units
from gpubench.comparison.compare import compare, null, only
from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.comparison.result import NullMetric
from gpubench.comparison.sides import find
from gpubench.comparison.verdicts import Circumstances, judge

METRIC = "step_time"
DIFFERENT = ("faster", "slower")
DEFAULTS = ("--config", "tiny", "--steps", "60", "--performance.cpu_threads=1", "--logging.graph=false")

Judge = Callable[[RunEvidence, RunEvidence], str]


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="gpubench-equal-") as folder:
        for number in range(arguments.runs):
            print(f"run {number + 1} of {arguments.runs}", file=sys.stderr, flush=True)
            measure(Path(folder), arguments.repeats, arguments.options or DEFAULTS)
        (group,), _ = find(["train-bench"], Path(folder))
        learned = only(null(group), [METRIC]).metrics[0]
        runs, repeats = group.runs, [single(run, index) for run in group.runs for index in range(run.repeats)]
        rows = [
            ["compared", "pairs", "called different", "equivalent", "inconclusive"],
            row("runs, gpubench compare", runs, as_it_comes),
            row("runs, by their repeats alone", runs, bare),
            row("single repeats, by their steps alone", repeats, bare),
            row("single repeats, Mann-Whitney over steps (0.05)", repeats, rank_test),
        ]
    headline = f"{runs[0].settings['model.name']} on {runs[0].settings['device']}"
    print(f"{headline}: {len(runs)} runs of {arguments.repeats} repeats, all alike\n")
    print_table(rows)
    print(f"\n{sentence(learned)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("options", nargs="*", help="of train-bench, behind --")
    return parser.parse_args()


def measure(results: Path, repeats: int, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gpubench", "train-bench", "-q", *options, "--results", str(results)]
    subprocess.run([*command, "--repeats", str(repeats)], check=True, stdout=subprocess.DEVNULL)


def single(run: RunEvidence, index: int) -> RunEvidence:
    """One repeat as if it were a run of its own."""
    metric = run.metrics[METRIC]
    estimate = metric.repeats[index]
    alone = msgspec.structs.replace(metric, estimate=estimate, repeats=[estimate], interval=None)
    return replace(run, metrics={METRIC: alone}, windows=[run.windows[index]])


def row(name: str, runs: Sequence[RunEvidence], judged: Judge) -> list[str]:
    outcomes = Counter(judged(*pair) for pair in combinations(runs, 2))
    total = outcomes.total()
    different = sum(outcomes[word] for word in DIFFERENT)
    shares = (different, outcomes["equivalent"], outcomes["inconclusive"])
    return [name, str(total), *(units.percent(count / total) for count in shares)]


def as_it_comes(baseline: RunEvidence, candidate: RunEvidence) -> str:
    """With what the runs have on record of their noise, and what else the machine was seen doing."""
    found = compare(sides(baseline, candidate), metrics=[METRIC])
    return found.comparisons[0].verdicts[0].verdict


def bare(baseline: RunEvidence, candidate: RunEvidence) -> str:
    return judge(baseline.metrics[METRIC], *sides(baseline, candidate), Circumstances()).verdict.verdict


def sides(baseline: RunEvidence, candidate: RunEvidence) -> tuple[Side, Side]:
    return Side(baseline.label, (baseline,)), Side(candidate.label, (candidate,))


def rank_test(baseline: RunEvidence, candidate: RunEvidence) -> str:
    ours, theirs = (run.series(METRIC) for run in (baseline, candidate))
    assert ours
    assert theirs
    return "slower" if mannwhitneyu(ours[0], theirs[0]).pvalue < 0.05 else "equivalent"


def sentence(learned: NullMetric) -> str:
    """What --null says of the step time."""
    resolvable = "not known" if learned.resolvable is None else units.percent(learned.resolvable)
    return (
        f"{learned.level.capitalize()}s differ by {units.percent(learned.spread)}; noise alone can set two apart by "
        f"{units.percent(learned.noise_floor)}; {learned.per_side} against {learned.per_side} resolve {resolvable}."
    )


if __name__ == "__main__":
    main()
