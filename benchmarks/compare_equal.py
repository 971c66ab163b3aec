"""How often does `gpubench compare` call equal runs different on this machine?

    .venv/bin/python benchmarks/compare_equal.py [--runs 6] [--repeats 3] [-- TRAIN-BENCH OPTIONS]

It measures one configuration several times and judges its step time in every pair of runs, as the command does (which
from the fourth run on uses the recorded noise of earlier runs), and by their repeats alone. It also judges every pair
of single repeats, by the interval of their steps alone and by a rank test, as many tools do. Finally it estimates the
noise of the runs with `--null`. Bar: the command calls at most 5 % of the pairs of runs different.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import bars
import msgspec
from processes import reason
from scipy.stats import mannwhitneyu
from tables import table

from gpubench import units
from gpubench.compare.compare import compare, null, only
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.inputs import find
from gpubench.compare.result import NullMetric
from gpubench.compare.verdicts import Circumstances, judge

METRIC = "step_time"
DIFFERENT = ("faster", "slower")
NOMINAL = 0.05  # the error rate of a 95 % interval
HEAD = ("compared", "pairs", "called different", "equivalent", "inconclusive")
DEFAULTS = ("--config", "tiny", "--steps", "60", "--performance.cpu_threads=1", "--logging.graph=false")

Judge = Callable[[RunEvidence, RunEvidence], str]


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="gpubench-equal-") as folder:
        for number in range(arguments.runs):
            print(f"run {number + 1} of {arguments.runs}", file=sys.stderr, flush=True)
            try:
                measure(Path(folder), arguments.repeats, arguments.options or DEFAULTS)
            except subprocess.CalledProcessError as error:
                print(f"error: {reason(error)}", file=sys.stderr)
                return 1
        (group,), _ = find(["train-bench"], Path(folder))
        learned = only(null(group), [METRIC]).metrics[0]
        runs, repeats = group.runs, [single(run, index) for run in group.runs for index in range(run.repeats)]
        ours = Outcome.of("runs, gpubench compare", runs, as_command)
        others = (
            Outcome.of("runs, by their repeats alone", runs, by_repeats),
            Outcome.of("single repeats, by their steps alone", repeats, by_repeats),
            Outcome.of("single repeats, Mann-Whitney over steps (0.05)", repeats, rank_test),
        )
    headline = f"{runs[0].settings['model.name']} on {runs[0].settings['device']}"
    print(f"{headline}: {len(runs)} runs of {arguments.repeats} repeats each, all with the same settings\n")
    print(table([HEAD, ours.row(), *(outcome.row() for outcome in others)]))
    print(f"\n{sentence(learned)}")
    return bars.conclude([bars.at_most("pairs of equal runs called different", ours.different, NOMINAL, "{:.1%}")])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6, help="number of runs; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each run; default: %(default)s")
    parser.add_argument("options", nargs="*", help="options of train-bench, after --")
    return parser.parse_args()


def measure(results: Path, repeats: int, options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gpubench", "train-bench", "-q", *options, "--results", str(results)]
    subprocess.run([*command, "--repeats", str(repeats)], check=True, capture_output=True, text=True)


def single(run: RunEvidence, index: int) -> RunEvidence:
    """Return one repeat of a run as a separate run."""
    metric = run.metrics[METRIC]
    estimate = metric.repeats[index]
    alone = msgspec.structs.replace(metric, estimate=estimate, repeats=[estimate], interval=None)
    steady = [run.summary.steady[index]]
    return replace(run, summary=msgspec.structs.replace(run.summary, metrics=[alone], steady=steady))


@dataclass(frozen=True)
class Outcome:
    """The verdicts on every pair."""

    name: str
    words: Counter[str]

    @classmethod
    def of(cls, name: str, runs: Sequence[RunEvidence], judged: Judge) -> "Outcome":
        return cls(name, Counter(judged(*pair) for pair in combinations(runs, 2)))

    @property
    def different(self) -> float:
        """The fraction of pairs called different."""
        return sum(self.words[word] for word in DIFFERENT) / self.words.total()

    def row(self) -> list[str]:
        total = self.words.total()
        shares = (self.different, *(self.words[word] / total for word in ("equivalent", "inconclusive")))
        return [self.name, str(total), *map(units.percent, shares)]


def as_command(baseline: RunEvidence, candidate: RunEvidence) -> str:
    """Judge as `gpubench compare` does, with the recorded noise and load of the machine."""
    found = compare(sides(baseline, candidate), metrics=[METRIC])
    return found.comparisons[0].verdicts[0].verdict


def by_repeats(baseline: RunEvidence, candidate: RunEvidence) -> str:
    """Judge by the repeats, or by the steps of a single repeat, alone."""
    return judge(baseline.metrics[METRIC], *sides(baseline, candidate), Circumstances()).verdict.verdict


def sides(baseline: RunEvidence, candidate: RunEvidence) -> tuple[Side, Side]:
    return Side(baseline.label, (baseline,)), Side(candidate.label, (candidate,))


def rank_test(baseline: RunEvidence, candidate: RunEvidence) -> str:
    ours, theirs = (run.series(METRIC) for run in (baseline, candidate))
    assert ours
    assert theirs
    return "slower" if mannwhitneyu(ours[0], theirs[0]).pvalue < 0.05 else "equivalent"


def sentence(learned: NullMetric) -> str:
    """Return a sentence on the noise of the step time that --null has estimated."""
    resolvable, floor = (
        "unknown" if one is None else units.percent(one) for one in (learned.resolvable, learned.noise_floor)
    )
    return (
        f"{learned.level.capitalize()}s differ by {units.percent(learned.spread)}. Noise alone can make two of them "
        f"differ by {floor}. The smallest detectable change with {learned.per_side} on "
        f"each side is {resolvable}."
    )


if __name__ == "__main__":
    sys.exit(main())
