"""A program that trains with one fault, or with none: `python faulty.py none|item|pageable|loader|float64|launches`.

Without a fault its batches are made by workers and copied from page-locked memory, its matrix products are large and in
TF32, and nothing reads a value of the device.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 60
BATCH = 64
WIDTH = 4096


class Samples(Dataset[torch.Tensor]):
    """Of `length` numbers each, each `seconds` apart as from a slow disk."""

    def __init__(self, length: int, seconds: float) -> None:
        self._sample = torch.ones(length)
        self._seconds = seconds

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._sample


def main(fault: str, width: int) -> None:
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    dtype = torch.float64 if fault == "float64" else torch.float32
    if fault == "float64":
        width = 3 * width // 8  # many GPUs compute it at a hundredth of the speed of TF32
    if fault == "launches":
        width //= 64
        layers: list[nn.Module] = [part for _ in range(100) for part in (nn.Linear(width, width), nn.Tanh())]
    else:
        layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    length = 64 * width if fault == "pageable" else width
    data = DataLoader(
        Samples(length, 2e-4 if fault == "loader" else 0.0),
        batch_size=BATCH,
        num_workers=0 if fault in ("loader", "pageable") else 2,
        pin_memory=fault != "pageable",
    )
    loss = torch.zeros(())
    for batch in data:
        held = batch.to(device, dtype, non_blocking=True)[:, :width]
        optimizer.zero_grad(set_to_none=True)
        loss = model(held.repeat(width // BATCH or 1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        if fault == "item":
            loss.item()
    print(float(loss))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else WIDTH)
