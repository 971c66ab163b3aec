"""A pipeline of one rank in this process: how long an evaluation may take, and what is left of a finished sample."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gpubench import events
from gpubench.channel import Activity
from gpubench.errors import NonFiniteLatent
from gpubench.kinds.pipeline.defaults import complete
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.kinds.pipeline.worker import rank as worker
from gpubench.kinds.pipeline.worker.background import Finisher
from gpubench.kinds.pipeline.worker.sampler import Batch
from gpubench.ranks import Ranks
from gpubench.settings.loading import apply_overrides

CPU = torch.device("cpu")
JOB = events.Job("", "", {}, [0], (0.0, 0.0), machine="")
DUMMY = {"model.unet": "dummy", "device": "cpu", "performance.cpu_threads": 1, "sampling.steps": 3, "work.samples": 4}


class Followed(Activity):
    """Keeps all that was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[str, float | None]] = []

    def enter(self, words: str, *, waits_for: int | None = None, within: float | None = None) -> None:
        super().enter(words, waits_for=waits_for, within=within)
        self.entered.append((words, within))


def messages(activity: Activity, tell: Any = lambda event: None, **overrides: Any) -> Iterator[events.Message]:
    settings, _ = complete(apply_overrides(PipeSettings(), DUMMY | overrides))
    return worker.run_repeat(settings, JOB, Ranks(0, 0, 1, 1), 0, CPU, (None, None), activity, tell)


def test_an_evaluation_that_takes_longer_than_the_deadline_is_no_hang() -> None:
    activity = Followed()
    overrides = {"model.step_ms": 30.0, "pipeline.deadline": 0.01, "verify": False, "measurement.baseline": "off"}
    for _ in messages(activity, **overrides):
        pass
    warming = [within for words, within in activity.entered if "of the warm-up" in words]
    assert warming == [None, None], "nothing is known of an evaluation before"
    evaluations = [within for words, within in activity.entered if words.startswith("evaluation") and within]
    assert len(evaluations) == 3 * 4
    assert all(within >= 0.01 + 2 * 0.03 for within in evaluations), "the dummy takes 0.03 s at the least"


def test_the_deadline_of_a_quick_evaluation_is_about_the_one_that_was_asked_for() -> None:
    activity = Followed()
    overrides = {"model.step_ms": 0.0, "pipeline.deadline": 1000.0, "verify": False, "measurement.baseline": "off"}
    for _ in messages(activity, **overrides):
        pass
    asked = [within for words, within in activity.entered if words.startswith("evaluation") and within]
    assert all(1000.0 <= within < 1100.0 for within in asked)


@pytest.mark.parametrize("verify", [False, True])
def test_final_latents_are_retained_only_where_they_will_be_verified(
    monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    made: list[Finisher] = []
    real = Finisher.__init__

    def init(self: Finisher, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        real(self, *args, **kwargs)

    monkeypatch.setattr(Finisher, "__init__", init)
    told: list[events.Message] = []
    for _ in messages(Activity(), told.append, **{"model.step_ms": 0.0, "verify": verify}):
        pass
    assert sum(isinstance(event, events.SampleFinished) for event in told) == 4
    (finisher,) = made
    assert sorted(finisher.latents) == ([0, 1, 2, 3] if verify else [])


def finisher(tell: Any, *, bound: int = 2, inspect: Any = lambda batch: None) -> Finisher:
    return Finisher(
        tell, time.time, 0, 0, Requests([], 0), CPU, bound=bound, keep_latents=True, retain=False, inspect=inspect
    )


def batch(sample: int) -> Batch:
    return Batch([sample], torch.full((1, 4, 8, 8), float(sample)), None, [])


def test_nothing_of_a_sample_stays_once_the_host_has_it() -> None:
    alive: list[weakref.ref[Tensor]] = []
    sink = finisher(lambda event: None)
    for sample in range(6):
        one = batch(sample)
        alive.append(weakref.ref(one.latents))
        sink.put(one)
        del one
    sink.close()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6


def test_a_host_that_is_behind_makes_the_last_rank_wait() -> None:
    told: list[events.Message] = []
    go_on = threading.Event()

    def tell(event: events.Message) -> None:
        go_on.wait(30)
        told.append(event)

    sink = finisher(tell, bound=2)
    for sample in range(2):
        sink.put(batch(sample))
    third = threading.Thread(target=lambda: sink.put(batch(2)), daemon=True)
    third.start()
    third.join(0.2)
    assert third.is_alive(), "two are under way, and there is room for no more"
    go_on.set()
    third.join(30)
    sink.close()
    assert [event.sample.sample for event in told if isinstance(event, events.SampleFinished)] == [0, 1, 2]


def test_what_goes_wrong_with_a_finished_sample_is_told_to_whoever_brings_the_next() -> None:
    def refuse(batch: Batch) -> None:
        raise NonFiniteLatent("sample 0 is NaN")

    sink = finisher(lambda event: None, bound=1, inspect=refuse)
    sink.put(batch(0))
    for _ in range(2):
        with pytest.raises(NonFiniteLatent, match="sample 0 is NaN"):
            sink.put(batch(1))
    with pytest.raises(NonFiniteLatent):
        sink.close()
