"""On PYTHONPATH: sets the clock of a gpubench host process back by an hour as soon as its run has steps.

Its workers, and all other processes, keep the time.
"""

import datetime
import os
import sys
import time
from pathlib import Path

HOUR = 3600.0
tell = time.time
results = Path(os.environ.get("RESULTS_WITH_STEPS", "/nowhere"))
back = 0.0


def set_back() -> float:
    global back
    back = back or HOUR * any(results.glob("*/*/steps.jsonl"))
    return tell() - back


class SetBack(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "SetBack":
        return cls.fromtimestamp(time.time(), tz)


if ["-m", "gpubench"] in (sys.orig_argv[1:3], sys.orig_argv[2:4]):  # by itself, or by forked.py
    time.time = set_back
    datetime.datetime = SetBack  # type: ignore[misc]
