import math

import pytest
import torch

from gpubench.yardstick import time_yardstick


def test_the_yardstick_takes_a_time_that_can_be_divided_by() -> None:
    seconds = time_yardstick(0.01)
    assert math.isfinite(seconds)
    assert seconds > 0


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_the_yardstick_leaves_the_random_numbers_of_the_run_alone(seconds: float) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    time_yardstick(seconds)
    assert torch.equal(torch.rand(3), expected)
