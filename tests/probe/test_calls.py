"""The calls of inference that are seen."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import probed
from torch import nn

from gpubench.probe.calls import CallProbe
from gpubench.probe.treatments import stand_in


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.inner(batch)


def test_a_call_counts_that_begins_while_another_thread_finds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served().eval()

    def serve() -> None:
        served(torch.rand(8, 3))

    beside = threading.Thread(target=serve)

    def interrupted(owner: Any, *args: Any) -> None:
        if owner is Served:
            beside.start()
            beside.join()
        stand_in(owner, *args)

    def run() -> None:
        for _ in range(4):
            serve()

    monkeypatch.setattr("gpubench.probe.calls.stand_in", interrupted)
    found = probed(tmp_path, run, probe=CallProbe)
    assert found.code == 0
    assert [step["samples"] for step in found.steps] == [8] * 5


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_inside_of_the_model_is_its_precision(tmp_path: Path, *, compiled: bool) -> None:
    class Casting(Served):
        def forward(self, batch: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(batch)

    def run() -> None:
        served = Casting().eval()
        if compiled:
            served.compile(backend="aot_eager")
        with torch.no_grad():
            for _ in range(4):
                served(torch.rand(8, 3))

    found = probed(tmp_path, run, probe=CallProbe)
    assert (found.code, found.settings["precision"]) == (0, "bf16")
