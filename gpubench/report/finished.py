"""The JSON document of a finished run, read from its directory."""

from pathlib import Path
from typing import Any

import msgspec

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError
from gpubench.findings import Findings
from gpubench.report import frame
from gpubench.runs import directory
from gpubench.runs.directory import FINDINGS, PROFILE, SUMMARY, Run
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
    summary = _read(path / SUMMARY, Summary) or msgspec.to_builtins(NOTHING)
    named = {"profile": _read(path / PROFILE, Profile), "findings": _read(path / FINDINGS, Findings)}
    documents = {name: found for name, found in named.items() if found}
    return directory.to_json(frame.document([frame.of_run(path, run.status, run.record.error, summary, documents)]))


def _read(path: Path, kind: type[msgspec.Struct]) -> dict[str, Any] | None:
    """Return one document without its version; None if the file does not exist."""
    try:
        content = foreign_files.content(path)
        msgspec.json.decode(content, type=kind)
        found: dict[str, Any] = msgspec.json.decode(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", HINT) from None
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}", HINT) from None
    found.pop("schema_version", None)
    return found
