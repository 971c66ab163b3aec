"""The JSON document of a finished run, read from its directory."""

from pathlib import Path
from typing import Any

import msgspec

from gpubench.findings import Findings
from gpubench.report import frame
from gpubench.runs import directory
from gpubench.runs.directory import FINDINGS, PROFILE, SUMMARY
from gpubench.runs.reader import Run
from gpubench.runs.summary import Summary
from gpubench.trace.profile import Profile

NOTHING = Summary([], [], [], None, None, None, {}, [])
HINT = "restore it from a copy, or leave --json out"


def to_json(path: Path) -> str:
    """Return the document that the run printed, or would have printed, when it ended.

    The summary is empty for a run that was killed before its summary was written. Raises RunDirectoryError for a
    document that cannot be read.
    """
    run = Run.open(path)
    summary = _as_written(run, SUMMARY, Summary) or msgspec.to_builtins(NOTHING)
    named = {"profile": _as_written(run, PROFILE, Profile), "findings": _as_written(run, FINDINGS, Findings)}
    documents = {name: found for name, found in named.items() if found}
    return directory.to_json(frame.document([frame.of_run(path, run.status, run.record.error, summary, documents)]))


def _as_written(run: Run, name: str, kind: type[msgspec.Struct]) -> dict[str, Any] | None:
    """Return one document without its version; None if the file does not exist.

    It is checked against its type but not converted, because 1 would become 1.0.
    """
    if run.required(name, kind, HINT) is None:
        return None
    found = run.required(name, dict[str, Any], HINT) or {}
    found.pop("schema_version", None)
    return found
