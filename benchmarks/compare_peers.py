"""How often are comparison tools wrong? gpubench and its peers judge equal pairs, and pairs 3 % apart.

    .venv/bin/python benchmarks/compare_peers.py [--trials 200] [--processes 5] [--steps 60]

The times are simulated like those of training: a process's steps are autocorrelated (AR(1) with 0.8, standard deviation
1 % of a step), and processes differ among themselves, by 1 % or not at all. Every tool gets them in its own form and
runs with its defaults. A false verdict is a change reported where there is none, or where only the last step of one
process was slow. pytest-benchmark reports changes in one direction only, and so can be wrong half as often.

For gpubench alone it also measures how often the interval of one process against another does not contain the true
ratio, how often one slow step, the first or the last, causes a false verdict, and how often any of thirteen metrics of
equal runs is called a change. The seed is fixed. Bars: at most 5 % of gpubench's verdicts are false; at most 7 % of the
intervals do not contain the true ratio at an autocorrelation of 0.8, and 9 % at 0.9.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import bars
import environments
import msgspec
import numpy as np
from environments import Environment
from processes import reason
from tables import table

from gpubench.compare import compare, inputs
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.inputs import Column
from gpubench.compare.result import Verdict
from gpubench.compare.verdicts import Circumstances, judge_all
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

    def pairs(self, trials: int, processes: int, steps: int) -> list[Pair]:
        rng = np.random.default_rng(SEED)

        def side(change: float) -> Processes:
            return simulate(rng, processes, steps, self.process_noise, change)

        found = [(side(0.0), side(self.change)) for _ in range(trials)]
        for _, candidate in found if self.spike else ():
            candidate[0][-1] *= SPIKE
        return found


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

    def judge(self, pairs: Sequence[Pair]) -> list[str]:
        """Return the verdict on each pair. Raises subprocess.SubprocessError or ValueError if the tool fails."""
        if self.package is None:
            return [gpubench(pair) for pair in pairs]
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
        Tool("gpubench compare, one log per process", None),
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


def verdict(pair: Pair) -> Verdict:
    """Return the verdict of `gpubench compare` on two folders of logs."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / "before", Path(folder) / "after"]
        for name, processes in zip(names, pair, strict=True):
            name.mkdir()
            for number, steps in enumerate(processes):
                (name / f"{number}.csv").write_text("step\n" + "\n".join(map(repr, steps)))
        found, _ = inputs.find([str(name) for name in names], Path(folder), column=Column.of("step", "s"))
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


def row(tool: Tool) -> list[str]:
    if tool.trouble:
        return [tool.name, *["-"] * (len(scenarios()) - 1), tool.trouble]
    return [tool.name, *(f"{value:.1%}" for value in tool.rates)]


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
    for scenario in scenarios():
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
    print(table([["tool", *(scenario.name for scenario in scenarios())], *(row(tool) for tool in entered)]))
    print(f"\n{', '.join(environments.versions(options.environments / name, (name,)) for name in options.peers)}")
    return bars.conclude(
        [
            bars.at_most(scenario.name, rate, NOMINAL, "{:.1%}")
            for scenario, rate in zip(scenarios(), entered[0].rates, strict=True)
            if not scenario.change
        ]
        + alone(SINGLES * options.trials)
    )


if __name__ == "__main__":
    sys.exit(main())
