"""What differs between releases of PyTorch, and what is refused for want of a later one."""

from collections.abc import Callable

import pytest
import torch
from cli import complaint
from running import Finished

from gpubench import devices, releases
from gpubench.releases import Release

CommandLine = Callable[..., Finished]


def pretend(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(releases, "installed", lambda: Release(major, minor))


def test_the_release_is_that_of_the_installed_pytorch() -> None:
    major, minor, *_ = torch.__version__.split(".")
    assert releases.installed() == Release(int(major), int(minor))


@pytest.mark.parametrize(
    ("version", "found"), [("2.15.0a0+gitd0f2af8", (2, 15)), ("2.6.0+cu124", (2, 6)), (None, (2, 13)), ("?", (2, 13))]
)
def test_a_version_that_cannot_be_read_counts_as_the_release_that_predictions_imitate(
    version: str | None, found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "torch_version", lambda: version)
    assert releases.installed.__wrapped__() == Release(*found)


def test_releases_are_ordered_by_number_and_not_by_spelling() -> None:
    assert Release(2, 6) < Release(2, 10) < Release(2, 13) < Release(3, 0)


def test_predictions_say_that_their_rules_are_of_another_release() -> None:
    assert Release(2, 13).notes == []
    (note,) = Release(2, 6).notes
    assert "2.6" in note
    assert "2.13" in note
    assert "reserve" in Release(2, 15).notes[1]


def test_fsdp2_on_a_cpu_is_refused_before_the_release_that_has_it(
    monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    pretend(monkeypatch, 2, 6)
    options = ("--model=gpt2-tiny", "--device=cpu", "--world-size=2", "--distributed.strategy=fsdp2", "--print-config")
    error, hint = complaint(command_line("train-bench", *options))
    assert "PyTorch 2.7" in error
    assert "ddp" in hint
    pretend(monkeypatch, 2, 7)
    assert command_line("train-bench", *options).code == 0


def test_predicting_several_ranks_is_refused_before_the_release_that_can(
    monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    pretend(monkeypatch, 2, 6)
    options = ("--model=gpt2-tiny", "--predict", "--device-model=h100", "--world-size=2", "--print-config")
    error, hint = complaint(command_line("memory", *options))
    assert "PyTorch 2.7" in error
    assert "--world-size 1" in hint


@pytest.mark.parametrize(
    "arguments", [("train-bench",), ("profile",), ("memory",), ("memory", "--predict"), ("pipe-infer",)]
)
def test_a_command_that_runs_says_that_pytorch_is_missing(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    monkeypatch.setattr(devices, "_torch_facts", dict)
    error, hint = complaint(command_line(*arguments))
    assert error == "PyTorch is not installed"
    assert "driver" in hint
