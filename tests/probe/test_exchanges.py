"""What the probe tells the host of its tokens: by which of them the ends of steps are bounded."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from probing import Loop, probed
from torch import Tensor, nn

from gpubench.events import StepsMeasured
from gpubench.probe import host, timeline
from gpubench.probe.device import Timing
from gpubench.probe.hooks import Probe
from gpubench.probe.host import Host
from gpubench.probe.measured import MeasuredStep
from gpubench.runs.clocks import ClockRates, Exchanges

JOB = b'{"clock":[0.0,0.0],"machine":"","address":null}\n'


def rates(reports: Sequence[dict[str, Any]]) -> ClockRates | None:
    """The bounds that follow from reports, as a host has them."""
    exchanges = Exchanges()
    for report in reports:
        fields = {key: value for key, value in report.items() if key != "event"}
        exchanges.add(msgspec.convert(fields, StepsMeasured))
    return exchanges.rates()


class Slow(Loop):
    """A loop that leaves the host time to answer."""

    def step(self, batch: Tensor) -> None:
        time.sleep(0.01)
        super().step(batch)


def turns() -> None:
    """Two optimizers in turns, whose updates are held back until it is known which of them make a step."""
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    for _ in range(40):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("seconds", [0.0, 0.002, host.FLUSH_SECONDS])
@pytest.mark.parametrize("loop", [Loop(60), turns])
def test_a_step_ends_after_the_token_that_it_is_named_with_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Any, seconds: float
) -> None:
    monkeypatch.setattr(host, "FLUSH_SECONDS", seconds)
    found = probed(tmp_path, loop)
    assert found.code == 0
    named = [report for report in found.reports if report.get("token")]
    assert named
    for report in named:
        step, number = report["token"]
        assert report["steps"][0]["step"] <= step <= report["steps"][-1]["step"]
        if number:  # the host has sent it when it had read that report, so that its steps had ended
            assert step > found.reports[number - 1]["steps"][-1]["step"]
    assert [report["token"][1] for report in named] == sorted({report["token"][1] for report in named})
    assert not any(report["anew"] for report in found.reports[1:])
    bounds = rates(found.reports)
    assert bounds is None or bounds.low <= 1.0 <= bounds.high


@pytest.mark.parametrize("speed", [0.1, 10.0])
def test_the_bounds_are_those_of_the_clock_that_the_steps_are_timed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    real = Timing.now
    monkeypatch.setattr(Timing, "now", staticmethod(lambda: int(real() * speed)))
    found = rates(probed(tmp_path, Slow(40)).reports)
    assert found
    assert found.low <= 1 / speed <= found.high


def test_another_timeline_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Timing.add

    def moved(self: Timing, marks: Any, phases: dict[str, int]) -> int:
        place = add(self, marks, phases)
        return 0 if self.measured.total() >= 20 else place

    monkeypatch.setattr(Timing, "add", moved)
    monkeypatch.setattr(host, "FLUSH_SECONDS", 0.0)
    found = probed(tmp_path, Loop(60))
    anew = [report["steps"][0]["step"] for report in found.reports if report["anew"]]
    assert len(anew) == 2
    assert anew[0] == 0
    assert anew[1] <= 20


def test_a_step_that_is_a_share_of_a_longer_time_is_named_with_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end before the token that was read after the whole of it had been issued."""
    monkeypatch.setattr(
        Probe, "_described", lambda *_: MeasuredStep(0, 0, 0, 0, 1, {}, 1, 1, None, None, skipped=False)
    )
    probe = Probe("", {})
    for share in (True, False):
        part, later = timeline.LoopPart([("other", 0)]), timeline.LoopPart([("other", 0)])
        part.token, part.updates = 3, 1 + share
        later.token, later.whole = 4, part if share else None
        for each in (part, later):
            probe._step([each])
            assert probe._token == (None if share else (probe._sent - 1, each.token))


# What the host says.


@contextmanager
def said(folder: Path, *pieces: bytes) -> Iterator[tuple[Host, socket.socket]]:
    """A connection to a host that has said this after the job, in these pieces."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "host"))
        listener.listen()
        accepted: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listener.accept()
            accepted.append(connection)
            connection.recv(4096)
            for piece in pieces:
                connection.sendall(piece)

        serving = threading.Thread(target=serve)
        serving.start()
        made = Host(str(folder / "host"), 0, 1)
        serving.join()
        with accepted[0]:
            yield made, accepted[0]
        made.close()


PLANNED = b'{"event":"planned","rank":0,"repeat":0,"steps":40,"warmup":6,"each_update":false}\n'


@pytest.mark.parametrize("pieces", [(JOB + PLANNED,), (JOB, PLANNED), (JOB[:20], JOB[20:] + PLANNED)])
def test_the_length_of_a_repeat_is_heard_also_if_it_comes_with_the_job(tmp_path: Path, pieces: tuple[bytes]) -> None:
    with said(tmp_path, *pieces) as (made, _):
        assert made.job["machine"] == ""
        assert made.told_length() == (6, 40, False)
        assert made.take_token() == 0


def test_the_newest_token_is_taken_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    with said(tmp_path, JOB) as (made, host_side):
        made.flush()
        assert (made.take_token(), made.take_token()) == (0, None)
        host_side.sendall(b'{"token":1}\n{"token":2}\n{"tok')
        made.flush()
        assert (made.take_token(), made.take_token()) == (2, None)
        host_side.sendall(b'en":3}\n' + PLANNED)
        made.flush()
        assert made.take_token() == 3
        assert made.told_length() == (6, 40, False)


def test_a_host_that_says_nothing_or_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    with said(tmp_path, JOB) as (made, host_side):
        made.flush()
        assert made.told_length() is None
        host_side.shutdown(socket.SHUT_RDWR)
        made.flush()
        assert made.told_length() is None
