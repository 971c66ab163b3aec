"""The README's table of questions: each command runs as it is printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from places import EXAMPLES, ROOT
from running import PATIENCE, environment

PROGRAM = EXAMPLES / "session" / "train.py"
ROW = re.compile(r"^\|.*\| `(gpubench .+)` \|$", re.MULTILINE)
COMMANDS = ROW.findall((ROOT / "README.md").read_text())
MET = 3
"""The exit code of a condition of --fail-on that is met, as may happen with equal programs on a busy machine."""


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=example", "-c", "user.email=example@localhost")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(PROGRAM, folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "--message", "Train")
    return folder


@pytest.mark.stress
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_answers_its_question(repository: Path, command: str) -> None:
    """In the order of the table, because some rows read the runs of earlier ones."""
    if command.split()[1] in documents.LATER:
        pytest.skip("a later command")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    known = environment() | {"PATH": path, "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-c", command]
    done = subprocess.run(
        shell, cwd=repository, env=known, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode in ((0, MET) if "--fail-on" in command else (0,)), done.stderr
    assert done.stdout.strip()


SCREEN = 40
"""Lines of a page that a screen shows."""
SET_UP = re.compile(r"^\| `(make \w+)` \| (.+) \| (.+ minutes?.*) \|$", re.MULTILINE)


def test_the_first_screen_of_the_readme_names_the_commands_that_set_a_clone_up() -> None:
    """Each with what it does and how long it takes, as the Makefile has it."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:SCREEN])
    makefile = (ROOT / "Makefile").read_text()
    found = {command: (what, time) for command, what, time in SET_UP.findall(screen)}
    assert list(found) == ["make bench", "make test"]
    for command in found:
        target = command.removeprefix("make ")
        (needs,) = re.findall(rf"^{target}: (.+)$", makefile, re.MULTILINE)
        (recipe,) = re.findall(rf"^{re.escape(needs)}: .*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
        assert "pip install" in recipe, f"{command} installs what it needs"
    (job,) = re.findall(r"^bench: .*\n\t\$\(BIN\)/(.+)$", makefile, re.MULTILINE)
    assert f"`{job}`" in found["make bench"][0]


def test_the_checks_of_a_change_are_those_that_the_readme_names() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_table_of_the_readme_has_commands_of_one_line_each() -> None:
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if "| `gpubench" in line]
    assert len(COMMANDS) == len(table) > 10
