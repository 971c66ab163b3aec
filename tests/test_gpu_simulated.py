"""The simulated CUDA itself, and what only it can provoke: refusals of the driver, three GPUs, no memory left."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE, Finished, environment, gpubench, metrics, simulated

from gpubench.devices import visible_gpus
from gpubench.host.sampler import Telemetry
from gpubench.telemetry import GpuSample
from gpubench.worker.environment import capture_env_metadata

NAME = "(simulated)"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not simulated(), reason="needs the simulated CUDA of tests/fake_cuda"),
]
SHORT = ("--device=cuda", "--model=small_model:build", "--precision=fp32", "--logging.graph=false")

HUNGRY = """
import torch
from torch import nn

class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, batch):
        self.held = [torch.empty(2**30, dtype=torch.uint8, device="DEVICE") for _ in range(16)]
        return self.inner(batch)

def build():
    return Hungry(), lambda size: torch.ones(size, 16), lambda module, batch: module(batch).sum()
"""


# --- Memory


def held(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=environment()
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("bytearray(9 * 2**30)", "MemoryError"),
        ("import torch; torch.empty(9 * 2**30, dtype=torch.uint8)", "can't allocate memory"),
        ("import torch; torch.empty(9 * 2**30, dtype=torch.uint8, device='cuda')", "OutOfMemoryError"),
        ("import torch; torch.empty(9 * 2**30, dtype=torch.uint8, pin_memory=True)", "out of memory"),
    ],
    ids=["python", "host", "device", "pinned"],
)
def test_a_size_beyond_the_limit_is_an_error_in_the_process_that_asks(code: str, error: str) -> None:
    done = held(code)
    assert done.returncode == 1
    assert error in done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_whose_sizes_add_up_beyond_the_limit_is_out_of_memory(device: str, tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY.replace("DEVICE", device))
    options = ("--model=hungry:build", "--device=cuda", "--precision=fp32", "--steps=1", "--repeats=1")
    done = gpubench("train-bench", *options, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 1
    assert "out of memory in forward of step 0" in done.stderr


# --- What is told of the simulated device


@pytest.mark.parametrize(
    "command",
    [
        ("train-bench", *SHORT, "--steps=3", "--training.warmup_steps=1", "--repeats=1"),
        ("memory", *SHORT),
        ("profile", *SHORT, "--training.warmup_steps=1", "--repeats=1"),
        ("pipe-infer", "--device=cuda", "--unet=tiny", "--steps=2", "--samples=1", "--repeats=1"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_names_the_device_as_simulated_and_shows_no_peak(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    done = gpubench(*command, results=tmp_path)
    assert done.code == 0, done.stderr
    assert NAME in done.stdout
    assert "mfu" not in done.stdout.lower().replace("no mfu: ", ""), "a warning says that there is none"
    assert all(gpu["name"].endswith(NAME) for gpu in done.document("environment.json")["gpus"])
    if (done.run / "summary.json").exists():
        summary = done.document("summary.json")
        assert not summary.get("peak")
        assert not {name for name in metrics(done) if "mfu" in name}


def test_a_search_tries_what_a_gpu_has_and_names_it_as_simulated(tmp_path: Path) -> None:
    quick = ("--steps=4", "--training.warmup_steps=1", "--runs=6", "--batch-size=2", "--model=resnet-tiny")
    only = "--only=precision,performance.matmul_precision,performance.cpu_threads"
    options = ("--device=cuda", "--precision=fp32", "--logging.graph=false", "--json")
    done = gpubench("tune", *options, *quick, only, results=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert NAME in found["device"]
    (precision,) = found["treatments"]
    assert precision["levels"] == [{"precision": "tf32"}, {"precision": "bf16"}]
    runs = [run for block in found["blocks"] for run in block["runs"]]
    assert all(run["throughput"] > 0 and run["peak"] > 2**20 and run["seconds"] > 0 for run in runs)
    assert {"performance.cpu_threads", "performance.matmul_precision"} <= {one["name"] for one in found["untried"]}


# --- Two GPUs and three, NVML and its refusals


def sampled(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[GpuSample]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry = Telemetry([0, 1], 1.0)
    try:
        return telemetry.sample().gpus
    finally:
        telemetry.close()


def test_what_nvml_refuses_is_left_out_of_a_sample_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "nvmlDeviceGetTotalEnergyConsumption:3,nvmlDeviceGetUtilizationRates:999,nvmlDeviceGetClockInfo:15"
    gpus = sampled(monkeypatch, FAKENVML_ERROR=refused)
    assert [gpu.index for gpu in gpus] == [0, 1]
    for gpu in gpus:
        assert (gpu.energy_j, gpu.utilization, gpu.sm_clock_mhz) == (None, None, None)
        assert gpu.power_w is not None
        assert gpu.power_w >= 90
        assert gpu.temperature_c is not None


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [("0x1", []), ("0x4", ["SwPowerCap"]), ("0x48", ["HwSlowdown", "HwThermalSlowdown"])],
)
def test_throttle_reasons_are_named(bits: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu.throttle_reasons for gpu in sampled(monkeypatch, FAKENVML_REASONS=bits)] == [reasons, reasons]


def test_the_older_name_of_throttle_reasons_is_asked_where_the_newer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse(handle: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", refuse)
    assert [gpu.throttle_reasons for gpu in sampled(monkeypatch, FAKENVML_REASONS="0x8")] == [["HwSlowdown"]] * 2


def test_without_nvml_the_driver_still_lists_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    known = visible_gpus()
    monkeypatch.setenv("FAKENVML_ERROR", "nvmlInit_v2:9")
    alone = visible_gpus()
    assert [gpu.index for gpu in known] == [0, 1]
    assert [gpu.index for gpu in alone] == [None, None]
    assert [(gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in alone] == [
        (gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in known
    ]


def test_the_environment_has_what_nvml_tells_and_lacks_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKENVML_ERROR", "nvmlDeviceGetEccMode:3,nvmlSystemGetDriverVersion:999")
    found = capture_env_metadata()
    assert len(found["gpus"]) == 2
    for gpu in found["gpus"]:
        assert gpu["power_cap_w"] == 700
        assert (gpu["persistence_mode"], gpu["mig_mode"]) == (True, False)
        assert "ecc" not in gpu
    assert found["driver"] == {"cuda": "13.0"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_pipeline_over_nccl_makes_what_the_reference_makes(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    options = ("--device=cuda", "--unet=tiny", "--steps=6", "--samples=3", "--repeats=1", "--verify", "-q")
    done = gpubench("pipe-infer", *options, f"--world-size={ranks}", results=tmp_path)
    assert done.code == 0, done.stderr
    verified = done.document("summary.json")["pipeline"]["verification"]
    assert verified["identical"] == verified["samples"] == 3
    assert len(done.document("environment.json")["gpus"]) == 3
    assert "backend: nccl" in (done.run / "config.yaml").read_text()


OWN, SAME = "$LOCAL_RANK", "1"
SHORTEST = (*SHORT, "--steps=4", "--training.warmup_steps=1", "--repeats=1")


@pytest.mark.parametrize(
    ("visible", "backend", "command"),
    [
        (OWN, "nccl", ("train-bench", *SHORTEST)),
        (SAME, "gloo", ("train-bench", *SHORTEST)),
        (OWN, "nccl", ("memory", *SHORT[:3])),
        (
            OWN,
            "nccl",
            ("pipe-infer", "--device=cuda", "--unet=tiny", "--steps=4", "--samples=2", "--repeats=1", "--verify"),
        ),
        (
            SAME,
            "gloo",
            ("pipe-infer", "--device=cuda", "--unet=tiny", "--steps=4", "--samples=2", "--repeats=1", "--verify"),
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_ranks_that_see_one_gpu_each_choose_their_backend_by_whose_it_is(
    visible: str, backend: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python")
    hidden = ("sh", "-c", f'CUDA_VISIBLE_DEVICES={visible} exec "$0" "$@"', sys.executable)
    done = gpubench(*command, "-q", results=tmp_path, launcher=(*torchrun, *hidden))
    assert done.code == 0, done.stderr
    record = done.document("run.json")
    assert record["observed"] == {"distributed.backend": backend}
    assert "backend: null" in (done.run / "config.yaml").read_text()
    if command[0] != "memory":
        assert record["gpus"] == ([0, 1] if visible == OWN else [1])


ONE_OF_THREE = """
import sys
import torch

