"""A loop that goes on as it did is measured with less work in each step, and what is found is the same."""

import contextlib
import dis
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probing import WARMUP, Loop, Measured, probed
from probing import batches as from_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpubench.probe import given as given_samples
from gpubench.probe import steady
from gpubench.probe.hooks import Probe
from gpubench.probe.steady import SteadyProbe

STEPS = 60


WITHOUT: list[None] = []
"""Not empty while the loops have their batches from no DataLoader."""


def batches(number: int = 12, size: int = 4) -> Any:
    if WITHOUT:
        return [(batch,) for batch in torch.randn(number, size, 3)]
    return from_loader(number, size)


class Watched(SteadyProbe):
    """Prints how many updates were noted before they were taken up."""

    def _catch_up(self) -> None:
        before = self._updates
        super()._catch_up()
        with Path(f"{self._address}.noted").open("a") as file:
            print(self._updates - before, file=file)


class Layer(nn.Module):
    """A module of the class of the model, inside of it."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, given: Any, *more: Any) -> Tensor:
        tensor = given["x"] if isinstance(given, dict) else given
        result: Tensor = self.inner(tensor)
        return result


class Usual(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.data = batches(STEPS)
        self.model = Layer(nn.Linear(3, 5), Layer(nn.ReLU()), nn.Linear(5, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class ByEpoch(Usual):
    def __call__(self) -> None:
        self.data = batches(7)
        for _ in range(9):
            for (batch,) in self.data:
                self.step(batch)


class Evaluating(Usual):
    def __call__(self) -> None:
        for _ in range(3):
            self.model.train()
            for (batch,) in self.data:
                self.step(batch)
            self.model.eval()
            with torch.no_grad():
                for (batch,) in batches(5):
                    self.model(batch)


class SettingTheMode(Usual):
    def step(self, batch: Tensor) -> None:
        self.model.train()
        super().step(batch)


class TurningTheModeOff(Usual):
    """Evaluates without a call of `eval`, within a step."""

    def step(self, batch: Tensor) -> None:
        if len(self.losses) % 20 == 15:
            self.model.training = False
            with torch.no_grad():
                self.model(batch)
            self.model.training = True
        super().step(batch)


class Accumulating(Usual):
    def __call__(self) -> None:
        for number, (batch,) in enumerate(self.data):
            self.model(batch).square().mean().backward()
            if number % 3 == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()


class AddingLosses(Usual):
    def __call__(self) -> None:
        for (batch,) in self.data:
            self.optimizer.zero_grad()
            (self.model(batch).square().mean() + self.model(batch + 1).square().mean()).backward()
            self.optimizer.step()


class Failing(Usual):
    """Fails in one forward pass, one backward pass, and one update, each of which the program survives."""

    def step(self, batch: Tensor) -> None:
        number = len(self.losses)
        if number == 25:
            with contextlib.suppress(RuntimeError):
                self.model(torch.randn(4, 7))
        if number == 33:
            with contextlib.suppress(RuntimeError):
                torch.randn(3, requires_grad=True).backward()
        if number == 41:
            group = self.optimizer.param_groups[0]
            group["lr"] = "fast"
            with pytest.raises(TypeError):
                self.optimizer.step()
            group["lr"] = 0.1
        super().step(batch)


class Clipping(Usual):
    """Differentiates by parameters for a penalty in some steps."""

    def step(self, batch: Tensor) -> None:
        if len(self.losses) % 16 == 12:
            torch.autograd.grad(self.model(batch).sum(), list(self.model.parameters()))
        super().step(batch)


class WithRegions(Usual):
    def step(self, batch: Tensor) -> None:
        if len(self.losses) < 30:
            super().step(batch)
            return
        with torch.profiler.record_function("mine"):
            torch.ones(3).sum()
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


class RegionInside(Usual):
    """A region of the program begins in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_forward_pre_hook(self._pre)

    def _pre(self, *_: Any) -> None:
        if len(self.losses) > 30:
            with torch.profiler.record_function("inside"):
                torch.ones(3).sum()


