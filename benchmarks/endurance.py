"""Do time and memory per step stay constant in long runs, on the host and on the ranks?

    .venv/bin/python benchmarks/endurance.py [--steps 10000] [--samples 5000] [--quick]

It runs training and a pipeline with very fast models, so that the host is as busy as possible, and each of them again
with a tenth of the length. It reports the peak memory of the host, including summary and report; the peak memory of the
largest rank; the memory of both per step or sample, from the difference of the two lengths; and the time from the last
line on disk to the end of the process. Bars for the host: 1,000 bytes per step, 20,000 bytes per sample, because it
keeps the evaluations and hand-offs of samples for the summary, and at most 10 s plus half a millisecond per step or
sample to end. Bar for a rank of the pipeline: 1,000 bytes per sample, which is the difference between two equal runs.
The pipeline verifies no samples, so it need not keep their latents, of 65,536 bytes each.
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

GLANCE = 0.2  # seconds between two readings of the memory
ENDING_SECONDS = 10.0  # seconds that any run may take to end
TRAINING = ("train-bench", *SMALL, "--repeats", "1", "--steps")
PIPELINE = (
    *("pipe-infer", "--unet", "dummy", "--step-ms", "0.1", "--steps", "4", "--world-size", "2", "--device=cpu"),
    *("--performance.cpu_threads=1", "--no-verify", "--baseline", "off", "--repeats", "1", "--samples"),
)


@dataclass(frozen=True)
class Case:
    name: str
    options: tuple[str, ...]
    """The command without its last argument, the number of steps or samples."""
    lines: str
    """The file with a line for each step or sample."""
    bytes_each: float
    """The memory limit of the host per step or sample."""
    rank_bytes_each: float | None
    """The memory limit of a rank per step or sample; None for no limit."""
    seconds_each: float
    """The time limit per step or sample for the end of the run."""


@dataclass(frozen=True)
class Observed:
    seconds: float
    most: int
    """The peak of the host's resident bytes."""
    rank: int
    """The peak of the largest rank's resident bytes."""
    ending: float
    """Seconds from the last line to the end of the process."""


STEPS = Case("steps", TRAINING, "steps.jsonl", 1_000, None, 0.0005)
SAMPLES = Case("samples", PIPELINE, "samples.jsonl", 20_000, 1_000, 0.0005)


def main() -> int:
    options = parse()
    size = 0.1 if options.quick else 1.0
    of_host, of_rank = ("host", "host, 1/10", "host, each"), ("rank", "rank, 1/10", "rank, each")
    rows, verdicts = [["run", "time", "time to end", *of_host, *of_rank]], []
    for case, number in ((STEPS, options.steps), (SAMPLES, options.samples)):
        many, few = round(number * size), round(number * size / 10)
        short, long = observe(case, few), observe(case, many)
        row = [f"{many:,} {case.name}", f"{long.seconds:.1f} s", f"{long.ending:.1f} s"]
        of_processes = (("host", long.most, short.most, case.bytes_each),
                        ("a rank", long.rank, short.rank, case.rank_bytes_each))  # fmt: skip
        for process, most, before, bar in of_processes:
            each = (most - before) / (many - few)
            row += [f"{most / 1e6:.1f} MB", f"{before / 1e6:.1f} MB", f"{each:,.0f} bytes"]
            if bar is not None and not options.quick:  # in a short run, variations of some megabytes dominate
                what = f"memory of {process} per step or sample, in {many:,} {case.name}"
                verdicts.append(bars.at_most(what, each, bar, "{:,.0f} bytes"))
        rows.append(row)
        limit = ENDING_SECONDS + case.seconds_each * many
        verdicts.append(
            bars.at_most(
                f"time from the last of {many:,} {case.name} to the end of the process", long.ending, limit, "{:.1f} s"
            )
        )
    print(table(rows))
    return bars.conclude(verdicts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="training steps; default: %(default)s")
    parser.add_argument("--samples", type=int, default=5_000, help="pipeline samples; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tenth of each, memory not judged")
    options = parser.parse_args()
    if min(options.steps, options.samples) < 200:
        parser.error("--steps and --samples must be at least 200")
    return options


def observe(case: Case, number: int) -> Observed:
    """Run a case. Raises subprocess.CalledProcessError if it fails, and RuntimeError if lines are missing."""
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
    """Return the worker processes of a run, without torch's launcher, which starts several of them."""
    found = []
    with suppress(psutil.Error):  # it has just ended
        for child in psutil.Process(host).children(recursive=True):
            with suppress(psutil.Error):
                if "gpubench.worker.process" in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                    found.append(child.pid)
    return found


def memory(process: int) -> int:
    try:
        return psutil.Process(process).memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


if __name__ == "__main__":
    sys.exit(main())
