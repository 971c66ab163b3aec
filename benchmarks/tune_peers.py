"""How well do searches for the fastest settings work? gpubench's search, Optuna, and one setting at a time.

    .venv/bin/python benchmarks/tune_peers.py [--trials 300] [--peers all]

All searches get the same made-up programs, whose speed under each of the 256 combinations of eight settings is known
(tests/support/planted.py). Half of the settings help, a quarter does nothing and a quarter hurts, by up to 20 %, and
two pairs interact; or the effects are the same in each program, and two settings help only together while two others
cancel; or nothing has an effect. Equal runs differ by 2 or 5 %.

The regret is how much faster the best combination is than the one that was found. Optuna runs its samplers with their
defaults, for as many runs as gpubench made on the same program, and at 2 % also for four times as many; its first trial
is the baseline. One setting at a time is each setting alone in five runs beside five of the baseline, and what is
faster is kept. Neither tests the gain: they claim one if what they call the best is not the baseline.

For gpubench alone it also measures how many intervals of gains and contributions contain the truth, by how much the
gain of the headline is too large on average, and more kinds of programs. The seed is fixed.
"""

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"  # before numpy is loaded: there is a process for each core

import bars  # noqa: E402
import environments  # noqa: E402
import numpy as np  # noqa: E402
from environments import Environment  # noqa: E402
from processes import reason  # noqa: E402
from tables import table  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from planted import Ending, Planted, drawn, fixed, large, levelled, nothing, solve, sparse, threefold, uneven  # noqa: E402

SEED = 20_261_123
CLOSE = 0.01  # regret, in log throughput, up to which a search has found the best
ALONE_RUNS = 5
BIAS = 0.003  # by which the gain of the headline may be too large or too small on average, at 2 % noise
MORE = 4  # factor of the number of runs in Optuna's second row, where the noise is small
Combination = tuple[int, ...]


@dataclass(frozen=True)
class Programs:
    """A kind of made-up program."""

    name: str
    make: Callable[[np.random.Generator], Planted]
    missed: float | None = None
    """The largest share of gpubench's searches that may end farther than CLOSE from the best; None without a bar."""
    effects: bool = True
    more: bool = False
    """Whether Optuna may also have more runs."""
    times: int = 1
    """How many times as many programs are drawn as of other kinds, where a bar is close to what these can tell."""

    def draw(self, number: int) -> Planted:
        return self.make(np.random.default_rng([SEED, number]))


@dataclass(frozen=True)
class Found:
    """What a search of another kind called the best, and in how many runs."""

    regret: float
    runs: int
    claims: bool
    """Whether it is not the baseline."""


SHARED = (
    Programs("random effects, noise 2 %", lambda rng: drawn(rng, 0.02), 0.03, more=True),
    Programs("fixed effects, noise 2 %", lambda rng: fixed(rng, 0.02), 0.03, more=True),
    Programs("random effects, noise 5 %", lambda rng: drawn(rng, 0.05), 0.10),
    Programs("fixed effects, noise 5 %", lambda rng: fixed(rng, 0.05), 0.10),
    Programs("no effects, noise 2 %", lambda rng: nothing(rng, 0.02), effects=False),
    Programs("no effects, noise 5 %", lambda rng: nothing(rng, 0.05), effects=False),
)
OWN = (
    Programs("one setting three times as noisy, noise 2 %", lambda rng: uneven(rng, 0.02), 0.10, times=3),
    Programs("three settings interact, noise 2 %", lambda rng: threefold(rng, 0.02), 0.10, times=3),
    Programs("two settings help by 1.5 to 3 times, noise 8 %", lambda rng: large(rng, 0.08)),
    Programs("random effects, noise 0.5 %", lambda rng: drawn(rng, 0.005)),
    Programs("random effects, noise 2 %, drift 4 %", lambda rng: drawn(rng, 0.02, drift=0.04)),
    Programs("no effects, noise 2 %, drift 4 %", lambda rng: nothing(rng, 0.02, drift=0.04), effects=False),
    Programs("random effects, noise 2 %, two pairs do not run", lambda rng: drawn(rng, 0.02, failing=2)),
    Programs("3 of 13 settings matter, noise 2 %", lambda rng: sparse(rng, 0.02, 13)),
    Programs("3 settings, noise 2 %", lambda rng: drawn(rng, 0.02, 3)),
    Programs("8 settings, 3 of them with 3 or 4 levels, noise 2 %", lambda rng: levelled(rng, 0.02)),
)
OPTUNA = {
    "Optuna, TPE, as many runs": ("tpe", 1),
    f"Optuna, TPE, {MORE} times the runs": ("tpe", MORE),
    "Optuna, random, as many runs": ("random", 1),
}


