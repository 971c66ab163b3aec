"""What does `kill -9` leave behind? The host process of each command is killed at random instants of a short run.

    .venv/bin/python benchmarks/kills.py [--instants 50] [--seed 0] [--commands train-bench,compare]

One complete run of each command measures its duration, from which the instants are drawn evenly. After each kill: no
process of the run is left, every file in its directory is readable, its status is right (readers call a run without a
host interrupted), and `gpubench compare` reports that. Then one more run, beside all the killed ones, must complete.
Bar: nothing is wrong after any kill.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import bars
import psutil
from tables import table
from wholeness import asides, complaints

from gpubench.runs.directory import RUN
from gpubench.runs.reader import Run

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
SMALL = ("--model", "small_model:build", "--performance.cpu_threads=1", "--logging.graph=false", "--device=cpu")
DUMMY = ("--unet", "dummy", "--step-ms", "2", "--steps", "8", "--samples", "8", "--device=cpu")
RUNS = {
    "train-bench": ("train-bench", *SMALL, "--steps", "400", "--repeats", "1"),
    "pipe-infer": ("pipe-infer", *DUMMY, "--performance.cpu_threads=1", "--world-size", "2", "--repeats", "1"),
    "profile": ("profile", *SMALL, "--steps", "20", "--repeats", "1"),
    "memory": ("memory", *SMALL),
}
COMPARE = "compare"
MARK = "_KILLED_RUN"  # in the environment of all that a run starts, and of nothing else
LEAVE_SECONDS = 30.0  # in which a worker must notice that its host is gone, including torch's start
UNBORN = f"no {RUN} yet"


@dataclass
class Tally:
    """The results of killing one command."""

    name: str
    finished_first: int = 0
    directories: int = 0
    states: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    asides: int = 0
    left: int = 0
    """The number of processes that outlived their host."""
    wrong: list[str] = field(default_factory=list)

    def row(self, instants: int) -> list[str]:
        states, compared = (
            ", ".join(f"{n} {word}" for word, n in c.most_common()) for c in (self.states, self.compared)
        )
        counts = (instants, self.finished_first, self.directories)
        return [self.name, *map(str, counts), states, compared, *map(str, (self.asides, self.left, len(self.wrong)))]


HEADINGS = [
    *("command", "instants", "ended before", "directories", "read as", "compare", "temporary files", "processes"),
    "problems",
]


def main() -> int:
    options = parse()
    tallies = []
    with tempfile.TemporaryDirectory(prefix="gpubench-kills-") as folder:
        for name in options.commands:
            chance = random.Random(f"{options.seed} {name}")
            results = Path(folder) / name
            kill_all = compares if name == COMPARE else runs
            tallies.append(kill_all(Tally(name), results, [chance.random() for _ in range(options.instants)]))
    print(table([HEADINGS, *(tally.row(options.instants) for tally in tallies)]))
    for tally in tallies:
        for problem in tally.wrong:
            print(f"problem: {tally.name}: {problem}")
    return bars.conclude([judge(tally, options.instants) for tally in tallies])


def judge(tally: Tally, instants: int) -> bars.Bar:
    """Return the bar on the kills and on the run after them, without runs that had ended before they were killed."""
    total = instants - tally.finished_first + 1
    return bars.every(
        f"{tally.name}: kills, and a run after them, without problems", total - min(total, len(tally.wrong)), total
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--instants", type=int, default=50, help="number of kills of each command; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=lambda text: text.split(","), default=[*RUNS, COMPARE], metavar="A,B")
    options = parser.parse_args()
    if options.instants < 1:
        parser.error("--instants must be at least 1")
    if unknown := set(options.commands) - {*RUNS, COMPARE}:
        parser.error(f"--commands: no {', '.join(unknown)} among {', '.join((*RUNS, COMPARE))}")
    return options


def runs(tally: Tally, results: Path, instants: Sequence[float]) -> Tally:
    """Kill runs of a command that has a run directory."""
    command = [*gpubench(*RUNS[tally.name]), "-q", "--results", str(results)]
    span, finished = to_the_end(command, results)
    known = {finished}
    for number, instant in enumerate(instants, 1):
        progress(tally, number, len(instants))
        tally.finished_first += not killed(command, instant * span)
        stay(tally)
        for path in directories(results) - known:
            known.add(path)
            tally.directories += 1
            tally.states[state(path)] += 1
            tally.asides += len(asides(path))
            tally.wrong += complaints(path)
            compare_with(tally, path, finished)
    _, last = to_the_end(command, results)
    tally.wrong += [f"{last} has no {name}" for name in ("report.html", "summary.json") if not (last / name).exists()]
    return tally


def compares(tally: Tally, results: Path, instants: Sequence[float]) -> Tally:
    """Kill comparisons of two finished runs, which write a page and must not change the runs."""
    measure = [*gpubench(*RUNS["train-bench"]), "-q", "--results", str(results)]
    sides = [to_the_end(measure, results)[1] for _ in range(2)]
    page = results / "page.html"
    command = [*gpubench(COMPARE, *map(str, sides)), "--html", str(page)]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env=environment())
    span, before = time.monotonic() - began, digest(sides)
    for number, instant in enumerate(instants, 1):
        progress(tally, number, len(instants))
        page.unlink(missing_ok=True)
        tally.finished_first += not killed(command, instant * span)
        stay(tally)
        tally.states["page" if page.exists() else "no page"] += 1
        tally.asides += len(asides(results))
        if page.exists() and not page.read_text().rstrip().endswith("</html>"):
            tally.wrong.append("the page is incomplete")
        if digest(sides) != before:
            tally.wrong.append("the runs were written to")
    compare_with(tally, *sides)
    return tally


def gpubench(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpubench", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1", MARK: str(os.getpid())}


def to_the_end(command: Sequence[str], results: Path) -> tuple[float, Path]:
    """Return (seconds, run directory) of a complete run. Raises subprocess.CalledProcessError if it fails."""
    before, began = directories(results), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    seconds = time.monotonic() - began
    (made,) = directories(results) - before
    return seconds, made


def killed(command: Sequence[str], after: float) -> bool:
    """Kill the run after `seconds`; return whether it still ran then."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()  # the host alone
        process.wait()
        return True
    return False


