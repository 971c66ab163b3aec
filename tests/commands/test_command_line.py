"""The command line from outside: help, presets, and what --print-config and a run make of the options."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import typer
import yaml
from running import Finished, gpubench

from gpubench import __version__, configs
from gpubench.commands import app
from gpubench.settings.keys import flatten
from gpubench.settings.loading import load
from gpubench.settings.schema import TrainSettings

CommandLine = Callable[..., Finished]
PRESETS = sorted(path.stem for path in Path(configs.__path__[0]).glob("*.yaml"))


def commands(command: Any, name: str = "gpubench") -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {child}")


def test_every_command_and_option_is_explained() -> None:
    tree = dict(commands(typer.main.get_command(app)))
    assert "gpubench train-bench" in tree
    for name, command in tree.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.opts}"
            assert parameter.help.endswith("."), f"{name} {parameter.opts}"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_commands(command_line: CommandLine, option: str) -> None:
    result = command_line(option)
    assert (result.code, result.stderr) == (0, "")
    assert "train-bench" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", ["train-bench", "runs", "runs show", "compare", "tune"])
@pytest.mark.parametrize("words", ["", "-v", "--results one"])
def test_every_command_has_its_help_after_any_other_option(command_line: CommandLine, command: str, words: str) -> None:
    whole, short = (command_line(*command.split(), *words.split(), option) for option in ("--help", "-h"))
    assert (short.code, short.stderr, short.stdout) == (0, "", whole.stdout)
    assert short.stdout.startswith("Usage: ")


def test_help_of_a_command_shows_examples_and_every_option(command_line: CommandLine) -> None:
    result = command_line("train-bench", "--help")
    assert (result.code, result.stderr) == (0, "")
    for parameter in dict(commands(typer.main.get_command(app)))["gpubench train-bench"].params:
        assert max(parameter.opts, key=len) in result.stdout
    assert "gpubench train-bench --precision bf16 --vs precision=fp32" in result.stdout


@pytest.mark.parametrize("command", ["", *reference.commands()])
def test_help_fits_into_80_columns(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command_line(*command.split(), "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "<bool>" not in shown


def test_no_command_shows_the_help_and_fails(command_line: CommandLine) -> None:
    result = command_line()
    assert (result.code, result.stderr) == (2, "")
    assert "train-bench" in result.stdout


def test_version_names_torch_and_the_gpus(command_line: CommandLine) -> None:
    result = command_line("--version")
    assert result.code == 0
    assert result.stdout.startswith(f"gpubench {__version__} (torch ")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_works_on_a_cpu(command_line: CommandLine, preset: str) -> None:
    result = command_line("train-bench", "--config", preset, "--device", "cpu", "--print-config")
    assert result.code == 0, result.stderr
    resolved = TrainSettings.model_validate(yaml.safe_load(result.stdout))
    given = flatten(load(TrainSettings, preset).settings.model_dump(exclude_unset=True))
    assert {key: flatten(resolved.model_dump())[key] for key in given} == given
    assert resolved.model.name
    assert resolved.training.batch_size


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_says_in_one_line_what_it_is(preset: str) -> None:
    first, second, *_ = (Path(configs.__path__[0]) / f"{preset}.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert not second.startswith("#")


def test_print_config_shows_the_sources(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("experiment: file\nseed: 2\ntraining: {momentum: 0.5, batch_size: 2}")
    monkeypatch.setenv("GPUBENCH_SEED", "3")
    monkeypatch.setenv("GPUBENCH_TRAINING__BATCH_SIZE", "3")
    arguments = ("--config", "mine.yaml", "--device=cpu", "--batch-size", "4", "--training.grad-accumulation=4")
    result = command_line(
        "train-bench", *arguments, "--print-config", "--performance.compile", "--training.epochs", "4"
    )
    assert (result.code, result.stderr) == (0, "")
    lines = {text.strip(): origin for line in result.stdout.splitlines() for text, _, origin in [line.partition(" # ")]}
    assert lines["experiment: file"] == lines["momentum: 0.5"] == "mine.yaml"
    assert lines["seed: 3"] == "GPUBENCH_SEED"
    for entry in ("device: cpu", "batch_size: 4", "grad_accumulation: 4", "compile: true", "epochs: 4"):
        assert lines[entry] == "command line"
    assert lines["warmup_steps: null"] == "default"
    assert lines["name: resnet18"] == "default: ResNet in a size that suits the device"
    assert not (tmp_path / "results").exists()


def test_what_print_config_shows_is_a_configuration(command_line: CommandLine, tmp_path: Path) -> None:
    shown = command_line("train-bench", "--device=cpu", "--epochs", "2", "--data.samples=500", "--print-config").stdout
    (tmp_path / "shown.yaml").write_text(shown)
    again = command_line("train-bench", "--config", "shown.yaml", "--print-config")
    assert again.code == 0, again.stderr
    assert yaml.safe_load(again.stdout) == yaml.safe_load(shown)


def test_print_config_shows_both_sides_of_a_comparison(command_line: CommandLine) -> None:
    result = command_line(
        "train-bench", "--device=cpu", "--vs", "precision=bf16", "--vs", "batch_size=3", "--print-config"
    )
    before, after = (flatten(document) for document in yaml.safe_load_all(result.stdout))
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert changed == {"precision": ("fp32", "bf16"), "training.batch_size": (16, 3)}
    assert "precision: bf16" in result.stdout
    assert result.stdout.count("# --vs") == 2


def test_a_run_records_the_configuration_it_ran_with(finished_run: Path) -> None:
    settings = load(TrainSettings, str(finished_run / "config.yaml")).settings
    assert (settings.experiment, settings.model.name, settings.training.steps) == ("short", "gpt2-tiny", 4)
    assert (settings.device, settings.precision, settings.training.batch_size) == ("cpu", "fp32", 8)
    record = json.loads((finished_run / "run.json").read_text())
    assert (record["status"], record["error"]) == ("completed", None)
    assert finished_run.parent.name == "short"


def test_a_process_of_its_own_does_the_same_and_keeps_to_its_streams(tmp_path: Path) -> None:
    good = gpubench("train-bench", "--config", "tiny", "--print-config", results=tmp_path / "results")
    assert (good.code, good.stderr) == (0, "")
    assert yaml.safe_load(good.stdout)["model"]["name"] == "gpt2-tiny"
    bad = gpubench("train-bench", "--steps", "x", results=tmp_path / "results")
    assert (bad.code, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: training.steps = 'x'")
    assert list(tmp_path.iterdir()) == []
