"""Run a job of the GPU suite, and keep its small files."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bars
import memory_check
import msgspec
import profiled
from bars import Bar
from gpu_jobs.job import OUTPUT, RUNS, Job, Reference
from processes import Ended, last_words, run_for
from sendable import sendable, text

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("run.json", "config.yaml", "environment.json", "summary.json", "noise.json", "findings.json")
STEPS = "steps.jsonl"
STEPS_BYTES = 200_000  # what is larger is left out; without its steps, a run of one repeat cannot be compared
LOG_CHARACTERS = 20_000
LAST_LINES = 30  # of a job without runs, shown below the table
NOTE_CHARACTERS = 160
NO_NAME = "..."


@dataclass(frozen=True)
class Run:
    """One run directory of a job."""

    path: str
    """The path in the output folder."""
    status: str
    metrics: dict[str, dict[str, Any]]
    """Metrics by name."""
    warnings: list[str]
    profiled: profiled.Profiled | None


@dataclass(frozen=True)
class Result:
    """The result of a job."""

    name: str
    shows: str
    command: list[str]
    status: str
    """completed, failed, stopped (out of time), interrupted or skipped."""
    note: str
    planned: float = 0.0
    """The seconds that it should take on an H200."""
    seconds: float = 0.0
    runs: list[Run] = field(default_factory=list)
    printed: str = ""
    """The end of its output, if the job leaves no run."""
    reference: Reference | None = None
    memory: memory_check.Check | None = None
    """The comparison of a memory prediction with a measurement, if the job makes one."""
    verdicts: list[Bar] = field(default_factory=list)
    """Of a job whose result they are, on each of its bars."""


def attempt(job: Job, output: Path, remaining: float) -> Result:
    """Run `job` if the budget of `remaining` seconds allows, and keep its small files in `output`.

    Ctrl-C ends the job, and its result is "interrupted".
    """
    made = Result(job.name, job.shows, ["python", *job.arguments], "skipped", "", job.seconds, reference=job.reference)
    if reason := unfit(job, output, remaining):
        return replace(made, note=reason, verdicts=[bars.skipped(job.shows, reason)] if job.verdicts else [])
    kept = output / job.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as scratch:
        began = time.monotonic()
        limit = min(job.patience * job.seconds, remaining)
        told = Path(scratch, "bars.json")
        command = [placed(part, scratch, output) for part in (sys.executable, *job.arguments)]
        try:
            ended = run_for(command, limit, ROOT, os.environ | {bars.VARIABLE: str(told)}, together=True)
            status = status_of(ended, job)
        except KeyboardInterrupt:
            ended, status = Ended(None, "", ""), bars.INTERRUPTED
        took = time.monotonic() - began
        paths = [path.parent for path in sorted(Path(scratch).glob("*/*/run.json"))]
        # The result of each fix is in the findings of the run for which it was tried.
        runs = [keep(path, kept) for path in paths if not path.parent.name.endswith("-verify")]
        memory = checked(Path(scratch))
        judged = msgspec.json.decode(told.read_bytes(), type=list[Bar]) if told.is_file() else []
    end = {bars.STOPPED: f"\nstopped after {limit:.0f} s\n", bars.INTERRUPTED: f"\ninterrupted after {took:.0f} s\n"}
    printed = ended.printed + end.get(status, "")
    (kept / "log.txt").write_text(printed[-LOG_CHARACTERS:])
    note = "" if runs and status == "completed" else last_words(printed)[:NOTE_CHARACTERS]
    if status == "failed" and memory and memory.broken:
        note = "; ".join(memory.broken)
    if status == "completed" and (wrong := list(unlike(job, runs))):
        status, note = "failed", "; ".join(wrong)
    rest = "" if runs else "\n".join(printed.splitlines()[-LAST_LINES:])
    verdicts = list(with_end(job, status, note, judged)) if job.verdicts else []
    note = bars.counted([bar.verdict for bar in verdicts]) or note
    return replace(
        made, status=status, note=note, seconds=took, runs=runs, printed=rest, memory=memory, verdicts=verdicts
    )


def unfit(job: Job, output: Path, remaining: float) -> str:
    """Return why the job is not run; "" if it is."""
    script = job.arguments[0]
    if not script.startswith("-") and not (ROOT / script).is_file():
        return f"{script} is not there"
    if not job.fits:
        return "not even one sample fits into this GPU's memory"
    if remaining < job.seconds:
        return f"needs about {job.seconds:.0f} s, and {max(remaining, 0):.0f} s of the budget are left"
    missing = [name for name in job.after if not any((output / name).glob("*/run.json"))]
    return f"{' and '.join(missing)} left no run" if missing else ""


def with_end(job: Job, status: str, note: str, judged: Sequence[Bar]) -> Iterator[Bar]:
    """Yield the verdicts, with one on the job itself if it did not come to its end."""
    yield from judged
    missed = any(bar.verdict == bars.MISSED for bar in judged)
    if status in (bars.STOPPED, bars.INTERRUPTED) or (status == bars.FAILED and not missed):
        yield Bar(job.shows, note, "the check ends", status)


def placed(part: str, scratch: str, output: Path) -> str:
    """Return an argument with its folder filled in."""
    if part == RUNS:
        return scratch
    root, slash, rest = part.partition("/")
    return str(output.resolve() / rest) if root == OUTPUT and slash else part


def status_of(ended: Ended, job: Job) -> str:
    """Return the status; an undecided bar is not a failure, nor is a missed one where nothing is judged."""
    if ended.code is None:
        return bars.STOPPED
    fine = {0, bars.CODES[bars.UNDECIDED]} | (set() if job.judged else {bars.CODES[bars.MISSED]})
    return "completed" if ended.code in fine else bars.FAILED


def checked(scratch: Path) -> memory_check.Check | None:
    path = scratch / memory_check.DOCUMENT
    return msgspec.json.decode(path.read_bytes(), type=memory_check.Check) if path.is_file() else None


def unlike(job: Job, runs: Sequence[Run]) -> Iterator[str]:
    """Yield what the job should have shown and did not."""
    for done in runs:
        found = done.profiled
        if found is not None:
            yield from found.broken
            named = {finding.partition(" ")[0].rstrip(":") for finding in found.findings}
            yield from (f"{name} was not found" for name in job.finds if name not in named)


def keep(path: Path, kept: Path) -> Run:
    """Copy the small files of the run directory `path`, and return what the table needs of it."""
    copy = kept / path.name
    copy.mkdir()
    for name in KEPT:
        if (path / name).is_file():
            shutil.copyfile(path / name, copy / name)
    steps = path / STEPS
    if steps.is_file() and steps.stat().st_size <= STEPS_BYTES:
        shutil.copyfile(steps, copy / STEPS)
    record = json.loads((path / "run.json").read_text())
    summary = json.loads((path / "summary.json").read_text()) if (path / "summary.json").is_file() else {}
    return Run(
        str(copy.relative_to(kept.parent)),
        record["status"],
        {metric["name"]: metric for metric in summary.get("metrics", [])},
        summary.get("warnings", []),
        profiled.examine(path),
    )


def publish(kept: Path) -> None:
    """Take what tells of a person or of a machine out of the kept files of a job, because everybody gets them."""
    for path in (*kept.rglob("*.txt"), *kept.rglob("*.yaml")):
        path.write_text(text(path.read_text()))
    for path in kept.rglob("*.json"):
        found = sendable(json.loads(path.read_text()))
        if path.name == "run.json":
            found["host"] = NO_NAME
        if path.name == "environment.json":
            found["host"]["name"] = NO_NAME
            found["gpus"] = [gpu | {"uuid": None} for gpu in found["gpus"]]
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
