"""The config.yaml of one command's run, given to another; and settings that reach a command which has none such."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli import complaint
from running import Finished

from gpubench.registry import OF_PROGRAMS
from gpubench.settings.commands import COMMANDS
from gpubench.settings.keys import flatten

CommandLine = Callable[..., Finished]
RUN = "run/config.yaml"
TRAINING = ("train-bench", "profile", "memory")
TWO = [(writer, reader) for writer in TRAINING for reader in TRAINING if writer != reader]


def written(call: CommandLine, command: str, *options: str) -> dict[str, Any]:
    """Makes RUN of a run of `command`, as far as its settings go; returns them."""
    shown = call(command, "--device", "cpu", *options, "--print-config")
    assert shown.code == 0, shown.stderr
    Path(RUN).parent.mkdir()
    Path(RUN).write_text(shown.stdout)
    Path(RUN).with_name("run.json").write_text(json.dumps({"command": command}))
    return flatten(yaml.safe_load(shown.stdout))


def read(call: CommandLine, command: str, *options: str, config: str = RUN) -> dict[str, Any]:
    shown = call(command, "--config", config, *options, "--print-config")
    assert shown.code == 0, shown.stderr
    return flatten(yaml.safe_load(shown.stdout))


# test_program.py repeats the run of a program.
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in OF_PROGRAMS])
def test_a_run_is_repeated_by_its_own_command_with_every_setting(command_line: CommandLine, command: str) -> None:
    assert written(command_line, command, "--repeats", "7") == read(command_line, command)


@pytest.mark.parametrize(("writer", "reader"), TWO)
def test_what_was_run_is_taken_over_and_a_commands_own_defaults_are_not(
    command_line: CommandLine, writer: str, reader: str
) -> None:
    theirs = written(command_line, writer, "--model", "gpt2-tiny", "--seed=7", "--training.optimizer=sgd")
    Path("plain.yaml").write_text("device: cpu")
    taken, plain = read(command_line, reader), read(command_line, reader, config="plain.yaml")
    assert (taken["model.name"], taken["seed"], taken["training.optimizer"]) == ("gpt2-tiny", 7, "sgd")
    own = {"experiment", "measurement.repeats", "profiling.enabled"} | {key for key in plain if key not in theirs}
    assert {key: taken[key] for key in own & taken.keys()} == {key: plain[key] for key in own & plain.keys()}
    assert {key: taken[key] for key in taken.keys() - own} == {key: theirs[key] for key in taken.keys() - own}


@pytest.mark.parametrize(("writer", "reader"), TWO)
def test_what_its_user_chose_is_taken_over(command_line: CommandLine, writer: str, reader: str) -> None:
    written(command_line, writer, "--experiment", "mine", "--measurement.repeats=7")
    taken = read(command_line, reader)
    assert (taken["experiment"], taken["measurement.repeats"]) == ("mine", 7)


def test_variables_say_what_the_run_of_another_command_leaves_open(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(command_line, "train-bench", "--seed=5")
    for variable in ("MEMORY__STEPS", "MEASUREMENT__REPEATS", "SEED", "TRAINING__BATCH_SIZE"):
        monkeypatch.setenv(f"GPUBENCH_{variable}", "9")
    found = read(command_line, "memory")
    assert (found["memory.steps"], found["measurement.repeats"], found["seed"]) == (9, 9, 5)
    assert found["training.batch_size"] != 9
    own = read(command_line, "train-bench")
    assert (own["measurement.repeats"], own["seed"]) == (3, 5)


@pytest.mark.parametrize(("trials", "tried"), [("profile-verify", "memory"), ("nightly-verify", "nightly")])
def test_the_experiment_of_trials_stays_theirs(command_line: CommandLine, trials: str, tried: str) -> None:
    written(command_line, "train-bench", "--experiment", trials)
    assert read(command_line, "train-bench")["experiment"] == trials
    assert read(command_line, "memory")["experiment"] == tried


@pytest.mark.parametrize("reader", TRAINING)
def test_a_run_of_another_kind_is_refused_with_the_command_that_made_it(command_line: CommandLine, reader: str) -> None:
    written(command_line, "pipe-infer", "--unet", "dummy")
    said = complaint(command_line(reader, "--config", RUN))
    assert said == (
        f"{RUN} is of a run of pipe-infer, which {reader} cannot run",
        f"gpubench pipe-infer --config {RUN}",
    )


def test_a_pipeline_takes_no_run_of_training(command_line: CommandLine) -> None:
    written(command_line, "profile")
    assert complaint(command_line("pipe-infer", "--config", RUN))[0].startswith(f"{RUN} is of a run of profile")


@pytest.mark.parametrize("record", ["{}", "no json", "[" * 100_000, '{"command": "sing"}', '{"command": 5}'])
def test_a_run_that_does_not_say_whose_it_is_counts_as_the_commands_own(command_line: CommandLine, record: str) -> None:
    before = written(command_line, "train-bench")
    Path(RUN).with_name("run.json").write_text(record)
    assert read(command_line, "train-bench") == before


def test_one_file_serves_all_commands_that_train(command_line: CommandLine) -> None:
    Path("mine.yaml").write_text("seed: 7\nmemory: {steps: 5}\nprofiling: {active: 2}\npredict: false")
    found = {command: read(command_line, command, config="mine.yaml") for command in TRAINING}
    assert {one["seed"] for one in found.values()} == {7}
    assert [one.get("memory.steps") for one in found.values()] == [None, None, 5]
    assert [one.get("profiling.active") for one in found.values()] == [2, 2, None]


@pytest.mark.parametrize(
    ("command", "text", "said", "hint"),
    [
        ("train-bench", "sampling: {steps: 5}", "'sampling.steps' is a setting of pipe-infer, not of", "pipe-infer"),
        ("pipe-infer", "memory: {steps: 5}", "'memory.steps' is a setting of memory, not of pipe-infer", "memory"),
        ("memory", "unet: dummy", "'unet' is a setting of pipe-infer, not of memory", "use gpubench pipe-infer"),
        ("train-bench", "memory: {stps: 5}", "unknown setting 'memory.stps'", "did you mean 'memory.steps'?"),
        ("train-bench", "memory: 5", "unknown setting 'memory'", "did you mean"),
        ("train-bench", "sampling:", "unknown setting 'sampling'", "did you mean"),
        ("memory", "profiling: {activ: 5}", "unknown setting 'profiling.activ'", "did you mean 'profiling.active'?"),
    ],
)
def test_what_a_file_sets_of_other_work_is_refused(
    command_line: CommandLine, command: str, text: str, said: str, hint: str
) -> None:
    Path("mine.yaml").write_text(text)
    error, advised = complaint(command_line(command, "--config", "mine.yaml"))
    assert error.startswith(said)
    assert error.endswith("(from mine.yaml)")
    assert hint in advised


def test_an_empty_section_of_a_command_alike_is_left_aside(command_line: CommandLine) -> None:
    Path("mine.yaml").write_text("seed: 7\nmemory:\n")
    assert read(command_line, "train-bench", "--device=cpu", config="mine.yaml")["seed"] == 7


def test_what_the_command_line_sets_of_another_command_is_refused_with_its_name(command_line: CommandLine) -> None:
    said = complaint(command_line("train-bench", "--memory.steps=5"))
    assert said == ("'memory.steps' is a setting of memory, not of train-bench", "leave it out, or use gpubench memory")


@pytest.mark.parametrize("file", ["--snapshot", "--trace"])
def test_beside_a_file_too_a_setting_of_another_command_is_refused_with_its_name(
    command_line: CommandLine, file: str
) -> None:
    said = complaint(command_line("memory", file, "x", "--profiling.enabled=true"))
    assert said[0] == "'profiling.enabled' is a setting of train-bench, profile and pipe-infer, not of memory"
