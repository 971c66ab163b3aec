"""Predictions of memory, held to what is measured."""

from collections.abc import Iterator

from gpu_jobs.card import Card
from gpu_jobs.job import RUNS, Job
from gpubench.zoo import find

TINY = ("--device=cpu", "--performance.cpu_threads=1", "--batch-size=4")
REHEARSED = {
    "resnet50": (*TINY, "--model=resnet-tiny", "--data.image_size=32"),
    "gpt2": (*TINY, "--model=gpt2-tiny", "--data.sequence_length=32"),
    "bert-large": (*TINY, "--model=bert-tiny", "--data.sequence_length=32"),
    "sd15-unet": (*TINY, "--model=sd15-unet-tiny", "--data.image_size=64"),
}
"""By preset."""
CASES = (
    ("gpt2", "bf16", "adamw", False),
    ("resnet50", "fp32", "sgd", False),
    ("sd15-unet", "bf16", "adamw", False),
    ("bert-large", "bf16", "sgd", True),
    ("gpt2", "fp32", "adamw", True),
    ("resnet50", "bf16", "adamw", False),
)
"""Preset, precision, optimizer, checkpointing: each family of models, and each factor at both of its levels."""
READ_BACK = CASES[0]


def memories(card: Card) -> Iterator[Job]:
    """Three steps each, at the model's own batch where that fits; the prediction runs beside the measurement."""
    for case in CASES:
        preset, wanted, optimizer, checkpointing = case
        precision = card.half if wanted == "bf16" else wanted
        batch = card.batch(preset, find(preset).batch_size_cuda)
        options = (
            *("benchmarks/memory_check.py", "--results", RUNS, f"--config={preset}", f"--precision={precision}"),
            *(f"--training.optimizer={optimizer}", f"--batch-size={batch}", "--logging.graph=false"),
            *("--model.activation_checkpointing=true",) * checkpointing,
            *("--read-back",) * (case == READ_BACK),
        )
        yield Job(
            f"memory-{preset}-{precision}-{optimizer}{'-checkpointing' * checkpointing}",
            options,
            f"{preset}, {precision}, {optimizer}{', checkpointing' * checkpointing}, batch {batch}",
            60.0 if preset == "sd15-unet" else 30.0,
            REHEARSED[preset],
            fits=bool(batch),
        )
