"""Is gpubench right on this GPU? One of the checks of `gpu_suite.py --group first-gpu`, or a part of one.

    python benchmarks/first_gpu.py stopwatch [--part cuda:1] [--results DIR]

Each check runs programs of first_programs/, which measure themselves, by the command line of gpubench, and holds what
gpubench says to what they measured. What cannot be checked on this machine is skipped with the reason.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bars
from first_checks import CHECKS
from first_checks.here import Here

from gpubench.devices import visible_gpus


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpus = visible_gpus()
    if not gpus:
        return bars.conclude([bars.skipped(options.check, "no GPU is visible")])
    made = []
    with tempfile.TemporaryDirectory(prefix="first-gpu-") as scratch:
        here = Here(options.results or Path(scratch), gpus, options.tiny, options.part or ())
        for bar in CHECKS[options.check](here):
            made.append(bar)
            bars.note(made)  # a check that is stopped keeps its verdicts so far
    return bars.conclude(made)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--part", action="append", help="run this part only, such as cuda:1 or item; may be repeated")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep run directories here; default: nowhere")
    parser.add_argument("--tiny", action="store_true", help="take the sizes that a simulated GPU can compute")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