def stay(tally: Tally) -> None:
    """Count the processes that outlive their host, and end them."""
    _, left = psutil.wait_procs(family(), timeout=LEAVE_SECONDS)
    tally.left += len(left)
    for process in left:
        tally.wrong.append(f"left over: {process.pid}")
        process.kill()


def family() -> list[psutil.Process]:
    """Return all processes that a run has started, whatever their parents are now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone, or another user's
            continue
    return found


def directories(results: Path) -> set[Path]:
    return {path for path in results.glob("*/*") if path.is_dir()}


def state(path: Path) -> str:
    return Run.open(path).status if (path / RUN).exists() else UNBORN


def compare_with(tally: Tally, path: Path, finished: Path) -> None:
    """Check that `gpubench compare` says that the run was interrupted, or refuses it with a reason."""
    done = subprocess.run(
        gpubench(COMPARE, str(path), str(finished)), capture_output=True, text=True, env=environment()
    )
    said = done.stdout if done.returncode == 0 else done.stderr
    tally.compared["judged" if done.returncode == 0 else f"exit {done.returncode}"] += 1
    found = state(path)
    due = {"interrupted": "interrupted", UNBORN: f"has no {RUN}"}.get(found, "")
    refused_well = done.returncode == 2 and "error: " in done.stderr and "hint: " in done.stderr
    if "Traceback" in done.stderr or due not in said or not (done.returncode == 0 or refused_well):
        tally.wrong.append(f"compare exits {done.returncode} for {path}, which is {found}: {done.stderr.strip()}")


def digest(folders: Sequence[Path]) -> str:
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    return sha256(b"".join(str(file).encode() + file.read_bytes() for file in files)).hexdigest()


def progress(tally: Tally, number: int, instants: int) -> None:
    print(f"{tally.name}: {number} of {instants}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
