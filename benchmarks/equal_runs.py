"""How often are verdicts on real equal runs wrong, and how often do they find a change?

    .venv/bin/python benchmarks/equal_runs.py FOLDER [--splits 10] [--change 2] [--sizes 1v1,1v3,2v2,3v3,5v5]

Each folder in FOLDER is a collection, such as a round of MLPerf Training. Each file in it, NAME.npz, is a group of runs
of one program on one system, with an array of the times of equal units of work for each run. Of each group, runs are
drawn at random for both sides. A false verdict is a change where there is none. A found one is a change of as many
percent as asked for, by which all times of one side are multiplied.

gpubench judges them as it does the logs of other tools, with one warm-up for all runs of a pair. Beside it, three tests
judge the means of the same steps, each with the same margin: Welch's test, Student's test, and the moderated t with a
spread of 0.15 % and one degree of freedom. No collection is part of this project: the logs of MLPerf Training, MLPerf
HPC and modded-nanogpt are public. Bars: at most 5 % of gpubench's verdicts are false, in each collection and with each
number of runs but one against one, and at least as many changes are found as by Welch's test.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import bars
import numpy as np
from numpy.typing import NDArray
from tables import table

from gpubench.compare import logs, verdicts
from gpubench.compare.evidence import Side, aligned
from gpubench.compare.log_columns import LogColumn
from gpubench.compare.log_formats import TABLE, LogContent, LogMetric
from gpubench.compare.logs import LogEvidence
from gpubench.compare.verdicts import DEFAULT_MARGIN, Circumstances, judge
from gpubench.distributions import student_t_quantile

Series = NDArray[np.float64]
Run = Series
Half = Callable[[Series, Series], float]
"""Returns half the width of the 95 % interval of the logarithm of the ratio of two means."""

SEED = 20_200_303
NOMINAL = 0.05
FEWEST = 2  # values of a run
COLUMN = LogColumn.of("time", "s")
BAND = float(np.log1p(DEFAULT_MARGIN))


def welch(ours: Series, theirs: Series) -> float:
    errors = [side.var(ddof=1) / side.mean() ** 2 / len(side) for side in (ours, theirs)]
    if not sum(errors):
        return 0.0
    df = sum(errors) ** 2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, (ours, theirs), strict=True))
    return float(-student_t_quantile(round(df, 2), NOMINAL / 2) * np.sqrt(sum(errors)))


def moderated(spread: float, prior: float) -> Half:
    """Returns Student's test with a spread that is known before with `prior` degrees of freedom."""

    def half(ours: Series, theirs: Series) -> float:
        df = len(ours) + len(theirs) - 2
        squares = sum(float(((side / side.mean() - 1) ** 2).sum()) for side in (ours, theirs))
        size = np.sqrt((prior * spread**2 + squares) / (prior + df) * (1 / len(ours) + 1 / len(theirs)))
        return float(-student_t_quantile(prior + df, NOMINAL / 2) * size)

    return half


PEERS: dict[str, Half] = {
    "Welch's t": welch,
    "Student's t": moderated(0.0, 0.0),
    "moderated t": moderated(0.0015, 1.0),
}


def read(path: Path) -> list[Run]:
    """Returns the runs of a group that have enough values."""
    with np.load(path) as found:
        runs = [np.asarray(found[name], dtype=np.float64) for name in found.files]
    return [run for run in runs if len(run) >= FEWEST and np.isfinite(run).all() and run.min() > 0]


def evidence(run: Run, name: str) -> LogEvidence:
    return logs.evidence_of(Path(name), LogContent(TABLE, [LogMetric(COLUMN, [run], None)], []))


def pairs(
    runs: Sequence[LogEvidence], sizes: tuple[int, int], splits: int, rng: np.random.Generator
) -> Iterator[tuple[Side, Side]]:
    """Yields random pairs of disjoint sides."""
    for _ in range(splits if len(runs) >= sum(sizes) else 0):
        order = rng.permutation(len(runs))[: sum(sizes)]
        drawn = [runs[place] for place in order]
        yield Side("a", tuple(drawn[: sizes[0]])), Side("b", tuple(drawn[sizes[0] :]))


def slower(side: Side, factor: float) -> Side:
    return Side(
        side.label, tuple(evidence(run.values * factor, run.label) for run in side.runs if isinstance(run, LogEvidence))
    )


def means(side: Side) -> Series:
    return np.array([run.metrics[COLUMN.name].estimate for run in side.runs])


def count(baseline: Side, candidate: Side, factor: float, found: Counter[str]) -> None:
    """Adds what gpubench and its peers say of an equal pair, and of one that differs by a factor."""
    found["pairs"] += 1
    baseline, candidate = aligned([baseline, candidate])
    metric = baseline.runs[0].metrics[COLUMN.name]
    found["gpubench, false"] += judge(metric, baseline, candidate, Circumstances()).verdict.verdict in (
        "faster",
        "slower",
    )
    changed = aligned([baseline, slower(candidate, factor)])
    found["gpubench, found"] += judge(metric, changed[0], changed[1], Circumstances()).verdict.verdict == "slower"
    ours, theirs = means(baseline), means(candidate)
    ratio = float(np.log(theirs.mean() / ours.mean()))
    for name, half in PEERS.items() if min(len(ours), len(theirs)) > 1 else ():
        width = half(ours, theirs)
        found[f"{name}, false"] += abs(ratio) - width > BAND
        found[f"{name}, found"] += ratio + np.log(factor) - width > BAND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--splits", type=int, default=10, help="pairs of each group")
    parser.add_argument("--change", type=float, default=2.0, help="in percent")
    parser.add_argument("--sizes", default="1v1,1v3,2v2,3v3,5v5", help="numbers of runs on both sides")
    arguments = parser.parse_args()
    verdicts._more_repeats = lambda *_: None  # the advice takes most of the time, and is not looked at
    factor, checks = 1 + arguments.change / 100, []
    columns = ["gpubench", *PEERS]
    rows: list[list[str]] = []
    for folder in sorted(child for child in arguments.folder.iterdir() if child.is_dir()):
        groups = [[evidence(run, path.stem) for run in read(path)] for path in sorted(folder.glob("*.npz"))]
        for size in arguments.sizes.split(","):
            first, last = map(int, size.split("v"))
            found: Counter[str] = Counter()
            rng = np.random.default_rng(SEED)
            for group in groups:
                for pair in pairs(group, (first, last), arguments.splits, rng):
                    count(*pair, factor, found)
            if not found["pairs"]:
                continue
            shares = {name: found[name] / found["pairs"] for name in found}
            cells = [
                f"{shares[f'{name}, false']:.1%} / {shares[f'{name}, found']:.0%}" if f"{name}, false" in found else "-"
                for name in columns
            ]
            rows.append([folder.name, size, str(found["pairs"]), *cells])
            print(*rows[-1], sep="  ", flush=True)
            if size != "1v1":
                false = shares["gpubench, false"]
                checks.append(bars.at_most(f"false verdicts, {folder.name}, {size}", false, NOMINAL, "{:.1%}"))
            if "Welch's t, found" in shares:
                gained = shares["gpubench, found"] - shares["Welch's t, found"]
                what = f"found more often than by Welch's t, {folder.name}, {size}"
                checks.append(bars.holds(what, f"{gained:+.1%}", "at least 0%", good=gained >= 0))
    print(table([["collection", "runs", "pairs", *(f"{name}: false / found" for name in columns)], *rows]))
    return bars.conclude(checks)


if __name__ == "__main__":
    sys.exit(main())
