"""Are edits that do less work caught, and honest ones not?

    .venv/bin/python benchmarks/cheats.py [--by judge|vs-ref|compare] [--only WORD ...] [--steps 60] [--jobs 1]

It takes the program of tests/support/edits.py and each edit of that table through one of three ways: `gpubench judge`
of the edited file against the commit before it, `train-bench --vs-ref`, or `compare` with a run of the program. Bars:
every cheat is caught in the way that the table says, those that are not seen are the ones that it lists, and no honest
edit is refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import bars
from tables import table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from edits import CHEATS, HONEST, PROGRAM, Edit

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
GPUBENCH = (sys.executable, "-m", "gpubench")
REFUSED = ("work", "loss", "clock")
REASONS = {"does less work": "work", "harms": "loss", "has a clock of its own": "clock"}
"""The kind of a refusal of `judge` by the beginning of its reason."""
SECONDS, PATIENCE = 900, 60
"""The time of a command, and that of a program until its first step, which one that hides its updates never takes."""
LONGER = 10
"""The factor on the steps where clocks are compared, which takes a second or more."""
REPEATS = 2
ROUNDS = 3
"""The rounds of `judge`, the fewest that decide. An edit that is kept after three is caught by none that follow."""


@dataclass(frozen=True)
class Seen:
    """How an edit was seen."""

    edit: Edit
    found: str
    """As `Edit.found`: "work", "loss", "clock", "scale", "failed", "named" or ""; several words if it is several."""
    reason: str
    said: str = ""
    """The decision of `judge` and its rounds."""

    @property
    def as_expected(self) -> bool:
        words = set(self.found.split())
        if self.edit.found in (*REFUSED, "failed", "scale", "named"):
            return self.edit.found in words and self.edit.said in self.reason
        return not words & {*REFUSED, "failed"}


def main() -> int:
    arguments = parse()
    chosen = [edit for edit in (*CHEATS, *HONEST) if any(word in edit.name for word in arguments.only or ("",))]
    with tempfile.TemporaryDirectory(prefix="gpubench-cheats-") as name, ThreadPoolExecutor(arguments.jobs) as jobs:
        programs = Programs(Path(name), arguments.steps)
        ways: dict[str, Callable[[Edit], Seen]] = {
            "judge": programs.judged,
            "vs-ref": programs.beside,
            "compare": programs.compared,
        }
        seen = []
        for number, found in enumerate(jobs.map(ways[arguments.by], chosen), 1):
            seen.append(found)
            mark = "as expected" if found.as_expected else f"NOT AS EXPECTED: {found.reason}"
            said = ", ".join(filter(None, [found.said, found.found or "not refused", mark]))
            print(f"{number} of {len(chosen)}: {found.edit.name}: {said}", file=sys.stderr)
    rows = [(one.edit.name, one.edit.found or "honest", one.found or "-", one.said, one.reason[:90]) for one in seen]
    print(table([("edit", "expected", "seen as", "decision", "by"), *rows]))
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
    """The program and its edits, each in a repository of its own whose last commit is the program."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps

    def judged(self, edit: Edit) -> Seen:
        """Judges the edit."""
        folder = self._repository(edit)
        made = self._gpubench(folder, edit, "judge", "--rounds", str(ROUNDS))
        try:
            found = json.loads(made.stdout)
        except ValueError:
            return Seen(edit, "failed", _last(made.stderr))
        reasons = "; ".join([*found["reasons"], *found["warnings"]])
        kinds = [kind for begins, kind in REASONS.items() if any(one.startswith(begins) for one in found["reasons"])]
        if found["decision"] == "refused" and not kinds:
            kinds = ["failed"]
        kinds += ["scale"] if found["work"] == "scaled" and found["decision"] != "keep" else []
        kinds += ["named"] if found["warnings"] else []
        return Seen(edit, " ".join(kinds), reasons, f"{found['decision']} after {found['rounds']}")

    def beside(self, edit: Edit) -> Seen:
        """Runs the edit beside the program."""
        folder = self._repository(edit)
        gate = ("--vs-ref", "HEAD", "--fail-on", "throughput>2%", "--repeats", str(REPEATS))
        made = self._gpubench(folder, edit, "train-bench", *gate)
        found = next(folder.glob("results/*/*/comparison.json"), None)
        if made.returncode not in (0, 3) or not found:
            return Seen(edit, "failed", _last(made.stderr))
        return _seen(edit, json.loads(found.read_text())["result"]["comparisons"][0], made.returncode)

    def compared(self, edit: Edit) -> Seen:
        """Runs the edit alone, and compares it with the program, which is run once."""
        if edit.found == "clock":  # the speed of two runs that are not interleaved differs
            return self.beside(edit)
        folder = self._repository(edit)
        made = self._gpubench(folder, edit, "train-bench", "--repeats", str(REPEATS))
        run = _run(folder)
        if not run or made.returncode:
            return Seen(edit, "failed", _last(made.stderr))
        words = (*GPUBENCH, "compare", str(self._program), str(run), "--json", "--fail-on", "throughput>2%")
        compared = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        return _seen(edit, json.loads(compared.stdout)["comparisons"][0], compared.returncode)

    @cached_property
    def _program(self) -> Path:
        """The run of the program as it is."""
        edit = Edit("the program", ())
        folder = self._repository(edit)
        self._gpubench(folder, edit, "train-bench", "--repeats", str(REPEATS))
        run = _run(folder)
        assert run
        return run

    def _repository(self, edit: Edit) -> Path:
        folder = self._folder / edit.name.replace("'", "")
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(PROGRAM)
        for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "the program"]):
            subprocess.run([*GIT, *words], cwd=folder, check=True)
        script.write_text(edit.program + "\n")  # so that no edit at all is one too
        return folder

    def _gpubench(self, folder: Path, edit: Edit, *words: str) -> "subprocess.CompletedProcess[str]":
        steps = self._steps * (LONGER if edit.found == "clock" else 1)
        options = ("--steps", str(steps), "--program.patience", str(PATIENCE), "--json", "--", sys.executable)
        return subprocess.run(
            [*GPUBENCH, *words, *options, "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
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


def _run(folder: Path) -> Path | None:
    return next((path.parent for path in folder.glob("results/*/*/summary.json")), None)


def _last(errors: str) -> str:
    """Returns the error that a command printed, or else its last line."""
    lines = errors.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("error:")), lines[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("judge", "vs-ref", "compare"), default="judge")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="edits at a time; outcomes are not times")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
