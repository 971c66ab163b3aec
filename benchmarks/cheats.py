"""Are edits that do less work caught, and honest ones not?

    .venv/bin/python benchmarks/cheats.py [--only WORD ...] [--vs-ref WORD ...] [--steps 60] [--repeats 2]

It runs the program of tests/support/edits.py as it is, and with each edit of that table, by `gpubench train-bench`,
and compares each edit with the program by `gpubench compare`. Edits whose name has one of the words after --vs-ref are
committed to a repository instead, and run beside the program by `train-bench --vs-ref`. Bars: every cheat is caught in
the way that the table says, those that no comparison sees are the ones that it lists, and no honest edit is refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
from tables import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from edits import CHEATS, HONEST, PROGRAM, Edit

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
GPUBENCH = (sys.executable, "-m", "gpubench")
REFUSED = ("work", "loss", "clock")
SECONDS, PATIENCE = 300, 60
"""The time of a command, and that of a program until its first step, which one that hides its updates never takes."""
LONGER = 10
"""The factor on the steps where clocks are compared, which takes a second or more."""


@dataclass(frozen=True)
class Seen:
    """How a comparison has seen an edit."""

    edit: Edit
    found: str
    """As `Edit.found`: "work", "loss", "clock", "scale", "failed", "named" or ""."""
    reason: str

    @property
    def as_expected(self) -> bool:
        if self.edit.found in REFUSED or self.edit.found in ("failed", "scale", "named"):
            return self.edit.found in self.found.split() and self.edit.said in self.reason
        return not set(REFUSED) & set(self.found.split()) and "failed" not in self.found.split()


def main() -> int:
    arguments = parse()
    chosen = [edit for edit in (*CHEATS, *HONEST) if not arguments.only or _named(edit, arguments.only)]
    seen = []
    with tempfile.TemporaryDirectory(prefix="gpubench-cheats-") as name:
        bench = Programs(Path(name), arguments.steps, arguments.repeats)
        for number, edit in enumerate(chosen, 1):
            beside = _named(edit, arguments.vs_ref) or edit.found == "clock"
            found = bench.beside(edit) if beside else bench.compared(edit)
            seen.append(found)
            mark = "as expected" if found.as_expected else "NOT AS EXPECTED"
            print(f"{number} of {len(chosen)}: {edit.name}: {found.found or 'not refused'}, {mark}", file=sys.stderr)
    rows = [(one.edit.name, one.edit.found or "honest", one.found or "-", one.reason[:90]) for one in seen]
    print(table([("edit", "expected", "seen as", "by"), *rows]))
    return bars.conclude(judged(seen))


def judged(seen: Sequence[Seen]) -> list[bars.Bar]:
    """Returns the bars."""
    known = {one.name for one in CHEATS}
    cheats = [one for one in seen if one.edit.name in known and one.edit.found != "undetected"]
    missed = [one.edit.name for one in cheats if not one.as_expected]
    refused = [one.edit.name for one in seen if one.edit.name not in known and not one.as_expected]
    honest = len([one for one in seen if one.edit.name not in known])
    return [
        bars.holds("cheats", f"{len(cheats) - len(missed)} of {len(cheats)} caught: {missed}", "all", good=not missed),
        bars.holds("honest edits", f"{len(refused)} of {honest} refused: {refused}", "none", good=not refused),
    ]


class Programs:
    """The program and its edits, in a repository of their own."""

    def __init__(self, folder: Path, steps: int, repeats: int) -> None:
        self._folder = folder
        self._script = folder / "train.py"
        self._results = folder / "results"
        self._steps = steps
        self._options = [
            *("--steps", str(steps), "--repeats", str(repeats), "--program.patience", str(PATIENCE)),
            *("--results", str(self._results), "--json"),
        ]
        self._script.write_text(PROGRAM)
        for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "the program"]):
            subprocess.run([*GIT, *words], cwd=folder, check=True)
        self._baseline: str | None = None

    def compared(self, edit: Edit) -> Seen:
        """Runs the edit alone, and compares it with the program, which is run once."""
        if self._baseline is None:
            self._baseline = self._run(PROGRAM).runs
        made = self._run(edit.program)
        if not made.runs or made.code:
            return Seen(edit, "failed", made.said)
        compared = self._gpubench("compare", self._baseline, made.runs, "--json", "--fail-on", "throughput>2%")
        return _seen(edit, json.loads(compared.stdout)["comparisons"][0], compared.returncode)

    def beside(self, edit: Edit) -> Seen:
        """Runs the edit beside the program, which is the last commit."""
        self._script.write_text(edit.program)
        gate = ("--vs-ref", "HEAD", "--fail-on", "throughput>2%")
        longer = ("--steps", str(LONGER * self._steps)) if edit.found == "clock" else ()
        made = self._gpubench("train-bench", *gate, *self._options, *longer, "--", sys.executable, "train.py")
        found = sorted(self._results.glob("*/*/comparison.json"))
        if made.returncode not in (0, 3) or not found:
            return Seen(edit, "failed", made.stderr.strip().splitlines()[-1] if made.stderr.strip() else "")
        kept = json.loads(found[-1].read_text())["result"]["comparisons"][0]
        found[-1].unlink()
        return _seen(edit, kept, made.returncode)

    @dataclass(frozen=True)
    class Made:
        runs: str
        code: int
        said: str

    def _run(self, program: str) -> "Programs.Made":
        self._script.write_text(program)
        before = set(self._results.glob("*/*/summary.json"))
        made = self._gpubench("train-bench", *self._options, "--", sys.executable, "train.py")
        found = sorted(set(self._results.glob("*/*/summary.json")) - before)
        lines = made.stderr.strip().splitlines() or [""]
        said = next((line for line in lines if line.startswith("error:")), lines[-1])
        return Programs.Made(str(found[0].parent) if found else "", made.returncode, said)

    def _gpubench(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*GPUBENCH, *words], cwd=self._folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )


def _seen(edit: Edit, comparison: dict[str, Any], code: int) -> Seen:
    """Returns how a comparison has seen an edit. A refusal counts if the gate has failed too."""
    same = comparison["sameness"]
    kinds = [one["kind"] for one in same["refusals"]] if code == 3 else []
    scaled = any(one["kind"] == "scale" for one in comparison["comparability"]["differences"])
    kinds += ["scale"] if scaled else []
    kinds += ["named"] if same["remarks"] else []
    said = [one["reason"] for one in same["refusals"]] + same["remarks"]
    return Seen(edit, " ".join(dict.fromkeys(kinds)), "; ".join(said))


def _named(edit: Edit, words: Sequence[str]) -> bool:
    return any(word in edit.name for word in words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--vs-ref", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
