"""The README's table of questions: each command runs as it is printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from running import PATIENCE, environment

PROGRAM = documents.ROOT / "examples" / "session" / "train.py"
ROW = re.compile(r"^\|.*\| `(gpubench .+)` \|$", re.MULTILINE)
COMMANDS = ROW.findall((documents.ROOT / "README.md").read_text())
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


def test_the_table_of_the_readme_has_commands_of_one_line_each() -> None:
    table = [line for line in (documents.ROOT / "README.md").read_text().splitlines() if "| `gpubench" in line]
    assert len(COMMANDS) == len(table) > 10
