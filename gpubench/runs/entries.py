"""What a listing says of a run, or of a search by tune, read from the files of its folder.

Much less is read than `reader.Run` and `tuning.result` read, because a listing reads thousands of folders.
"""

import os
import re
from collections.abc import Callable, Container, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpubench import foreign_files
from gpubench.foreign_files import SEARCH
from gpubench.metrics import Better
from gpubench.registry import JUDGE, TUNE, kind_of
from gpubench.runs import configuration
from gpubench.runs.directory import (
    COMPARISON,
    COMPLETED,
    CONFIG,
    DECISION,
    RUN,
    SCHEMA_VERSION,
    SUMMARY,
    RunRecord,
    Versioned,
)
from gpubench.settings.keys import VARIABLES, assignment, flatten, label

RUN_ID = re.compile(r"\d{8}-\d{6}-\d{3}-[0-9a-f]{4}")  # as directory.create_directory makes them
DAMAGED = "damaged"
"""The status of a run whose run.json cannot be read."""
SPEEDUP = "speedup"
"""The proved gain of a search: the throughput with the best settings divided by that without them."""
PartOf = Literal["search", "trial"] | None
"""What a run is only a part of: a search by tune, or the trial of another run's fix."""


class EntryFigure(NamedTuple):
    """A metric of a run, with its 95 % interval, whose ends are None after a single repeat."""

    estimate: float
    low: float | None
    high: float | None
    unit: str
    better: Better | None


