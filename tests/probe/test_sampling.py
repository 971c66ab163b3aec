"""The program's own code, as samples of its stacks and calls of PyTorch show it."""

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import pytest
import torch
from probing import RECORDED, Loop, probed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker

from gpubench import events, probe
from gpubench.probe.lines import CallLines
from gpubench.probe.observed import SourcePlaces
from gpubench.probe.sampling import (
    MOST_FUNCTIONS,
    MOST_ROWS,
    Samples,
    StackRow,
    StackSampler,
    of_workers,
    row_of,
    sample_worker,
)
from gpubench.probe.treatments import stand_in
from gpubench.sampled import SampledCode

HERE = Path(__file__).name


@pytest.fixture
def places() -> SourcePlaces:
    return SourcePlaces()


def row_here(places: SourcePlaces, frame: FrameType | None = None) -> StackRow:
    found = row_of(frame or sys._getframe(1), "other", places)
    assert found
    return found


def here(places: SourcePlaces) -> StackRow:
    return row_here(places, sys._getframe())


def test_a_sample_belongs_to_the_innermost_function_of_the_program(places: SourcePlaces) -> None:
    found = here(places)
    assert (Path(found.path).name, found.function, found.within) == (HERE, "here", "")
    assert found.first < found.line


def test_a_comprehension_belongs_to_the_function_around_it(places: SourcePlaces) -> None:
    (of_list,) = [row_here(places, sys._getframe()) for _ in range(1)]
    (of_generator,) = tuple(row_here(places, sys._getframe()) for _ in range(1))
    name = test_a_comprehension_belongs_to_the_function_around_it.__name__
    assert {of_list.function, of_generator.function} == {name}
    assert of_generator.line == of_list.line + 1


def test_a_lambda_and_a_method_are_named(places: SourcePlaces) -> None:
    class Jitter:
        def __call__(self) -> StackRow:
            return row_here(places, sys._getframe())

    assert (lambda: row_here(places, sys._getframe()))().function == "<lambda>"
    assert Jitter()().function == ("Jitter.__call__" if sys.version_info >= (3, 11) else "__call__")


def test_time_in_a_library_belongs_to_the_line_that_calls_it(places: SourcePlaces) -> None:
    frames: list[FrameType] = []

    class Remembered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_forward_hook(lambda *_: frames.append(sys._getframe(1)))

        def forward(self) -> None:
            """Nothing."""

    Remembered()()
    found = row_here(places, frames[0])
    assert found.function == "test_time_in_a_library_belongs_to_the_line_that_calls_it"
    assert found.within.startswith("torch.nn.modules.module.Module.")


def spin() -> int:
    return sum(range(500))


def sampled_while(sampler: StackSampler, least: int = 5) -> None:
    while sampler.samples.taken < least:
        spin()


def test_a_sampler_sees_a_thread_and_leaves_everything_as_it_was(places: SourcePlaces) -> None:
    turn, threads = sys.getswitchinterval(), threading.enumerate()
    sampler = StackSampler(get_ident(), places, lambda: "other")
    sampler.start()
    sampled_while(sampler)
    assert threading.enumerate() == threads, "a program may join all of its threads"
    sampler.stop()
    taken = sampler.samples.taken
    assert sys.getswitchinterval() == pytest.approx(turn)
    assert {"spin", "sampled_while"} & {row.function for row in sampler.samples.rows}
    spin()
    assert sampler.samples.taken == taken
    sampler.start()
    sampled_while(sampler, taken + 2)
    sampler.stop()
    sampler.stop()


def test_a_turn_that_the_program_has_set_meanwhile_is_kept(places: SourcePlaces) -> None:
    before = sys.getswitchinterval()
    sampler = StackSampler(get_ident(), places)
    try:
        sampler.start()
        sys.setswitchinterval(0.003)
        sampler.stop()
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


def test_the_sampling_thread_handles_no_signal_of_the_program(places: SourcePlaces) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(get_ident()))
    sampler = StackSampler(get_ident(), places)
    try:
        sampler.start()
        sampled_while(sampler)
        os.kill(os.getpid(), signal.SIGUSR1)
        sampled_while(sampler, sampler.samples.taken + 2)
    finally:
        sampler.stop()
        signal.signal(signal.SIGUSR1, before)
    assert seen == [get_ident()]


