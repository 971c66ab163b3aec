"""Does a long run stay as quick and as small as a short one? What the host process takes, by the steps it has heard of.

    .venv/bin/python benchmarks/endurance.py [--steps 10000] [--samples 200] [--quick]

A training run and a pipeline of models that take next to no time, so that the host is kept as busy as it can be, each
beside one of a tenth of the length. The most memory that the host held, summing up and the report included, and what
the long one held more for each step or sample beyond the short one's; how long it took from the last of them on disk to
the end of the process. Bars: 1,000 bytes for a step, 20,000 for a sample, whose evaluations and hand-overs are kept
too, and to end 10 s and half a millisecond a step.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bars
import psutil
from kills import SMALL, environment, gpubench
from tables import table

GLANCE = 0.05  # seconds
UNHURRIED = 10.0  # seconds that any run may take to end
TRAINING = ("train-bench", *SMALL, "--repeats", "1", "--steps")
PIPELINE = (
    *("pipe-infer", "--unet", "dummy", "--step-ms", "0.1", "--steps", "4", "--world-size", "2", "--device=cpu"),
    *("--performance.cpu_threads=1", "--no-verify", "--baseline", "off", "--repeats", "1", "--samples"),
)


@dataclass(frozen=True)
class Case:
    name: str
    options: tuple[str, ...]
    """Of the command, but for the last: how many."""
    lines: str
    """The file that has a line for each."""
    bytes_each: float
    seconds_each: float


@dataclass(frozen=True)
class Observed:
    seconds: float
    most: int
    """Bytes resident."""
    ending: float
    """Seconds from the last line to the end."""


STEPS = Case("steps", TRAINING, "steps.jsonl", 1_000, 0.0005)
SAMPLES = Case("samples", PIPELINE, "samples.jsonl", 20_000, 0.0)


def main() -> int:
    options = parse()
    size = 0.1 if options.quick else 1.0
    rows, verdicts = [["run", "took", "to end", "most memory", "of a tenth", "more for each"]], []
    for case, number in ((STEPS, options.steps), (SAMPLES, options.samples)):
        many, few = round(number * size), round(number * size / 10)
        short, long = observe(case, few), observe(case, many)
        each = (long.most - short.most) / (many - few)
        sizes = (f"{found.most / 1e6:.1f} MB" for found in (long, short))
        figures = (f"{long.seconds:.1f} s", f"{long.ending:.1f} s", *sizes, f"{each:,.0f} bytes")
        rows.append([f"{many:,} {case.name}", *figures])
        patience = UNHURRIED + case.seconds_each * many
        if not options.quick:  # some hundred kilobytes come and go
            what = f"memory for each of {many:,} {case.name}"
            verdicts.append(bars.at_most(what, each, case.bytes_each, "{:,.0f} bytes"))
        verdicts.append(
            bars.at_most(f"from the last of {many:,} {case.name} to the end", long.ending, patience, "{:.1f} s")
        )
    print(table(rows))
    return bars.conclude(verdicts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="a tenth of each, memory not judged: does it run at all?")
    options = parser.parse_args()
    if min(options.steps, options.samples) < 200:
        parser.error("--steps, --samples: at least 200")
    return options


def observe(case: Case, number: int) -> Observed:
    """Raises subprocess.CalledProcessError if the run fails, and RuntimeError if lines are missing."""
    print(f"{number} {case.name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="gpubench-endurance-") as folder:
        command = gpubench(*case.options, str(number), "-q", "--results", folder)
        began = last = time.monotonic()
        most = lines = 0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()) as process:
            while process.poll() is None:
                most = max(most, memory(process.pid))
                if (now := count(Path(folder), case.lines)) > lines:
                    lines, last = now, time.monotonic()
                time.sleep(GLANCE)
        ended = time.monotonic()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        if (there := count(Path(folder), case.lines)) < number:
            raise RuntimeError(f"{there} of {number} {case.name}")
        return Observed(ended - began, most, ended - last)


def count(results: Path, name: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob(f"*/*/{name}"))


def memory(process: int) -> int:
    try:
        return psutil.Process(process).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


if __name__ == "__main__":
    sys.exit(main())
