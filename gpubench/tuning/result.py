"""The content of tune.json: what was tried, every run with its result, and what follows from them."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gpubench import foreign_files
from gpubench.compare.losses import DEFAULT, Margin, Outcome
from gpubench.diagnosis.case import ReadyData
from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.events import Rate, Time
from gpubench.patches.result import ProvedPatch
from gpubench.runs.directory import write_document
from gpubench.tuning.combination import Combination, Runs
from gpubench.tuning.conclusion import Conclusion
from gpubench.tuning.durations import Limit
from gpubench.tuning.knowledge import Stage
from gpubench.tuning.treatments import Treatment, Untried

Status = Literal["running", "completed", "interrupted", "failed"]
VERSION = 1
LOOK_RUNS = 2
"""The runs of the first look."""
FILE = foreign_files.SEARCH
LOCK = foreign_files.SEARCH_LOCK


Bytes = Annotated[float, Meta(ge=0, le=1 << 63)]


class Loss(Struct, frozen=True):
    """The judgement of a combination's losses against those of the baseline."""

    outcome: Outcome
    reason: str


class SearchRun(Struct, frozen=True, kw_only=True):
    """One run of a combination: a fresh process, which is a repeat in the run directory `path`."""

    combination: Combination
    """The level of each treatment; 0 is the present value."""
    path: str | None
    """The name of the run directory; None if the combination was refused before it was started."""
    throughput: Rate | None
    """Samples per second; None if the run failed."""
    peak: Bytes | None = None
    """The peak memory in bytes: reserved on a GPU, resident on a CPU; None if it is unknown."""
    error: str = ""
    """Why it does not run."""
    rejected: str = ""
    """Why it must not be kept although it runs."""
    seconds: Time = 0.0
    """The time that it took, with its share of the search's own; 0 if it was not started."""


class RunBlock(Struct, frozen=True, kw_only=True):
    """Runs that were made one after the other in a random order."""

    stage: Stage
    why: str
    limit: Limit
    """What the search could still use when the block was planned."""
    runs: list[SearchRun]


class Tuning(Struct, frozen=True, kw_only=True):
    """The state of a search, which is written after every block, so that --resume continues it."""

    schema_version: int = VERSION
    status: Status
    command: str
    """The command that runs the trials: train-bench, or program for one of the user."""
    argv: list[str]
    started: str
    """UTC, ISO 8601."""
    seconds: Time
    """The time that the search has taken so far, its first look included."""
    look_seconds: Time = 0.0
    """The time of the first look; 0 if it is unknown."""
    settings: dict[str, Any]
    """The complete settings of the baseline, by dot-key."""
    workload: dict[str, Any] = {}
    """What was found of the program or the model in the first run, as in run.json."""
    world_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """The ranks of the first run."""
    device: str | None = None
    """The name of the device."""
    ready_data: ReadyData | None = None
    """What `gpubench loader` has measured of the program with data that is always ready; None if it has not."""
    precision: str | None
    """The type in which the baseline computes, which decides how large rounding errors are; None if it is unknown."""
    treatments: list[Treatment]
    untried: list[Untried]
    most_peak: Bytes | None
    """The memory limit in bytes; None without one."""
    budget: Time | None
    """The time limit in seconds; None without one."""
    most_runs: Runs | None
    """The user's limit of the number of runs, besides the first look; None without one."""
    loss_margin: Margin = DEFAULT
    """The largest change of the final loss that does not matter."""
    look: str | None
    """The name of the run directory with the profile that the treatments were chosen by."""
    blocks: list[RunBlock] = []
    losses: dict[str, Loss] = {}
    """The judgement of each combination whose losses were judged, by its levels, as "0,1,0"."""
    codes: dict[str, str] = {}
    """For a program of the user, the code that does the same as each level, by "name level"."""
    places: dict[str, str] = {}
    """Where in a program of the user its settings belong, as file and line; see `gpubench.settings.field.Place`."""
    optimizers: dict[str, list[str]] = {}
    """The lines that make its optimizers, by the name of the class."""
    device_type: str | None = None
    """The type of its device."""
    patch: ProvedPatch | None = None
    """The patch of the program that was made of the settings to keep; None without one."""
    conclusion: Conclusion | None = None
    keep: dict[str, Any] = {}
    """The settings to keep, by dot-key; empty if no change is proved to be faster."""
    error: dict[str, str | None] | None = None

    @property
    def runs(self) -> int:
        """The number of runs so far, besides the first look."""
        return sum(len(block.runs) for block in self.blocks)

    @property
    def seconds_a_run(self) -> float:
        """The mean time of a run so far; of one of the first look while there is none."""
        return (self.seconds - self.look_seconds) / self.runs if self.runs else self.look_seconds / LOOK_RUNS

    def alone(self, name: str, level: int) -> tuple[int, ...]:
        """Returns the combination with one level of the treatment `name` and nothing else."""
        return tuple(level if treatment.name == name else 0 for treatment in self.treatments)

    def has_run(self, name: str, level: int) -> bool:
        """Tells whether any run had this level of the treatment `name`, with or without others."""
        place = [treatment.name for treatment in self.treatments].index(name)
        return any(run.combination[place] == level for block in self.blocks for run in block.runs)

    def peak(self, combination: tuple[int, ...]) -> float | None:
        """Returns the median of the peak memory of a combination's runs in bytes; None if none is known."""
        peaks = [run.peak for block in self.blocks for run in block.runs if run.combination == combination and run.peak]
        return median(peaks) if peaks else None

    def of_level(self, name: str, level: int) -> dict[str, Any]:
        """Returns the settings of one level of the treatment `name`, by dot-key."""
        return self.changes(self.alone(name, level))

    def changes(self, combination: tuple[int, ...]) -> dict[str, Any]:
        """Returns the settings of a combination that differ from the baseline, by dot-key."""
        found: dict[str, Any] = {}
        for treatment, level in zip(self.treatments, combination, strict=True):
            if level:
                found |= treatment.levels[level - 1]
        return found