class WithTeacher(Usual):
    def step(self, batch: Tensor) -> None:
        with torch.no_grad():
            self.teacher(batch)
        super().step(batch)

    def __call__(self) -> None:
        self.teacher = Layer(nn.Linear(3, 2)).eval()
        super().__call__()


class LateModel(Usual):
    """Calls a second model, which an optimizer has from the start, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.more.parameters()], lr=0.1)

    def step(self, batch: Tensor) -> None:
        if len(self.losses) < 30:
            super().step(batch)
            return
        self.optimizer.zero_grad()
        loss = self.more(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


class TwoModels(Usual):
    """Gives some batches to another module of the same class before the model."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Layer(nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.other.parameters()], lr=0.1)

    def step(self, batch: Tensor) -> None:
        if len(self.losses) % 9 < 3:
            self.other(torch.cat([batch, batch])).sum().backward()
        super().step(batch)


class LateOptimizer(Usual):
    def step(self, batch: Tensor) -> None:
        super().step(batch)
        if len(self.losses) == 30:
            self.other = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if len(self.losses) > 30:
            self.other.step()


class ByClosure(Usual):
    def step(self, batch: Tensor) -> None:
        if len(self.losses) % 10 != 9:
            super().step(batch)
            return

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            return float(loss.item())

        self.optimizer.step(closure)
        self.losses.append(0)


class OneBatchAgain(Usual):
    """Trains with a batch that it has kept, from some step on, and gives it to the model twice."""

    def __call__(self) -> None:
        self.draws = iter(self.data)
        for _ in range(STEPS - 20):
            self.step(next(self.draws)[0])
        for _ in range(30):
            self.optimizer.zero_grad()
            (self.model(self.kept) + self.model(self.kept)).square().mean().backward()
            self.optimizer.step()

    def step(self, batch: Tensor) -> None:
        self.kept = batch
        super().step(batch)


class Skipping(Usual):
    def __call__(self) -> None:
        for number, (batch,) in enumerate(self.data):
            if number % 7 != 6:
                self.step(batch)


class Sizes(Usual):
    """Gives batches of different sizes, with a last one of one sample."""

    def __call__(self) -> None:
        data = TensorDataset(torch.randn(3 * 14 + 1, 3))
        for _ in range(4):
            for (batch,) in DataLoader(data, batch_size=3):
                self.step(batch[: 1 + len(self.losses) % 3])


class Given(Usual):
    """Gives the model a mapping."""

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model({"x": batch}).square().mean().backward()
        self.optimizer.step()
        self.losses.append(0)


class Doubling(Dataset[Any]):
    """Calls a model, and draws from a DataLoader, to make samples."""

    def __init__(self) -> None:
        self.model = Layer(nn.Linear(3, 3)).eval()
        self.inner = iter(from_loader(1000, 1))

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor]:
        with torch.no_grad():
            return (self.model(next(self.inner)[0])[0],)


class Nested(Usual):
    def __call__(self) -> None:
        for (batch,) in DataLoader(Doubling(), batch_size=2):
            self.step(batch)


class InThread(Usual):
    """Goes on in another thread."""

    def __call__(self) -> None:
        draws = iter(self.data)
        for _ in range(30):
            self.step(next(draws)[0])
        thread = threading.Thread(target=self.go_on, args=(draws,))
        thread.start()
        thread.join()

    def go_on(self, draws: Any) -> None:
        for (batch,) in draws:
            self.step(batch)


class Forking(Usual):
    def step(self, batch: Tensor) -> None:
        if len(self.losses) == 30 and not os.fork():
            super().step(batch)
            os._exit(0)
        super().step(batch)


class Recomputing(Usual):
    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        result = torch.utils.checkpoint.checkpoint(self.model, batch.requires_grad_(), use_reentrant=False)
        result.square().mean().backward()
        self.optimizer.step()
        self.losses.append(0)


