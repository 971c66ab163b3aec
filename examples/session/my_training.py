"""A training program of one's own, slow for two reasons: photos from a far drive, and gradients shared too often."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10


class Photos(Dataset[tuple[Tensor, int]]):
    """Small pictures that take 10 ms each to arrive, as over a network."""

    def __init__(self) -> None:
        self._pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.010)
        return self._pixels, index % CLASSES


def model() -> nn.Module:
    """3.2 million parameters: their gradients weigh more than the arithmetic."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def photos() -> Photos:
    return Photos()