def named(combination: tuple[int, ...]) -> str:
    """Returns the key of a combination in `Tuning.losses`."""
    return ",".join(map(str, combination))


def save(folder: Path, tuning: Tuning) -> None:
    """Writes tune.json. Raises RunFailed if that fails."""
    try:
        write_document(folder / FILE, tuning)
    except OSError as error:
        raise RunFailed(f"cannot write {folder / FILE}: {error.strerror}", "free some disk space") from None


def claim(folder: Path) -> IO[bytes]:
    """Keeps other processes from continuing the same search, until the returned file is closed.

    Raises RunDirectoryError if another process has the search, or if the lock cannot be taken.
    """
    try:
        return foreign_files.lock(folder / LOCK)
    except BlockingIOError:
        raise RunDirectoryError(f"another process searches in {folder}", "wait until it ends") from None
    except OSError as error:
        reason = f"cannot lock {folder / LOCK}: {error.strerror}"
        raise RunDirectoryError(reason, "remove it, or check who owns the folder") from None


def read(folder: Path) -> Tuning:
    """Reads tune.json. Raises RunDirectoryError if the folder has none, or one of another format."""
    path = folder / FILE
    try:
        found: Tuning = msgspec.json.decode(foreign_files.content(path), type=Tuning)
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirectoryError(f"{folder} has no {FILE}", "name the directory of a search") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", "start a new search") from None
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}", "start a new search") from None
    if found.schema_version > VERSION:
        raise RunDirectoryError(f"{path} is of a newer version of gpubench", "update gpubench")
    for problem in contradictions(found):
        raise RunDirectoryError(f"{path} cannot be read: {problem}", "start a new search")
    return found


def contradictions(tuning: Tuning) -> Iterator[str]:
    """Yields the combinations and the levels in a search that are not those of its treatments."""
    most = {treatment.name: len(treatment.levels) for treatment in tuning.treatments}
    if len(most) < len(tuning.treatments):
        yield "two of its treatments have the same name"
    found = tuning.conclusion
    combinations = [run.combination for block in tuning.blocks for run in block.runs]
    combinations += [found.best, *(one.combination for one in found.tried)] if found else []
    for one in combinations:
        if len(one) != len(most) or any(level > limit for level, limit in zip(one, most.values(), strict=True)):
            yield f"it has no combination {named(one)}"
    if not found:
        return
    levels = [(one.factor, one.level) for one in found.contributions]
    levels += [(one.factor, one.level) for one in found.ladder]
    levels += [(one.factor, one.level) for one in found.dropped]
    for pair in (*found.pairs, *found.interactions):
        if len(pair.factors) != len(pair.levels) or len(pair.factors) < 2:
            yield "it has an interaction of other levels than factors"
        levels += zip(pair.factors, pair.levels, strict=False)
    for name, level in levels:
        if not 1 <= level <= most.get(name, 0):
            yield f"it has no level {level} of {name}"
