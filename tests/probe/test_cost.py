"""What the probe takes in a step, as it tells the host itself."""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import RECORDED, Loop, Measured, batches, probed
from torch import nn

from gpubench.probe.calls import CallProbe
from gpubench.probe.cost import OwnCost, cost
from gpubench.probe.hooks import Probe
from gpubench.probe.steady import SteadyProbe

READ, HOOK, SHARED = 7, 100, 3000
"""What the made-up clock takes to be read, a hook, and what is done at once for many parts."""


class Clock:
    """A clock of each thread, which goes on as it is told to, and where it is read."""

    def __init__(self) -> None:
        self.here = threading.local()

    def __call__(self) -> int:
        return self.go(READ)

    def go(self, ticks: int) -> int:
        self.here.now = getattr(self.here, "now", 0) + ticks
        return int(self.here.now)


class Looped:
    """A loop whose parts have three hooks, of which the last one ends the part."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cost = OwnCost()
        self.cost._clock = self.clock
        self.ended = 0

    def hook(self, program: Callable[[], object], then: Callable[[], object] = int) -> None:
        """Runs a hook around what the program does, as a wrapper of the probe does."""

        def around(call: Callable[[], object]) -> None:
            self.clock.go(HOOK - 40)
            call()
            self.clock.go(40)
            then()

        if self.cost.is_timed:
            self.cost.time(around, program, (), {})
        else:
            around(program)

    def part(self, inner: Callable[[], object]) -> None:
        self.hook(inner)
        self.hook(lambda: self.clock.go(10**6))
        self.hook(lambda: self.clock.go(10**5), self.end)

    def end(self) -> None:
        self.ended += 1
        with self.cost:
            self.clock.go(SHARED if self.ended % 10 == 0 else 0)
            self.cost.end_part()

    def run(self, parts: int, inner: Callable[[], object] = int) -> None:
        for _ in range(parts):
            self.part(inner)


def expected(looped: Looped, hooks: int, parts: int = 1) -> float:
    """Returns the seconds in a step of so many parts with so many hooks each, all that was done at once included."""
    at_once = looped.ended // 10 * SHARED + looped.cost._reads * READ
    return parts * (hooks * HOOK + 2 * READ + at_once / looped.ended) / 1e9


def begun(looped: Looped) -> Looped:
    looped.cost.begin(0, 0)
    return looped


def test_a_step_takes_what_its_hooks_do_and_the_clock_without_what_the_program_does() -> None:
    looped = begun(Looped())
    looped.run(1000)
    assert looped.cost.end(1000, 1000) == pytest.approx(expected(looped, 3))


def test_a_step_of_two_parts_takes_what_both_do() -> None:
    looped = begun(Looped())
    looped.run(1000)
    assert looped.cost.end(1000, 500) == pytest.approx(expected(looped, 3, 2))


def test_a_hook_in_what_another_one_calls_counts_once() -> None:
    looped = begun(Looped())
    looped.run(1000, lambda: looped.hook(lambda: looped.clock.go(10**6)))
    assert looped.cost.end(1000, 1000) == pytest.approx(expected(looped, 4))


def test_a_hook_in_another_thread_counts_by_the_clock_of_that_thread() -> None:
    looped = begun(Looped())

    def beside() -> None:
        looped.clock.go(10**7)
        looped.hook(lambda: looped.clock.go(10**6))

    def compute() -> None:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    looped.run(200, compute)
    assert looped.cost.end(200, 200) == pytest.approx(expected(looped, 4))


def test_the_sample_becomes_sparse() -> None:
    looped = begun(Looped())
    taken = []
    for _ in range(20):
        looped.run(1000)
        taken.append(looped.cost._taken)
    assert taken[0] > 20
    assert taken[-1] - taken[-6] < 5000 / 64


def test_what_ends_in_the_middle_of_a_timed_part_is_left_out() -> None:
    looped = begun(Looped())
    found = []
    looped.run(9)
    while not looped.cost.is_timed:
        looped.run(1)
    looped.hook(lambda: looped.clock.go(1), lambda: found.append(looped.cost.end(looped.ended, looped.ended)))
    assert found == [pytest.approx(expected(looped, 3))]


def test_too_few_steps_tell_nothing() -> None:
    assert OwnCost().end(5, 5) is None
    looped = begun(Looped())
    looped.run(2)
    assert looped.cost.end(2, 2) is None


BURNT = 0.002


def burn() -> None:
    """Takes CPU time of the calling thread."""
    until = time.thread_time() + BURNT
    while time.thread_time() < until:
        pass


class Burning(SteadyProbe):
    """Takes much longer than usual in one hook of each step."""

    def _zero_gradients(self, *args: Any, **kwargs: Any) -> Any:
        burn()
        return super()._zero_gradients(*args, **kwargs)


class BurningLater(SteadyProbe):
    """Takes much longer than usual for each step that it takes up later, together with others."""

    def _updated(self, *args: Any) -> None:
        burn()
        super()._updated(*args)


class BurningCalls(CallProbe):
    def _end_call(self, module: nn.Module) -> None:
        burn()
        super()._end_call(module)


def in_a_thread() -> None:
    thread = threading.Thread(target=Loop(60))
    thread.start()
    thread.join()


def from_a_list() -> None:
    loop = Loop(60)
    loop.data = [(torch.randn(4, 3),) for _ in range(60)]  # type: ignore[assignment]
    loop()


def calls() -> None:
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    with torch.no_grad():
        for _ in range(60):
            model(torch.randn(4, 3))


def probe_time(found: Measured) -> float:
    assert found.code == 0
    return float(found.events["repeatdone"]["probe_time"])


@pytest.mark.parametrize(
    ("loop", "probe"),
    [
        (Loop(60), Burning),
        (from_a_list, Burning),
        (in_a_thread, Burning),
        (calls, BurningCalls),
    ],
    ids=["loader", "list", "thread", "inference"],
)
def test_what_a_hook_burns_is_in_the_time_of_a_step(
    tmp_path: Path, loop: Callable[[], object], probe: type[Probe]
) -> None:
    assert probe_time(probed(tmp_path, loop, probe=probe)) >= BURNT


def test_what_is_burnt_for_many_steps_at_once_is_in_it_too(tmp_path: Path) -> None:
    found = probed(tmp_path, Loop(120), probe=BurningLater)
    assert probe_time(found) >= BURNT / 2  # some steps are not taken up later


class Slow(nn.Linear):
    """A layer that takes long, and another time waits as long."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            burn()
        time.sleep(10 * BURNT)
        return super().forward(batch)