class Saving(Usual):
    def step(self, batch: Tensor) -> None:
        super().step(batch)
        if len(self.losses) % 20 == 0:
            torch.save(self.model.state_dict(), os.devnull)


class Autocast(Usual):
    def step(self, batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            super().step(batch)


class InnerAutocast(Usual):
    def __init__(self) -> None:
        super().__init__()
        forward = self.model.forward

        def cast(*args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=len(self.losses) > 30):
                return forward(*args)

        self.model.forward = cast


class Breaking(Usual):
    """Leaves each pass before its end, and its iterator with it."""

    def __call__(self) -> None:
        for _ in range(5):
            for (batch,), _ in zip(batches(40), range(14), strict=False):
                self.step(batch)


class Reused(Usual):
    """Workers that stay begin each pass with the same iterator."""

    def __call__(self) -> None:
        data = DataLoader(TensorDataset(torch.randn(80, 3)), batch_size=4, num_workers=1, persistent_workers=True)
        for _ in range(3):
            for (batch,) in data:
                self.step(batch)


class Looking(Usual):
    """Draws from the DataLoader for evaluation without evaluating."""

    def __call__(self) -> None:
        other = batches(5)
        for number, (batch,) in enumerate(self.data):
            if number in (25, 45):
                next(iter(other))
            self.step(batch)


class Ending(Usual):
    """Ends in the middle of a step."""

    def __call__(self) -> None:
        for (batch,) in self.data:
            if len(self.losses) == 45:
                self.model(batch)
                return
            self.step(batch)


class Compiled(Usual):
    """Compiles again for another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="eager", dynamic=False)  # type: ignore[assignment]

    def step(self, batch: Tensor) -> None:
        super().step(batch[:3] if len(self.losses) > 40 else batch)


class BeginningAnew(Usual):
    """Leaves two passes for others after a batch of each, as loops over tasks do."""

    def __call__(self) -> None:
        draws = iter(self.data)
        for number in range(STEPS - 10):
            (batch,) = next(draws)
            if number in (12, 33):
                draws = iter(self.data)
                (batch,) = next(draws)
            self.step(batch)


class Together(Usual):
    """Draws from two DataLoaders for each step."""

    def __call__(self) -> None:
        for (batch,), (more,) in zip(self.data, batches(STEPS), strict=True):
            self.step(torch.cat([batch, more]))


class Perturbing(Usual):
    """Takes a second gradient with the same batch and other parameters, from some step on."""

    def step(self, batch: Tensor) -> None:
        if len(self.losses) > 20:
            self.model(batch).square().mean().backward()
            with torch.no_grad():
                for each in self.model.parameters():
                    each.mul_(1.01)
        super().step(batch)


class Vectors(Usual):
    """Gives vectors, which are one sample if they are real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Mean()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: Tensor) -> None:
        super().step(batch[0] if len(self.losses) % 2 else torch.randint(0, 10, (3,)))


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, given: Tensor) -> Any:
        return self.inner(given.float().mean()[None])


class CountingAnew(Compiled):
    """Resets the counters of torch.compile before it compiles again."""

    def step(self, batch: Tensor) -> None:
        if len(self.losses) == 36:
            torch._dynamo.utils.counters.clear()
        super().step(batch)


