"""Trials that cannot be made are refused before anything runs; of those that are ended, what was known is kept."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from cli import complaint
from running import Finished

from gpubench.commands.trying import on_the_rest, record
from gpubench.errors import Interrupted, RunFailed
from gpubench.findings import Findings

FOUND = Findings(headline="before", findings=[], unanswered=[])
TRIED = Findings(headline="after", findings=[], unanswered=[])


class Keeping:
    command = "profile"

    def __init__(self, path: Path) -> None:
        self.findings = FOUND
        self.writer = SimpleNamespace(path=path)

    def conclude(self, findings: Findings) -> None:
        self.findings = findings


def ending(error: BaseException) -> Iterator[Findings]:
    yield TRIED
    raise error


@pytest.mark.parametrize("error", [Interrupted("interrupted"), KeyboardInterrupt()])
def test_what_was_tried_before_an_interrupt_is_kept_and_marked(tmp_path: Path, error: BaseException) -> None:
    recorder = Keeping(tmp_path)
    ended = record(ending(error), recorder.conclude, cast("Any", recorder))
    assert isinstance(ended, Interrupted)
    assert recorder.findings == msgspec.structs.replace(TRIED, interrupted=True)


def test_what_was_tried_before_a_failure_is_kept_as_it_is(tmp_path: Path) -> None:
    recorder, error = Keeping(tmp_path), RunFailed("the disk is full")
    assert record(ending(error), recorder.conclude, cast("Any", recorder)) is error
    assert recorder.findings == TRIED


@pytest.mark.parametrize(
    "arguments",
    [("profile", "--verify"), ("memory", "--verify"), ("memory", "--find-batch-size", "--device-memory", "1GiB")],
)
def test_an_experiment_whose_trials_would_have_too_long_a_name_is_refused_at_once(
    command_line: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    common = (*arguments, "--device", "cpu", "--print-config")
    assert command_line(*common, "--experiment", "x" * 113).code == 0
    monkeypatch.setenv("GPUBENCH_EXPERIMENT", "x" * 114)
    said, hint = complaint(command_line(*common))
    assert said == (
        f"experiment: '{'x' * 114}' has 114 bytes; the limit is 113, because the folder of the trial runs adds -verify "
        "to the name (from GPUBENCH_EXPERIMENT)"
    )
    assert hint == "give an --experiment of at most 113 bytes"
    once = [argument for argument in common if argument not in ("--verify", "--find-batch-size")]
    assert command_line(*once, "--experiment", "x" * 114).code == 0


def test_interrupted_trials_say_how_to_measure_a_fix_that_is_left() -> None:
    assert on_the_rest([], "train-bench") == "the run directory keeps what was measured"
    assert on_the_rest([{"data.workers": 2, "data.pin_memory": True}, {"precision": "bf16"}], "train-bench") == (
        "the run directory keeps what was measured; to go on, measure the same with gpubench train-bench "
        "--vs data.workers=2 --vs data.pin_memory=true, which is the first of 2 fixes that are left"
    )
