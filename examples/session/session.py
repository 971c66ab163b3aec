"""Runs the worked example of the README and writes its pictures to docs/session/.

Usage: python examples/session/session.py

Terminal output becomes SVG. A screenshot of a report becomes PNG, if Chromium is installed.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs" / "session"
WIDTH = 110  # characters
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # pictures must not load fonts from a server


EDITS = {
    "batch_size=16, shuffle=True": "batch_size=16, shuffle=True, num_workers=2",
    "lr=1e-3": "lr=1e-3, fused=True",
}
"""What the findings say to write into train.py."""


@dataclass(frozen=True)
class Step:
    """One command, and the part of its output that becomes a picture: all of it, or the lines before a phrase."""

    name: str
    command: str
    until: str = ""

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)


MEASURE = Step("measure", "gpubench train-bench -- python train.py")
FINDINGS = Step("findings", "gpubench profile --verify --repeats 5 -- python train.py", until="part of a profiled step")
CONFIRM = Step("confirm", "gpubench train-bench --vs-ref HEAD -- python train.py")
TUNE = Step("tune", "gpubench tune --budget 7m -- python train.py")
GATE = Step("gate", 'gpubench compare latest latest~1 --metric throughput --fail-on "throughput>2%"')


def main() -> None:
    """Raises CalledProcessError if a command fails. The gate must exit with 3."""
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        program = check_in(Path(folder))
        run(TUNE.arguments, program, codes=(0,))
        pull_request(newest(program / "results", "tune-*") / "best.md")
        for step in (MEASURE, FINDINGS, CONFIRM, GATE):
            if step is CONFIRM:
                photograph(newest(program / "results" / "profile", "*") / "report.html", PICTURES / "report.png")
                edit(program)
            shown = run(step.arguments, program, codes=(3,) if step is GATE else (0,))
            picture(step.command, cut(shown, step), PICTURES / f"{step.name}.svg")


def check_in(folder: Path) -> Path:
    """Copies the script into a new repository in `folder`, as its first commit, and returns the folder."""
    shutil.copy(HERE / "train.py", folder)
    author = ("-c", "user.name=example", "-c", "user.email=example@localhost")
    for command in (("init", "--quiet"), ("add", "train.py"), (*author, "commit", "--quiet", "--message", "Train")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def edit(folder: Path) -> None:
    """Makes the edits. Raises ValueError if the script has no such code."""
    path = folder / "train.py"
    text = path.read_text()
    for old, new in EDITS.items():
        if text.count(old) != 1:
            raise ValueError(f"{path.name} has {old!r} {text.count(old)} times")
        text = text.replace(old, new)
    path.write_text(text)


def run(arguments: Sequence[str], folder: Path, codes: Sequence[int]) -> str:
    """Returns the output on a colour terminal. Raises CalledProcessError for an exit code not in `codes`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # `python` is this one
    environment = os.environ | {"PATH": path, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in codes:
        raise subprocess.CalledProcessError(done.returncode, arguments)
    return done.stdout


def cut(shown: str, step: Step) -> str:
    """Returns the lines before the first match of `step.until`, or all of them."""
    from rich.text import Text

    lines = shown.strip("\n").splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    last = next((n for n, line in enumerate(plain) if step.until and re.match(step.until, line)), len(plain))
    return "\n".join(lines[:last]).strip("\n")


def picture(title: str, shown: str, path: Path) -> None:
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title=title, code_format=FONT.sub("", CONSOLE_SVG_FORMAT), unique_id=path.stem)
    path.write_text(svg)


def pull_request(path: Path) -> None:
    """Draws the text that a search has written for a pull request."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(force_terminal=True, width=WIDTH, color_system="truecolor", file=io.StringIO())
    with console.capture() as drawn:
        console.print(Markdown(path.read_text()))
    picture(path.name, drawn.get().strip("\n"), PICTURES / "pull_request.svg")


def photograph(page: Path, path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"skipped {path.name}: Chromium is not installed")
        return
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,900", f"--screenshot={path}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)


def newest(folder: Path, pattern: str) -> Path:
    """Returns the newest directory in a folder whose name matches the pattern."""
    return max(folder.glob(pattern), key=lambda path: path.name)


if __name__ == "__main__":
    main()
