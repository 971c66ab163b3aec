"""Finds the column of a table that holds the speed of training, by a name that tells its unit."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpubench.compare.log_columns import LogColumn
from gpubench.errors import DataError

LONGEST_NAME = 200
MOST_NAMES = 20  # names that an error lists

_UNIT = r"(ms|us|µs|ns|s|sec|seconds|msec)"
_STEP = r"(?:step|it|iter(?:ation)?|batch)"
_TIMES = (
    re.compile(rf"(?:^|[^a-z]){_STEP}[ _]?(?:time|duration|latency)?[ _(\[]{{1,2}}{_UNIT}[)\]]?$"),
    re.compile(rf"(?:^|[^a-z]){_UNIT}[ _]?(?:per[ _]?|/){_STEP}$"),
)
"""Names of the time of a step, such as step_time_ms and s/it."""
_WORK = {
    "tokens": "tokens?|tok",
    "samples": "samples?",
    "images": "images?|imgs?",
    "examples": "examples?",
    "sequences": "sequences?|seqs?",
    "items": "items?",
    "frames": "frames?",
    "steps": "steps?",
    "batches": "batch(?:es)?",
    "it": "iter(?:ation)?s?|its?",
}
_RATES = [
    (
        re.compile(
            rf"(?:^|[^a-z])(?:{words})[ _]?(?:per[ _]?|/ ?)s(?:ec(?:ond)?)?(?:[ _]?(?:per[ _]?|/)[a-z]{{1,9}})?$"
        ),
        work,
    )
    for work, words in _WORK.items()
]
"""Names of rates, such as tokens_per_second and it/s, with the work that they count, the most telling first."""
_MAYBE = {
    "ms": re.compile(r"(?:^|[^a-z])(?:ms|msec)$"),
    "us": re.compile(r"(?:^|[^a-z])us$"),
    "s": re.compile(r"(?:^|(?<!per)[^a-z])(?:time|duration|latency|sec|seconds|s)$"),
    "samples/s": re.compile(r"(?:^|[^a-z])(?:throughput|speed|ips|fps|tps|qps)$"),
}
"""What may be the name of a speed, by its likely unit."""
_NOT_TRAINING = re.compile(r"(?:^|[^a-z])(?:eval|val|valid|validate|validation|test|predict|sanity)(?:[^a-z]|$)")
_NOT_OF_A_STEP = re.compile(r"wall|elapsed|total|since|start|end|run")


def speed_column(path: Path, names: Sequence[str]) -> LogColumn:
    """Returns the column that names a speed and its unit. Raises DataError if none does."""
    if column := column_of_speed(names):
        return column
    how = (
        "log one by such a name as step_time_ms or samples_per_sec, as Lightning's ThroughputMonitor does, or name the "
        "column that holds it: --column NAME --unit UNIT"
    )
    raise no_speed(path, names, how)


def column_of_speed(names: Sequence[str]) -> LogColumn | None:
    """Returns the column that names a speed of training and its unit: a time before a rate; None if none does."""
    known = _of_training(names)
    times = [(name, found[1]) for sign in _TIMES for name, text in known.items() if (found := sign.search(text))]
    rates = [(name, f"{work}/s") for sign, work in _RATES for name, text in known.items() if sign.search(text)]
    return next((LogColumn.of(name, unit) for name, unit in (*times, *rates)), None)


def no_speed(path: Path, names: Sequence[str], how: str) -> DataError:
    """Returns the error for a table without such a column. `how` is what to do if no name may be that of a speed."""
    known = {name: text for name, text in _of_training(names).items() if not _NOT_OF_A_STEP.search(text)}
    likely = [(name, unit) for unit, sign in _MAYBE.items() for name, text in known.items() if sign.search(text)]
    if likely:
        name, unit = likely[0]
        how = f"if {name} is one: add --column {shlex.quote(name)} --unit {unit}, or another unit"
    return DataError(f"{path} has no column that names the time of a step, or a rate: it has {shortened(names)}", how)


def shortened(names: Iterable[str]) -> str:
    """Joins the first names."""
    every = [" ".join(name[:LONGEST_NAME].split()) for name in names]
    return ", ".join(every[:MOST_NAMES]) + (", ..." if len(every) > MOST_NAMES else "") if every else "none"


def _of_training(names: Iterable[str]) -> dict[str, str]:
    """Returns the names that are not of evaluation, with their small letters."""
    plain = {name: name.lower() for name in names if len(name) <= LONGEST_NAME and name.isprintable()}
    return {name: text for name, text in plain.items() if not _NOT_TRAINING.search(text)}
