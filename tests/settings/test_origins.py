"""A refusal says where the setting is from: its variable, its file, the option that changes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import complaint
from running import Finished

from gpubench.errors import DataError, DeviceError, SettingsError
from gpubench.settings.keys import FIX, THE_RUN, TRIAL, about, naming_origins
from gpubench.settings.loading import apply_overrides
from gpubench.settings.schema import TrainSettings

CommandLine = Callable[..., Finished]


@pytest.mark.parametrize(
    ("command", "variable", "value", "said"),
    [
        ("train-bench", "PRECISION", "fp8", "precision = 'fp8': input should be 'fp32', 'tf32', 'amp' or 'bf16'"),
        ("train-bench", "PRECISION", "tf32", "precision=tf32 is a format of NVIDIA's tensor cores; the CPU has none"),
        ("train-bench", "DEVICE", "mps", "device: no timing events exist for MPS"),
        ("train-bench", "MODEL__NAME", "gpt3", "model.name: there is no built-in model, and no folder, called 'gpt3'"),
        ("train-bench", "DATA__SOURCE", "image-folder", "data.source image-folder reads data.path, and none is given"),
        ("train-bench", "DISTRIBUTED__STRATEGY", "fsdp2", "distributed.strategy=fsdp2 shards among ranks"),
        ("train-bench", "DISTRIBUTED__BACKEND", "nccl", "distributed.backend=nccl moves data between GPUs only"),
        ("profile", "PROFILING__ENABLED", "false", "profiling.enabled=false records no profile to diagnose"),
        ("profile", "PROFILING__UNIT", "epoch", "profiling.unit=epoch counts training.epochs, which are not set"),
        ("memory", "MEMORY__DEVICE_MODEL", "h200", "memory.device_model=h200 is for predictions only"),
        ("pipe-infer", "PRECISION", "amp", "precision = 'amp': input should be 'fp32', 'fp16' or 'bf16'"),
        ("pipe-infer", "MODEL__NAME", "gpt2", "model.name: there is no pipeline folder "),
        ("pipe-infer", "SAMPLING__SCHEDULER", "DDIM5", "sampling.scheduler: diffusers has no scheduler 'DDIM5'"),
        ("pipe-infer", "SAMPLING__OPTIONS", "x", "sampling.options: scheduler option 'x' is not key=value"),
        ("pipe-infer", "WORK__PROMPTS", "nowhere.txt", "work.prompts: the file "),
        ("pipe-infer", "INJECT", "flood", "inject: "),
    ],
)
def test_a_variable_that_reaches_the_wrong_command_is_named(
    command_line: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    variable: str,
    value: str,
    said: str,
) -> None:
    device = () if variable == "DEVICE" else ("--device", "cpu")
    monkeypatch.setenv(f"GPUBENCH_{variable}", value)
    error, _ = complaint(command_line(command, *device))
    assert error.startswith(said)
    assert error.endswith(f"(from GPUBENCH_{variable})")


@pytest.mark.parametrize(
    ("command", "variable", "value", "said"),
    [
        ("train-bench", "MEASUREMENT__TARGET_PRECISION", "1%", "a target precision takes fresh processes"),
        ("memory", "MEMORY__PREDICT", "true", "memory.predict=true: one process predicts for all ranks"),
        ("memory", "MEMORY__FIND_BATCH_SIZE", "true", "memory.find_batch_size=true starts fresh processes"),
    ],
)
def test_a_variable_that_torchrun_does_not_go_with_is_named(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str, variable: str, value: str, said: str
) -> None:
    for name, given in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, given)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv(f"GPUBENCH_{variable}", value)
    error, _ = complaint(command_line(command, "--device", "cpu"))
    assert error.startswith(said)
    assert error.endswith(f"(from GPUBENCH_{variable})")


def test_a_schedule_that_is_too_long_names_the_variable_that_made_it_so(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBENCH_PROFILING__WAIT", "500")
    error, _ = complaint(command_line("profile", "--device", "cpu", "--steps", "20"))
    assert "profiling takes wait 500 + " in error
    assert error.endswith("(profiling.wait from GPUBENCH_PROFILING__WAIT)")


def test_settings_that_contradict_each_other_are_told_with_the_source_of_each(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.yaml").write_text("training: {steps: 5}")
    monkeypatch.setenv("GPUBENCH_TRAINING__EPOCHS", "3")
    error, _ = complaint(command_line("train-bench", "--config", "mine.yaml"))
    assert error.endswith("(training.steps from mine.yaml, training.epochs from GPUBENCH_TRAINING__EPOCHS)")


def test_variables_of_other_commands_are_left_aside(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MEMORY__PREDICT", "PROFILING__WITH_STACK", "OUTPUT__LATENTS", "TRAINING__STEPS"):
        monkeypatch.setenv(f"GPUBENCH_{variable}", "1")
    for command in ("train-bench", "pipe-infer"):
        assert command_line(command, "--device=cpu", "--print-config").code == 0


@pytest.mark.parametrize(
    ("message", "keys", "behind"),
    [
        ("data.path x does not exist", ["data.path"], " (from mine.yaml)"),
        ("data.path x does not exist", [], ""),
        ("seed = 'x': no number", ["seed"], " (from GPUBENCH_SEED)"),
        ("device=cuda, but there is none", ["device"], ""),
        ("model.name: none is called so", ["model.name"], ""),
        ("data.path and training.steps", ["data.path", "training.steps"], " (data.path from mine.yaml)"),
        ("data.path x (from mine.yaml)", ["data.path"], ""),
    ],
)
def test_an_error_names_the_origins_of_its_settings(message: str, keys: list[str], behind: str) -> None:
    origins = {
        "data.path": "mine.yaml",
        "seed": "GPUBENCH_SEED",
        "device": "default: no GPU found",
        "model.name": "command line",
        "training.steps": "command line",
    }
    with pytest.raises(DataError) as refusal, naming_origins(origins):
        raise DataError(message, "a hint", keys=keys)
    assert (refusal.value.message, refusal.value.hint) == (message + behind, "a hint")
    assert refusal.value.keys == tuple(keys)


@pytest.mark.parametrize("origin", [FIX, THE_RUN, TRIAL])
def test_why_a_fix_cannot_be_tried_is_told_without_the_trial(origin: str) -> None:
    with pytest.raises(DeviceError) as refusal, naming_origins({"data.workers": origin, "precision": origin}):
        raise DeviceError("data.workers=9 is more than there are", keys=["data.workers"])
    assert refusal.value.message == "data.workers=9 is more than there are"


def test_an_error_about_a_setting_begins_with_it_and_carries_it() -> None:
    with pytest.raises(DataError) as refusal, about("data.path"):
        raise DataError("there is none")
    assert (refusal.value.message, refusal.value.keys) == ("data.path: there is none", ("data.path",))


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"seed": "x"}, ["seed"]),
        ({"seed": "x", "data.workers": -1}, ["seed", "data.workers"]),
        ({"training.steps": 1, "training.epochs": 1}, ["training.steps", "training.epochs"]),
        ({"training.stepz": 1}, ["training.stepz"]),
    ],
)
def test_what_is_wrong_with_settings_carries_their_keys(given: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(SettingsError) as refusal:
        apply_overrides(TrainSettings(), given)
    assert sorted(refusal.value.keys) == sorted(keys)
