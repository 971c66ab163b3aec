"""How much time does `gpubench runs` take to list thousands of runs?

    .venv/bin/python benchmarks/listing_scale.py [--runs 10000] [--rounds 3]

The run directories are made up: each has its own run.json, config.yaml and summary.json, as `gpubench train-bench`
writes them. Every listing is a fresh process, including start-up and imports. The first one reads every run, and
writes the cache; the others find the cache, with the files in the file system's own cache. The last ones are after a
run was added, copied in, edited or deleted by hand, and must show it. Bar for the processor time of the warm listing
in the fastest round; a listing has one thread, so that it takes this long on a machine that does nothing else:

    10,000 runs                    1 s
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bars
from processes import Spent, observe
from tables import table

from gpubench.settings.defaults import complete
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration, completed, load
from gpubench.settings.schema import TrainSettings

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
BETWEEN = timedelta(minutes=7)
EXPERIMENTS = ("train-bench", "nightly", "sweep", "profile")
METRICS = (
    ("throughput", "samples/s", "higher", 800.0),
    ("step_time", "s", "lower", 0.02),
    *((f"phase_{name}", "s", "lower", 0.003) for name in ("data_wait", "forward", "backward", "optimizer", "other")),
    ("peak_memory_rss", "B", "lower", 7e8),
    ("first_step_time", "s", "lower", 0.4),
    ("warmup_time", "s", "lower", 1.2),
    ("model_build_time", "s", "lower", 0.3),
    ("yardstick_time", "s", None, 0.015),
    ("final_loss", "", None, 0.4),
)


def write_runs(results: Path, number: int) -> list[Path]:
    """Writes the run directories, the oldest first."""
    drawn = random.Random(0)
    known = [configuration(size) for size in ("8", "16", "32")]
    return [write_run(results, index, drawn, known[index % len(known)]) for index in range(number)]


def configuration(batch_size: str) -> Configuration[Any]:
    """Returns the configuration of a run, which is that of many others too."""
    return completed(load(TrainSettings, "tiny", {"training.batch_size": batch_size}), complete)


def write_run(results: Path, index: int, drawn: random.Random, config: Configuration[Any]) -> Path:
    began = FIRST + index * BETWEEN
    experiment = EXPERIMENTS[index % len(EXPERIMENTS)]
    run_id = f"{began:%Y%m%d-%H%M%S}-{index % 1000:03d}-{drawn.randrange(2**16):04x}"
    path = results / experiment / run_id
    path.mkdir(parents=True)
    failed = index % 10 == 3
    (path / "config.yaml").write_text(config.to_yaml())
    settings = {"settings": flatten(config.settings.model_dump(mode="json"))}
    (path / "run.json").write_text(json.dumps(record(experiment, run_id, began, failed=failed) | settings, indent=2))
    if not failed:
        (path / "summary.json").write_text(json.dumps(summary(drawn), indent=2))
    return path


def record(experiment: str, run_id: str, began: datetime, *, failed: bool) -> dict[str, Any]:
    return {
        "schema_version": 4,
        "experiment": experiment,
        "run_id": run_id,
        "command": "train-bench",
        "argv": ["gpubench", "train-bench", "--config", "tiny"],
        "status": "failed" if failed else "completed",
        "started": stamp(began),
        "ended": stamp(began + timedelta(seconds=90)),
        "host": "here",
        "pid": 1,
        "pid_created": 0.0,
        "git": {"commit": f"{hash(began) % 16**12:040x}", "branch": "main", "dirty": False},
        "world_size": 1,
        "repeats": 5,
        "error": {"kind": "OutOfMemory", "message": "not enough memory", "hint": None} if failed else None,
    }


def stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def summary(drawn: random.Random) -> dict[str, Any]:
    steady = [{"repeat": one, "first": 10, "steps": 30, "settled": True, "start": 0.0, "end": 1.0} for one in range(5)]
    return {
        "schema_version": 4,
        "metrics": [metric(drawn, *one) for one in METRICS],
        "steady": steady,
        "ranks": [],
        "flops": None,
        "peak": None,
        "measured_peak": None,
        "throttled": {},
        "warnings": [],
        "environment": {"host": "here", "device": "a CPU", "torch": "2.13.0", "python": "3.11.7", "dirty": False},
    }


def metric(drawn: random.Random, name: str, unit: str, better: str | None, about: float) -> dict[str, Any]:
    repeats = [about * drawn.gauss(1, 0.01) for _ in range(5)]
    estimate = sum(repeats) / 5
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "estimate": estimate,
        "interval": [estimate * 0.99, estimate * 1.01],
        "n": 150,
        "effective_n": 120.5,
        "repeats": repeats,
        "distribution": None,
    }


def listing(results: Path, *options: str) -> tuple[Spent, str]:
    """Returns what a listing takes, and what it prints."""
    printed, spent = observe([sys.executable, "-m", "gpubench", "runs", "--results", str(results), *options])
    return spent, printed


def fastest(rounds: list[Spent]) -> Spent:
    return min(rounds, key=lambda spent: spent.processor)


def listed(results: Path) -> set[str]:
    """Returns the paths of all runs in a listing."""
    _, printed = listing(results, "--json")
    return {run["path"] for run in json.loads(printed)["runs"]}


def by_hand(results: Path, paths: list[Path]) -> list[bool]:
    """Adds, copies in, edits and deletes runs by hand, and returns whether each change is listed."""
    known = {str(path) for path in paths}
    added = write_run(results, len(paths), random.Random(1), configuration("8"))
    good = [listed(results) == (known := known | {str(added)})]
    copied = results / "copied" / paths[0].name
    shutil.copytree(paths[0], copied)
    good.append(listed(results) == (known := known | {str(copied)}))
    run = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps(run | {"tags": ["edited"]}, indent=2))
    _, printed = listing(results, "--json", "--tag", "edited")
    good.append([run["path"] for run in json.loads(printed)["runs"]] == [str(copied)])
    shutil.rmtree(added)
    good.append(listed(results) == known - {str(added)})
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        paths = write_runs(results, arguments.runs)
        first, _ = listing(results)
        rounds = range(arguments.rounds)
        warm = fastest([listing(results)[0] for _ in rounds])
        sought = fastest([listing(results, "--where", "batch_size=16", "--sort", "throughput")[0] for _ in rounds])
        (empty := Path(folder) / "empty").mkdir()
        idle = fastest([listing(empty)[0] for _ in rounds])
        size = (results / ".runs.cache").stat().st_size
        changes = by_hand(results, paths)
    cases = {
        "without a cache": first,
        "with a cache": warm,
        "with a cache, by a setting, sorted by a metric": sought,
        "no runs at all": idle,
    }
    rows = [
        [name, f"{one.seconds:.2f} s", f"{one.processor:.2f} s", f"{one.megabytes:.0f} MB"]
        for name, one in cases.items()
    ]
    print(f"{arguments.runs:,} runs; the cache has {size / 2**20:.1f} MiB\n")
    print(table([["listing", "time", "processor time", "memory"], *rows]))
    return bars.conclude(
        [
            bars.at_most(f"listing of {arguments.runs:,} runs, processor time", warm.processor, 1.0, "{:.2f} s"),
            bars.every("changes by hand that are listed", sum(changes), len(changes)),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
