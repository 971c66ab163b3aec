"""Hugging Face Trainer. Its claim is `train_samples_per_second`, which counts the whole of `train()`."""

from typing import Any

from batches import Batches, collate
from subject import LEARNING_RATE, Subject, build, start_stopwatch
from transformers import Trainer, TrainingArguments

subject = Subject.from_environment()
work = build(subject)


class OurLoss(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return work.loss(model, inputs["batch"])


arguments = TrainingArguments(
    output_dir=str(subject.path / "trainer"),
    max_steps=subject.total,
    per_device_train_batch_size=subject.batch_size,
    learning_rate=LEARNING_RATE,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,  # the others do not clip
    use_cpu=subject.device == "cpu",
    dataloader_pin_memory=False,  # the batches are on the device
    remove_unused_columns=False,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = OurLoss(
    work.module,
    arguments,
    data_collator=collate,
    train_dataset=Batches(subject, work.batches),
    optimizers=(work.optimizer, None),
)
start_stopwatch(subject)
subject.claim(trainer.train().metrics["train_samples_per_second"])