class Recorded(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The part of run.json that a listing needs, with the status as readers report it."""

    experiment: str
    run_id: str
    command: str
    """The command that measures, which is that of a `RunKind`; "" if it is unknown."""
    argv: list[str]
    status: str
    """As `directory.status_of` reports it, or DAMAGED."""
    started: str
    """The start in UTC, ISO 8601; "" if it is unknown. `ended` has the same format."""
    ended: str | None
    host: str
    git: dict[str, Any] | None
    world_size: int
    pid: int
    pid_created: float
    error: str | None
    """The message of the error that ended the run."""


class _Details(msgspec.Struct, frozen=True, array_like=True):
    metrics: dict[str, EntryFigure]
    settings: dict[str, Any]
    environment: dict[str, Any]
    left_open: list[str] = []
    variables: dict[str, str] | None = None


_DETAILS = msgspec.msgpack.Decoder(_Details)


def _packed(details: _Details) -> bytes:
    try:
        return msgspec.msgpack.encode(details)
    except OverflowError:  # msgpack has no integers of more than 64 bits, which JSON may have
        settings, environment = (
            {key: str(value) for key, value in found.items()} for found in (details.settings, details.environment)
        )
        return msgspec.msgpack.encode(msgspec.structs.replace(details, settings=settings, environment=environment))


class Compared(msgspec.Struct, frozen=True, array_like=True):
    """What comparison.json, or decision.json, says of a run and the one that it was interleaved with."""

    baseline: str
    """The id of the other run."""
    labels: tuple[str, str]
    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    by: str = "compare"
    """The command that says it."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """One run of a results folder, or a search by tune, as a listing needs it."""

    folder: str
    """The path of the run directory, as text."""
    part_of: PartOf
    record: Recorded
    name: str | None
    tags: tuple[str, ...]
    model: str
    """What was run: a model, or the command line of a program; "?" if it is unknown."""
    device: str | None
    """The name of the GPU, or of the CPU if the run used no GPU; None if it is unknown."""
    variant: str
    """What tells it from other runs of the same work, such as "workers=2"; "" if nothing does."""
    others: tuple[str, ...]
    """The ids of the runs that it was interleaved with, as the sides of one comparison."""
    compared: Compared | None
    """The comparison of which it is the candidate; None if it is none."""
    measured: bool
    """Whether the run has results."""
    reference: float | None
    """How often a second the reference workload ran, which shows the speed of the machine itself."""
    problem: str | None
    """Why run.json or summary.json cannot be read."""
    packed: bytes
    """The details, which are decoded once they are asked for."""

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def run_id(self) -> str:
        """The name of the folder, which is the run's id unless somebody has renamed it."""
        return os.path.basename(self.folder)  # noqa: PTH119 - of thousands of runs

    @property
    def is_search(self) -> bool:
        """Whether it is a search by tune, whose folder holds the directories of its runs."""
        return self.record.command == TUNE

    @property
    def command(self) -> str:
        """The subcommand of gpubench that the user ran, also for a program."""
        return kind_of(self.record.command).run_by

    @property
    def metrics(self) -> dict[str, EntryFigure]:
        """The metrics of summary.json by name."""
        return self._details.metrics

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by dot-key, as `reader.Run.settings` has them; empty if they cannot be read."""
        return self._details.settings

    @property
    def left_open(self) -> frozenset[str]:
        """The dot-keys of the settings whose value the user left to gpubench or to the program."""
        return frozenset(self._details.left_open)

    @property
    def variables(self) -> dict[str, str] | None:
        """The environment variables that the user had set, of those that change how work is done; None if unknown."""
        return self._details.variables

    @property
    def environment(self) -> dict[str, Any]:
        """The facts of the environment in summary.json, as `summary.Environment` names them."""
        return self._details.environment

    @cached_property
    def _details(self) -> _Details:
        try:
            return _DETAILS.decode(self.packed)
        except (ValueError, RecursionError):  # somebody has changed the cache
            return _DETAILS.decode(read(self.folder).packed)


class _Metric(msgspec.Struct):
    name: str
    unit: str
    better: Better | None
    estimate: float
    interval: tuple[float, float] | None

    @property
    def figure(self) -> EntryFigure:
        low, high = self.interval or (None, None)
        return EntryFigure(self.estimate, low, high, self.unit, self.better)


class _Summary(msgspec.Struct):
    """The part of summary.json that a listing needs."""

    metrics: list[_Metric] = []
    steady: list[Any] = []
    environment: dict[str, Any] | None = None


class _Pair(msgspec.Struct):
    """The part of comparison.json that a listing needs."""

    baseline: str
    labels: tuple[str, str]
    verdict: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def compared(self) -> Compared:
        low, high = self.interval or (None, None)
        return Compared(self.baseline, self.labels, self.verdict, self.ratio, low, high)


class _Version(msgspec.Struct):
    label: str


class _Decision(msgspec.Struct):
    """The part of decision.json that a listing needs."""

    decision: str
    base: _Version
    edited: _Version
    runs: list[tuple[str, str]]
    gain: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def compared(self) -> Compared:
        low, high = self.interval or (None, None)
        labels = (self.base.label, self.edited.label)
        return Compared(Path(self.runs[-1][0]).name, labels, self.decision, self.gain, low, high, JUDGE)


class _Gain(NamedTuple):
    ratio: float
    low: float
    high: float


class _Conclusion(msgspec.Struct):
    gain: _Gain | None = None


class _Search(msgspec.Struct, kw_only=True):
    """The part of tune.json that a listing needs."""

    status: str
    argv: list[str]
    started: str
    settings: dict[str, Any]
    device: str | None = None
    conclusion: _Conclusion | None = None
    keep: dict[str, Any] = {}
    error: dict[str, str | None] | None = None


def _read_search(path: Path) -> Entry:
    problems: list[str] = []
    found: _Search | None = _attempt(path / SEARCH, msgspec.json.Decoder(_Search).decode, problems)
    experiment = RUN_ID.sub("", path.name).rstrip("-")
    settings = found.settings if found else {}
    gain = found.conclusion.gain if found and found.conclusion and found.keep else None
    metrics = {SPEEDUP: EntryFigure(gain.ratio, gain.low, gain.high, "x", "higher")} if gain else {}
    record = msgspec.structs.replace(_unreadable(path), command=TUNE, experiment=experiment or TUNE)
    if found:
        error = (found.error or {}).get("message")
        record = msgspec.structs.replace(
            record, argv=found.argv, status=found.status, started=found.started, error=error
        )
    return Entry(
        folder=str(path),
        part_of=None,
        record=record,
        name=None,
        tags=(),
        model=_model(TUNE, settings, {}),
        variant="",
        others=(),
        compared=None,
        device=found.device if found else None,
        measured=False,
        reference=None,
        problem=problems[0] if problems else None,
        packed=_packed(_Details(metrics, settings, {})),
    )


def read(folder: str) -> Entry:
    """Reads a run directory, or the folder of a search. What cannot be read is left empty, and named as the problem."""
    path = Path(folder)
    if not RUN_ID.fullmatch(path.name) and (path / SEARCH).exists() and not (path / RUN).exists():
        return _read_search(path)
    problems: list[str] = []
    known = _attempt(path / RUN, _record, problems)
    record = _recorded(known) if known else _unreadable(path)
    decode = msgspec.json.Decoder(_Summary).decode
    summary = _attempt(path / SUMMARY, decode, problems, is_due=record.status == COMPLETED) or _Summary()
    settings = known.settings if known else None
    if settings is None:
        settings = _attempt(path / CONFIG, configuration.settings, []) or {}
    given = flatten(settings)
    settings = known.with_observed(given) if known else given
    left_open = [key for key, value in given.items() if value is None or (known and key in known.chosen)]
    pair: _Pair | _Decision | None = None
    if known:
        pair = _attempt(path / DECISION, _decision, [], is_due=False)
        pair = pair or _attempt(path / COMPARISON, msgspec.json.Decoder(_Pair).decode, [], is_due=False)
    variables = None
    if known and known.asked is not None:
        variables = {name: str(value) for name, value in known.asked.items() if name not in given}
    workload = (known.workload if known else None) or {}
    environment = summary.environment or {}
    metrics = {one.name: one.figure for one in summary.metrics}
    reference = metrics.get("yardstick_time")
    return Entry(
        folder=folder,
        part_of=None,
        record=record,
        name=known.name if known else None,
        tags=tuple(known.tags) if known else (),
        model=_model(record.command, settings, workload),
        variant=_variant(known) if known else "",
        others=tuple(known.interleaved_with) if known else (),
        compared=pair.compared if pair else None,
        device=environment.get("device") or settings.get("device") or workload.get("device"),
        measured=kind_of(record.command).is_measured(metrics=bool(metrics), steady=bool(summary.steady)),
        reference=1 / reference.estimate if reference and reference.estimate > 0 else None,
        problem=problems[0] if problems else None,
        packed=_packed(_Details(metrics, settings, environment, left_open, variables)),
    )


def _variant(record: RunRecord) -> str:
    """Returns the label of a run, and for a side of a comparison also what was asked of both sides."""
    found = record.variant or ""
    if not record.interleaved_with:
        return found
    asked, named = record.asked or {}, f" {found} "
    common = {key: value for key, value in asked.items() if f" {assignment(key, value)} " not in named}
    return ", ".join(filter(None, [found, label(common)]))


def common_variables(entries: Iterable[Entry]) -> frozenset[str]:
    """Returns the assignments of environment variables that all runs have, and that tell none of them apart."""
    of_runs = [one.variant.replace(",", "").split() for one in entries if not one.is_search]
    found = [{word for word in words if word.partition("=")[0] in VARIABLES} for words in of_runs]
    return frozenset(set.intersection(*found)) if found else frozenset()


def without(variant: str, words: Container[str]) -> str:
    """Returns a variant without some of its words."""
    parts = (" ".join(word for word in part.split(" ") if word not in words) for part in variant.split(", "))
    return ", ".join(filter(None, parts))


def _attempt(path: Path, parse: Callable[[bytes], Any], problems: list[str], *, is_due: bool = True) -> Any:
    """Returns the parsed file; None if it cannot be read, which is added to the problems.

    A missing file is a problem only if it `is_due`.
    """
    try:
        return parse(foreign_files.content(path))
    except FileNotFoundError:
        problems += [f"{path} is missing"] if is_due else []
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    except (ValueError, TypeError, RecursionError) as error:
        problems.append(f"{path} is damaged: {' '.join(str(error).split())}")
    return None


def _record(content: bytes) -> RunRecord:
    version = msgspec.json.decode(content, type=Versioned).schema_version
    if version > SCHEMA_VERSION:
        raise ValueError(f"schema version {version} is newer than {SCHEMA_VERSION}: upgrade gpubench")
    return msgspec.json.decode(content, type=RunRecord)


def _decision(content: bytes) -> _Decision:
    found = msgspec.json.decode(content, type=_Decision)
    if not found.runs:
        raise ValueError("it names no runs")
    return found


def _recorded(record: RunRecord) -> Recorded:
    return Recorded(
        experiment=record.experiment,
        run_id=record.run_id,
        command=record.command,
        argv=record.argv,
        status=record.status,
        started=record.started,
        ended=record.ended,
        host=record.host,
        git=record.git,
        world_size=record.world_size,
        pid=record.pid,
        pid_created=record.pid_created,
        error=(record.error or {}).get("message"),
    )


def _unreadable(path: Path) -> Recorded:
    """Returns what the path tells of a run whose run.json cannot be read."""
    day, time, thousandths = (*path.name.split("-"), "", "", "")[:3] if RUN_ID.fullmatch(path.name) else ("",) * 3
    date = f"{day[:4]}-{day[4:6]}-{day[6:]}"
    return Recorded(
        experiment=path.parent.name,
        run_id=path.name,
        command="",
        argv=[],
        status=DAMAGED,
        started=f"{date}T{time[:2]}:{time[2:4]}:{time[4:]}.{thousandths}Z" if day else "",
        ended=None,
        host="",
        git=None,
        world_size=1,
        pid=0,
        pid_created=0.0,
        error=None,
    )


def _model(command: str, settings: dict[str, Any], workload: dict[str, Any]) -> str:
    """Returns a short name of the model or program of a run, or a question mark."""
    named = str(kind_of(command).model(settings, workload) or "?")
    if "program.command" in settings:
        program, _, arguments = named.partition(" ")
        return f"{os.path.basename(program)} {arguments}".strip()  # noqa: PTH119
    return os.path.basename(named.rstrip("/")) or named  # noqa: PTH119
