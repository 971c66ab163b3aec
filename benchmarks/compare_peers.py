"""How often are comparison tools wrong? gpubench and its peers judge equal pairs, and pairs 3 % apart.

    .venv/bin/python benchmarks/compare_peers.py [--trials 200] [--processes 5] [--steps 60]

The times are simulated like those of training: a process's steps are autocorrelated (AR(1) with 0.8, standard deviation
1 % of a step), and processes differ among themselves, by 1 % or not at all. Every tool gets them in its own form and
runs with its defaults. A false verdict is a change reported where there is none, or where only the last step of one
process was slow. pytest-benchmark reports changes in one direction only, and so can be wrong half as often.

Further pairs of 3 or 5 processes a side have a schedule that all processes share, so that the last fifth of the steps
takes 2.6 times as long as the first or an epoch's lengths come in another order, and processes that differ by 0.16 %.
Welch's test on the means of the processes, which knows the unit of evidence, is the reference. In other pairs, half of
the processes run at a lower clock, which makes them 3 % slower.

For gpubench alone it also measures how often the interval of one process against another does not contain the true
ratio, how often one slow step, the first or the last, causes a false verdict, and how often any of thirteen metrics of
equal runs is called a change. The seed is fixed. Bars: at most 5 % of gpubench's verdicts are false; at most 7 % of the
intervals do not contain the true ratio at an autocorrelation of 0.8, and 9 % at 0.9; under a schedule it finds a change
of 2 % as often as Welch's test does, with 5 points of tolerance. Of the pairs with two clocks, those of 2 and of 3
processes a side have no bar: all processes of a side are often in one state.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import bars
import environments
import msgspec
import numpy as np
from environments import Environment
from processes import reason
from scipy import stats
from tables import table

from gpubench.compare import compare, inputs
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.log_columns import LogColumn
from gpubench.compare.result import Verdict
from gpubench.compare.verdicts import DEFAULT_MARGIN, Circumstances, judge_all
from gpubench.metrics import Metric
from gpubench.runs.directory import COMPLETED
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import NO_MEASUREMENTS

HERE = Path(__file__).resolve().parent
SEED = 20_200_303
STEP_SECONDS = 0.01
AUTOCORRELATION = 0.8
STEP_NOISE = 0.01
PROCESS_NOISE = 0.01
CHANGE = 0.03
NOMINAL = 0.05  # the rate of false verdicts that a 95 % interval allows
SPIKE = 10
SINGLE_STEPS = 198
SINGLES = 5  # factor of the number of trials for gpubench alone
MANY = 13
GROWTH = 2.6
LENGTHS = 0.3
SCHEDULE_NOISE = 0.0016
SCHEDULE_CHANGE = 0.02
STATES = 0.03
CLOCKS_UNSEEN = ((3, 3), (2, 2))  # sides whose processes are often all in one state, a limit that the docs state


@dataclass(frozen=True, kw_only=True)
class Unread(RunEvidence):
    """A run whose steps are not in a file."""

    def series(self, metric: str) -> None:
        return None


Processes = list[list[float]]
"""The time of each step of each process, in seconds."""
Pair = tuple[Processes, Processes]


@dataclass(frozen=True)
class Scenario:
    name: str
    process_noise: float
    change: float
    spike: bool = False
    """Whether the last step of one process of the candidate takes SPIKE times as long."""
    sides: tuple[int, int] | None = None
    """The number of processes on each side; None for that of the command line."""
    growth: float = 1.0
    """How many times as long the last fifth of the steps takes as the first."""
    lengths: float = 0.0
    """Spread of the lengths of the steps, which come in another order in each process."""
    states: float = 0.0
    """By how much half of the processes are slower."""

    def pairs(self, trials: int, processes: int, steps: int) -> list[Pair]:
        rng = np.random.default_rng(SEED)
        ours, theirs = self.sides or (processes, processes)

        def side(number: int, change: float) -> Processes:
            made = simulate(rng, number, steps, self.process_noise, change)
            return [self.scheduled(rng, one) for one in made] if self.is_scheduled else made

        found = [(side(ours, 0.0), side(theirs, self.change)) for _ in range(trials)]
        for _, candidate in found if self.spike else ():
            candidate[0][-1] *= SPIKE
        return found

    @property
    def is_scheduled(self) -> bool:
        return self.growth != 1 or self.lengths > 0 or self.states > 0

    def scheduled(self, rng: np.random.Generator, times: list[float]) -> list[float]:
        """Return the times of a process under the schedule, in a random state."""
        steps = len(times)
        growth = np.linspace(1, self.growth, 5)[np.arange(steps) * 5 // steps]
        lengths = rng.permutation(1 + self.lengths * np.sqrt(3) * np.linspace(-1, 1, steps))
        state = 1 + self.states * rng.integers(2)
        return [float(value) for value in np.asarray(times) * growth * lengths * state]


@dataclass
class Tool:
    name: str
    package: str | None
    script: str = ""
    arguments: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    rates: list[float] = field(default_factory=list)
    """Fractions of the pairs called a change, or in scenarios with a change called slower."""
    trouble: str | None = None
    own: Callable[[Pair], str] | None = None
    """Judges a pair in this process; None for a package of its own."""

    def judge(self, pairs: Sequence[Pair]) -> list[str]:
        """Return the verdict on each pair. Raises subprocess.SubprocessError or ValueError if the tool fails."""
        if self.own:
            return [self.own(pair) for pair in pairs]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pairs.json"
            file.write_text(json.dumps(pairs))
            command = [str(self.python), str(HERE / "peers" / self.script), str(file), *self.arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        words: list[str] = json.loads(done.stdout)
        return words

    def install(self, place: Path) -> None:
        if self.package is None:
            return
        try:
            self.python = Environment((self.package,), torch=False).create(place / self.package)
        except (subprocess.SubprocessError, OSError) as error:
            self.trouble = f"does not install: {reason(error)}"


def tools() -> list[Tool]:
    return [
        Tool("gpubench compare, one log per process", None, own=gpubench),
        Tool("Welch's t-test, means of processes", None, own=welch),
        Tool("pyperf compare_to, one run per process", "pyperf", "verdict_pyperf.py"),
        Tool("benchstats, all steps", "benchstats", "verdict_benchstats.py"),
        Tool("benchstats, means of processes", "benchstats", "verdict_benchstats.py", ("means",)),
        Tool("pytest-benchmark, fail on mean:1%", "pytest-benchmark", "verdict_pytest_benchmark.py", ("mean:1%",)),
        Tool("pytest-benchmark, fail on median:5%", "pytest-benchmark", "verdict_pytest_benchmark.py", ("median:5%",)),
    ]


def scenarios() -> list[Scenario]:
    usual = [
        Scenario(f"{what}, {where}", noise, change)
        for noise, where in ((PROCESS_NOISE, "processes differ by 1 %"), (0.0, "processes equal"))
        for change, what in ((0.0, "false verdicts"), (CHANGE, "+3 % found"))
    ]
    return [*usual, Scenario("false verdicts, one slow last step", 0.0, 0.0, spike=True)]


def schedules() -> list[Scenario]:
    """Return the pairs under a schedule, each without a change and with one."""
    return [
        Scenario(f"{what}, {where}, {number} a side", SCHEDULE_NOISE, change, False, (number, number), growth, lengths)
        for where, growth, lengths in (("growing steps", GROWTH, 0.0), ("shuffled lengths", 1.0, LENGTHS))
        for number in (3, 5)
        for change, what in ((0.0, "false"), (SCHEDULE_CHANGE, "+2 % found"))
    ]


def clocks() -> list[Scenario]:
    """Return the equal pairs of processes in two states."""
    return [
        Scenario(f"false, two clocks, {ours} against {theirs}", 0.001, 0.0, sides=(ours, theirs), states=STATES)
        for ours, theirs in ((5, 5), (7, 1), (3, 1), (1, 1), (3, 3), (2, 2))
    ]


def simulate(
    rng: np.random.Generator,
    processes: int,
    steps: int,
    process_noise: float,
    change: float,
    correlation: float = AUTOCORRELATION,
) -> Processes:
    """Relative noise of each process and, autocorrelated, of each of its steps."""
    found = []
    for _ in range(processes):
        shocks = rng.normal(0, STEP_NOISE * np.sqrt(1 - correlation**2), steps)
        noise = np.empty(steps)
        noise[0] = rng.normal(0, STEP_NOISE)
        for step in range(1, steps):
            noise[step] = correlation * noise[step - 1] + shocks[step]
        level = STEP_SECONDS * (1 + change) * (1 + rng.normal(0, process_noise))
        found.append([float(value) for value in level * (1 + noise)])
    return found


def gpubench(pair: Pair) -> str:
    return verdict(pair).verdict


def welch(pair: Pair) -> str:
    """Return the verdict of Welch's test on the means of the processes, with gpubench's margin."""
    ours, theirs = (np.array([np.mean(process) for process in side]) for side in pair)
    if min(len(ours), len(theirs)) < 2:
        return "inconclusive"
    interval = stats.ttest_ind(theirs / theirs.mean(), ours / ours.mean(), equal_var=False).confidence_interval()
    half, estimate = (interval.high - interval.low) / 2, float(np.log(theirs.mean() / ours.mean()))
    if abs(estimate) - half <= np.log1p(DEFAULT_MARGIN):
        return "inconclusive"
    return "slower" if estimate > 0 else "faster"


def verdict(pair: Pair) -> Verdict:
    """Return the verdict of `gpubench compare` on two folders of logs."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / "before", Path(folder) / "after"]
        for name, processes in zip(names, pair, strict=True):
            name.mkdir()
            for number, steps in enumerate(processes):
                (name / f"{number}.csv").write_text("step\n" + "\n".join(map(repr, steps)))
        found, _ = inputs.find([str(name) for name in names], Path(folder), column=LogColumn.of("step", "s"))
        (comparison,) = compare.compare(found).comparisons
    return comparison.verdicts[0]


