"""The examples for Slurm, as jobs of a real Slurm on two machines."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import machines
import places
import pytest
import slurm

EXAMPLES = places.EXAMPLES / "slurm"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[slurm.Cluster]:
    if reason := slurm.why_not() or machines.why_not():
        pytest.skip(reason)
    with machines.machines() as pair, slurm.cluster(pair, tmp_path) as made:
        yield made


ONE_RANK_EACH = """#!/usr/bin/env bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29400 WORLD_SIZE=$SLURM_NTASKS
srun gpubench train-bench -- sh -c 'RANK=$SLURM_PROCID exec python "$0"' "$1"
"""


@pytest.mark.stress
@pytest.mark.parametrize("is_example", [True, False], ids=["the example", "gpubench for each rank"])
def test_a_program_is_measured_on_two_nodes(cluster: slurm.Cluster, tmp_path: Path, *, is_example: bool) -> None:
    results = tmp_path / "results"
    cluster.variables |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "GPUBENCH_RESULTS": str(results),
        "GPUBENCH_TRAINING__STEPS": "20",
        "GPUBENCH_MEASUREMENT__REPEATS": "2",
    }
    own = tmp_path / "own.sbatch"
    own.write_text(ONE_RANK_EACH)
    script = EXAMPLES / "program.sbatch" if is_example else own
    program = str(places.SUPPORT / "distributed_program.py")
    options = ["--gpus-per-node=0", "--cpus-per-task=1", "--nodes=2", "--ntasks-per-node=1"]
    state, printed = cluster.finish(str(script), program, options=options)
    assert state == "COMPLETED", printed
    (run,) = results.glob("*/*/run.json")  # that of the node with rank 0
    assert json.loads(run.read_text())["world_size"] == 2
    steps = [json.loads(line) for line in run.with_name("steps.jsonl").read_text().splitlines()]
    assert {(step["repeat"], step["rank"]) for step in steps} == {(n, rank) for n in (0, 1) for rank in (0, 1)}
    assert f"completed: {run.parent}" in printed
