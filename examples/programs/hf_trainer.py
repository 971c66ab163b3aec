"""The Trainer of Hugging Face transformers: a small GPT-2 with random weights, accumulation and evaluation."""

import argparse
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Counting(Dataset):
    """Sequences that count up from a random number."""

    def __init__(self, samples: int) -> None:
        self.starts = torch.randint(100, (samples,))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.starts[index] + torch.arange(32)) % 100
        return {"input_ids": tokens, "labels": tokens}


class Print(TrainerCallback):
    def on_log(self, arguments, state, control, logs, **kwargs) -> None:
        for name in sorted(logs.keys() & {"loss", "eval_loss"}):
            print(f"step {state.global_step} {name} {logs[name]!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=20,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            torch_compile=options.compile,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Counting(160), eval_dataset=Counting(32), callbacks=[Print()])
        print(f"steps {trainer.train().global_step}")


if __name__ == "__main__":
    main()
