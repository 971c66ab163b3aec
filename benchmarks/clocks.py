"""Is the clock of a program accused only if it is false, and found to be false where the machine lets it be seen?

    .venv/bin/python benchmarks/clocks.py [--repeats 100] [--false 10] [--busy 0 2 20 60] [--each 10] [--seconds 2]

It measures a small program (tests/support/clocked_program.py) in repeats of two seconds beside so many busy processes,
and with a host that is stopped for a second at random instants: with a true clock, and with clocks of other speeds. The
processes are busy while the program trains, and rest while it starts, which would take most of the time.

Bars: a true clock is never accused; on a quiet machine a false one always is; and a false one is never called the same.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bars
from processes import without_settings
from tables import table

from gpubench.runs.clocks import ClockRates

PROGRAM = Path(__file__).parents[1] / "tests" / "support" / "clocked_program.py"
SPEEDS = (1.5, 2.0, 10.0, 1 / 1.5, 1 / 2, 1 / 10)
"""Those of false clocks."""
QUIET, BUSY = 0, 20
"""The numbers of busy processes beside false clocks."""
STOPPED_SECONDS = 1.0
BUSY_WORK = """
import os, sys, time
while True:
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
        continue
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        pass
"""
FOUND = {True: "same", None: "not known", False: "accused"}


@dataclass(frozen=True)
class Case:
    """A clock, and what the machine does beside it."""

    speed: float
    busy: int
    stops: bool = False
    """Whether the host is stopped at random instants."""

    @property
    def beside(self) -> str:
        return "a host that is stopped" if self.stops else f"{self.busy} busy processes"


def main() -> int:
    arguments = parse()
    cases = [*(Case(1, busy) for busy in arguments.busy), Case(1, QUIET, stops=True)]
    cases += [Case(speed, busy) for busy in (QUIET, BUSY) for speed in SPEEDS]
    seen: dict[Case, list[ClockRates | None]] = {}
    with tempfile.TemporaryDirectory(prefix="gpubench-clocks-") as name:
        for number, case in enumerate(cases, 1):
            wanted = arguments.repeats if case.speed == 1 else arguments.false
            folder = Path(name) / str(number)
            seen[case] = list(measured(case, wanted, arguments.each, arguments.seconds, folder))
            said = ", ".join(f"{count} {found}" for found, count in counted(seen[case]).items())
            print(f"{number} of {len(cases)}: a speed of {case.speed:.3g}, {case.beside}: {said}", file=sys.stderr)
    rows = [(f"{case.speed:.3g}", case.beside, *row(found)) for case, found in seen.items() if found]
    print(table([("speed of the clock", "beside", "repeats", *FOUND.values(), "apart, median and largest"), *rows]))
    return bars.conclude(judged(seen))


def judged(seen: dict[Case, list[ClockRates | None]]) -> list[bars.Bar]:
    """Returns the bars."""
    true = [one for case, found in seen.items() if case.speed == 1 for one in found]
    false = [one for case, found in seen.items() if case.speed != 1 for one in found]
    quiet = [one for case, found in seen.items() if case.speed != 1 and case.busy == QUIET for one in found]
    accused, excused = counted(true)["accused"], counted(false)["same"]
    return [
        bars.holds("true clocks", f"{accused} of {len(true)} accused", "none", good=not accused),
        bars.every("false clocks accused on a quiet machine", counted(quiet)["accused"], len(quiet)),
        bars.holds("false clocks", f"{excused} of {len(false)} called the same", "none", good=not excused),
    ]


def counted(found: Sequence[ClockRates | None]) -> Counter[str]:
    return Counter(FOUND[one.agree if one else None] for one in found)


def row(found: Sequence[ClockRates | None]) -> list[str]:
    """Returns what the repeats of a case have found, and how far apart the bounds were."""
    apart = sorted(one.high - one.low for one in found if one)
    counts = counted(found)
    spread = f"{apart[len(apart) // 2]:.2g}, {apart[-1]:.2g}" if apart else "-"
    return [str(len(found)), *(str(counts[name]) for name in FOUND.values()), spread]


def measured(case: Case, wanted: int, each: int, seconds: float, folder: Path) -> Iterator[ClockRates | None]:
    """Yields the bounds of so many repeats, `each` of which are made by one command."""
    trains = folder / "trains"
    program = f'rm -f "$0"; exec "$1" "$2" {seconds} {case.speed} "$0"'
    words = ("--", "sh", "-c", program, str(trains), sys.executable, str(PROGRAM))
    options = ("--steps", "all", "--training.warmup_steps", "2", "--measurement.stall_timeout", "600", "-q")
    for begun in range(0, wanted, each):
        results = folder / str(begun)
        results.mkdir(parents=True)
        repeats = ("--repeats", str(min(each, wanted - begun)), "--results", str(results))
        command = (sys.executable, "-m", "gpubench", "train-bench", *repeats, *options, *words)
        with (
            busy(case.busy, trains),
            (results / "printed").open("w") as printed,
            subprocess.Popen(command, stdout=printed, stderr=printed, env=without_settings()) as host,
            stopping(host if case.stops else None),
        ):
            host.wait()
        if host.returncode:
            sys.exit(f"error: {(results / 'printed').read_text()}")
        (summary,) = results.glob("*/*/summary.json")
        document = json.loads(summary.read_text())
        found = document["clock_rates"] or [None] * len(document["steady"])
        yield from (ClockRates(**one) if one else None for one in found)


@contextmanager
def busy(number: int, while_exists: Path) -> Iterator[None]:
    """Keeps so many processes busy while the file exists."""
    while_exists.unlink(missing_ok=True)
    started = [subprocess.Popen((sys.executable, "-c", BUSY_WORK, str(while_exists))) for _ in range(number)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.wait()


@contextmanager
def stopping(host: "subprocess.Popen[bytes] | None") -> Iterator[None]:
    """Stops the host for a second again and again, a random time after it has gone on."""
    ended = threading.Event()

    def stop() -> None:
        while host and not ended.wait(random.uniform(0.1, 3.0)):
            host.send_signal(signal.SIGSTOP)
            ended.wait(STOPPED_SECONDS)
            host.send_signal(signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        yield
    finally:
        ended.set()
        stopper.join()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100, help="of a true clock in each case")
    parser.add_argument("--false", type=int, default=10, help="repeats of each false clock in each case")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2, 20, 60], help="the busy processes")
    parser.add_argument("--each", type=int, default=10, help="repeats that are made by one command")
    parser.add_argument("--seconds", type=float, default=2.0, help="the time in which the program trains")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
