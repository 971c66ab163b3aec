"""How fast the machine itself is: a fixed piece of work that no model and no setting but the threads has a part in."""

import time

import torch

SECONDS = 0.1
PRODUCTS = 4
SIDE = 256
COPIED = 4_000_000  # 16 MB of fp32, more than most caches hold


def time_yardstick(seconds: float = SECONDS) -> float:
    """Mean time of PRODUCTS fp32 products of SIDE x SIDE matrices and a copy of COPIED numbers, for about `seconds`.

    The mean, and not the best: what neighbours take of the machine is to be seen. Draws no random numbers, so that the
    run behind it is the same with and without.
    """
    matrix, numbers = torch.full((SIDE, SIDE), 1.0 / SIDE), torch.ones(COPIED)
    _work(matrix, numbers)
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not count:
        _work(matrix, numbers)
        count += 1
    return elapsed / count


def _work(matrix: torch.Tensor, numbers: torch.Tensor) -> None:
    for _ in range(PRODUCTS):
        matrix @ matrix
    numbers.clone()
