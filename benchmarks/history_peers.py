"""How well are change points of a series of runs found? gpubench history, Apache Otava and ruptures.

    .venv/bin/python benchmarks/history_peers.py [--series 200] [--peers all]

All of them get the same made-up series (tests/support/drifting.py): 20 to 60 runs with a step of 3 %, at least eight
runs from either end; 10 to 60 runs without one; and the same on a machine that drifts. A third of the series has noise
that is correlated, a third has days that differ, and 2 % of all runs are outliers. A step is found if a change point is
at most two runs away. The other libraries see the values only. gpubench also has the days, the errors from the repeats,
and unless it says otherwise the reference workload, which follows the drift with half the noise of a run.

Further series have no step, but two to four runs that are 3 % off, cycles of 15 runs and 1 % up and down, or runs with
a correlation of 0.8. Their change points are all false. And two machines of one model, which differ by 3 %, take turns
while both get slower by 3 %: history judges each of them.

"at best" knows how the noise is correlated and how large it is, has neither drift nor outliers to deal with, and its
threshold is the one that keeps false change points at 5 %. No method finds more. The seed is fixed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bars
import environments
import numpy as np
from environments import Environment
from processes import reason
from tables import table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from drifting import (  # noqa: E402
    AFTER,
    CLOSE,
    DISTURBANCES,
    SEED,
    Disturbance,
    Made,
    Rates,
    false_when_disturbed,
    made,
    rates,
)

from gpubench.compare.changepoints import find  # noqa: E402

REQUIREMENTS = ("apache-otava==0.8.0", "ruptures==1.1.10")
PEERS = {
    "Otava 0.8": "otava",
    "Otava 0.8, p below 0.00001": "otava-strict",
    "ruptures, PELT": "pelt",
    "ruptures, PELT, kernel": "pelt-rbf",
}
NOISE = (0.005, 0.007, 0.01, 0.015, 0.02, 0.03)
BAR = 0.007  # the largest noise with which the bars hold
PEERS_AT = (0.005, 0.01)
DISTURBED_AT = (0.003, 0.007, 0.015)
ENDS = (2, 3, 5, 8, 12)  # runs after a step


def of_code(one: Made, *, reference: bool = True) -> list[int]:
    known = one.reference if reference else None
    points = find(one.values, days=one.days, errors=one.errors, reference=known)
    return [point.index for point in points if point.cause == "code"]


def of_peer(python: Path, method: str, count: int, noise: float) -> Rates:
    """Return the rates of another library. Raises subprocess.SubprocessError or ValueError if it fails."""
    series: list[Made] = []

    def keep(one: Made) -> Sequence[int]:
        series.append(one)
        return ()

    rates(keep, count, noise)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "series.json"
        file.write_text(json.dumps([one.values.tolist() for one in series]))
        command = [str(python), str(HERE / "peers" / "changes_found.py"), str(file), method]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = iter(json.loads(done.stdout))
    return rates(lambda _: next(answers), count, noise)


def at_best(count: int, noise: float) -> float:
    """Return the share of steps that a test finds which knows everything but the place and the size."""
    threshold = float(np.quantile([_scan(number, noise, 0.0)[0] for number in range(count)], 0.95))
    stepped = [_scan(count + number, noise, 0.03) for number in range(count)]
    return float(np.mean([largest > threshold and abs(off) <= CLOSE for largest, off in stepped]))


def _scan(number: int, noise: float, step: float) -> tuple[float, int]:
    """Return the largest likelihood ratio of a series, and how far it is from the step."""
    rng = np.random.default_rng([SEED, 9, number])
    n, kind = int(rng.integers(20, 61)), rng.integers(3)
    days = np.repeat(np.arange(n), rng.integers(1, 6, n))[:n]
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    alike = (0.5**apart, days[:, None] == days, np.eye(n))[kind]
    covariance = noise**2 * (np.eye(n) + alike) / 2
    at = int(rng.integers(AFTER, n - AFTER + 1))
    values = rng.multivariate_normal(np.where(np.arange(n) >= at, step, 0.0), covariance)
    inverse = np.linalg.inv(covariance)
    level = inverse.sum(axis=1)
    gram = inverse - np.outer(level, level) / level.sum()
    places = np.arange(3, n - 2)
    scores = np.cumsum((gram @ values)[::-1])[::-1][places]
    sizes = np.cumsum(np.cumsum(gram[::-1, ::-1], axis=0), axis=1)[::-1, ::-1][places, places]
    ratios = scores**2 / sizes
    return float(ratios.max()), int(places[ratios.argmax()]) - at


def row(noise: float, name: str, found: Rates) -> list[str]:
    shares = (found.found, found.elsewhere, found.false, found.false_in_drift)
    return [f"{noise:.1%}", name, *(f"{share:.1%}" for share in shares)]


def of_machine(count: int, noise: float) -> tuple[float, float]:
    """Return the shares of steps of the machine that are called the machine's, and the code's."""
    causes = []
    for number in range(count):
        one = made(np.random.default_rng([SEED, 4, number]), noise=(noise, noise), of_machine=True)
        points = find(one.values, days=one.days, errors=one.errors, reference=one.reference)
        causes.append({point.cause for point in points})
    return float(np.mean(["machine" in each for each in causes])), float(np.mean(["code" in each for each in causes]))


def near_the_end(count: int, noise: float, after: int) -> float:
    """Return the share of steps that are found after so many runs."""
    found = 0
    for number in range(count):
        rng = np.random.default_rng([SEED, 5, number])
        one = made(rng, noise=(noise, noise), runs=(40, 60), after=after)
        found += any(abs(index - (one.step or 0)) <= CLOSE for index in of_code(one))
    return found / count


def taking_turns(count: int, noise: float) -> float:
    """Return the share of steps that are found on each of two machines whose runs alternate."""
    found = 0
    for number in range(count):
        rng = np.random.default_rng([SEED, 6, number])
        n, size = int(rng.integers(40, 61)), 0.03 * rng.choice([-1, 1])
        at = int(rng.integers(2 * AFTER, n - 2 * AFTER + 1))
        values = noise * rng.standard_normal(n) + np.where(np.arange(n) >= at, size, 0.0)
        places = [(at + 1 - host) // 2 for host in (0, 1)]
        each = [[point.index for point in find(values[host::2])] for host in (0, 1)]
        found += all(
            any(abs(one - place) <= CLOSE for one in points) for place, points in zip(places, each, strict=True)
        )
    return found / count


def disturbance_bar(kind: Disturbance, noise: float, false: float) -> Sequence[bars.Bar]:
    """Return the bar of false change points; none for correlated runs, a limit that docs/decisions.md states."""
    what = f"noise {noise:.1%}, {kind}: false change points"
    return [] if kind == "correlated" else [bars.at_most(what, false, 0.05, "{:.1%}")]


def judged(noise: float, found: Rates) -> Sequence[bars.Bar]:
    what = f"noise {noise:.1%}"
    if noise > BAR:
        return [bars.at_most(f"{what}: false change points", max(found.false, found.false_in_drift), 0.05, "{:.1%}")]
    return [
        bars.at_most(f"{what}: steps of 3 % missed", round(1 - found.found, 6), 0.05, "{:.1%}"),
        bars.at_most(f"{what}: false change points", found.false, 0.05, "{:.1%}"),
        bars.at_most(f"{what}: false change points in drift", found.false_in_drift, 0.05, "{:.1%}"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--series", type=int, default=200, help="number of series of each kind; default: %(default)s")
    environments.add_options(parser, ["changes"], "all")
    options = parser.parse_args()
    python: Path | str = "not asked for"
    if options.peers:
        try:
            python = Environment(REQUIREMENTS, torch=False).create(options.environments / "changes")
        except (subprocess.SubprocessError, OSError) as error:
            python = f"does not install: {reason(error)}"
    rows: list[list[str]] = []
    judgements: list[bars.Bar] = []
    for noise in NOISE:
        print(f"noise {noise:.1%}", file=sys.stderr)
        found = rates(of_code, options.series, noise)
        judgements += judged(noise, found)
        rows.append(row(noise, "gpubench history", found))
        alone = rates(lambda one: of_code(one, reference=False), options.series, noise)
        rows.append(row(noise, "without the reference workload", alone))
        judgements += judged(noise, alone)
        rows.append([f"{noise:.1%}", "at best", f"{at_best(600, noise):.1%}", "-", "5.0%", "-"])
        for name, method in PEERS.items() if noise in PEERS_AT else ():
            try:
                if isinstance(python, str):
                    raise ValueError(python)
                rows.append(row(noise, name, of_peer(python, method, options.series, noise)))
            except (subprocess.SubprocessError, ValueError) as error:
                rows.append([f"{noise:.1%}", name, reason(error), "-", "-", "-"])
    print(f"{options.series} series of each kind; shares of series\n")
    head = ["noise", "method", "step found within 2 runs", "point elsewhere", "false point", "false point in drift"]
    print(table([head, *rows]))
    ends = [
        [f"{noise:.1%}", *(f"{near_the_end(options.series // 2, noise, after):.0%}" for after in ENDS)]
        for noise in NOISE[:4]
    ]
    print("\nsteps of 3 % found, by the number of runs after them\n")
    print(table([["noise", *(f"{after} runs" for after in ENDS)], *ends]))
    disturbed: list[list[str]] = []
    for noise in DISTURBED_AT:
        false = {kind: false_when_disturbed(of_code, kind, options.series // 2, noise) for kind in DISTURBANCES}
        judgements += [bar for kind, share in false.items() for bar in disturbance_bar(kind, noise, share)]
        turns = taking_turns(options.series // 2, noise)
        disturbed.append([f"{noise:.1%}", *(f"{share:.0%}" for share in false.values()), f"{turns:.0%}"])
    print(
        "\nseries with a false change point, by their disturbance; steps found on both of two machines that alternate\n"
    )
    print(table([["noise", *DISTURBANCES, "alternating machines"], *disturbed]))
    shared = [of_machine(options.series, noise) for noise in NOISE[:3]]
    print("\nsteps of the machine, which the reference workload shows too\n")
    causes = [
        [f"{noise:.1%}", f"{machine:.1%}", f"{code:.1%}"] for noise, (machine, code) in zip(NOISE, shared, strict=False)
    ]
    print(table([["noise", "called the machine's", "called the code's"], *causes]))
    print(f"\n{environments.versions(options.environments / 'changes', REQUIREMENTS if options.peers else ())}")
    return bars.conclude(judgements)


if __name__ == "__main__":
    sys.exit(main())
