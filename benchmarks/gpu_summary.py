"""The results of the GPU suite so far, kept in its output folder and read by the next call."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from gpu_jobs.card import GIB, SIMULATED, Card
from gpu_results import Result
from gpu_tables import summary
from records import Machine
from sendable import sendable, text

DOCUMENT, PAGE = "summary.json", "summary.md"


@dataclass
class Suite:
    """The contents of summary.json."""

    name: str
    """The device's name, as the driver reports it."""
    memory_bytes: int
    rehearsed: bool
    """Whether tiny models ran on the CPU, which measures nothing."""
    published: dict[str, float]
    """The device's dense peaks in FLOP/s; empty if unknown."""
    source: str
    """The source of these peaks."""
    machine: Machine | None = None
    """What it is, and the versions on it, when the folder was begun."""
    called: list[str] = field(default_factory=list)
    """The commands that filled the folder, oldest first."""
    jobs: list[Result] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Names of jobs that have not run yet."""

    @classmethod
    def of(cls, card: Card, machine: Machine | None = None, *, rehearsed: bool) -> "Suite":
        listed = None if rehearsed else card.listed
        peaks = dict(listed.peaks) if listed else {}
        return cls(card.name, card.memory_bytes, rehearsed, peaks, listed.source if listed else "", machine)

    @property
    def title(self) -> str:
        return "the CPU, as a rehearsal" if self.rehearsed else f"{self.name}, {self.memory_bytes / GIB:.1f} GiB"


def recall(output: Path) -> Suite | None:
    path = output / DOCUMENT
    return msgspec.json.decode(path.read_bytes(), type=Suite) if path.is_file() else None


def write(suite: Suite, output: Path) -> None:
    """Write summary.json and summary.md, each atomically, and so that they can be sent."""
    document = msgspec.json.format(msgspec.json.encode(sendable(msgspec.to_builtins(suite)))).decode() + "\n"
    for name, content in ((DOCUMENT, document), (PAGE, text(page(suite)))):
        aside = output / f".{name}"
        aside.write_text(content, encoding="utf-8")
        aside.replace(output / name)


def page(suite: Suite) -> str:
    peaks = ", ".join(f"{dtype} {peak / 1e12:g}" for dtype, peak in suite.published.items())
    known = (
        f"Published dense peaks: {peaks} TFLOP/s ({suite.source})."
        if peaks
        else "The published peaks are unknown, so MFU is not computed."
    )
    if suite.rehearsed or suite.name.endswith(SIMULATED):
        known = "**These figures were not measured on a GPU.**"
    made = "\n".join(f"    {command}" for command in suite.called)
    if suite.machine:
        known += f" {', '.join((suite.machine.system, suite.machine.versions, suite.machine.driver))}."
    lines = f"# GPU suite\n\nOn {suite.title}. {known} Made by:\n\n{made}\n\n{summary(suite.jobs, suite.title)}"
    lines += "".join(f"\n## {one.name}\n\n```\n{one.printed}\n```\n" for one in suite.jobs if one.printed)
    if suite.waiting:
        lines += f"\nNot run yet: {', '.join(suite.waiting)}.\n"
    return lines
