"""Chooses runs of a catalogue, by what they are, when they began and how they were set, and sorts them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from gpubench.errors import UsageError, did_you_mean, offer
from gpubench.runs.entries import Entry

CONDITION = re.compile(r"(?P<key>[\w.-]+) *(?P<sign>!=|<=|>=|==?|<|>) *(?P<value>.*)")
AGE = re.compile(r"(?P<number>\d{1,9}(?:\.\d+)?) *(?P<unit>min|h|d|w)")
AGES = "write 12h, 30d or 2w, or a date such as 2026-11-01"
UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
ENVIRONMENT = "environment."
"""Stands before a fact of the environment, unlike a setting."""
VERSION = re.compile(r"-?\d{1,9}(?:\.\d{1,9})*")
"""The beginning of a version such as 2.13.0+cpu; also a whole number."""
WHOLE_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9})+")
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
SHORTEST = 4
"""The length of an abbreviated commit."""
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda one, other: one < other,
    ">": lambda one, other: one > other,
    "<=": lambda one, other: one <= other,
    ">=": lambda one, other: one >= other,
}
LABELS: dict[str, Callable[[Entry], str | None]] = {
    "run": lambda entry: entry.run_id,
    "name": lambda entry: entry.name,
    "command": lambda entry: entry.command,
    "model": lambda entry: entry.model,
    "variant": lambda entry: entry.variant,
    "status": lambda entry: entry.record.status,
    "experiment": lambda entry: entry.record.experiment,
    "host": lambda entry: entry.record.host,
}
"""What a condition can be about besides settings and facts: the columns of a listing."""
WORDS: dict[str, Callable[[Entry], Any]] = {
    "started": lambda entry: (entry.record.started, entry.run_id),
    "ended": lambda entry: entry.record.ended or "",
    "name": lambda entry: (entry.name is None, entry.name or ""),
    **{name: LABELS[name] for name in ("experiment", "command", "model", "variant", "status", "host")},
}
"""What a listing can be sorted by besides metrics and settings."""
NEWEST_FIRST = ("started", "ended")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a run must have to be chosen. None, or nothing, leaves the choice open."""

    command: str | None = None
    """The subcommand of gpubench, or the command in run.json."""
    experiment: str | None = None
    """The name of the experiment, or a pattern with `*`."""
    model: str | None = None
    """A part of the model's name, or of the program's command line, in any case of letters."""
    tags: Sequence[str] = ()
    """The run must have all of them."""
    status: str | None = None
    host: str | None = None
    since: datetime | None = None
    where: Sequence[str] = ()
    """Conditions such as "precision=bf16", "training.batch_size>=16" or "torch=2.13*"."""
    whole: bool = True
    """Whether to leave out the runs that are only a part of a search, or the trial of another run's fix.

    They are not left out of an experiment that is named.
    """

    def of(self, entries: Iterable[Entry]) -> list[Entry]:
        """Returns the chosen runs, in their order.

        Raises UsageError for a condition that cannot be understood, or about a setting that no run has.
        """
        found = [entry for entry in entries if self._fits(entry)]
        for text in self.where:
            holds = _condition(text, found)
            found = [entry for entry in found if holds(entry)]
        return found

    def _fits(self, entry: Entry) -> bool:
        record = entry.record
        return (
            (entry.part_of is None or not self.whole or self.experiment is not None)
            and (self.experiment is None or fnmatchcase(record.experiment, self.experiment))
            and (self.model is None or self.model.lower() in entry.model.lower())
            and set(self.tags) <= set(entry.tags)
            and self.status in (None, record.status)
            and self.host in (None, record.host)
            and (self.since is None or record.started >= stamp(self.since))
            and self.command in (None, record.command, entry.command)
        )


