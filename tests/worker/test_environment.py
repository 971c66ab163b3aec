import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fake_nvml import GPUS, FakeDriver, FakeNvml

from gpubench import devices, machine
from gpubench.probe.facts import recordable
from gpubench.worker import environment
from gpubench.worker.environment import capture_env_metadata

SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "NCCL_SECRET_TOKEN",
    "NCCL_AUTHTOKEN",
    "NCCL_AUTH",
    "NCCL_API",
    "GLOO_COOKIE",
    "ONEDNN_BEARER",
    "TORCH_AUTH_PASSWORD",
    "TORCH_NCCL_PASSPHRASE",
    "TORCHINDUCTOR_REMOTE_KEY",
    "OMP_API_KEY",
    "KMP_CREDENTIALS",
    "MKL_LICENSE_PWD",
    "GLOO_private_cert",
    "SLURM_JWT",
    "HOME",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(facts: Any) -> Iterator[Any]:
    if isinstance(facts, dict):
        for fact in facts.values():
            yield from leaves(fact)
    elif isinstance(facts, list):
        for fact in facts:
            yield from leaves(fact)
    else:
        yield facts


def test_the_facts_are_plain_json_and_none_is_unknown() -> None:
    facts = capture_env_metadata()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert None not in list(leaves(facts))


def test_the_facts_are_those_of_this_process() -> None:
    facts = capture_env_metadata()
    assert facts["torch"]["version"] == str(torch.__version__)
    assert str(torch.__version__).startswith(facts["packages"]["torch"])  # the build's own suffix is in one or in both
    assert facts["torch"]["git_version"] == torch.version.git_version
    assert facts["threads"]["intra_op"] == 1
    assert facts["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert facts["python"]["version"] == sys.version.split()[0]


def test_math_flags_follow_the_settings() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        math = capture_env_metadata()["math"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert math["float32_matmul_precision"] == "high"
    assert math["matmul_allow_tf32"] is True


def test_no_secret_is_ever_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"hush-{name}")
    monkeypatch.setenv("NCCL_PROXY", "https://user:hush@proxy")
    written = json.dumps(capture_env_metadata())
    assert "hush" not in written
    assert not [name for name in (*SECRETS, "NCCL_PROXY") if f'"{name}"' in written]


def test_variables_that_tune_the_measurement_are_written() -> None:
    tuning = {
        "OMP_NUM_THREADS": "4",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SLURM_JOB_ID": "17",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert recordable(tuning | {"EDITOR": "vi", "TORCH_SOMETHING_NEW": "1"}) == tuning


def test_unreadable_files_leave_facts_out_and_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> str:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(machine, "_os_name", lambda: "Linux")
    facts = capture_env_metadata()
    assert "model" not in facts["cpu"]
    assert "virtual" not in facts["host"]
    assert facts["cpu"]["usable_cores"] >= 1


def test_gpus_are_described_with_clocks_power_and_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "ClockInfo": {1: 1500, 2: 3000}.get,
        "MaxClockInfo": {1: 1980, 2: 3201}.get,
        "EnforcedPowerLimit": 500_000,
        "PowerManagementDefaultLimit": 700_000,
        "EccMode": [1, 1],
        "PersistenceMode": 0,
        "MigMode": [0, 1],
    }
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(GPUS[0] | asked, GPUS[2]))
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(GPUS[0], GPUS[2]))
    facts = capture_env_metadata()
    assert facts["driver"] == {"version": "570.86.15", "cuda": "12.8"}
    first, second = facts["gpus"]
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-aaaa1111-0000-0000-0000-000000000000",
        "memory_bytes": 150_754_820_096,
        "compute_capability": "9.0",
        "sm_clock_mhz": 1500,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 3000,
        "memory_clock_max_mhz": 3201,
        "power_cap_w": 500.0,
        "power_cap_default_w": 700.0,
        "ecc": True,
        "persistence_mode": False,
        "mig_mode": False,
    }
    assert set(second) == {"index", "name", "uuid", "compute_capability"}


def test_mixed_gpus_keep_their_own_facts_where_cuda_and_nvml_number_them_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked = [gpu | {"ClockInfo": {1: clock}.get} for gpu, clock in ((GPUS[0], 1980), (GPUS[2], 2600))]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*clocked))
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(GPUS[2], GPUS[0]))
    found = [SimpleNamespace(multi_processor_count=48), SimpleNamespace(multi_processor_count=132)]
    monkeypatch.setattr(environment, "_properties", lambda: found)
    gpus = [(gpu["name"], gpu["multiprocessors"], gpu["sm_clock_mhz"]) for gpu in capture_env_metadata()["gpus"]]
    assert gpus == [("NVIDIA GB10", 48, 2600), ("NVIDIA H200", 132, 1980)]


def test_each_gpu_is_looked_up_in_nvml_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, looked_up = FakeNvml(*GPUS[:2]), []
    look_up = fake.nvmlDeviceGetHandleByUUID

    def counted(uuid: str) -> dict[str, object]:
        looked_up.append(uuid)
        return look_up(uuid)

    monkeypatch.setattr(fake, "nvmlDeviceGetHandleByUUID", counted)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "open_driver", lambda: FakeDriver(*GPUS[:2]))
    assert len(capture_env_metadata()["gpus"]) == 2
    assert looked_up == [gpu["UUID"] for gpu in GPUS[:2]]
    assert fake.users == 0


def test_amd_gpus_come_from_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    found = SimpleNamespace(
        name="AMD Instinct MI300X", total_memory=206_000_000_000, multi_processor_count=304, gcnArchName="gfx942"
    )
    monkeypatch.setattr(environment, "_properties", lambda: [found])
    facts = capture_env_metadata()
    assert facts["driver"] == {}
    assert facts["gpus"] == [
        {
            "name": "AMD Instinct MI300X",
            "memory_bytes": 206_000_000_000,
            "architecture": "gfx942",
            "multiprocessors": 304,
        }
    ]


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_capturing_does_not_initialise_cuda() -> None:
    initialised = torch.cuda.is_initialized()
    found = capture_env_metadata()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert torch.cuda.is_initialized() == initialised
    assert found["torch"]["cudnn"] == torch.backends.cudnn.version()
