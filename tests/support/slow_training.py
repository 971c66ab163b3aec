"""A training program that is slow for two reasons: slow storage, and gradients that are reduced too often."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10


class Photos(Dataset[tuple[Tensor, int]]):
    """Small images that take 10 ms each to load, as from slow storage."""

    def __init__(self) -> None:
        self._pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.010)
        return self._pixels, index % CLASSES


def model() -> nn.Module:
    """Returns a model of 3.2 million parameters, whose gradients take longer to reduce than to compute."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def photos() -> Photos:
    return Photos()
