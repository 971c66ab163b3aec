"""Runs the worked example of the README and writes its pictures to docs/session/.

Usage: python examples/session/session.py

Terminal output becomes SVG. Screenshots of two HTML pages become PNG, if Chromium is installed.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "session"
WIDTH = 110  # characters
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # pictures must not load fonts from a server


@dataclass(frozen=True)
class Step:
    """One command, and the part of its output that becomes a picture: all of it, or the lines between two phrases.

    A step without a name has no picture; the next command shows its result.
    """

    name: str
    command: str
    since: str = ""
    until: str = ""

    def arguments(self, keep: Mapping[str, Any]) -> list[str]:
        """Returns the command with KEEP replaced by `--vs` options for `keep`, the settings to adopt."""
        changes = [part for key, value in keep.items() for part in ("--vs", f"{key}={value}")]
        return [part for word in shlex.split(self.command) for part in (changes if word == "KEEP" else [word])]


MEASURE = Step("measure", "gpubench train-bench --config my_training.yaml")
FINDINGS = Step("findings", "gpubench profile --config my_training.yaml --verify", until="part of a step")
PARTS = Step("diagnose", FINDINGS.command, since="part of a step", until="-v also shows")
MEMORY = Step("memory", "gpubench memory --config my_training.yaml", until=r"1\. ")
CHANGE = Step("", "gpubench train-bench --config my_training.yaml KEEP")
JUDGE = Step("judge", "gpubench compare latest~1 latest --html change.html")
GATE = Step("gate", 'gpubench compare latest latest~1 --metric throughput --fail-on "throughput>2%"')


def main() -> None:
    """Raises CalledProcessError if a command fails. The gate must exit with 3."""
    PICTURES.mkdir(exist_ok=True)
    keep: dict[str, Any] = {}
    for steps in ((MEASURE,), (FINDINGS, PARTS), (MEMORY,), (CHANGE,), (JUDGE,), (GATE,)):
        arguments = steps[0].arguments(keep)
        shown = run(arguments, codes=(3,) if GATE in steps else (0,))
        for step in filter(lambda one: one.name, steps):
            picture(shlex.join(arguments), cut(shown, step), PICTURES / f"{step.name}.svg")
        if FINDINGS in steps:
            keep = kept()
            photograph(newest("profile") / "report.html", PICTURES / "report.png")
    photograph(HERE / "change.html", PICTURES / "change.png")


def run(arguments: Sequence[str], codes: Sequence[int]) -> str:
    """Returns the output on a colour terminal. Raises CalledProcessError for an exit code not in `codes`."""
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "COLORTERM": "truecolor"}
    done = subprocess.run(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in codes:
        raise subprocess.CalledProcessError(done.returncode, arguments)
    return done.stdout


def cut(shown: str, step: Step) -> str:
    """Returns the lines from the first match of `step.since` to the next match of `step.until`, which is excluded."""
    from rich.text import Text

    lines = shown.strip("\n").splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    first = next((n for n, line in enumerate(plain) if re.match(step.since, line)), 0)
    later = range(first + 1, len(plain))
    last = next((n for n in later if step.until and re.match(step.until, plain[n])), len(plain))
    return "\n".join(lines[first:last]).strip("\n")


def picture(title: str, shown: str, path: Path) -> None:
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title=title, code_format=FONT.sub("", CONSOLE_SVG_FORMAT), unique_id=path.stem)
    path.write_text(svg)


def photograph(page: Path, path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"skipped {path.name}: Chromium is not installed")
        return
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,900", f"--screenshot={path}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)


def kept() -> dict[str, Any]:
    """Returns the settings that the last diagnosis recommends."""
    found: dict[str, Any] = json.loads((newest("profile") / "findings.json").read_text())
    keep: dict[str, Any] = found["keep"]
    return keep


def newest(experiment: str) -> Path:
    """Returns the newest run directory of an experiment."""
    return max((HERE / "results" / experiment).iterdir(), key=lambda path: path.name)


if __name__ == "__main__":
    main()
