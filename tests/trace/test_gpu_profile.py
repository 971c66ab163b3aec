"""What of a profile can only be seen on a GPU: its work in the trace, why it was idle, and fixes that help it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Finished, gpubench

from gpubench.channel import Activity
from gpubench.settings.sections import ProfilingSettings
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.profile import ProfiledStep, RankProfile
from gpubench.worker.profiler import RecordedTimer, Recording
from gpubench.worker.timing import CudaClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
SPIN = 4_000_000  # GPU clock cycles: some milliseconds
FLOATS = 16 * 2**20

SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import Dataset

class Images(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.004)  # as a slow disk would
        return torch.full((3, 64, 64), float(index)), index % 10

def images():
    return Images()

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 10))
"""


# --- What is recorded


def record(step: Callable[[], Any], folder: Path, repeat: int = 0) -> list[RankProfile]:
    """A profile of every cycle of two steps."""
    settings = ProfilingSettings(wait=1, warmup=1, active=2, repeat=repeat)
    with Recording(settings, DEVICE, 0, folder) as recording:
        timer = RecordedTimer(CudaClock(DEVICE), Activity(), 0, 0, recording)
        timer.start(0.0)
        for number in range(settings.units):
            timer.begin(number)
            timer.enter("forward")
            step()
            torch.cuda.synchronize(DEVICE)
            timer.issued(0, 1, [])
        timer.stop()
    return [analyse([read(path)]).ranks[0] for path in recording.files()]


@pytest.fixture
def multiplied(tmp_path: Path) -> list[RankProfile]:
    tensor = torch.ones(1024, 1024, device=DEVICE)
    return record(lambda: tensor @ tensor, tmp_path, repeat=1)


@pytest.mark.simulated
def test_every_cycle_leaves_a_trace_with_work_of_the_gpu(multiplied: list[RankProfile]) -> None:
    assert len(multiplied) == 2
    for rank in multiplied:
        assert len(rank.steps) == 2
        assert not rank.host_only
        assert rank.device_name == torch.cuda.get_device_name(DEVICE)


@pytest.mark.simulated
def test_operators_of_the_host_are_tied_to_kernels_of_the_gpu_by_their_launches(multiplied: list[RankProfile]) -> None:
    for rank in multiplied:
        operators = {operator.name: operator for operator in rank.operators}
        assert operators["aten::mm"].kernels >= 2
        assert operators["aten::mm"].device > 0
        assert "aten::mm" in {kernel.operator for kernel in rank.kernels}
        assert rank.launches is not None
        assert rank.launches.unlinked == 0
        forward = next(phase for phase in rank.phases if phase.name == "forward")
        assert forward.device > 0


@pytest.mark.simulated
def test_the_parts_of_a_real_gpus_time_sum_to_the_nanosecond(multiplied: list[RankProfile]) -> None:
    for rank in multiplied:
        assert sum(step.wall for step in rank.steps) == rank.wall
        assert sum(rank.critical_path.values()) == rank.wall
        places: list[RankProfile | ProfiledStep] = [rank, *rank.steps]
        for one in places:
            assert one.device is not None
            parts = [one.device.compute, one.device.exposed_communication, one.device.exposed_copies, one.device.idle]
            assert min(*parts, *one.idle.values()) >= 0
            assert sum(parts) == one.device.wall == one.wall
            assert sum(one.idle.values()) == one.device.idle


@pytest.mark.simulated
def test_copies_from_pageable_and_from_page_locked_memory_are_told_apart(tmp_path: Path) -> None:
    pageable, pinned = torch.ones(FLOATS), torch.ones(FLOATS).pin_memory()
    (rank,) = record(lambda: (pageable.to(DEVICE), pinned.to(DEVICE, non_blocking=True)), tmp_path)
    copied = {copy.pinned: copy for copy in rank.copies if copy.kind == "host_to_device"}
    assert copied[False].calls == copied[True].calls == 2
    assert copied[False].bytes == copied[True].bytes == 2 * 4 * FLOATS
    assert copied[False].host > 10 * copied[True].host, "only the pageable one blocks the host"


@pytest.mark.simulated
def test_idle_time_behind_a_value_that_is_read_is_the_waits(tmp_path: Path) -> None:
    value = torch.ones((), device=DEVICE)

    def step() -> None:
        torch.cuda._sleep(SPIN)
        (value + 1).item()
        (value + 2).item()

    (rank,) = record(step, tmp_path)
    waits = [wait for wait in rank.synchronisations if wait.operator == "aten::item"]
    assert {wait.calls for wait in waits} == {4}
    assert rank.device is not None
    assert sum(wait.blocked for wait in waits) > rank.device.compute / 2
    assert 0 < sum(wait.idle for wait in waits) <= rank.idle["synchronisation"]


# --- What is found, and what its fix saves


RESNET = ("--model=resnet18", "--precision=bf16", "--profiling.record_shapes=false", "--profiling.modules=false")
SHORT = ("--repeats=1", "--training.warmup_steps=10", "--logging.graph=false", "--measurement.count_flops=false")


def confirmed(name: str, results: Path, *options: str, cwd: Path | None = None) -> dict[str, Any]:
    """The finding with this id of a run whose fixes were tried, which helped."""
    done = gpubench("profile", *options, *SHORT, "--device=cuda", "--verify", "-q", results=results, cwd=cwd)
    assert done.code == 0, done.stderr
    found = {one["id"]: one for one in findings(done)}
    assert name in found, f"{sorted(found)}: {done.stdout}"
    assert found[name]["measured"]["outcome"] == "confirmed", found[name]["measured"]
    assert found[name]["measured"]["saving"]["low"] > 0
    return found[name]


def findings(done: Finished) -> Iterator[dict[str, Any]]:
    (path,) = done.results.glob("profile/*/findings.json")
    yield from json.loads(path.read_text())["findings"]


@pytest.mark.device
def test_a_loss_read_after_every_step_is_found_and_not_reading_it_is_confirmed(tmp_path: Path) -> None:
    # The batch takes the GPU longer than the CPU takes to launch it: a GPU that waits for launches waits for no value.
    options = (*RESNET, "--batch-size=512", "--training.read_loss=true", "--steps=50")
    finding = confirmed("synchronisation", tmp_path, *options)
    assert finding["fix"] == {"training.read_loss": False}
    assert "aten::item" in finding["evidence"][0]


@pytest.mark.device
def test_an_optimizer_that_loops_is_found_and_the_fused_one_is_confirmed(tmp_path: Path) -> None:
    options = (*RESNET, "--batch-size=192", "--training.optimizer_impl=loop", "--steps=60")
    finding = confirmed("unfused-optimizer", tmp_path, *options)
    assert finding["fix"] == {"training.optimizer_impl": "fused"}


@pytest.mark.device
def test_a_slow_loader_is_found_and_workers_are_confirmed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    options = ("--model=slow:linear", "--data=slow:images", "--data.workers=0", "--batch-size=8", "--steps=30")
    finding = confirmed("too-few-workers", tmp_path / "results", *options, cwd=tmp_path)
    assert finding["measured"]["saving"]["estimate"] > 0.3
