"""Lightning. Its claim is what ThroughputMonitor logs of the last `steps` steps."""

from typing import Any

from batches import Batches, collate
from lightning.pytorch import LightningModule, Trainer  # type: ignore[import-not-found]
from lightning.pytorch.callbacks import ThroughputMonitor  # type: ignore[import-not-found]
from lightning.pytorch.loggers.logger import DummyLogger  # type: ignore[import-not-found]
from subject import Subject, build, start_stopwatch
from torch.utils.data import DataLoader

subject = Subject.from_environment()
work = build(subject)
logged: dict[str, float] = {}


class Training(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.module = work.module

    def training_step(self, inputs: Any) -> Any:
        return work.loss(self.module, inputs["batch"])

    def configure_optimizers(self) -> Any:
        return work.optimizer


class LastWord(DummyLogger):  # type: ignore[misc]
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        logged.update(metrics)


trainer = Trainer(
    max_steps=subject.total,
    accelerator="gpu" if subject.device == "cuda" else "cpu",
    devices=1,
    callbacks=[ThroughputMonitor(lambda _: subject.batch_size, window_size=subject.steps + 1)],
    logger=LastWord(),
    log_every_n_steps=subject.total,
    benchmark=True,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
start_stopwatch(subject)
trainer.fit(Training(), DataLoader(Batches(subject, work.batches), subject.batch_size, collate_fn=collate))
subject.claim(logged["train/device/samples_per_sec"])