class Feeding(Usual):
    """Gives the model what it has returned, from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Layer(nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = torch.randn(4, 3)

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        result = self.model(self.state if len(self.losses) > 40 else batch)
        result.square().mean().backward()
        self.optimizer.step()
        self.state = result.detach()[1:]
        self.losses.append(0)


class SameBatch(Usual):
    """Gives the model the same batch twice in some steps."""

    def step(self, batch: Tensor) -> None:
        if len(self.losses) % 16 == 12:
            self.model(batch).square().mean().backward()
        super().step(batch)


class LossOfRows(Usual):
    """Has a loss of fewer rows than the model is given."""

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch)[: 1 + len(self.losses) % 2].square().mean().backward()
        self.optimizer.step()
        self.losses.append(0)


LOOPS: dict[type[Usual], int] = {
    Usual: 20, ByEpoch: 5, Evaluating: 20, SettingTheMode: 20, TurningTheModeOff: 8, Accumulating: 3, AddingLosses: 20,
    Failing: 5, Clipping: 8, WithRegions: 8, RegionInside: 8, WithTeacher: 0, LateModel: 8, TwoModels: 5, Vectors: 20,
    LateOptimizer: 8, ByClosure: 5, OneBatchAgain: 8, Skipping: 20, Sizes: 8, Given: 20, Nested: 0, InThread: 8,
    Forking: 20, Recomputing: 20, Saving: 8, Autocast: 20, InnerAutocast: 8, Breaking: 8, Reused: 8, Looking: 8,
    Ending: 8, Compiled: 8, CountingAnew: 8, Together: 0, Perturbing: 20,
    BeginningAnew: 8,
}  # fmt: skip
"""Loops, with the number of updates that are noted in a row at least once."""
WITHOUT_LOADER: dict[type[Usual], int] = {
    Usual: 20, ByEpoch: 20, Evaluating: 20, SettingTheMode: 20, TurningTheModeOff: 8, Accumulating: 0, AddingLosses: 0,
    Failing: 5, Clipping: 8, WithRegions: 8, RegionInside: 8, WithTeacher: 0, LateModel: 8, TwoModels: 5, Vectors: 20,
    LateOptimizer: 8, ByClosure: 5, OneBatchAgain: 8, Skipping: 20, Given: 0, InThread: 8, Forking: 20, Recomputing: 20,
    Saving: 8, Autocast: 20, InnerAutocast: 8, Ending: 8, Compiled: 8, CountingAnew: 8, Together: 20, Feeding: 8,
    SameBatch: 5, LossOfRows: 0, Perturbing: 5,
}  # fmt: skip


def found(folder: Path, loop: Callable[[], Loop], probe: type[Probe], steps: int | str = "all") -> Measured:
    folder.mkdir()
    return probed(folder, lambda: loop()(), probe=probe, steps=steps)


@pytest.fixture(autouse=True)
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any length are noted, and the same ones are looked at closely in each run."""
    monkeypatch.setattr(steady, "LATER", 1)
    monkeypatch.setattr(given_samples, "MOST_LOOKS", 4)
    monkeypatch.setattr("gpubench.probe.spot_checks.os.urandom", lambda number: bytes([5] * number))
    monkeypatch.setattr("gpubench.probe.host.FLUSH_SECONDS", 1000.0)


def described(found: Measured) -> dict[str, Any]:
    """Returns what does not depend on time."""
    assert found.code == 0
    done = found.events["repeatdone"]
    steps = [(step["samples"], step["loss"], sorted(step["phases"]), step.get("skipped")) for step in found.steps]
    others = [event for event in found.all if event["event"] in ("log", "graphscompiled", "treatmentsmissed")]
    return {
        "code": found.code,
        "steps": steps,
        "work": done["work"],
        "samples": done["samples_from"],
        "partial": done["partial_first"],
        "others": [{key: value for key, value in event.items() if key != "time"} for event in others],
        "model": [
            {key: value for key, value in event.items() if key != "seconds"}
            for event in found.all
            if event["event"] == "modelbuilt"
        ],
    }


@pytest.mark.parametrize(("loop", "noted"), LOOPS.items(), ids=[loop.__name__ for loop in LOOPS])
def test_what_is_noted_leads_to_the_same_as_what_is_taken_up_at_once(
    tmp_path: Path, loop: type[Usual], noted: int
) -> None:
    check(tmp_path, loop, noted)


