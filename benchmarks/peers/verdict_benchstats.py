"""benchstats' verdicts, at its defaults: every step a repetition, or with `means` every process one."""

import json
import sys
from pathlib import Path
from statistics import fmean

from benchstats.compare import compareStats  # type: ignore[import-not-found]

pairs = json.loads(Path(sys.argv[1]).read_text())
by_process = sys.argv[2:] == ["means"]


def values(processes: list[list[float]]) -> list[float]:
    return [fmean(steps) for steps in processes] if by_process else [step for steps in processes for step in steps]


before, after = (
    {f"pair-{number}": {"real_time": values(pair[side])} for number, pair in enumerate(pairs)} for side in (0, 1)
)
found = compareStats(before, after, debug_log=False).results
words = {"<": "slower", ">": "faster", "~": "same"}  # < says that the first is the smaller one
print(json.dumps([words[found[f"pair-{number}"]["real_time"].result] for number in range(len(pairs))]))