model = torch.nn.Linear(64, 64).to(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.ones(8, 64, device=sys.argv[1])).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("number", [0, 2])
def test_the_telemetry_of_a_program_is_that_of_the_gpu_that_it_uses(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    (tmp_path / "one.py").write_text(ONE_OF_THREE)
    program = (sys.executable, str(tmp_path / "one.py"), f"cuda:{number}")
    done = gpubench("train-bench", "--repeats=1", "-q", "--", *program, results=tmp_path / "results")
    assert done.code == 0, done.stderr
    assert done.document("run.json")["gpus"] == [number]
    assert {len(line["gpus"]) for line in done.lines("telemetry.jsonl")} == {3}


def test_fully_sharded_ranks_over_nccl_learn_what_replicated_ones_learn(tmp_path: Path) -> None:
    losses = {}
    for strategy in ("ddp", "fsdp2"):
        options = ("--world-size=2", "--steps=4", "--training.warmup_steps=1", "--repeats=1")
        done = gpubench(
            *("train-bench", *SHORT, *options, f"--distributed.strategy={strategy}"), results=tmp_path / strategy
        )
        assert done.code == 0, done.stderr
        losses[strategy] = losses_of(done)
    assert losses["fsdp2"] == pytest.approx(losses["ddp"], rel=1e-5)


def test_more_ranks_than_gpus_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = gpubench("train-bench", *SHORT, "--world-size=3", results=tmp_path)
    assert done.code == 2
    assert "3" in done.stderr
    assert "hint:" in done.stderr


def losses_of(done: Finished) -> list[float]:
    """Of both ranks, whose steps are written down as they come."""
    steps = sorted(done.lines("steps.jsonl"), key=lambda step: (step["rank"], step["step"]))
    return [step["loss"] for step in steps]