def solved(place: int, number: int) -> Ending:
    """Return what gpubench's search makes of a program of one of the kinds."""
    return solve((*SHARED, *OWN)[place].draw(number))


def one_at_a_time(planted: Planted) -> Found:
    """Keep each setting whose mean rate is above that of the baseline."""

    def mean(combination: Combination) -> float:
        return float(np.mean([planted.run(combination).rate for _ in range(ALONE_RUNS)]))

    settings = len(planted.effects)
    baseline = mean((0,) * settings)
    best = tuple(
        int(mean(tuple(int(place == other) for other in range(settings))) > baseline) for place in range(settings)
    )
    return Found(planted.optimum() - planted.truth(best), len(planted.made), any(best))


def optuna(python: Path, kind: Programs, own: Sequence[Ending], sampler: str, factor: int) -> list[Found]:
    """Return what Optuna found in the programs. Raises subprocess.SubprocessError or ValueError if it fails."""
    programs = [kind.draw(number) for number in range(len(own))]
    made = [
        {
            "rates": [(one, program.truth(one)) for one in product((0, 1), repeat=len(program.effects))],
            "sigma": program.sigma,
            "runs": ending.runs,
        }
        for program, ending in zip(programs, own, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "programs.json"
        file.write_text(json.dumps(made))
        command = [str(python), str(HERE / "peers" / "tune_optuna.py"), str(file), sampler, str(factor)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        Found(program.optimum() - program.truth(tuple(one["best"])), one["runs"], any(one["best"]))
        for program, one in zip(programs, json.loads(done.stdout), strict=True)
    ]


def searched(endings: Sequence[Ending]) -> list[Found]:
    return [Found(one.regret, one.runs, one.conclusion.proved) for one in endings]


def far(found: Sequence[Found]) -> float:
    """Return the share of searches that ended farther than CLOSE from the best."""
    return float(np.mean([one.regret >= CLOSE for one in found]))


def uncovered(endings: Sequence[Ending], kind: str) -> float:
    """Return the share of the intervals of a kind that do not contain the truth; 0 if there are none."""
    every = [missed for one in endings for missed in one.missed[kind]]
    return float(np.mean(every)) if every else 0.0


def row(kind: Programs, name: str, found: Sequence[Found]) -> list[str]:
    runs = [one.runs for one in found]
    regret = f"{float(np.mean([one.regret for one in found])):.2%}" if kind.effects else "-"
    close = f"{1 - far(found):.1%}" if kind.effects else "-"
    claims = f"{float(np.mean([one.claims for one in found])):.1%}"
    return [kind.name, name, f"{np.mean(runs):.0f} (most {max(runs)})", close, regret, claims]


def own_row(kind: Programs, endings: Sequence[Ending]) -> list[str]:
    intervals = [f"{1 - uncovered(endings, kind):.1%}" for kind in ("gain", "with others", "alone")]
    usual = float(np.mean([one.runs <= 55 for one in endings]))
    pairs = float(np.mean([one.false_pairs > 0 for one in endings]))
    return [
        kind.name,
        str(len(endings)),
        *row(kind, "", searched(endings))[2:],
        f"{usual:.0%}",
        *intervals,
        f"{pairs:.1%}",
    ]


def judged(kind: Programs, endings: Sequence[Ending]) -> list[bars.Bar]:
    more = sum(one.runs > one.announced for one in endings)
    found = [bars.every(f"within the runs announced: {kind.name}", len(endings) - more, len(endings))]
    if kind.missed is not None:
        what = f"not within 1 % of the best: {kind.name}"
        found.append(bars.at_most(what, far(searched(endings)), kind.missed, "{:.1%}"))
        what = f"contributions whose interval misses the truth: {kind.name}"
        found.append(bars.at_most(what, uncovered(endings, "with others"), 0.07, "{:.1%}"))
    if kind.missed is not None and kind not in SHARED:
        what = f"gains alone whose interval misses the truth: {kind.name}"
        found.append(bars.at_most(what, uncovered(endings, "alone"), 0.07, "{:.1%}"))
    excess = [one.excess for one in endings if one.excess is not None]
    if kind.more and len(excess) > 1:
        mean, error = float(np.mean(excess)), float(np.std(excess, ddof=1)) / math.sqrt(len(excess))
        interval = math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)
        found.append(bars.near_one(f"headline gain / true gain: {kind.name}", math.exp(mean), interval, BIAS))
    if not kind.effects:
        claims = float(np.mean([one.conclusion.proved for one in endings]))
        found.append(bars.at_most(f"gains claimed: {kind.name}", claims, 0.02, "{:.1%}"))
    return found


def peers_rows(kind: Programs, own: Sequence[Ending], python: Path | str | None) -> list[list[str]]:
    """Return the rows of the other searches; `python` is Optuna's interpreter, or why there is none."""
    rows = [row(kind, "one at a time", [one_at_a_time(kind.draw(number)) for number in range(len(own))])]
    for name, (sampler, factor) in OPTUNA.items() if python else ():
        if factor > 1 and not kind.more:
            continue
        trouble = python if isinstance(python, str) else ""
        try:
            if isinstance(python, Path):
                rows.append(row(kind, name, optuna(python, kind, own, sampler, factor)))
        except (subprocess.SubprocessError, ValueError) as error:
            trouble = f"does not run: {reason(error)}"
        if trouble:
            rows.append([kind.name, name, trouble, "-", "-", "-"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=300, help="number of programs of each kind; default: %(default)s")
    parser.add_argument("--peer-trials", type=int, default=100, help="of these for the peers; default: %(default)s")
    names = [kind.name for kind in (*SHARED, *OWN)]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="PROGRAMS",
        help="may be repeated; one of: %(choices)s".replace("%(choices)s", "; ".join(names).replace("%", "%%")),
    )
    environments.add_options(parser, ["optuna"], "all")
    options = parser.parse_args()
    python: Path | str | None = None
    if options.peers:
        try:
            python = Environment(("optuna",), torch=False).create(options.environments / "optuna")
        except (subprocess.SubprocessError, OSError) as error:
            python = f"does not install: {reason(error)}"
    rows, own_rows, judgements = [], [], []
    for place, kind in enumerate((*SHARED, *OWN)):
        if options.only and kind.name not in options.only:
            continue
        print(kind.name, file=sys.stderr)
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            numbers = range(kind.times * options.trials)
            endings = pool.starmap(solved, ((place, number) for number in numbers), chunksize=1)
        own_rows.append(own_row(kind, endings))
        judgements += judged(kind, endings)
        if kind in SHARED:
            part = endings[: options.peer_trials]
            rows += [row(kind, "gpubench tune", searched(part)), *peers_rows(kind, part, python)]
    print(f"{min(options.trials, options.peer_trials)} programs of each kind; runs on average\n")
    print(table([["programs", "search", "runs", "within 1 %", "mean regret", "claims a gain"], *rows]))
    print("\ngpubench alone; intervals that contain the truth\n")
    head = ["programs", "drawn", "runs", "within 1 %", "mean regret", "proves a gain", "in 55 runs"]
    print(table([[*head, "of the gain", "of contributions", "of settings alone", "false pairs"], *own_rows]))
    print(f"\n{environments.versions(options.environments / 'optuna', options.peers)}")
    return bars.conclude(judgements)


if __name__ == "__main__":
    sys.exit(main())
