"""Each command once, on the CPU and on a GPU, for `make test-torch`, which runs it with other releases of PyTorch.

pytest does not collect this file by itself: other tests look at the same things more closely.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from running import SMALL, TINY, Finished, gpubench, metrics

from gpubench.memory.footprint import Footprints
from gpubench.tuning.result import FILE, read

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.simulated,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
SHORT = ("--steps=6", "--training.warmup_steps=1", "--repeats=1")


def run(command: str, *options: str, results: Path, cwd: Path | None = None) -> Finished:
    done = gpubench(command, *options, results=results, cwd=cwd)
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def footprint_of(done: Finished) -> Footprints:
    return msgspec.json.decode((done.run / "memory.json").read_bytes(), type=Footprints)


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_are_measured_and_compared(device: str, tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    options = (*TINY, f"--device={device}", "--vs=training.batch_size=4", *SHORT)
    done = run("train-bench", *options, "--performance.expandable_segments=true", results=tmp_path)
    for path in done.runs:
        document = msgspec.json.decode((path / "summary.json").read_bytes())
        assert {"throughput", "final_loss"} <= {one["name"] for one in document["metrics"]}
        assert str(torch.__version__) in (path / "environment.json").read_text()
    assert "throughput" in command_line("compare", *map(str, done.runs)).stdout


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_train(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    done = run("train-bench", *SMALL, f"--device={device}", "--world-size=2", *SHORT, results=tmp_path)
    assert metrics(done)["throughput"]["estimate"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_is_profiled_and_its_trace_read_again(
    device: str, tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    recorded = ("--steps=16", "--repeats=1", "--profiling.repeat=1", "--profiling.with_stack=true")
    done = run("profile", *TINY, f"--device={device}", *recorded, results=tmp_path / "own")
    (rank,) = done.document("profile.json")["ranks"]
    assert {"forward", "backward", "optimizer"} <= {one["name"] for one in rank["phases"]}
    assert rank["operators"]
    trace = min((done.run / "profiler_traces").glob("*.trace.json*"))
    assert "forward" in command_line("profile", "--trace", str(trace), "-v").stdout


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_measured_and_its_snapshot_read_again(
    device: str, tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    done = run("memory", *TINY, f"--device={device}", results=tmp_path / "own")
    (measured,) = footprint_of(done).ranks
    assert {"forward", "backward", "optimizer"} <= {one.phase for one in measured.phases}
    if device == "cuda":
        snapshot = done.run / "profiler_traces" / "rank0.snapshot.pickle"
        assert "allocated" in command_line("memory", "--snapshot", str(snapshot), "-v").stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_drawn_alone(workers: int, tmp_path: Path) -> None:
    made = f"lambda: DataLoader([[1.0]] * 64, batch_size=4, num_workers={workers})"
    (tmp_path / "my_data.py").write_text(f"from torch.utils.data import DataLoader\nmake = {made}\n")
    options = ("--alone", "--data=my_data:make", "--steps=6", "--repeats=1")
    done = run("loader", *options, results=tmp_path / "results", cwd=tmp_path)
    stages = {one["kind"] for one in done.document("loader.json")["stages"]}
    assert stages >= {"index", "dataset", "collate", *(["transfer"] if workers else [])}


def test_memory_is_predicted_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    done = run("memory", *TINY, "--predict", "--device-model=h100", results=tmp_path)
    (predicted,) = footprint_of(done).ranks
    assert predicted.peak.amounts["parameters"] > 0
    assert predicted.peak.amounts["workspaces"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_pipeline_of_two_ranks_makes_what_diffusers_makes(device: str, tmp_path: Path) -> None:
    options = ("--unet=tiny", "--steps=4", "--samples=3", "--repeats=1", "--verify", "--world-size=2")
    done = run("pipe-infer", *options, f"--device={device}", results=tmp_path)
    verified = done.document("summary.json")["pipeline"]["verification"]
    assert verified["identical"] == verified["samples"] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_settings_are_searched(device: str, tmp_path: Path) -> None:
    options = (*TINY, f"--device={device}", "--only=training.optimizer_impl", "--runs=9")
    run("tune", *options, *SHORT[:2], results=tmp_path)
    (folder,) = (path.parent for path in tmp_path.glob(f"*/{FILE}"))
    found = read(folder)
    tried = {next(iter(one.levels[0])) for one in found.treatments}
    assert tried | {one.name for one in found.untried} >= {"training.optimizer_impl"}
