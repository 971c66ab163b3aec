"""Runs that are all alike, against each other: how often does `gpubench compare` call them different on this machine?

    .venv/bin/python benchmarks/compare_equal.py [--runs 6] [--repeats 3] [-- TRAIN-BENCH OPTIONS]

Measures one configuration several times and judges its step time in every pair: of runs, with what their likes have
taught of the noise between runs (that takes four) and without; and of single repeats, by the interval of their steps
alone and, as many tools do, by a rank test. Then it asks what `--null` makes of the runs. Prints Markdown.
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
from gpubench.comparison.compare import null, only
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
            row("runs, by their repeats and how runs differ", runs, verdict((learned,))),
            row("runs, by their repeats alone", runs, verdict(())),
            row("single repeats, by their steps alone", repeats, verdict(())),
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


def verdict(noise: Sequence[NullMetric]) -> Judge:
    def judged(baseline: RunEvidence, candidate: RunEvidence) -> str:
        ours, theirs = (Side(run.label, (run,)) for run in (baseline, candidate))
        return judge(baseline.metrics[METRIC], ours, theirs, Circumstances(noise=noise)).verdict.verdict

    return judged


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
