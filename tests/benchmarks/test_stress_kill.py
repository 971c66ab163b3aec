"""benchmarks/kills.py with a few instants: what a host leaves behind that is killed."""

import subprocess
import sys

import pytest
from places import BENCHMARKS
from running import PATIENCE, environment

KILLS = BENCHMARKS / "kills.py"


@pytest.mark.stress
@pytest.mark.parametrize(("command", "instants"), [("train-bench", 3), ("pipe-infer", 2)])
def test_whenever_its_host_is_killed_a_run_reads_and_leaves_no_process(command: str, instants: int) -> None:
    done = subprocess.run(
        [sys.executable, str(KILLS), "--commands", command, "--instants", str(instants), "--seed", "7"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row, _, verdict = done.stdout.splitlines()[-3:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == [command, str(instants)]
    assert verdict.startswith("met")
    assert int(cells[3]) > 0, row  # directories
    assert cells[-2:] == ["0", "0"], row  # processes, and what is wrong
