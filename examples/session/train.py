"""An ordinary training script that is slow for two reasons: its storage, and its optimizer."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES = 10


class Photos(Dataset[tuple[Tensor, int]]):
    """Small images that take 2 ms each to read, as from slow storage."""

    def __len__(self) -> int:
        return 16_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)
        return torch.full((3 * 16 * 16,), index % CLASSES / CLASSES), index % CLASSES


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out


def main() -> None:
    torch.manual_seed(0)
    width = 128
    model = nn.Sequential(nn.Linear(3 * 16 * 16, width), *[Block(width) for _ in range(64)], nn.Linear(width, CLASSES))
    photos = DataLoader(Photos(), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (images, labels) in enumerate(photos):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
