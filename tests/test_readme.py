"""The README's table of questions: each command runs as it is printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pytest
import traces_made
from places import EXAMPLES, ROOT
from running import PATIENCE, environment

from gpubench.commands import gate

PROGRAM = EXAMPLES / "session" / "train.py"
ROW = re.compile(r"^\|.*\| `(gpubench .+)` \|$", re.MULTILINE)
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = ROW.findall(README)
MET = 3
"""The exit code of a condition of --fail-on that is met, as may happen with equal programs on a busy machine."""


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=example", "-c", "user.email=example@localhost")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(PROGRAM, folder)
    traces_made.write(folder / "trace.json", [traces_made.step(1, 0, 100), traces_made.slice_("aten::mm", 10, 60)])
    git(folder, "init", "--quiet", "--initial-branch", "main")
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
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 2")  # a small machine trains no eight processes
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
    screen = "\n".join(README.splitlines()[:SCREEN])
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


def test_the_readme_says_with_what_the_command_for_ci_exits() -> None:
    (sentence,) = re.findall(
        r"The command for CI exits with (\d) .+? \*inconclusive\* .+? (\d), or with (\d) ", README, re.DOTALL
    )
    assert tuple(map(int, sentence)) == (gate.REGRESSED, 0, gate.UNDECIDED)


def test_the_slurm_job_of_the_readme_is_there() -> None:
    (script,) = re.findall(r"`sbatch (\S+) train\.py`", README)
    assert (ROOT / script).is_file()


PEERS = {
    "gpubench": "gpubench compare",
    "pyperf": "pyperf compare_to",
    "pytest-benchmark": "pytest-benchmark, fail on mean:1%",
}


def test_the_figures_of_other_tools_in_the_readme_are_those_that_were_measured() -> None:
    """In the order of the sentence: false verdicts where processes differ by 1 %, then with one slow last step."""
    (section,) = re.findall(r"^## compare-peers$(.+?)^## ", RESULTS, re.MULTILINE | re.DOTALL)
    header = next(
        line for line in section.splitlines() if "false verdicts, one slow last step" in line and "tool" in line
    )
    columns = [cell.strip() for cell in header.split("|")]
    wanted = [
        columns.index(name)
        for name in ("false verdicts, processes differ by 1 %", "false verdicts, one slow last step")
    ]
    rows = [next(line for line in section.splitlines() if line.startswith(f"| {row}")) for row in PEERS.values()]
    measured = [f"{float(row.split('|')[column].strip().rstrip('%')):.0f} %" for column in wanted for row in rows]
    (sentence,) = re.findall(r"^\| pyperf, pytest-benchmark \|.+$", README, re.MULTILINE)
    said = re.findall(r"(?<!by )(?<!limit of )\b\d+ %", sentence)
    assert said == measured
    assert all(name in sentence for name in PEERS)


def test_the_table_of_the_readme_has_commands_of_one_line_each() -> None:
    table = [line for line in README.splitlines() if "| `gpubench" in line]
    assert len(COMMANDS) == len(table) > 10
