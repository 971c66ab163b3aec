import math

import pytest
import torch

from gpubench.worker.compute_rates import time_reference_workload


def test_the_reference_workload_takes_a_positive_time() -> None:
    seconds = time_reference_workload(0.01)
    assert math.isfinite(seconds)
    assert seconds > 0


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_the_reference_workload_draws_no_random_numbers(seconds: float) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    time_reference_workload(seconds)
    assert torch.equal(torch.rand(3), expected)
