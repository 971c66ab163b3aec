"""How much time and memory does `gpubench compare` take for small runs, long runs and many runs?

    .venv/bin/python benchmarks/compare_scale.py [--rounds 3] [--quick]

The runs are simulated: their steps are drawn at random, and written as `gpubench train-bench` writes them. Every case
is a fresh process, including start-up and imports, with a warm file system cache. Bars for the fastest round, on two
cores that other programs use too:

    two small runs                 0.4 s
    two runs of 1,000,000 steps    3 s and 500 MB resident
    1,000 runs against 10          5 s
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bars
import numpy as np
import yaml
from processes import Spent, observe, reason
from tables import table

from gpubench.events import ModelBuilt, Step
from gpubench.runs.directory import COMPLETED, ENVIRONMENT, STEPS, RunWriter
from gpubench.runs.steps import Repeat
from gpubench.runs.summary import summarise, write_summary

PHASES = {"data_wait": 0.02, "host_to_device": 0.03, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "other": 0.05}
WARMUP = 10
SETTINGS: dict[str, Any] = {
    "experiment": "scale",
    "seed": 0,
    "device": "cpu",
    "precision": "fp32",
    "model": {"name": "gpt2-tiny", "activation_checkpointing": False},
    "data": {"source": "synthetic", "samples": 10_000, "workers": 0, "pin_memory": False, "prefetch": 2},
    "training": {"batch_size": 8, "grad_accumulation": 1, "optimizer": "adamw", "warmup_steps": WARMUP},
    "performance": {"compile": False, "channels_last": False, "cpu_threads": 2},
    "distributed": {"world_size": 1},
}
MACHINE: dict[str, Any] = {
    "host": {"name": "here", "os": "Linux", "kernel": "6.1", "virtual": False},
    "cpu": {"model": "a CPU", "physical_cores": 2, "logical_cores": 2, "usable_cores": 2},
    "memory": {"total_bytes": 16 << 30},
    "python": {"version": "3.11.7"},
    "torch": {"version": "2.13.0", "debug": False},
    "gpus": [],
    "packages": {f"package-{number}": f"{number}.0.0" for number in range(40)},
}


LIBRARIES = ("typer.main", "typer._adapters", "numpy", "msgspec", "yaml", "psutil", "rich.table")


@dataclass(frozen=True)
class Case:
    """A comparison to measure."""

    name: str
    seconds: float
    """The largest allowed time."""
    megabytes: float | None
    """The largest allowed resident memory; None for no limit."""
    baseline: Path
    candidate: Path


@dataclass(frozen=True)
class Plan:
    """A simulated run, whose steps take 10 ms / `speed`, with noise of 2 % per step and 1 % per repeat."""

    results: Path
    experiment: str
    repeats: int
    steps: int
    speed: float
    seed: int


def write_run(plan: Plan) -> Path:
    random = np.random.default_rng(plan.seed)
    settings = yaml.safe_dump(SETTINGS)
    writer = RunWriter(plan.results, plan.experiment, settings, command="train-bench", argv=[], world_size=1, git=None)
    writer.replace(ENVIRONMENT, MACHINE)
    measured = []
    began = time.time()
    for number in range(plan.repeats):
        repeat = Repeat(number, WARMUP, built=built(number))
        totals = random.normal(1, 0.01) * random.normal(1, 0.02, plan.steps).clip(0.5) * 0.01 / plan.speed
        for place, total in enumerate(totals.tolist()):
            phases = {name: round(total * share, 9) for name, share in PHASES.items()}  # clocks have nanoseconds
            total = sum(phases.values())
            step = Step(number, 0, 0, place, began, total, phases, total, 8, 1 / (1 + place))
            began += total
            writer.append(STEPS, step)
            repeat.steps[0].append(step)
        measured.append(repeat)
    write_summary(summarise(measured, None, "fp32"), writer)
    writer.update(repeats=plan.repeats)
    writer.finish(COMPLETED)
    return writer.path


def built(repeat: int) -> ModelBuilt:
    return ModelBuilt(
        rank=0,
        repeat=repeat,
        parameters=10_000,
        trainable_parameters=10_000,
        sample_shape="32",
        tokens_per_sample=32,
        seconds=0.5,
    )


def cases(folder: Path, scale: float) -> list[Case]:
    """Write the runs, with their length and number multiplied by `scale`, and return the comparisons."""
    steps, runs, few = round(1_000_000 * scale), round(1000 * scale), max(2, round(10 * scale))
    plans = [
        *(Plan(folder, "small", repeats=3, steps=60, speed=1 + seed / 50, seed=seed) for seed in range(2)),
        *(Plan(folder, "long", repeats=1, steps=steps, speed=1 + seed / 50, seed=seed) for seed in range(2)),
        *(Plan(folder, "many", repeats=3, steps=60, speed=1.0, seed=seed) for seed in range(runs)),
        *(Plan(folder, "few", repeats=3, steps=60, speed=1.0, seed=seed) for seed in range(few)),
    ]
    print(f"writing {len(plans)} runs, two of them with {steps:,} steps", file=sys.stderr)
    # In separate processes, because a child's peak memory is never below its parent's memory at the start.
    with ProcessPoolExecutor(2, get_context("spawn")) as writers:
        written = list(writers.map(write_run, plans))
    small, long = written[:2], written[2:4]
    return [
        Case("two small runs", 0.4, None, *small),
        Case(f"two runs of {steps:,} steps", 3.0, 500.0, *long),
        Case(f"{runs:,} runs against {few}", 5.0, None, folder / "many", folder / "few"),
    ]


def measure(case: Case, rounds: int) -> list[Spent]:
    """Measure every round. Raises subprocess.CalledProcessError if one fails."""
    command = [sys.executable, "-m", "gpubench", "compare", str(case.baseline), str(case.candidate)]
    observe(command)  # warms the caches
    return [observe(command)[1] for _ in range(rounds)]


def row(case: Case, found: Sequence[Spent]) -> list[str]:
    every = " ".join(f"{one.seconds:.2f}" for one in found)
    return [case.name, f"{best(found):.2f} s", every, f"{most(found):.0f} MB"]


def best(found: Sequence[Spent]) -> float:
    return min(one.seconds for one in found)


def most(found: Sequence[Spent]) -> float:
    return max(one.megabytes for one in found)


def judge(case: Case, found: Sequence[Spent]) -> Iterator[bars.Bar]:
    yield bars.at_most(case.name, best(found), case.seconds, "{:.2f} s")
    if case.megabytes:
        yield bars.at_most(f"{case.name}, memory", most(found), case.megabytes, "{:.0f} MB")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of processes for each case; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smoke test: a hundredth of the size, 1 round")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def imports(rounds: int) -> float:
    """Return the seconds to import the libraries that every comparison needs, a lower limit of its start-up time."""
    command = [sys.executable, "-c", f"import {', '.join(LIBRARIES)}"]
    return best([observe(command)[1] for _ in range(max(rounds, 5))])


def main() -> int:
    options = parse()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="gpubench-scale-") as folder:
        every = cases(Path(folder), 0.01 if options.quick else 1.0)
        try:
            found = [measure(case, rounds) for case in every]
        except subprocess.CalledProcessError as error:
            print(f"error: gpubench compare exited with code {error.returncode}: {reason(error)}", file=sys.stderr)
            return 1
    print(table([("case", "fastest round", "all rounds, s", "peak memory"), *map(row, every, found)]))
    print(f"\nImporting only {', '.join(LIBRARIES)} takes {imports(rounds):.2f} s in the fastest round.")
    return bars.conclude([bar for case, spent in zip(every, found, strict=True) for bar in judge(case, spent)])


if __name__ == "__main__":
    sys.exit(main())
