"""Measures a program before and after a change, for action.yml, and writes the comparison as text, Markdown, JSON and a
page.

The inputs are the environment variables PROGRAM, BASE, FAIL_ON, STRICT and OPTIONS, as action.yml describes them. The
exit code is that of `gpubench train-bench --fail-on`.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

GPUBENCH = Path(sys.executable).with_name("gpubench")
DECIDED = (0, 3, 4)
"""The exit codes after which there is a comparison."""
FORMATS = {"terminal": "comparison.txt", "json": "comparison.json", "markdown": "comparison.md"}
"""The files of the comparison, by the format of `gpubench compare`."""
FILES_OF_THE_RUNNER = ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STATE", "GITHUB_STEP_SUMMARY")
"""Files by which a step changes later ones. The program is not told where they are, which hides them only from one
that does not look for them: it runs as the user of the runner."""


def main() -> int:
    if os.environ.get("GITHUB_EVENT_NAME") == "pull_request_target":
        print("error: pull_request_target would run the code of a pull request with the secrets of this repository")
        print("hint: use `on: pull_request`")
        return 2
    report = Path(tempfile.mkdtemp(prefix="speed-", dir=os.environ["RUNNER_TEMP"]))
    code = measure(report, os.environ)
    text = (report / "comparison.md").read_text(encoding="utf-8")
    print(text)
    publish("GITHUB_STEP_SUMMARY", text)
    publish("GITHUB_OUTPUT", f"report={report}\n")
    return code


def measure(report: Path, known: Mapping[str, str]) -> int:
    """Measures both sides, and writes the comparison, its page and the runs to the folder `report`."""
    gate = [word for line in known["FAIL_ON"].splitlines() if line.strip() for word in ("--fail-on", line.strip())]
    gate += ["--strict"] if known.get("STRICT") == "true" else []
    options = ["--vs-ref", known["BASE"], *gate, *shlex.split(known.get("OPTIONS", ""))]
    program = shlex.split(known["PROGRAM"])
    done = gpubench("train-bench", "--results", str(report / "runs"), "--json", *options, "--", *program)
    if done.returncode not in DECIDED:
        said = f"Nothing was compared: gpubench exited with {done.returncode}. The log of the job says why.\n"
        for name in ("comparison.txt", "comparison.md"):
            (report / name).write_text(said, encoding="utf-8")
        return done.returncode
    for side, run in zip(("base", "head"), json.loads(done.stdout)["runs"], strict=True):
        path = Path(run["path"])
        (report / side).mkdir()
        path.rename(report / side / path.name)  # the folder names the side in the comparison
    sides = [str(report / "base"), str(report / "head")]
    for form, name in FORMATS.items():
        page = ("--html", str(report / "comparison.html")) if form == "markdown" else ()
        compared = gpubench("compare", *sides, *gate, "--format", form, *page, "--quiet")
        (report / name).write_text(compared.stdout, encoding="utf-8")
    return done.returncode


def gpubench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    known = {name: value for name, value in os.environ.items() if name not in FILES_OF_THE_RUNNER}
    return subprocess.run([GPUBENCH, *arguments], stdout=subprocess.PIPE, text=True, env=known)


def publish(file: str, text: str) -> None:
    """Appends a text to one of the files by which the runner takes results, if there is one."""
    if name := os.environ.get(file):
        with Path(name).open("a", encoding="utf-8") as opened:
            opened.write(text)


if __name__ == "__main__":
    sys.exit(main())
