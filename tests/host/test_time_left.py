import time
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gpubench.events import Step
from gpubench.host import live
from gpubench.host.schedule import expected_end
from gpubench.host.step_recorder import TrainProgress


def recorder(*took: float, repeats: int = 3, profiled: bool = False, precision: float | None = None) -> Any:
    measurement = SimpleNamespace(repeats=repeats, target_precision=precision)
    settings = SimpleNamespace(measurement=measurement, profiling=SimpleNamespace(enabled=profiled))
    return SimpleNamespace(seconds=list(took), settings=settings)


@pytest.mark.parametrize(
    ("recorders", "left"),
    [
        ([recorder(), recorder()], None),
        ([recorder(10.0), recorder()], 50.0),
        ([recorder(10.0, 20.0), recorder(30.0, 20.0)], 40.0),
        ([recorder(10.0, profiled=True)], 30.0),
        ([recorder(10.0, precision=0.01)], None),
    ],
)
def test_the_time_left_is_that_of_all_repeats_of_all_sides(recorders: list[Any], left: float | None) -> None:
    found = expected_end(recorders, 1000.0)
    assert found == (None if left is None else 1000.0 + left)


def test_progress_says_the_time_left_once_it_is_known_and_phases_in_the_order_of_the_result() -> None:
    phases = {"other": 0.1, "forward": 0.3, "mine": 0.2, "data_wait": 0.4}
    progress = TrainProgress(repeat=1, repeats=3, variant="workers=2", planned=10)
    progress.take([Step(1, 0, 0, 0, time=0.0, total=1.0, phases=phases, host=0.1, samples=4)])
    assert [name for name, *_ in live._phases(progress)] == ["data_wait", "forward", "mine", "other"]
    assert "left" not in live.describe(progress)
    progress.ends = time.monotonic() + 3600.4
    assert live.describe(progress).startswith("workers=2, repeat 2 of 3  step 1/10")
    assert live.describe(progress).endswith("about 60 min left")


def test_progress_says_nothing_of_an_estimate_that_has_passed() -> None:
    progress = TrainProgress(repeat=0, repeats=1, planned=7, ends=time.monotonic() - 30)
    assert "left" not in live.describe(progress)
    progress.take([Step(0, 0, 0, 17, time=0.0, total=1.0, phases={"other": 1.0}, host=0.1, samples=4)])
    shown = StringIO()
    Console(file=shown, width=100).print(live.draw("mine", progress))
    for said in (live.describe(progress), shown.getvalue()):
        assert "18" in said
        assert "7" not in said.replace("17", "")
        assert "left" not in said
