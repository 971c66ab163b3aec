"""How long a repeat is: by what the user sets, or by the time that its first steps take."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import SECONDS_EACH
from probing import Loop, probed
from running import HOST, gpubench
from torch import Tensor, nn

from gpubench.host import schedule
from gpubench.probe import hooks
from gpubench.probe.hooks import ONE_OF_SEVERAL
from gpubench.probe.length import FEWEST, MOST, MOST_WARMUP, Length, fitting, shortened, warmup_of
from gpubench.probe.rhythm import LONGEST_RUN
from gpubench.settings.sections import TrainingSettings
from gpubench.worker.loop import Undecided, length_of


def decided(seconds: float, step_time: float, warmup: int | None = None, first: float = 100.0) -> tuple[Length, int]:
    """Returns the length of a repeat of equal steps after a slow first one, and the durations that decided it."""
    durations: list[float] = []
    while (length := fitting(seconds, durations, warmup)) is None:
        durations.append(step_time if durations else first)
    return length, len(durations)


@pytest.mark.parametrize("step_time", [1e-6, 1e-3, 0.05, 0.2, 0.5, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("warmup", [None, 0, 3, 40])
def test_steps_fill_the_time_within_what_statistics_need(step_time: float, warmup: int | None) -> None:
    length, known = decided(12.0, step_time, warmup)
    measured = length.steps - length.warmup
    assert FEWEST <= measured <= MOST
    assert length.warmup == (warmup_of(1 + int(12.0 / step_time)) if warmup is None else warmup)
    if FEWEST < measured < MOST:
        assert 12.0 - step_time <= (length.steps - 1) * step_time <= 12.0 + 1e-9
    assert known == (2 if 12.0 / step_time < MOST_WARMUP else MOST_WARMUP)


def test_sixty_steps_have_ten_of_warmup_and_the_slowest_have_one() -> None:
    assert decided(12.0, 0.2)[0] == Length(10, 61)
    assert decided(12.0, 4.0)[0] == Length(1, 4)
    assert decided(12.0, 100.0)[0] == Length(1, 1 + FEWEST)


def test_a_number_of_steps_time_or_target_that_the_user_sets_is_kept() -> None:
    assert length_of(TrainingSettings(steps=20), None, 12.0) == Length(10, 30)
    assert length_of(TrainingSettings(steps=20, warmup_steps=2), None, 12.0) == Length(2, 22)
    assert length_of(TrainingSettings(epochs=2, warmup_steps=1), 5, 12.0) == Length(1, 10)
    limited = length_of(TrainingSettings(seconds=3.0), None, 12.0)
    assert isinstance(limited, Undecided)
    assert limited.decide([9.0] + [0.1] * 9) == Length(10, 40)


def test_runs_share_the_time_and_sides_of_a_comparison_have_the_same_steps() -> None:
    def runs(*repeats: int) -> list[Any]:
        return [
            SimpleNamespace(
                settings=SimpleNamespace(measurement=SimpleNamespace(repeats=number)), length=None, scale={}
            )
            for number in repeats
        ]

    def shares(given: Sequence[Any], runs: int = 0) -> set[float]:
        schedule._share_time(given, runs)
        return {one.seconds_each for one in given}

    assert shares(runs(3)) == shares(runs(1)) == {12.0}
    assert shares(runs(3, 3)) == {6.0}
    assert shares(runs(4), runs=9) == {4.0}
    first, same, other = runs(3, 3, 3)
    first.length, other.scale = Length(2, 12), {"training.batch_size": 4}
    assert schedule._length_of_others(same, [first, same, other]) == Length(2, 12)
    assert schedule._length_of_others(other, [first, same, other]) is None


class Slow(Loop):
    def step(self, batch: Tensor) -> None:
        time.sleep(0.01)
        super().step(batch)


@pytest.mark.parametrize("seconds", [0.06, 0.3])
def test_a_program_takes_the_steps_that_fit_and_says_how_many(tmp_path: Path, seconds: float) -> None:
    measured = probed(tmp_path, Slow(400), seconds=seconds)
    (planned,) = (event for event in measured.all if event["event"] == "planned")
    assert len(measured.steps) == planned["steps"] < 100
    assert planned["warmup"] == warmup_of(planned["steps"])
    assert measured.code == 0


def test_a_repeat_that_takes_too_long_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "OVERRUN", 0)
    measured = probed(tmp_path, Slow(400), seconds=30.0)
    first, last = (event for event in measured.all if event["event"] == "planned")
    assert len(measured.steps) == last["steps"] < first["steps"]
    assert last["warmup"] == first["warmup"]
    assert measured.code == 0


def test_a_shortened_repeat_keeps_its_warm_up_and_measures_two_steps() -> None:
    assert shortened(Length(10, 1010), 50) == Length(10, 51)
    assert shortened(Length(10, 1010), 3) == Length(10, 12)
    assert shortened(Length(10, 12), 20) == Length(10, 12)


class Unused(Slow):
    """A loop in a program that makes two optimizers and never uses one, beside that of the loop, made before it."""

    def step(self, batch: Tensor) -> None:
        if not hasattr(self, "unused"):
            self.unused = [torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.01) for _ in range(2)]
        super().step(batch)


def test_slow_steps_end_with_the_time_although_an_optimizer_is_never_used(tmp_path: Path) -> None:
    measured = probed(tmp_path, Unused(400), seconds=0.15)
    (planned,) = (event for event in measured.all if event["event"] == "planned")
    assert planned["each_update"]
    assert len(measured.steps) == planned["steps"] < LONGEST_RUN
    told = [event["message"] for event in measured.all if event["event"] == "log"]
    assert told == [ONE_OF_SEVERAL.format(2)]


TOGETHER = """
import sys
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(4000):
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.stress
def test_ranks_that_wait_for_each_other_end_after_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOGETHER)
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(tmp_path / "train.py"))
    done = gpubench("train-bench", "-q", "--", *program, results=tmp_path / "results", launcher=HOST)
    assert done.code == 0, done.stderr
    length = done.document("run.json")["length"]
    assert length["seconds"] == SECONDS_EACH
    steps = [(line["repeat"], line["rank"]) for line in done.lines("steps.jsonl")]
    assert {steps.count((repeat, rank)) for repeat in range(3) for rank in range(3)} == {length["steps"]}
