"""Finds what `gpubench loader` has measured of a program: its speed with data that is always ready."""

from itertools import islice
from pathlib import Path

import msgspec

from gpubench import foreign_files
from gpubench.data_cost import DataCost
from gpubench.diagnosis.case import ReadyData
from gpubench.errors import GpubenchError
from gpubench.runs.directory import LOADER
from gpubench.runs.reader import Run

MOST_READ = 20
"""The runs that are read at most, the newest first."""


def newest_ceiling(results: Path, command: str) -> ReadyData | None:
    """Returns what the newest run of the loader of a program has found; None if there is none that has measured it."""
    files = sorted(results.glob(f"*/*/{LOADER}"), key=lambda path: path.parent.name, reverse=True)
    for path in islice(files, MOST_READ):
        try:
            run = Run.open(path.parent)
            if run.settings.get("program.command") != command:
                continue
            found = msgspec.json.decode(foreign_files.content(path), type=DataCost).ceiling
        except (GpubenchError, OSError, ValueError):
            continue
        if found and found.ratio and found.verdict != "inconclusive":
            return ReadyData(found.ratio, str(path.parent))
    return None
