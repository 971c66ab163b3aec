"""The clock of the probe: which timeline the times are on, and what it does where a device answers with an error."""

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpubench.probe import device
from gpubench.probe.device import ON_CPU, Mark, Point, Timing


class Events:
    """Stands in for torch.cuda.Event: each record takes 0.25 s of the device, and is passed at once."""

    now = 0.0
    fails = ""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self._may_fail("record")
        Events.now += 0.25
        self.at = Events.now

    def query(self) -> bool:
        self._may_fail("query")
        return True

    def elapsed_time(self, end: "Events") -> float:
        self._may_fail("elapsed_time")
        return 1e3 * (end.at - self.at)

    def synchronize(self) -> None:
        self._may_fail("synchronize")

    def _may_fail(self, name: str) -> None:
        if Events.fails == name:
            raise RuntimeError(f"{name} fails\nat length")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Events]]:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=index))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (0, index, 1), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Events)
    monkeypatch.setattr(Events, "now", 0.0)
    monkeypatch.setattr(Events, "fails", "")
    device.UNANSWERED.clear()
    yield Events
    device.UNANSWERED.clear()


def places(timing: Timing) -> int:
    mark = timing.mark()
    return mark.place[0] if isinstance(mark, Mark) else ON_CPU


def parameter_on(index: int) -> torch.Tensor:
    """Stands in for a parameter on a GPU."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))  # type: ignore[return-value]


def test_the_object_of_a_stream_is_made_once(events: type[Events], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def stream_of(index: int) -> object:
        made.append(index)
        return SimpleNamespace(cuda_stream=index)

    current = {0: (0, 0, 1)}
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", current.get)
    timing = Timing()
    for _ in range(3):
        timing.mark()
    assert made == [0]
    current[0] = (7, 0, 1)
    timing.mark()
    assert made == [0, 0], "another stream is current"
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream")
    assert isinstance(timing.mark(), Mark)
    assert made == [0, 0, 0], "a release of PyTorch without that function"


def test_the_timeline_is_that_of_the_results(events: type[Events]) -> None:
    timing = Timing()
    assert places(timing) == 0, "the current device, while nothing is known"
    timing.result(torch.device("cuda", 1))
    assert places(timing) == 1
    for _ in range(3):  # optimizers that take turns have results on both
        for index in (1, 0, 0, 0):
            timing.result(torch.device("cuda", index))
            timing.end_part()
    assert places(timing) == 1
    for _ in range(device.MOST_AWAY + 1):
        timing.result(torch.device("cuda", 0))
        timing.end_part()
    assert places(timing) == 0
    timing.result(torch.device("cpu"))
    assert places(timing) == 0, "a copy of the result"
    timing.expect([torch.empty(0, device="meta")])
    timing.expect([parameter_on(1)])
    timing.result(torch.device("cuda", 1))
    timing.end_part()
    assert places(timing) == 1, "where the program has moved, with an optimizer of its parameters there"


def test_times_that_do_not_make_up_the_whole_are_told_as_another_timeline(events: type[Events]) -> None:
    """As those of streams whose marks are not passed in the order in which they were set."""
    timing = Timing()
    marks: list[tuple[str, Point]] = [(phase, timing.mark()) for phase in ("other", "forward", "other", "other")]
    timing.add(marks, {})
    assert not timing.is_new
    assert isinstance(marks[1][1], Mark)
    marks[1][1].event.at -= 1.0
    timing.add(marks, {})
    assert timing.is_new


def test_of_a_model_over_several_devices_the_last_one_is_expected_to_have_the_result(events: type[Events]) -> None:
    timing = Timing()
    timing.expect([parameter_on(0), parameter_on(1), torch.empty(0)])
    assert places(timing) == 1


def test_what_computes_on_the_cpu_is_timed_by_the_bare_clock(events: type[Events]) -> None:
    timing = Timing()
    timing.result(torch.device("cpu"))
    assert timing.mark is Timing.now


def test_the_clock_is_not_one_that_a_library_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1 / 0)
    timing = Timing()
    assert isinstance(timing.mark(), int)


def test_a_phase_that_issues_nothing_takes_its_share_of_an_idle_device_at_most(events: type[Events]) -> None:
    timing = Timing()
    timing.has_marks = True
    begin, middle, end = (Mark(ns * 10**9, Events(), (0, 0)) for ns in (0, 2, 3))
    begin.event.at, middle.event.at, end.event.at = 0.0, 1.0, 4.0
    freeing: list[tuple[str, Point]] = [("optimizer", 10**9), ("other", 15 * 10**8)]
    marks = [("other", begin), *freeing, ("forward", middle), ("end", end)]
    found: dict[str, int] = defaultdict(int)
    assert timing.add(marks, found) == 0
    assert found == {"other": 75 * 10**7, "optimizer": 25 * 10**7, "forward": 3 * 10**9}


def test_a_border_right_after_another_one_takes_no_event(events: type[Events], monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing()
    first = timing.mark()
    monkeypatch.setattr(device, "AT_ONCE", 10**12)
    assert isinstance(timing.mark_after(first), int)
    assert isinstance(timing.mark_after(0), Mark), "the last border was by the CPU's clock"
    monkeypatch.setattr(device, "AT_ONCE", 0)
    assert isinstance(timing.mark_after(first), Mark), "the program may have issued work since"


@pytest.mark.parametrize("query", ["record", "query", "elapsed_time", "synchronize"])
def test_after_an_error_of_a_device_the_times_are_those_of_the_host(events: type[Events], query: str) -> None:
    timing = Timing()
    first = timing.mark()
    events.fails = query
    second = timing.mark()
    assert timing.passed([first, second])
    timing.wait([first, second])
    found: dict[str, int] = defaultdict(int)
    assert timing.add([("a", first), ("end", second)], found) == ON_CPU
    assert 0 <= found["a"] < 25 * 10**7
    assert places(timing) == ON_CPU
    assert list(device.UNANSWERED.values()) == [f"{query} fails"]


def test_nothing_is_asked_while_a_graph_is_captured(events: type[Events], monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing()
    mark = timing.mark()
    events.fails = "query"
    monkeypatch.setattr(Timing, "captures", 1)
    assert not timing.passed([mark])
    assert not device.UNANSWERED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_on_the_cpu_is_read_without_an_operator(dtype: torch.dtype) -> None:
    """One would be part of the program's profile, and of what a dispatch mode of the program counts."""
    values = [torch.tensor(2.5, dtype=dtype), torch.tensor([7.0, 2.5], dtype=dtype)[1]]
    with torch.profiler.profile() as recording:
        assert [device.loss_of(value) for value in values] == [2.5, 2.5]
    names = {event.name for event in recording.events()}
    assert dtype is torch.bfloat16 or "aten::item" not in names


def test_a_loss_that_has_no_memory_or_is_negated_lazily_has_the_value_that_it_has() -> None:
    negated = torch.tensor(1 + 2j).conj().imag
    assert negated.is_neg()
    assert device.loss_of(negated) == -2.0
    assert (
        torch.func.vmap(lambda value: torch.zeros(()) if device.loss_of(value) is None else value)(
            torch.ones(3)
        ).tolist()
        == [0.0] * 3
    )


ELSEWHERE = {"amp", "is_available", "is_initialized", "CUDAGraph", "nccl"}
"""What other modules of the probe use of torch.cuda, none of which asks a device."""


def test_no_other_module_of_the_probe_asks_a_device() -> None:
    for path in sorted(Path(device.__file__).parent.glob("*.py")):
        if path.name not in ("device.py", "gpus.py"):  # gpus.py asks for names, whose errors make no time unreliable
            text = path.read_text()
            assert set(re.findall(r"torch\.cuda\.(\w+)", text)) <= ELSEWHERE, path
            assert "torch.accelerator" not in text, path