def singles(trials: int, correlation: float = AUTOCORRELATION, slow: int | None = None) -> list[Verdict]:
    """Return verdicts on pairs of equal single processes, with one slow step in the second if its place is given."""
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(trials):
        pair = tuple(simulate(rng, 1, SINGLE_STEPS, 0.0, 0.0, correlation) for _ in range(2))
        if slow is not None:
            pair[1][0][slow] *= SPIKE
        found.append(verdict((pair[0], pair[1])))
    return found


def missed(verdicts: Sequence[Verdict]) -> float:
    """Return the fraction of intervals that do not contain 1, the true ratio."""
    return float(np.mean([not low <= 1 <= high for low, high in (one.interval or (1, 1) for one in verdicts)]))


def changed(verdicts: Sequence[Verdict]) -> float:
    """Return the fraction of verdicts that report a change."""
    return float(np.mean([one.verdict in ("slower", "faster") for one in verdicts]))


def family(rng: np.random.Generator, metrics: int, repeats: int) -> Side:
    """Return a simulated run with this many metrics, each with its own noise."""
    found = {}
    for name in ("step_time", *(f"phase_{number}" for number in range(1, metrics))):
        values = [float(value) for value in STEP_SECONDS * (1 + rng.normal(0, PROCESS_NOISE, repeats))]
        found[name] = Metric(name, "s", "lower", float(np.mean(values)), None, 1, None, values, None)
    windows = [SteadyWindow(number, 0, 1, True, 0.0, 1.0) for number in range(repeats)]
    run = Unread(
        label="made",
        path=Path("made"),
        record=None,
        status=COMPLETED,
        settings={},
        environment={},
        workload={},
        summary=msgspec.structs.replace(NO_MEASUREMENTS, metrics=list(found.values()), steady=windows),
    )
    return Side("made", (run,))


