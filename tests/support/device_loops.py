"""Loops on GPUs that run with the probe in them, or without it, each in a fork of this process.

    python device_loops.py

reads requests from its input, one JSON object a line, and answers each with a line. It never uses CUDA itself, so that
its forks can: a process of pytest may have used it in another test. Each loop tells what it measures with events of its
own, as `told`.
"""

import ctypes
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from probing import probed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpubench.probe import device as probed_device
from gpubench.probe.calls import CallProbe
from gpubench.probe.steady import SteadyProbe

STEPS, SIZE, WIDTH = 24, 8, 16
CYCLES = 19_800_000
"""Of the clock of a simulated device: 10 ms."""
told: dict[str, Any] = {}


class Stopwatch:
    """The program's own events at the ends of its steps."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def tell(self) -> None:
        torch.cuda.synchronize(self._device)
        told["laps"] = [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._events)]


def model_on(device: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(f"cuda:{device}")


def batches(steps: int = STEPS) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(torch.randn(steps * SIZE, WIDTH)), batch_size=SIZE)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def plain(device: int = 0, before: Callable[[int], object] = lambda step: None, steps: int = STEPS) -> None:
    """Trains on a device that need not be the current one; `before` is called before each step."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = Stopwatch(device)
    losses = []
    for step, (batch,) in enumerate(batches(steps)):
        before(step)
        optimizer.zero_grad()
        loss = loss_of(model, batch.to(f"cuda:{device}"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        watch.lap()
    watch.tell()
    told["losses"] = [loss.item() for loss in losses]


def within(device: int = 1) -> None:
    """Has each step in a context of the device, and the rest outside of it."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = Stopwatch(device)
    for (batch,) in batches():
        with torch.cuda.device(device):
            optimizer.zero_grad()
            loss_of(model, batch.cuda()).backward()
            optimizer.step()
            watch.lap()
    watch.tell()


def switched(device: int = 0) -> None:
    """Sets another current device after some steps, and goes on where it was."""
    plain(device, lambda step: torch.cuda.set_device(1 - device) if step == 3 else None)


def moved() -> None:
    """Moves to another device after some steps."""
    model = model_on(0)
    for device, steps in ((0, 4), (1, 3 * STEPS)):
        model.to(f"cuda:{device}")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        watch = Stopwatch(device)
        for (batch,) in batches(steps):
            optimizer.zero_grad()
            loss_of(model, batch.to(f"cuda:{device}")).backward()
            optimizer.step()
            watch.lap()
        watch.tell()


class Halves(nn.Module):
    """A model whose layers are on two devices, each of which computes for `cycles` in addition."""

    def __init__(self, cycles: int = 0) -> None:
        super().__init__()
        self.cycles = cycles
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to("cuda:0")
        self.second = nn.Linear(WIDTH, 1).to("cuda:1")

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch.to("cuda:0"))
        for device in (0, 1):
            with torch.cuda.device(device):
                hidden = hidden.to(f"cuda:{device}")
                if self.cycles:
                    torch.cuda._sleep(self.cycles)
        return self.second(hidden)  # type: ignore[no-any-return]


def halves(last_first: bool = False) -> None:
    """Trains a model over two devices. With the `last_first`, its last parameter is not on the device of the loss."""
    model = Halves()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[::-1] if last_first else parameters, lr=1e-3)
    watch = Stopwatch(1)
    for (batch,) in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        watch.lap()
    watch.tell()


def adversaries() -> None:
    """Trains two models in turns, each on a device of its own; one needs what the other makes."""
    maker, critic = (nn.Linear(WIDTH, WIDTH).to(f"cuda:{device}") for device in (0, 1))
    of_maker, of_critic = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (maker, critic))
    watch = Stopwatch(0)
    for (batch,) in batches():
        made = maker(batch.to("cuda:0"))
        of_critic.zero_grad()
        loss_of(critic, made.detach().to("cuda:1")).backward()
        of_critic.step()
        of_maker.zero_grad()
        critic(made.to("cuda:1")).mean().to("cuda:0").backward()
        of_maker.step()
        watch.lap()
    watch.tell()


def by_hand(device: int = 1) -> None:
    """Updates its parameters itself."""
    weight = torch.ones(WIDTH, 1, device=f"cuda:{device}", requires_grad=True)
    for _ in range(40):
        (torch.ones(SIZE, WIDTH, device=f"cuda:{device}") @ weight).square().mean().backward()
        with torch.no_grad():
            weight -= 1e-3 * weight.grad  # type: ignore[operator]
            weight.grad = None


def beside(device: int = 0) -> None:
    """Updates on another stream than the rest of the step, and does not wait for it at the end of the step."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    side = torch.cuda.Stream(device)
    for (batch,) in batches():
        optimizer.zero_grad()
        with torch.cuda.stream(side):
            loss = loss_of(model, batch.to(f"cuda:{device}"))
            torch.cuda._sleep(4_000_000)
        loss.backward()
        optimizer.step()


def infer(device: int = 0) -> None:
    model = model_on(device).eval()
    watch = Stopwatch(device)
    with torch.inference_mode():
        for (batch,) in batches():
            model(batch.to(f"cuda:{device}"))
            watch.lap()
    watch.tell()


def infer_halves() -> None:
    model = Halves(CYCLES).eval()
    with torch.inference_mode():
        for (batch,) in batches():
            model(batch)
            torch.cuda.synchronize(1)


def graphed(device: int = 0, updates: int = 1, mode: str = "global", loader: bool = True, reads: bool = False) -> None:
    """Replays a graph of whole steps, as in torch's documentation; `updates` is their number in the graph."""
    torch.cuda.set_device(device)
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = torch.zeros(SIZE, WIDTH, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, given).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(updates):
            optimizer.zero_grad()
            loss = loss_of(model, given)
            loss.backward()
            optimizer.step()
    watch = Stopwatch(device)
    source = (batch for (batch,) in batches(STEPS)) if loader else (torch.randn(SIZE, WIDTH) for _ in range(STEPS))
    for batch in source:
        given.copy_(batch)
        graph.replay()
        if reads:
            loss.item()
        watch.lap()
    watch.tell()


def graphed_callables(device: int = 0) -> None:
    """Has the model's passes in graphs, and the update outside of them."""
    torch.cuda.set_device(device)
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = torch.zeros(SIZE, WIDTH, device=device)
    torch.cuda.make_graphed_callables(model, (given,))
    watch = Stopwatch(device)
    for (batch,) in batches():
        optimizer.zero_grad()
        loss_of(model, batch.to(device)).backward()
        optimizer.step()
        watch.lap()
    watch.tell()


def infer_graphed(device: int = 1) -> None:
    """Replays a graph of a call of the model."""
    torch.cuda.set_device(device)
    model = model_on(device).eval()
    given = torch.zeros(SIZE, WIDTH, device=device)
    with torch.inference_mode():
        model(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(given)
        watch = Stopwatch(device)
        for (batch,) in batches():
            given.copy_(batch)
            graph.replay()  # outside of this mode PyTorch 2.6 refuses it
            watch.lap()
    watch.tell()


def forbidden(call: str, mode: str, elsewhere: bool = False) -> None:
    """Makes a call during a capture, perhaps in another thread. Tells its error and that of the end of the capture."""
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    known = {"torch": torch, "value": torch.ones((), device="cuda"), "event": event, "other": other}
    event.record(other)
    torch.cuda.synchronize()
    told.update(error="", end="")

    def attempt() -> None:
        try:
            eval(call, known)
        except RuntimeError as error:
            told["error"] = str(error)

    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            if elsewhere:
                thread = threading.Thread(target=attempt)
                thread.start()
                thread.join()
            else:
                attempt()
    except RuntimeError as error:
        told["end"] = str(error)


def misplaced() -> None:
    """Has CUDA itself record an event on streams of its own device and of another one, which torch does not try."""
    event, streams = torch.cuda.Event(), [torch.cuda.Stream(device) for device in (0, 1)]
    event.record(streams[0])
    library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    handles = [ctypes.c_void_p(stream.cuda_stream) for stream in streams]
    told["codes"] = [library.cudaEventRecord(ctypes.c_void_p(event.cuda_event), handle) for handle in handles]


def strict(mode: str) -> None:
    """Has torch warn of, or refuse, each wait for the device."""
    model = model_on(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(SIZE, WIDTH).pin_memory().to("cuda:0", non_blocking=True)
    torch.cuda.set_sync_debug_mode(mode)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


LOOPS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        plain, within, switched, moved, halves, adversaries, by_hand, beside, infer, infer_halves, graphed,
        graphed_callables, infer_graphed, forbidden, misplaced, strict,
    )
}  # fmt: skip
OWNERS = {"Event": torch.cuda.Event, "cuda": torch.cuda, "torch": torch, "Tensor": Tensor}


def fail(name: str) -> None:
    """Makes a function of torch, such as "Event.query", raise an error where gpubench's module of devices calls it."""
    owner, _, function = name.partition(".")
    call = getattr(OWNERS[owner], function)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "gpubench.probe.device":
            raise RuntimeError(f"{name} fails here\nand more")
        return call(*args, **kwargs)

    setattr(OWNERS[owner], function, failing)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a loop in a fork. Returns its exit code, the events of the probe, what it told and what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run() -> None:
            printed = os.open(folder / "printed", os.O_CREAT | os.O_WRONLY)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            os.environ.update(request.get("environment", {}))
            for name in request.get("failing", ()):
                fail(name)
            probed_device.AT_ONCE = request.get("at_once", probed_device.AT_ONCE)
            try:
                LOOPS[request["loop"]](**request.get("options", {}))
            finally:
                (folder / "told").write_text(json.dumps(told))

        if request.get("probed", True):
            how = {key: request[key] for key in ("steps", "profiling", "follow") if key in request}
            kind = CallProbe if request.get("inference") else SteadyProbe
            done = probed(folder, run, probe=kind, **how)
            code, events = done.code, done.all
        else:
            child = os.fork()
            if not child:
                code = 1
                try:
                    run()
                    code = 0
                finally:
                    os._exit(code)
            code, events = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), []
        printed = (folder / "printed").read_text() if (folder / "printed").exists() else ""
        found = json.loads((folder / "told").read_text()) if (folder / "told").exists() else {}
    return {"code": code, "events": events, "told": found, "printed": printed}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