def stamp(moment: datetime) -> str:
    """Returns a time in the format of run.json, which sorts as text."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str, option: str, now: datetime | None = None) -> datetime:
    """Returns the time that an age such as "30d" or a date such as "2026-11-01" stands for; dates are local.

    Raises UsageError, which names the option, for any other text.
    """
    now = now or datetime.now(UTC)
    try:
        if age := AGE.fullmatch(text.strip()):
            return now - float(age["number"]) * UNITS[age["unit"]]
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (OverflowError, ValueError, OSError):
        hint = offer([f"{option} {text.strip()}d"]) if text.strip().isdecimal() and len(text.strip()) < 4 else AGES
        raise UsageError(f"{option} {text!r} is neither an age nor a date", hint) from None


def keys(entries: Iterable[Entry]) -> dict[str, None]:
    """Returns the settings and facts of the environment that the runs have, as a condition names them."""
    found: dict[str, None] = {}
    for entry in entries:
        found |= dict.fromkeys(entry.settings)
        found |= dict.fromkeys(ENVIRONMENT + key for key in entry.environment)
    return found


def key_of(name: str, entries: Iterable[Entry], option: str) -> str:
    """Returns the setting or fact that a name stands for: its dot-key, or the last part of the only one with it.

    Raises UsageError, which names the option, if there is no such key or several.
    """
    known = keys(entries)
    name = name.removeprefix("git.")
    if name in known:
        return name
    found = [key for key in known if key.rpartition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{option}: {name} is the end of {' and '.join(found)}", "give one of them")
    hint = did_you_mean(name, [*known, *(key.rpartition(".")[2] for key in known)])
    raise UsageError(f"{option}: no run has a setting {name!r}", hint or "gpubench runs --json shows the settings")


def value_of(entry: Entry, key: str) -> Any:
    """Returns the value of a setting or fact; None if the run does not have it."""
    if key.startswith(ENVIRONMENT):
        return entry.environment.get(key.removeprefix(ENVIRONMENT))
    return entry.settings.get(key)


MEANT: Mapping[str, Sequence[str]] = {
    "speed": ("throughput", "speedup"),
    "fastest": ("throughput", "speedup"),
    "result": ("throughput", "speedup"),
    "time": ("step_time", "makespan"),
    "latency": ("latency_p50", "step_time"),
    "memory": ("peak_memory_total", "peak_memory_reserved", "peak_memory_rss"),
    "loss": ("final_loss",),
    **dict.fromkeys(("age", "date", "newest", "created", "run"), ("started",)),
}
"""The metrics that a word may mean. A listing offers the first that its runs have."""


def ordered(entries: Sequence[Entry], by: str) -> list[Entry]:
    """Returns the runs sorted by a metric, the best first, by a setting, or by a word that a listing shows.

    Runs without the value come last. Raises UsageError for anything else.
    """
    if by in WORDS:
        return sorted(entries, key=WORDS[by], reverse=by in NEWEST_FIRST)
    if figures := {entry.folder: entry.metrics[by] for entry in entries if by in entry.metrics}:
        sign = -1 if any(figure.better == "higher" for figure in figures.values()) else 1
        found = sorted(entries, key=lambda one: sign * figures[one.folder].estimate if one.folder in figures else 0.0)
        return [one for one in found if one.folder in figures] + [one for one in found if one.folder not in figures]
    if not entries:
        return []
    known = dict.fromkeys(name for entry in entries for name in entry.metrics)
    if meant := [name for name in MEANT.get(by, ()) if name in known or name in WORDS]:
        raise UsageError(f"--sort: no run has a metric or setting {by!r}", offer(meant[:1]))
    if "." not in by and (hint := did_you_mean(by, [*WORDS, *known], cutoff=0.75)):
        raise UsageError(f"--sort: no run has a metric or setting {by!r}", hint)
    key = key_of(by, entries, "--sort")
    return sorted(entries, key=lambda one: _rank(value_of(one, key)))


def _rank(value: Any) -> tuple[int, float, str]:
    """Returns a key that sorts values of all types: numbers, then words, then what is unknown."""
    if value is None:
        return 2, 0.0, ""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _condition(text: str, entries: Sequence[Entry]) -> Callable[[Entry], bool]:
    parts = CONDITION.fullmatch(text.strip())
    if parts is None:
        raise UsageError(f"--where {text!r} is not a condition", "write KEY=VALUE, such as --where precision=bf16")
    sign, asked = parts["sign"], parts["value"].strip()
    if not entries:
        return lambda _: True
    key, read = _readable(parts["key"], entries)
    if sign in ("=", "=="):
        return lambda entry: _equals(read(entry), asked)
    if sign == "!=":
        return lambda entry: not _equals(read(entry), asked)
    if _number(asked) is None and not VERSION.match(asked):
        raise UsageError(f"--where {text!r}: {asked!r} is not a number", f"{sign} compares numbers and versions")
    known = [value for entry in entries if (value := read(entry)) is not None]
    if known and not any(map(_is_ordered, known)):
        raise UsageError(
            f"--where {text!r}: {key} is neither a number nor a version, but for example {known[0]!r}",
            f"use {key}=VALUE, in which * stands for any text",
        )

    def holds(entry: Entry) -> bool:
        value = read(entry)
        return _is_ordered(value) and _SIGNS[sign](*_comparable(value, asked))

    return holds


def _readable(name: str, entries: Sequence[Entry]) -> tuple[str, Callable[[Entry], Any]]:
    """Returns the whole name of what a condition is about, and a function that reads it from a run."""
    if name in LABELS:
        return name, LABELS[name]
    if any(name in entry.metrics for entry in entries):
        raise UsageError(f"--where: {name} is a metric, not a setting", f"the list is ordered by it: --sort {name}")
    key = key_of(name, entries, "--where")
    return key, lambda entry: value_of(entry, key)


def _is_ordered(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and VERSION.match(value) is not None)


def _comparable(value: Any, asked: str) -> tuple[Any, Any]:
    """Returns the value of a setting and the limit for it: as numbers, or for text as versions.

    A version counts to as many places as the limit has, so that 2.13.0+cpu is not above 2.13.
    """
    number = _number(asked)
    if isinstance(value, int | float) and number is not None:
        return value, number
    limit = _version(asked)
    found = _version(str(value))
    return (*found, *[0] * len(limit))[: len(limit)], limit


def _version(text: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with."""
    match = VERSION.match(text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _equals(value: Any, asked: str) -> bool:
    """Tells whether the text stands for a value; it may be a pattern with `*`."""
    if value is None:
        return asked.lower() in ("null", "none", "")
    if isinstance(value, bool):
        return asked.lower() == str(value).lower()
    if isinstance(value, int | float):
        return value == _number(asked)
    text = str(value)
    if fnmatchcase(text, asked) or (COMMIT.fullmatch(text) and len(asked) >= SHORTEST and text.startswith(asked)):
        return True
    return bool(WHOLE_VERSION.fullmatch(asked) and VERSION.match(text)) and _comparable(text, asked)[0] == _version(
        asked
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