@pytest.mark.parametrize(("loop", "noted"), WITHOUT_LOADER.items(), ids=[loop.__name__ for loop in WITHOUT_LOADER])
def test_so_it_does_without_a_loader(
    tmp_path: Path, loop: type[Usual], noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_steady.WITHOUT", [None])
    check(tmp_path, loop, noted)


def check(tmp_path: Path, loop: type[Usual], noted: int) -> None:
    usual, quick = found(tmp_path / "usual", loop, Probe), found(tmp_path / "quick", loop, Watched)
    assert described(quick) == described(usual)
    counts = [int(line) for line in (tmp_path / "quick" / "host.noted").read_text().split()]
    assert max(counts) >= noted
    done = quick.events["repeatdone"]
    assert sum(step["total"] for step in quick.steps) == pytest.approx(done["wall"], abs=1e-6)


@pytest.mark.parametrize("steps", [20, 33, 47])
def test_the_program_ends_after_the_last_step_to_measure(tmp_path: Path, steps: int) -> None:
    usual, quick = (found(tmp_path / probe.__name__, ByEpoch, probe, steps) for probe in (Probe, SteadyProbe))
    assert described(quick) == described(usual)
    assert len(quick.steps) == steps + WARMUP


def test_of_long_steps_few_are_noted_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together at a flush would make one step in some dozens seem slow."""
    monkeypatch.setattr(steady, "LONG", 0)
    monkeypatch.setattr(steady, "LATER", 10**12)
    found(tmp_path / "quick", Usual, Watched)
    assert {int(line) for line in (tmp_path / "quick" / "host.noted").read_text().split()} == {0}


INTERRUPTED = 600
"""The steps of a loop that signals interrupt."""
SIGNALS = 0.0007
"""The seconds between two signals."""
PROBE = str(Path(steady.__file__).parent)


class Known(SteadyProbe):
    """Is known to the loop that it measures."""

    latest: "Known"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Known.latest = self


class Interrupted(Usual):
    """Has a handler of signals that does what the hooks see, wherever the program is."""

    def __init__(self, handle: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.data = batches(INTERRUPTED)
        self.handle = handle

    def __call__(self) -> None:
        self.handle(self.model)  # which may import something
        signal.signal(signal.SIGALRM, lambda *_: self.handle(self.model))
        signal.setitimer(signal.ITIMER_REAL, SIGNALS, SIGNALS)
        super().__call__()
        signal.setitimer(signal.ITIMER_REAL, 0)


BEFORE_SIGNALS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}
"""The instructions of Python after which it handles signals."""


@functools.cache
def after_signals(code: CodeType) -> set[int]:
    """Returns the instructions of a function before which Python handles signals."""
    instructions = list(dis.get_instructions(code))
    return {then.offset for one, then in itertools.pairwise(instructions) if one.opname in BEFORE_SIGNALS}


class InterruptedEverywhere(Interrupted):
    """Handles a signal in each place of the probe where Python may, both while steps are noted and while not."""

    interrupted: ClassVar[set[tuple[CodeType, int, bool]]] = set()

    def __call__(self) -> None:
        self.handle(self.model)
        sys.settrace(self.trace)
        Usual.__call__(self)
        sys.settrace(None)
        assert {noted for *_, noted in self.interrupted} == {False, True}

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        if len(self.losses) % 4 == 3:
            self.handle(self.model)
        self.optimizer.step()
        self.losses.append(loss.item())

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PROBE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in after_signals(frame.f_code):
            place = frame.f_code, frame.f_lasti, Known.latest._notes.steady
            if place not in self.interrupted:
                self.interrupted.add(place)
                self.handle(self.model)
        return self.trace


def saves(model: nn.Module) -> None:
    torch.save(model.state_dict(), os.devnull)


def names_a_region(model: nn.Module) -> None:
    with torch.profiler.record_function("mine"):
        pass


@pytest.mark.parametrize("without", [[], [None]], ids=["loader", "list"])
@pytest.mark.parametrize(
    ("loop", "handle"),
    [
        (Interrupted, saves),
        (InterruptedEverywhere, saves),
        (InterruptedEverywhere, names_a_region),
        (InterruptedEverywhere, nn.Module.train),
    ],
)
def test_signals_may_be_handled_anywhere(
    tmp_path: Path,
    loop: type[Interrupted],
    handle: Callable[[nn.Module], object],
    without: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("test_steady.WITHOUT", without)
    if loop is InterruptedEverywhere:
        monkeypatch.setattr(steady, "MOST_WAITS", 0)  # so that as many steps as possible are noted
    measured = found(tmp_path / "quick", lambda: loop(handle), Known)
    assert measured.code == 0
    assert len(measured.steps) == INTERRUPTED
    known = measured.steps[2:]  # the modules are looked for in step 1
    assert {step["samples"] for step in known} == {4}
    assert min(seconds for step in known for seconds in step["phases"].values()) >= 0
    assert all({"forward", "backward", "optimizer"} <= step["phases"].keys() for step in known)


class Words(Usual):
    """Does what the letters of a text say, in their order."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words
        self.teacher = nn.Sequential(nn.Linear(3, 1))
        self.data = batches(400)
        self.draws = iter(self.data)
        self.batch, self.loss = torch.randn(4, 3), torch.zeros(())

    def __call__(self) -> None:
        for word in self.words:
            getattr(self, WORDS[word])()

    def draw(self) -> None:
        (self.batch,) = next(self.draws)

    def draw_without_gradients(self) -> None:
        with torch.no_grad():
            self.draw()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def call(self) -> None:
        self.loss = self.model(self.batch).square().mean()

    def backward(self) -> None:
        if self.loss.requires_grad:
            with contextlib.suppress(RuntimeError):  # an update since the call has changed the parameters
                self.loss.backward()
            self.loss = torch.zeros(())

    def update(self) -> None:
        self.optimizer.step()

    def update_with_closure(self) -> None:
        self.optimizer.step(lambda: self.model(self.batch).square().mean().item())

    def train(self) -> None:
        self.model.train()

    def evaluate(self) -> None:
        self.model.eval()

    def call_without_gradients(self) -> None:
        with torch.no_grad():
            self.model(self.batch)

    def call_another(self) -> None:
        self.loss = self.teacher(self.batch).square().mean()

    def fail(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.model(torch.randn(4, 7))

    def region(self) -> None:
        with torch.profiler.record_function("mine"):
            torch.ones(1).sum()

    def begin_pass(self) -> None:
        self.draws = iter(self.data)


WORDS = {
    "d": "draw", "q": "draw_without_gradients", "z": "clear", "c": "call", "b": "backward", "u": "update",
    "C": "update_with_closure", "t": "train", "e": "evaluate", "n": "call_without_gradients", "a": "call_another",
    "f": "fail", "r": "region", "l": "begin_pass",
}  # fmt: skip
USUAL = ["dzcbu", "zdcbu", "dcbuz", "dzcbcbu", "dcbdcbuz", "dzccbu", "tdzcbu", "ddzcbu", "dzcbudzcbu"]
"""Steps of loops."""
THOROUGH = 100
PLACES = st.integers(60, 199)


# The same ones each time, but for those of make stress.
@settings(derandomize=settings().max_examples < THOROUGH, max_examples=settings().max_examples // 2)
@given(
    usual=st.sampled_from(USUAL),
    others=st.lists(st.tuples(PLACES, st.text("".join(WORDS), min_size=1, max_size=4)), max_size=6),
    missing=st.lists(PLACES, max_size=3),
    without=st.sampled_from([[], [None]]),
)
def test_whatever_comes_between_usual_steps_leads_to_the_same(
    usual: str, others: list[tuple[int, str]], missing: list[int], without: list[None]
) -> None:
    words = list(usual * 40)
    for place in missing:
        words[place] = ""
    for place, more in others:
        words[place] += more
    said = "".join(words)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_steady.WITHOUT", without)
        one, other = (found(Path(folder, each.__name__), lambda: Words(said), each) for each in (Probe, SteadyProbe))
        assert described(other) == described(one)
