"""The memory of a GPU between the repeats of a training benchmark, and beside its model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import gpubench, metrics
from torch._C._distributed_c10d import HashStore
from worked import as_in_a_fresh_process, working

from gpubench import events
from gpubench.worker import distributed
from gpubench.worker.models import Workload, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    with as_in_a_fresh_process():
        yield
    distributed.cleanup_ddp()


@pytest.mark.simulated
@pytest.mark.usefixtures("group")
def test_every_repeat_in_one_process_starts_with_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int, int]] = []

    def weighed(*arguments: Any, **more: Any) -> Workload:
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()))
        return build(*arguments, **more)

    monkeypatch.setattr("gpubench.kinds.training.worker.rank.build", weighed)
    done = [event for event in working(repeats=3, device="cuda") if isinstance(event, events.RepeatDone)]
    assert held[0] == held[1] == held[2]
    assert [event.peak_allocated for event in done] == [pytest.approx(done[0].peak_allocated, rel=0.01)] * 3


FULL = """
import torch
from torch import nn

def build():
    room = 2**29  # as if a large model filled the rest: the product takes three matrices of 256 MiB
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    return nn.Linear(16, 16), lambda size: torch.ones(size, 16), lambda module, batch: module(batch).sum()
"""


@pytest.mark.simulated
def test_a_run_whose_model_fills_the_memory_is_finished_without_the_measured_peak(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    options = ("--model", "full:build", "--precision", "fp32", "--steps", "5", "--training.warmup_steps=2")
    common = ("--repeats", "1", "--logging.graph=false", "--device", "cuda", "--measure-peak")
    done = gpubench("train-bench", *options, *common, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "measured_peak" not in metrics(done)
    (said,) = (line for line in done.document("summary.json")["warnings"] if line.startswith("no measured peak"))
    assert "out of memory" in said


@pytest.mark.simulated
def test_the_settings_of_a_gpu_are_searched(tmp_path: Path) -> None:
    quick = ("--config", "tiny", "--device", "cuda", "--steps", "10", "--training.warmup_steps=2", "--runs", "9")
    done = gpubench("tune", *quick, "--precision", "fp32", "--only", "precision", "--json", results=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["treatments"][0]["levels"] == [{"precision": "tf32"}, {"precision": "bf16"}]
    runs = [run for block in found["blocks"] for run in block["runs"]]
    assert all(run["throughput"] > 0 and run["peak"] > 0 for run in runs)
    assert len(found["losses"]) == 2