def test_an_error_of_the_sampler_ends_it_alone(places: SourcePlaces, capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise ValueError("of the sampler")

    sampler = StackSampler(get_ident(), places, fails)
    sampler.start()
    sampled_while(sampler, 1)
    sampler.stop()
    assert capfd.readouterr() == ("", "")


def test_samples_are_bounded(places: SourcePlaces) -> None:
    samples = Samples()
    for number in range(MOST_ROWS + 10):
        samples.add(StackRow("other", "/train.py", f"f{number}", number, number, ""))
    assert len(samples.rows) == MOST_ROWS
    found = samples.json(places)
    assert len(found["functions"]) == MOST_FUNCTIONS


def test_what_a_worker_leaves_is_merged_and_what_is_damaged_left_out(tmp_path: Path) -> None:
    samples = Samples()
    samples.taken, samples.waiting = 3, 1
    samples.add(StackRow("", "/data.py", "augment", 14, 17, "numpy.clip"), 2)
    for number in (1, 2):
        (tmp_path / f"samples-{os.getpid()}-{number}").write_text(samples.text())
    for number, text in enumerate(("", "[1", "[1, 2]", "[1, 1, [[[]]]]", '[1, 1, [[["a"],2,3,4,5,6,7]]]'), 3):
        (tmp_path / f"samples-{os.getpid()}-{number}").write_text(text)
    (tmp_path / f"samples-{os.getpid()}-9.part").write_text(samples.text())
    (tmp_path / "samples-1-1").write_text(samples.text())
    found = of_workers(str(tmp_path))
    assert (found.processes, found.taken, found.waiting, set(found.rows.values())) == (2, 6, 2, {4})
    assert of_workers(str(tmp_path / "missing")).processes == 0


def test_a_worker_runs_also_where_its_samples_cannot_be_written(tmp_path: Path) -> None:
    assert sample_worker(str(tmp_path / "missing"), lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        sample_worker(str(tmp_path), lambda: 1 // 0)


def test_the_loop_of_a_worker_can_still_be_sent_to_a_process_that_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_loop", worker._worker_loop)
    stand_in(worker, "_worker_loop", lambda call, *args: call(*args))
    assert pickle.loads(pickle.dumps(worker._worker_loop)) is worker._worker_loop


FOLDER = Path()
"""Where the workers leave their samples: that of the test, in the process of its program."""


def wait_for_samples() -> None:
    """Computes in a worker until it has written samples of this file, and not only of its wait for the first batch."""
    while not any(HERE in written.read_text() for written in FOLDER.glob(f"samples-*-{os.getpid()}")):
        spin()


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.augment(index)

    def augment(self, index: int) -> torch.Tensor:
        wait_for_samples()
        return torch.ones(3)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(60):
            wait_for_samples()
            yield torch.ones(3)


def collate(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items)


@pytest.mark.parametrize("made", [Images, Stream])
def test_the_code_of_workers_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], Dataset[torch.Tensor]]
) -> None:
    monkeypatch.setenv(probe.SAMPLED_VARIABLE, "1")

    def run() -> None:
        global FOLDER
        FOLDER = tmp_path
        loop = Loop()
        for batch in DataLoader(made(), batch_size=4, num_workers=1, collate_fn=collate):
            loop.step(batch)

    code = sampled_code(probed(tmp_path, run, profiling=RECORDED.model_dump()).events["codesampled"])
    assert code.workers.processes == 1
    assert any(one.file.endswith(HERE) for one in code.workers.functions)
    assert code.workers.samples > code.workers.waiting


def sampled_code(event: dict[str, Any]) -> SampledCode:
    """Returns what an event says, which the host would take."""
    found = events.decode(json.dumps(event).encode() + b"\n")
    assert isinstance(found, events.CodeSampled)
    return SampledCode(found.main, found.workers, found.calls)


def slow_metric(loop: Loop) -> None:
    until = time.thread_time() + 0.02  # the time of the thread itself, in which samples are taken however busy it is
    while time.thread_time() < until:
        spin()
    print(f"{loop.losses[-1]:.3f}")


def test_the_steps_after_the_trace_are_sampled_and_their_calls_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(probe.SAMPLED_VARIABLE, "1")

    def run() -> None:
        loop = Loop(30)
        loop.model.double().float()
        for (batch,) in loop.data:
            loop.step(batch)
            slow_metric(loop)
            torch.softmax(torch.ones(1, 2, 2), -1)
        raise AssertionError("the program is to end before")

    found = probed(tmp_path, run, profiling=RECORDED.model_dump())
    assert found.code == 0
    assert found.names.index("tracerecorded") < found.names.index("repeatdone")
    code = sampled_code(found.events["codesampled"])
    assert code.main.samples
    assert {"slow_metric", "spin"} & {one.function for one in code.main.functions if one.phase == "other"}
    seen = {(one.kind, one.name, one.function) for one in code.calls}
    assert ("read", "item", "step") in {(kind, name, function.split(".")[-1]) for kind, name, function in seen}
    assert ("softmax", "softmax") in {(kind, name) for kind, name, _ in seen}
    assert ("float64", "Module.double") in {(kind, name) for kind, name, _ in seen}
    (read,) = (one for one in code.calls if one.kind == "read")
    assert (read.calls, read.within) == (1, "")


def test_calls_are_seen_with_their_lines_and_everything_is_put_back(places: SourcePlaces) -> None:
    before = dict(vars(torch.Tensor)), dict(vars(torch.autocast)), torch.softmax, torch.tensor
    lines = CallLines(places)
    lines.start(get_ident(), lambda: "other")
    try:
        value = torch.ones(2, 3, 3)
        nn.functional.softmax(value, -1)
        value.double().to(torch.float64)
        if value.sum() > 3:
            f"{value.sum():.2f}"
        threading.Thread(target=value.tolist).start()
        torch.tensor([1.0], dtype=torch.float64)
        with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
            pass
    finally:
        lines.stop()
    assert (dict(vars(torch.Tensor)), dict(vars(torch.autocast)), torch.softmax, torch.tensor) == before
    seen = {(one["kind"], one["name"]): one for one in lines.json()}
    assert seen.keys() == {
        ("softmax", "softmax"), ("float64", "double"), ("float64", "tensor"), ("read", "bool"), ("read", "item"),
        ("autocast", "torch.autocast"),
    }  # fmt: skip
    assert seen["softmax", "softmax"]["source"] == "nn.functional.softmax(value, -1)"
    assert seen["softmax", "softmax"]["within"] == "torch.nn.functional.softmax"
    assert seen["float64", "double"]["source"] == "value.double().to(torch.float64)"
    assert all(one["calls"] == 1 and one["file"].endswith(HERE) for one in seen.values())


def test_what_the_program_replaces_meanwhile_is_kept(places: SourcePlaces) -> None:
    lines = CallLines(places)
    lines.start(get_ident(), lambda: "other")

    def own(tensor: torch.Tensor) -> float:
        return 0.0

    try:
        torch.Tensor.item = own  # type: ignore[method-assign, assignment]
        lines.stop()
        assert torch.Tensor.item is own
    finally:
        del torch.Tensor.item
