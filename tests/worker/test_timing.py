import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from worked import small

from gpubench.channel import Activity
from gpubench.events import OTHER, Planned, Step, StepsMeasured
from gpubench.ranks import Ranks
from gpubench.worker.dataloader import Feed
from gpubench.worker.loop import CALIBRATION_STEPS, Trainer, length_of, run_steps
from gpubench.worker.models import Workload
from gpubench.worker.precision import Arithmetic
from gpubench.worker.timing import PHASES, CpuClock, StepTimer, clock_of


@dataclass(eq=False)
class Mark:
    at: float


class FakeClock:
    """A device whose timeline the test moves: work issued until `now` is done up to `reached`.

    Like CUDA's events, marks are recycled. Using one that was released, or releasing it twice, is an error.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0
        self.made = 0
        self.spare: list[Mark] = []
        self.reads: list[list[float]] = []

    def mark(self) -> Mark:
        if self.spare:
            mark = self.spare.pop()
            mark.at = self.now
            return mark
        self.made += 1
        return Mark(self.now)

    def passed(self, mark: Mark) -> bool:
        assert mark not in self.spare, "asked about a mark that was released"
        return mark.at <= self.reached

    def idle_after(self, mark: Mark) -> bool | None:
        return self.passed(mark)

    def seconds(self, start: Mark, end: Mark) -> float:
        assert start not in self.spare, "measured from a mark that was released"
        assert end not in self.spare, "measured to a mark that was released"
        return end.at - start.at

    def read(self, values: Sequence[Tensor]) -> list[float]:
        self.reads.append([float(value) for value in values])
        return self.reads[-1]

    def release(self, mark: Mark) -> None:
        assert mark not in self.spare, "released twice"
        self.spare.append(mark)

    def synchronize(self) -> None:
        self.reached = self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timer(clock: FakeClock) -> StepTimer[Mark]:
    timer = StepTimer(clock, Activity(), repeat=2, rank=1)
    timer.start(1000.0)
    return timer


def take(timer: StepTimer[Mark], clock: FakeClock, number: int, *phases: tuple[str, float]) -> None:
    """Issues one step: `phases` in order after a data wait of 1 s, and 0.25 s that belong to no phase."""
    timer.begin(number)
    clock.work(1.0)
    for phase, seconds in phases:
        timer.enter(phase)
        clock.work(seconds)
    timer.issued(0, 8, [torch.tensor(float(number))])
    clock.work(0.25)


def collected(timer: StepTimer[Mark]) -> list[Step]:
    return [step for step, _ in timer.collect()]


def test_phases_sum_to_the_step_and_those_entered_twice_sum_up(timer: StepTimer[Mark], clock: FakeClock) -> None:
    take(timer, clock, 0, ("forward", 2.0), ("backward", 3.0), ("data_wait", 0.5), ("forward", 4.0), ("backward", 5.0))
    timer.stop()
    (step,) = collected(timer)
    assert step.phases == {"data_wait": 1.5, "forward": 6.0, "backward": 8.0, OTHER: 0.25}
    assert step.total == sum(step.phases.values()) == 15.75
    assert (step.repeat, step.rank, step.epoch, step.step, step.samples) == (2, 1, 0, 0, 8)
    assert set(step.phases) <= set(PHASES)


def test_steps_tile_the_time_from_the_start_to_the_stop(timer: StepTimer[Mark], clock: FakeClock) -> None:
    for number in range(3):
        take(timer, clock, number, ("forward", 2.0 + number))
        clock.work(0.5)  # between two steps: it belongs to the one before
    timer.stop()
    steps = collected(timer)
    assert [step.total for step in steps] == [3.75, 4.75, 5.75]
    assert [step.time for step in steps] == [1000.0, 1003.75, 1008.5]
    assert sum(step.total for step in steps) == clock.now


def test_a_step_comes_out_when_the_device_has_passed_its_end_and_not_before(
    timer: StepTimer[Mark], clock: FakeClock
) -> None:
    take(timer, clock, 0, ("forward", 1.0))
    assert collected(timer) == []
    clock.reached = clock.now
    assert collected(timer) == [], "the step has no end before the next one begins"
    take(timer, clock, 1, ("forward", 1.0))
    assert [step.step for step in collected(timer)] == [0]
    take(timer, clock, 2, ("forward", 1.0))
    clock.reached = 4.0  # within step 1
    assert collected(timer) == []
    timer.stop()
    assert [step.step for step in collected(timer)] == [1, 2]
    assert collected(timer) == []


def test_each_step_keeps_its_own_readings_and_all_are_read_at_once(timer: StepTimer[Mark], clock: FakeClock) -> None:
    readings: tuple[list[float], ...] = ([0.5, 1024.0], [], [0.25])
    for number, values in enumerate(readings):
        timer.begin(number)
        timer.issued(0, 4, [torch.tensor(value) for value in values])
        clock.work(1.0)
    timer.stop()
    assert [values for _, values in timer.collect()] == list(readings)
    assert clock.reads == [[0.5, 1024.0, 0.25]]


def test_nothing_is_read_while_no_step_is_finished(timer: StepTimer[Mark], clock: FakeClock) -> None:
    assert collected(timer) == []
    take(timer, clock, 0)
    assert collected(timer) == []
    assert clock.reads == []


def test_marks_are_recycled_and_never_one_that_is_still_needed(timer: StepTimer[Mark], clock: FakeClock) -> None:
    """A random loop: the fake clock objects to every use of a released mark; the numbers show what it cannot see."""
    chance = random.Random(0)
    expected: list[float] = []
    seen: list[Step] = []
    for number in range(200):
        began = clock.now
        phases = [(chance.choice(PHASES), chance.randint(0, 8) / 8) for _ in range(chance.randint(0, 6))]
        take(timer, clock, number, *phases)
        expected.append(clock.now - began)
        # Marks made out of turn, as long as they are given back, disturb nothing.
        clock.release(clock.mark())
        clock.reached = max(clock.reached, clock.now - chance.randint(0, 80) / 8)
        if chance.random() < 0.5:
            seen += collected(timer)
    timer.stop()
    seen += collected(timer)
    assert [step.step for step in seen] == list(range(200))
    assert [step.total for step in seen] == expected
    assert len(clock.spare) == clock.made - 1, "all but the last mark, which begins no step, come back"
    assert clock.made < 200


def test_the_last_mark_can_still_be_read_when_others_are_made_after_the_stop(
    timer: StepTimer[Mark], clock: FakeClock
) -> None:
    take(timer, clock, 0, ("forward", 2.0))
    timer.stop()
    clock.work(100.0)
    clock.mark()
    (step,) = collected(timer)
    assert step.total == 3.25


def test_the_activity_follows_the_loop(clock: FakeClock) -> None:
    activity = Activity()
    timer = StepTimer(clock, activity, 0, 0)
    doing = []
    timer.begin(7)
    doing.append((activity.doing, activity.step))
    timer.enter("forward")
    doing.append((activity.doing, activity.step))
    timer.issued(0, 1, [])
    doing.append((activity.doing, activity.step))
    timer.stop()
    doing.append((activity.doing, activity.step))
    assert doing == [("data_wait", 7), ("forward", 7), (OTHER, 7), ("closing", None)]


def test_a_step_notes_whether_the_device_was_idle_at_its_start(timer: StepTimer[Mark], clock: FakeClock) -> None:
    take(timer, clock, 0, ("forward", 1.0))
    take(timer, clock, 1, ("forward", 1.0))
    clock.reached = clock.now
    take(timer, clock, 2, ("forward", 1.0))
    timer.stop()
    assert [step.starved for step in collected(timer)] == [None, False, True]


def test_the_host_time_ends_when_the_step_is_issued(
    timer: StepTimer[Mark], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = ticking(by=10**9)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(ticks))
    take(timer, clock, 0, ("forward", 50.0))
    timer.stop()
    monkeypatch.undo()
    (step,) = collected(timer)
    assert step.host == 1.0, "by the CPU's clock, whatever the device's says"


def ticking(by: int) -> Iterator[int]:
    return itertools.count(0, by)


def test_a_limit_in_seconds_is_turned_into_steps_by_those_after_the_first(clock: FakeClock) -> None:
    """The first step compiles and tunes; counted in, it would leave next to nothing to measure."""
    cpu, seconds = torch.device("cpu"), itertools.chain([100.0], itertools.repeat(0.5))

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        clock.work(next(seconds))
        output: Tensor = module(batch)
        return output.mean()

    training = {"batch_size": 2, "steps": None, "seconds": 10, "warmup_steps": 0}
    settings = small(data={"samples": 16}, training=training)
    module = nn.Linear(3, 1)
    trainer = Trainer(
        settings=settings,
        ranks=Ranks(0, 0, 1, 1),
        device=cpu,
        workload=Workload(module, loss, loss, lambda size: torch.ones(size, 3), None, "3"),
        module=module,
        optimizer=torch.optim.SGD(module.parameters()),
        arithmetic=Arithmetic(cpu),
        timer=StepTimer(clock, Activity(), 0, 0),
    )
    with Feed(settings.data, None, trainer.workload.make_batch, 2, 0, 1, 0, cpu) as feed:
        said = list(run_steps(trainer, feed, 0, 1000.0, length_of(settings.training, 8, None)))
    assert [event.steps for event in said if isinstance(event, Planned)] == [0, CALIBRATION_STEPS + 20]
    steps = [step for event in said if isinstance(event, StepsMeasured) for step in event.steps]
    assert [step.total for step in steps] == [100.0] + [0.5] * (CALIBRATION_STEPS + 19)


def test_the_host_clock_has_passed_every_mark_and_counts_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CpuClock()
    monkeypatch.setattr("time.perf_counter_ns", lambda: 3_500_000_000)
    mark = clock.mark()
    assert clock.passed(mark)
    assert clock.seconds(1_000_000_000, mark) == 2.5
    assert clock.read([torch.tensor(1.5), torch.tensor(2, dtype=torch.int64)]) == [1.5, 2.0]
    assert clock.read([]) == []


def test_the_host_clock_never_goes_back() -> None:
    clock = CpuClock()
    marks = [clock.mark() for _ in range(100)]
    assert marks == sorted(marks)
    assert isinstance(clock_of(torch.device("cpu")), CpuClock)
