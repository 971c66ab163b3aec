"""The ledger of judged edits: a file with one line of JSON for each, and what they have gained together."""

import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gpubench import foreign_files
from gpubench.compare.decision import Answer, Decision, Factor, Fraction, Interval, Rounds
from gpubench.compare.sequential import factor
from gpubench.errors import RunDirectoryError, RunFailed
from gpubench.runs.directory import SCHEMA_VERSION

BEGINNING = b'{"schema_version":'
"""How each line begins."""

log = logging.getLogger("gpubench.judge")


class JudgedEdit(Struct, frozen=True, kw_only=True):
    """One line of a ledger. Gains are factors, as in a `Decision`."""

    schema_version: Annotated[int, Meta(ge=1, le=1 << 31)]
    decision: Answer
    answer: str
    metric: str
    margin: Fraction
    gain: Factor | None
    interval: Interval | None
    rounds: Rounds
    reasons: list[str]
    base: str | None
    """The commit of the base; None if it is unknown."""
    commit: str | None
    """The commit that the edited version had checked out."""
    subject: str | None
    edit: str | None
    """The digest of what the edited version had beyond its commit; "" for nothing."""
    program: str
    run: str
    """The run directory of the edited version."""
    started: str
    """UTC, ISO 8601. A judgement that was resumed has several lines with one start, of which the last one counts."""


class Together(Struct, frozen=True):
    """What the kept edits have gained together."""

    edits: list[JudgedEdit]
    """The kept edits, each judged against the ones before it."""
    gain: float
    """The product of their gains."""
    interval: tuple[float, float] | None
    """Its 95 % interval: their distances from the gains, on the logarithmic scale, are added as squares."""
    whole: JudgedEdit | None
    """The last judgement of all of them at once against the base of the first one; None if there is none."""


def line_of(decision: Decision) -> JudgedEdit:
    return JudgedEdit(
        schema_version=SCHEMA_VERSION,
        decision=decision.decision,
        answer=decision.answer,
        metric=decision.metric,
        margin=decision.margin,
        gain=decision.gain,
        interval=decision.interval,
        rounds=decision.rounds,
        reasons=decision.reasons,
        base=decision.base.commit,
        commit=decision.edited.commit,
        subject=decision.edited.subject,
        edit=decision.edited.edit,
        program=decision.edited.command,
        run=decision.runs[-1][1],
        started=decision.started,
    )


def add(path: Path, edit: JudgedEdit) -> None:
    """Adds a line to the ledger, in place of a torn one at its end; makes the file if there is none.

    Raises RunFailed if that fails.
    """
    try:
        with foreign_files.appended(path) as file:
            last = next(iter(deque(foreign_files.lines(path), maxlen=1)), b"")
            if _is_torn(last):
                file.truncate(os.fstat(file.fileno()).st_size - len(last))
            elif last and not last.endswith(b"\n"):
                file.write(b"\n")
            file.write(msgspec.json.encode(edit) + b"\n")
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}", "give a file that can be written") from None


def read(path: Path) -> list[JudgedEdit]:
    """Returns the judged edits in their order. A torn line at the end of the file is left out, with a warning.

    Raises RunDirectoryError if the file is not a ledger, or of a newer version.
    """
    found: dict[tuple[str, str | None], JudgedEdit] = {}
    try:
        for number, line in enumerate(foreign_files.lines(path), 1):
            if _is_torn(line):
                log.warning("%s:%d is left out, as it was not written to its end", path, number)
            if _is_torn(line) or not line.strip():
                continue
            edit = msgspec.json.decode(line, type=JudgedEdit)
            if edit.schema_version > SCHEMA_VERSION:
                raise RunDirectoryError(f"{path}:{number} is of a newer version of gpubench", "update gpubench")
            found[edit.started, edit.edit] = edit
    except FileNotFoundError:
        raise RunDirectoryError(
            f"there is no ledger {path}", "gpubench judge --ledger FILE -- PROGRAM writes it"
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", "name another file") from None
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path}:{number} is not a judged edit: {' '.join(str(error).split())}",
            "name a ledger that judge has written",
        ) from None
    return list(found.values())


def _is_torn(line: bytes) -> bool:
    """Whether a line is the beginning of one that was not written to its end, as on a full disk."""
    if not line or line.endswith((b"\n", b"}")):  # an editor may have removed the end of the last line
        return False
    return line.startswith(BEGINNING) or BEGINNING.startswith(line)


def together(edits: Sequence[JudgedEdit]) -> Together | None:
    """Returns what the kept edits with the metric of the last one have gained together; None if none was kept.

    An edit is judged against its base, which has the kept ones before it. One that is judged against the base of an
    earlier one contains that one and all since, and takes their place if it is kept.
    """
    kept: list[JudgedEdit] = []
    whole: JudgedEdit | None = None
    metric = next((edit.metric for edit in reversed(edits) if edit.decision == "keep"), None)
    for edit in edits:
        if edit.metric != metric or edit.gain is None:
            continue
        place = next((place for place, one in enumerate(kept) if edit.base and one.base == edit.base), None)
        if place == 0 and len(kept) > 1:
            whole = edit  # the product stays, to be compared with it
        elif edit.decision == "keep":
            kept, whole = [*kept[:place], edit], None
    if not kept:
        return None
    gain = math.fsum(math.log(edit.gain or 1.0) for edit in kept)
    return Together(kept, factor(gain), _interval(kept, gain), whole)


def _interval(kept: Sequence[JudgedEdit], gain: float) -> tuple[float, float] | None:
    """Returns the interval of the product of the gains, whose logarithm is `gain`."""
    low = high = 0.0
    for edit in kept:
        if edit.interval is None or edit.gain is None:
            return None
        low += math.log(edit.gain / edit.interval[0]) ** 2
        high += math.log(edit.interval[1] / edit.gain) ** 2
    return factor(gain - math.sqrt(low)), factor(gain + math.sqrt(high))
