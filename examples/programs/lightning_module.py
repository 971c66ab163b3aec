"""Lightning: a LightningModule and a Trainer with accumulation, clipping and a validation loop."""

import argparse
from tempfile import TemporaryDirectory

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
        self.net = torch.compile(net) if compiled else net

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        print(f"batch {number} loss {loss.item()!r}")
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        inputs, labels = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

    def on_validation_epoch_end(self) -> None:
        print(f"accuracy {self.trainer.callback_metrics['accuracy'].item()!r}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(samples: int, *, shuffle: bool) -> DataLoader:
    inputs = torch.randn(samples, 64)
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=16, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    with TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=arguments.epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            enable_progress_bar=False,
            logger=False,
        )
        trainer.fit(Classifier(compiled=arguments.compile), loader(640, shuffle=True), loader(160, shuffle=False))
        print(f"steps {trainer.global_step}")


if __name__ == "__main__":
    main()
