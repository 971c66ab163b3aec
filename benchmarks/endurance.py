"""Does a long run stay as quick and as small as a short one? What the host and the ranks take, by how much they did.

    .venv/bin/python benchmarks/endurance.py [--steps 10000] [--samples 5000] [--quick]

A training run and a pipeline of models that take next to no time, so that the host is kept as busy as it can be, each
beside one of a tenth of the length. The most memory that the host held, summing up and the report included, the most
that any of the ranks held, and what either held more for each step or sample beyond the short run's; how long it took
from the last of them on disk to the end of the process. Bars for the host: 1,000 bytes for a step, 20,000 for a sample,
whose evaluations and hand-overs it keeps for the summary, and to end 10 s and half a millisecond a step or sample. Bar
for a rank of the pipeline, which has nothing to verify and so no reason to keep any of a sample's 65,536 bytes of
latent: 1,000 bytes for a sample, which is what the memory of two equal runs differs by.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import bars
import psutil
from kills import SMALL, environment, gpubench
from tables import table

GLANCE = 0.2  # seconds
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
    """That the host may hold more for each; so may `rank_bytes_each` for any rank, None where that is not judged."""
    rank_bytes_each: float | None
    seconds_each: float


@dataclass(frozen=True)
class Observed:
    seconds: float
    most: int
    """Bytes resident in the host; `rank` is the same of the largest rank."""
    rank: int
    ending: float
    """Seconds from the last line to the end."""


STEPS = Case("steps", TRAINING, "steps.jsonl", 1_000, None, 0.0005)
SAMPLES = Case("samples", PIPELINE, "samples.jsonl", 20_000, 1_000, 0.0005)


def main() -> int:
    options = parse()
    size = 0.1 if options.quick else 1.0
    of_host, of_rank = ("host", "of a tenth", "more for each"), ("a rank", "of a tenth", "more for each")
    rows, verdicts = [["run", "took", "to end", *of_host, *of_rank]], []
    for case, number in ((STEPS, options.steps), (SAMPLES, options.samples)):
        many, few = round(number * size), round(number * size / 10)
        short, long = observe(case, few), observe(case, many)
        row = [f"{many:,} {case.name}", f"{long.seconds:.1f} s", f"{long.ending:.1f} s"]
        of_processes = (("host", long.most, short.most, case.bytes_each),
                        ("a rank", long.rank, short.rank, case.rank_bytes_each))  # fmt: skip
        for process, most, before, bar in of_processes:
            each = (most - before) / (many - few)
            row += [f"{most / 1e6:.1f} MB", f"{before / 1e6:.1f} MB", f"{each:,.0f} bytes"]
            if bar is not None and not options.quick:  # some megabytes come and go
                what = f"memory of {process} for each of {many:,} {case.name}"
                verdicts.append(bars.at_most(what, each, bar, "{:,.0f} bytes"))
        rows.append(row)
        patience = UNHURRIED + case.seconds_each * many
        verdicts.append(
            bars.at_most(f"from the last of {many:,} {case.name} to the end", long.ending, patience, "{:.1f} s")
        )
    print(table(rows))
    return bars.conclude(verdicts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=5_000)
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
        most = rank = lines = 0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()) as process:
            while process.poll() is None:
                most = max(most, memory(process.pid))
                rank = max([rank, *map(memory, ranks(process.pid))])
                if (now := count(Path(folder), case.lines)) > lines:
                    lines, last = now, time.monotonic()
                time.sleep(GLANCE)
        ended = time.monotonic()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        if (there := count(Path(folder), case.lines)) < number:
            raise RuntimeError(f"{there} of {number} {case.name}")
        return Observed(ended - began, most, rank, ended - last)


def count(results: Path, name: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob(f"*/*/{name}"))


def ranks(host: int) -> list[int]:
    """The worker processes of a run: torch's launcher, which starts them where there are several, is none."""
    found = []
    with suppress(psutil.Error):  # it has just ended
        for child in psutil.Process(host).children(recursive=True):
            with suppress(psutil.Error):
                if "gpubench.worker" in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                    found.append(child.pid)
    return found


def memory(process: int) -> int:
    try:
        return psutil.Process(process).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


if __name__ == "__main__":
    sys.exit(main())
