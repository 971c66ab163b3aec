"""Hugging Face Accelerate: a loop with prepare(), accumulate(), clipping and evaluation."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(samples: int, *, shuffle: bool) -> DataLoader:
    inputs = torch.randn(samples, 64)
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=16, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
    if arguments.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule, training, held_out = accelerator.prepare(
        model, optimizer, schedule, loader(640, shuffle=True), loader(160, shuffle=False)
    )
    steps = 0
    for epoch in range(arguments.epochs):
        for inputs, labels in training:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accelerator.print(f"step {steps} loss {loss.item()!r}")
        model.eval()
        with torch.no_grad():
            right = [(model(inputs).argmax(1) == labels).float().mean() for inputs, labels in held_out]
        model.train()
        accelerator.print(f"epoch {epoch} accuracy {accelerator.gather(torch.stack(right)).mean().item()!r}")
    accelerator.print(f"steps {steps}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
