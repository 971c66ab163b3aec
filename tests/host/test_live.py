import io
from collections import deque
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from gpubench.events import Step
from gpubench.host import live
from gpubench.host.live import LiveTable, ProgressLines, Silence, describe, draw, view_on
from gpubench.host.step_recorder import TrainProgress
from gpubench.kinds.memory import recorder as memory_recorder
from gpubench.kinds.memory.recorder import MemoryProgress
from gpubench.report.terminal import SilencedConsole
from gpubench.telemetry import CpuSample, GpuSample, TelemetrySample


def progress() -> TrainProgress:
    steps = [
        Step(0, 0, 1, i, 0.0, 0.1, {"forward": 0.025, "backward": 0.075}, 0.1, samples=32, loss=2.5) for i in range(10)
    ]
    telemetry = TelemetrySample(
        time=0.0,
        cost=0.0,
        gpus=[GpuSample(index=0, utilization=0.97, memory_used_bytes=3 << 30, power_w=412.0)],
        cpu=CpuSample(load=0.5, memory_rss_bytes=1 << 30),
    )
    return TrainProgress(1, 3, 2, planned=60, step=steps[-1], telemetry=telemetry, steps=deque(steps))


def rendered(found: TrainProgress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw("trial", found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_table_shows_where_the_run_stands() -> None:
    text = rendered(progress())
    for expected in (
        "trial",
        "repeat 2 of 3",
        "10 of 60",
        "epoch 1",
        "2.5000",
        "640 samples/s",
        "100 ms a step",
        "25 %  25 ms",
        "75 %  75 ms",
        "97 % busy   3 GiB   412 W",
        "50 % busy   1 GiB in the workers",
        "5 s in this repeat",
    ):
        assert expected in text, text


def test_on_a_narrow_terminal_bars_give_way_to_figures() -> None:
    text = rendered(progress(), width=40)
    assert "…" not in text
    assert "█" not in text
    for expected in ("640 samples/s   100 ms a step", "25 %  25 ms", "5 s in this repeat", "50 % busy   1 GiB in the"):
        assert expected in text, text


def test_before_the_first_step_the_table_says_what_is_being_done() -> None:
    assert "building the model" in rendered(TrainProgress(0, 3, doing="building the model"))
    assert describe(TrainProgress(0, 3, doing="counting_FLOPs")) == "repeat 1 of 3  counting FLOPs"


def test_a_line_holds_the_same_figures() -> None:
    assert describe(progress()) == "repeat 2 of 3  step 10/60  loss 2.5000  640 samples/s  100 ms"


def test_samples_that_are_unknown_give_no_rate() -> None:
    found = progress()
    found.steps = deque(msgspec.structs.replace(step, samples=0) for step in found.steps)
    found.step = found.steps[-1]
    assert describe(found) == "repeat 2 of 3  step 10/60  loss 2.5000  100 ms"
    assert "samples/s" not in rendered(found)
    assert "100 ms a step" in rendered(found)


def test_a_variant_is_named_before_its_repeat() -> None:
    found = replace(progress(), variant="data.workers=2")
    assert describe(found).startswith("data.workers=2, repeat 2 of 3  step 10/60")
    assert "data.workers=2, repeat 2 of 3" in rendered(found)
    found = replace(found, variant="HEAD", round="round 2 of at most 5")
    assert describe(found).startswith("HEAD, round 2 of at most 5  step 10/60")
    following = MemoryProgress(variant="data.workers=2", step=1, steps=5, doing="recording")
    assert memory_recorder.describe(following) == "data.workers=2, step 2/5  recording"


@pytest.mark.parametrize(("quiet", "terminal", "expected"), [(False, True, LiveTable), (False, False, ProgressLines)])
def test_the_table_is_for_terminals_and_lines_for_pipes(quiet: bool, terminal: bool, expected: type) -> None:
    console = SilencedConsole(file=io.StringIO(), force_terminal=terminal)
    assert type(view_on(console, live, quiet=quiet)) is expected


def test_quiet_shows_nothing() -> None:
    assert type(view_on(SilencedConsole(file=io.StringIO()), live, quiet=True)) is Silence
