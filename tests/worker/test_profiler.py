"""What torch.profiler is told to record of our own loop, and what it leaves."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gpubench import events
from gpubench.channel import Activity
from gpubench.runs.directory import SNAPSHOT
from gpubench.settings.schema import TrainSettings
from gpubench.settings.sections import ProfilingSettings
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
from gpubench.trace.profile import RankProfile
from gpubench.worker.profiler import CHUNK, RecordedTimer, Recording, annotate_modules, recorded
from gpubench.worker.timing import CpuClock

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(tensor).relu()
        return out


def record(settings: ProfilingSettings, folder: Path, unit: int = 1) -> list[Path]:
    """A loop of exactly the schedule's length."""
    model = nn.Sequential(Block(), nn.Linear(8, 1))
    annotate_modules(model)
    with Recording(settings, CPU, 0, folder) as recording:
        recording.unit = unit
        timer = RecordedTimer(CpuClock(), Activity(), 0, 0, recording)
        timer.start(0.0)
        for step in range(settings.units * unit):
            timer.begin(step)
            timer.enter("forward")
            loss = model(torch.ones(4, 8)).sum()
            timer.enter("backward")
            loss.backward()
            timer.issued(0, 4, [])
        timer.stop()
    return recording.files()


def profiled(path: Path) -> RankProfile:
    (rank,) = analyse([read(path)]).ranks
    return rank


def test_cupti_stays_attached_between_cycles_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    Recording(ProfilingSettings(), CPU, 0, tmp_path)
    assert os.environ["TEARDOWN_CUPTI"] == "0"


def test_every_cycle_leaves_a_file_of_its_own_with_the_steps_it_recorded(tmp_path: Path) -> None:
    files = record(ProfilingSettings(wait=2, warmup=1, active=2, repeat=1), tmp_path)
    assert [profiled(path).step_numbers for path in files] == [[3, 4], [6, 7]]
    assert all(path.name.startswith("rank0.") and path.name.endswith(".pt.trace.json.gz") for path in files)


def test_a_trace_is_written_uncompressed_on_request(tmp_path: Path) -> None:
    (path,) = record(ProfilingSettings(wait=1, warmup=1, active=2, repeat=0, compress=False), tmp_path)
    assert path.name.endswith(".pt.trace.json")
    assert path.read_text().lstrip().startswith("{")
    assert len(profiled(path).step_numbers) == 2


def test_a_unit_of_several_steps_is_one_of_the_profilers(tmp_path: Path) -> None:
    (path,) = record(ProfilingSettings(wait=1, warmup=1, active=1, repeat=0), tmp_path, unit=3)
    rank = profiled(path)
    assert len(rank.step_numbers) == 1
    assert next(module for module in rank.modules if not module.path).calls == 3


def test_phases_and_modules_stand_in_the_trace(tmp_path: Path) -> None:
    (path,) = record(ProfilingSettings(wait=1, warmup=1, active=2, repeat=0), tmp_path)
    rank = profiled(path)
    assert {"forward", "backward"} <= {phase.name for phase in rank.phases}
    modules = {module.path: module for module in rank.modules}
    assert {"", "0", "0.inner", "1"} <= set(modules)
    assert modules["0.inner"].kind == "Linear"
    assert modules["0.inner"].calls == 2
    assert modules["0.inner"].backward > 0


def test_shapes_and_stacks_are_recorded_where_asked_for(tmp_path: Path) -> None:
    bare = {"wait": 0, "warmup": 1, "active": 1, "repeat": 0}
    (plain,) = record(ProfilingSettings(**bare, record_shapes=False), tmp_path / "plain")
    (rich,) = record(ProfilingSettings(**bare, with_stack=True), tmp_path / "rich")
    assert {"shapes", "stacks"} <= set(profiled(plain).missing)
    assert not {"shapes", "stacks"} & set(profiled(rich).missing)


def test_a_module_that_fails_leaves_no_annotation_open(tmp_path: Path) -> None:
    class Failing(nn.Module):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    model = nn.Sequential(Failing())
    annotate_modules(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no$"):
            model(torch.ones(1))


@pytest.mark.parametrize("name", ["large.pt.trace.json.gz", "rank0.1763748910.pt.trace.json", f"rank12{SNAPSHOT}"])
def test_a_file_is_handed_over_in_pieces_that_make_it_up(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(range(256)) * (CHUNK // 256) + b"the rest")
    sent = [events.decode(events.encode(piece)) for piece in recorded([path], rank=1, repeat=3)]
    pieces = [piece for piece in sent if isinstance(piece, events.TraceRecorded)]
    assert b"".join(piece.data for piece in pieces) == path.read_bytes()
    assert [piece.last for piece in pieces] == [False, True]
    assert {piece.name for piece in pieces} == {path.name}


def test_a_run_shorter_than_the_schedule_is_refused_with_the_arithmetic() -> None:
    long = {"enabled": True, "wait": 3, "warmup": 1, "active": 3, "repeat": 1}
    TrainSettings.model_validate({"profiling": long, "training": {"warmup_steps": 5, "steps": 6}})
    with pytest.raises(ValueError, match=r"wait 3 \+ \(warmup 1 \+ active 3\) x \(repeat 1 \+ 1\) = 11 steps.* has 10"):
        TrainSettings.model_validate({"profiling": long, "training": {"warmup_steps": 5, "steps": 5}})


def test_epochs_are_counted_where_the_schedule_counts_epochs() -> None:
    profiling = {"enabled": True, "unit": "epoch", "wait": 1, "warmup": 1, "active": 1, "repeat": 0}
    TrainSettings.model_validate({"profiling": profiling, "training": {"epochs": 3}})
    with pytest.raises(ValueError, match=r"= 3 epochs, and the run has 2"):
        TrainSettings.model_validate({"profiling": profiling, "training": {"epochs": 2}})
    with pytest.raises(ValueError, match=r"counts training\.epochs"):
        TrainSettings.model_validate({"profiling": profiling})


def test_nothing_is_asked_of_a_run_that_is_not_recorded() -> None:
    TrainSettings.model_validate({"training": {"warmup_steps": 0, "steps": 1}})


def test_a_device_that_the_profiler_does_not_know_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="no timing events exist for MPS"):
        TrainSettings.model_validate({"device": "mps"})
