"""A program that trains for some time by the clock of the system, and whose own clock may be false.

    python clocked_program.py SECONDS SPEED [FILE]

SPEED is that of the clock by which the probe times its steps, which take some milliseconds: 1 for a true one. It makes
FILE when it begins to train.
"""

import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEP_SECONDS = 0.004
"""The least time of a step."""


def falsify(speed: float) -> None:
    """Replaces the clock of the probe, as code would that knows gpubench."""
    timing = next(module.Timing for name, module in list(sys.modules.items()) if name.endswith("probe.device"))
    real, began = timing.now, timing.now()
    timing.now = staticmethod(lambda: began + int((real() - began) * speed))
    for each in gc.get_objects():
        if isinstance(each, timing):
            each.mark = timing.now


def main() -> None:
    seconds, speed = map(float, sys.argv[1:3])
    torch.set_num_threads(1)
    if speed != 1:
        falsify(speed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for file in sys.argv[3:]:
        Path(file).touch()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        optimizer.zero_grad()
        model(torch.ones(64, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