def test_what_the_program_itself_computes_or_sleeps_is_not(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(30)
        loop.model = nn.Sequential(Slow(3, 1))
        loop.optimizer = torch.optim.SGD(loop.model.parameters())
        loop()

    assert 0 < probe_time(probed(tmp_path, run)) < 5 * BURNT


def test_nothing_is_timed_in_a_fork(tmp_path: Path) -> None:
    def check() -> None:
        assert not cost.is_timed
        Loop(8)()  # which is not measured
        assert cost._stretches == before

    before = 0

    def run() -> None:
        nonlocal before
        loop = Loop(40)
        loop()
        while not cost.is_timed:
            loop()
        before = cost._stretches
        child = multiprocessing.get_context("fork").Process(target=check)
        child.start()
        child.join()
        assert child.exitcode == 0

    assert probed(tmp_path, run).code == 0


def test_nothing_is_timed_in_a_program_that_goes_on_after_its_last_step(tmp_path: Path) -> None:
    def run() -> None:
        with contextlib.suppress(SystemExit):
            Loop(40)()
        before = cost._stretches
        Loop(8)()
        assert not cost.is_timed
        assert cost._stretches == before

    for steps in range(20, 26):
        (tmp_path / str(steps)).mkdir()
        assert probed(tmp_path / str(steps), run, steps=steps).code == 0


def test_compiled_code_does_not_depend_on_whether_its_hooks_are_timed(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(40)

        @torch.compile(backend="eager")
        def loss(batch: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("mine"):
                found: torch.Tensor = loop.model(batch).square().mean()
            return found

        known, timed = set(), set()
        for number, (batch,) in enumerate(loop.data):
            loop.optimizer.zero_grad()
            (loss(batch) if number > 5 else loop.model(batch).mean()).backward()
            loop.optimizer.step()
            if number > 10:
                known.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
                timed.add(cost.is_timed)
        assert timed == {False, True}
        assert len(known) == 1

    assert probed(tmp_path, run).code == 0


def test_a_repeat_that_is_recorded_is_not_timed(tmp_path: Path) -> None:
    assert probed(tmp_path, Loop(40), profiling=RECORDED.model_dump()).events["repeatdone"]["probe_time"] is None


def test_loaders_with_workers_are_timed_in_the_rank_alone(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        loop.data = batches(40, workers=1)
        loop()

    assert probe_time(probed(tmp_path, run)) > 0
