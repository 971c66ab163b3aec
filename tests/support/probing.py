"""Training loops with the probe in them, each in a fork of the test's process.

In the fork the probe is installed as it is in a program of the user, and is the only rank of a host in this process.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # which optimizers import, so that not each fork does
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpubench.events import StepsMeasured
from gpubench.host.supervision import Peer
from gpubench.kinds.program.tokens import Tokens
from gpubench.probe.hooks import Probe
from gpubench.probe.steady import SteadyProbe
from gpubench.ranks import machine
from gpubench.settings.sections import ProfilingSettings

RECORDED = ProfilingSettings(enabled=True, wait=1, active=2, repeat=0, compress=False)

WARMUP = 3
SAMPLED = 3
"""The steps of a recording whose code is sampled."""


class Measured:
    """The events of a rank by their names, and the exit code of its process."""

    def __init__(self, events: list[dict[str, Any]], code: int) -> None:
        self.code = code
        self.all = events
        self.names = [event["event"] for event in events]
        self.events = {event["event"]: event for event in events}
        self.reports = [event for event in events if event["event"] == "stepsmeasured"]
        self.steps = [step for report in self.reports for step in report["steps"]]

    @property
    def missed(self) -> dict[str, str]:
        """The treatments that were not applied, each with the reason."""
        found: dict[str, str] = self.events["treatmentsmissed"]["missed"] if "treatmentsmissed" in self.events else {}
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """How the program runs, as the probe has found it."""
        found: dict[str, Any] = self.events["modelbuilt"]["settings"]
        return found

    def phases(self, since: int = 2) -> set[str]:
        """Returns the phases of the steps from number `since` on: the modules are looked for in step 1."""
        return {phase for step in self.steps[since:] for phase in step["phases"]}


def probed(
    folder: Path,
    loop: Callable[[], object],
    steps: int | str = "all",
    profiling: dict[str, Any] | None = None,
    treatments: dict[str, Any] | None = None,
    follow: int | None = None,
    leaves: bool = False,
    seconds: float | None = None,
    probe: type[Probe] = SteadyProbe,
) -> Measured:
    """Runs `loop` with the probe in a fork of this process, as the only rank of a host.

    `profiling` are the settings of a repeat that is recorded; None for one that is measured. `follow` is the number of
    steps whose memory is followed; None if it is not. `leaves` means that the host is gone after the handshake.
    `seconds` is the time for the steps, instead of their number. `probe` is that of training or of inference.
    """
    address = str(folder / "host")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        child = os.fork()
        if not child:
            kind = partial(probe, follows=True) if follow is not None else probe
            os._exit(run_probed(address, loop, treatments, kind))
        found: list[dict[str, Any]] = []
        serving = threading.Thread(
            target=_serve, args=(listener, None if seconds else steps, seconds, profiling, follow, leaves, found)
        )
        serving.start()
        _, status = os.waitpid(child, 0)
        listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which would try again if the listener had a timeout
        serving.join()
    return Measured(found, os.waitstatus_to_exitcode(status))


def run_probed(
    address: str,
    loop: Callable[[], object],
    treatments: dict[str, Any] | None = None,
    kind: Callable[[str, dict[str, Any]], Probe] = SteadyProbe,
) -> int:
    torch.set_num_threads(1)
    if compiler := sys.modules.get("torch._dynamo.utils"):
        compiler.counters.clear()  # of graphs that other tests of the forked process have compiled
    probe = kind(address, treatments or {})
    probe.install()
    code = 0
    try:
        loop()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # the fork must never return to pytest
        traceback.print_exc()
        code = 1
    if probe._following or (probe._host and not code):
        probe._leave()  # in a process of its own, an exit handler does this
    return code


def _serve(
    listener: socket.socket,
    steps: int | str | None,
    seconds: float | None,
    profiling: dict[str, Any] | None,
    follow: int | None,
    leaves: bool,
    found: list[dict[str, Any]],
) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    job = {
        "settings": {
            "training": {"steps": steps, "warmup_steps": None if seconds else WARMUP},
            "profiling": profiling,
            "memory": {"steps": follow},
        },
        "repeats": [0],
        "profiled": 0 if profiling else None,
        "sampled": SAMPLED,
        "clock": [time.time(), time.monotonic()],
        "machine": machine(),
        "seconds": seconds,
        "length": None,
    }
    with connection, connection.makefile("rb") as lines:
        found.append(json.loads(lines.readline()))
        tokens = Tokens()
        tokens.begin(0)
        connection.sendall(json.dumps(job).encode() + b"\n")
        if not leaves:
            with suppress(ConnectionResetError):  # the end of a rank that has not read the last token
                found.extend(
                    _exchanged(connection, tokens, line) for line in lines if line.endswith(b"\n")
                )  # as a host, which ignores half a line


def _exchanged(connection: socket.socket, tokens: Tokens, line: bytes) -> dict[str, Any]:
    """Answers a report of steps with a token, and adds the times to it, as a host does."""
    event: dict[str, Any] = json.loads(line)
    if event["event"] != "stepsmeasured":
        return event
    report = tokens.exchange(Peer(connection, heard=time.monotonic()), msgspec.json.decode(line, type=StepsMeasured))
    return event | {"sent": report.sent, "read": report.read}


def batches(number: int = 12, size: int = 4, workers: int = 0) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(torch.randn(number * size, 3)), batch_size=size, num_workers=workers)


class Loop:
    """A plain training loop, which keeps its losses."""

    def __init__(self, steps: int = 12) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Linear(5, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.data = batches(steps)
        self.losses: list[float] = []

    def __call__(self) -> None:
        for (batch,) in self.data:
            self.step(batch)

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
