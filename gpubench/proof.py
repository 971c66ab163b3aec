"""Makes a patch of settings that were proved in a program, and runs the patched program beside that as it was.

Where there is time for it, the program with these settings from outside runs in the same rounds.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpubench import units
from gpubench.bench import Bench
from gpubench.compare.evidence import open_run
from gpubench.compare.losses import Margin
from gpubench.compare.result import Comparison
from gpubench.errors import GpubenchError, Interrupted
from gpubench.foreign_files import replace
from gpubench.gain import Gain
from gpubench.host.schedule import Outcome
from gpubench.machine import facts
from gpubench.patches.result import FILE, TEXT, PatchEdit, ProvedPatch
from gpubench.settings.keys import in_words
from gpubench.settings.loading import Configuration
from gpubench.settings.programs import CommandSettings

UNPROVED = "its own part of the gain is not proved"
ROUNDS, FEWEST = 6, 3
"""The runs of each version without a time limit, and at least: one has no interval, and two have a very wide one."""


@dataclass(frozen=True)
class ProvedSettings:
    """Settings by dot-key that are faster together, and what was measured of them in words."""

    changes: Mapping[str, Any]
    contribution: str


@dataclass(frozen=True)
class EditedFinding:
    """A finding that an edit of the source answers, and what was measured of the edit in words."""

    finding: str
    """The name of its rule."""
    lines: Sequence[str] = ()
    """The lines that it is about, as file:line; empty if they are not known."""
    contribution: str = ""


@dataclass(frozen=True)
class PatchedProgram:
    """A program with what a run of it has shown about its source."""

    command: CommandSettings
    source: Mapping[str, Any]
    """The `places`, `optimizers` and `device_type` of `Recorder.source`."""
    subject: str
    """What it is, in words."""


def make(
    parts: Sequence[ProvedSettings],
    program: PatchedProgram,
    folder: Path,
    findings: Sequence[EditedFinding] = (),
    file: str = FILE,
    unproved: Sequence[str] = (),
) -> ProvedPatch:
    """Writes a patch into a folder, and returns what it has; without an edit there is no file.

    `unproved` are the settings that were tried with those of the patch, and are not in it.
    Raises OSError if it cannot be written.
    """
    from gpubench.patches import by_finding, diff, text  # which load libcst
    from gpubench.patches.edits import Program, edited

    settings = {key: value for part in parts for key, value in part.changes.items()}
    contributions = {key: part.contribution for part in parts for key in part.changes}
    contributions |= {one.finding: one.contribution for one in findings}
    known = Program(
        program.command.directory or Path(),
        program.command.words,
        program.source.get("places", {}),
        program.source.get("optimizers", {}),
        program.source.get("device_type"),
    )
    patch = edited(settings, known)
    for one in findings:
        by_finding.add(patch, one.finding, one.lines, known)
    for name in (file, TEXT):
        (folder / name).unlink(missing_ok=True)
    edits = [
        PatchEdit(one.key, settings.get(one.key), one.file, one.line, contributions[one.key]) for one in patch.edits
    ]
    if edits:
        content = diff.written(patch.files, text.comments(edits), lambda name, lines: text.heading(edits, name, lines))
        replace(folder / file, content)
    changed = {name: diff.lines_changed(versions) for name, versions in patch.files.items()}
    left = patch.left | dict.fromkeys(unproved if edits else (), UNPROVED)
    return ProvedPatch(changed=changed, edits=edits, left=left)


def editable(findings: Sequence[str]) -> list[str]:
    """Those of the findings, by the names of their rules, that edits of the source may answer."""
    from gpubench.patches.by_finding import IDIOMS

    return [one for one in findings if one in IDIOMS]


def rounds_in(seconds: float | None, each: float, versions: int = 2) -> int:
    """The runs of each version for which there is time; 0 if there is too little. None is no limit."""
    fitting = ROUNDS if seconds is None else int(seconds / (versions * max(each, 1e-3)))
    return min(ROUNDS, fitting) if fitting >= FEWEST else 0


def prove(
    patch: ProvedPatch, sides: Sequence[Configuration[Any]], bench: Bench, until: float, margin: Margin | None
) -> ProvedPatch:
    """Runs the program as it was and as patched, interleaved, and adds to the patch what they show.

    `sides` are both complete configurations. A third one has the settings that the patch is made of: their gain is then
    that of the same rounds, with the same runs of the program as it was, so that both can be compared. What still runs
    at the time `until` is interrupted. Raises Interrupted if the user interrupts.
    """
    try:
        with bench.terminal.errors_only():
            outcomes = bench.run(sides, independent=True, until=until)
    except Interrupted:
        raise
    except GpubenchError as error:  # such as one of the copy; the settings are proved all the same
        return msgspec.structs.replace(patch, reason=error.message)
    stopped = next((one.error for one in outcomes if isinstance(one.error, Interrupted)), None)
    if stopped and time.monotonic() < until:
        raise stopped
    return judged(patch, outcomes, bench, margin)


def judged(patch: ProvedPatch, outcomes: Sequence[Outcome], bench: Bench, margin: Margin | None) -> ProvedPatch:
    """Adds to a patch what the runs of the program show: as it was, as patched, and with the settings if they ran."""
    before, after, *with_settings = outcomes
    runs = [one.recorder.writer.path.name for one in outcomes]
    found = msgspec.structs.replace(patch, runs=runs, rounds=min(one.recorder.completed() for one in outcomes))
    for one in with_settings:
        compared = _compared(before, one, bench, margin)
        found = msgspec.structs.replace(found, settings_gain=_gain(compared) if compared else None)
    comparison = _compared(before, after, bench, margin)
    if comparison is None:
        error = after.error or before.error
        return msgspec.structs.replace(found, reason=error.message if error else "no step was measured")
    gain, sameness, (verdict, *_) = _gain(comparison), comparison.sameness, comparison.verdicts
    refused = sameness.undecidable
    reason = refused.reason if refused else verdict.reason or "its runs differ too much to tell how fast it is"
    return msgspec.structs.replace(
        found,
        gain=gain,
        work=sameness.work,
        loss=sameness.loss.outcome if sameness.loss else "unknown",
        loss_reason=sameness.loss.reason if sameness.loss else "",
        idle=_idle(patch.edits, after.recorder.writer.path),
        reason="" if gain else reason,
    )


def _compared(before: Outcome, after: Outcome, bench: Bench, margin: Margin | None) -> Comparison | None:
    """The comparison of the throughput of two versions; None if one of them has no step."""
    found = bench.compare([before, after], ["throughput"], loss_margin=margin)
    return found.comparisons[0] if found and found.comparisons[0].verdicts else None


def _gain(comparison: Comparison) -> Gain | None:
    """The gain that a comparison shows; None if the runs do not tell, or cannot be compared."""
    verdict = comparison.verdicts[0]
    if comparison.sameness.undecidable or verdict.ratio is None or verdict.interval is None:
        return None
    return Gain(verdict.ratio, *verdict.interval)


def _idle(edits: Sequence[PatchEdit], run: Path) -> dict[str, str]:
    """The edits that the patched program was seen to run without, by dot-key."""
    record = open_run(run).record
    observed = (record.observed if record else None) or {}
    return {
        one.key: f"at {one.file}:{one.line} it is {in_words(one.value)}, and the patched program runs with "
        f"{in_words(observed[one.key])}"
        for one in edits
        if one.key in observed and observed[one.key] != one.value
    }


def describe(patch: ProvedPatch, program: PatchedProgram, folder: Path) -> None:
    """Writes best.md, the text for a pull request. Raises OSError if it cannot be written."""
    from gpubench.patches import text

    again = f"gpubench train-bench --vs program.patch={shlex.quote(str(folder / FILE))} -- {program.command.command}"
    replace(folder / TEXT, text.pull_request(patch, program.subject, _machine(), again).encode(errors="replace"))


def _machine() -> str:
    known: Mapping[str, Any] = {}
    with suppress(OSError):
        known = facts()
    gpus = [str(gpu.get("name")) for gpu in known.get("gpus", []) if gpu.get("name")]
    cpu = known.get("cpu", {})
    cores = units.counted(cpu.get("physical_cores") or 0, "core")
    return units.listed([*dict.fromkeys(gpus), f"{cpu.get('model') or 'a CPU'} with {cores}"])
