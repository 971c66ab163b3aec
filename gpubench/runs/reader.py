"""Reads a run directory: each part once, when it is first asked for, tolerating damaged files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError
from gpubench.events import Sample, Span
from gpubench.findings import Findings
from gpubench.foreign_files import BadLines
from gpubench.runs import configuration
from gpubench.runs.directory import (
    CONFIG,
    ENVIRONMENT,
    FINDINGS,
    PROFILE,
    RUN,
    SAMPLES,
    SCHEMA_VERSION,
    STEPS,
    SUMMARY,
    TELEMETRY,
    TIMELINE,
    RunRecord,
    Versioned,
    status_of,
)
from gpubench.runs.steps import StepTable, read_steps
from gpubench.runs.summary import Summary
from gpubench.settings.keys import flatten
from gpubench.telemetry import TelemetrySample, of_gpus
from gpubench.trace.profile import Profile

EXPECTED = "give results/<experiment>/<run_id>"
DAMAGED = "restore it from a copy, or measure again"

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run directory. `problems` lists what could not be read, by file and line, and grows as more is read."""

    path: Path
    record: RunRecord
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Reads run.json. Raises RunDirectoryError if `path` is not a run directory, or is from a newer gpubench."""
        if not path.is_dir():
            raise RunDirectoryError(f"{path} is not a run directory", EXPECTED)
        try:
            content = foreign_files.content(path / RUN)
            version = msgspec.json.decode(content, type=Versioned).schema_version
            if version > SCHEMA_VERSION:
                raise RunDirectoryError(
                    f"{path / RUN} has schema version {version}, newer than {SCHEMA_VERSION}", "upgrade gpubench"
                )
            return cls(path, msgspec.json.decode(content, type=RunRecord))
        except FileNotFoundError:
            raise RunDirectoryError(f"{path} is not a run directory: it has no {RUN}", EXPECTED) from None
        except OSError as error:
            raise RunDirectoryError(f"{path / RUN} cannot be read: {error.strerror}", EXPECTED) from None
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path / RUN} is damaged: {error}", DAMAGED) from None

    @property
    def status(self) -> str:
        """The recorded status, or "interrupted" for a running run whose host process no longer exists."""
        return status_of(self.record)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The settings by dot-key, as the command line, the files and gpubench gave them; empty if unreadable."""
        if self.record.settings is not None:
            return flatten(self.record.settings)
        return self._by_key(CONFIG, configuration.settings)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dot-key, those that a program decided itself with its values; empty if unreadable."""
        return self.record.with_observed(self.given)

    @cached_property
    def chosen(self) -> frozenset[str]:
        """The dot-keys of the settings that gpubench chose."""
        if self.record.settings is not None:
            return frozenset(self.record.chosen)
        try:
            return configuration.chosen(foreign_files.content(self.path / CONFIG))
        except OSError:
            return frozenset()

    @cached_property
    def environment(self) -> dict[str, Any]:
        """environment.json by dot-key; empty if it cannot be read."""
        return self._by_key(ENVIRONMENT, _environment)

    @cached_property
    def workload(self) -> dict[str, Any]:
        """Facts of the model that ran, such as parameters and sample_shape; empty if not recorded."""
        return flatten(self.record.workload or {})

    @cached_property
    def summary(self) -> Summary | None:
        """The summary; None if there is none. Raises RunDirectoryError if it cannot be read."""
        return self.required(SUMMARY, Summary)

    @cached_property
    def steps(self) -> StepTable:
        """All recorded steps, warm-up included."""
        return read_steps(self.path / STEPS, self.problems)

    @cached_property
    def telemetry(self) -> list[TelemetrySample]:
        """The telemetry samples in order of time, with the GPUs that the ranks used; empty if there are none."""
        samples = sorted(self.lines(TELEMETRY, TelemetrySample), key=lambda sample: sample.time)
        return samples if self.record.gpus is None else of_gpus(samples, self.record.gpus)

    @cached_property
    def spans(self) -> list[Span]:
        """The spans of a pipeline's ranks in order of time; empty if there are none."""
        return sorted(self.lines(TIMELINE, Span), key=lambda span: span.time)

    @cached_property
    def samples(self) -> list[Sample]:
        """The finished samples of a pipeline, as recorded; empty if there are none."""
        return list(self.lines(SAMPLES, Sample))

    @cached_property
    def findings(self) -> Findings | None:
        """The findings of the run; None if it was not diagnosed."""
        return self.optional(FINDINGS, Findings)

    @cached_property
    def profile(self) -> Profile | None:
        """The profile from the run's traces; None if there are none."""
        return self.optional(PROFILE, Profile)

    def required(self, name: str, type_: type[T], hint: str = DAMAGED) -> T | None:
        """Returns a document, or None if there is no such file.

        Raises RunDirectoryError with `hint` for one that cannot be read.
        """
        path = self.path / name
        try:
            return msgspec.json.decode(foreign_files.content(path), type=type_)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", hint) from None
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}", hint) from None

    def optional(
        self, name: str, type_: type[T], impossible: Callable[[T], Iterator[str]] = lambda _: iter(())
    ) -> T | None:
        """Returns a document that only some runs have, or None.

        One that cannot be read is added to `problems`, as is one in which `impossible` finds an impossible value.
        """
        path = self.path / name
        if not path.is_file():
            return None
        try:
            found = msgspec.json.decode(foreign_files.content(path), type=type_)
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{path} cannot be read: {' '.join(str(error).split())}")
            return None
        for problem in impossible(found):
            self.problems.append(f"{path} is damaged: {problem}")
            return None
        return found

    def lines(self, name: str, type_: type[T]) -> Iterator[T]:
        """Yields the records of a line file. An invalid line is added to `problems` and skipped."""
        file = self.path / name
        if not file.exists():
            return
        decoder = msgspec.json.Decoder(type_)
        bad = BadLines(file, self.problems)
        try:
            for number, line in enumerate(foreign_files.lines(file), 1):
                try:
                    yield decoder.decode(line)
                except (ValueError, RecursionError) as error:
                    bad.add(number, error)
        except OSError as error:
            self.problems.append(f"{file} cannot be read: {error.strerror}")
        bad.close()

    def _by_key(self, name: str, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        """Returns a document by dot-key. If it cannot be read, it is empty, and `problems` says so."""
        path = self.path / name
        try:
            return dict(parse(foreign_files.content(path)))
        except FileNotFoundError:
            self.problems.append(f"{path} is missing")
        except OSError as error:
            self.problems.append(f"{path} cannot be read: {error.strerror}")
        except (ValueError, TypeError, RecursionError) as error:
            self.problems.append(f"{path} cannot be read: {' '.join(str(error).split())}")
        return {}


@lru_cache(maxsize=256)  # most runs of a group have equal environments
def _environment(text: bytes) -> dict[str, Any]:
    return flatten(msgspec.json.decode(text, type=dict[str, Any]))