def wrong_somewhere(trials: int, metrics: int, repeats: int = 5) -> float:
    """Return the fraction of pairs of equal runs in which any metric is called a change."""
    rng = np.random.default_rng(SEED)
    wrong = 0
    for _ in range(trials):
        sides = [family(rng, metrics, repeats) for _ in range(2)]
        known = list(sides[0].runs[0].metrics.values())
        judged = judge_all(known, sides[0], sides[1], Circumstances())
        wrong += any(one.verdict.verdict in ("slower", "faster") for one in judged)
    return wrong / trials


def alone(trials: int) -> list[bars.Bar]:
    """Return the bars that apply to gpubench alone."""
    found = [
        bars.at_most(
            f"intervals of single processes without the true ratio, autocorrelation {rho}", share, most, "{:.1%}"
        )
        for rho, most in ((0.8, 0.07), (0.9, 0.09))
        for share in [missed(singles(trials, rho))]
    ]
    found += [
        bars.at_most(
            f"false verdicts from one slow step, the {name}", changed(singles(trials, slow=place)), NOMINAL, "{:.1%}"
        )
        for name, place in (("first", 0), ("last", -1))
    ]
    wrong = wrong_somewhere(trials, MANY)
    return [*found, bars.at_most(f"pairs with a false verdict among {MANY} metrics", wrong, NOMINAL, "{:.1%}")]


