"""A program that trains and evaluates, whose modules take turns, that serves two at once, or that calls none.

Its argument says which.
"""

import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 4))
if kind == "both":
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        model.train()
        for _ in range(5):
            model(torch.rand(32, 16)).sum().backward()
            optimizer.step()
            time.sleep(0.02)
        model.eval()
        with torch.no_grad():
            for (batch,) in DataLoader(TensorDataset(torch.rand(64, 16)), batch_size=8):
                model(batch)
elif kind == "turns":  # in training mode, which is most likely a mistake
    encoder = nn.Linear(16, 16)
    with torch.inference_mode():
        for _ in range(40):
            encoded = encoder(torch.rand(8, 16))
            for _ in range(2):
                model(encoded)
elif kind == "threads":
    both_here = threading.Barrier(2)

    class Served(nn.Module):
        """A model whose calls begin in pairs, and which has calls of other modules inside."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            both_here.wait()
            for _ in range(5):
                made: torch.Tensor = self.inner(batch)
                time.sleep(0.001)
            return made

    served = Served().eval()

    @torch.inference_mode()
    def answer() -> None:
        served(torch.rand(8, 16))

    for _ in range(30):
        pair = [threading.Thread(target=answer) for _ in range(2)]
        for each in pair:
            each.start()
        for each in pair:
            each.join()
