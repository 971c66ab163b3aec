"""A plain PyTorch loop: bf16 autocast, gradient accumulation and clipping, a schedule, evaluation and checkpoints."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED = 2


def loader(samples: int, *, shuffle: bool) -> DataLoader:
    inputs = torch.randn(samples, 64)
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=16, shuffle=shuffle)


@torch.no_grad()
def evaluate(model: nn.Module, data: DataLoader) -> float:
    model.eval()
    right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in data)
    model.train()
    return right / len(data.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    training, held_out = loader(640, shuffle=True), loader(160, shuffle=False)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
    if arguments.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * 20)
    steps = 0
    with TemporaryDirectory() as folder:
        for epoch in range(arguments.epochs):
            for number, (inputs, labels) in enumerate(training, 1):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATED
                loss.backward()
                if number % ACCUMULATED:
                    continue
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                steps += 1
                print(f"step {steps} loss {loss.item()!r}")
            print(f"epoch {epoch} accuracy {evaluate(model, held_out)!r}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "last.pt"))
    print(f"steps {steps}")


if __name__ == "__main__":
    main()