def rate(words: Sequence[str], scenario: Scenario) -> float:
    wanted = ("slower",) if scenario.change else ("slower", "faster")
    return sum(word in wanted for word in words) / len(words)


def row(tool: Tool, first: int, number: int) -> list[str]:
    """Return the row of a tool in the table of `number` scenarios from the first on."""
    if tool.trouble:
        return [tool.name, *["-"] * (number - 1), tool.trouble]
    return [tool.name, *(f"{value:.1%}" for value in tool.rates[first : first + number])]


def tables(entered: Sequence[Tool]) -> Iterator[str]:
    """Yield a table of each group of scenarios."""
    first = 0
    for group in (scenarios(), schedules(), clocks()):
        rows = [row(tool, first, len(group)) for tool in entered]
        yield table([["tool", *(scenario.name for scenario in group)], *rows])
        first += len(group)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="number of pairs in each column; default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=5, help="number of processes on each side; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=60, help="number of steps of each process; default: %(default)s")
    known = list(dict.fromkeys(tool.package for tool in tools() if tool.package))
    environments.add_options(parser, known, "all")
    options = parser.parse_args()
    entered = [tool for tool in tools() if tool.package is None or tool.package in options.peers]
    for tool in entered:
        tool.install(options.environments)
    everything = [*scenarios(), *schedules(), *clocks()]
    for scenario in everything:
        pairs = scenario.pairs(options.trials, options.processes, options.steps)
        for tool in entered:
            if tool.trouble:
                continue
            print(f"{scenario.name}: {tool.name}", file=sys.stderr)
            try:
                tool.rates.append(rate(tool.judge(pairs), scenario))
            except (subprocess.SubprocessError, ValueError, LookupError) as error:
                tool.trouble = f"does not run: {reason(error)}"
    counts = f"{options.trials} pairs per column, {options.processes} processes per side"
    print(f"{counts}, {options.steps} steps per process\n")
    print("\n\n".join(tables(entered)))
    print(f"\n{', '.join(environments.versions(options.environments / name, (name,)) for name in options.peers)}")
    rates = list(zip(everything, entered[0].rates, entered[1].rates, strict=True))
    return bars.conclude(
        [
            bars.at_most(scenario.name, rate, NOMINAL, "{:.1%}")
            for scenario, rate, _ in rates
            if not scenario.change and not (scenario.states and scenario.sides in CLOCKS_UNSEEN)
        ]
        + [
            bars.at_most(f"less than Welch's test: {scenario.name}", max(0.0, reference - rate), 0.05, "{:.1%}")
            for scenario, rate, reference in rates
            if scenario.change and scenario.sides
        ]
        + alone(SINGLES * options.trials)
    )


if __name__ == "__main__":
    sys.exit(main())
