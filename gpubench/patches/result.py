"""What is known of a patch: its edits with what each contributes, and what it was seen to do when it was run."""

import shlex
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpubench import units
from gpubench.gain import Gain

FILE, TEXT = "best.patch", "best.md"
"""The patch, and the text for a pull request, in the directory of a search or of a profile."""


class PatchEdit(Struct, frozen=True):
    """An edit of the program by one setting, or for one finding."""

    key: str
    """The dot-key of the setting, or the name of the finding's rule."""
    value: Any
    """The value of the setting; None for a finding."""
    file: str
    line: int
    contribution: str
    """What was measured of the setting, as "2.33 x [1.97, 2.76] with the others"."""


class ProvedPatch(Struct, frozen=True, kw_only=True):
    """A patch that was made of proved settings, and the comparison of the patched program with that as it was."""

    changed: dict[str, int]
    """The number of lines that it adds or changes, by file. Empty if there is no edit, and so no patch."""
    edits: list[PatchEdit] = []
    left: dict[str, str] = {}
    """The proved settings and the findings for which it has no edit, each with the reason or what to do by hand."""
    runs: list[str] = []
    """The run directories of the program as it was, as patched, and with the settings from outside if that was run;
    empty if the patch was not run."""
    gain: Gain | None = None
    """The throughput as patched, divided by that as it was; None if the runs do not tell."""
    settings_gain: Gain | None = None
    """The same of the settings from outside: in the same rounds if there was time for it, else in the search."""
    rounds: int = 0
    """The runs of each version."""
    work: str = "unknown"
    """What was found of the work of the patched program, as in a comparison."""
    loss: str = "unknown"
    loss_reason: str = ""
    idle: dict[str, str] = {}
    """The edits without effect, by dot-key, each with what the patched program was seen to do."""
    reason: str = ""
    """Why it was not run, or why its runs do not tell how fast it is."""

    @property
    def where(self) -> str:
        """How many lines it changes, and where, such as "3 lines in train.py"."""
        return units.listed([f"{units.counted(lines, 'line')} in {file}" for file, lines in self.changed.items()])

    @property
    def has_effect(self) -> bool:
        """Whether at least one of its edits has an effect, as far as its runs show."""
        return any(edit.key not in self.idle for edit in self.edits)

    @property
    def is_proved(self) -> bool:
        """Whether it is faster, and neither does less work nor harms the loss."""
        return bool(self.gain and self.gain.low > 1) and self.work != "less" and self.loss != "harmed"

    @property
    def ran_beside_settings(self) -> bool:
        """Whether the gain of the settings is that of the same rounds."""
        return len(self.runs) > 2 and self.settings_gain is not None

    @property
    def differs(self) -> bool:
        """Whether the gain of the patch is not that of the settings, beyond their intervals."""
        ours, theirs = self.gain, self.settings_gain
        return bool(ours and theirs and (ours.high < theirs.low or ours.low > theirs.high))

    @property
    def found(self) -> str:
        """What its runs have shown, in words."""
        if not self.runs:
            return f"not run: {self.reason}"
        if self.gain is None:
            return f"run as patched: {self.reason}"
        work = {"same": "the same work", "less": "less work", "more": "more work", "scaled": "other samples in a step"}
        done = work.get(self.work, "its work is unknown")
        beside = f" ({self.settings_gain} by the settings from outside)" if self.ran_beside_settings else ""
        return f"run as patched: {self.gain}{beside}, {done}, loss {self.loss}"

    @property
    def remarks(self) -> list[str]:
        """What the user has to know of it besides, one sentence each."""
        said = [f"{key} did not take effect: {seen}" for key, seen in self.idle.items()]
        if self.differs:
            why = "" if said else ", and the runs do not show why"
            said.insert(0, f"the settings from outside gave {self.settings_gain}, which the patch does not{why}")
        if self.loss not in ("unharmed", "unknown"):
            said.append(f"loss {self.loss}: {self.loss_reason}")
        return said


def apply_by(folder: Path) -> str:
    """The command that applies the patch in a folder, from the directory of the program."""
    return f"git apply {shlex.quote(str(folder / FILE))}   (or gpubench tune --apply {shlex.quote(str(folder))})"
