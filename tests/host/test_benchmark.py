"""Which repeat of which run is next, and what becomes of the others when one fails. The runs are made up here."""

import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpubench.errors import GpubenchError, OutOfMemory, RunFailed, WorkerLost
from gpubench.host import schedule
from gpubench.host.recorder import Recorder
from gpubench.settings.schema import TrainSettings


class Run:
    """What `benchmark` asks of a recorder."""

    is_open = False

    def __init__(
        self, name: str, *, repeats: int = 2, recorded: bool = False, measurement: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self.settings = TrainSettings.model_validate(
            {"measurement": {"repeats": repeats} | (measurement or {}), "profiling": {"enabled": recorded}}
        )
        self.writer = SimpleNamespace(update=lambda **changes: None)
        self.closed: tuple[str, GpubenchError | None] | None = None
        self.diagnosed = 0
        self.elsewhere: str | None = None
        self.is_spread = False
        self.order_seed: int | None = None
        self.has_results = False

    def throughputs(self) -> list[float]:
        return self.rates

    def summary(self) -> Any:
        return None

    def refutation(self, summary: Any) -> GpubenchError | None:
        return None

    def diagnose(self, *, failed: bool = False) -> None:
        self.diagnosed += 1

    def close(self, status: str, summary: Any, error: GpubenchError | None = None) -> None:
        self.closed = (status, error)


Measured = list[tuple[str, list[int], int | None]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    """Runs these, of which those that are named fail; tells what was measured, in order."""

    def run(runs: Sequence[Run], *failing: str, independent: bool = False) -> Measured:
        done: Measured = []

        def measure(recorder: Any, repeats: list[int], profiled: int | None, watch: Any) -> None:
            done.append((recorder.name, repeats, profiled))
            if recorder.name in failing:
                raise OutOfMemory("no memory left")

        monkeypatch.setattr(schedule, "measure", measure)
        recorders = cast("Sequence[Recorder[Any]]", runs)
        schedule.run(recorders, lambda recorder: None, independent=independent)
        return done

    return run


def test_several_runs_take_turns_in_rounds_of_which_the_first_is_in_their_order(
    measured: Callable[..., Measured],
) -> None:
    runs = [Run("a", repeats=3), Run("b", repeats=3), Run("c", repeats=3)]
    names = [name for name, _, _ in measured(runs)]
    assert names[:3] == ["a", "b", "c"]
    assert sorted(names[3:6]) == sorted(names[6:]) == ["a", "b", "c"]
    assert runs[0].order_seed is not None
    assert len({run.order_seed for run in runs}) == 1


def test_the_recorded_repeat_comes_last_and_is_none_of_the_measured(measured: Callable[..., Measured]) -> None:
    run = Run("a", recorded=True)
    assert measured([run]) == [("a", [0], None), ("a", [1], None), ("a", [], 2)]
    assert run.diagnosed == 1


def test_a_run_that_fails_ends_the_others(measured: Callable[..., Measured]) -> None:
    base, other = Run("a"), Run("b")
    assert [name for name, _, _ in measured([base, other], "b")] == ["a", "b"]
    assert base.closed is not None
    assert other.closed is not None
    assert (base.closed[0], other.closed[0]) == ("interrupted", "failed")


@pytest.mark.parametrize("failed", [True, False])
def test_a_signal_that_comes_as_a_failed_run_lets_go_of_its_ranks_does_not_hide_why(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    def measure(*_: object) -> None:
        try:
            if failed:
                raise WorkerLost("rank 3 has been silent for 8 s")
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(schedule, "measure", measure)
    run = Run("a")
    schedule.run([cast("Recorder[Any]", run)], lambda recorder: None)
    assert run.closed
    assert (run.closed[0], str(run.closed[1])) == (
        ("failed", "rank 3 has been silent for 8 s") if failed else ("interrupted", "interrupted")
    )


@pytest.mark.parametrize(("measured_before", "kept"), [(True, "keeps the results so far"), (False, "nothing was")])
def test_an_interruption_promises_results_only_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch, measured_before: bool, kept: str
) -> None:
    monkeypatch.setattr(schedule, "measure", lambda *_: signal.raise_signal(signal.SIGINT))
    run = Run("a")
    run.has_results = measured_before
    schedule.run([cast("Recorder[Any]", run)], lambda recorder: None)
    assert run.closed
    assert run.closed[1]
    assert kept in (run.closed[1].hint or "")


def test_of_independent_runs_one_that_fails_leaves_the_others_alone(measured: Callable[..., Measured]) -> None:
    base, broken, other = Run("a"), Run("b"), Run("c")
    order = measured([base, broken, other], "b", independent=True)
    names = [name for name, _, _ in order]
    assert (names[:3], sorted(names[3:])) == (["a", "b", "c"], ["a", "c"])
    assert broken.closed is not None
    assert broken.closed[0] == "failed"
    assert isinstance(broken.closed[1], RunFailed)
    assert [run.closed for run in (base, other)] == [("completed", None)] * 2


def test_a_run_that_fails_or_times_nothing_makes_nobody_reach_for_precision(measured: Callable[..., Measured]) -> None:
    precise = {"target_precision": 0.5, "max_repeats": 20}
    base, failing = Run("base", measurement=precise), Run("failing", measurement=precise)
    base.rates = [100.0, 101.0]
    assert [name for name, _, _ in measured([base, failing], "failing", independent=True)].count("base") == 2
    assert len(measured([Run("counts", repeats=3, measurement=precise)])) == 3


def test_independent_runs_end_with_the_one_they_are_laid_beside(measured: Callable[..., Measured]) -> None:
    base, other = Run("a"), Run("b")
    assert [name for name, _, _ in measured([base, other], "a", independent=True)] == ["a"]
    assert base.closed is not None
    assert base.closed[0] == "failed"


def test_what_a_failed_run_recorded_is_looked_at_all_the_same(measured: Callable[..., Measured]) -> None:
    run = Run("a", recorded=True)
    measured([run], "a")
    assert run.diagnosed == 1


def test_a_run_whose_end_cannot_be_written_at_all_is_said_to_be_called_running(
    measured: Callable[..., Measured], caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise RunFailed("cannot write run.json: No space left on device", "make room there")

    run = Run("a")
    setattr(run, "close", no_room)  # noqa: B010 - a method
    run.writer.finish = no_room
    measured([run])
    assert "cannot write run.json: No space left on device; run.json may still say 'running' although" in caplog.text
